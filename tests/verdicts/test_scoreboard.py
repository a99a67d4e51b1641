"The scoreboard: every published number once, its status from the files alone"

import math
from pathlib import Path

import pandas as pd
import pytest

from fedrepro.experiments import store
from fedrepro.verdicts import scoreboard as sb
from fedrepro.verdicts.claims import read_claims, verdicts
from fedrepro.verdicts.scoreboard import scoreboard, status, totals
from toy import written
from toy_board import RAW, demo, put

PAPERS = Path(__file__).resolve().parents[2] / "papers"


def statuses(demo, tier="paper"):
    board = scoreboard(root=demo)
    part = board[(board.tier == tier) & (board.table == "table1")]
    return dict(zip(part.line, part.status))


# --- the repository's own


def test_totals_add_up(board):
    count = totals(board)
    assert (count.decided <= count.reachable).all()
    assert (board.why[board.status == "missing"].str.len() > 5).all()
    for tier, part in count.groupby("tier"):
        whole = part.set_index("paper")
        assert whole.loc["all"].numbers == 1024 and whole.drop("all").numbers.sum() == 1024, tier
        assert whole.loc["all"].independent == 918
    claims = sb.claim_totals(verdicts(root=PAPERS)).set_index("paper")
    assert claims.loc["all"].claims == 11 == sum(c.listed for c in read_claims(PAPERS))
    assert claims.drop(columns="claims").loc["all"].sum() == 11


def test_a_number_whose_setting_is_lost_is_not_missing(board):
    "FedCCFA's Table 5: a column's alpha and two rows' gammas are guesses; ten numbers can stand beside nothing, none is missing"
    lost = board[
        (board.folder == "fedccfa")
        & (board.table == "table5")
        & board.why.str.startswith("the text lost")
    ]
    assert lost.groupby("tier").size().to_dict() == {"paper": 10, "small": 10}
    assert set(lost.status) == {"not comparable"}
    assert not (
        (board.folder == "fedccfa") & (board.tier == "paper") & (board.status == "missing")
    ).any()
    whole = totals(board).set_index(["tier", "paper"]).loc["paper", "FedCCFA"]
    assert (
        whole.independent - whole["no data here"] - whole["not comparable"]
        == 368
        == whole.reachable + whole["not decidable"]
    )


def test_numbers_decided_an_hour(demo):
    decided, hours = sb.speed(scoreboard(root=demo), root=demo)
    assert decided == 0
    assert math.isnan(hours)
    for file in put(demo, "FedAvg", [70.0, 70.5]):
        head, rows = store.read(file)
        store.write(file, head | {"wall_seconds": 900.0}, rows)
    assert sb.speed(scoreboard(root=demo), root=demo) == (1, 0.5)


# --- statuses from files


def test_missing_and_runnable(demo):
    board = scoreboard(root=demo)
    assert statuses(demo) == {0: "runnable", 1: "missing", 2: "runnable", 3: "missing"}
    assert statuses(demo, "small") == {0: "runnable", 1: "missing", 2: "runnable", 3: "missing"}
    why = board[board.tier == "paper"].set_index(["table", "line"]).why
    assert why["table1", 1] == "nobody has the data"
    assert "no cell" in why["table1", 3]
    assert why["table9", 0] == "no spec yet"
    assert "other" not in set(board.table)  # a third party's


@pytest.mark.parametrize(
    "values, word",
    [
        ([70.0, 70.5], "consistent"),
        ([73.9, 73.9], "contradicted"),
        ([70.0, 82.0], "undecided"),
        ([70.0], "undecided"),
        ([70.0, None], "diverged"),
    ],
)
def test_verdicts(demo, values, word):
    put(demo, "FedAvg", values)
    assert statuses(demo)[0] == word
    assert statuses(demo)[2] == "runnable"


def test_the_other_reading_of_a_row_does_not_fill_its_cell(demo):
    put(demo, "twin", [70.0, 70.5])
    assert statuses(demo)[0] == "runnable"


def test_a_dash_is_not_comparable(demo):
    put(demo, "IFCA", [70.0, 70.5])
    board = scoreboard(root=demo).set_index(["tier", "table", "line"]).loc["paper", "table1", 2]
    assert (board.status, board.why) == ("not comparable", "the paper prints no number")


def test_small_runs_are_run_and_not_judged(demo):
    put(demo, "FedAvg", [10.0, None], "small")
    board = scoreboard(root=demo).set_index(["tier", "table", "line"])
    assert board.loc["small", "table1", 0].status == "run"
    assert "1 of 2" in board.loc["small", "table1", 0].why
    assert board.loc["paper", "table1", 0].status == "runnable"


def test_a_stale_result_is_not_counted(demo):
    put(demo, "FedAvg", [70.0, 70.5])
    written(demo, RAW | dict(base=RAW["base"] | dict(rounds=4)), "demo/table1")
    assert statuses(demo)[0] == "runnable"
    written(demo, RAW, "demo/table1")
    assert statuses(demo)[0] == "consistent"


def test_a_result_that_changes_is_read_again(demo):
    import os

    file = put(demo, "FedAvg", [70.0, 70.5])[0]

    def age():
        for p in file.parent.iterdir():
            os.utime(p, (1e9, 1e9))

    age()
    folder = file.parent
    for frame in (store.load_results(folder), store.load_results(folder)):
        frame.loc[:, "round"] = -1  # a caller's copy
    assert len(store.LOADED[os.path.realpath(folder)][0]) == 2
    assert (store.load_results(folder)["round"] > 0).all()
    put(demo, "FedAvg", [30.0])
    age()
    assert 30.0 in set(store.load_results(folder).generalised_accuracy)


def test_status_of_a_cell():
    cell = lambda **k: pd.Series(
        dict(verdict="not run", n=0, diverged=0, untuned="", same_runs="") | k
    )
    assert status(cell(verdict="not measured"), "paper") == (
        "not comparable",
        "a run lacks the metric",
    )
    assert status(cell(verdict="other hardware", n=1), "paper") == (
        "not comparable",
        "seconds depend on the processor",
    )
    assert status(cell(verdict="contradicted", untuned="mu"), "paper") == (
        "contradicted",
        "untuned: mu",
    )
