"""FedBSS on two clients, worked out again in plain PyTorch from eq. 3 to 6 and Algorithm 1; no released code exists."""
import math
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_by_hand import FOUR as AWAY, TWO as PARTS, W, X, Y, federation as by_rows, logits
from test_fedadc import Uniform
from fedrepro.checks.harness import padded
from fedrepro.core.trees import distance, nbytes, weighted_mean
from fedrepro.data import datasets, partition
from fedrepro.engine.client import client_round
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.methods.fedbss import SELECTIONS, FedBSS, split, used
from fedrepro.models import networks

SETTINGS = dict(lr=.2, lr_decay=.5, momentum=.5, weight_decay=1e-2, epochs=4, batch_size=2)

def tiny(parts=PARTS, **changes): return by_rows(parts, **changes)

def epochs_by_hand(w, part, selection, E):
    "The samples of each epoch, one by one"
    p = logits(w, X[part]).softmax(-1).tolist()
    loss = [-math.log(row[y]) for row, y in zip(p, Y[part].tolist())]
    uncertainty = [1 - (max(row) - min(row)) for row in p]
    middle = loss[uncertainty.index(max(uncertainty))]
    biased = sorted((i for i in range(len(part)) if loss[i] > middle), key=lambda i: loss[i])
    out = []
    for e in range(1, E + 1):
        share = {"cosine": .5 - .5 * math.cos(math.pi * e / E), "linear": e / E, "filter": 0}[selection]
        m = sum(i + .5 <= share * len(biased) + 1e-9 for i in range(len(biased)))
        out.append([i for i in range(len(part)) if i not in biased or i in biased[:m]])
    return out

def plain(fed, rounds, warm_up, selection, weights, lr, lr_decay, momentum, weight_decay, epochs, batch_size):
    "Server's model after each round"
    w, out = W, []
    for t in range(rounds):
        ends = []
        for k, part in enumerate(PARTS):
            rng, v, u = fed.client(k, t, {}, {}).rng, w, None  # the client's own order of samples
            everything = [list(range(len(part)))] * epochs
            for pool in everything if t < warm_up else epochs_by_hand(w, part, selection, epochs):
                order = [part[pool[j]] for j in rng.permutation(len(pool))]
                for rows in (order[i:i + batch_size] for i in range(0, len(order), batch_size)):
                    leaves = {n: a.clone().requires_grad_() for n, a in v.items()}
                    g = torch.autograd.grad(F.cross_entropy(logits(leaves, X[rows]), Y[rows]), list(leaves.values()))
                    g = {n: a + weight_decay * v[n] for n, a in zip(leaves, g)}
                    u = g if u is None else {n: momentum * u[n] + g[n] for n in g}
                    v = {n: v[n] - lr * lr_decay ** t * u[n] for n in v}
            ends.append(v)
        w = {n: sum(a * v[n] for a, v in zip(weights, ends)) / sum(weights) for n in w}
        out.append(w)
    return out

def gap(method, warm_up=1, selection="cosine", weights=(1, 1)):
    "The largest difference between `method` and the equations over three rounds"
    fed = tiny()
    now, worst = begin(method, fed), 0.
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
    last, w = [fed.initial] * fed.clients, fed.initial
    for t in range(rounds):
        for k in fed.cohort(t): last[k] = client_round(method, fed.client(k, t, {"params": w}, {}))[0]["params"]
        w = {n: sum(v[n] for v in last) / fed.clients for n in w}
    return w

def test_over_all_clients():
    fed, m = tiny(**AWAY), FedBSS(warm_up=1, aggregation="all", **SETTINGS)
    assert len({k for t in range(4) for k in fed.cohort(t)}) > 2 == len(fed.cohort(0))
    there = latest_by_hand(fed, 4, FedBSS(warm_up=1, **SETTINGS))
    at = run(m, fed, 4).snapshot
    assert distance(at.server["params"], there) < 1e-10
    assert distance(model(FedBSS(warm_up=1, **SETTINGS), fed), there) > 1e-4
    assert distance(at.server["params"], weighted_mean([s["latest"] for s in at.states])) < 1e-10

