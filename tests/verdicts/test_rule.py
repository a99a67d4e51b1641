"The rule of verdicts, worked by hand: margins that are capped, one verdict a number, what is counted once, what cannot be decided"

import math

import pandas as pd
import pytest

from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.printed_tables import EXCLUDES, MEANING, ends, judged_in_words
from fedrepro.verdicts import scoreboard as sb
from fedrepro.verdicts.independent import read_published
from fedrepro.verdicts.scoreboard import scoreboard, totals
from fedrepro.verdicts.summaries import processors_of, trace
from fedrepro.verdicts.tables import (
    cell_margin,
    published_cell,
    same_rounds,
    table,
)
from fedrepro.verdicts.verdicts import decidable, verdict
import toy
from toy import BASE, TOY, written

RAW = TOY | dict(
    paper="Demo",
    table="1",
    published="table1.published.csv",
    gap=["Own"],
    spread="trials",
    trials=3,
    pairing="pooled",
    base=BASE | dict(rounds=3, seeds=[0, 1, 2], clients=3),
    columns=[{"label": "A"}],
    methods={
        "Own": {"class": "FedAvg"},
        "near": {"class": "FedProx"},
        "far": {"class": "FedAvg", "epochs": 2, "source": "guess: a test"},
        "wide": {"class": "FedAvg", "epochs": 3, "source": "guess: a test"},
    },
)
CSV = "paper,table,method,dataset,mean,std\nDemo,1,Own,digits,80.0,0.10\nDemo,1,near,digits,79.0,0.10\nDemo,1,far,digits,60.0,0.10\nDemo,1,wide,digits,70.0,4.10\n"


@pytest.fixture
def spec(tmp_path):
    return load_spec(written(tmp_path / "papers", RAW, "demo/table1", CSV))


def put(spec, row, values):
    toy.put(spec, "paper", row, [[v - 2, v - 1, v] for v in values])


def cells(spec):
    return table(spec, "paper").set_index("row")


# --- the margin


def test_a_margin_is_at_most_half_of_the_gap_that_the_cell_is_about(spec):
    "Own leads near by 1: both are judged by half a point; far is 20 behind, wide 10: the usual margin"
    for row, mean in dict(Own=80.0, near=79.0, far=60.0, wide=70.0).items():
        put(spec, row, [mean, mean + 0.1, mean - 0.1])
    assert cells(spec).margin.to_dict() == {"Own": 0.5, "near": 0.5, "far": 1.0, "wide": 1.0}


@pytest.mark.parametrize("row, margin", [("Own", 0.5), ("near", 0.5), ("far", 1.0)])
def test_a_table_of_some_rows_has_the_margins_of_the_whole_table(spec, row, margin):
    some = spec.path.with_name("some.toml")
    some.write_text(f'extends = "table1.toml"\nrows = ["{row}"]\n')
    put(spec, row, [80.0, 80.1, 79.9])
    assert cells(load_spec(some)).margin.to_dict()[row] == margin


def test_table_2_is_judged_by_half_of_what_it_claims():
    spec = load_spec("fedccfa/table2")
    paper = read_published(spec)
    column = next(c for c in spec.columns if c.label == "Fashion-MNIST, 100 clients")

    def margin(row):
        return cell_margin(
            spec,
            paper,
            row,
            column,
            published_cell(paper, spec.rows[row].published | column.published)[0],
        )

    assert math.isclose(margin("FedCCFA"), (89.39 - 88.25) / 2)
    assert math.isclose(margin("IFCA"), 0.57)
    assert math.isclose(margin("FedDrift"), (89.39 - 87.75) / 2)
    assert margin("FedPAC") == margin("FedAvg") == 1.0


# --- the words


def test_a_reproduced_whose_interval_excludes_0_says_so():
    "79.5 ± .1 (3) against 80 ± .1 (3): SE = .1 sqrt(2/3) = .0816, PI = 2.776 * .0816 = .227 < .5; E = .5 + 2.132 * .0816 = .674 <= 1"
    found = verdict([79.4, 79.5, 79.6], 80.0, 0.1, 3, 1.0, "pooled")
    assert found.word == "reproduced"
    assert round(found.interval, 3) == 0.227
    assert round(found.far_end, 3) == 0.674
    cell = pd.Series(
        dict(
            verdict="reproduced",
            difference=-0.5,
            interval=found.interval,
            untuned="",
            n=3,
            same_runs="",
        )
    )
    assert judged_in_words(cell) == "reproduced" + EXCLUDES
    assert judged_in_words(pd.Series(dict(cell) | {"difference": -0.2})) == "reproduced"


