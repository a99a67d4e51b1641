"Results pages: complete with no result at all, right with some, and nothing typed in"

import ast
import json
import math
import re
from pathlib import Path

import matplotlib
import pandas as pd
import pytest

from fedrepro.core.errors import InputError
from fedrepro.experiments import store
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting import deviations, page_text, paper_facts, paper_page
from fedrepro.reporting.figures import figure_in_words
from fedrepro.reporting.notebook import read_ledger
from fedrepro.verdicts.claims import claim_tables
from fedrepro.verdicts.headlines import paper_headline
from toy import put, stored

matplotlib.use("Agg")
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "nbs/12_results").glob("*.ipynb"))
PAPERS = ["fedadc", "fedbss", "fedccfa", "feddc", "lfd"]


@pytest.fixture(scope="module")
def nothing(tmp_path_factory):
    return tmp_path_factory.mktemp("no results")


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    "Made-up runs of two rows of FedCCFA's Table 2 in its first column, tiers paper and small"
    folder = tmp_path_factory.mktemp("some results")
    spec = load_spec("fedccfa/table2")
    for tier in ("paper", "small"):
        for row, value in (
            ("AdapFedAvg", 67.0),
            ("AdapFedAvg (rate used)", 70.0),
            ("FedRep", 60.0),
        ):
            for c in spec.runs(tier, [row], seeds=2):
                if c.column != spec.columns[0].label:
                    continue
                v = value + c.seed
                rows = [
                    dict(round=t, generalised_accuracy=v, generalised_accuracy_fresh=v + 2 + c.seed)
                    for t in range(1, c.rounds + 1)
                ]
                head = dict(
                    settings=c.settings,
                    run_id=c.run_id,
                    status="complete",
                    wall_seconds=1800.0,
                    peak_memory_mb=500.0,
                    cpu="A processor",
                    device="cpu",
                    bytes_up=5 * 10**8,
                    bytes_down=5 * 10**8,
                )
                store.write(store.run_path(folder, c), head, rows)
    return folder


def rows_with(html, *words):
    return [
        line
        for line in html.splitlines()
        if line.startswith("<tr>") and all(w in line for w in words)
    ]


# --- with no result at all


@pytest.mark.parametrize("paper", PAPERS)
def test_every_part_without_results(paper, nothing):
    said = paper_page.opening(paper, nothing)
    assert said.startswith("None of the ") or said.startswith("No table of ")
    ((idle, *_),) = [s for s in paper_page.sections(paper, results=nothing) if "No run yet" in s[0]]
    assert all(f"`{s.name}`" in idle for s in page_text.specs_of(paper) if s.plot != "bubbles")
    assert "No stored run" in paper_facts.paper_cost(paper, nothing)
    assert "**Easy**" in paper_facts.easy_and_hard(paper)
    entries = read_ledger(paper)
    ledger = deviations.ledger(paper, nothing)
    assert "0 have runs" in ledger
    assert ledger.count(": not measured</summary>") == len(entries) == ledger.count("<details")
    assert "supported" not in "".join(rows_with(paper_page.claims(paper, nothing)))


def test_summary_without_results(nothing):
    head, *rows = rows_with(paper_page.summary(nothing))
    assert head.count("<th>") == 1 + len(PAPERS)
    lines = {cells[0]: cells[1:] for r in rows for cells in [re.findall("<td[^>]*>(.*?)</td>", r)]}
    assert sum(int(n or 0) for n in lines["of them independent"]) == 918
    assert not {
        "reproduced",
        "consistent",
        "undecided",
    } & set(lines)
    assert set(lines["hours of processes"]) == {"0.0"}


# --- with some


def test_the_opening_counts_what_the_store_decides(some):
    said = paper_page.opening("fedccfa", some)
    assert said.startswith(
        "2 of the 548 independent published numbers of FedCCFA are decided: 1 consistent and 1 contradicted (Table 2: 2)."
    )
    runnable, wide = map(
        int, re.findall(r"(\d+) not run yet, (\d+) not decidable by three seeds", said)[0]
    )
    assert runnable + wide == 365
    assert wide > 30
    assert "1 shown with the runs of another row" in said
    assert "2 of 40" in said
    assert "+3.00 ± 0.00 (2) points" in said


@pytest.mark.parametrize(
    "decided, says",
    [
        (1, "1 of the 3 independent published numbers of P is decided: 1 consistent"),
        (2, "2 of the 3 independent published numbers of P are decided: 2 consistent"),
    ],
)
def test_one_number_is_decided_and_two_are(decided, says):
    alone = pd.DataFrame(
        {"table": "table1", "status": ["consistent"] * decided + ["not run"] * (3 - decided)}
    )
    assert paper_page.decided_sentence("P", alone, "") == f"{says} (Table 1: {decided})."