@pytest.mark.parametrize("warm_up", [0, 9])
def test_over_all_clients_is_over_the_participants_when_all_take_part(warm_up):
    fed = tiny()
    a, b = (model(FedBSS(warm_up=warm_up, aggregation=how, **SETTINGS), fed) for how in ("all", "uniform"))
    assert distance(a, b) < 1e-10
    if warm_up: assert distance(a, model(Uniform(**SETTINGS), fed)) < 1e-10
    equal = tiny(EQUAL)
    if warm_up: assert distance(*(model(m, equal) for m in (FedBSS(warm_up=9, aggregation="all", **SETTINGS), FedAvg(**SETTINGS)))) < 1e-10

def test_weights_by_size(): assert gap(FedBSS(warm_up=1, aggregation="size", **SETTINGS), weights=(7, 3)) < 1e-10

@pytest.mark.parametrize("m", [FedBSS(warm_up=0, **SETTINGS), FedBSS(warm_up=2, **SETTINGS),
                               FedBSS(warm_up=1, selection="linear", **SETTINGS),
                               FedBSS(warm_up=1, aggregation="size", **SETTINGS)],
                         ids=["earlier", "later", "linear", "by size"])
def test_the_comparison_can_fail(m): assert gap(m) > 1e-4

def test_sizes_by_hand():
    "E = 10, of 1000: 24.5, 95.5, 206.1, 345.5, 500, and what is left of 1000"
    assert [used("cosine", e, 10, 1000) for e in range(1, 11)] == [24, 95, 206, 345, 500, 655, 794, 905, 976, 1000]
    assert [used("linear", e, 10, 7) for e in range(1, 11)] == [1, 1, 2, 3, 4, 4, 5, 6, 6, 7]
    assert [used(s, 1, 1, 7) for s in SELECTIONS] == [7, 7, 0]
    assert used("cosine", 5, 10, 5) == 3 and used("cosine", 1, 3, 2) == 1 and used("cosine", 2, 3, 2) == 2  # halves up

@pytest.mark.parametrize("loss, uncertainty, unbiased, biased", [
    ([.1, .7, 2., .4, 3.], [.05, .9, .4, .5, .1], [0, 3, 1], [2, 4]),
    ([3., .1, .7, 2.], [.1, .8, .2, .3], [1], [2, 3, 0]),  # the best sample is the most uncertain
    ([3., .1, .7, 2.], [.9, .8, .2, .3], [1, 2, 3, 0], []),  # the worst is
    ([3., .1, .7, 2.], [.1, .8, .8, .3], [1, 2, 3, 0], []),  # two are: no dividing point
    ([3., .7, .7, 2.], [.1, .8, .8, .3], [1, 2], [3, 0]),  # two of one loss divide as one
    ([2., .7, 2., .1, .7], [.1, .9, .2, .3, .4], [3, 1, 4], [0, 2]),  # equal losses: unbiased with it; stored order
    ([5.], [.2], [0], []), ([math.nan, math.nan], [math.nan, math.nan], [0, 1], [])])
def test_split(loss, uncertainty, unbiased, biased):
    found = split(np.array(loss), np.array(uncertainty))
    assert [part.tolist() for part in found] == [unbiased, biased]

def test_two_classes_divide_where_the_model_changes_its_mind():
    p = np.random.default_rng(0).uniform(size=(50, 31))
    for row in p:
        _, biased = split(-np.log(row), 1 - np.abs(2 * row - 1))
        assert set(biased) == set(np.flatnonzero(row < .5)) - {np.argmin(np.abs(row - .5))}

def test_ratings_by_hand():
    client = replace(tiny().client(0, 9, {"params": W}, {}), pad=3)
    p = logits(W, X[PARTS[0]]).softmax(-1)
    loss, uncertainty = FedBSS().rate(client)
    assert torch.allclose(loss, -p[range(7), Y[PARTS[0]]].log(), atol=1e-12, rtol=0)
    assert torch.allclose(uncertainty, 1 - (p[:, 0] - p[:, 1]).abs(), atol=1e-12, rtol=0)


# --- laws

class Agreeing(FedBSS):
    "Uncertainty grows with the loss: the most uncertain sample has the largest loss"
    def rate(self, client): return 2 * [super().rate(client)[0]]

def model(m, fed, rounds=4): return run(m, fed, rounds).snapshot.server["params"]

EQUAL = [[0, 1, 3], [2, 5, 9], [4, 6, 7]]
ONE = SETTINGS | {"epochs": 1}

