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
from fedrepro.core.trees import distance, nbytes, same_bits
from fedrepro.data.concept_drift import drift
from fedrepro.data.partition import Partition
from fedrepro.engine.client import client_round
from fedrepro.engine.evaluation import eval_models, predictions
from fedrepro.engine.method import METHODS, FedAvg, load_methods
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.methods.objective import Constraint, FedProx, outputs, part_modules, part_names
from fedrepro.methods.union import Union
from fedrepro.methods.lfd import LfD, auxiliary_label, cosines, with_margin, with_own_margins
from fedrepro.models.architectures import Net, Network

FULL = dict(lr=.02, momentum=.9, weight_decay=1e-2, epochs=3, batch_size=0)  # no order of batches: plain loops suffice
SMALL = FULL | dict(batch_size=2, epochs=1)

def federation(parts=TWO, **changes): return by_rows(parts, **changes)

def after(m, fed, rounds=2, **more): return run(m, fed, rounds, **more).snapshot.server["params"]


# --- LfD against the equations

def angles(w, x):
    "Eq. 5, sample by sample and class by class"
    u = x @ w["body.weight"].T + w["body.bias"]
    return torch.stack([torch.stack([a @ b / (a @ a).sqrt() / (b @ b).sqrt() for b in w["head.weight"]]) for a in u])

def log_softmax(z): return z - z.exp().sum().log()

def objective(w, x, y, P, G, weight, margin, tau, margin_in_regulariser, outer_tau):
    "Eq. 3, 7, 8 and 10 to the letter; P None: no regulariser"
    total, z = 0., angles(w, x)
    for i, label in enumerate(y.tolist()):
        shifted = torch.stack([z[i, c] - margin if c == label else z[i, c] for c in range(2)])
        log_sigma = log_softmax(shifted / tau)
        total = total - log_sigma[label]
        if P is None: continue
        f_D = log_softmax(angles(P, x[i:i + 1])[0] / tau) - log_softmax(angles(G, x[i:i + 1])[0] / tau)
        y_hat = log_softmax(-f_D / outer_tau).exp()
        second = log_sigma if margin_in_regulariser else log_softmax(z[i] / tau)
        total = total + weight * -(y_hat * second).sum()
    return total / len(x)

def plain(fed, parts, rounds, first, stale, cfg):
    "The server's model after each round"
    w, last, out = W, {}, []
    for t in range(rounds):
        ends, sizes = [], []
        for k in fed.cohort(t):
            own, when = last.get(k, (None, None))
            P = own if own is not None and (stale or when == t - 1) else w if first == "uniform" else None
            x, y = X[parts[k]], Y[parts[k]]
            leaves = list(W)
            end = descend(w, leaves, lambda v: objective(v, x, y, P, w, **cfg) + 0 * v["head.bias"].sum(), .02, 3)
            last[k] = end, t
            ends.append(end)
            sizes.append(len(x))
        w = {n: sum(s * e[n] for s, e in zip(sizes, ends)) / sum(sizes) for n in W}
        out.append(w)
    return out

READINGS = [dict(), dict(first="skip"), dict(outer_tau=.5), dict(margin_in_regulariser=False), dict(weight=0.), dict(weight=.3),
            dict(margin=0.), dict(tau=.5), dict(stale=False), dict(stale=False, first="skip")]

@pytest.mark.parametrize("changes", READINGS, ids=[str(c) for c in READINGS])
@pytest.mark.parametrize("parts, participation", [(TWO, 1.), (PARTS, .67)], ids=["all", "two of three"])
def test_equations(parts, participation, changes):
    fed = federation(parts, participation=participation)
    cfg = dict(weight=1., margin=.15, tau=.1, margin_in_regulariser=True, outer_tau=1.) | changes
    first, stale = cfg.pop("first", "uniform"), cfg.pop("stale", True)
    m, now = LfD(**FULL, **changes), begin(LfD(**FULL), fed)
    for w in plain(fed, parts, 3, first, stale, cfg):
        now = next_round(m, fed, now)
        assert distance(now.server["params"], w) < 1e-10

@pytest.mark.parametrize("changes", READINGS[1:-2], ids=[str(c) for c in READINGS[1:-2]])
def test_the_comparison_can_fail(changes):
    assert distance(after(LfD(**FULL, **changes), federation()), after(LfD(**FULL), federation())) > 1e-5

