"Every executor under a GPU that does not exist: shapes, devices and waits are checked as there; numbers are not computed"

import warnings
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from fedrepro.core.trees import tensors
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import begin, open_round
from fedrepro.executors import kernels
from fedrepro.executors.executors import EXECUTORS
from fedrepro.models.architectures import Net
from toy import few

TOY = few((20, 9, 14), dtype=torch.float32)


class Stream(nullcontext):
    "Nothing runs beside anything"

    def wait_stream(self, other):
        pass


class Graph(Stream):
    "Recording computes shapes; playing counts"

    played = recorded = 0

    def replay(self):
        Graph.played += 1


def recording(graph, pool=None):
    Graph.recorded += 1
    return graph


@pytest.fixture
def gpu(monkeypatch):
    """A mode in which the device `cuda` can be computed on

    What stands in for a GPU: streams, graphs, the trial of kernels, and gradients, which PyTorch takes from a real device only."""
    monkeypatch.setattr(Graph, "played", 0), monkeypatch.setattr(Graph, "recorded", 0)
    own = dict(
        Stream=Stream,
        CUDAGraph=Graph,
        graph=recording,
        graph_pool_handle=object,
        stream=lambda s: s,
        current_stream=Stream,
    )
    for name, fake in own.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, at, **_: [torch.zeros_like(t) for t in at]
    )
    monkeypatch.setattr(
        kernels,
        "choose_kernel",
        lambda layer, *_: "product" if layer.in_channels == 1 else "grouped",
    )

    def outside(f):
        def g(*arguments):
            with unset_fake_temporarily():
                return f(*arguments)

        return g

    for place, name in ((Net, "without_layouts"), (kernels, "layers_of")):
        monkeypatch.setattr(place, name, outside(getattr(place, name)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield FakeTensorMode(allow_non_fake_inputs=True)


def clients_of(name):
    "(method, its clients in the first round) with data on the GPU; the labels are read on the host before"
    there = replace(TOY, data=TOY.data.to("cuda"), partition=replace(TOY.partition, test=None))
    there.__dict__["originals"] = [np.arange(n) % 10 for n in TOY.partition.sizes]
    method = load_methods()[name](lr=0.05, epochs=2, batch_size=8)
    at = begin(method, there)
    return method, lambda: open_round(method, there, at).clients


@pytest.mark.parametrize("how", EXECUTORS)
@pytest.mark.parametrize("name", ["FedAvg", "FedCCFA"])
def test_a_round_on_a_gpu(gpu, name, how):
    "Results are on the device, with the shapes that the loop's have; nothing in a client's part waits for it"
    with gpu:
        method, clients = clients_of(name)
        shapes = [t.shape for t in tensors(EXECUTORS["sequential"]()(method, clients()))]
        executor = EXECUTORS[how]()
        for _ in range(2):
            found = executor(method, clients())
    assert {t.device.type for t in tensors(found)} == {"cuda"} and [
        t.shape for t in tensors(found)
    ] == shapes
    assert (Graph.played > Graph.recorded > 0) is ("graphs" in how)


def test_who_waits_is_seen(gpu):
    with gpu, pytest.raises(DataDependentOutputException):
        float(torch.zeros(3, device="cuda").sum())
    with gpu, pytest.raises(RuntimeError, match="devices"):
        torch.zeros(3, device="cuda") + torch.zeros(3)
