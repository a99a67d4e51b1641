"""Every registered method keeps the public contract, in all its variants; and the contract catches what breaks it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrepro.checks.contract import ContractError, check, describe_method, examine
from fedrepro.checks.harness import tiny
from fedrepro.core.trees import select
from fedrepro.engine.declarations import Messages, law, law_of
from fedrepro.engine.method import FedAvg
from toy import OURS as METHODS, one_line

VARIANTS = [  # whatever takes another path through a method's code
    ("FedAvg", dict(batch_size=0)),
    ("FedGKD", dict(models=3)),
    ("AdaptiveFedAvg", dict(variant="as_published")),
    ("Flash", dict(one_in=2)),
    ("pFedMe", dict(judged_by="theta")),
    ("FedBABU", dict(finetune_epochs=0)),
    ("FedDC", dict(compat_eta0=True)),
    ("FedPAC", dict(variant="as_published")),
    ("FedADC", dict(variant="heavy_ball")),
    ("FedADC", dict(variant="double_momentum", momentum=0.0)),
    ("FedADCPlus", dict(temperature=4.0)),
    ("FedBSS", dict(selection="filter")),
    ("FedBSS", dict(selection="linear")),
    ("FedBSS", dict(aggregation="all")),
    ("LfD", dict(own_margins=True)),
    ("FedCCFA", dict(clustering="own")),
    ("FedCCFA", dict(clustering="oracle", aggregation="weighted")),
    ("FedCCFA", dict(anchors="common", finetune_epochs=1)),
    ("FedCCFA", dict(anchors="none")),
    ("FedCCFA", dict(variant="as_published", fixed_weight=0.1)),
    ("LfD", dict(first="skip", stale=False)),
    ("LfD", dict(margin_in_regulariser=False, outer_tau=0.1)),
    ("LfD", dict(weight=0.0)),
    *[
        ("Constraint", dict(kind=k, part=p))
        for k in ("feature", "parameter")
        for p in ("extractor", "header", "classifier", "all")
    ],
    ("FedDrift", dict(previous="participation", delta=0.05)),
    ("FedDrift", dict(variant="as_published", delta=0.05)),
    ("FedDrift", dict(augmented=False)),
    ("FedCDA", dict(models=1, batches=1)),
]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_keeps_its_contract(name):
    check(METHODS[name])


@pytest.mark.parametrize(
    "name, settings",
    VARIANTS,
    ids=lambda v: v if isinstance(v, str) else ",".join(f"{n}={x}" for n, x in v.items()),
)
def test_every_variant_keeps_its_contract(name, settings):
    check(METHODS[name], **settings)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_declares_itself(name):
    found = describe_method(METHODS[name])
    assert json.loads(json.dumps(found)) == found
    assert found["paper"]
    assert name == "FedAvg" or (
        found["hooks"] and found["limit"].startswith(name) and law_of(METHODS[name])
    )
    assert found["communication"] or METHODS[name].pooled


# --- methods that break one promise each


class Scales(FedAvg):
    def client_result(self, client, params, results):
        for t in client.received["params"].values():
            t.mul_(0.5)
        return super().client_result(client, params, results)


class AddsUp(FedAvg):
    def aggregate(self, server, exchange):
        total = exchange.uploads[0]["params"]
        for upload in exchange.uploads[1:]:
            for n, t in total.items():
                t.add_(upload["params"][n])
        return {"params": {n: t / len(exchange.uploads) for n, t in total.items()}}


class Writes(FedAvg):
    def init_client(self, federation, k):
        return {"seen": torch.zeros((), dtype=torch.int64)}

    def client_result(self, client, params, results):
        client.state["seen"] = client.state["seen"] + 1
        return super().client_result(client, params, results)


class StepsOnTheReceived(FedAvg):
    "Its step moves the model that it received, too, to which others on the cohort are tied"

    def local_phases(self, client):
        return [self.phase(client, step=self.step)]

    def step(self, step):
        loss, grads = step.grad()
        with torch.no_grad():
            for n, g in grads.items():
                step.client.received["params"][n].sub_(g, alpha=1e-3)
        return loss, step.sgd(grads)


class Dirties(FedAvg):
    "Changes the data that it is shown: whatever runs next in this process starts from others"

    def local_phases(self, client):
        client.data.train_x[client.indices[:1]] = 0
        return super().local_phases(client)


class SaysTooMuch(FedAvg):
    def communication(self):
        return Messages({"params": "model", "anchors": "C x d"})


class SaysOtherwise(FedAvg):
    "The sum is right, the parts are not"

    def broadcast(self, server):
        return {
            "body": select(server["params"], "body."),
            "params": select(server["params"], "head."),
        }

    def local_phases(self, client):
        return [
            self.phase(client, start=lambda c, results: c.received["body"] | c.received["params"])
        ]

    def eval_params(self, message, state):
        return message["body"] | message["params"]

    def communication(self):
        return Messages({"body": "head", "params": "body"})


class SaysNonsense(FedAvg):
    def communication(self):
        return Messages({"params": "model", "anchors": "anchors"})


class LostTwice(FedAvg):
    "Neither side of its law ever learns: two that stay where they began are no evidence"

    limit = law(lr=1e30)


class Remembers(FedAvg):
    "Its server's momentum is kept in the method, not in the server's state"

    velocity = None

    def broadcast(self, server):
        if server["params"]["head.bias"].sum() == server["start"]:
            self.velocity = None
        return {"params": server["params"]}

    def init_server(self, federation):
        return super().init_server(federation) | {"start": federation.initial["head.bias"].sum()}

    def aggregate(self, server, exchange):
        new = super().aggregate(server, exchange)
        move = {n: t - server["params"][n] for n, t in new["params"].items()}
        old = self.velocity or move
        self.velocity = move
        return new | {"params": {n: t + 0.5 * old[n] for n, t in new["params"].items()}}


class Noise(FedAvg):
    def client_result(self, client, params, results):
        noise = np.random.default_rng()  # of its own: PyTorch's generators are seeded by the engine
        return {"params": {n: t + 0.01 * noise.random() for n, t in params.items()}}, client.state


class CountsPadding(FedAvg):
    def loss(self, client, params, batch):
        return super().loss(client, params, batch) * (1 + batch.x.square().mean() / 10)


class ByClass(FedAvg):
    "Divides by the number of samples of each class, which may be none"

    def init_client(self, federation, k):
        return {"balance": torch.zeros(10, dtype=federation.dtype)}

    def client_result(self, client, params, results):
        return {"params": params}, {"balance": client.counts * (client.n / client.counts)}


class Sparse(FedAvg):
    def client_result(self, client, params, results):
        kept = {str(c): client.counts[c] for c in sorted(set(client.labels.tolist()))}
        return {"params": params, "counts": kept}, client.state


class Attached(FedAvg):
    def client_result(self, client, params, results):
        return {"params": {n: t.clone().requires_grad_() for n, t in params.items()}}, {}


class Half(FedAvg):
    def client_result(self, client, params, results):
        return {"params": params, "loss": torch.zeros((), dtype=torch.float16)}, {}


class Plain(FedAvg):
    def init_client(self, federation, k):
        return {"rounds": 0}


class Headless(FedAvg):
    def eval_params(self, message, state):
        return select(message["params"], "body.")


class NotConserved(FedAvg):
    def invariants(self, server, states):
        return {"parameters add up to 0": abs(float(server["params"]["head.bias"].sum()))}


class Raises(FedAvg):
    def loss(self, client, params, batch):
        raise RuntimeError("parameters\n\nare not there")


BROKEN = {  # method -> the promises that it must be caught to break
    Scales: "nothing changed in place",
    AddsUp: "nothing changed in place",
    Writes: "nothing changed in place",
    StepsOnTheReceived: "nothing changed in place",
    Dirties: "nothing changed in place",
    SaysOtherwise: "messages have the declared parts",
    SaysTooMuch: "bytes down",
    SaysNonsense: "traffic",
    LostTwice: "limit law",
    Remembers: "resumed = uninterrupted",
    Noise: "twice the same bits",
    CountsPadding: "padding",
    ByClass: "no NaN, uploads finite",
    Sparse: "the same names every time",
    Attached: "only detached tensors",
    Half: "only detached tensors",
    Plain: "only detached tensors",
    Headless: "whole_models",
    NotConserved: "parameters add up to 0",
    Raises: "works",
}
ALONE = {SaysOtherwise, SaysNonsense, LostTwice, Remembers, NotConserved}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("method", BROKEN, ids=lambda m: m.__name__)
def test_a_broken_promise_is_caught_and_named(method):
    with pytest.raises(ContractError) as caught:
        check(method)
    broken = {f.promise for f in caught.value.report.broken}
    wanted = {BROKEN[method]}
    assert wanted <= broken and (method not in ALONE or broken == wanted), caught.value
    assert method.__name__ in str(caught.value)
    assert BROKEN[method] in str(caught.value)
    assert len(repr(caught.value.report).splitlines()) == 1 + len(caught.value.report.findings)


def test_a_refusal_that_breaks_most_promises_is_said_once():
    with pytest.raises(ContractError) as caught:
        check(AddsUp)
    said = str(caught.value).splitlines()
    assert len(caught.value.report.broken) > len(said) == 3
    assert len([line for line in said if "changed what was sent in place" in line]) == 1


def test_the_remark_says_where():
    assert "round 1 server params" in examine(Scales)["nothing changed in place"].remark
    assert "upload" in examine(AddsUp)["nothing changed in place"].remark
    assert "RuntimeError" in examine(Raises)["works"].remark


class NeedsMore(FedAvg):
    def __init__(self, mu):
        super().__init__()


@pytest.mark.parametrize(
    "method, settings, words",
    [
        (FedAvg(), {}, "expected a subclass of FedAvg, got FedAvg("),
        ("FedAvg", {}, "expected a subclass of FedAvg, got 'FedAvg'"),
        (dict, {}, "expected a subclass of FedAvg, got <class 'dict'>"),
        (FedAvg, {"mu": 1.0}, "FedAvg cannot be made: got an unexpected keyword argument 'mu'"),
        (NeedsMore, {}, "NeedsMore cannot be made: "),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(method, settings, words):
    with one_line(words):
        check(method, **settings)


def test_a_contract_can_be_checked_in_ones_own_federation():
    report = check(METHODS["FedProx"], replace(tiny(), participation=1.0, drift=None), mu=0.1)
    assert report["limit law"].ok
    assert "FedProx" in repr(report)
