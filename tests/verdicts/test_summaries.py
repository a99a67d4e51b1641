"Finished runs are read once for a spec, and anew as soon as anything that they rest on has changed"

import math
import os
import time

import pandas as pd
import pytest

from fedrepro.data.datasets import RECIPES
from fedrepro.engine.method import FedAvg
from fedrepro.experiments.specs import Spec, load_spec
from fedrepro.verdicts.summaries import stored_runs, to_target
from toy import TOY, written
from toy import put as put_now


@pytest.fixture
def toy(tmp_path):
    return load_spec(written(tmp_path, TOY, "demo/x"))


@pytest.fixture
def planned(monkeypatch):
    "How often runs were planned"
    calls = []
    grid = Spec.grid

    def counted(*args, **more):
        calls.append(args)
        return grid(*args, **more)

    monkeypatch.setattr(Spec, "grid", counted)
    return calls


def put(*args):
    "Stored runs of an hour ago: a file that has just been written may change once more within its time stamp"
    for file in put_now(*args):
        hour_ago = time.time() - 3600
        os.utime(file, (hour_ago, hour_ago))


def one_tier(spec):
    return next(iter(spec.tiers))


def test_runs_are_read_once(toy, planned):
    row = next(iter(toy.rows))
    tier = one_tier(toy)
    rounds = toy.runs(tier)[0].rounds
    put(toy, tier, row, [[50.0] * rounds])
    first = stored_runs(toy, tier)
    assert len(first) == 1
    planned.clear()
    again = stored_runs(toy, tier)
    assert not planned
    assert again is not first
    assert [(run, id(rows)) for run, rows in again] == [(run, id(rows)) for run, rows in first]
    again.clear()
    assert len(stored_runs(toy, tier)) == 1  # a list of one's own was given out


def test_a_run_more_is_seen(toy, planned):
    row = next(iter(toy.rows))
    tier = one_tier(toy)
    rounds = toy.runs(tier)[0].rounds
    put(toy, tier, row, [[50.0] * rounds])
    assert len(stored_runs(toy, tier)) == 1
    put(toy, tier, row, [[50.0] * rounds, [60.0] * rounds])
    assert len(stored_runs(toy, tier)) == 2


def test_what_is_registered_counts(toy, planned):
    "A method, or an entry in a table of the package: runs are planned anew, and what is replaced is refused as ever"
    row = next(iter(toy.rows))
    tier = one_tier(toy)
    put(toy, tier, row, [[50.0] * toy.runs(tier)[0].rounds])
    stored_runs(toy, tier)

    class Newcomer(FedAvg):
        "Registered by its definition"

    planned.clear()
    assert len(stored_runs(toy, tier)) == 1
    assert planned
    planned.clear()
    stored_runs(toy, tier)
    assert not planned
    RECIPES["FedCCFA"]["a set of one's own"] = {}
    stored_runs(toy, tier)
    assert planned


def test_runs_with_code_of_ones_own_are_planned_each_time(tmp_path, planned):
    class Mine(FedAvg):
        "A method of this file"

    spec = load_spec(written(tmp_path, TOY | {"methods": {"Mine": {}, "FedAvg": {}}}, "demo/y"))
    tier = one_tier(spec)
    put(spec, tier, "FedAvg", [[50.0] * spec.runs(tier)[0].rounds])
    for _ in range(2):  # also while none of its own runs is there
        planned.clear()
        assert len(stored_runs(spec, tier)) == 1
        assert planned


def test_a_metric_that_was_not_measured_is_not_one_that_does_not_reach_its_target():
    "Its run was counted among those that had not reached it"
    run = pd.DataFrame({"round": [1, 2], "a": [50.0, 60.0], "b": [math.nan, math.nan]})
    assert to_target(run, "a", 70.0)["to_target"] == math.inf
    assert all(math.isnan(t) for t in to_target(run, "b", 70.0).values())