def own_margins_by_hand(v, x, y, P, w, margin, tau, weight):
    "Cross-entropy as ever; in the regulariser each class's probability by eq. 7 to the letter, one class after the other"
    total, log_softmax = 0., lambda z: z - z.logsumexp(0)
    def angles(p): return F.normalize(x @ p["body.weight"].T + p["body.bias"], dim=1) @ F.normalize(p["head.weight"], dim=1).T
    z, z_P, z_G = angles(v), angles(P if P is not None else w).detach(), angles(w).detach()
    for i, label in enumerate(y.tolist()):
        y_hat = log_softmax((z_G[i] - z_P[i]) / tau).exp()
        shifted = [((z[i, c] - margin) / tau, [z[i, d] / tau for d in range(2) if d != c]) for c in range(2)]
        second = [own - torch.stack([own, *others]).logsumexp(0) for own, others in shifted]
        total = total - second[label] - weight * sum(a * b for a, b in zip(y_hat, second))
    return total / len(x)

def test_eq_7_to_the_letter():
    fed, m, w, last = federation(), LfD(own_margins=True, **FULL), W, {}
    now = begin(m, fed)
    for t in range(3):
        ends = []
        for k in range(2):
            x, y, P = X[TWO[k]], Y[TWO[k]], last.get(k)
            last[k] = descend(w, list(W), lambda v: own_margins_by_hand(v, x, y, P, w, .15, .1, 1.) + 0 * v["head.bias"].sum(), .02, 3)
            ends.append(last[k])
        w = {n: (7 * ends[0][n] + 3 * ends[1][n]) / 10 for n in W}
        now = next_round(m, fed, now)
        assert distance(now.server["params"], w) < 1e-10
    assert distance(after(LfD(**FULL), fed, 3), w) > 1e-5
    assert distance(after(LfD(own_margins=True, margin=0., **FULL), fed), after(LfD(margin=0., **FULL), fed)) < 1e-10

def test_own_margins_of_the_true_class_are_eq_7s():
    z = 2 * torch.rand(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 1
    y = torch.arange(20) % 5
    usual, own = torch.log_softmax(with_margin(z, y, .3) / .2, 1), with_own_margins(z, .3, .2)
    assert torch.allclose(own[range(20), y], usual[range(20), y], atol=1e-12) and not torch.allclose(own, usual)

def test_without_weight_and_margin_it_is_a_cosine_softmax():
    got = after(LfD(weight=0., margin=0., **FULL), federation([range(10)]), 1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False)).double()
    net[0].weight.data, net[0].bias.data, net[1].weight.data = W["body.weight"].clone(), W["body.bias"].clone(), W["head.weight"].clone()
    sgd = torch.optim.SGD(net.parameters(), lr=.02, momentum=.9, weight_decay=1e-2)
    for _ in range(3):
        sgd.zero_grad()
        F.cross_entropy(F.cosine_similarity(net[0](X)[:, None], net[1].weight[None], dim=2) / .1, Y).backward()
        sgd.step()
    want = {"body.weight": net[0].weight, "body.bias": net[0].bias, "head.weight": net[1].weight}
    assert max((got[n] - t.detach()).abs().max() for n, t in want.items()) < 1e-10

def test_the_first_round_is_label_smoothing():
    "P := G: twice the cross-entropy with half of the label smoothed away"
    class Smoothed(FedAvg):
        def loss(self, client, params, batch):
            z = F.cosine_similarity(client.net.features(params, batch.x)[:, None], params["head.weight"][None], dim=2)
            z = z - .15 * torch.eye(2, dtype=z.dtype)[batch.y]
            return 2 * batch.mean(F.cross_entropy(z / .1, batch.y, label_smoothing=.5, reduction="none"))
    fed = federation()
    assert distance(after(LfD(**SMALL), fed, 1), after(Smoothed(**SMALL), fed, 1)) < 1e-10
    assert distance(after(LfD(**SMALL), fed, 2), after(Smoothed(**SMALL), fed, 2)) > 1e-5
    with_weight = after(LfD(first="skip", **SMALL), fed, 1), after(LfD(weight=0., **SMALL), fed, 1)
    assert distance(*with_weight) == 0

