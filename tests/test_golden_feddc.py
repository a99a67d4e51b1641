"""FedDC against its released code (tests/golden/feddc_code.json, float32) and against its equations in NumPy."""
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from torch import nn
from test_golden import close
from test_golden_memory import FEDDC, SGD, feddc_federation, same_as_feddc
from fedrepro.core.errors import InputError
from fedrepro.core.trees import all_finite, distance, nbytes, same_bits, weighted_mean
from fedrepro.data import datasets, partition
from fedrepro.engine.evaluation import eval_models, evaluate
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import METHODS, load_methods
from fedrepro.engine.rounds import begin, next_round, run, sequential
from fedrepro.methods.feddc import FedDC
from fedrepro.methods.memory import FedDyn
from fedrepro.models import networks
from fedrepro.models.architectures import Net, Network

torch.set_num_threads(1)
ALPHA = FEDDC["config"]["alpha"]


# --- the released code

def test_feddc_equals_the_released_code():
    same_as_feddc(FedDC(alpha=ALPHA, compat_eta0=True, **SGD), "FedDC", {"params": "cloud", "selected": "selected"})


def test_average_of_all_last_models_equals_the_released_code():
    "`all`: every client's last local model, the initial one for a client never seen, unweighted"
    m, fed = FedDC(alpha=ALPHA, compat_eta0=True, **SGD), feddc_federation()
    now, last = begin(m, fed), [fed.initial] * fed.clients

    def watched(m, clients):
        out = sequential(m, clients)
        for client, (upload, _, _) in zip(clients, out): last[client.id] = upload["params"]
        return out
    for t, want in enumerate(FEDDC["methods"]["FedDC"]["models"]["all"]):
        now = next_round(m, fed, now, watched)
        close(weighted_mean(last), {n.replace("body.", "body.0."): v for n, v in want.items()}, f"round {t}, all", 1e-6)
    assert now.round == FEDDC["config"]["rounds"] == 5


def test_the_default_departs_from_the_code_only_by_the_learning_rate():
    "The rounds' own rate first enters the memories after round 1, so the models differ from round 2 on, not before"
    with pytest.raises(AssertionError, match="round 2, cloud.*off by"):
        same_as_feddc(FedDC(alpha=ALPHA, **SGD), "FedDC", {"params": "cloud"})


@pytest.mark.parametrize("m", [FedDyn(alpha=ALPHA, **SGD), FedDC(alpha=2 * ALPHA, compat_eta0=True, **SGD)],
                         ids=["FedDyn", "other alpha"])
def test_the_comparison_can_fail(m):
    with pytest.raises(AssertionError, match="off by"): same_as_feddc(m, "FedDC", {"params": "cloud"})


# --- the equations, written again in NumPy: quadratic clients, unequal sizes, batches, partial participation, decay

class Points(FedDC):
    "The loss of a sample (a, s): s/2 (w - a)^2"
    def loss(self, client, params, batch):
        return batch.mean(batch.x[:, 1] * (params["body.w"] - batch.x[:, 0]) ** 2) / 2


SIZES, TARGETS, SLOPES = np.array([3, 10, 6, 5, 1]), np.array([1., 5., -2., 0., 3.]), np.array([1., .5, 2., 1., .25])


def points(participation=1.):
    x = torch.tensor(np.repeat(np.stack([TARGETS, SLOPES], 1), SIZES, 0))
    rows = SimpleNamespace(train_x=x, train_y=torch.zeros(len(x), dtype=torch.int64),
                           draw=lambda n, rng: None, batch=lambda x, draws, dtype: x)
    net = SimpleNamespace(buffers=(), classes=1, init=lambda seed, dtype: {"body.w": torch.tensor(.5, dtype=dtype)})
    cut = SimpleNamespace(train=tuple(np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1])), test=None)
    return Federation(rows, net, cut, participation=participation, dtype=torch.float64)


def plain(cohorts, lr, decay, alpha, epochs, batch, weight_decay, clip, compat):
    "Cloud model and participants' average after each round, and the memories at the end"
    N, w, g = len(SIZES), .5, 0.
    h, own, shares, out = np.zeros(N), np.zeros(N), SIZES * N / SIZES.sum(), []
    for t, cohort in enumerate(cohorts):
        eta, ends, moved = lr * decay ** t, [], 0.
        for i in cohort:
            theta, H = w, epochs * math.ceil(SIZES[i] / batch)
            for _ in range(H):
                d = SLOPES[i] * (theta - TARGETS[i]) + alpha / shares[i] * (theta - (w - h[i])) + g / shares[i] - own[i]
                d *= min(1., clip / (abs(d) + 1e-6))
                theta -= eta * (d + weight_decay * theta)
            way = epochs * math.ceil(SIZES.mean() / batch) * lr if compat else H * eta
            after = own[i] - g / shares[i] - (theta - w) / way
            moved += shares[i] * (after - own[i])
            h[i], own[i] = h[i] + theta - w, after
            ends.append(theta)
        g += moved / N
        w = np.mean(ends) + h.mean()
        out.append([w, np.mean(ends), g])
    return np.array(out), h, own


