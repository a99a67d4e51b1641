"Random draws of a network come from seed, round and client alone: whoever computes, after a resume, whatever was drawn before"

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedrepro.core.trees import distance, same_bits
from fedrepro.engine.evaluation import Evaluator
from fedrepro.engine.method import METHODS, FedAvg
from fedrepro.engine.rounds import run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.executors.processes import Processes
from fedrepro.models.net import Net, Network

SHORT = dict(lr=0.05, epochs=1, batch_size=64)


class Always(nn.Module):
    "Dropout that evaluation does not switch off, a common slip"

    def forward(self, x):
        return F.dropout(x, 0.3)


def dropping():
    return Network(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(8, 10)
    )


def slipping():
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Always()), nn.Linear(8, 10))


@pytest.fixture(params=[dropping, slipping])
def fed(part, request):
    return replace(part, net=Net("drops", request.param))


def end(fed, method="FedAvg", rounds=3, **how):
    history = run(METHODS[method](**SHORT), fed, rounds, Evaluator(), **how)
    return history.snapshot, history.rows


def same(a, b):
    return same_bits([a[0].server, a[0].states], [b[0].server, b[0].states]) and a[1] == b[1]


@pytest.mark.parametrize("method", ["FedAvg", "Ditto", "FedRep"])
def test_what_the_caller_drew_is_no_part_of_it(fed, method):
    torch.manual_seed(1)
    first = end(fed, method)
    before = torch.get_rng_state()
    torch.rand(5)
    assert same(first, end(fed, method))
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state()), "the caller's generator has moved"


def test_another_seed_draws_other_numbers(fed):
    "Of one client's work, with the same order of its data"
    method = FedAvg(**SHORT)
    from fedrepro.engine.client import client_round

    def work(noise):
        return client_round(
            method, replace(fed.client(0, 0, {"params": fed.initial}, {}), noise=noise)
        )[0]["params"]

    assert same_bits(work(fed.noise(1, 0, 0)), work(fed.noise(1, 0, 0)))
    for other in (fed.noise(1, 1, 0), fed.noise(1, 0, 1), replace(fed, seed=9).noise(1, 0, 0)):
        assert distance(work(fed.noise(1, 0, 0)), work(other)) > 1e-6


@pytest.mark.parametrize("name", [name for name in EXECUTORS if name != "sequential"])
def test_every_executor_draws_the_same(fed, name):
    assert same(end(fed), end(fed, executor=EXECUTORS[name]()))


def test_workers_draw_the_same(part):
    fed = replace(part, net=Net("drops", dropping))
    with Processes(fed, 2) as pool:
        assert same(end(fed), end(fed, executor=pool))


@pytest.mark.parametrize("method", ["FedAvg", "FedRep", "Ditto"])
def test_a_resumed_run_draws_the_same(fed, method):
    whole = end(fed, method, 4)
    half = end(fed, method, 2)
    torch.rand(3)
    rest = end(fed, method, 4, start=half[0])
    assert same_bits(whole[0].server, rest[0].server)
    assert whole[1][2:] == rest[1]


def test_networks_that_draw_nothing_keep_their_batches(part):
    "The order of a client's data is that of the stream (seed, TRAIN, round, client), as ever"
    client = part.client(2, 1, {}, {})
    client.chance()
    assert np.array_equal(
        client.rng.permutation(9), np.random.default_rng([part.seed, 1, 1, 2]).permutation(9)
    )


class Jitter(nn.Module):
    "A layer that starts from NumPy's draws and, in training, draws from Python's generator"

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(np.random.uniform(0.9, 1.1, 8), dtype=torch.float32))

    def forward(self, x):
        return x * self.scale * (random.uniform(0.5, 1.5) if self.training else 1)


def jittering():
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Jitter()), nn.Linear(8, 10))


class Mixup(FedAvg, listed=False):
    "Mixup whose weights, and whose number of epochs, come from NumPy's global generator"

    def local_phases(self, client):
        return [self.phase(client, epochs=np.random.randint(1, 4))]

    def loss(self, client, params, batch):
        share = np.random.beta(1, 1)
        mixed = share * batch.x + (1 - share) * batch.x.flip(0)
        logits = client.net(params, mixed, train=True)
        first = F.cross_entropy(logits, batch.y, reduction="none")
        second = F.cross_entropy(logits, batch.y.flip(0), reduction="none")
        return batch.mean(share * first + (1 - share) * second)


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_draws_of_numpy_and_python_come_from_the_seed_too(part, executor):
    def played(seed):
        random.seed(seed)
        np.random.seed(seed)
        federation = replace(part, net=Net("jitters", jittering))
        history = run(Mixup(**SHORT), federation, 3, Evaluator(), executor=EXECUTORS[executor]())
        return history.snapshot, history.rows

    first = played(1)
    next_draws = (random.random(), np.random.rand())
    assert same(first, played(2))
    random.seed(1)
    np.random.seed(1)
    assert next_draws == (random.random(), np.random.rand()), "the caller's generators have moved"
