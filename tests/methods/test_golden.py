"""The methods step by step against the numbers of FedCCFA's released code (tests/golden/fedccfa_code.json: full batches, float64)."""

import json
from dataclasses import fields
from pathlib import Path
import numpy as np
import pytest
import torch
from torch import nn
from test_by_hand import Points, shares
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.engine.evaluation import eval_models
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import begin, next_round, sequential
from fedrepro.methods.adaptive import Flash
from fedrepro.methods.alignment import FedFM, FedPAC
from fedrepro.methods.clustered import IFCA
from fedrepro.methods.fedccfa import FedCCFA, class_classifiers, label_entropy
from fedrepro.methods.objective import FedProx
from fedrepro.methods.personal import Ditto, FedBABU, FedRep, pFedMe
from fedrepro.models.net import Net, Network

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fedccfa_code.json").read_text())
CONFIG = GOLDEN["config"]
CLIENTS = range(GOLDEN["config"]["clients"])
TOLERANCE = 1e-9


def tree(stored: dict) -> dict:
    "A stored state dict under our names"
    return {
        n.replace("hidden_layers.", "body.").replace("fc.", "head."): torch.tensor(
            v, dtype=torch.float64
        )
        for n, v in stored.items()
    }


def toy():
    body = nn.Sequential(nn.Linear(CONFIG["features"], CONFIG["hidden"]), nn.LeakyReLU(0.01))
    return Network(body, nn.Linear(CONFIG["hidden"], CONFIG["classes"]))


class ToyNet(Net):
    "The golden network: everybody starts from the stored weights"

    def init(self, seed, dtype=torch.float64):
        return tree(GOLDEN["init"])


def stored_federation(data, net, **changes):
    "The clients of a stored run, each with its samples in their order"
    x, y = (torch.tensor(sum((d[key] for d in data), []), dtype=torch.float64) for key in "xy")
    return Federation(
        Points(x, y.long().flatten()),
        net,
        shares([len(d["y"]) for d in data]),
        dtype=torch.float64,
        **changes,
    )


def federation():
    "From `drift_round` on, even clients swap labels 1 and 2, odd clients 0 and 3"
    swaps = [
        Swap(CONFIG["drift_round"], CLIENTS[k::2], labels)
        for k, labels in enumerate([(1, 2), (0, 3)])
    ]
    drift = DriftSchedule("golden", len(CLIENTS), CONFIG["classes"], swaps)
    return stored_federation(GOLDEN["data"], ToyNet("golden", toy), drift=drift)


OUR_NAMES = {  # of their arguments, where they differ
    "rep_lr": "lr",
    "rep_epochs": "epochs",
    "clf_lr": "head_lr",
    "clf_epochs": "head_epochs",
    "temperature": "tau",
    "lambda": "lam",
    "local_epochs": "personal_epochs",
    "p_lr": "personal_lr",
    "K": "inner_steps",
    "cluster_num": "models",
    "loss_decrement": "gamma",
    "balanced_epochs": "balanced_steps",
}


def as_stored(cls, name, **more):
    "The method with those of the stored arguments that it has"
    args = {OUR_NAMES.get(k, k): v for k, v in GOLDEN["methods"][name]["args"].items()}
    return cls(
        **{f.name: args[f.name] for f in fields(cls) if f.name in args} | {"batch_size": 0} | more
    )


def close(ours: dict, stored: dict, what: str, tolerance=TOLERANCE):
    "Every tensor of `ours` equals the stored one of the same name"
    want = tree(stored)
    for n, t in ours.items():
        assert (gap := float((t - want[n]).abs().max())) < tolerance, f"{what}, {n}: off by {gap}"


def watching(seen: list):
    "The loop; `seen` holds (client, upload, state, loss) of each participant of the last round"

    def watched(method, clients):
        results = sequential(method, clients)
        seen[:] = [(c, *result) for c, result in zip(clients, results)]
        return results

    return watched


def check(m, name, extra=None, fed=None):
    """Every round of method `m` against the stored run `name`: participants after training, server, judged models.

    `extra(now, want, seen, t)` checks what the method adds; `seen` as in `watching`."""
    fed = fed or federation()
    stored = GOLDEN["methods"][name]["rounds"]
    assert len(stored) == CONFIG["rounds"]
    now = begin(m, fed)
    seen = []
    for t, want in enumerate(stored):
        now = next_round(m, fed, now, watching(seen))
        for client, upload, state, _ in seen:
            close(
                upload["params"] | state.get("head", {}),
                want["local"][str(client.id)],
                f"round {t}, client {client.id} after training",
            )
        if "server" in want:
            close(now.server["params"], want["server"], f"round {t}, server")
        for k, params in enumerate(eval_models(m, fed, now)):
            if "judged" in want:
                close(params, want["judged"][str(k)], f"round {t}, judged model of client {k}")
        if extra is not None:
            extra(now, want, seen, t)


def same(ours, stored, what, tolerance=TOLERANCE):
    want = torch.tensor(stored, dtype=torch.float64)
    assert ours.shape == want.shape and (gap := float((ours - want).abs().max())) < tolerance, (
        f"{what}: off by {gap}"
    )


# --- each method


@pytest.mark.parametrize("cls", [FedAvg, FedProx, FedRep])
def test_every_round_equals_the_released_code(cls):
    check(as_stored(cls, cls.__name__), cls.__name__)


class FirstSamples(FedCCFA):
    "Class-balanced samples: the first ones of each class in stored order, as in the golden run"

    def balanced(self, client):
        labels = client.labels
        take = min(self.balanced_samples, np.unique(labels, return_counts=True)[1].min())
        return np.concatenate([np.flatnonzero(labels == c)[:take] for c in np.unique(labels)])


