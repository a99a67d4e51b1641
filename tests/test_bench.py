"The benchmark: it runs, all contestants do the same work, and what it writes can be read; no test looks at a time"
import json
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench, precision
from benchmarks.__main__ import main
from benchmarks.workloads import Engine, Evaluation, PlainEvaluation, PlainLoop, Work, counted, flops_per_sample, read_work, works
from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance
from fedrepro.engine.rounds import begin, next_round
from fedrepro.executors.executors import executor

FILES = sorted((Path(__file__).resolve().parent.parent / "benchmarks").glob("*.json"))
SMALL = Work("small", network="digits_cnn", shape=(1, 8, 8), clients=3, samples=300, batch_size=32)
JOB = {"device": "cpu", "workers": 2}


def check(found):
    "The schema of a result"
    assert found["format"] == 1
    machine = {"cpu": str, "cores": int, "device": str, "workers": int, "torch": str, "python": str, "system": str,
               "commit": (str, type(None)), "commit_date": (str, type(None)), "changed": (bool, type(None)), "tf32": list}
    assert machine.keys() == found["machine"].keys()
    assert all(isinstance(found["machine"][k], types) for k, types in machine.items())
    named = {w["name"] for w in found["works"]}
    assert {w["group"] for w in found["works"]} >= {"W1", "ResNet-18", "growth", "state"}
    for row in found["rows"]:
        assert row["work"] in named and row["first_seconds"] > 0 and row["samples"] >= row["clients"]
        assert row["steps"] >= row["clients"] and row["seconds"] and min(row["seconds"]) > 0 and row["threads"] >= 1
    for name in named - {"SCAFFOLD"}:  # everybody did the same work
        assert len({(r["samples"], r["steps"]) for r in found["rows"] if r["work"] == name}) == 1
    assert all(set(entry["gflops"]) == {"own convolutions", "3x3 convolution", "matrix product"}
               and min(entry["gflops"].values()) > 0 for entry in found["limits"])
    assert found["state"]["bytes"] > 0 and found["peak_mb"].keys() == found["startup_seconds"].keys()


@pytest.fixture
def said(capsys):
    def said(*argv):
        code = main([*map(str, argv)])
        return code, *capsys.readouterr()
    return said


@pytest.mark.nightly("a process a contestant")
def test_the_command(said, tmp_path):
    "In its smallest form"
    file = tmp_path / "bench.json"
    code, out, err = said("--quick", "--samples", 400, "--rounds", 1, "--workers", 1, "--device", "cpu", "--json", file)
    assert code == 0, err
    found = json.loads(file.read_text())
    check(found)
    assert bench.report(found) == out
    assert {row["contestant"] for row in bench.rows_of(found, "W1")} == {"plain loop", "sequential", "stacked"}
    for word in ("W1: FedAvg, fedccfa_fmnist, 20 clients, 400 samples", "ResNet-18", "share of limit", "target"):
        assert word in out


@pytest.mark.parametrize("argv, words", [
    (["--rounds", "0"], "--rounds"), (["--only", "W2"], "--only 'W2' is unknown; accepted: ResNet-18"), (["--samples", "100"], "samples 100"), (["--device", "gpu"], "gpu"),
    (["--json", "no/such/folder/x.json"], "no file can be written there")])
def test_bad_input(said, argv, words):
    code, out, err = said(*argv)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and words in err


@pytest.mark.skipif(find_spec("flwr") is not None and find_spec("pfl") is not None, reason="the peers are installed")
def test_peers_that_are_not_installed(said):
    code, out, err = said("--peers")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and "make peers" in err


@pytest.mark.parametrize("kind", ["sequential", "stacked", "processes"])
def test_the_plain_loop_computes_the_same_model(kind):
    loop = PlainLoop(JOB | {"kind": "plain loop"})
    built, federation, method = loop.build(SMALL, torch.float64), SMALL.federation(dtype=torch.float64), SMALL.method()
    at = begin(method, federation)
    with executor(kind, federation, 2) as compute:
        for _ in range(2):
            loop.round(SMALL, built)
            at = next_round(method, federation, at, compute)
    assert distance(built["w"], at.server["params"]) < 1e-10
    assert loop.done(SMALL, built) == counted(SMALL, federation) == {"samples": 300, "steps": built["steps"]}


