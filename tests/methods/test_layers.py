"""InCo and FedCDA, server methods of FedBSS's tables: against plain implementations, on real ResNets."""

import itertools
from dataclasses import replace
import numpy as np
import pytest
import torch
from torch import nn
from fedrepro.checks.contract import check
from fedrepro.checks.harness import tiny
from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance, weighted_mean
from fedrepro.data import partition
from fedrepro.engine.client import cross_entropy
from fedrepro.engine.method import Exchange, FedAvg
from fedrepro.engine.rounds import begin, next_round, run, sequential
from fedrepro.methods.layers import FedCDA, InCo, choose, no_repeated_blocks, partners
from fedrepro.models import networks
from fedrepro.models.net import Net, Network

LOCAL = dict(lr=0.05, epochs=1, batch_size=64)


@pytest.fixture
def most(part):
    "Four of seven clients take part"
    return replace(part, participation=0.6)


# --- InCo


def by_the_equation(deep, shallow):
    "The mixed update by matrix norms and traces, for all kernels at once"
    length = lambda g: torch.linalg.matrix_norm(g)[..., None, None]
    trace = lambda a, b: (a.mT @ b).diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    kappa = torch.clamp(trace(shallow, deep).abs() / (trace(shallow, shallow) + 1e-7), 0, 5)
    unit = deep / (length(deep) + 1e-7) + kappa * (shallow / (length(shallow) + 1e-7))
    return torch.clamp(unit * (length(deep) + length(shallow)) / 2, -0.1, 0.1)


EXPECTED = {  # network -> (convolution after the first block, its partner) for each stage and block
    "resnet18_cifar": [
        (f"layer{s}.1.conv{c}", f"layer{s}.0.conv2") for s in range(1, 5) for c in (1, 2)
    ],
    "resnet50_cifar": [
        (f"layer{s}.{b}.conv{c}", f"layer{s}.0.conv{c}")
        for s, blocks in enumerate((3, 4, 6, 3), 1)
        for b in range(1, blocks)
        for c in (2, 3)
    ],
}
EXPECTED |= {"feddc_resnet18": EXPECTED["resnet18_cifar"], "resnet50": EXPECTED["resnet50_cifar"]}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_update_of_a_resnet(name):
    "Two clients, random moves of a tenth of each layer's scale: mixed where a partner is, the mean by size elsewhere"
    net = networks.network(name)
    want = {f"body.{l}.weight": f"body.{s}.weight" for l, s in EXPECTED[name]}
    w = net.init(0, torch.float64)
    noise = torch.Generator().manual_seed(1)
    assert partners(w) == want
    if name.startswith("resnet50"):
        w = {n: t for n, t in w.items() if "layer1." in n or "layer" not in n}  # faster

    def move(t):
        return t + 0.02 * torch.randn(t.shape, generator=noise, dtype=t.dtype)

    moved = [{n: move(t) for n, t in w.items()} for _ in range(2)]
    found = InCo().aggregate(
        {"params": w}, Exchange(0, [0, 1], [{"params": u} for u in moved], [1, 3], None, None)
    )
    mean = weighted_mean(moved, [1, 3])
    for n, t in found["params"].items():
        step = (
            by_the_equation(mean[n] - w[n], mean[want[n]] - w[want[n]])
            if n in want
            else mean[n] - w[n]
        )
        assert float((t - w[n] - step).abs().max()) < 1e-10, n
        if n in want:
            assert distance({n: t}, mean) > 0.01


class Blocks(nn.Module):
    "A stage of two equal blocks, as a ResNet has"

    def __init__(self):
        super().__init__()
        self.layer1 = nn.ModuleList([nn.ModuleDict(), nn.ModuleDict()])
        for n, block in enumerate(self.layer1):
            block["conv1"] = nn.Conv2d(1 if n == 0 else 4, 4, 3, padding=1)
            block["conv2"] = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        for block in self.layer1:
            x = torch.tanh(block["conv2"](torch.tanh(block["conv1"](x))))
        return x.mean((2, 3))


def blocks():
    return Network(Blocks(), nn.Linear(4, 10))


def test_the_law_is_checked_on_a_network_without_repeated_blocks():
    "On one with them InCo is another method, and `check` must not call that a fault"
    federation = replace(tiny(), net=Net("blocks", blocks))
    assert len(partners(federation.initial)) == 2
    plain = no_repeated_blocks(federation)
    assert partners(plain.initial) == {}
    assert no_repeated_blocks(plain) is plain
    assert not check(InCo, federation).broken


# --- FedCDA