def test_consistent_is_explained_with_its_error():
    "simulated here once more: three seeds, spread of one margin, a true miss of two margins"
    import numpy as np
    from fedrepro.verdicts.verdicts import standard_error, verdict_words

    rng = np.random.default_rng(5)
    draws = 100_000
    m0 = rng.normal(0, 3**-0.5, draws)
    m = rng.normal(2, 3**-0.5, draws)
    s0, s = (np.sqrt(rng.chisquare(2, draws) / 2) for _ in range(2))
    words = verdict_words(m - m0, *standard_error(s, 3, s0, 3, "pooled"), 1.0)
    assert (
        f"passes in {np.isin(words, ['reproduced', 'consistent']).mean():.0%}".replace("%", " %")
        in MEANING["consistent"]
    )


# --- what cannot be decided


@pytest.mark.parametrize(
    "s0, n0, margin, pairing, says",
    [
        (1.20, 3, 1.0, "welch", True),
        (1.21, 3, 1.0, "welch", False),  # 4.3027 * 1.21 / sqrt(3) = 3.006 > 3
        (1.87, 3, 1.0, "pooled", True),
        (1.88, 3, 1.0, "pooled", False),  # 2.7764 * 1.88 / sqrt(3) = 3.014 > 3
        (1.88, 4, 1.0, "welch", True),
        (1.89, 4, 1.0, "welch", False),  # 3.1824 * 1.89 / 2 = 3.007 > 3
        (0.60, 3, 0.5, "welch", True),
        (0.61, 3, 0.5, "welch", False),
        (None, 0, 0.01, "welch", True),
    ],
)
def test_which_spreads_three_seeds_can_decide(s0, n0, margin, pairing, says):
    assert decidable(s0, n0, margin, pairing) == says


def test_cells_that_three_seeds_cannot_decide_are_not_reachable(spec):
    "wide is printed ± 4.10; until it is run it is not decidable, and a verdict is a verdict"

    def board():
        return scoreboard(root=spec.path.parents[1], tiers=("paper",)).set_index("method")

    assert board().status.to_dict() == {
        "Own": "runnable",
        "near": "runnable",
        "far": "runnable",
        "wide": "not decidable",
    }
    assert "± 4.1" in board().why["wide"]
    assert totals(board().reset_index()).iloc[0].reachable == 3
    put(spec, "wide", [70.0, 70.1, 69.9])
    assert board().status["wide"] == "undecided"
    put(spec, "wide", [40.0, 40.1, 39.9])
    assert board().status["wide"] == "contradicted"


def test_the_stored_specs_have_such_cells(board):
    "counted by hand from the printed spreads of the cells that can be run here"
    paper = board[(board.tier == "paper") & (board.status == "not decidable")]
    count = paper.groupby(["folder", "table"]).size()
    assert count["lfd", "table4"] <= 7
    assert count["fedadc", "table1"] <= 7
    assert not (paper.folder == "fedbss").any()


# --- counted once


def test_rounds_that_are_equal_in_most_seeds_count_once(spec):
    put(spec, "Own", [80.0, 80.1, 79.9])
    put(spec, "near", [80.0, 80.1, 78.0])
    found = cells(spec)
    board = scoreboard(root=spec.path.parents[1], tiers=("paper",))
    assert str(found.same_runs["near"]) == "row Own in 2 of 3 seeds"
    assert not found.same_runs["Own"]
    assert board.set_index("method").status["near"] == sb.ALIAS
    assert len(sb.judged_lines(board)) == 1
    put(spec, "near", [80.0, 78.1, 78.0])
    assert not cells(spec).same_runs["near"]
    assert not same_rounds({}, {"Own": {}})


def test_a_trace_is_of_every_round():
    run = pd.DataFrame({"round": [1, 2], "generalised_accuracy": [50.0, 60.0]})
    early = run.assign(generalised_accuracy=[50.000001, 60.0])
    assert (
        trace(run, "generalised_accuracy")
        == trace(run.copy(), "generalised_accuracy")
        != trace(early, "generalised_accuracy")
    )
    assert trace(run, "personalised_accuracy") == ""


def test_differences_are_shown_and_not_called_none():
    spec = load_spec("fedccfa/table8")
    frame = table(spec, "paper")
    note = next(line for line in ends(spec, "paper", frame) if line.startswith("Verdicts: "))
    letters = int(
        frame.verdict.isin(
            ["reproduced", "consistent", "undecided", "differs slightly", "contradicted"]
        ).sum()
    )
    said = sum(
        int(part.split()[0])
        for part in note.removeprefix("Verdicts: ").split("; ")[0].split(", ")
        if "diverged" not in part
    )
    assert letters == said > 0
    assert "tables 2 and 1 judge" in note


# --- processors


def test_a_run_has_the_processors_of_all_its_parts():
    assert processors_of(dict(cpu="A", device="cpu", resumed=[dict(cpu="B", round=3)])) == {
        "A",
        "B",
    }
    assert processors_of(dict(cpu="A", device="H100")) == {"A, H100"}
