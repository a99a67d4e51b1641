"""SCAFFOLD and FedDyn step by step against released code (tests/golden), and the memories at partial participation."""
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from torch import nn
from test_golden import CONFIG, GOLDEN, check, close, tree
from fedrepro.core.errors import InputError
from fedrepro.core.trees import all_finite, distance, nbytes, same_bits, weighted_mean
from fedrepro.data import datasets, partition
from fedrepro.engine.client import client_round
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, run, sequential
from fedrepro.methods.memory import SCAFFOLD, FedDyn, follow_changes
from fedrepro.methods.server import FedAvgM, FedExP, SlowMo
from fedrepro.models import networks
from fedrepro.models.architectures import Net, Network

torch.set_num_threads(1)


# --- FedCCFA's code

def test_scaffold_equals_fedccfas_code_with_every_variate():
    args = GOLDEN["methods"]["SCAFFOLD"]["args"]
    m = SCAFFOLD(lr=args["lr"], epochs=args["epochs"], batch_size=0, global_lr=args["global_lr"])
    assert (m.momentum, m.weight_decay) == (args["momentum"], args["weight_decay"]) == (0, 0)
    compared = []

    def variates(now, want, seen, t):
        close(now.server["c"], want["c"], f"round {t}, c")
        assert len(seen) == len(want["c_k"]) == CONFIG["clients"]
        for client, _, state, _ in seen: close(state["c"], want["c_k"][str(client.id)], f"round {t}, c_k of client {client.id}")
        compared.append(t)
    check(m, "SCAFFOLD", variates)
    assert compared == list(range(CONFIG["rounds"]))


# --- FedDC's code: float32, so agreement to 1e-6

FEDDC = json.loads((Path(__file__).parent / "golden" / "feddc_code.json").read_text())
SGD = dict(lr=FEDDC["config"]["lr"], lr_decay=FEDDC["config"]["decay"], epochs=FEDDC["config"]["epochs"], batch_size=0, momentum=0.,
           weight_decay=FEDDC["config"]["weight_decay"], clip_norm=FEDDC["config"]["clip"])


class FedDCNet(Net):
    def init(self, seed, dtype=torch.float64): return tree({n.replace("body.", "body.0."): v for n, v in FEDDC["init"].items()})


class FedDCRows:
    train_x = torch.tensor(sum((d["x"] for d in FEDDC["data"]), []), dtype=torch.float64)
    train_y = torch.tensor(sum((d["y"] for d in FEDDC["data"]), [])).flatten()
    def draw(self, n, rng): return None
    def batch(self, x, draws=None, dtype=torch.float64): return x.to(dtype)


def feddc_federation():
    make = lambda: Network(nn.Sequential(nn.Linear(FEDDC["config"]["features"], FEDDC["config"]["hidden"]), nn.Tanh()),
                           nn.Linear(FEDDC["config"]["hidden"], FEDDC["config"]["classes"]))
    starts = np.cumsum([0, *(len(d["y"]) for d in FEDDC["data"])])
    rows = tuple(np.arange(a, b) for a, b in zip(starts, starts[1:]))
    return Federation(FedDCRows(), FedDCNet("feddc", make), SimpleNamespace(train=rows, test=None), dtype=torch.float64)


def same_as_feddc(m, name, where):
    "Every round's models of the server against the stored ones; `where`: our key -> theirs"
    fed, stored = feddc_federation(), FEDDC["methods"][name]["models"]
    now = begin(m, fed)
    for t in range(FEDDC["config"]["rounds"]):
        now = next_round(m, fed, now)
        for ours, theirs in where.items():
            want = {n.replace("body.", "body.0."): v for n, v in stored[theirs][t].items()}
            close(now.server[ours], want, f"{name}, round {t}, {theirs}", 1e-6)
    assert FEDDC["cohorts"] == [fed.cohort(t) for t in range(FEDDC["config"]["rounds"])]


def test_feddyn_equals_feddcs_code():
    same_as_feddc(FedDyn(alpha=FEDDC["config"]["alpha"], **SGD), "FedDyn", {"params": "cloud", "selected": "selected"})