@pytest.mark.parametrize("m, there, parts", [
    (FedBSS(warm_up=4, **SETTINGS), FedAvg(**SETTINGS), EQUAL),
    (FedBSS(warm_up=4, **SETTINGS), Uniform(**SETTINGS), PARTS),
    (FedBSS(warm_up=4, aggregation="size", **SETTINGS), FedAvg(**SETTINGS), PARTS),
    (Agreeing(warm_up=0, **SETTINGS), FedAvg(**SETTINGS), EQUAL),
    (FedBSS(warm_up=0, **SETTINGS), FedAvg(**SETTINGS), [[0], [4], [8]]),
    *((FedBSS(warm_up=0, selection=s, **ONE), FedAvg(**ONE), EQUAL) for s in ("cosine", "linear"))],
    ids=["equal sizes", "uniform", "by size", "nothing biased", "one sample", "one epoch", "one linear epoch"])
def test_equals_fedavg(m, there, parts):
    fed = tiny(parts)
    assert distance(model(m, fed), model(there, fed)) < 1e-10

def test_and_else_it_does_not():
    fed = tiny(EQUAL)
    there = model(FedAvg(**SETTINGS), fed)
    assert min(distance(model(FedBSS(warm_up=t, **SETTINGS), fed), there) for t in (0, 1)) > 1e-4

@pytest.mark.parametrize("selection", SELECTIONS)
def test_epochs_grow_to_all_samples(selection):
    pools = FedBSS(selection=selection, **SETTINGS | {"epochs": 10}).select(tiny().client(0, 60, {"params": W}, {}))
    assert len(pools) == 10 and all(set(a) <= set(b) for a, b in zip(pools, pools[1:]))
    assert all(p.dtype == np.int64 and (np.diff(p) > 0).all() for p in pools)
    assert (len(pools[-1]) < 7) == (selection == "filter") and len(pools[0]) < 7

def test_selection_depends_on_the_received_model_alone():
    fed, m = tiny(), FedBSS(**SETTINGS)
    client, other = fed.client(0, 60, {"params": W}, {}), replace(fed, seed=5).client(0, 199, {"params": W}, {"x": X})
    stream = str(client.rng.bit_generator.state)
    pools = m.select(client)
    assert str(client.rng.bit_generator.state) == stream and not client.constants and not client.state
    assert all(np.array_equal(a, b) for a, b in zip(pools, m.select(other)))
    far = fed.client(0, 60, {"params": {n: -t for n, t in W.items()}}, {})
    assert not all(np.array_equal(a, b) for a, b in zip(pools, m.select(far)))


# --- on a network

@pytest.fixture(scope="module")
def digits():
    loaded = datasets.load("digits")
    cut = partition.partition("dirichlet-class", loaded.train_y.numpy(), clients=10, seed=0, alpha=.3)
    few = SimpleNamespace(train=tuple(rows[:n] for rows, n in zip(cut.train, range(9, 59, 5))), test=None)
    return Federation(loaded, networks.network("digits_cnn"), few, participation=.5, dtype=torch.float64)

FAST = dict(lr=.05, momentum=.5, epochs=3, batch_size=16, warm_up=1)

def test_padding_and_a_resume_change_nothing(digits):
    m = FedBSS(**FAST)
    there = model(m, digits, 3)
    assert distance(run(m, digits, 3, executor=padded(3)).snapshot.server["params"], there) < 1e-10
    assert distance(run(m, digits, 3, start=run(m, digits, 2).snapshot).snapshot.server["params"], there) == 0

def test_the_rating_is_in_eval_mode_and_not_augmented(digits):
    class Watching:
        def __call__(self, params, x, train=False):
            assert not train and x.shape[0] == 9
            return net(params, x)
    net, client = digits.net, digits.client(0, 60, {"params": digits.initial}, {})
    draws = []
    client.net, client.draw = Watching(), lambda n: draws.append(n)
    FedBSS().rate(client)
    assert not draws

def test_one_model_down_and_one_up_and_nothing_kept(digits):
    m = FedBSS(**FAST | {"warm_up": 0})
    at = begin(m, digits)
    before = {n: t.clone() for n, t in at.server["params"].items()}
    now = next_round(m, digits, at)
    assert now.bytes_down == now.bytes_up == 5 * nbytes(digits.initial) and not any(now.states)
    over_all = next_round(replace(m, aggregation="all"), digits, begin(replace(m, aggregation="all"), digits))
    assert over_all.bytes_down == over_all.bytes_up == 5 * nbytes(digits.initial)
    assert all(torch.equal(at.server["params"][n], t) for n, t in before.items())
