"""LfD, Union and the constraints on two clients, worked out again in plain PyTorch from eq. 3 to 10; no released code exists."""

from collections import OrderedDict
from dataclasses import replace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from test_by_hand import PARTS, TWO, W, X, Y, descend, federation as by_rows, logits
from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance, same_bits
from fedrepro.data.concept_drift import drift
from fedrepro.data.partition import Partition
from fedrepro.engine.client import client_round
from fedrepro.engine.evaluation import Predictor, eval_models
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.methods.objective import Constraint, FedProx
from fedrepro.methods.union import Union
from fedrepro.methods.lfd import LfD, auxiliary_label, cosines, with_margin
from fedrepro.models.net import Net, Network

# no order of batches: plain loops suffice
FULL = dict(lr=0.02, momentum=0.9, weight_decay=1e-2, epochs=3, batch_size=0)


def federation(parts=TWO, **changes):
    return by_rows(parts, **changes)


def after(m, fed, rounds=2, **more):
    return run(m, fed, rounds, **more).snapshot.server["params"]


# --- LfD against the equations


def angles(w, x):
    "Eq. 5, sample by sample and class by class"
    u = x @ w["body.weight"].T + w["body.bias"]
    return torch.stack(
        [
            torch.stack([a @ b / (a @ a).sqrt() / (b @ b).sqrt() for b in w["head.weight"]])
            for a in u
        ]
    )


def log_softmax(z):
    return z - z.exp().sum().log()


def objective(w, x, y, P, G, weight, margin, tau, margin_in_regulariser, outer_tau, own_margins):
    "Eq. 3, 7, 8 and 10 to the letter; P None: no regulariser; own margins: eq. 7 for one class after the other"
    total = 0.0
    z = angles(w, x)
    for i, label in enumerate(y.tolist()):
        shifted = torch.stack([z[i, c] - margin if c == label else z[i, c] for c in range(2)])
        log_sigma = log_softmax(shifted / tau)
        total = total - log_sigma[label]
        if P is None:
            continue
        f_D = log_softmax(angles(P, x[i : i + 1])[0] / tau) - log_softmax(
            angles(G, x[i : i + 1])[0] / tau
        )
        y_hat = log_softmax(-f_D / outer_tau).exp()
        second = log_sigma if margin_in_regulariser else log_softmax(z[i] / tau)
        if own_margins:
            second = torch.stack(
                [
                    log_softmax((z[i] - margin * one) / tau)[c]
                    for c, one in enumerate(torch.eye(2).double())
                ]
            )
        total = total + weight * -(y_hat * second).sum()
    return total / len(x)


def plain(fed, parts, rounds, first, stale, cfg):
    "The server's model after each round"
    w = W
    last = {}
    out = []
    for t in range(rounds):
        ends = []
        sizes = []
        for k in fed.cohort(t):
            own, when = last.get(k, (None, None))
            P = (
                own
                if own is not None and (stale or when == t - 1)
                else w
                if first == "uniform"
                else None
            )
            x = X[parts[k]]
            y = Y[parts[k]]
            leaves = list(W)
            end = descend(
                w,
                leaves,
                lambda v: objective(v, x, y, P, w, **cfg) + 0 * v["head.bias"].sum(),
                0.02,
                3,
            )
            last[k] = end, t
            ends.append(end)
            sizes.append(len(x))
        w = {n: sum(s * e[n] for s, e in zip(sizes, ends)) / sum(sizes) for n in W}
        out.append(w)
    return out


READINGS = [
    dict(),
    dict(own_margins=True),
    dict(first="skip"),
    dict(outer_tau=0.5),
    dict(margin_in_regulariser=False),
    dict(weight=0.0),
    dict(weight=0.3),
    dict(margin=0.0),
    dict(tau=0.5),
    dict(stale=False),
    dict(stale=False, first="skip"),
]


@pytest.mark.parametrize("changes", READINGS, ids=[str(c) for c in READINGS])
@pytest.mark.parametrize(
    "parts, participation", [(TWO, 1.0), (PARTS, 0.67)], ids=["all", "two of three"]
)
def test_equations(parts, participation, changes):
    fed = federation(parts, participation=participation)
    cfg = (
        dict(
            weight=1.0,
            margin=0.15,
            tau=0.1,
            margin_in_regulariser=True,
            outer_tau=1.0,
            own_margins=False,
        )
        | changes
    )
    first = cfg.pop("first", "uniform")
    stale = cfg.pop("stale", True)
    m = LfD(**FULL, **changes)
    now = begin(LfD(**FULL), fed)
    for w in plain(fed, parts, 3, first, stale, cfg):
        now = next_round(m, fed, now)
        assert distance(now.server["params"], w) < 1e-10


@pytest.mark.parametrize("changes", READINGS[1:-2], ids=[str(c) for c in READINGS[1:-2]])
def test_the_comparison_can_fail(changes):
    assert (
        distance(after(LfD(**FULL, **changes), federation()), after(LfD(**FULL), federation()))
        > 1e-5
    )


def test_judged_model_predicts_by_cosines():
    fed = federation()
    fed.data.test_x = X
    fed.data.test_y = Y
    now = run(LfD(**FULL), fed, 2).snapshot
    far = replace(
        now,
        server={
            "params": now.server["params"] | {"head.bias": torch.tensor([50.0, -50.0]).double()}
        },
    )
    for at in (now, far):
        models = eval_models(LfD(), fed, at)
        assert torch.equal(
            Predictor()(fed, models)[0], cosines(fed.net, at.server["params"], X).argmax(1)
        )
        again = LfD().eval_params({"params": models[0]}, {})
        assert distance(again, models[0]) < 1e-12
        assert not again["head.bias"].any()
    # as a plain network: always the first class
    assert len(set(logits(far.server["params"], X).argmax(1).tolist())) == 1