@dataclass
class FedDCScaffold(SCAFFOLD):
    "The textbook's rule with FedDC's habits: c / relative size in the step only, changes weighted by it, 1/(H eta) with the first eta"
    def init_client(self, federation, k):
        sizes = [len(rows) for rows in federation.partition.train]
        return super().init_client(federation, k) | {"relative": torch.tensor(sizes[k] * len(sizes) / sum(sizes), dtype=torch.float64)}
    def adjust_gradient(self, client, params, grads):
        return {n: g - client.state["c"][n] + client.received["c"][n] / client.state["relative"] for n, g in grads.items()}
    def client_result(self, client, params, results):
        way, w = self.epochs * self.lr, client.received["params"]
        change = {n: (w[n] - params[n]) / way - c for n, c in client.received["c"].items()}
        return {"params": params, "change": change}, client.state | {"c": {n: t + change[n] for n, t in client.state["c"].items()}}
    def aggregate(self, server, exchange):
        mean = [s * len(exchange.sizes) / sum(exchange.sizes) for s in exchange.sizes]
        for u, s in zip(exchange.uploads, mean): u["change"] = {n: s * t for n, t in u["change"].items()}
        return super().aggregate(server, exchange)


def test_scaffold_with_its_departures_undone_equals_feddcs_code():
    same_as_feddc(FedDCScaffold(**SGD), "SCAFFOLD", {"params": "selected"})
    with pytest.raises(AssertionError, match="off by"): same_as_feddc(SCAFFOLD(**SGD), "SCAFFOLD", {"params": "selected"})


# --- participation below 1

@pytest.fixture(scope="module")
def part():
    digits = datasets.load("digits")
    cut = partition.partition("dirichlet-class", digits.train_y.numpy(), clients=7, seed=1, alpha=.3)
    return Federation(digits, networks.network("digits_cnn"), cut, participation=.4, dtype=torch.float64)


LOCAL = dict(lr=.05, epochs=1, batch_size=64)


@pytest.mark.parametrize("m, key", [(SCAFFOLD(**LOCAL), "c"), (FedDyn(alpha=.1, **LOCAL), "h")], ids=["SCAFFOLD", "FedDyn"])
def test_the_servers_memory_is_the_mean_of_all_clients(part, m, key):
    now, seen = begin(m, part), set()
    for t in range(4):
        after, cohort = next_round(m, part, now), part.cohort(t)
        assert len(cohort) == 3
        seen |= set(cohort)
        for k in range(7): assert (after.states[k] is now.states[k]) == (k not in cohort)
        assert distance(after.server[key], weighted_mean([s[key] for s in after.states])) < 1e-10
        now = after
    for k in set(range(7)) - seen: assert not any(t.any() for t in now.states[k][key].values())


def test_feddyn_sends_the_participants_mean_plus_h(part):
    m = FedDyn(alpha=.1, **LOCAL)
    now = run(m, part, 3).snapshot.server
    assert distance(now["params"], {n: now["selected"][n] + t for n, t in now["h"].items()}) == 0
    assert same_bits(m.eval_params(m.broadcast(now), {}), now["params"]) and m.evaluated == {"_selected": "selected"}


def test_scaffolds_server_step(part):
    "A global rate of one half goes half the way, with the same variates after one round"
    one, half = (next_round(m, part, begin(m, part)).server for m in (SCAFFOLD(**LOCAL), SCAFFOLD(global_lr=.5, **LOCAL)))
    assert distance(half["params"], weighted_mean([one["params"], part.initial])) < 1e-10
    assert distance(half["c"], one["c"]) == 0


