"The rule of verdicts: by hand, against scipy; declared, counted once. (Against statsmodels, its limits and error rates: the page)"

import dataclasses
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedrepro.core.errors import InputError
from fedrepro.core.folders import find_specs
from fedrepro.experiments.rules import read_published_csv
from fedrepro.experiments.specs import load_spec
from fedrepro.verdicts.independent import own_table, read_reach, same_runs
from fedrepro.verdicts.scoreboard import ALIAS, independent, judged_lines, scoreboard, totals
from fedrepro.reporting.printed_tables import ends, render
from fedrepro.verdicts.tables import table
from fedrepro.verdicts.verdicts import (
    VERDICTS,
    default_margin,
    false_discovery,
    seeds_needed,
    standard_error,
    verdict,
    verdict_words,
)
import toy
from toy import BASE, TOY, written

PAPERS = Path(__file__).resolve().parents[2] / "papers"
NAN = math.nan


# --- the rule


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pairing", ["pooled", "welch"])
@pytest.mark.parametrize("n, n0", [(2, 3), (3, 3), (5, 4), (7, 2)])
def test_p_is_scipys(seed, pairing, n, n0):
    rng = np.random.default_rng(seed)
    x = rng.normal(70, 1, n)
    y = rng.normal(71, 3, n0)
    v = verdict(x, y.mean(), y.std(ddof=1), n0, pairing=pairing)
    oracle = stats.ttest_ind(x, y, equal_var=pairing == "pooled")
    assert math.isclose(v.p, oracle.pvalue, rel_tol=1e-6)
    assert math.isclose(v.df, oracle.df, rel_tol=1e-9)
    low, high = oracle.confidence_interval(0.95)
    assert math.isclose(v.interval, (high - low) / 2, rel_tol=1e-9)
    low, high = oracle.confidence_interval(0.9)
    assert math.isclose(v.far_end, max(abs(low), abs(high)), rel_tol=1e-6)


def test_a_new_observation_where_the_published_spread_is_not_used():
    "SE = s sqrt(1 + 1/n): scipy's t quantile of a prediction interval for one more value"
    x = np.array([69.1, 70.4, 70.9])
    a = verdict(x, 71.0, 6.3, 0)
    b = verdict(x, 71.0)
    assert a == b
    assert a.df == 2
    assert math.isclose(a.se, x.std(ddof=1) * math.sqrt(4 / 3))
    alone = verdict([71.0], 71.0)
    assert alone.word == "undecided"
    assert math.isnan(alone.interval)
    assert alone.needed == 2


@pytest.mark.parametrize("pairing", ["pooled", "welch"])
@pytest.mark.parametrize("value", [89.67, 89.28, 40.0])
def test_one_seed_decides_nothing_however_small_the_published_spread(value, pairing):
    alone = verdict([value], 89.67, 0.03, 3, margin=0.09, pairing=pairing)
    assert alone.word == "undecided"
    assert all(math.isnan(v) for v in (alone.se, alone.interval, alone.far_end, alone.p))
    assert alone.needed >= 2


@pytest.mark.parametrize(
    "values, published, std",
    [([70.0, 71.0, 72.0], 70.4, 0.3), ([68.0], 75.0, 1.0), ([60.0, 60.1], 70.0, 0.2)],
)
def test_above_and_below_are_the_same(values, published, std):
    a = verdict(values, published, std, 3)
    b = verdict([140 - v for v in values], 140 - published, std, 3)
    assert (a.word, a.interval, a.difference) == (
        b.word,
        pytest.approx(b.interval, nan_ok=True),
        pytest.approx(-b.difference),
    )


def test_a_declared_margin_and_gaps_that_say_nothing():
    assert default_margin(90.0, declared=2.0) == 2.0
    assert [default_margin(90.0, gap=g) for g in (9.0, 0.0, NAN)] == [1.0, 1.0, 1.0]
    assert false_discovery([NAN, 0.02])[1] == 0.02
    assert math.isnan(false_discovery([NAN])[0])
    assert false_discovery([]) == []


@pytest.mark.parametrize("pairing", ["pooled", "welch"])
@pytest.mark.parametrize("gap, s, s0", [(0.0, 1.0, 0.8), (1.0, 2.0, 0.5), (2.0, 1.5, 0.2)])
def test_the_seeds_that_are_said_to_decide_do(pairing, gap, s, s0):
    n = seeds_needed(gap, s, 2, s0, 3, 1.0, pairing)
    said = lambda k: str(verdict_words(gap, *standard_error(s, k, s0, 3, pairing), 1.0))
    assert said(n) != "undecided"
    assert all(said(k) == "undecided" for k in range(3, int(n)))


# --- declared in the specs

