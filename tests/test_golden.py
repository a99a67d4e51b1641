"""Step by step against the numbers of FedCCFA's released code (tests/golden/fedccfa_code.json: full batches, float64)."""
import json
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from torch import nn
from test_by_hand import Points
from fedrepro.engine.evaluation import eval_models
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, sequential
from fedrepro.methods.fedccfa import FedCCFA, class_classifiers, label_entropy
from fedrepro.methods.objective import FedProx
from fedrepro.methods.personal import FedRep
from fedrepro.models.architectures import Net, Network

GOLDEN = json.loads((Path(__file__).parent / "golden" / "fedccfa_code.json").read_text())
CONFIG, CLIENTS = GOLDEN["config"], range(GOLDEN["config"]["clients"])
TOLERANCE = 1e-9

def tree(stored: dict) -> dict:
    "A stored state dict under our names"
    return {n.replace("hidden_layers.", "body.").replace("fc.", "head."): torch.tensor(v, dtype=torch.float64) for n, v in stored.items()}

def toy():
    body = nn.Sequential(nn.Linear(CONFIG["features"], CONFIG["hidden"]), nn.LeakyReLU(0.01))
    return Network(body, nn.Linear(CONFIG["hidden"], CONFIG["classes"]))

class ToyNet(Net):
    "The golden network: everybody starts from the stored weights"
    def init(self, seed, dtype=torch.float64): return tree(GOLDEN["init"])

class Swaps:
    "From `drift_round` on, even clients swap labels 1 and 2, odd clients 0 and 3"
    clients = len(CLIENTS)
    def label_maps(self, t):
        maps = np.tile(np.arange(CONFIG["classes"]), (self.clients, 1))
        if t >= CONFIG["drift_round"]:
            for k in CLIENTS: maps[k] = [0, 2, 1, 3] if k % 2 == 0 else [3, 1, 2, 0]
        return maps

class StoredOrder:
    "Class-balanced samples: the first ones of each class in stored order, as in the golden run"
    def balanced(self, client):
        labels = client.labels
        take = min(self.balanced_samples, np.unique(labels, return_counts=True)[1].min())
        return np.concatenate([np.flatnonzero(labels == c)[:take] for c in np.unique(labels)])

def federation():
    sizes = [len(d["y"]) for d in GOLDEN["data"]]
    starts = np.cumsum([0, *sizes])
    cut = SimpleNamespace(train=tuple(np.arange(a, b) for a, b in zip(starts, starts[1:])), test=None)
    x, y = (sum((d[key] for d in GOLDEN["data"]), []) for key in "xy")
    points = Points(torch.tensor(x, dtype=torch.float64), torch.tensor(y))
    return Federation(points, ToyNet("golden", toy), cut, Swaps(), dtype=torch.float64)

def method(name):
    a = GOLDEN["methods"][name]["args"]
    sgd = dict(momentum=a["momentum"], weight_decay=a["weight_decay"], batch_size=0)
    if name == "FedAvg": return FedAvg(lr=a["lr"], epochs=a["epochs"], **sgd)
    if name == "FedProx": return FedProx(lr=a["lr"], epochs=a["epochs"], mu=a["mu"], **sgd)
    rep = dict(lr=a["rep_lr"], epochs=a["rep_epochs"], head_lr=a["clf_lr"], head_epochs=a["clf_epochs"], **sgd)
    if name == "FedRep": return FedRep(**rep)
    class Golden(StoredOrder, FedCCFA): pass
    return Golden(**rep, gamma=a["gamma"], eps=a["eps"], tau=a["temperature"], balanced_steps=a["balanced_epochs"], align_from=CONFIG["align_round"],
                  variant=name.split("/")[1])

def close(ours: dict, stored: dict, what: str, tolerance=TOLERANCE):
    "Every tensor of `ours` equals the stored one of the same name"
    want = tree(stored)
    for n, t in ours.items(): assert (gap := float((t - want[n]).abs().max())) < tolerance, f"{what}, {n}: off by {gap}"

def watching(seen: list):
    "The loop; `seen` holds (client, upload, state, loss) of each participant of the last round"
    def watched(method, clients):
        results = sequential(method, clients)
        seen[:] = [(c, *result) for c, result in zip(clients, results)]
        return results
    return watched

def check(m, name, extra=None, tolerance=TOLERANCE):
    """Every round of method `m` against the stored run `name`: participants after training, server, judged models.

    `extra(now, want, seen, t)` checks what the method adds; `seen` as in `watching`."""
    fed, stored = federation(), GOLDEN["methods"][name]["rounds"]
    assert len(stored) == CONFIG["rounds"]
    now, seen = begin(m, fed), []
    for t, want in enumerate(stored):
        now = next_round(m, fed, now, watching(seen))
        for client, upload, state, _ in seen:
            close(upload["params"] | state.get("head", {}), want["local"][str(client.id)], f"round {t}, client {client.id} after training", tolerance)
        if "server" in want: close(now.server["params"], want["server"], f"round {t}, server", tolerance)
        for k, params in enumerate(eval_models(m, fed, now)):
            if "judged" in want: close(params, want["judged"][str(k)], f"round {t}, judged model of client {k}", tolerance)
        if extra is not None: extra(now, want, seen, t)

@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "FedRep"])
def test_every_round_equals_the_released_code(name): check(method(name), name)

@pytest.mark.parametrize("name", ["FedCCFA/corrected", "FedCCFA/as_published"])
def test_every_step_of_fedccfa_equals_the_released_code(name): check(method(name), name, ccfa)

def ccfa(now, want, seen, t):
    for client, upload, _, _ in seen:
        weight, bias = want["balanced"][str(client.id)]
        expected = class_classifiers({"head.weight": torch.tensor(weight, dtype=torch.float64), "head.bias": torch.tensor(bias, dtype=torch.float64)})
        assert torch.allclose(class_classifiers(upload["balanced"]), expected, atol=TOLERANCE, rtol=0), f"round {t}: balanced head of client {client.id}"
        assert abs(float(label_entropy(client.counts)) / 20 - want["align_weight"][str(client.id)]) < TOLERANCE
    for c, stored in want["madd"].items():
        assert torch.allclose(now.server["madd"][int(c)], torch.tensor(stored, dtype=torch.float64), atol=TOLERANCE, rtol=0), f"round {t}: MADD of class {c}"
    for c in range(CONFIG["classes"]):
        labels = now.server["clusters"][c].tolist()
        groups = [[k for k in CLIENTS if labels[k] == g] for g in sorted(set(labels))]
        assert sorted(g for g in groups if len(g) > 1) == sorted(want["clusters"].get(str(c), [])), f"round {t}: clusters of class {c}"
    for k, stored in want["anchors"].items():
        got = now.states[int(k)]["anchors"]
        assert torch.allclose(got, torch.tensor(stored, dtype=torch.float64), atol=1e-8, rtol=1e-9), f"round {t}: anchors of client {k}"
