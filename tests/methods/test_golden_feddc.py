"""FedDC against its released code (tests/golden/feddc_code.json, float32) and against its equations in NumPy."""

import math
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from test_by_hand import Points, shares
from test_golden import close, watching
from test_golden_memory import FEDDC, SGD, feddc_federation, same_as_feddc
from fedrepro.core.trees import weighted_mean
from fedrepro.engine.federation import Federation
from fedrepro.engine.rounds import AfterRound, begin, next_round, run
from fedrepro.methods.feddc import FedDC
from fedrepro.methods.memory import FedDyn

ALPHA = FEDDC["config"]["alpha"]


# --- the released code


def test_feddc_equals_the_released_code():
    same_as_feddc(
        FedDC(alpha=ALPHA, compat_eta0=True, **SGD),
        "FedDC",
        {"params": "cloud", "selected": "selected"},
    )


def test_average_of_all_last_models_equals_the_released_code():
    "`all`: every client's last local model, the initial one for a client never seen, unweighted"
    m = FedDC(alpha=ALPHA, compat_eta0=True, **SGD)
    fed = feddc_federation()
    now = begin(m, fed)
    last = [fed.initial] * fed.clients
    seen = []
    for t, want in enumerate(FEDDC["methods"]["FedDC"]["models"]["all"]):
        now = next_round(m, fed, now, watching(seen))
        for client, upload, _, _ in seen:
            last[client.id] = upload["params"]
        close(
            weighted_mean(last),
            {n.replace("body.", "body.0."): v for n, v in want.items()},
            f"round {t}, all",
            1e-6,
        )
    assert now.round == FEDDC["config"]["rounds"] == 5


def test_the_default_departs_from_the_code_only_by_the_learning_rate():
    "The rounds' own rate first enters the memories after round 1, so the models differ from round 2 on, not before"
    with pytest.raises(AssertionError, match="round 2, cloud.*off by"):
        same_as_feddc(FedDC(alpha=ALPHA, **SGD), "FedDC", {"params": "cloud"})


@pytest.mark.parametrize(
    "m",
    [FedDyn(alpha=ALPHA, **SGD), FedDC(alpha=2 * ALPHA, compat_eta0=True, **SGD)],
    ids=["FedDyn", "other alpha"],
)
def test_the_comparison_can_fail(m):
    with pytest.raises(AssertionError, match="off by"):
        same_as_feddc(m, "FedDC", {"params": "cloud"})


# --- the equations, written again in NumPy: quadratic clients, unequal sizes, batches, partial participation, decay


class Quadratic(FedDC):
    "The loss of a sample (a, s): s/2 (w - a)^2"

    def loss(self, client, params, batch):
        return batch.mean(batch.x[:, 1] * (params["body.w"] - batch.x[:, 0]) ** 2) / 2


SIZES = np.array([3, 10, 6, 5, 1])
TARGETS = np.array([1.0, 5.0, -2.0, 0.0, 3.0])
SLOPES = np.array([1.0, 0.5, 2.0, 1.0, 0.25])


def points(participation=1.0):
    x = torch.tensor(np.repeat(np.stack([TARGETS, SLOPES], 1), SIZES, 0))
    net = SimpleNamespace(
        buffers=(), classes=1, init=lambda seed, dtype: {"body.w": torch.tensor(0.5, dtype=dtype)}
    )
    return Federation(
        Points(x, torch.zeros(len(x), dtype=torch.int64)),
        net,
        shares(SIZES),
        participation=participation,
        dtype=torch.float64,
    )


def plain(cohorts, lr, decay, alpha, epochs, batch, weight_decay, clip, compat):
    "Cloud model and participants' average after each round, and the memories at the end"
    N = len(SIZES)
    w = 0.5
    g = 0.0
    h = np.zeros(N)
    own = np.zeros(N)
    shares = SIZES * N / SIZES.sum()
    out = []
    for t, cohort in enumerate(cohorts):
        eta = lr * decay**t
        ends = []
        moved = 0.0
        for i in cohort:
            theta = w
            H = epochs * math.ceil(SIZES[i] / batch)
            for _ in range(H):
                d = (
                    SLOPES[i] * (theta - TARGETS[i])
                    + alpha / shares[i] * (theta - (w - h[i]))
                    + g / shares[i]
                    - own[i]
                )
                d *= min(1.0, clip / (abs(d) + 1e-6))
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


@pytest.mark.parametrize("clip", [1e9, 0.8], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_every_round_follows_the_equations(participation, compat, clip):
    fed = points(participation)
    numbers = dict(lr=0.2, alpha=0.3, epochs=2, weight_decay=1e-2)
    m = Quadratic(**numbers, lr_decay=0.9, batch_size=4, clip_norm=clip, compat_eta0=compat)
    want, h, own = plain(
        [fed.cohort(t) for t in range(6)], **numbers, decay=0.9, batch=4, clip=clip, compat=compat
    )
    found = []
    keys = ("params", "selected", "g")
    now = run(
        m,
        fed,
        6,
        callbacks=[
            AfterRound(lambda s: found.append([float(s.server[key]["body.w"]) for key in keys]))
        ],
    ).snapshot
    assert np.abs(np.array(found) - want).max() < 1e-10
    for key, expected in (("h", h), ("g", own)):
        assert (
            np.abs(np.array([float(st[key]["body.w"]) for st in now.states]) - expected).max()
            < 1e-10
        )
