"""FedADC and FedADC+ on two clients, worked out again in plain PyTorch from Algorithms 3 and 4 and eq. 6 to 9; no released code exists."""

from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from test_by_hand import FOUR as AWAY, TWO as PARTS, W, X, Y, federation as by_rows, logits, shares
from test_golden import watching
from toy import one_line
from fedrepro.core.trees import distance, same_bits, select, weighted_mean
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.engine.evaluation import eval_models, finetuned
from fedrepro.engine.federation import TUNE, Federation
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.experiments.runs import method_settings
from fedrepro.methods.fedadc import (
    FedADC,
    FedADCPlus,
    class_presence,
    covering_cohort,
    self_confidence_target,
)

# of PARTS: 4 and 2 steps an epoch
SETTINGS = dict(lr=0.2, lr_decay=0.5, weight_decay=1e-2, epochs=2, batch_size=2)
VARIANTS = ("nesterov", "heavy_ball", "double_momentum")


def federation(parts=PARTS, **changes):
    return by_rows(parts, **changes)


def objective(w, x, y, received, shares, lam, T):
    "Eq. 6 to 9, sample by sample and class by class"
    total = 0.0
    rho = [s / max(shares) for s in shares]
    for z, zt, label in zip(logits(w, x), logits(received, x), y.tolist()):
        p, teacher = ((a / T).exp() / (a / T).exp().sum() for a in (z, zt))
        target = [(1 - rho[i]) * teacher[i] for i in range(2)]
        target[label] = 1 - sum(target[i] for i in range(2) if i != label)
        kl = -sum(t * (p[i] / t).log() for i, t in enumerate(target) if t > 0)
        total = total + (1 - lam) * -(z.exp() / z.exp().sum())[label].log() + lam * T**2 * kl
    return total / len(x)


def plain(
    fed,
    rounds,
    variant,
    beta,
    beta_local,
    alpha,
    phi,
    lam,
    T,
    lr=0.2,
    lr_decay=0.5,
    weight_decay=1e-2,
    epochs=2,
    batch_size=2,
):
    "Server's model and momentum after each round"
    w = W
    m = {n: torch.zeros_like(t) for n, t in W.items()}
    out = []
    for t in range(rounds):
        eta = lr * lr_decay**t
        ends = []
        for k, part in enumerate(PARTS):
            rng, n = fed.client(k, t, {}, {}).rng, len(part)  # the client's own order of samples
            orders = [rng.permutation(n) for _ in range(epochs)]
            batches = [
                [part[j] for j in order[i : i + batch_size]]
                for order in orders
                for i in range(0, n, batch_size)
            ]
            H = len(batches)
            v = w
            u = None
            shares = [sum(Y[part] == c).item() / n for c in range(2)]
            for rows in batches:
                push = {n: beta_local * m[n] / H for n in w}
                at = {n: v[n] - eta * push[n] for n in w} if variant == "nesterov" else v
                leaves = {n: a.clone().requires_grad_() for n, a in at.items()}
                g = torch.autograd.grad(
                    objective(leaves, X[rows], Y[rows], w, shares, lam, T), list(leaves.values())
                )
                g = {n: a + weight_decay * at[n] for n, a in zip(leaves, g)}
                u = (
                    g
                    if u is None or variant != "double_momentum"
                    else {n: phi * u[n] + (1 - phi) * g[n] for n in g}
                )
                v = {n: at[n] - eta * (u[n] + (0 if variant == "nesterov" else push[n])) for n in w}
            assert H == (8, 4)[k]
            ends.append(v)
        delta = {n: sum(w[n] - v[n] for v in ends) / len(ends) / eta for n in w}
        m = {n: delta[n] + (beta - beta_local) * m[n] for n in w}
        w = {n: w[n] - alpha * eta * m[n] for n in w}
        out.append((w, m))
    return out


def gap(
    method, fed, variant="nesterov", beta=0.8, beta_local=0.8, alpha=1.0, phi=0.6, lam=0.0, T=1.0
):
    "The largest difference between `method` and the equations over three rounds"
    now = begin(method, fed)
    worst = 0.0
    for w, m in plain(fed, 3, variant, beta, beta_local, alpha, phi, lam, T):
        now = next_round(method, fed, now)
        worst = max(worst, distance(now.server["params"], w), distance(now.server["m"], m))
    return worst