def test_label_and_margin():
    z = torch.randn(2, 20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drift_of = F.log_softmax(z[0] / .1, 1) - F.log_softmax(z[1] / .1, 1)
    for outer in (1., .1): assert torch.allclose(auxiliary_label(*z, .1, outer), F.softmax(-drift_of / outer, 1), atol=1e-12)
    assert torch.allclose(auxiliary_label(z[0], z[0], .1), torch.full((20, 5), .2).double(), atol=1e-12)
    y = torch.arange(20) % 5
    gap = z[0] - with_margin(z[0], y, .15)
    assert torch.equal(gap.argmax(1), y) and torch.allclose(gap.sum(1), torch.full((20,), .15).double(), atol=1e-12)

def test_gradient_is_twice_sigma_minus_both_labels():
    w = {n: t.clone().requires_grad_() for n, t in W.items()}
    fed, P = federation([range(10)]), {n: t.flip(0) for n, t in W.items()}
    c = fed.client(0, 4, {"params": W}, {"model": P, "last": torch.tensor(1)})
    m, batch = LfD(), c.batch(np.arange(10))
    z = cosines(fed.net, w, X)
    got = torch.autograd.grad(m.loss(c, w, batch), w["body.weight"])[0]
    sigma = F.softmax(with_margin(z, Y, .15) / .1, 1)
    push = (2 * sigma - F.one_hot(Y, 2) - m.label(c, X)).detach() / .1 / 10
    assert torch.allclose(got, torch.autograd.grad((push * z).sum(), w["body.weight"])[0], atol=1e-10)

def test_judged_model_predicts_by_cosines():
    fed = federation()
    fed.data.test_x, fed.data.test_y = X, Y
    now = run(LfD(**FULL), fed, 2).snapshot
    far = replace(now, server={"params": now.server["params"] | {"head.bias": torch.tensor([50., -50.]).double()}})
    for at in (now, far):
        models = eval_models(LfD(), fed, at)
        assert torch.equal(predictions(fed, models)[0], cosines(fed.net, at.server["params"], X).argmax(1))
        again = LfD().eval_params({"params": models[0]}, {})
        assert distance(again, models[0]) < 1e-12 and not again["head.bias"].any()
    assert len(set(logits(far.server["params"], X).argmax(1).tolist())) == 1  # as a plain network: always the first class

def test_bias_has_no_gradient_and_fades_with_decay():
    fed = federation([range(10)])
    steps = dict(lr=.1, momentum=0., epochs=4, batch_size=0)
    assert torch.equal(after(LfD(weight_decay=0., **steps), fed, 1)["head.bias"], W["head.bias"])
    faded = after(LfD(weight_decay=.2, **steps), fed, 1)["head.bias"]
    assert torch.allclose(faded, W["head.bias"] * (1 - .1 * .2) ** 4, atol=1e-12)

def batch_norm(): return Network(nn.Sequential(OrderedDict(fc=nn.Linear(2, 3), norm=nn.BatchNorm1d(3))), nn.Linear(3, 2))

def test_frozen_models_run_in_eval_mode():
    fed = replace(federation(), net=Net("bn", batch_norm))
    old = {n: t + .3 for n, t in fed.initial.items()}
    m, c = LfD(**FULL), fed.client(0, 3, {"params": fed.initial}, {"model": old, "last": torch.tensor(2)})
    kept = [{n: t.clone() for n, t in w.items()} for w in (fed.initial, old)]
    batch, own = c.batch(np.arange(c.n)), {n: t.clone() for n, t in fed.initial.items()}
    loss = m.loss(c, own, batch)
    zP, zG = (cosines(fed.net, w, batch.x, train=False) for w in (old, fed.initial))
    z = cosines(fed.net, {n: t.clone() for n, t in fed.initial.items()}, batch.x, train=True)
    log_sigma = F.log_softmax(with_margin(z, batch.y, .15) / .1, 1)
    want = -((F.one_hot(batch.y, 2) + auxiliary_label(zP, zG, .1)) * log_sigma).sum(1).mean()
    assert torch.allclose(loss, want, atol=1e-10)
    assert same_bits(kept, [fed.initial, old]) and not same_bits(own, fed.initial)  # only the trained model's statistics move
    upload, state, _ = client_round(m, c)
    assert same_bits(state["model"], upload["params"])

def test_lfd_keeps_the_last_local_model_and_sends_one():
    fed, m = federation(PARTS, participation=.34), LfD(**SMALL)
    now = begin(m, fed)
    for t in range(5):
        before, (k,) = now, fed.cohort(t)
        now = next_round(m, fed, now)
        assert now.bytes_up - before.bytes_up == now.bytes_down - before.bytes_down == nbytes(fed.initial)
        assert int(now.states[k]["last"]) == t and same_bits(now.states[k]["model"], now.server["params"])  # alone: the mean is its model
        assert all(now.states[j] is before.states[j] for j in range(3) if j != k)


# --- Union

def test_union_is_centralised_sgd():
    got = run(Union(**FULL), federation(), 2).snapshot.states[0]["params"]
    w = W
    for _ in range(2): w = descend(w, list(W), lambda v: F.cross_entropy(logits(v, X), Y), .02, 3)
    assert distance(got, w) < 1e-10

def test_union_pools_tests_and_noisy_labels_once():
    cut = Partition(([3, 1], [0, 5, 2]), ([7], [4, 6]))
    fed = replace(federation(), partition=cut, labels=1 - Y, participation=.5)
    fed.data.test_x, fed.data.test_y = X, Y
    pooled = fed.pooled()
    assert [p.tolist() for p in pooled.partition.train] == [[0, 1, 2, 3, 5]] and [p.tolist() for p in pooled.partition.test] == [[4, 6, 7]]
    assert pooled.pooled() is pooled and pooled.clients == 1 and pooled.participation == 1 and fed.clients == 2
    assert pooled.client(0, 0, {}, {}).labels.tolist() == (1 - Y)[[0, 1, 2, 3, 5]].tolist()

def test_union_refuses_what_cannot_be_pooled():
    ten = federation([[k] for k in range(10)])
    swapped, same = (replace(ten, drift=drift(name, clients=10, classes=10)) for name in ("sudden", "none"))
    with pytest.raises(InputError, match="pooled training: clients need equal labels, but there is sudden drift"): swapped.pooled()
    assert same.pooled().clients == 1
    with pytest.raises(InputError, match="Union: 10 clients, expected the one of `Federation.pooled`"): begin(Union(), ten)


# --- constraints

def headed(): return Network(nn.Sequential(OrderedDict(fc=nn.Linear(2, 3), header1=nn.Linear(3, 3), header2=nn.Linear(3, 2))), nn.Linear(2, 2))

CELLS = [(k, p) for k in ("feature", "parameter") for p in ("extractor", "header", "classifier", "all")]

@pytest.mark.parametrize("kind, part", CELLS)
def test_constraints_in_plain_torch(kind, part):
    fed, mu = replace(federation(), net=Net("headed", headed)), .7
    w = fed.initial

    def stages(v, x):
        f = x @ v["body.fc.weight"].T + v["body.fc.bias"]
        h = (f @ v["body.header1.weight"].T + v["body.header1.bias"]) @ v["body.header2.weight"].T + v["body.header2.bias"]
        return {"extractor": f, "header": h, "classifier": h @ v["head.weight"].T + v["head.bias"]}

    def loss(v, x, y):
        now, then, R = stages(v, x), stages(w, x), 0.
        own = {"extractor": "body.fc", "header": "body.header", "classifier": "head."}
        for q in own if part == "all" else [part]:
            if kind == "feature": R = R + sum(((now[q][i] - then[q][i]) ** 2).sum() for i in range(len(x))) / len(x)
            else: R = R + sum(((v[n] - w[n]) ** 2).sum() for n in v if n.startswith(own[q]))
        return F.cross_entropy(now["classifier"], y) + mu / 2 * R + 0 * sum(t.sum() for t in v.values())

    ends = [descend(w, list(w), lambda v, p=p: loss(v, X[p], Y[p]), .02, 3) for p in TWO]
    mean = {n: (7 * ends[0][n] + 3 * ends[1][n]) / 10 for n in w}
    got = after(Constraint(kind=kind, part=part, mu=mu, **FULL), fed, 1)
    assert distance(got, mean) < 1e-10 and distance(got, after(FedAvg(**FULL), fed, 1)) > 1e-5
    assert distance(after(Constraint(kind=kind, part=part, mu=0., **FULL), fed), after(FedAvg(**FULL), fed)) < 1e-10

@pytest.mark.parametrize("make", [headed, batch_norm])
def test_all_parameters_is_fedprox(make):
    fed = replace(federation(), net=Net("any", make))
    ours, prox = (after(m, fed, 3) for m in (Constraint(kind="parameter", part="all", mu=.7, **FULL), FedProx(mu=.7, **FULL)))
    assert distance(ours, prox) < 1e-10 and distance(prox, after(FedAvg(**FULL), fed, 3)) > 1e-5

def test_parts_and_their_outputs():
    net = Net("headed", headed)
    assert list(part_modules(net)) == ["extractor", "header", "classifier"] and part_names(net)["extractor"] == ["body.fc.weight", "body.fc.bias"]
    for other in (federation().net, Net("bn", batch_norm)): assert list(part_modules(other)) == ["extractor", "classifier"]
    for net in (Net("headed", headed), Net("bn", batch_norm), federation().net):
        for train in (True, False):
            w, again = net.init(0, torch.float64), net.init(0, torch.float64)
            assert torch.equal(outputs(net, w, X, train)["classifier"], net(again, X, train)) and same_bits(w, again)
            assert torch.equal(net(w, X), net(again, X))  # the mode is set anew in every call

def test_a_network_without_header():
    fed = federation()
    with pytest.raises(InputError, match=r"Constraint\(part='header'\): tiny has only extractor, classifier"): begin(Constraint(part="header"), fed)
    for kind in ("feature", "parameter"): assert distance(after(Constraint(kind=kind, part="all", mu=.5, **SMALL), fed), W) > 0


# --- the rest

def test_defaults_of_the_paper():
    assert {"LfD", "Union", "Constraint"} <= set(load_methods())
    for name in ("LfD", "Union", "Constraint"):
        m = METHODS[name]()
        assert (m.lr, m.momentum, m.weight_decay, m.batch_size) == (.01, .9, 1e-5, 128) and m.epochs == (3 if name == "Union" else 10)
    assert (LfD().margin, LfD().tau, LfD().weight, LfD().outer_tau) == (.15, .1, 1., 1.)