def batch_norm():
    return Network(
        nn.Sequential(OrderedDict(fc=nn.Linear(2, 3), norm=nn.BatchNorm1d(3))), nn.Linear(3, 2)
    )


def test_frozen_models_run_in_eval_mode():
    fed = replace(federation(), net=Net("bn", batch_norm))
    old = {n: t + 0.3 for n, t in fed.initial.items()}
    m = LfD(**FULL)
    c = fed.client(0, 3, {"params": fed.initial}, {"model": old, "last": torch.tensor(2)})
    kept = [{n: t.clone() for n, t in w.items()} for w in (fed.initial, old)]
    batch = c.batch(np.arange(c.n))
    own = {n: t.clone() for n, t in fed.initial.items()}
    loss = m.loss(c, own, batch)
    zP, zG = (cosines(fed.net, w, batch.x, train=False) for w in (old, fed.initial))
    z = cosines(fed.net, {n: t.clone() for n, t in fed.initial.items()}, batch.x, train=True)
    log_sigma = F.log_softmax(with_margin(z, batch.y, 0.15) / 0.1, 1)
    want = -((F.one_hot(batch.y, 2) + auxiliary_label(zP, zG, 0.1)) * log_sigma).sum(1).mean()
    assert torch.allclose(loss, want, atol=1e-10)
    # only the trained model's statistics move
    assert same_bits(kept, [fed.initial, old])
    assert not same_bits(own, fed.initial)
    upload, state, _ = client_round(m, c)
    assert same_bits(state["model"], upload["params"])


# --- Union


def test_union_pools_tests_and_noisy_labels_once():
    cut = Partition(([3, 1], [0, 5, 2]), ([7], [4, 6]))
    fed = replace(federation(), partition=cut, labels=1 - Y, participation=0.5)
    fed.data.test_x = X
    fed.data.test_y = Y
    pooled = fed.pooled()
    assert [p.tolist() for p in pooled.partition.train] == [[0, 1, 2, 3, 5]]
    assert [p.tolist() for p in pooled.partition.test] == [[4, 6, 7]]
    assert pooled.pooled() is pooled
    assert pooled.clients == 1
    assert pooled.participation == 1
    assert fed.clients == 2
    assert pooled.client(0, 0, {}, {}).labels.tolist() == (1 - Y)[[0, 1, 2, 3, 5]].tolist()


def test_union_refuses_what_cannot_be_pooled():
    ten = federation([[k] for k in range(10)])
    assert replace(ten, drift=drift("none", clients=10, classes=10)).pooled().clients == 1
    with pytest.raises(
        InputError, match="Union: 10 clients, expected the one of `Federation.pooled`"
    ):
        begin(Union(), ten)


# --- constraints


def headed():
    return Network(
        nn.Sequential(
            OrderedDict(fc=nn.Linear(2, 3), header1=nn.Linear(3, 3), header2=nn.Linear(3, 2))
        ),
        nn.Linear(2, 2),
    )


CELLS = [
    (k, p) for k in ("feature", "parameter") for p in ("extractor", "header", "classifier", "all")
]


@pytest.mark.parametrize("kind, part", CELLS)
def test_constraints_in_plain_torch(kind, part):
    fed = replace(federation(), net=Net("headed", headed))
    mu = 0.7
    w = fed.initial

    def stages(v, x):
        f = x @ v["body.fc.weight"].T + v["body.fc.bias"]
        h = (f @ v["body.header1.weight"].T + v["body.header1.bias"]) @ v[
            "body.header2.weight"
        ].T + v["body.header2.bias"]
        return {"extractor": f, "header": h, "classifier": h @ v["head.weight"].T + v["head.bias"]}

    def loss(v, x, y):
        now = stages(v, x)
        then = stages(w, x)
        R = 0.0
        own = {"extractor": "body.fc", "header": "body.header", "classifier": "head."}
        for q in own if part == "all" else [part]:
            if kind == "feature":
                R = R + sum(((now[q][i] - then[q][i]) ** 2).sum() for i in range(len(x))) / len(x)
            else:
                R = R + sum(((v[n] - w[n]) ** 2).sum() for n in v if n.startswith(own[q]))
        return (
            F.cross_entropy(now["classifier"], y)
            + mu / 2 * R
            + 0 * sum(t.sum() for t in v.values())
        )

    ends = [descend(w, list(w), lambda v, p=p: loss(v, X[p], Y[p]), 0.02, 3) for p in TWO]
    mean = {n: (7 * ends[0][n] + 3 * ends[1][n]) / 10 for n in w}
    got = after(Constraint(kind=kind, part=part, mu=mu, **FULL), fed, 1)
    assert distance(got, mean) < 1e-10


def test_all_parameters_is_fedprox_with_statistics_too():
    fed = replace(federation(), net=Net("bn", batch_norm))
    ours, prox = (
        after(m, fed, 3)
        for m in (Constraint(kind="parameter", part="all", mu=0.7, **FULL), FedProx(mu=0.7, **FULL))
    )
    assert distance(ours, prox) < 1e-10
    assert distance(prox, after(FedAvg(**FULL), fed, 3)) > 1e-5