# --- the equations


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "beta, beta_local, alpha",
    [(0.8, 0.8, 1.0), (0.9, 0.4, 0.7), (0.3, 0.6, 1.0)],
    ids=["equal", "less local", "more local"],
)
def test_fedadc(variant, beta, beta_local, alpha):
    betas = {"beta": beta, "beta_local": beta_local, "alpha": alpha}
    assert (
        gap(FedADC(variant=variant, phi=0.6, **betas, **SETTINGS), federation(), variant, **betas)
        < 1e-10
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lam, T", [(0.35, 1.0), (0.35, 4.0), (1.0, 2.0)])
def test_fedadc_plus(variant, lam, T):
    assert (
        gap(
            FedADCPlus(variant=variant, phi=0.6, beta=0.8, lam=lam, temperature=T, **SETTINGS),
            federation(),
            variant,
            lam=lam,
            T=T,
        )
        < 1e-10
    )


@pytest.mark.parametrize(
    "m",
    [
        FedADC(beta=0.79, **SETTINGS),
        FedADC(beta=0.8, variant="heavy_ball", **SETTINGS),
        FedADC(beta=0.8, beta_local=0.7, **SETTINGS),
        FedADC(beta=0.8, **SETTINGS | {"lr_decay": 0.6}),
        FedADCPlus(beta=0.8, **SETTINGS),
    ],
    ids=["other beta", "other variant", "other local beta", "other decay", "distilled"],
)
def test_the_comparison_can_fail(m):
    assert gap(m, federation()) > 1e-4


# --- laws


@pytest.mark.parametrize(
    "m",
    [*(FedADC(variant=v, **SETTINGS) for v in VARIANTS), FedADCPlus(**SETTINGS)],
    ids=[*VARIANTS, "plus"],
)
def test_equal_betas_average_and_two_models_hold_the_momentum(m):
    fed = federation(**AWAY)
    seen = []
    now = begin(m, fed)
    for t in range(4):
        before = now.server["params"]
        now = next_round(m, fed, now, watching(seen))
        after = now.server["params"]
        eta = 0.2 * 0.5**t
        ends = [upload["params"] for _, upload, _, _ in seen]
        assert len(ends) == 2
        assert distance(after, weighted_mean(ends)) < 1e-10
        assert distance(now.server["m"], {n: (before[n] - after[n]) / eta for n in after}) < 1e-10


@pytest.mark.parametrize("variant", ["nesterov", "heavy_ball"])
def test_the_momentum_is_slowmo_s(variant):
    "m_{t+1} = mean gradient sum + beta_global m_t, at the points where the gradients were taken, weight decay included"

    class Watched(FedADC):
        def adjust_gradient(self, client, params, grads):
            for n, g in grads.items():
                sums[n] = sums[n] + (g + 1e-2 * params[n].detach()) / 2
            return grads

    m = Watched(variant=variant, beta=0.9, beta_local=0.5, alpha=0.6, **SETTINGS)
    fed = federation()
    now = begin(m, fed)
    for _ in range(4):
        sums = {n: 0.0 for n in W}
        before = now.server["m"]
        now = next_round(m, fed, now)
        assert distance(now.server["m"], {n: sums[n] + 0.9 * before[n] for n in W}) < 1e-10


# --- the distillation


def test_a_sure_teacher_stays_finite():
    "eq. 9 as printed can fall below 0 by rounding; and classes without a target must not give 0 log 0"
    fed = federation(labels=torch.zeros(10, dtype=torch.int64))
    sure = {n: t * 60 for n, t in W.items()}
    received = {"params": sure, "m": {n: torch.zeros_like(t) for n, t in W.items()}}
    client = fed.client(0, 0, received, {})
    params = {n: t.clone().requires_grad_() for n, t in W.items()}
    loss = FedADCPlus().loss(client, params, client.batch(np.arange(client.n)))
    assert loss.detach().isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(params.values())))
    teacher = torch.tensor([[1.0, 1e-9, 1e-12], [1e-12, 1.0, 1e-9]])  # float32
    assert (
        self_confidence_target(teacher, torch.tensor([1, 0]), torch.tensor([0.0, 3.0, 1.0])).min()
        >= 0
    )


# --- calibration

CALIBRATIONS = {
    "plain": {},
    "proximal": {"calibration_mu": 2.0},
    "self-confidence": {"lam": 0.6, "temperature": 2.0},
}


