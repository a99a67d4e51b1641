"""Methods as people write them equal a plain PyTorch loop in float64, or are refused in one line where they go wrong."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo_methods as zoo
from torch import nn

from fedrepro.core.trees import distance
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.methods.server import FedAvgM
from toy import one_line
from zoo_methods import PLAIN, SIZES, federation, normed_net

ROUNDS = 3


def module(fed, w) -> nn.Module:
    found = fed.net.make().double()
    found.load_state_dict(w)
    return found.train()


def batch(fed, k):
    rows = fed.indices[k]
    return fed.data.batch(fed.data.train_x[rows], None, torch.float64), fed.data.train_y[rows]


def fit(fed, w, k, make, clip=None):
    "Client k's model after two epochs on all of its samples, by PyTorch's own optimiser `make(parameters)`"
    net, (x, y) = module(fed, w), batch(fed, k)
    step = make(net.parameters())
    for _ in range(PLAIN["epochs"]):
        step.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        step.step()
    return {n: t.detach().clone() for n, t in net.state_dict().items()}, step


def mean(trees):
    return {n: sum(s * t[n] for s, t in zip(SIZES, trees)) / sum(SIZES) for n in trees[0]}


def by_hand(fed, make, server=lambda w, new, t: new, clip=None):
    "Three rounds, `make(t)` the optimiser of round t, `server(w, mean, t)` its step"
    w = {n: t.clone() for n, t in fed.initial.items()}
    for t in range(ROUNDS):
        w = server(w, mean([fit(fed, w, k, make(t), clip)[0] for k in range(len(SIZES))]), t)
    return w


def sgd(lr=0.1, **more):
    return lambda t: lambda ps: torch.optim.SGD(ps, lr, **more)


def ended(method, fed, **more):
    return run(method, fed, ROUNDS, **more).snapshot


def test_adam_at_the_clients():
    fed = federation()
    want = by_hand(fed, lambda t: lambda ps: torch.optim.Adam(ps, 0.01))
    assert (
        distance(ended(zoo.ClientAdam(**PLAIN | dict(lr=0.01)), fed).server["params"], want) < 1e-10
    )


def test_adam_at_the_server():
    fed = federation()
    m = {}
    v = {}

    def server(w, new, t):
        out = {}
        for n in w:
            d = (new[n] - w[n]).numpy()
            m[n] = 0.9 * m.get(n, 0.0) + 0.1 * d
            v[n] = 0.99 * v.get(n, np.full_like(d, 1e-6)) + 0.01 * d**2
            out[n] = w[n] + torch.from_numpy(0.1 * m[n] / (np.sqrt(v[n]) + 1e-3))
        return out

    assert (
        distance(ended(zoo.FedAdam(**PLAIN), fed).server["params"], by_hand(fed, sgd(), server))
        < 1e-10
    )


def test_normalisation_that_stays_at_the_client():
    fed = federation(normed_net)
    w = dict(fed.initial)
    own = [dict(fed.initial) for _ in SIZES]

    def local(tree):
        return {n: t for n, t in tree.items() if n.startswith(zoo.NORM)}

    for t in range(ROUNDS):
        own = [fit(fed, w | local(own[k]), k, sgd()(t))[0] for k in range(len(SIZES))]
        w = w | {
            n: x
            for n, x in mean([{n: x.double() for n, x in o.items()} for o in own]).items()
            if not n.startswith(zoo.NORM)
        }
    at = ended(zoo.FedBN(**PLAIN), fed)
    assert at.server["params"].keys() == {n for n in w if not n.startswith(zoo.NORM)}
    assert (
        max(float((at.server["params"][n] - w[n]).abs().max()) for n in at.server["params"]) < 1e-10
    )
    for state, mine in zip(at.states, own):
        assert (
            max(
                float((t.double() - mine[n].double()).abs().max()) for n, t in state["norm"].items()
            )
            < 1e-10
        )


def test_a_schedule_of_the_learning_rate():
    fed = federation()
    want = by_hand(fed, lambda t: sgd(0.1 * (1 + math.cos(math.pi * t / 4)) / 2)(t))
    assert distance(ended(zoo.Cosine(**PLAIN), fed).server["params"], want) < 1e-10


def test_clipping_and_momentum_are_pytorch_s():
    fed = federation()
    want = by_hand(fed, sgd(momentum=0.9, weight_decay=1e-2), clip=0.3)
    found = ended(
        FedAvg(**PLAIN | dict(momentum=0.9, weight_decay=1e-2, clip_norm=0.3)), fed
    ).server["params"]
    assert (
        distance(found, want)
        < 1e-5
        < distance(found, by_hand(fed, sgd(momentum=0.9, weight_decay=1e-2)))
    )
    free = ended(FedAvg(**PLAIN | dict(momentum=0.9, weight_decay=1e-2)), fed).server["params"]
    assert distance(free, by_hand(fed, sgd(momentum=0.9, weight_decay=1e-2))) < 1e-10


def test_momentum_at_the_server():
    fed = federation()
    v = {}

    def server(w, new, t):
        for n in w:
            v[n] = 0.7 * v.get(n, 0.0) + (w[n] - new[n])
        return {n: w[n] - v[n] for n in w}

    want = by_hand(fed, sgd(), server)
    for method in (zoo.HeavyBall(**PLAIN), FedAvgM(**PLAIN)):
        assert distance(ended(method, fed).server["params"], want) < 1e-10


def test_a_momentum_that_a_client_keeps():
    fed = federation()
    w = dict(fed.initial)
    kept = [None] * len(SIZES)
    for _ in range(ROUNDS):
        ends = []
        for k in range(len(SIZES)):
            net, (x, y) = module(fed, w), batch(fed, k)
            step = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
            if kept[k]:
                step.load_state_dict(copy.deepcopy(kept[k]))
            for _ in range(2):
                step.zero_grad()
                F.cross_entropy(net(x), y).backward()
                step.step()
            kept[k] = step.state_dict()
            ends.append({n: t.detach().clone() for n, t in net.state_dict().items()})
        w = mean(ends)
    at = ended(zoo.KeepsMomentum(**PLAIN), fed)
    assert distance(at.server["params"], w) < 1e-10
    assert [int(s["met"]) for s in at.states] == [ROUNDS] * len(SIZES)


@pytest.mark.parametrize("idle", [None, 1])
def test_moves_per_step_count_the_steps_that_were_taken(idle):
    "By hand: sum p_k H_k times sum p_k (w_k - w) / H_k; a client without a step has H_k = 0 and has not moved"
    fed = federation()
    p = [n / sum(SIZES) for n in SIZES]
    method = zoo.PerStep(**PLAIN)
    if idle is not None:
        zoo.idle_for(method, idle)
    steps = [0 if k == idle else 2 for k in range(3)]
    w = dict(fed.initial)
    for t in range(ROUNDS):
        ends = [w if k == idle else fit(fed, w, k, sgd()(t))[0] for k in range(3)]
        each = sum(a * h for a, h in zip(p, steps))
        w = {
            n: w[n] + each * sum(a * (e[n] - w[n]) / max(h, 1) for a, e, h in zip(p, ends, steps))
            for n in w
        }
    assert distance(ended(method, fed).server["params"], w) < 1e-10


@pytest.mark.parametrize(
    "method", [zoo.FedAdam, zoo.Cosine, zoo.HeavyBall, zoo.KeepsMomentum, zoo.PerStep]
)
def test_every_executor_computes_them(method):
    fed = federation()
    plain = ended(method(**PLAIN), fed).server["params"]
    for name in EXECUTORS:
        assert (
            distance(
                ended(method(**PLAIN), fed, executor=EXECUTORS[name]()).server["params"], plain
            )
            < 1e-10
        ), name


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("what", zoo.REFUSED)
def test_a_wrong_method_is_refused_in_one_line(what, executor):
    method, words = zoo.REFUSED[what]
    with one_line(*words):
        run(method(**PLAIN), federation(), 1, executor=EXECUTORS[executor]())


@pytest.mark.parametrize("what", zoo.DIVERGED)
def test_what_is_not_finite_ends_the_run_and_names_who(what):
    method, who = zoo.DIVERGED[what]
    history = run(method(**PLAIN), federation(), 2)
    assert history.status == "diverged"
    assert (
        history.diverged["round"],
        history.diverged["client"],
    ) == (1, who)


def test_each_accepted_method_has_a_computation_by_hand():
    text = Path(__file__).read_text()
    assert all(f"zoo.{method.__name__}(" in text for method in zoo.ACCEPTED)