def test_published_and_reduced_are_apart(some):
    spec = load_spec("fedccfa/table2")
    judged, reduced = (paper_page.table_part(spec, tier, some) for tier in ("paper", "small"))
    (row,) = rows_with(
        judged,
        "<td>AdapFedAvg</td>",
        "67.50 ± 0.71 (2)</a><br><small>69.30 ± 1.06 = FedAvg</small>",
    )
    assert "background" not in row  # the verdict is not its own
    assert "Each judged number" not in judged  # one column: the verdicts stand in the table itself
    assert judged.count("<table") == 1
    assert "<td>-1.80 ± 2.78</td>" in row
    (row,) = rows_with(reduced, "<td>AdapFedAvg</td>", "67.50 ± 0.71 (2)")
    assert "background" not in row
    assert "not judged" in reduced
    assert "verdict</th>" not in reduced


def test_what_ends_above_the_published_number_says_since_when(tmp_path):
    "FedAvg of FedBSS's Table 1, published 76.41: at 80 from round 31 on; below at the end; always above"
    spec = load_spec("fedbss/table1")
    curves = [[70.0] * 30 + [80.0] * 170, [90.0] * 190 + [70.0] * 10, [95.0] * 200]
    put(spec, "paper", "FedAvg", curves, "Fashion-MNIST, Dir(0.5)", tmp_path)
    frame = paper_page.table(spec, "paper", tmp_path)
    # rounds 28 to 37 have three times 70 and seven times 80, a mean of 77; 27 to 36 have 76
    assert paper_page.rounds_above(spec, frame, tmp_path) == {"FedAvg": [37.0, math.inf, 10.0]}
    text = paper_page.table_part(spec, "paper", tmp_path)
    assert "(means of ten evaluations, not judged): FedAvg 37, never and 10." in text


def test_a_run_with_few_evaluations_does_not_say_since_when(tmp_path):
    spec = load_spec("fedbss/table1")
    rows = [dict(round=t, generalised_accuracy=95.0) for t in range(40, 201, 40)]
    for run in spec.runs("paper", ["FedAvg"], seeds=3):
        if run.column == "Fashion-MNIST, Dir(0.5)":
            stored(run, rows, tmp_path)
    frame = paper_page.table(spec, "paper", tmp_path)
    (line,) = frame[frame.row.eq("FedAvg") & (frame.n > 0)].itertuples()
    assert line.verdict == "contradicted"
    assert line.difference > line.margin
    assert paper_page.rounds_above(spec, frame, tmp_path) == {}


def test_every_number_leads_to_its_runs(some):
    text = paper_page.table_part(load_spec("fedccfa/table2"), "paper", some)
    links = re.findall('href="#([^"]+)"', text)
    ids = re.findall('<span id="([^"]+)"', text)
    # FedAvg's are AdapFedAvg's
    assert len(links) == 4
    assert set(links) == set(ids)
    assert text.count("../../papers/fedccfa/results/paper/") == 8
    assert "fedrepro run fedccfa/table2 --tier paper" in text
    assert "Commit: `unknown`" in text
    touched = re.search("Deviations that touch them: (.*)", text)[1]
    # FedProx has no run
    assert "[22](#deviation-22)" in touched
    assert "[3](#deviation-3)" in touched
    assert "(#deviation-12)" not in touched
    assert 'id="deviation-22"' in deviations.ledger("fedccfa", some)


def test_a_deviation_touches_rows_that_have_a_value_of_each_limit():
    spec = load_spec("fedccfa/table2")

    def who(tier="small", **limits):
        rows = []
        for row in spec.rows.values():
            values = deviations.values_touched(spec, row, tier)
            if deviations.touched({"touches": limits}, values):
                rows.append(row.name)
        return rows

    assert who() == list(spec.rows) == who(clients=[100])
    assert who(experiments=[]) == who(experiments=["table 1"]) == []
    assert who(experiments=["table 1", "table 2"], methods=["FedProx"]) == ["FedProx"]
    assert who(methods=["FedCCFA"], datasets=["CINIC-10"]) == []
    assert "FedCCFA" in who("paper", methods=["FedCCFA"], datasets=["CINIC-10"])
    found = who(experiments=["table 2"], methods=["FedRep", "FedCCFA"])
    assert {"FedRep", "FedCCFA", "FedCCFA (anchors averaged)"} <= set(found)
    assert "FedAvg" not in found
    assert who(rows=["AdapFedAvg"]) == ["AdapFedAvg"]


