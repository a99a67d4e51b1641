"""FedBSS on two clients, worked out again in plain PyTorch from eq. 3 to 6 and Algorithm 1; no released code exists."""

import math
from dataclasses import replace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_by_hand import FOUR as AWAY, TWO as PARTS, W, X, Y, federation as by_rows, logits
from fedrepro.core.trees import distance, weighted_mean
from fedrepro.engine.client import client_round
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.methods.fedbss import SELECTIONS, FedBSS, split

SETTINGS = dict(lr=0.2, lr_decay=0.5, momentum=0.5, weight_decay=1e-2, epochs=4, batch_size=2)


def tiny(parts=PARTS, **changes):
    return by_rows(parts, **changes)


def epochs_by_hand(w, part, selection, E):
    "The samples of each epoch, one by one"
    p = logits(w, X[part]).softmax(-1).tolist()
    loss = [-math.log(row[y]) for row, y in zip(p, Y[part].tolist())]
    uncertainty = [1 - (max(row) - min(row)) for row in p]
    middle = loss[uncertainty.index(max(uncertainty))]
    biased = sorted((i for i in range(len(part)) if loss[i] > middle), key=lambda i: loss[i])
    out = []
    for e in range(1, E + 1):
        share = {"cosine": 0.5 - 0.5 * math.cos(math.pi * e / E), "linear": e / E, "filter": 0}[
            selection
        ]
        m = sum(i + 0.5 <= share * len(biased) + 1e-9 for i in range(len(biased)))
        out.append([i for i in range(len(part)) if i not in biased or i in biased[:m]])
    return out


def plain(
    fed,
    rounds,
    warm_up,
    selection,
    weights,
    lr,
    lr_decay,
    momentum,
    weight_decay,
    epochs,
    batch_size,
):
    "Server's model after each round"
    w = W
    out = []
    for t in range(rounds):
        ends = []
        for k, part in enumerate(PARTS):
            rng, v, u = fed.client(k, t, {}, {}).rng, w, None  # the client's own order of samples
            everything = [list(range(len(part)))] * epochs
            for pool in everything if t < warm_up else epochs_by_hand(w, part, selection, epochs):
                order = [part[pool[j]] for j in rng.permutation(len(pool))]
                for rows in (order[i : i + batch_size] for i in range(0, len(order), batch_size)):
                    leaves = {n: a.clone().requires_grad_() for n, a in v.items()}
                    g = torch.autograd.grad(
                        F.cross_entropy(logits(leaves, X[rows]), Y[rows]), list(leaves.values())
                    )
                    g = {n: a + weight_decay * v[n] for n, a in zip(leaves, g)}
                    u = g if u is None else {n: momentum * u[n] + g[n] for n in g}
                    v = {n: v[n] - lr * lr_decay**t * u[n] for n in v}
            ends.append(v)
        w = {n: sum(a * v[n] for a, v in zip(weights, ends)) / sum(weights) for n in w}
        out.append(w)
    return out


def gap(method, warm_up=1, selection="cosine", weights=(1, 1)):
    "The largest difference between `method` and the equations over three rounds"
    fed = tiny()
    now = begin(method, fed)
    worst = 0.0
    for w in plain(fed, 3, warm_up, selection, weights, **SETTINGS):
        now = next_round(method, fed, now)
        worst = max(worst, distance(now.server["params"], w))
    return worst


# --- the equations


@pytest.mark.parametrize("warm_up", [0, 1, 2])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_fedbss(warm_up, selection):
    assert gap(FedBSS(warm_up=warm_up, selection=selection, **SETTINGS), warm_up, selection) < 1e-10


def latest_by_hand(fed, rounds, method):
    "Line 12 to the letter: the mean of every client's last model, the initial one for who has none"
    last = [fed.initial] * fed.clients
    w = fed.initial
    for t in range(rounds):
        for k in fed.cohort(t):
            last[k] = client_round(method, fed.client(k, t, {"params": w}, {}))[0]["params"]
        w = {n: sum(v[n] for v in last) / fed.clients for n in w}
    return w


def test_over_all_clients():
    fed = tiny(**AWAY)
    m = FedBSS(warm_up=1, aggregation="all", **SETTINGS)
    assert len({k for t in range(4) for k in fed.cohort(t)}) > 2 == len(fed.cohort(0))
    there = latest_by_hand(fed, 4, FedBSS(warm_up=1, **SETTINGS))
    at = run(m, fed, 4).snapshot
    assert distance(at.server["params"], there) < 1e-10
    assert (
        distance(run(FedBSS(warm_up=1, **SETTINGS), fed, 4).snapshot.server["params"], there) > 1e-4
    )
    assert distance(at.server["params"], weighted_mean([s["latest"] for s in at.states])) < 1e-10