@pytest.mark.parametrize("clip", [1e9, .8], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("participation", [1., .4])
def test_every_round_follows_the_equations(participation, compat, clip):
    fed, numbers = points(participation), dict(lr=.2, alpha=.3, epochs=2, weight_decay=1e-2)
    m = Points(**numbers, lr_decay=.9, batch_size=4, clip_norm=clip, compat_eta0=compat)
    want, h, own = plain([fed.cohort(t) for t in range(6)], **numbers, decay=.9, batch=4, clip=clip, compat=compat)
    found, keys = [], ("params", "selected", "g")
    now = run(m, fed, 6, on_round=lambda s: found.append([float(s.server[key]["body.w"]) for key in keys])).snapshot
    assert np.abs(np.array(found) - want).max() < 1e-10
    for key, expected in (("h", h), ("g", own)):
        assert np.abs(np.array([float(st[key]["body.w"]) for st in now.states]) - expected).max() < 1e-10


# --- laws on a real network

LOCAL = dict(lr=.05, epochs=1, batch_size=64, alpha=.1)


@pytest.fixture(scope="module")
def part():
    digits = datasets.load("digits")
    cut = partition.partition("dirichlet-class", digits.train_y.numpy(), clients=7, seed=1, alpha=.3)
    return Federation(digits, networks.network("digits_cnn"), cut, participation=.4, dtype=torch.float64)


def test_without_the_linear_term_it_is_feddyn(part):
    class Uncorrected(FedDC):
        def linear(self, client): return {n: torch.zeros_like(g) for n, g in client.received["g"].items()}
    a, b = (run(m, part, 3).snapshot for m in (Uncorrected(clip_norm=None, **LOCAL), FedDyn(lr_decay=.998, **LOCAL)))
    for key in ("params", "selected", "h"): assert distance(a.server[key], b.server[key]) < 1e-10
    for x, y in zip(a.states, b.states): assert distance(x["h"], y["h"]) < 1e-10
    assert distance(run(FedDC(clip_norm=None, **LOCAL), part, 3).snapshot.server["params"], b.server["params"]) > 1e-4


def test_the_servers_memories_are_means_over_all_clients(part):
    m = FedDC(**LOCAL)
    now, seen = begin(m, part), set()
    for t in range(4):
        after, cohort = next_round(m, part, now), part.cohort(t)
        assert len(cohort) == 3
        seen |= set(cohort)
        for k in range(7): assert (after.states[k] is now.states[k]) == (k not in cohort)
        g = weighted_mean([{n: s["relative"] * v for n, v in s["g"].items()} for s in after.states])
        h, now = weighted_mean([s["h"] for s in after.states]), after
        assert distance(now.server["h"], h) < 1e-10 and distance(now.server["g"], g) < 1e-10
        assert distance(now.server["params"], {n: now.server["selected"][n] + t for n, t in h.items()}) < 1e-10
    for k in set(range(7)) - seen: assert not any(t.any() for key in ("h", "g") for t in now.states[k][key].values())


def test_judged_models(part):
    m = FedDC(**LOCAL)
    at = run(m, part, 2).snapshot
    for suffix, name in {"": "params", "_selected": "selected"}.items():
        assert all(same_bits(params, at.server[name]) for params in eval_models(m, part, at, suffix))
    row = run(m, part, 2, evaluate, every=2).rows[-1]
    assert row["generalised_accuracy"] != row["generalised_accuracy_selected"]


def test_traffic_and_resume(part):
    "Two models down, two up; two rounds and two more are four; the order of the clients' work does not matter"
    m = FedDC(**LOCAL)
    straight = run(m, part, 4).snapshot
    assert straight.bytes_up == straight.bytes_down == 4 * 3 * 2 * nbytes(part.initial)
    paused = run(m, part, 4, start=run(m, part, 2).snapshot).snapshot
    backwards = run(m, part, 4, executor=lambda m, clients: sequential(m, clients[::-1])[::-1]).snapshot
    for other in (paused, backwards): assert same_bits([straight.server, straight.states], [other.server, other.states])


def test_statistics_of_batch_norm_are_averaged(part):
    make = lambda: Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)), nn.Linear(8, 10))
    fed = Federation(part.data, Net("norm", make), part.partition, participation=.4, dtype=torch.float64)
    m, uploads = FedDC(**LOCAL), []

    def watched(m, clients):
        out = sequential(m, clients)
        uploads[:] = [{n: u["params"][n] for n in fed.net.buffers} for u, _, _ in out]
        return out
    after = next_round(m, fed, run(m, fed, 2).snapshot, watched).server
    assert fed.net.buffers and distance(weighted_mean(uploads), after["params"]) < 1e-12 and all_finite(after["params"])
    assert not set(fed.net.buffers) & (after["g"].keys() | after["h"].keys())


@pytest.mark.parametrize("field", ["lr", "lr_decay", "epochs"])
def test_impossible_settings_are_refused(field):
    with pytest.raises(InputError, match=rf"FedDC\({field}=0.*\): expected"): FedDC(**{field: 0})


# --- the ledger

def test_deviations():
    path = Path(__file__).parent.parent / "papers" / "feddc" / "deviations.toml"
    entries = tomllib.loads(path.read_text())["deviation"]
    assert len({e["name"] for e in entries}) == len(entries) and load_methods() is METHODS and METHODS["FedDC"] is FedDC
    for e in entries:
        assert [k for k in e if k != "link"] == ["name", "paper", "code", "ours", "cells", "switch"]
        assert all(e[k] for k in e if k != "switch")
