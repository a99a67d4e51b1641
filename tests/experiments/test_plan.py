"Costs before anything is spent: counted operations against a count by hand, shared rounds once, job arrays"

import subprocess
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fedrepro.core.errors import InputError
from fedrepro.core.folders import data_dir
from fedrepro.data.datasets import DATA_CARDS, load, stand_in
from fedrepro.data.sources import DataCard
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.rounds import run
from fedrepro.experiments import plan as costs, store
from fedrepro.experiments.plan import (
    Cost,
    Plan,
    commands,
    few_samples,
    plan,
    plan_row,
    sbatch,
    rough_cost,
    trial,
    trial_of,
)
from fedrepro.experiments.progress import duration
from fedrepro.experiments.runs import build
from fedrepro.experiments.specs import load_spec
from fedrepro.experiments.sweep import SweepPart, SweepStep, outlook
from test_runner import SPEC, small

AVG = small(SPEC.runs("smoke", ["FedAvg"], 1)[0])


def with_fields(planned, **fields):
    method = planned.settings["method"]
    return replace(
        planned,
        settings=planned.settings | {"method": method | {"fields": method["fields"] | fields}},
    )


def test_operations_of_a_network_by_hand():
    "digits_cnn: two operations a multiplication; back through every layer twice, but the first, whose input needs no gradient"
    found = trial(with_fields(AVG, epochs=3))
    # 8x8 images, halved twice
    conv1 = 2 * 16 * 9 * 64
    conv2 = 2 * 32 * 16 * 9 * 16
    fc1 = 2 * 64 * 128
    head = 2 * 10 * 64
    forward = conv1 + conv2 + fc1 + head
    assert found.judging == forward
    assert found.flops == 3 * (3 * forward - conv1)


def test_a_trial_takes_the_first_samples_of_each_client():
    whole = build(AVG)[1]
    few = few_samples(whole, 8).partition
    all_of_them = few_samples(whole, 10**6).partition
    assert max(few.sizes) <= 8
    assert all(set(some) <= set(mine) for some, mine in zip(few.train, whole.partition.train))
    assert all((some == mine).all() for some, mine in zip(all_of_them.train, whole.partition.train))


@pytest.mark.parametrize(
    "row, every, last",
    [
        ("FedAvg", 1, 1),
        ("Ditto", 3, 1),
        ("FedRep", 3, 2),
        ("FedBABU", 3, 2),
        ("IFCA", 1, 1),
        ("FedCCFA", 3, 1),
    ],
)
def test_what_is_judged_is_what_a_run_judges(row, every, last):
    "Against the bodies that a run applies to the whole test set, counted in the evaluation itself"
    planned = small(SPEC.runs("smoke", [row], 1)[0])
    # what is judged does not depend on them
    data = planned.settings["data"] | {"train_samples": 200}
    planned = replace(
        planned,
        settings=planned.settings
        | {"every": every, "last": last, "participation": 0.8, "rounds": 5, "data": data},
    )
    method, federation, rounds = build(planned)
    expected = costs.judged_bodies(planned, trial(planned))
    counted = [0]
    tests = len(federation.data.test_y)
    features = type(federation.net).features

    def counting(net, params, x, train=False):
        counted[0] += 0 if torch.is_grad_enabled() else len(x)
        return features(net, params, x, train)

    def judge(*given):
        with patch.object(type(federation.net), "features", counting):
            return evaluate(*given)

    run(method, federation, rounds, judge, every, last=last)
    found = counted[0] / tests
    # models that nobody chose stay
    assert found <= expected <= found * (2 if row == "IFCA" else 1.5) + 1, (found, expected)


def test_old_broadcasts_are_counted_where_they_are_kept():
    "Against draws of cohorts; and FedAvg, whose evaluation reads the newest model alone, keeps none"
    found = {}
    for row in ("FedAvg", "FedRep"):
        planned = small(SPEC.runs("smoke", [row], 1)[0])
        fewer = planned.settings | {"participation": 0.25, "rounds": 12}
        found[row] = trial(replace(planned, settings=fewer))
    assert found["FedAvg"].broadcast == 0 < found["FedRep"].broadcast
    planned = replace(planned, settings=fewer)
    assert costs.run_cost(planned, found["FedAvg"]).memory == found["FedAvg"].memory
    assert costs.run_cost(planned, found["FedRep"]).memory > found["FedRep"].memory
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(400):
        last = dict.fromkeys(range(20), -1)
        for t in range(12):
            last |= dict.fromkeys(rng.choice(20, 5, replace=False).tolist(), t)
        counts.append(len({*last.values()} - {-1, 11}))
    assert costs.old_broadcasts(planned, 20) == pytest.approx(np.mean(counts), rel=0.05)


