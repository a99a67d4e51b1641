"""A client's steps are PyTorch's, and are counted where they happen: without one it has learned nothing, and says so."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth

from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, flat, gap, play, tiny
from fedrepro.core.errors import InputError
from fedrepro.core.trees import distance, same_bits, select, weighted_mean
from fedrepro.engine.client import SGD, Phase, client_rounds, plan_batches, train
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.experiments.store import json_line
from fedrepro.models.net import Net, Network
from toy import OURS as METHODS

EVERYBODY = replace(tiny(), participation=1.0)
CHOSEN = {  # what a client chose or was told without a step: not a memory of training
    "IFCA": {"cluster"},
    "FedDrift": {"cluster", "last"},
    "FedPAC": {"head"},
    "FedCCFA": {"head", "anchors"},
}


def idle(name: str, clients, **settings):
    "The method; the `clients` take no step in any round"
    cls = METHODS[name]
    method = cls(**LOCAL | cls.check_settings | settings)
    declared = method.local_phases

    def phases(client):
        return [
            replace(p, epochs=0, samples=None) if client.id in clients else p
            for p in declared(client)
        ]

    method.local_phases = phases
    return method


def played(name: str, clients, executor=None, **settings):
    "The federation as the method needs it, and three rounds"
    federation = suited(METHODS[name], EVERYBODY)
    return federation, play(
        idle(name, clients, **settings), federation, *[executor] * (executor is not None)
    )


def numbers(recorded) -> dict:
    "All tensors of servers, states and uploads, by name, and the losses"
    losses = {
        f"loss {t}": torch.tensor(at.train_loss) for t, at in enumerate(recorded.snapshots[1:])
    }
    return {
        n: t for n, t in flat(recorded.message()).items() if isinstance(t, torch.Tensor)
    } | losses


VARIANTS = [
    *((name, {}) for name in METHODS),
    ("FedDC", dict(compat_eta0=True)),
    ("FedBSS", dict(aggregation="all")),
    ("pFedMe", dict(judged_by="theta")),
    ("FedCCFA", dict(clustering="own")),
    ("FedCCFA", dict(anchors="none")),
    ("FedADC", dict(variant="heavy_ball")),
    ("LfD", dict(first="skip")),
    ("Flash", dict(one_in=2)),
    ("FedGKD", dict(models=3)),
]


@pytest.mark.parametrize(
    "name, settings", VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
def test_a_client_without_a_step_remembers_what_it_did(name, settings):
    federation, recorded = played(name, [0], **settings)
    first, *after = recorded.snapshots
    for at in after:
        kept = {key: part for key, part in at.states[0].items() if key not in CHOSEN.get(name, ())}
        assert gap(kept, {key: first.states[0][key] for key in kept}) == (0.0, ""), name
    spoilt = [n for n, t in numbers(recorded).items() if t.is_floating_point() and t.isnan().any()]
    assert not spoilt or name == "Union" and all(n.startswith("loss") for n in spoilt), spoilt
    assert not any(at.diverged for at in after)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_in_which_nobody_takes_a_step_spoils_nothing(name):
    federation, recorded = played(name, range(99))
    odd = [
        n
        for n, t in numbers(recorded).items()
        if t.is_floating_point() and t.isnan().any() and not n.startswith("loss")
    ]
    assert not odd and not any(at.diverged for at in recorded.snapshots), odd
    assert all(math.isnan(at.train_loss) for at in recorded.snapshots)
    last = recorded.snapshots[-1]
    if (
        federation.clients > 1
        and set(last.server.get("params", {})) == set(federation.initial)
        and name not in ("InCo",)
    ):
        assert distance(last.server["params"], federation.initial) < 1e-12, name


@pytest.mark.parametrize("executor", [e for e in EXECUTORS if e != "sequential"])
@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedDC", "FedADC", "FedCCFA"])
def test_every_executor_counts_the_same_steps(name, executor):
    plain, other = (numbers(played(name, [1], how)[1]) for how in (None, EXECUTORS[executor]()))
    assert plain.keys() == other.keys()
    assert max(float((plain[n].double() - other[n].double()).abs().max()) for n in plain) < 1e-10


def test_a_loss_is_the_mean_over_those_who_took_a_step():
    federation, recorded = played("FedAvg", [0, 2])
    at = recorded.snapshots[0]
    method = idle("FedAvg", [0, 2])
    clients = [
        federation.client(k, 0, method.broadcast(at.server), at.states[k])
        for k in federation.cohort(0)
    ]
    told = [
        (float(loss), c.n)
        for c in clients
        for _, _, loss in client_rounds(method, [c])
        if loss is not None
    ]
    assert len(told) == federation.clients - 2
    assert (
        abs(
            recorded.snapshots[1].train_loss - sum(x * n for x, n in told) / sum(n for _, n in told)
        )
        < 1e-12
    )


def test_the_server_counts_the_model_of_a_client_without_a_step_like_any_other():
    federation, recorded = played("FedAvg", [0])
    uploads = [u["params"] for u in recorded.uploads[0]]
    assert distance(uploads[0], federation.initial) == 0
    assert (
        distance(recorded.snapshots[1].server["params"], weighted_mean(uploads, federation.sizes))
        < 1e-12
    )


def test_scaffold_divides_by_the_steps_that_were_taken():
    "A phase that stops after its first epoch took half of E * ceil(n / B) steps"

    def stopped(client, params, epoch, last):
        return torch.tensor(0), None

    class Halves(METHODS["SCAFFOLD"], listed=False):
        def local_phases(self, client):
            return [self.phase(client, monitor=stopped)]

    def variates(cls, epochs):
        return [
            s["c"]
            for s in run(cls(lr=0.05, epochs=epochs, batch_size=8), EVERYBODY, 1).snapshot.states
        ]

    found = variates(Halves, 2)
    want = variates(METHODS["SCAFFOLD"], 1)
    assert max(distance(a, b) for a, b in zip(found, want)) < 1e-12


@pytest.mark.parametrize(
    "size, epochs, batch_size", [(1, 0, 4), (1, 3, 4), (9, 2, 4), (9, 2, 0), (8, 2, 4)]
)
def test_a_phase_counts_its_steps(size, epochs, batch_size):
    client = EVERYBODY.client(0, 0, {"params": EVERYBODY.initial}, {})
    pool = torch.arange(size).numpy() % client.n
    phase = Phase(
        "local", FedAvg().loss, SGD(0.1), epochs, batch_size, samples=lambda c: [pool] * epochs
    )
    result = train(client, phase, EVERYBODY.initial)
    assert result.steps == epochs * (-(-size // batch_size) if batch_size else 1)


def test_a_run_without_losses_can_be_stored():
    rows = run(idle("FedAvg", range(99)), EVERYBODY, 2, evaluate).rows
    assert all(math.isnan(row["train_loss"]) for row in rows)
    assert b'train_loss": null' in json_line(rows[0])


# --- a step is PyTorch's


class Skips(nn.Module):
    "LayerDrop: one of two layers is left out by a branch, so that it has no gradient in this step"

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.5:
                x = x + layer(x).tanh()
        return x


LAYER_DROP = replace(EVERYBODY, net=Net("skips", lambda: Network(Skips(), nn.Linear(8, 10))))
SMALL = dict(lr=0.1, momentum=0.9, weight_decay=0.1, epochs=4, batch_size=8)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_parameter_without_a_gradient_is_left_alone_as_in_pytorch(clip):
    "Neither momentum nor weight decay moves it"
    method = FedAvg(**SMALL, clip_norm=clip)
    client, twin = (LAYER_DROP.client(0, 0, {}, {}) for _ in range(2))
    found = train(client, method.phase(client), LAYER_DROP.initial).params
    module = LAYER_DROP.net.make().double().train()
    module.load_state_dict(LAYER_DROP.initial)
    optimiser = torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.1)
    with twin.chance():
        for epoch in plan_batches(twin, method.phase(twin)):
            for rows, draws in epoch:
                batch = twin.batch(rows, draws)
                optimiser.zero_grad()
                F.cross_entropy(module(batch.x), batch.y).backward()
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimiser.step()
    assert distance(found, module.state_dict()) < 1e-10


class Headless(FedAvg, listed=False):
    "Its loss does not use the head"

    def loss(self, client, params, batch):
        return batch.mean(client.net.features(params, batch.x, train=True).square().sum(1))


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_a_loss_that_does_not_use_the_head_leaves_it(executor):
    ends, alone = (
        run(Headless(**SMALL), EVERYBODY, 2, executor=how).snapshot.server["params"]
        for how in (EXECUTORS[executor](), EXECUTORS["sequential"]())
    )
    assert distance(ends, alone) < 1e-10
    assert distance(select(ends, "head."), select(EVERYBODY.initial, "head.")) < 1e-12
    assert distance(select(ends, "body."), select(EVERYBODY.initial, "body.")) > 0.1


def adjusts(adjust, cls=FedAvg):
    "The method with another `adjust_gradient`"
    hook = {"adjust_gradient": lambda self, client, params, grads: adjust(grads)}
    return type("Adjusts", (cls,), hook, listed=False)(**SMALL)


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
def test_gradients_in_another_order_are_the_same_gradients(executor):
    by_name = adjusts(lambda grads: {n: grads[n] for n in sorted(grads)})
    backwards = adjusts(lambda grads: dict(reversed(grads.items())))
    ends = [
        run(method, EVERYBODY, 2, executor=EXECUTORS[executor]()).snapshot.server
        for method in (by_name, backwards, adjusts(dict))
    ]
    assert same_bits(ends[0], ends[2])
    assert same_bits(ends[1], ends[2])


def test_a_constant_direction_is_not_written_to_by_momentum():
    direction = {n: torch.ones_like(t) for n, t in EVERYBODY.initial.items()}
    run(adjusts(lambda grads: direction), EVERYBODY, 1)
    assert all((t == 1).all() for t in direction.values())


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize(
    "adjust, words",
    [
        (lambda g: None, "returned None; expected a dict"),
        (lambda g: {n: t for n, t in g.items() if n != "head.bias"}, "no 'head.bias'"),
        (lambda g: g | {"mu": g["head.bias"]}, "an unknown 'mu'"),
        (
            lambda g: g | {"head.bias": g["head.bias"].sum()},
            "() as 'head.bias'; expected a tensor (10,)",
        ),
        (lambda g: g | {"head.bias": 0.0}, "0.0 as 'head.bias'; expected a tensor (10,)"),
    ],
)
def test_a_gradient_of_other_names_or_shapes_is_refused(executor, adjust, words):
    with pytest.raises(InputError) as said:
        run(adjusts(adjust), EVERYBODY, 1, executor=EXECUTORS[executor]())
    assert "phase local: adjust_gradient returned" in str(said.value)
    assert words in str(said.value)


# --- a phase is what it says


def phased(**changes):
    "FedAvg whose phase has these `changes`"

    class Phased(FedAvg, listed=False):
        def local_phases(self, client):
            return [self.phase(client, **changes)]

    return Phased(**SMALL)


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(train="classifier."), "no parameter's name starts with 'classifier.'"),
        (dict(train=("head.", "tail.")), "no parameter's name starts with 'tail.'"),
        (dict(train=["head."]), "train=['head.']; expected a prefix"),
        (dict(train=()), "train=(); expected a prefix"),
        (dict(train=("head.", 1)), "no parameter's name starts with 1"),
        (dict(train="classifier.", final=True), "no parameter's name starts with 'classifier.'"),
    ],
)
def test_a_phase_that_trains_what_is_not_there_is_refused(executor, changes, words):
    with pytest.raises(InputError) as said:
        run(phased(**changes), EVERYBODY, 1, executor=EXECUTORS[executor]())
    assert words in str(said.value)
    assert "Phased, phase local: train=" in str(said.value)


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize(
    "pick",
    [
        lambda c: torch.rand(c.n).numpy() < 0.5,  # a mask
        lambda c: [0, 1, 2],
        lambda c: np.array([0, c.n]),
        lambda c: np.array([-1, 0]),
        lambda c: np.array([0.0, 1.0]),
        lambda c: np.array([[0, 1]]),
        lambda c: None,
        lambda c: [np.arange(2), np.array([True, False])],
    ],
)
def test_samples_that_are_no_positions_are_refused(executor, pick):
    with pytest.raises(InputError, match="round 1: phase local: samples returned .* whole numbers"):
        run(phased(samples=pick), EVERYBODY, 1, executor=EXECUTORS[executor]())


@pytest.mark.parametrize(
    "kind", [lambda n: range(n), torch.arange, lambda n: np.arange(n, dtype=np.uint8)]
)
def test_samples_are_positions_of_any_kind(kind):
    halves = (phased(samples=lambda c: make((c.n + 1) // 2)) for make in (kind, np.arange))
    assert same_bits(*(run(method, EVERYBODY, 1).snapshot.server for method in halves))


def test_a_phase_may_train_a_body_without_parameters():
    flat = Net("flat", lambda: Network(nn.Flatten(), nn.Linear(64, 10)))
    assert run(FedAvg(**SMALL), replace(EVERYBODY, net=flat), 1).snapshot.round == 1


class Unsaid(FedAvg, listed=False):
    def loss(self, client, params, batch):
        return F.cross_entropy(client.net(params, batch.x), batch.y)


class Said(FedAvg, listed=False):
    def loss(self, client, params, batch):
        return F.cross_entropy(client.net(params, batch.x, train=False), batch.y)


class Drops(nn.Module):
    "Dropout that is no layer of its own"

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "lstm":
            self.layer = nn.LSTM(12, 12, 2, batch_first=True, dropout=0.5)
        if kind == "attention":
            self.layer = nn.MultiheadAttention(12, 2, dropout=0.5, batch_first=True)
        if kind == "depth":
            self.layer = StochasticDepth(0.5, "row")

    def forward(self, z):
        if self.kind == "function":
            return F.dropout(z, 0.5, self.training)
        if self.kind == "depth":
            return z + self.layer(z)
        row = z[:, None].expand(-1, 3, -1)
        if self.kind == "lstm":
            return self.layer(row)[0][:, -1]
        return self.layer(row, row, row)[0].mean(1)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.BatchNorm1d(12),
        lambda: nn.Dropout(0.5),
        lambda: Drops("function"),
        lambda: Drops("lstm"),
        lambda: Drops("attention"),
        lambda: Drops("depth"),
    ],
)
def test_a_loss_says_in_which_mode_a_network_with_two_trains(layer):
    "In a plain loop a network trains; here a forgotten `train=True` would evaluate it in every step"

    def build():
        return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), layer()), nn.Linear(12, 10))

    federation = replace(tiny(), net=Net("own", build))
    with pytest.raises(InputError, match="does not say whether the network trains"):
        run(Unsaid(**LOCAL), federation, 1)
    run(Said(**LOCAL), federation, 1)
    run(Unsaid(**LOCAL), tiny(), 1)


@dataclass
class Taught(FedAvg, listed=False):
    "A student that is called without `train`, or with one, beside a teacher that evaluates"

    mode: bool | None = None

    def loss(self, client, params, batch):
        with torch.no_grad():
            teacher = client.net(client.received["params"], batch.x, train=False)
        student = client.net(params, batch.x, train=self.mode)
        return F.cross_entropy(student, batch.y) + F.mse_loss(student, teacher)


def frozen_body(frozen):
    "A body with dropout whose layers are trained or not"
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Dropout(0.5))
    return Network(body.requires_grad_(not frozen), nn.Linear(12, 10))


@pytest.mark.parametrize("method, frozen", [(Taught, False), (Taught, True), (Unsaid, True)])
def test_a_teacher_or_a_frozen_body_does_not_say_it_for_the_student(method, frozen):
    federation = replace(tiny(), net=Net("own", lambda: frozen_body(frozen)))
    for how in ("sequential", "stacked"):
        with pytest.raises(InputError, match="does not say whether the network trains"):
            run(method(**LOCAL), federation, 1, executor=EXECUTORS[how]())
    for mode in (True, False):
        run(Taught(**LOCAL, mode=mode), federation, 1)
