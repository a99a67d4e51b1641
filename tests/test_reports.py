"Results pages: complete with no result at all, right with some, and nothing typed in"
import json
import math
import re
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from markdown_it import MarkdownIt

from fedrepro.core.errors import InputError
from fedrepro.experiments import store
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting import paper_page
from fedrepro.verdicts.comparisons import paper_files

matplotlib.use("Agg")
ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "nbs/12_results").glob("*.ipynb"))
PAPERS = ["fedadc", "fedbss", "fedccfa", "feddc", "lfd"]
RUNS = 6


@pytest.fixture(scope="module")
def nothing(tmp_path_factory): return tmp_path_factory.mktemp("no results")


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    "Made-up runs of two rows of FedCCFA's Table 2 in its first column, tiers paper and small"
    folder, spec = tmp_path_factory.mktemp("some results"), load_spec("fedccfa/table2")
    for tier in ("paper", "small"):
        for row, value in (("AdapFedAvg", 67.), ("AdapFedAvg (rate used)", 70.), ("FedRep", 60.)):
            for c in spec.runs(tier, [row], seeds=2):
                if c.column != spec.columns[0].label: continue
                v = value + c.seed
                rows = [dict(round=t, generalised_accuracy=v, generalised_accuracy_fresh=v + 2 + c.seed)
                        for t in range(1, c.rounds + 1)]
                head = dict(settings=c.settings, run_id=c.run_id, status="complete", wall_seconds=1800.,
                            peak_memory_mb=500., cpu="A processor", device="cpu", bytes_up=5 * 10**8, bytes_down=5 * 10**8)
                store.write(store.run_path(folder, c), head, rows)
    return folder


def lines_with(text, *words): return [line for line in text.splitlines() if all(w in line for w in words)]


# --- words and tables

def test_cells_are_safe():
    assert paper_page.cell("a|b <i>") == "a\\|b &lt;i&gt;" and paper_page.cell(math.nan) == "" and paper_page.cell(0) == "0"


def test_a_grid_is_a_markdown_table_that_scrolls():
    text = paper_page.scroll_table(pd.DataFrame({"a": ["x|y", "<b>"], "n": [1, math.nan]}))
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<tr>") == 3 and "x|y" in html and "<b>" not in html and "overflow: auto" in html


# --- with no result at all

@pytest.mark.parametrize("paper", PAPERS)
def test_every_part_without_results(paper, nothing):
    scope, published = paper_page.scope(paper, nothing), paper_page.tables(paper, "paper", nothing)
    specs = paper_page.specs_of(paper)
    assert all(s.name in scope for s in specs)
    drawn = [s for s in specs if s.plot != "bubbles"]
    assert published.count("### ") == len(drawn) and published.count("No run") == len(drawn)
    assert paper_page.tables(paper, "small", nothing) == "No run at tier small yet.\n"
    assert list(paper_page.figures(paper, results=nothing)) == [] and "No stored run" in paper_page.paper_cost(paper, nothing)
    assert "0 have runs" in paper_page.ledger(paper, nothing) and "*Measured:*" not in paper_page.ledger(paper, nothing)
    assert "**Easy**" in paper_page.easy_and_hard(paper) and "reproduced" not in paper_page.paper_standing(paper, nothing)
    assert "supported" not in "".join(lines_with(paper_page.claims(paper, results=nothing), "|"))


def test_summary_without_results(nothing):
    rows = lines_with(paper_page.summary(nothing), "| ")
    names, last = ([c.strip() for c in r.strip("|").split("|")] for r in (rows[0], rows[-1]))
    total = dict(zip(names, last))
    assert (total["paper"], total["published"], total["claims in texts"], total["stored runs"]) == ("all", "1024", "11", "0")
    reach = ("missing", "no data here", "beyond a CPU", "runnable")
    assert sum(int(total[name]) for name in reach) == int(total["independent"]) == 918  # of 1,024: no dash, repeat or difference
    assert total["reproduced"] == total["claims supported"] == "0"


def test_an_unknown_paper_is_refused():
    with pytest.raises(InputError, match="'fedavg'.*fedccfa"): paper_page.scope("fedavg")


# --- with some