@pytest.mark.parametrize("variant", ["corrected", "as_published"])
def test_every_step_of_fedccfa_equals_the_released_code(variant):
    name = f"FedCCFA/{variant}"
    check(
        as_stored(FirstSamples, name, align_from=CONFIG["align_round"], variant=variant),
        name,
        heads_clusters_and_anchors,
    )


def heads_clusters_and_anchors(now, want, seen, t):
    for client, upload, _, _ in seen:
        expected = [[*weight, bias] for weight, bias in zip(*want["balanced"][str(client.id)])]
        same(
            class_classifiers(upload["balanced"]),
            expected,
            f"round {t}: balanced head of client {client.id}",
        )
        assert (
            abs(float(label_entropy(client.counts)) / 20 - want["align_weight"][str(client.id)])
            < TOLERANCE
        )
    for c, stored in want["madd"].items():
        same(now.server["madd"][int(c)], stored, f"round {t}: MADD of class {c}")
    for c in range(CONFIG["classes"]):
        labels = now.server["clusters"][c].tolist()
        groups = [[k for k in CLIENTS if labels[k] == g] for g in sorted(set(labels))]
        assert sorted(g for g in groups if len(g) > 1) == sorted(
            want["clusters"].get(str(c), [])
        ), f"round {t}: clusters of class {c}"
    for k, stored in want["anchors"].items():
        same(now.states[int(k)]["anchors"], stored, f"round {t}: anchors of client {k}", 1e-8)


def test_every_round_of_fedfm_equals_the_released_code():
    m = as_stored(
        FedFM,
        "FedFM",
        weight=GOLDEN["methods"]["FedFM"]["args"]["lambda"],
        align_from=CONFIG["align_round"],
    )
    check(
        m,
        "FedFM",
        lambda now, want, seen, t: same(
            now.server["anchors"], want["anchors"], f"round {t}, anchors"
        ),
    )


def test_every_round_of_fedpac_equals_the_released_code():
    def extra(now, want, seen, t):
        same(
            torch.stack([upload["variance"] for _, upload, _, _ in seen]),
            want["variance"],
            f"round {t}, variances",
        )
        same(now.server["weights"], want["weights"], f"round {t}, weights")
        assert set(want["anchors"]) == {str(c) for c in range(CONFIG["classes"])}
        for c, stored in want["anchors"].items():
            same(now.server["anchors"][int(c)], stored, f"round {t}, anchor of class {c}")

    check(
        as_stored(
            FedPAC,
            "FedPAC",
            weight=GOLDEN["methods"]["FedPAC"]["args"]["lambda"],
            variant="as_published",
        ),
        "FedPAC",
        extra,
    )


def test_every_round_of_ifca_equals_the_released_code():
    class Golden(IFCA):
        "The models start as they are stored"

        def init_server(self, federation):
            return {
                "models": {
                    str(m): tree(w)
                    for m, w in enumerate(GOLDEN["methods"]["IFCA"]["init"]["models"])
                }
            }

    def extra(now, want, seen, t):
        for m, stored in enumerate(want["models"]):
            close(now.server["models"][str(m)], stored, f"round {t}, model {m}")
        found = {str(k): int(s["cluster"]) for k, s in enumerate(now.states)}
        assert found == want["cluster"], f"round {t}: identities"

    check(as_stored(Golden, "IFCA"), "IFCA", extra)


def test_every_round_of_fedbabu_equals_the_released_code():
    def only_the_body(now, want, seen, t):
        for _, upload, state, _ in seen:
            assert all(n.startswith("body.") for n in upload["params"])
            assert not state
        head = {n: v for n, v in tree(GOLDEN["init"]).items() if n.startswith("head.")}
        assert head
        assert all(torch.equal(now.server["params"][n], v) for n, v in head.items())

    check(as_stored(FedBABU, "FedBABU"), "FedBABU", only_the_body)


def test_every_round_of_ditto_equals_the_released_code():
    def own_models(now, want, seen, t):
        assert len(want["personal"]) == CONFIG["clients"]
        for k, stored in want["personal"].items():
            close(now.states[int(k)]["own"], stored, f"round {t}, own model of client {k}")

    check(as_stored(Ditto, "Ditto"), "Ditto", own_models)


def test_every_round_of_pfedme_judged_by_its_anchor_equals_the_released_code():
    me = as_stored(pFedMe, "pFedMe")
    # given, and not used, here as in the released code
    assert me.momentum > 0
    assert me.weight_decay > 0

    def anchors(now, want, seen, t):
        for k, stored in want["local"].items():
            close(now.states[int(k)]["own"], stored, f"round {t}, what client {k} is judged by")

    check(me, "pFedMe", anchors)


@pytest.mark.parametrize("name", ["Flash", "Flash/early_stop"])
def test_every_round_of_flash_equals_the_released_code(name):
    "With the clients' test data, which serve early stopping"
    fed = federation()
    stops = []
    fed.data.test_x = torch.tensor(
        sum((d["test_x"] for d in GOLDEN["data"]), []), dtype=torch.float64
    )
    fed.data.test_y = torch.tensor(sum((d["test_y"] for d in GOLDEN["data"]), []))
    fed.partition.test = shares([len(d["test_y"]) for d in GOLDEN["data"]]).train

    class Watched(Flash):
        def go_on(self, client, params, epoch, last):
            more, last = super().go_on(client, params, epoch, last)
            stops.append(not more)
            return more, last

    check(as_stored(Watched, name, variant="as_published"), name, fed=fed)
    assert any(stops) or name == "Flash"