def test_scaffolds_variate_uses_the_rounds_rate_and_own_steps(part):
    m = SCAFFOLD(lr_decay=.5, **LOCAL)
    server = m.init_server(part)
    for t in (0, 2):
        client = part.client(0, t, m.broadcast(server), m.init_client(part, 0))
        upload, state, _ = client_round(m, client)
        way = -(-client.n // 64) * .05 * .5 ** t
        by_hand = {n: (part.initial[n] - w) / way for n, w in upload["params"].items()}
        assert distance(state["c"], by_hand) < 1e-10


@pytest.mark.parametrize("m, up, down", [(SCAFFOLD(**LOCAL), 2, 2), (FedDyn(**LOCAL), 1, 1), (FedAvgM(**LOCAL), 1, 1),
                                         (SlowMo(**LOCAL), 1, 1), (FedExP(**LOCAL), 1, 1)], ids=lambda v: type(v).__name__)
def test_traffic_and_resume(part, m, up, down):
    "Bytes as in the table of methods; two rounds and two more are four; the order of the clients' work does not matter"
    straight, model = run(m, part, 4).snapshot, nbytes(part.initial)
    assert (straight.bytes_up, straight.bytes_down) == (4 * 3 * up * model, 4 * 3 * down * model)
    paused = run(m, part, 4, start=run(m, part, 2).snapshot).snapshot
    backwards = run(m, part, 4, executor=lambda m, clients: sequential(m, clients[::-1])[::-1]).snapshot
    for other in (paused, backwards): assert same_bits([straight.server, straight.states], [other.server, other.states])


# --- steps of the server

@pytest.mark.parametrize("m", [FedAvgM(beta=0., **LOCAL), FedExP(eps=1e12, **LOCAL)], ids=lambda m: type(m).__name__)
def test_a_server_without_its_step_is_fedavg(part, m):
    assert distance(run(m, part, 3).snapshot.server["params"], run(FedAvg(**LOCAL), part, 3).snapshot.server["params"]) < 1e-10


def test_slowmo_counts_clients_equally(part):
    class Uniform(FedAvg):
        def aggregate(self, server, exchange): return {"params": weighted_mean([u["params"] for u in exchange.uploads])}
    slow, mean = run(SlowMo(beta=0., lr_decay=.9, **LOCAL), part, 3), run(Uniform(lr_decay=.9, momentum=0., **LOCAL), part, 3)
    assert distance(slow.snapshot.server["params"], mean.snapshot.server["params"]) < 1e-10


def test_fedexp_at_partial_participation(part):
    "The server's step by the formula, from the uploads of one round; eps shrinks with the square of the rate"
    m, kept = FedExP(eps=1e-3, lr_decay=.5, **LOCAL), []

    def watched(m, clients):
        out = sequential(m, clients)
        kept[:] = [(c.n, o[0]["params"]) for c, o in zip(clients, out)]
        return out
    now = begin(m, part)
    for t in range(3):
        before, now = now.server["params"], next_round(m, part, now, watched)
        flat = torch.stack([torch.cat([(before[n] - w[n]).flatten() for n in before]) for _, w in kept])
        p = torch.tensor([n for n, _ in kept]).double() / sum(n for n, _ in kept)
        mean, eps = p @ flat, 1e-3 * .25 ** t
        rate = max(1., float(p @ flat.square().sum(1) / (2 * (mean.square().sum() + 3 * eps))))
        assert abs(float(now.server["server_lr"]) - rate) < 1e-10
        moved = torch.cat([(before[n] - now.server["params"][n]).flatten() for n in before])
        assert torch.allclose(moved, rate * mean, atol=1e-10)
        judged = m.eval_params({"params": now.server[m.evaluated[""]]}, {})
        want = now.server["params"] if t == 0 else weighted_mean([before, now.server["params"]])
        assert distance(judged, want) < 1e-10


# --- networks with batch-norm statistics

@pytest.mark.parametrize("m", [SCAFFOLD(global_lr=2., **LOCAL), FedDyn(alpha=.1, **LOCAL), FedAvgM(**LOCAL), SlowMo(**LOCAL), FedExP(**LOCAL)],
                         ids=lambda m: type(m).__name__)
def test_statistics_of_batch_norm_are_averaged(part, m):
    make = lambda: Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)), nn.Linear(8, 10))
    fed = Federation(part.data, Net("norm", make), part.partition, participation=.4, dtype=torch.float64)
    assert fed.net.buffers
    now, seen = run(m, fed, 2).snapshot, []

    def watched(m, clients):
        out = sequential(m, clients)
        seen[:] = [(c.n, o[0]["params"]) for c, o in zip(clients, out)]
        return out
    after = next_round(m, fed, now, watched).server["params"]
    weights = [n for n, _ in seen] if isinstance(m, FedAvgM | FedExP) else None
    mean = weighted_mean([{n: w[n] for n in fed.net.buffers} for _, w in seen], weights)
    assert distance(mean, after) < 1e-12 and all_finite(after)
    assert any(distance({n: after[n]}, now.server["params"]) > 0 for n in fed.net.buffers)


# --- bad input

@pytest.mark.parametrize("make", [lambda: SCAFFOLD(lr=0.), lambda: SCAFFOLD(epochs=0), lambda: SlowMo(lr=0.), lambda: FedExP(eps=0.),
                                  lambda: FedDyn(alpha=-1.), lambda: FedAvgM(beta=float("nan"))])
def test_impossible_settings_are_refused(make):
    with pytest.raises(InputError, match=r"\w+\(\w+=.*\): expected"): make()


def test_follow_is_exact_for_odd_counts():
    three, by = torch.tensor([.1, .2, .7]).double(), torch.tensor([.3, 0., 0.]).double()
    assert abs(float(follow_changes({"m": three.mean()}, [{"m": by[0]}], torch.tensor(3))["m"] - (three + by).mean())) < 1e-15
