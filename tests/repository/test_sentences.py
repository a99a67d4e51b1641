"Sentences, captions and alternative texts that say a number or a word which the store or a page's own output can contradict"

import inspect
import json
import re
from pathlib import Path

import numpy as np

from fedrepro.engine import evaluation
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.notebook import COPIES, code_links, read_ledger
from fedrepro.reporting.printed_claims import headline_sentences
from fedrepro.verdicts.claims import NOT_TESTED
from fedrepro.verdicts.headlines import headlines
from fedrepro.verdicts.scoreboard import totals
from fedrepro.verdicts.summaries import stored_runs
from fedrepro.verdicts.tables import table
from fedrepro.verdicts.verdicts import DECIDED

ROOT = Path(__file__).resolve().parents[2]


def page(name):
    "(all that a page says, all that it prints) of the notebook `name`"
    cells = json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text())["cells"]
    outputs = [o for c in cells for o in c.get("outputs", [])]
    texts = [o.get("text") or o.get("data", {}).get("text/plain") or [] for o in outputs]
    return "\n".join("".join(c["source"]) for c in cells), "\n".join("".join(t) for t in texts)


def wrong_counts(text, board):
    "The papers of a text whose 'D decided of R reachable' is not that of `board`, the totals at tier paper"
    said = re.findall(r"^\| \[(\w+)\].*?\| (\d+) decided of (\d+) reachable(.*?) \|", text, re.M)
    wrong = []
    for paper, decided, reachable, words in said:
        found = board.loc[paper]
        how = [f"{found[word]} {word}" for word in DECIDED if found[word]]
        right = (str(found.decided), str(found.reachable), f": {', '.join(how)}" if how else "")
        if (decided, reachable, words) != right:
            wrong.append(paper)
    return wrong if said else ["nothing"]


def test_the_readme_counts_what_the_store_decides(board):
    count = totals(board).set_index(["tier", "paper"]).loc["paper"]
    text = (ROOT / "README.md").read_text()
    assert not wrong_counts(text, count)
    assert wrong_counts("", count)
    planted = re.sub(r"(\d+) decided of", lambda m: f"{int(m[1]) + 1} decided of", text, count=1)
    assert wrong_counts(planted, count) == ["FedCCFA"]


def too_much(text):
    "Promises that no test keeps for every method or machine"
    return re.findall(
        r"same bits wherever|released code to nine\s+digits, the|every verdict of tier `paper` is",
        text,
    )


def test_no_page_promises_more_than_is_tested():
    assert not any(
        map(
            too_much,
            [(ROOT / "README.md").read_text(), page("index")[0], page("08_verdicts/04_claims")[0]],
        )
    )
    assert too_much("digits, the same bits wherever it runs.")


def apart(text, printed):
    "Whether what a text says of accuracies in float32 holds for the largest difference that its page prints"
    far = re.search(
        r"order of sums, float32\s+([\d.]+)", printed.split("accuracy apart at most (points)")[-1]
    )
    said = re.search(r"accuracies stay less than ([\d.]+) points apart", " ".join(text.split()))
    return bool(far and said) and float(far[1]) < float(said[1])


def test_the_same_bits_page_says_how_far_accuracies_are_apart():
    "How far depends on the processor, so it is a bound"
    text, printed = page("10_checks/02_same_bits")
    assert apart(text, printed)
    assert not apart(text.replace("less than 2 points", "less than 0.1 points"), printed)


def test_the_page_on_speed_says_how_evaluation_cuts_its_images():
    size = re.search(r"chunk or \((\d+) if", inspect.getsource(evaluation))[1]
    assert f"takes {size} images at a time" in page("13_reference/04_speed")[0]


def unnamed(text):
    "Captions and alternative texts about stored runs of FedDC that do not say that these are reduced"
    lines = re.findall(
        r"[^\n]*(?:FedDC's comparison on MNIST|the released code's examples)[^\n]*", text
    )
    return [line for line in lines if "reduced" not in line]


def test_reduced_runs_are_called_so():
    if not any((ROOT / "papers/feddc/results").glob("paper/*.jsonl")):
        assert not unnamed(page("06_methods/11_feddc")[0])
    assert unnamed("The comparison of the released code's examples, from the result files")