STAND_INS = [name for name, card in DATA_CARDS.items() if card.has_stand_in]


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_have_the_sizes_that_the_source_declares(name):
    blank = stand_in(name)
    card = DATA_CARDS[name]
    source = card.source
    assert (len(blank.train_y), len(blank.test_y)) == source.sizes
    assert blank.classes == card.classes
    assert blank.batch(blank.train_x[:2]).shape == (2, *blank.shape)
    if source.class_names:
        assert blank.class_names == source.class_names
        assert len(source.class_names) == blank.classes
    assert int(blank.train_y.bincount().max() - blank.train_y.bincount().min()) <= 1


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_have_the_sizes_of_the_data_sets(name):
    if not DATA_CARDS[name].source.present(data_dir()):
        pytest.skip(f"{name} is not on this machine")
    blank = stand_in(name)
    real = load(name)
    assert (blank.shape, blank.classes) == (real.shape, real.classes)
    assert len(blank.train_y) == len(real.train_y)
    assert len(blank.test_y) == len(real.test_y)


def drifting(at=None, **more):
    drift = {"name": "sudden", "at": at} if at else {"name": "none"}
    return replace(AVG, settings=AVG.settings | {"rounds": 10, "drift": drift} | more)


@pytest.mark.parametrize(
    "asked, runs, rounds",
    [
        ([drifting(5), drifting(8)], 2, 15),
        ([drifting(8), drifting(5)], 2, 15),
        ([drifting(), drifting(5)], 2, 15),
        ([drifting(5), drifting()], 2, 15),
        ([drifting(5), drifting(8), drifting()], 3, 17),
        ([drifting(5), replace(drifting(5), column="another")], 1, 10),
    ],
)
def test_shared_rounds_are_counted_once(tmp_path, asked, runs, rounds):
    "In any order; a run that two cells of a table show is one"
    single = plan(SPEC, [drifting()], "smoke", tmp_path)
    found = plan(SPEC, asked, "smoke", tmp_path)
    assert (found.jobs, found.runs, found.missing) == (1, runs, runs)
    assert found.cost.samples == pytest.approx(single.cost.samples * rounds / 10)
    (line,) = commands("x", asked, tmp_path, [])
    assert len(line.split()[-1].split(",")) == runs


def test_what_is_there_costs_nothing_and_tells_the_time_of_its_like(tmp_path):
    from fedrepro.experiments.runner import compute_runs

    other = replace(AVG, settings=AVG.settings | {"seed": 1})
    compute_runs([AVG], tmp_path, quiet=True)
    head = store.read(store.run_path(tmp_path, AVG))[0]
    found = plan(SPEC, [AVG, other], "smoke", tmp_path)
    assert (found.runs, found.missing, found.known) == (
        2,
        1,
        1,
    )
    assert found.cost.seconds == pytest.approx(head["wall_seconds"])
    assert plan_row(found, 2)["missing"] == "1 of 2"
    assert plan_row(found, 2)["by"] == "stored runs"


@pytest.fixture
def trials(monkeypatch, tmp_path):
    "The runs that were tried, with a cache that is empty at first"
    seen = []

    def counted(run, *given):
        seen.append(run)
        return trial(run, *given)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(costs, "trial", counted)
    return seen


