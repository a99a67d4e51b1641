"Every executor under a GPU that does not exist: shapes and devices are checked as there; numbers are not computed"

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fedrepro.core.trees import moved, tensors
from fedrepro.engine import evaluation
from fedrepro.engine.client import local_phases
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import begin, open_round
from fedrepro.executors import stacks
from fedrepro.executors.executors import EXECUTORS
from toy import few

TOY = few((20, 9, 14), dtype=torch.float32)


@pytest.fixture
def asked():
    "The devices of the trees that a stack compared with those of one client alone, a pair of trees a question"
    return []


@pytest.fixture
def gpu(monkeypatch, asked):
    """A mode in which the device `cuda` can be computed on

    What stands in for a GPU: gradients, which PyTorch takes from a real device only; and the answer to the one question
    for a value that there is, whether the steps of a stack differ from those of a client alone: they do not."""

    def same(a, b, smallest):
        assert [t.shape for t in tensors(a)] == [t.shape for t in tensors(b)]
        asked.append({t.device.type for t in tensors([a, b])})
        return False

    monkeypatch.setattr(stacks, "differ", same)
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, at, **_: [torch.zeros_like(t) for t in at]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield FakeTensorMode(allow_non_fake_inputs=True)


def on_gpu():
    "The federation with its data on the GPU; the labels are read on the host before"
    there = replace(TOY, data=TOY.data.to("cuda"), partition=replace(TOY.partition, test=None))
    there.__dict__["originals"] = [np.arange(n) % 10 for n in TOY.partition.sizes]
    return there


def clients_of(name):
    "(method, its clients in the first round)"
    there = on_gpu()
    method = load_methods()[name](lr=0.05, epochs=2, batch_size=8)
    at = begin(method, there)
    return method, lambda: open_round(method, there, at).clients


@pytest.mark.parametrize("how", EXECUTORS)
@pytest.mark.parametrize("name", ["FedAvg", "FedCCFA"])
def test_a_round_on_a_gpu(gpu, asked, name, how):
    """Results are on the device, with the shapes that the loop's have; nothing in a client's part waits for it

    But for what a stack asks about itself: four times a phase, however many steps it has."""
    rounds = 2
    with gpu:
        method, clients = clients_of(name)
        phases = len(local_phases(method, next(iter(clients()))))
        shapes = [t.shape for t in tensors(EXECUTORS["sequential"]()(method, clients()))]
        executor = EXECUTORS[how]()
        for _ in range(rounds):
            found = executor(method, clients())
    assert {t.device.type for t in tensors(found)} == {"cuda"}
    assert [t.shape for t in tensors(found)] == shapes
    if how == "stacked":
        assert executor.in_turn == {}  # every phase ran side by side
        assert asked == [{"cuda"}] * 4 * phases * rounds
    else:
        assert asked == []


def test_models_that_wait_on_the_host_are_judged_one_at_a_time(gpu, monkeypatch):
    "They stay there, are hashed there, and only what is new is copied to the GPU"
    hashed = []

    def digest(name, t):
        hashed.append((name, t.device.type))
        return f"{name} {id(t)}".encode().ljust(16)

    monkeypatch.setattr(evaluation, "tensor_digest", digest)
    with gpu:
        there = on_gpu()
        method = load_methods()["FedRep"](lr=0.05, epochs=1, batch_size=8)
        at = begin(method, there)
        at = replace(at, states=moved(at.states, "cpu"))
        models = evaluation.eval_models(method, there, at)
        predict = evaluation.Predictor()
        classes = predict(there, models)
        copies = []
        monkeypatch.setattr(evaluation, "on_device", lambda *what: copies.append(what))
        again = predict(there, models)
    for params in models:
        assert {name[:5]: t.device.type for name, t in params.items()} == {
            "body.": "cuda",
            "head.": "cpu",
        }
    assert {(name[:5], device) for name, device in hashed} == {("body.", "cuda"), ("head.", "cpu")}
    assert {t.device.type for t in classes} == {"cuda"} and not copies
    assert all(a is b for a, b in zip(classes, again))


def test_who_waits_is_seen(gpu):
    with gpu, pytest.raises(DataDependentOutputException):
        float(torch.zeros(3, device="cuda").sum())
    with gpu, pytest.raises(RuntimeError, match="devices"):
        torch.zeros(3, device="cuda") + torch.zeros(3)