def test_effects_are_differences_over_seeds(some):
    found = deviations.effects("fedccfa", "paper", some)
    done = found[found.n > 0].set_index("deviation")
    rate = done.loc["Adaptive learning rate of AdapFedAvg"]
    stale = done.loc["Stale bodies"]
    assert (rate.n, rate.points) == (2, 3.0)
    assert "rate used" in rate.what
    assert " ".join(rate.runs).count("](../../papers/fedccfa/results/paper/") == 4
    assert "*Runs:* [" in deviations.ledger("fedccfa", some)
    assert stale.points == 2.5
    assert math.isclose(stale.half, 12.706 * 0.5, rel_tol=1e-3)
    assert done.index.nunique() == 2
    assert set(found.deviation) > set(done.index)
    text = deviations.ledger("fedccfa", some)
    assert text.count(": not measured</summary>") == 38
    assert "+3.00" in text
    assert "FedRep (generalised_accuracy_fresh minus" in text


@pytest.mark.parametrize(
    "line, word",
    [
        ('spec = "fedccfa/table2"', "spec is not given"),
        ('against = ["A", "B"]', "differ in length"),
    ],
)
def test_bad_effects_are_refused_in_one_line(tmp_path, line, word):
    name = read_ledger("fedccfa")[0]["name"]
    given = [
        "[[effect]]",
        f'deviation = "{name}"',
        'rows = ["FedAvg"]',
        'spec = "fedccfa/table2"',
        line,
    ]
    (tmp_path / "fedccfa").mkdir()
    (tmp_path / "fedccfa/claims.toml").write_text(
        "\n".join(text for text in given if given.count(text) == 1)
    )
    with pytest.raises(InputError, match=word):
        deviations.effects("fedccfa", "paper", root=tmp_path)


def test_nothing_decided_is_not_nothing_stored():
    board = pd.DataFrame([dict(table="table1", status=word) for word in ("undecided", "diverged")])
    assert "is decided yet." in paper_page.judged_sentences("Demo", board)[0]
    assert "no such run" in paper_page.judged_sentences("Demo", board.assign(status="runnable"))[0]


def test_every_effect_names_an_entry_rows_and_specs():
    for paper in PAPERS:
        for given in claim_tables(
            ROOT / f"papers/{paper}/claims.toml", "effect", deviations.EFFECT
        ):
            assert given["deviation"] in [e["name"] for e in read_ledger(paper)]
            rows = set(given["rows"]) | (
                set(given.get("against", ())) if "against_spec" not in given else set()
            )
            assert rows <= set(load_spec(given["spec"]).rows), given
            assert set(given.get("against", given["rows"])) <= set(
                load_spec(given.get("against_spec", given["spec"])).rows
            )
            assert len(given.get("against", given["rows"])) == len(given["rows"])


def test_cost_sums_headers(some):
    rows = rows_with(paper_facts.paper_cost("fedccfa", some), "A processor")
    assert len(rows) == 2
    assert all(
        "<td>6</td><td>6</td><td>0</td><td>3.00</td><td>30.0</td><td>500</td><td>6.0</td>" in r
        for r in rows
    )


def test_figures_are_drawn_where_there_are_runs(some):
    found = list(paper_page.sections("fedccfa", results=some))
    assert sum("### Table 2" in text for text, *_ in found) == 1
    assert max(map(len, found)) == 2
    (text,) = [text for text, *_ in found if "### Table 2" in text]
    assert "Published setting, as far as it is printed." in text
    assert "not judged" not in text
    assert " --tier small`" in text
    assert "No run yet" in found[-1][0] + found[-2][0]


def test_a_reading_stands_once_among_the_deviations(tmp_path):
    "Pairs of runs are no table of the paper; where one side has diverged, that is the effect"
    spec = load_spec("fedccfa/readings")
    put(spec, "small", "SCAFFOLD", [[60.0] * 40], results=tmp_path)
    put(spec, "small", "SCAFFOLD, momentum 0.9", [None], results=tmp_path)
    last = [
        s[0]
        for s in paper_page.sections("fedccfa", results=tmp_path)
        if "Measured among the deviations" in s[0]
    ]
    assert len(last) == 1
    assert "`fedccfa/readings`" in last[0]
    assert "tier small: diverged: SCAFFOLD, momentum 0.9</summary>" in deviations.ledger(
        "fedccfa", tmp_path
    )


# --- the pages


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_types_in_no_number_and_shows_what_it_says(path):
    cells = json.loads(path.read_text())["cells"]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert not re.search(r"\d\d\.\d", prose), "a result typed in"
    code = [c for c in cells if c["cell_type"] == "code" and "#| hide" not in "".join(c["source"])]
    assert code
    assert all(len(ast.parse("".join(c["source"])).body) <= 3 for c in code)
    assert all(c["outputs"] for c in code), "run the page again"


