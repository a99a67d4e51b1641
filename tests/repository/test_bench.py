"The benchmark: it runs, all contestants do the same work, and what it writes can be read; no test looks at a time"

import json
import math
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import bench, equal, precision
from benchmarks.__main__ import main
from benchmarks.workloads import (
    Evaluation,
    PlainEvaluation,
    PlainLoop,
    Work,
    counted,
    read_work,
    works,
)
from fedrepro.core.trees import distance
from fedrepro.engine.rounds import begin, next_round
from fedrepro.executors.executors import executor

FILES = sorted((Path(__file__).resolve().parents[2] / "benchmarks").glob("*.json"))
SMALL = Work("small", network="digits_cnn", shape=(1, 8, 8), clients=3, samples=300, batch_size=32)
JOB = {"device": "cpu", "workers": 2}


@pytest.fixture
def said(capsys):
    def said(*argv):
        code = main([*map(str, argv)])
        return code, *capsys.readouterr()

    return said


WITHOUT_PEERS = pytest.mark.skipif(
    find_spec("flwr") is not None and find_spec("pfl") is not None, reason="the peers are installed"
)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--rounds", "0"], "--rounds"),
        (["--only", "W2"], "--only 'W2' is unknown; accepted: ResNet-18"),
        (["--samples", "100"], "samples 100"),
        (["--device", "gpu"], "gpu"),
        (["--json", "no/such/folder/x.json"], "no file can be written there"),
        pytest.param(["--peers"], "make peers", marks=WITHOUT_PEERS),
    ],
)
def test_bad_input(said, argv, words):
    code, out, err = said(*argv)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err


@pytest.mark.parametrize("kind", ["sequential", "stacked", "processes"])
def test_the_plain_loop_computes_the_same_model(kind):
    loop = PlainLoop(JOB | {"kind": "plain loop"})
    built = loop.build(SMALL, torch.float64)
    federation = SMALL.federation(dtype=torch.float64)
    method = SMALL.method()
    at = begin(method, federation)
    with executor(kind, federation, 2) as compute:
        for _ in range(2):
            loop.round(SMALL, built)
            at = next_round(method, federation, at, compute)
    assert distance(built["w"], at.server["params"]) < 1e-10
    assert (
        loop.done(SMALL, built)
        == counted(SMALL, federation)
        == {"samples": 300, "steps": built["steps"]}
    )


class Fake:
    "A remote that needs a second for its samples"

    def __init__(self, samples):
        self.samples = samples

    def ask(self, work, threads):
        pass

    def hear(self):
        return {"seconds": 1.0, "samples": self.samples, "steps": 3, "device_mb": None}


def test_different_work_is_refused():
    rows = bench.compare([("a", Fake(10), 1), ("b", Fake(10), 1)], [SMALL], 2)
    assert [row["seconds"] for row in rows] == [[1.0, 1.0]] * 2
    with pytest.raises(RuntimeError, match="did not do the same work"):
        bench.compare([("a", Fake(10), 1), ("b", Fake(11), 1)], [SMALL], 1)


def test_evaluation_is_the_same_by_hand():
    work = Work("tested", clients=3, samples=400, test_samples=30)
    ours, plain = (kind(JOB | {"kind": ""}) for kind in (Evaluation, PlainEvaluation))
    for c in (ours, plain):
        assert {k: c.timed(work)[k] for k in ("samples", "steps")} == {"samples": 90, "steps": 3}
    assert all(
        torch.equal(a, b) for a, b in zip(ours.built[work]["found"], plain.built[work]["found"])
    )


def test_precisions_are_compared_seed_by_seed():
    "By hand: differences 0.1, 0.2, 0.3 have the mean 0.2 and the standard error 0.1/sqrt(3)"
    found = precision.judged([60.0, 70.0, 65.0], [60.1, 70.2, 65.3])
    assert found.word == "reproduced"
    assert found.margin == 1.0
    assert found.far_end == pytest.approx(0.2 + 2.919986 * 0.1 / 3**0.5)
    assert precision.judged([60.0, 70.0, 65.0], [61.9, 72.0, 67.1]).word == "contradicted"
    for network in precision.NETWORKS:
        for a, b in precision.pairs(network):
            assert a.run_id != b.run_id
            assert b.settings == a.settings | {"precision": "bf16"}


def test_one_group_alone_is_reported(said):
    code, out, _ = said("--only", "state", "--quick", "--samples", 400, "--device", "cpu")
    assert code == 0
    assert "GB of state" in out


def test_equality_sees_nan_and_its_last_comparison(monkeypatch, capsys):
    of = lambda *values: Namespace(
        server={f"p{i}": torch.tensor([v]) for i, v in enumerate(values)}, states={}
    )
    assert equal.gap(of(1.0, 2.0), of(1.0, 3.0)) == 0.5
    assert math.isnan(equal.gap(of(1.0, 2.0), of(1.0, math.nan)))
    assert equal.gap(of(), of()) == 0
    row = {
        "method": "FedAvg",
        "network": "mlp",
        "precision": "float64",
        "executor": "stacked",
        "remarks": [],
    }
    for found, code in [([0.0], 0), ([math.nan], 1), ([0.0, None], 3)]:
        monkeypatch.setattr(
            equal,
            "rows",
            lambda *_: (
                gap if gap is None else row | {"gap": gap, "allowed": 1e-10} for gap in found
            ),
        )
        assert equal.main(["--minutes", "0"]) == code, capsys.readouterr()
    monkeypatch.undo()
    assert list(equal.rows("cpu", ["FedAvg"], ends=0)) == [None]


def test_works_have_samples_for_everyone():
    for samples in (400, 4_000, 60_000):
        for group in works(samples).values():
            for work in group:
                assert work.clients <= work.samples <= 60_000
    assert [w.clients for w in works(60_000)["growth"]] == [20, 100, 1000]
    assert read_work(json.loads(json.dumps(SMALL.__dict__))) == SMALL


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_committed_results(path):
    assert "share of limit" in bench.report(json.loads(path.read_text()))