def test_the_ledger_names_where_the_paper_says_it_and_what_is_a_copy():
    entries = {e["name"]: e for e in read_ledger("fedccfa")}
    assert all(
        "B.2" in entries[name]["paper"]
        for name in ("Models of IFCA", "Weight and anchors of FedFM", "Local epochs")
    )
    spec = load_spec("fedccfa/table2")
    assert spec.base["epochs"].source.startswith("code")
    assert spec.rows["IFCA"].values["models"].source.startswith("code")
    for entry in entries.values():
        links = code_links(entry)
        assert links.count("in a copy of") == sum(
            links.count(f"github.com/{copy}/") for copy in COPIES
        ), entry["name"]
    assert "copy" not in code_links({"link": "https://github.com/gaoliang13/FedDC/blob/0/a.py#L1"})


def test_every_paper_has_a_headline_that_follows_from_the_store():
    found = [(h, headline_sentences(h)) for h in headlines()]
    assert {h.folder for h, _ in found} == {"fedadc", "fedbss", "fedccfa", "feddc", "lfd"}
    for h, said in found:
        assert h.claim in said
        assert h.reproduced or h.state in said
        assert h.tested or h.lacks or h.state == NOT_TESTED
        if h.ours:
            assert f"{h.ours.mean:.2f}" in said
            assert f"{h.gain:+.2f}" in said
    words = {h.folder: said for h, said in reversed(found)}  # of the first headline of each paper
    assert all(
        name in words["fedbss"]
        for name in ("FedAvg", "SCAFFOLD", "FedExP", "Against these three only")
    )
    assert "Against FedAvg only" in words["fedadc"]
    assert "Fashion-MNIST" in words["fedbss"].split("(abstract")[0]  # not so in every column
    assert "published +4.20 (the smallest published: +3.20, over FedAvg)" in words["lfd"]
    # AdapFedAvg shows the runs of FedAvg; p is corrected over the claims tested
    assert "above 0 in 12 of 12 comparisons" in words["fedccfa"]
    assert "3 of 9" in words["fedccfa"]


def test_lfd_is_lower_without_augmentation_as_the_caveat_says():
    mean = last("lfd/round22", "paper")["LfD", "CIFAR-10"]
    plain = last("lfd/round22_plain", "paper")["LfD", "CIFAR-10"]
    (said,) = [h.caveat for h in headlines(paper="lfd") if h.spec == "lfd/round22"]
    assert "Without augmentation LfD is lower still (one seed)" in said
    assert plain < mean < 71.5 and len(stored_runs(load_spec("lfd/round22_plain"), "paper")) == 2


def last(name, tier="small"):
    "(row, column) -> mean of the stored runs of a spec"
    found = table(load_spec(name), tier)
    return found[found.n > 0].set_index(["row", "column"])["mean"]


def test_captions_of_reduced_figures_are_those_of_their_runs():
    mean = last("fedadc/figure1")
    gaps = {
        s: [
            mean[row, f"CIFAR-10, s={s}"] - mean["SlowMo", f"CIFAR-10, s={s}"]
            for row in ("FedADC, blue (heavy ball)", "FedADC, red (Nesterov)")
        ]
        for s in (2, 3, 4)
    }
    assert max(map(abs, gaps[2])) < 1 < min(gaps[3] + gaps[4])
    caption = load_spec("fedadc/figure1").tier("small").caption
    assert "do not part FedADC from SlowMo with two classes" in caption
    assert "with three and four both variants are ahead" in caption
    mean = last("lfd/figure5")
    for column in mean.index.unique("column"):
        assert mean.xs(column, level="column").idxmin() == "MOON"
    caption = load_spec("lfd/figure5").tier("small").caption
    assert "MOON, with untuned weights, is behind all" in caption


def test_the_words_of_lfds_picture_are_those_of_its_runs():
    "Above the others in most rounds, with deep dips near the end, where all are close to 60 %"
    (words,) = re.findall(r'fig-alt: "(.*LfD\'s Table 4.*)"', page("06_methods/10_lfd")[0])
    assert "LfD above the others for most of the 100 rounds" in words
    assert "deep dips near the end, where all are close to 60 %" in words
    curves = {}  # accuracy by round, a row a seed
    for planned, run in stored_runs(load_spec("lfd/table4"), "paper"):
        curves.setdefault(planned.row, []).append(run.generalised_accuracy.to_numpy())
    means = {row: np.mean(runs, axis=0) for row, runs in curves.items()}
    lfd = means.pop("LfD")
    others = np.array(list(means.values()))
    assert others.shape == (5, 100)
    assert (lfd > others.max(axis=0)).sum() > 80
    falls = np.diff(lfd[80:])
    assert falls.min() < -5
    assert np.diff(others[:, 80:]).min() > falls.min()
    assert abs(np.array([lfd, *others])[:, -1] - 60).max() < 3