def test_published_and_reduced_are_apart(some):
    judged, reduced = (paper_page.tables("fedccfa", tier, some) for tier in ("paper", "small"))
    row = lines_with(judged, "| AdapFedAvg |", "67.50 ± 0.71 (2)")
    assert len(row) == 1 and row[0].count("|") == 7 and "consistent" in row[0]  # -1.80 ± 2.78
    assert "verdict" not in reduced and "difference |" not in reduced and "not comparable" in reduced
    assert lines_with(reduced, "| AdapFedAvg |", "67.50 ± 0.71 (2)")
    blank = [r for r in lines_with(judged, "| FedAvg |") if r.endswith("|  |  |  |")]
    assert blank  # never run: published stands, ours, difference and verdict are blank


def test_the_scope_counts_finished_runs(some):
    assert lines_with(paper_page.scope("fedccfa", some), "fedccfa/table2", "6 of")


def test_effects_are_differences_over_seeds(some):
    found = paper_page.effects("fedccfa", "paper", some)
    done = found[found.n > 0].set_index("deviation")
    rate, stale = done.loc["Adaptive learning rate of AdapFedAvg"], done.loc["Stale bodies"]
    assert (rate.n, rate.points) == (2, 3.) and "rate used" in rate.what
    assert stale.points == 2.5 and math.isclose(stale.half, 12.706 * .5, rel_tol=1e-3)
    assert done.index.nunique() == 2 and set(found.deviation) > set(done.index)
    text = paper_page.ledger("fedccfa", some)
    assert text.count("*Measured:*") == 2 and "+3.00" in text and "FedRep (generalised_accuracy_fresh minus" in text


def test_every_effect_names_an_entry_rows_and_specs():
    for paper in PAPERS:
        for given in paper_page.claim_tables(ROOT / f"papers/{paper}/claims.toml", "effect", paper_page.EFFECT):
            assert given["deviation"] in [e["name"] for e in paper_page.entries_of(paper)]
            rows = set(given["rows"]) | (set(given.get("against", ())) if "against_spec" not in given else set())
            assert rows <= set(load_spec(given["spec"]).rows), given
            assert set(given.get("against", given["rows"])) <= set(load_spec(given.get("against_spec", given["spec"])).rows)
            assert len(given.get("against", given["rows"])) == len(given["rows"])


def test_an_effect_of_an_unknown_entry_is_refused(tmp_path):
    folder = tmp_path / "papers/demo"
    folder.mkdir(parents=True)
    (folder / "deviations.toml").write_text('[[deviation]]\nname = "One"\n')
    (folder / "claims.toml").write_text('[[effect]]\ndeviation = "Two"\nspec = "demo/t"\nrows = ["FedAvg"]\n')
    with pytest.raises(InputError, match="'Two'.*One"): paper_page.effects("demo", "paper", None, tmp_path / "papers")


def test_cost_sums_headers(some):
    rows = lines_with(paper_page.paper_cost("fedccfa", some), "A processor")
    assert len(rows) == 2 and all("| 6 | 6 | 0 | 3.00 | 30.0 | 500 | 6.0 |" in r for r in rows)


def test_figures_are_drawn_where_there_are_runs(some):
    found = list(paper_page.figures("fedccfa", results=some))
    assert len(found) >= 2 and all(text.startswith("### ") for text, *_ in found)
    assert sum(len(f) == 2 for f in found) >= 2 and any("reduced, not comparable" in text for text, *_ in found)


def test_sources_are_counted():
    count = paper_page.sources("lfd")
    assert count["paper"] > 5 and count["guess"] > 0 and set(count) <= {"paper", "code", "tuned", "guess"}
    assert "rounds" in paper_page.guessed("lfd") and "lr" not in paper_page.guessed("fedccfa")


# --- the pages

def test_there_is_a_page_for_every_paper():
    assert sorted(p.stem.split("_", 1)[1] for p in PAGES) == sorted([*PAPERS, "summary", "checklists"])
    assert set(paper_files("*/claims.toml")) == {f"{p}/claims.toml" for p in PAPERS}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_types_in_no_number_and_shows_what_it_says(path):
    cells = json.loads(path.read_text())["cells"]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert not re.search(r"\d\d\.\d", prose), "a result typed in"
    code = [c for c in cells if c["cell_type"] == "code" and "#| hide" not in "".join(c["source"])]
    assert code and all(len("".join(c["source"]).splitlines()) <= 3 for c in code)
    shown = [c for c in code if "figures(" not in "".join(c["source"])]
    assert all(c["outputs"] for c in shown), "run the page again"