RAW = TOY | dict(
    paper="Demo",
    base=BASE | dict(rounds=3, seeds=[0, 1, 2], clients=3),
    columns=[{"label": "A"}],
    methods={
        "FedAvg": {},
        "FedProx": {},
        "second": {
            "class": "FedAvg",
            "epochs": 2,
            "source": "guess: another reading",
            "published": {"method": "FedAvg"},
        },
    },
)
CSV = "paper,table,method,dataset,mean,std\nDemo,{table},FedAvg,digits,70.0,0.5\nDemo,{table},FedProx,digits,{mean},0.50\n"
TRIALS = 'spread = "trials"\ntrials = 3\npairing = "pooled"'


@pytest.fixture
def demo(tmp_path):
    def write(table=1, top=TRIALS, row="", mean="71.0"):
        raw = (
            RAW
            | {"table": str(table), "published": f"table{table}.published.csv"}
            | tomllib.loads(top)
        )
        raw |= {"methods": RAW["methods"] | {"FedProx": tomllib.loads(row)}}
        return load_spec(
            written(
                tmp_path / "papers", raw, f"demo/table{table}", CSV.format(table=table, mean=mean)
            )
        )

    return write


def put(spec, row, values):
    toy.put(spec, "paper", row, [v and [v - 2, v - 1, v] for v in values])


@pytest.mark.parametrize(
    "top, word",
    [
        ('spread = "seeds"', "spread 'seeds'"),
        ('spread = "trials"', "trials"),
        ('spread = "trials"\ntrials = 1', "from 2 to 1000"),
        ('pairing = "paired"', "pairing"),
        ("margin = nan", "margin"),
        ('gap = ["FedAvg", "FedAvg"]', "two rows"),
        ('gap = ["FedAvg", "Nobody"]', "gap"),
        ("nan_model = 101.0", "nan_model"),
    ],
)
def test_wrong_declarations_are_refused(demo, top, word):
    with pytest.raises(InputError, match=word) as error:
        demo(top=top)
    assert "\n" not in str(error.value)


def line(spec, row):
    return table(spec, "paper").set_index("row").loc[row]


def test_what_the_spec_declares_is_used(demo):
    values = [70.0, 70.5, 71.0]
    cells = {}
    for name, top in dict(
        pooled=TRIALS,
        welch=TRIALS.replace("pooled", "welch"),
        last='spread = "last rounds"',
        own="",
        gap=TRIALS + '\ngap = ["FedAvg", "FedProx"]',
        base=TRIALS + '\ngap = ["FedProx"]',
        margin=TRIALS + "\nmargin = 4.0",
    ).items():
        spec = demo(top=top)
        put(spec, "FedAvg", values)
        cells[name] = line(spec, "FedAvg")
    assert cells["pooled"].df == 4
    assert cells["last"].df == cells["own"].df == 2
    assert 3.9 < cells["welch"].df <= 4
    assert [cells[k].margin for k in ("pooled", "gap", "base", "margin")] == [1.0, 0.5, 0.5, 4.0]
    assert cells["margin"].verdict == "reproduced"
    assert cells["pooled"].verdict == "consistent"


def test_rows_that_were_not_tuned_say_so(demo):
    spec = demo(row='untuned = "mu"')
    put(spec, "FedProx", [60.0, 60.1])
    put(spec, "FedAvg", [70.0, 70.1])
    text = render(spec, "paper")
    assert "contradicted, p < 0.001, q < 0.001, untuned" in text
    assert text.count("untuned") == 1


def test_undecided_cells_say_how_many_seeds_would_decide(demo):
    spec = demo()
    put(spec, "FedAvg", [71.0, 68.0])
    found = line(spec, "FedAvg")
    assert found.verdict == "undecided"
    assert f"undecided: {found.needed:.0f} seeds" in render(spec, "paper", "md")
    (spec.path.with_name("table1.published.csv")).write_text(
        CSV.format(table=1, mean=71).replace("0.50\n", "41.05\n")
    )
    put(spec, "FedProx", [70.0])
    assert "undecided: none can" in render(spec, "paper")


def test_a_diverged_run_beside_what_the_code_would_print(demo):
    spec = demo(top=TRIALS + "\nnan_model = 10.0")
    put(spec, "FedAvg", [None, None, 81.1])
    assert "33.70 ± 41.05 (3)" in render(spec, "paper")
    assert line(spec, "FedAvg").verdict == "diverged"
    assert "would print" not in render(demo(), "paper")
    # of a difference of two accuracies that value says nothing
    both = dataclasses.replace(spec, difference=(spec, spec))
    assert "would print" not in " ".join(ends(both, "paper", table(both, "paper")))


# --- counted once


