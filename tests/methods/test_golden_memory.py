"""SCAFFOLD and FedDyn step by step against released code (tests/golden), and the memories at partial participation."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
import pytest
import torch
from torch import nn
from test_golden import CONFIG, as_stored, check, close, stored_federation, tree, watching
from fedrepro.core.trees import distance, weighted_mean
from fedrepro.engine.client import client_round
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, run
from fedrepro.methods.feddc import FedDC
from fedrepro.methods.memory import SCAFFOLD, FedDyn
from fedrepro.methods.server import FedAvgM, FedExP, SlowMo
from fedrepro.models.net import Net, Network


# --- FedCCFA's code


def test_scaffold_equals_fedccfas_code_with_every_variate():
    m = as_stored(SCAFFOLD, "SCAFFOLD")
    assert m.momentum == m.weight_decay == 0

    def variates(now, want, seen, t):
        close(now.server["c"], want["c"], f"round {t}, c")
        assert len(seen) == len(want["c_k"]) == CONFIG["clients"]
        for client, _, state, _ in seen:
            close(state["c"], want["c_k"][str(client.id)], f"round {t}, c_k of client {client.id}")

    check(m, "SCAFFOLD", variates)


# --- FedDC's code: float32, so agreement to 1e-6

FEDDC = json.loads((Path(__file__).parents[1] / "golden" / "feddc_code.json").read_text())
SGD = dict(
    lr=FEDDC["config"]["lr"],
    lr_decay=FEDDC["config"]["decay"],
    epochs=FEDDC["config"]["epochs"],
    batch_size=0,
    momentum=0.0,
    weight_decay=FEDDC["config"]["weight_decay"],
    clip_norm=FEDDC["config"]["clip"],
)


class FedDCNet(Net):
    def init(self, seed, dtype=torch.float64):
        return tree({n.replace("body.", "body.0."): v for n, v in FEDDC["init"].items()})


def feddc_federation():
    make = lambda: Network(
        nn.Sequential(nn.Linear(FEDDC["config"]["features"], FEDDC["config"]["hidden"]), nn.Tanh()),
        nn.Linear(FEDDC["config"]["hidden"], FEDDC["config"]["classes"]),
    )
    return stored_federation(FEDDC["data"], FedDCNet("feddc", make))


def same_as_feddc(m, name, where):
    "Every round's models of the server against the stored ones; `where`: our key -> theirs"
    fed = feddc_federation()
    stored = FEDDC["methods"][name]["models"]
    now = begin(m, fed)
    for t in range(FEDDC["config"]["rounds"]):
        now = next_round(m, fed, now)
        for ours, theirs in where.items():
            want = {n.replace("body.", "body.0."): v for n, v in stored[theirs][t].items()}
            close(now.server[ours], want, f"{name}, round {t}, {theirs}", 1e-6)
    assert FEDDC["cohorts"] == [fed.cohort(t) for t in range(FEDDC["config"]["rounds"])]


def test_feddyn_equals_feddcs_code():
    same_as_feddc(
        FedDyn(alpha=FEDDC["config"]["alpha"], **SGD),
        "FedDyn",
        {"params": "cloud", "selected": "selected"},
    )


@dataclass
class FedDCScaffold(SCAFFOLD):
    "The textbook's rule with FedDC's habits: c / relative size in the step only, changes weighted by it, 1/(H eta) with the first eta"

    def init_client(self, federation, k):
        sizes = [len(rows) for rows in federation.partition.train]
        return super().init_client(federation, k) | {
            "relative": torch.tensor(sizes[k] * len(sizes) / sum(sizes), dtype=torch.float64)
        }

    def adjust_gradient(self, client, params, grads):
        return {
            n: g - client.state["c"][n] + client.received["c"][n] / client.state["relative"]
            for n, g in grads.items()
        }

    def client_result(self, client, params, results):
        way = self.epochs * self.lr
        w = client.received["params"]
        change = {n: (w[n] - params[n]) / way - c for n, c in client.received["c"].items()}
        return {"params": params, "change": change}, client.state | {
            "c": {n: t + change[n] for n, t in client.state["c"].items()}
        }

    def aggregate(self, server, exchange):
        mean = [s * len(exchange.sizes) / sum(exchange.sizes) for s in exchange.sizes]
        uploads = []
        for u, s in zip(exchange.uploads, mean):
            uploads.append(u | {"change": {n: s * t for n, t in u["change"].items()}})
        return super().aggregate(server, replace(exchange, uploads=uploads))


def test_scaffold_with_its_departures_undone_equals_feddcs_code():
    same_as_feddc(FedDCScaffold(**SGD), "SCAFFOLD", {"params": "selected"})
    with pytest.raises(AssertionError, match="off by"):
        same_as_feddc(SCAFFOLD(**SGD), "SCAFFOLD", {"params": "selected"})


# --- participation below 1

LOCAL = dict(lr=0.05, epochs=1, batch_size=64)


def test_scaffolds_server_step(part):
    "A global rate of one half goes half the way, with the same variates after one round"
    one, half = (
        next_round(m, part, begin(m, part)).server
        for m in (SCAFFOLD(**LOCAL), SCAFFOLD(global_lr=0.5, **LOCAL))
    )
    assert distance(half["params"], weighted_mean([one["params"], part.initial])) < 1e-10
    assert distance(half["c"], one["c"]) == 0


def test_scaffolds_variate_uses_the_rounds_rate_and_own_steps(part):
    m = SCAFFOLD(lr_decay=0.5, **LOCAL)
    server = m.init_server(part)
    for t in (0, 2):
        client = part.client(0, t, m.broadcast(server), m.init_client(part, 0))
        upload, state, _ = client_round(m, client)
        way = -(-client.n // 64) * 0.05 * 0.5**t
        by_hand = {n: (part.initial[n] - w) / way for n, w in upload["params"].items()}
        assert distance(state["c"], by_hand) < 1e-10


# --- steps of the server


def test_slowmo_counts_clients_equally(part):
    class Uniform(FedAvg):
        def aggregate(self, server, exchange):
            return {"params": weighted_mean([u["params"] for u in exchange.uploads])}

    slow = run(SlowMo(beta=0.0, lr_decay=0.9, **LOCAL), part, 3)
    mean = run(Uniform(lr_decay=0.9, momentum=0.0, **LOCAL), part, 3)
    assert distance(slow.snapshot.server["params"], mean.snapshot.server["params"]) < 1e-10


def test_fedexp_at_partial_participation(part):
    "The server's step by the formula, from the uploads of one round; eps shrinks with the square of the rate"
    m = FedExP(eps=1e-3, lr_decay=0.5, **LOCAL)
    seen = []
    now = begin(m, part)
    for t in range(3):
        before = now.server["params"]
        now = next_round(m, part, now, watching(seen))
        flat = torch.stack(
            [
                torch.cat([(before[n] - upload["params"][n]).flatten() for n in before])
                for _, upload, _, _ in seen
            ]
        )
        p = torch.tensor([client.n for client, *_ in seen]).double()
        p /= p.sum()
        mean = p @ flat
        eps = 1e-3 * 0.25**t
        rate = max(1.0, float(p @ flat.square().sum(1) / (2 * (mean.square().sum() + 3 * eps))))
        assert abs(float(now.server["server_lr"]) - rate) < 1e-10
        moved = torch.cat([(before[n] - now.server["params"][n]).flatten() for n in before])
        assert torch.allclose(moved, rate * mean, atol=1e-10)
        judged = m.eval_params({"params": now.server[m.evaluated[""]]}, {})
        want = now.server["params"] if t == 0 else weighted_mean([before, now.server["params"]])
        assert distance(judged, want) < 1e-10


# --- networks with batch-norm statistics


@pytest.mark.parametrize(
    "m",
    [
        SCAFFOLD(global_lr=2.0, **LOCAL),
        FedDyn(alpha=0.1, **LOCAL),
        FedDC(alpha=0.1, **LOCAL),
        FedAvgM(**LOCAL),
        SlowMo(**LOCAL),
        FedExP(**LOCAL),
    ],
    ids=lambda m: type(m).__name__,
)
def test_statistics_of_batch_norm_are_averaged(normed, m):
    fed = normed
    now = run(m, fed, 2).snapshot
    seen = []
    end = next_round(m, fed, now, watching(seen)).server
    after = end["params"]
    weights = [client.n for client, *_ in seen] if isinstance(m, FedAvgM | FedExP) else None
    mean = weighted_mean(
        [{n: upload["params"][n] for n in fed.net.buffers} for _, upload, _, _ in seen], weights
    )
    assert fed.net.buffers
    assert distance(mean, after) < 1e-12
    assert all(t.isfinite().all() for t in after.values())
    assert not any(set(fed.net.buffers) & end[key].keys() for key in ("c", "h", "g") if key in end)
    assert any(distance({n: after[n]}, now.server["params"]) > 0 for n in fed.net.buffers)