def calibrated_by_torch(
    fed,
    k,
    w,
    how,
    rounds,
    mu=2.0,
    lam=0.6,
    T=2.0,
    lr=0.05,
    epochs=3,
    batch_size=2,
    weight_decay=1e-2,
):
    "Client k's head after `epochs` of torch.optim.SGD, the body frozen"
    part = fed.partition.train[k]
    rng = fed.client(k, rounds - 1, {}, {}, TUNE).rng
    shares = [float((Y[part] == c).sum()) / len(part) for c in range(2)]
    body = select(w, "body.")
    head = {n: t.clone().requires_grad_() for n, t in select(w, "head.").items()}
    sgd = torch.optim.SGD(head.values(), lr=lr, weight_decay=weight_decay)
    for order in [rng.permutation(len(part)) for _ in range(epochs)]:
        for i in range(0, len(part), batch_size):
            rows = part[order[i : i + batch_size]]
            loss = objective(
                body | head,
                X[rows],
                Y[rows],
                w,
                shares,
                lam if how == "self-confidence" else 0.0,
                T,
            )
            if how == "proximal":
                loss = loss + mu / 2 * sum(((t - w[n]) ** 2).sum() for n, t in head.items())
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    return {n: t.detach() for n, t in head.items()}


@pytest.mark.parametrize("how", CALIBRATIONS)
def test_calibration_is_sgd_on_the_head_of_the_final_model(how):
    fed = federation(**AWAY)
    m = FedADCPlus(
        calibration=how,
        calibration_epochs=3,
        calibration_lr=0.05,
        **SETTINGS | {"lr_decay": 1.0} | CALIBRATIONS[how],
    )
    at = run(m, fed, 3).snapshot
    w = at.server["params"]
    assert any(not same_bits(h["params"], w) for h in at.last_broadcasts)
    tuned = finetuned(m, fed, at, eval_models(m, fed, at))
    for k, params in enumerate(tuned):
        assert same_bits(select(params, "body."), select(w, "body."))
        assert distance(select(params, "head."), calibrated_by_torch(fed, k, w, how, 3)) < 1e-10
        if how != "plain":
            assert (
                distance(select(params, "head."), calibrated_by_torch(fed, k, w, "plain", 3)) > 1e-6
            )


def test_calibration_without_its_weight_is_plain():
    fed = federation(**AWAY)
    m = FedADCPlus(calibration="plain", **SETTINGS)
    at = run(m, fed, 2).snapshot

    def tuned(m):
        return finetuned(m, fed, at, eval_models(m, fed, at))

    for other in (
        replace(m, calibration="proximal", calibration_mu=0.0),
        replace(m, calibration="self-confidence", lam=0.0),
    ):
        assert max(distance(a, b) for a, b in zip(tuned(other), tuned(m))) < 1e-10


# --- covering cohorts


def of_classes(*held, **changes):
    "A federation whose client k holds a sample of each class in `held[k]`"
    labels = torch.tensor([c for mine in held for c in mine])
    net = SimpleNamespace(buffers=(), classes=1 + int(labels.max()))
    points = SimpleNamespace(train_x=torch.zeros(len(labels), 1), train_y=labels)
    return Federation(points, net, shares([len(mine) for mine in held]), **changes)


def test_presence():
    fed = of_classes([0, 0, 2], [1], [2, 4])
    assert class_presence(fed, 0).astype(int).tolist() == [
        [1, 0, 1, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 1],
    ]
    swap = DriftSchedule("swap", 3, 5, [Swap(0, [1], (1, 3))])
    assert class_presence(replace(fed, drift=swap), 0)[1].tolist() == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_class_that_nobody_holds_is_not_waited_for():
    fed = of_classes([0], [4], [0], [4], participation=0.5)
    assert all(
        k % 2 == i
        for t in range(5)
        for i, k in enumerate(sorted(covering_cohort(fed, t, 200), key=lambda k: k % 2))
    )


def test_the_most_where_nothing_covers():
    fed = of_classes([0], [0], [0], [1, 2], [0], [3], participation=1 / 3)
    with pytest.warns(
        UserWarning,
        match="none of 300 cohorts of 2 clients holds all 4 classes: taking the first with 3",
    ):
        assert 3 in covering_cohort(fed, 0, 300)


def test_cohorts_that_are_listed_do_not_cover():
    with one_line("FedADC(covering=True): cohorts 'fedccfa-code'"):
        begin(FedADC(covering=True), replace(federation(), cohorts="fedccfa-code"))


def test_covering_runs_and_its_name_differs():
    fed = federation(parts=[[0, 2], [1, 3], [5, 9], [4, 6]], participation=0.5)
    there, here = (
        run(FedADC(covering=c, **SETTINGS), fed, 6).snapshot.server["params"] for c in (True, False)
    )
    assert distance(there, here) > 1e-4
    plain = method_settings(FedADCPlus())
    assert not {"covering", "calibration", "calibration_mu"} & set(plain)
    assert method_settings(FedADCPlus(covering=True)) == plain | {"covering": True}