def plain_fedcda(m, fed, rounds):
    "Yields the global model after each round: whole models, costs as the equation says, every choice in turn"
    params = fed.initial
    memory = {}
    kept = {}
    for t in range(rounds):
        cohort = fed.cohort(t)
        fresh = {}
        for client in (fed.client(k, t, {"params": params}, {}) for k in cohort):
            ((upload, _, _),) = sequential(FedAvg(**LOCAL), [client])
            everything = client.batch(np.arange(client.n))
            with torch.no_grad():
                loss = float(cross_entropy(fed.net(upload["params"], everything.x), everything))
            fresh[client.id] = (
                torch.cat([w.flatten() for w in upload["params"].values()]),
                loss,
                upload["params"],
            )
            memory[client.id] = (memory.get(client.id, []) + [fresh[client.id]])[-m.models :]
        if t < m.warmup:
            kept |= fresh
            params = weighted_mean(
                [fresh[k][2] for k in cohort], [len(fed.indices[k]) for k in cohort]
            )
        else:
            kept = {k: v for k, v in kept.items() if k not in cohort}
            for batch in np.array_split(cohort, m.batches):

                def cost(combination):
                    flat, loss = zip(*((v[0], v[1]) for v in [*kept.values(), *combination]))
                    rows = torch.stack(flat)
                    return np.mean(loss) + m.smooth / 2 * float(
                        (rows - rows.mean(0)).square().sum(1).mean()
                    )

                best = min(itertools.product(*(memory[k] for k in batch)), key=cost)
                kept |= zip(batch.tolist(), best)
            params = weighted_mean([v[2] for v in kept.values()])
        yield params


@pytest.mark.parametrize(
    "more",
    [
        dict(batches=2, warmup=1),
        dict(batches=1, warmup=0, models=2, smooth=0.1),
        dict(warmup=3, smooth=20.0),
    ],
)
def test_every_round_equals_a_plain_search(most, more):
    m = FedCDA(**LOCAL, **more)
    now = begin(m, most)
    older = 0
    for want in plain_fedcda(m, most, 6):
        now = next_round(m, most, now)
        assert distance(now.server["params"], want) < 1e-10
        older += m.extra_metrics(now.server)["older_choices"]
        assert all(1 <= len(c) <= m.models for c in now.server["cache"].values())
        picked = now.server["picked"].tolist()
        assert all(picked[int(k)] < len(c) for k, c in now.server["cache"].items())
        assert all((i >= 0) == (str(k) in now.server["cache"]) for k, i in enumerate(picked))
    assert older > 0


def test_a_common_shift_of_all_models_changes_no_choice():
    "Also where the shift is a thousand times the spread"
    rng = torch.Generator().manual_seed(3)
    draw = lambda: {
        "params": {"w": torch.randn(6, generator=rng).double()},
        "loss": torch.rand((), generator=rng),
    }
    caches = {k: [draw() for _ in range(3)] for k in range(8)}
    far = {
        k: [{"params": {"w": u["params"]["w"] + 1e3}, "loss": u["loss"]} for u in us]
        for k, us in caches.items()
    }
    origin = {"w": torch.zeros(6).double()}
    near = choose(caches, {6: 0, 7: 1}, [[0, 1, 2], [3, 4, 5]], origin, 1.0)
    assert near == choose(far, {6: 0, 7: 1}, [[0, 1, 2], [3, 4, 5]], origin, 1.0)
    assert (near[6], near[7]) == (0, 1)


def test_statistics_of_batch_norm_are_averaged_but_measure_no_distance(normed):
    fed = normed
    end = run(FedCDA(warmup=1, **LOCAL), fed, 4).snapshot.server
    assert fed.net.buffers
    assert not set(fed.net.buffers) & set(end["origin"])
    chosen = [end["cache"][k][str(int(end["picked"][int(k)]))]["params"] for k in end["cache"]]
    assert distance(end["params"], weighted_mean(chosen)) < 1e-10


def test_a_search_without_end_is_refused(part):
    cut = partition.partition("iid", part.data.train_y.numpy(), clients=100, seed=0)
    crowd = replace(part, partition=cut, participation=1.0)
    with pytest.raises(InputError, match=r"FedCDA\(batches=3\).*choices"):
        begin(FedCDA(), crowd)
    begin(FedCDA(batches=10), crowd)


def test_a_block_without_a_partner_is_not_mixed():
    "An own network whose first block lacks the convolution that would be mixed in"
    shape = torch.zeros(4, 4, 3, 3)
    params = {f"layer1.{block}.conv1.weight": shape for block in (0, 1)}
    assert partners(params) == {}
