"""What happened is counted where it happens: a client that took no step has learned nothing, and says so."""

import math
from dataclasses import replace

import pytest
import torch

from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, flat, gap, play, tiny
from fedrepro.core.trees import distance, weighted_mean
from fedrepro.engine.client import SGD, Phase, client_rounds, train
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.experiments.store import json_line
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
    assert (
        plain.keys() == other.keys()
        and max(float((plain[n].double() - other[n].double()).abs().max()) for n in plain) < 1e-10
    )


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

    found, want = variates(Halves, 2), variates(METHODS["SCAFFOLD"], 1)
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
