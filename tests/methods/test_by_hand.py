"""One round of FedAvg and of FedCCFA on three clients, worked out again in plain PyTorch without any of the package's code."""

from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round
from fedrepro.methods.fedccfa import FedCCFA
from fedrepro.models.net import Net, Network

X = torch.tensor(
    [
        [1.0, 0.0],
        [0.0, 1.0],
        [2.0, 1.0],
        [1.0, 3.0],
        [-1.0, 2.0],
        [0.0, -1.0],
        [2.0, 2.0],
        [-2.0, 1.0],
        [1.0, -1.0],
        [3.0, 0.0],
    ],
    dtype=torch.float64,
)
Y = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1, 0])
PARTS = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
TWO = [[0, 1, 3, 4, 6, 7, 8], [2, 5, 9]]  # two clients: labels 0 1 1 1 1 0 1 and 0 0 0
# four clients, two a round
FOUR = dict(parts=[[0, 1, 3], [2, 5], [4, 6, 7, 8], [9]], participation=0.5)
W = {
    "body.weight": torch.tensor([[0.5, -0.2], [0.1, 0.7], [0.3, 0.3]], dtype=torch.float64),
    "body.bias": torch.tensor([0.1, 0.0, -0.1], dtype=torch.float64),
    "head.weight": torch.tensor([[0.4, -0.3, 0.2], [-0.1, 0.2, 0.5]], dtype=torch.float64),
    "head.bias": torch.tensor([0.0, 0.2], dtype=torch.float64),
}


class TinyNet(Net):
    def init(self, seed, dtype=torch.float64):
        return {n: t.clone() for n, t in W.items()}


class Points:
    "Training samples as they are stored: nothing to normalise or augment"

    def __init__(self, x, y):
        self.train_x = x
        self.train_y = y

    def draw(self, n, rng):
        return None

    def batch(self, x, draws=None, dtype=torch.float64):
        return x.to(dtype)


def shares(sizes):
    "A partition of the samples in their order"
    return SimpleNamespace(
        train=tuple(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])), test=None
    )


def federation(parts=PARTS, **changes):
    "Clients with these rows of X and Y each"
    net = TinyNet("tiny", lambda: Network(nn.Linear(2, 3), nn.Linear(3, 2)))
    cut = SimpleNamespace(train=tuple(map(np.array, parts)), test=None)
    return Federation(Points(X, Y), net, cut, dtype=torch.float64, **changes)


def logits(w, x):
    return (x @ w["body.weight"].T + w["body.bias"]) @ w["head.weight"].T + w["head.bias"]


def descend(w, names, loss, lr, steps, momentum=0.9, decay=1e-2):
    "PyTorch's SGD written out"
    w = {n: t.clone() for n, t in w.items()}
    velocity = {}
    for _ in range(steps):
        leaves = {n: w[n].clone().requires_grad_() for n in names}
        grads = torch.autograd.grad(loss({**w, **leaves}), list(leaves.values()))
        for n, g in zip(names, grads):
            g = g + decay * w[n]
            velocity[n] = g if n not in velocity else momentum * velocity[n] + g
            w[n] = w[n] - lr * velocity[n]
    return w


def test_fedavg():
    m = FedAvg(lr=0.1, momentum=0.9, weight_decay=1e-2, epochs=3, batch_size=0)
    after = next_round(m, federation(), begin(m, federation())).server["params"]
    local = [
        descend(W, list(W), lambda w, p=p: F.cross_entropy(logits(w, X[p]), Y[p]), 0.1, 3)
        for p in PARTS
    ]
    for n in W:
        by_hand = (4 * local[0][n] + 2 * local[1][n] + 4 * local[2][n]) / 10
        assert torch.allclose(after[n], by_hand, atol=1e-12, rtol=0)


HEAD = ["head.weight", "head.bias"]
BODY = ["body.weight", "body.bias"]


@pytest.mark.parametrize("eps", [1e-9, 0.05, 2.0])
def test_fedccfa(eps):
    "Two rounds, so that heads, clusters and anchors of the first enter the second; all samples are the balanced batch"
    m = FedCCFA(
        lr=0.05,
        head_lr=0.2,
        momentum=0.9,
        weight_decay=1e-2,
        epochs=2,
        head_epochs=1,
        batch_size=0,
        balanced_steps=3,
        eps=eps,
        gamma=2.0,
        align_from=0,
    )
    now = begin(m, federation())
    fed = federation()
    heads = [None] * 3
    anchors = [None] * 3
    body = {n: W[n] for n in BODY}
    ran = 0
    for t in range(2):
        now = next_round(m, fed, now)
        balanced = []
        local = []
        own = []
        for k, p in enumerate(PARTS):
            x = X[p]
            y = Y[p]
            ce = lambda w: F.cross_entropy(logits(w, x), y)
            start = {**body, "head.weight": W["head.weight"], "head.bias": W["head.bias"]}
            b = descend(start, HEAD, ce, 0.2, 3)
            w = b if heads[k] is None else {**body, **heads[k]}
            w = descend(w, HEAD, ce, 0.2, 1)

            def aligned(w):
                f = x @ w["body.weight"].T + w["body.bias"]
                loss = F.cross_entropy(logits(w, x), y)
                if anchors[k] is None:
                    return loss
                share = torch.stack([(y == c).double().mean() for c in range(2)])
                entropy = -(share * share.log()).sum()
                cos = torch.stack(
                    [torch.stack([fi @ a / fi.norm() / a.norm() for a in anchors[k]]) for fi in f]
                )
                return loss + entropy / 2.0 * F.cross_entropy(cos / 0.1, y)

            w = descend(w, BODY, aligned, 0.05, 2)
            f = x @ w["body.weight"].T + w["body.bias"]
            balanced.append(b), local.append(w), own.append([f[y == c].mean(0) for c in range(2)])
        body = {n: (4 * local[0][n] + 2 * local[1][n] + 4 * local[2][n]) / 10 for n in BODY}
        new_heads = [{n: w[n].clone() for n in HEAD} for w in local]
        new_anchors = [[None, None] for _ in PARTS]
        for c in range(2):
            v = [torch.cat([b["head.weight"][c], b["head.bias"][c : c + 1]]) for b in balanced]
            d = lambda i, j: 1 - v[i] @ v[j] / v[i].norm() / v[j].norm()
            # n - 2 = 1
            D = {
                (i, j): abs(d(i, l) - d(j, l))
                for i in range(3)
                for j in range(3)
                for l in range(3)
                if len({i, j, l}) == 3
            }
            near = lambda i: {i} | {j for j in range(3) if j != i and D[i, j] <= eps}
            for i in range(3):
                group = near(i)
                for _ in range(2):
                    group = set().union(*map(near, group))
                ran += len(group) > 1
                new_heads[i]["head.weight"][c] = sum(
                    local[j]["head.weight"][c] for j in group
                ) / len(group)
                new_heads[i]["head.bias"][c] = sum(local[j]["head.bias"][c] for j in group) / len(
                    group
                )
                new_anchors[i][c] = sum(own[j][c] for j in group) / len(group)
        heads = new_heads
        anchors = [torch.stack(a) for a in new_anchors]
        for n in BODY:
            assert torch.allclose(now.server["params"][n], body[n], atol=1e-12, rtol=0)
        for k in range(3):
            for n in HEAD:
                assert torch.allclose(now.states[k]["head"][n], heads[k][n], atol=1e-12, rtol=0)
            assert torch.allclose(now.states[k]["anchors"], anchors[k], atol=1e-12, rtol=0)
    assert (ran == 0) == (eps == 1e-9)
    assert (ran == 12) == (eps == 2.0)