def test_a_contestant_counts_its_work():
    ours, plain = Engine(JOB | {"kind": "sequential"}), PlainLoop(JOB | {"kind": "plain loop"})
    a, b = ours.timed(SMALL), plain.timed(SMALL)
    assert {k: a[k] for k in ("samples", "steps")} == {k: b[k] for k in ("samples", "steps")}


class Fake:
    "A remote that needs a second for its samples"
    def __init__(self, samples): self.samples = samples
    def ask(self, work, threads): pass
    def hear(self): return {"seconds": 1., "samples": self.samples, "steps": 3, "device_mb": None}


def test_different_work_is_refused():
    rows = bench.compare([("a", Fake(10), 1), ("b", Fake(10), 1)], [SMALL], 2)
    assert [row["seconds"] for row in rows] == [[1., 1.]] * 2
    with pytest.raises(RuntimeError, match="did not do the same work"):
        bench.compare([("a", Fake(10), 1), ("b", Fake(11), 1)], [SMALL], 1)


def test_turns_are_told_one_by_one():
    told = []
    bench.compare([("a", Fake(10), 1)], [SMALL], 2, lambda turn, rows: told.append((turn, [len(r["seconds"]) for r in rows])))
    assert told == [(0, [0]), (1, [1]), (2, [2])]


def test_a_part_is_measured_anew_and_the_file_keeps_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "Remote", lambda *_: SimpleNamespace(settings={"tf32": [False, True]}, asked=StringIO(), end=lambda: None, startup=1.,
                                                                    ask=lambda *_: None, hear=Fake(10).hear))
    file, old = tmp_path / "old.json", json.loads(FILES[0].read_text())
    file.write_text(json.dumps(old))
    with pytest.raises(InputError, match="another machine or at another commit"): bench.bench(400, 1, only=("bf16",), file=file)
    file.write_text(json.dumps(old | {"machine": bench.machine("cpu", 1) | {"tf32": [False, True]}}))
    found = json.loads(json.dumps(bench.bench(400, 1, only=("bf16",), file=file)))
    assert json.loads(file.read_text()) == found and [len(bench.rows_of(found, g)) for g in ("W1", "bf16")] == [len(bench.rows_of(old, "W1")), 4]
    again = bench.bench(400, 2, only=("bf16",), file=file)
    assert len(again["rows"]) == len(found["rows"]) and len(bench.rows_of(again, "bf16")[0]["seconds"]) == 2
    report = bench.report(again)
    assert "training in bf16" in report and "growth from" in report and "evaluation of" not in report


def test_evaluation_is_the_same_by_hand():
    work = Work("tested", clients=3, samples=400, test_samples=30)
    ours, plain = (kind(JOB | {"kind": ""}) for kind in (Evaluation, PlainEvaluation))
    for c in (ours, plain): assert {k: c.timed(work)[k] for k in ("samples", "steps")} == {"samples": 90, "steps": 3}
    assert all(torch.equal(a, b) for a, b in zip(ours.built[work]["found"], plain.built[work]["found"]))


def test_precisions_are_compared_seed_by_seed():
    "By hand: differences 0.1, 0.2, 0.3 have the mean 0.2 and the standard error 0.1/sqrt(3)"
    found = precision.judged([60., 70., 65.], [60.1, 70.2, 65.3])
    assert found.word == "reproduced" and found.margin == 1. and found.reach == pytest.approx(.2 + 2.919986 * .1 / 3**.5)
    assert precision.judged([60., 70., 65.], [61.9, 72., 67.1]).word == "contradicted"
    for network in precision.NETWORKS:
        for a, b in precision.pairs(network): assert a.run_id != b.run_id and b.settings == a.settings | {"precision": "bf16"}


def test_works_have_samples_for_everyone():
    for samples in (400, 4_000, 60_000):
        for group in works(samples).values():
            for work in group: assert work.clients <= work.samples <= 60_000
    assert [w.clients for w in works(60_000)["growth"]] == [20, 100, 1000]
    assert read_work(json.loads(json.dumps(SMALL.__dict__))) == SMALL


def test_flops_are_linear_in_nothing_but_the_network():
    assert flops_per_sample(SMALL) == flops_per_sample(Work("other", network="digits_cnn", shape=(1, 8, 8), samples=9999))


def test_too_few_samples():
    with pytest.raises(InputError, match="at least 400"): bench.bench(samples=10)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_committed_results(path):
    found = json.loads(path.read_text())
    check(found)
    assert "share of limit" in bench.report(found)
    assert found["state"]["clients"] == 1000 and found["state"]["bytes"] < 2e9