def test_a_trial_is_made_once_and_only_when_asked_for(trials, tmp_path):
    "The measured plan is the same afterwards; another kind of work, or another version, is another question"
    asked = [AVG, replace(AVG, settings=AVG.settings | {"seed": 1})]
    assert plan(SPEC, asked, "smoke", tmp_path).tried == len(trials) == 0
    first = plan(SPEC, asked, "smoke", tmp_path, measure="missing")
    assert len(trials) == 1
    assert (first.tried, first.measured) == (2, 2)
    assert len(first.on) == 10
    assert plan(SPEC, asked, "smoke", tmp_path) == first
    assert plan(SPEC, asked, "smoke", tmp_path, measure="missing") == first
    assert len(trials) == 1
    again = plan(SPEC, asked, "smoke", tmp_path, measure="again")
    assert len(trials) == 2
    assert replace(again, cost=first.cost) == first
    assert plan(SPEC, asked, "smoke", tmp_path) == again, "the last measurement counts"
    assert plan_row(again, 1)["by"] == f"measured {again.on}"
    assert plan_row(again, 1)["memory"]
    assert trial_of(with_fields(AVG, epochs=7)) is None
    with patch.object(costs, "__version__", "another"):
        assert trial_of(AVG) is None
    with pytest.raises(InputError, match="never.*again, kept, missing"):
        trial_of(AVG, measure="never")
    assert len(trials) == 2


def test_without_a_trial_the_time_is_that_of_stored_runs(trials, tmp_path):
    "Seconds a sample and epoch: the median of the method's runs on the network, else FedAvg's; never those of others"
    from fedrepro.experiments.runner import compute_runs

    seeds = [replace(AVG, settings=AVG.settings | {"seed": s}) for s in range(3)]
    compute_runs(seeds, tmp_path, quiet=True)
    heads = [store.read(store.run_path(tmp_path, r))[0] for r in seeds]
    middle = sorted(h["wall_seconds"] for h in heads)[1]
    prox = small(SPEC.runs("smoke", ["FedProx"], 1)[0])
    longer = replace(AVG, settings=AVG.settings | {"rounds": 3 * AVG.rounds, "every": 7})
    twice = with_fields(AVG, epochs=2 * AVG.settings["method"]["fields"]["epochs"])
    paces = costs.stored_paces([AVG], tmp_path)
    for run, factor in ((prox, 1), (longer, 3), (twice, 2)):
        assert rough_cost(run, paces).seconds == pytest.approx(factor * middle), run
        found = plan(SPEC, [run], "smoke", tmp_path)
        assert (found.rough, found.tried) == (1, 0)
        assert plan_row(found, 1)["by"] == "rough"
    elsewhere = replace(AVG, settings=AVG.settings | {"network": "fedccfa_fmnist"})
    assert costs.stored_paces([elsewhere], tmp_path).keys().isdisjoint({("FedAvg", "digits_cnn")})
    nothing = plan(SPEC, [prox], "smoke", tmp_path / "empty")
    assert (nothing.untimed, nothing.cost.seconds) == (1, 0.0)
    assert nothing.cost.samples > 0
    assert plan_row(nothing, 1)["by"] == "not timed"
    assert plan_row(nothing, 1)["time"] == ""
    assert trials == []


@pytest.fixture
def stored(tmp_path):
    "Stores a copy of a finished run with other settings and another header"
    from fedrepro.experiments.runner import compute_runs

    compute_runs([AVG], tmp_path, quiet=True)
    head, rows = store.read(store.run_path(tmp_path, AVG))

    def stored(run, **more):
        told = head | {"settings": run.settings, "run_id": run.run_id} | more
        store.write(store.run_path(tmp_path, run), told, rows)
        return told

    return stored


def test_seconds_of_a_gpu_are_those_of_no_cpu(stored, tmp_path, monkeypatch):
    "Neither for runs that are alike, nor for rough times, nor for the steps of a sweep"
    first, second, third = (replace(AVG, settings=AVG.settings | {"seed": s}) for s in range(3))
    stored(first, device="NVIDIA H100", wall_seconds=1e6)
    stored(second, wall_seconds=100.0)
    asked = [first, second, third]
    parts = [[SweepPart(tmp_path, "digits", asked)]]
    steps = [SweepStep(("demo/t",))]
    for device, name, seconds in (("cpu", "cpu", 100.0), ("cuda", "NVIDIA H100", 1e6)):
        monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
        found = plan(SPEC, asked, "smoke", tmp_path, device=device)
        assert (found.known, found.cost.seconds) == (1, seconds)
        (line,) = outlook(steps, parts, device)
        assert line["time"] == f"{duration(seconds)} for 1 of them"
        (pace,) = costs.stored_paces([AVG], tmp_path, device).values()
        samples = costs.passes(AVG.settings, 1437)
        assert pace == pytest.approx(seconds / samples) or device == "cpu"  # the papers' too