def test_two_rows_never_share_a_number(demo):
    spec = demo()
    for row in ("FedAvg", "second"):
        put(spec, row, [70.0, 70.2, 70.4])
    second = line(spec, "second")
    assert (second.verdict, str(second.same_runs)) == ("same number", "row FedAvg")
    assert line(spec, "FedAvg").verdict in VERDICTS
    assert "same number as row FedAvg" in render(spec, "paper")
    board = scoreboard(root=spec.path.parents[1], tiers=("paper",))
    assert len(judged_lines(board)) == 1
    assert totals(board).consistent.sum() + totals(board).reproduced.sum() == 1


def test_rows_that_show_the_same_runs_count_once(demo):
    "Each stands beside a number of its own; the second is judged too, and counts for nothing"
    spec = demo(row='class = "FedAvg"')
    put(spec, "FedAvg", [70.0, 70.2, 70.4])
    twin = line(spec, "FedProx")
    board = scoreboard(root=spec.path.parents[1], tiers=("paper",))
    assert twin.verdict in VERDICTS
    assert str(twin.same_runs) == "row FedAvg"
    assert "(same runs as row FedAvg)" in render(spec, "paper")
    assert board.status.tolist().count(ALIAS) == 1
    assert len(judged_lines(board)) == 1
    assert len(independent(board)) == len(board)


def test_a_number_printed_twice_counts_once(demo):
    first = demo(1)
    second = demo(2, mean="72.0")
    put(first, "FedAvg", [70.0, 70.2, 70.4])
    again = {i: str(origin) for i, origin in same_runs(second).items()}
    # FedProx's numbers differ
    assert same_runs(first) == {}
    assert again == {0: "table 1"}
    assert str(line(second, "FedAvg").same_runs) == "table 1"
    assert line(first, "FedAvg").verdict in VERDICTS
    assert line(second, "FedAvg").verdict == "same number"
    assert "same number as table 1" in render(second, "paper")
    board = scoreboard(root=first.path.parents[1], tiers=("paper",))
    assert len(board) == 4
    assert len(independent(board)) == 3
    assert len(judged_lines(board)) == 1


def test_a_neighbour_that_cannot_be_read_does_not_stop_a_table(demo):
    spec = demo(1)
    demo(2).path.write_text("not toml [")
    assert same_runs(spec) == {}
    assert len(table(spec, "paper")) == 3


def test_the_papers_numbers(board):
    "An oracle from the csv files alone: equal numbers of one setting in two tables of a paper, by what the notes say"
    specs = [
        load_spec(p)
        for n, p in find_specs(PAPERS).items()
        if own_table(p) and not n.startswith("feddc/")
    ]
    printed = {s.name: read_published_csv(s.published) for s in specs}
    origins = board.same_runs.map(lambda origin: str(origin or ""))
    board = board.assign(same_runs=origins)
    lines = board[(board.tier == "paper") & ~origins.isin(["", "-"])]
    same = {
        f"{folder}/{table}": dict(zip(part.line, part.same_runs))
        for (folder, table), part in lines.groupby(["folder", "table"])
    }
    assert {n: len(v) for n, v in same.items()} == {
        "fedccfa/table8": 84,
        "fedccfa/table11": 6,
        "fedccfa/table3": 1,
        "fedccfa/table4": 1,
        "fedccfa/table5": 2,
        "lfd/table1": 1,
        "lfd/table3": 5,
    }
    for spec in (s for s in specs if s.name in same and not s.difference):
        for i, origin in same[spec.name].items():
            there = printed[f"{spec.folder}/table{origin.removeprefix('table ')}"]
            mine = printed[spec.name].iloc[i]
            twin = there[
                (there["mean"] == mine["mean"])
                & (there["std"] == mine["std"])
                & (there.dataset == mine.dataset)
            ]
            assert len(twin) == 1, (spec.name, i)


@pytest.mark.parametrize("text, word", [("[data]\nX = 1", "reason"), ("data = 3", "data")])
def test_a_wrong_list_of_what_is_out_of_reach(tmp_path, text, word):
    (tmp_path / "reach.toml").write_text(text)
    with pytest.raises(InputError, match=word):
        read_reach(tmp_path)


def test_every_row_with_a_grid_and_a_guess_says_untuned():
    "The specs declare what a paper tuned; where the value is still a guess the row must say so"
    from fedrepro.experiments.spec_files import read_spec

    for name, path in ((n, p) for n, p in find_specs(PAPERS).items() if own_table(p)):
        spec = load_spec(path)
        grids = read_spec(path).get("tuning", {})
        for row, grid in ((r, g) for r, g in grids.items() if r in spec.rows):
            values = spec.base | spec.rows[row].values
            guess = any(values[k].source.startswith("guess:") for k in grid if k in values)
            assert bool(spec.rows[row].untuned) == guess, (name, row)
