"""FedBABU, Ditto, pFedMe and Flash, step by step, against the numbers of FedCCFA's released code."""
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import test_golden
from fedrepro.methods.adaptive import Flash
from fedrepro.methods.personal import Ditto, FedBABU, pFedMe
from test_golden import CONFIG, GOLDEN, check, close, tree

def settings(name):
    "The stored arguments of a method, and the optimiser's among them under our names"
    a = GOLDEN["methods"][name]["args"]
    return a, dict(lr=a["lr"], epochs=a["epochs"], momentum=a["momentum"], weight_decay=a["weight_decay"], batch_size=0)

def test_fedbabu():
    _, sgd = settings("FedBABU")
    check(FedBABU(**sgd), "FedBABU", only_the_body)

def only_the_body(now, want, seen, t):
    for _, upload, state, _ in seen: assert all(n.startswith("body.") for n in upload["params"]) and not state
    head = {n: v for n, v in tree(GOLDEN["init"]).items() if n.startswith("head.")}
    assert head and all(torch.equal(now.server["params"][n], v) for n, v in head.items())

def test_ditto():
    a, sgd = settings("Ditto")
    check(Ditto(lam=a["lambda"], personal_epochs=a["local_epochs"], **sgd), "Ditto", own_models)

def own_models(now, want, seen, t):
    assert len(want["personal"]) == CONFIG["clients"]
    for k, stored in want["personal"].items():
        close(now.states[int(k)]["own"], stored, f"round {t}, own model of client {k}")

def test_pfedme_judged_by_its_anchor():
    a, sgd = settings("pFedMe")
    assert sgd["momentum"] > 0 and sgd["weight_decay"] > 0  # given, and not used, here as in the released code
    me = pFedMe(lam=a["lambda"], inner_steps=a["K"], personal_lr=a["p_lr"], beta=a["beta"], **sgd)
    check(me, "pFedMe", anchors)

def anchors(now, want, seen, t):
    for k, stored in want["local"].items():
        close(now.states[int(k)]["own"], stored, f"round {t}, what client {k} is judged by")

def with_test_shares(plain=test_golden.federation):
    "The golden federation with the clients' test data, which serve early stopping"
    fed, ends = plain(), np.cumsum([len(d["test_y"]) for d in GOLDEN["data"]])
    fed.data.test_x = torch.tensor(sum((d["test_x"] for d in GOLDEN["data"]), []), dtype=torch.float64)
    fed.data.test_y = torch.tensor(sum((d["test_y"] for d in GOLDEN["data"]), []))
    return replace(fed, partition=SimpleNamespace(train=fed.partition.train, test=tuple(np.split(np.arange(ends[-1]), ends[:-1]))))

@pytest.mark.parametrize("name", ["Flash", "Flash/early_stop"])
def test_flash(name, monkeypatch):
    monkeypatch.setattr(test_golden, "federation", with_test_shares)
    a, sgd = settings(name)
    stops = []

    class Watched(Flash):
        def pays(self, client, params, epoch, last):
            more, last = super().pays(client, params, epoch, last)
            stops.append(not more)
            return more, last

    server = dict(server_lr=a["server_lr"], beta1=a["beta1"], beta2=a["beta2"], tau=a["tau"])
    check(Watched(gamma=a["loss_decrement"], variant="as_published", **server, **sgd), name)
    assert any(stops) or name == "Flash"
