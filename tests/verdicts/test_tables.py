"Tables as values, from result files: verdicts against hand-worked numbers"

import math

import pytest

from fedrepro.core.errors import InputError
from fedrepro.experiments.specs import STATISTICS, load_spec
from fedrepro.verdicts.independent import read_published
from fedrepro.verdicts.summaries import seed_values
from fedrepro.verdicts.tables import q_values, table, table_rows
from toy import written
from toy_tables import CSV, ONE, RAW, diverged, put, spec


@pytest.mark.parametrize(
    "text, word",
    [
        ("method,mean\nA,1\n", "'std' is missing"),
        ("", "cannot be read"),
        ("method,mean,std\nA,x,1\n", "mean 'x' is not"),
    ],
)
def test_damaged_published_numbers(spec, text, word):
    spec.published.write_text(text)
    with pytest.raises(InputError, match=word):
        read_published(spec)


def test_rows_keep_the_published_order_and_lose_nothing(spec):
    rows = table_rows(spec, read_published(spec))
    assert list(rows) == ["IFCA", "prox", "FedAvg", "twin"]
    table2 = load_spec("fedccfa/table2")
    paper = read_published(table2)
    published = list(dict.fromkeys(paper.method))
    assert [r for r in table_rows(table2, paper) if r in published] == published


def test_table(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "prox", ONE, [72.5])
    long = table(spec, "paper").set_index(["column", "row"])
    avg = long.loc[ONE, "FedAvg"]
    assert (avg["mean"], avg["std"], avg.n, avg.difference, avg.verdict) == (
        70.0,
        1.0,
        3,
        0.0,
        "consistent",
    )
    assert (avg["last"], avg.best, avg["values"], avg.seeds) == (
        70.0,
        71.0,
        (69.0, 70.0, 71.0),
        (0, 1, 2),
    )
    assert math.isclose(avg.mean_last_10, 70.0)
    assert avg.last_std == avg.best_std == 1.0, "over seeds; rounds_std is over rounds"
    assert long.loc[ONE, "prox"].verdict == "undecided"
    assert math.isnan(long.loc[ONE, "prox"]["std"])
    assert (
        long.loc[ONE, "IFCA"].verdict
        == long.loc["digits, 4 clients", "FedAvg"].verdict
        == "not run"
    )
    assert long.loc[ONE, "IFCA"].published_mean == 50.0
    assert long.loc["digits, 4 clients", "FedAvg"].published_mean == 60.0


def test_a_diverged_trial_is_not_averaged_away(spec):
    put(spec, "paper", "FedAvg", ONE, [69, None, 71])
    avg = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert math.isnan(avg["mean"])
    assert (avg.n, avg.diverged, avg.verdict) == (2, 1, "diverged")
    assert all(math.isnan(avg[s]) for s in STATISTICS)
    assert avg["values"] == (69.0, "diverged", 71.0)


def test_a_run_without_the_metric_is_not_left_out(spec):
    put(spec, "paper", "FedAvg", ONE, [70.0, math.nan, 72.0])
    avg = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert math.isnan(avg["mean"])
    assert (avg.n, avg.diverged, avg.verdict) == (2, 0, "not measured")
    put(spec, "smoke", "FedAvg", ONE, [math.nan])
    avg = table(spec, "smoke").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert avg.verdict == "not measured"


def test_only_the_paper_tier_is_judged(spec):
    put(spec, "smoke", "FedAvg", ONE, [70, 70, 70])
    avg = table(spec, "smoke").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert avg.verdict == "not comparable"
    assert math.isnan(avg.difference)
    assert avg.published_mean == 70.0


def test_q_counts_the_papers_other_tables(spec):
    put(spec, "paper", "prox", ONE, [74.0, 74.1, 73.9])
    (p,) = table(spec, "paper").p.dropna()
    assert q_values(spec) == {("prox", ONE): pytest.approx(p)}
    other = RAW | dict(published="u.published.csv", base=RAW["base"] | dict(batch_size=32))
    put(
        load_spec(written(spec.path.parents[1], other, "demo/u", CSV)),
        "paper",
        "FedAvg",
        ONE,
        [70.0, 70.1, 70.2],
    )
    assert q_values(spec)[("prox", ONE)] == pytest.approx(2 * p)


def test_another_tables_rows_are_not_borrowed(spec):
    other = load_spec(written(spec.path.parents[1], RAW, "demo/readings", CSV))
    assert (
        set(table(other, "paper").row) == {"prox", "FedAvg", "twin"} < set(table(spec, "paper").row)
    )


def test_a_run_says_where_it_diverged(spec, diverged):
    tier, words = diverged
    run = seed_values(spec, tier).set_index(["row", "seed"]).loc["FedAvg"]
    assert run.diverged.tolist() == ["", words, "round 2, client 0, norm inf"]
    long = table(spec, tier).set_index(["column", "row"])
    line = long.loc[ONE, "FedAvg"]
    assert line.diverged_runs == ((1, words), (2, "round 2, client 0, norm inf"))
    assert line.diverged == 2
    assert not any(long.drop(index=(ONE, "FedAvg")).diverged_runs)