def test_weights_by_size():
    assert gap(FedBSS(warm_up=1, aggregation="size", **SETTINGS), weights=(7, 3)) < 1e-10


@pytest.mark.parametrize(
    "m",
    [
        FedBSS(warm_up=0, **SETTINGS),
        FedBSS(warm_up=2, **SETTINGS),
        FedBSS(warm_up=1, selection="linear", **SETTINGS),
        FedBSS(warm_up=1, aggregation="size", **SETTINGS),
    ],
    ids=["earlier", "later", "linear", "by size"],
)
def test_the_comparison_can_fail(m):
    assert gap(m) > 1e-4


@pytest.mark.parametrize(
    "loss, uncertainty, unbiased, biased",
    [
        ([0.1, 0.7, 2.0, 0.4, 3.0], [0.05, 0.9, 0.4, 0.5, 0.1], [0, 3, 1], [2, 4]),
        # the best sample is the most uncertain
        ([3.0, 0.1, 0.7, 2.0], [0.1, 0.8, 0.2, 0.3], [1], [2, 3, 0]),
        ([3.0, 0.1, 0.7, 2.0], [0.9, 0.8, 0.2, 0.3], [1, 2, 3, 0], []),  # the worst is
        # two are: no dividing point
        ([3.0, 0.1, 0.7, 2.0], [0.1, 0.8, 0.8, 0.3], [1, 2, 3, 0], []),
        # two of one loss divide as one
        ([3.0, 0.7, 0.7, 2.0], [0.1, 0.8, 0.8, 0.3], [1, 2], [3, 0]),
        # equal losses: unbiased with it; stored order
        ([2.0, 0.7, 2.0, 0.1, 0.7], [0.1, 0.9, 0.2, 0.3, 0.4], [3, 1, 4], [0, 2]),
        ([5.0], [0.2], [0], []),
        ([math.nan, math.nan], [math.nan, math.nan], [0, 1], []),
    ],
)
def test_split(loss, uncertainty, unbiased, biased):
    found = split(np.array(loss), np.array(uncertainty))
    assert [part.tolist() for part in found] == [unbiased, biased]


def test_two_classes_divide_where_the_model_changes_its_mind():
    p = np.random.default_rng(0).uniform(size=(50, 31))
    for row in p:
        _, biased = split(-np.log(row), 1 - np.abs(2 * row - 1))
        assert set(biased) == set(np.flatnonzero(row < 0.5)) - {np.argmin(np.abs(row - 0.5))}


def test_ratings_by_hand():
    client = replace(tiny().client(0, 9, {"params": W}, {}), pad=3)
    p = logits(W, X[PARTS[0]]).softmax(-1)
    loss, uncertainty = FedBSS().rate(client)
    assert torch.allclose(loss, -p[range(7), Y[PARTS[0]]].log(), atol=1e-12, rtol=0)
    assert torch.allclose(uncertainty, 1 - (p[:, 0] - p[:, 1]).abs(), atol=1e-12, rtol=0)


def test_selection_depends_on_the_received_model_alone():
    fed = tiny()
    m = FedBSS(**SETTINGS)
    client = fed.client(0, 60, {"params": W}, {})
    other = replace(fed, seed=5).client(0, 199, {"params": W}, {"x": X})
    stream = str(client.rng.bit_generator.state)
    pools = m.select(client)
    assert str(client.rng.bit_generator.state) == stream
    assert not client.constants
    assert not client.state
    assert all(np.array_equal(a, b) for a, b in zip(pools, m.select(other)))
    far = fed.client(0, 60, {"params": {n: -t for n, t in W.items()}}, {})
    assert not all(np.array_equal(a, b) for a, b in zip(pools, m.select(far)))


def test_the_rating_is_in_eval_mode_and_not_augmented(part):
    class Watching:
        def __call__(self, params, x, train=False):
            assert not train
            assert len(x) == client.n
            return part.net(params, x)

    client = part.client(0, 60, {"params": part.initial}, {})
    draws = []
    client.net = Watching()
    client.draw = draws.append
    FedBSS().rate(client)
    assert not draws