@pytest.mark.parametrize(
    "path", [p for p in PAGES if p.stem.split("_")[1] in PAPERS], ids=lambda p: p.stem
)
def test_a_page_can_be_read(path):
    "No box that scrolls inside the page, no empty table, every link within it has a target, under 600 lines, small"
    outs = [
        o["data"]
        for c in json.loads(path.read_text())["cells"]
        for o in c.get("outputs", [])
        if "data" in o
    ]
    text = "\n".join("".join(d.get("text/markdown", "")) for d in outs)
    assert "overflow" not in text
    assert "max-height" not in text
    assert path.stat().st_size < 400_000
    assert len([line for line in text.splitlines() if re.sub("<[^>]+>", "", line).strip()]) < 600
    assert set(re.findall(r'(?:href="|\]\()#([^")]+)', text)) <= set(
        re.findall(r'id="([^"]+)"', text)
    )
    assert all(table.count("<tr>") > 1 for table in text.split("<table")[1:])
    assert "<table" in text


def test_a_reduced_table_stays_until_the_papers_method_has_a_published_one(tmp_path):
    "Begun runs of others at the published setting are named below it"
    spec = load_spec("feddc/comparison")

    def order():
        return paper_page.tiers_in_order(spec, ("paper", "small"), tmp_path)

    place = "MNIST, IID, share 0.15"
    put(spec, "paper", "FedAvg", [[90.0] * 300], place, tmp_path)
    assert order() == ["paper"]
    put(spec, "small", "FedAvg", [[80.0] * 40], place, tmp_path)
    assert order() == ["paper", "small"]
    put(spec, "small", "FedDC", [[81.0] * 40], place, tmp_path)
    assert order() == ["small", "paper"]
    assert "the published setting too" in paper_page.how_to_print(spec, "paper")
    put(spec, "paper", "FedDC", [[91.0] * 300], place, tmp_path)
    assert order() == ["paper", "small"]


def test_other_choices_stand_beside_the_headline_whose_runs_they_change(tmp_path):
    "In the setting that decides alone; a choice whose runs all diverged is named"
    place = "CIFAR-10, 50 clients, share 0.25"
    table, readings = load_spec("lfd/table4"), load_spec("lfd/readings")
    put(table, "paper", "LfD", [[60.0] * 100, [61.0] * 100], place, tmp_path)
    put(table, "paper", "FedAvg", [[59.0] * 100, [58.0] * 100], place, tmp_path)
    assert deviations.other_choices(paper_headline("lfd", tmp_path), tmp_path) == []
    assert "other choices" not in paper_page.box("lfd", tmp_path)
    first, before = "LfD, no regulariser at first", "LfD, only the round before"
    put(readings, "paper", first, [[64.0] * 22], "CIFAR-10, 22 rounds", tmp_path)
    assert deviations.other_choices(paper_headline("lfd", tmp_path), tmp_path) == []
    put(readings, "paper", first, [[64.0] * 100, [66.0] * 100], place, tmp_path)
    put(readings, "paper", before, [None], place, tmp_path)
    skipped, gone = deviations.other_choices(paper_headline("lfd", tmp_path), tmp_path)
    assert (skipped.row, skipped.side.mean, skipped.side.n, skipped.gone) == (first, 65.0, 2, None)
    assert (gone.row, gone.side) == (before, None)
    text = paper_page.box("lfd", tmp_path)
    assert f"{first} 65.00 ± 12.71 (2); {before} diverged." in text


def test_other_choices_of_a_rival_stand_there_too(tmp_path):
    "And the picture counts the rounds of the rows that are run, not of those that wait"
    place = "Fashion-MNIST, Dir(0.5)"
    table, readings = load_spec("fedbss/table1"), load_spec("fedbss/readings")
    put(table, "paper", "FedBSS", [[82.0] * 200], place, tmp_path)
    put(table, "paper", "FedAvg", [[81.0] * 200], place, tmp_path)
    row = "FedAvg, pooling of stride 3"
    put(readings, "paper", row, [[79.0] * 200], place, tmp_path)
    (made,) = deviations.other_choices(paper_headline("fedbss", tmp_path), tmp_path)
    assert (made.row, made.side.mean) == (row, 79.0)
    assert "over 200 rounds for" in figure_in_words(readings, "paper", tmp_path)
    put(readings, "paper", "FedBSS, 250 rounds", [[83.0] * 250], place, tmp_path)
    assert "over 200 to 250 rounds for" in figure_in_words(readings, "paper", tmp_path)