def test_results_on_ones_own_data_stop_no_plan(stored, tmp_path, monkeypatch):
    "Their data set is unknown here, or its reader raises; a table that does not use it asks neither"
    data = AVG.settings["data"] | {"name": "mydata"}
    stored(replace(AVG, settings=AVG.settings | {"data": data, "network": "my_net"}))
    other = replace(AVG, settings=AVG.settings | {"network": "my_net", "seed": 7})
    assert costs.stored_paces([other], tmp_path) == {}
    monkeypatch.setattr(costs, "load_data", lambda *given: 1 / 0)
    monkeypatch.setitem(DATA_CARDS, "mydata", DataCard("mydata", lambda *given: 1 / 0))
    assert costs.stored_paces([other], tmp_path) == {}
    few = AVG.settings | {"data": data | {"train_samples": 100}, "network": "my_net"}
    told = stored(replace(AVG, settings=few))
    paces = costs.stored_paces([other], tmp_path)
    assert paces == {("FedAvg", "my_net"): told["wall_seconds"] / costs.passes(few, 100)}


def test_rough_costs_of_the_papers_do_not_train(trials):
    "The whole of a paper's table, from the runs that are stored in the repository"
    spec = load_spec("fedccfa/table2")
    found = plan(spec, spec.runs("paper"), "paper")
    assert found == plan(spec, spec.runs("paper"), "paper")
    assert trials == []
    assert found.known + found.rough == found.missing > 0
    assert found.untimed == 0
    assert 100 < found.cost.seconds / 3600 < 10_000


def test_a_job_array_is_a_script_that_bash_reads(tmp_path):
    some = Plan("x", "smoke", 9, 9, 5, Cost(memory=4e9, seconds=4000.0), 0)
    path = sbatch(
        tmp_path / "jobs.sh",
        ["fedrepro", "run", "it's a spec", "--no-wait"],
        [some],
        99,
        2.5,
        "cuda",
        2,
        account="ml",
        partition=None,
    )
    text = path.read_text()
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    for part in (
        "--array=0-2%3\n",
        "--time=2:30:00\n",
        "--mem=11444M\n",
        "--cpus-per-task=2\n",
        "--gres=gpu:1\n",
        "--account=ml\n",
        "--requeue\n",
        "--open-mode=append\n",
        "--signal=B:TERM@60\n",
        """exec fedrepro run 'it'"'"'s a spec' --no-wait --time-budget 148m --workers 2\n""",
    ):
        assert part in text, text
    assert "partition" not in text
    # ten minutes a job, and no more than there are to do
    for seconds, jobs, throttle, array in (
        (10.0, 99, None, "0-0%1"),
        (1e6, 99, 2, "0-4%2"),
        (1e6, 4, 9, "0-3%4"),
    ):
        assert (
            f"--array={array}\n"
            in sbatch(
                tmp_path / "jobs.sh",
                ["x"],
                [replace(some, cost=Cost(seconds=seconds))],
                jobs,
                1.0,
                throttle=throttle,
            ).read_text()
        )
    for hours, time, budget in ((0.001, "0:01", "1m"), (2.3, "2:18", "136m")):
        text = sbatch(tmp_path / "jobs.sh", ["x"], [some], 1, hours).read_text()
        assert f"--time={time}:00\n" in text
        assert f"exec x --time-budget {budget} " in text
    for hours in (0, -1, 1001, float("nan")):
        with pytest.raises(InputError, match="--hours"):
            sbatch(tmp_path / "no.sh", ["x"], [some], 1, hours)
    with pytest.raises(InputError, match="--account"):
        sbatch(tmp_path / "no.sh", ["x"], [some], 1, 1.0, account="a\n#SBATCH --uid=0")
    assert not (tmp_path / "no.sh").exists()


def test_stored_runs_without_a_step_tell_no_pace(stored, tmp_path):
    "Zero epochs: seconds, but no sample that took them"
    idle = with_fields(AVG, epochs=0)
    elsewhere = replace(idle, settings=idle.settings | {"network": "my_net"})
    stored(elsewhere, wall_seconds=100.0)
    assert costs.passes(elsewhere.settings, 1437) == 0
    assert costs.stored_paces([elsewhere], tmp_path) == {}
