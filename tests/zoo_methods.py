"Methods as people write them, and methods as people get them wrong"

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from fedrepro.core.trees import add, scale, sub, weighted_mean, zeros_like
from fedrepro.data import datasets
from fedrepro.data.partition import Partition
from fedrepro.engine.client import cross_entropy
from fedrepro.engine.declarations import Messages
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg, Survey
from fedrepro.models.net import Net, Network


SIZES = (12, 7, 20)
PLAIN = dict(lr=0.1, momentum=0.0, weight_decay=0.0, epochs=2, batch_size=0)


class Rows(nn.Linear):
    "A linear layer of pictures: its name stays `body.0`"

    def forward(self, x):
        return super().forward(x.flatten(1))


def plain_net() -> Network:
    return Network(nn.Sequential(Rows(64, 5), nn.Tanh()), nn.Linear(5, 10))


def normed_net() -> Network:
    return Network(nn.Sequential(Rows(64, 5), nn.BatchNorm1d(5), nn.Tanh()), nn.Linear(5, 10))


def federation(make=plain_net) -> Federation:
    rows = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return Federation(
        datasets.load("digits"),
        Net(make.__name__, make),
        Partition(tuple(rows)),
        dtype=torch.float64,
    )


@dataclass
class ClientAdam(FedAvg, listed=False):
    "Clients step with Adam, which starts anew each round"

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def local_phases(self, client):
        return [self.phase(client, step=self.step)]

    def step(self, step):
        loss, g = step.grad()
        m, v, t = step.memory or (zeros_like(g), zeros_like(g), 0)
        t += 1
        m = {n: self.b1 * m[n] + (1 - self.b1) * x for n, x in g.items()}
        v = {n: self.b2 * v[n] + (1 - self.b2) * x * x for n, x in g.items()}
        with torch.no_grad():
            for n, w in step.moving.items():
                w.sub_(
                    step.phase.sgd.lr
                    * (m[n] / (1 - self.b1**t))
                    / ((v[n] / (1 - self.b2**t)).sqrt() + self.eps)
                )
        return loss, (m, v, t)


@dataclass
class FedAdam(FedAvg, listed=False):
    "The server steps with Adam, without correction of the bias (Reddi et al. 2021)"

    server_lr: float = 0.1
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3

    def init_server(self, federation):
        zeros = zeros_like(federation.initial)
        return super().init_server(federation) | {
            "m": zeros,
            "v": {n: t + self.tau**2 for n, t in zeros.items()},
        }

    def aggregate(self, server, exchange):
        w = server["params"]
        d = sub(super().aggregate(server, exchange)["params"], w)
        m = {n: self.b1 * server["m"][n] + (1 - self.b1) * t for n, t in d.items()}
        v = {n: self.b2 * server["v"][n] + (1 - self.b2) * t * t for n, t in d.items()}
        return {
            "params": {n: w[n] + self.server_lr * m[n] / (v[n].sqrt() + self.tau) for n in w},
            "m": m,
            "v": v,
        }


NORM = ("body.1.",)  # batch normalisation in the network of the tests


@dataclass
class FedBN(FedAvg, listed=False):
    "Normalisation layers, statistics too, stay at the client (Li et al. 2021)"

    personal = True

    def shared(self, w):
        return {n: t for n, t in w.items() if not n.startswith(NORM)}

    def own(self, w):
        return {n: t for n, t in w.items() if n.startswith(NORM)}

    def init_server(self, federation):
        return {"params": self.shared(federation.initial)}

    def init_client(self, federation, k):
        return {"norm": self.own(federation.initial)}

    def local_phases(self, client):
        return [
            self.phase(
                client,
                start=lambda client, results: client.received["params"] | client.state["norm"],
            )
        ]

    def client_result(self, client, params, results):
        return {"params": self.shared(params)}, {"norm": self.own(params)}

    def eval_params(self, message, state):
        return message["params"] | state["norm"]


@dataclass
class Cosine(FedAvg, listed=False):
    "The learning rate falls along a cosine over the rounds"

    rounds: int = 4

    def local_phases(self, client):
        return [
            self.phase(
                client, lr=self.lr * (1 + math.cos(math.pi * client.round / self.rounds)) / 2
            )
        ]


@dataclass
class HeavyBall(FedAvg, listed=False):
    "FedAvgM as in Hsu et al. 2019"

    beta: float = 0.7

    def init_server(self, federation):
        return super().init_server(federation) | {"v": zeros_like(federation.initial)}

    def aggregate(self, server, exchange):
        w = server["params"]
        v = add(
            scale(server["v"], self.beta), sub(w, super().aggregate(server, exchange)["params"])
        )
        return {"params": sub(w, v), "v": v}


@dataclass
class KeepsMomentum(FedAvg, listed=False):
    "A client's momentum goes on where its last round ended"

    def init_client(self, federation, k):
        return {"b": zeros_like(federation.initial), "met": torch.zeros((), dtype=torch.int64)}

    def local_phases(self, client):
        return [self.phase(client, step=self.step)]

    def step(self, step):
        loss, g = step.grad()
        b = add(scale(step.memory or step.client.state["b"], 0.5), g)
        with torch.no_grad():
            for n, w in step.moving.items():
                w.sub_(b[n], alpha=step.phase.sgd.lr)
        return loss, b

    def client_result(self, client, params, results):
        return {"params": params}, {"b": results["local"].optimiser, "met": client.state["met"] + 1}


@dataclass
class PerStep(FedAvg, listed=False):
    "FedNova for plain SGD (Wang et al. 2020)"

    momentum: float = 0.0

    def client_result(self, client, params, results):
        return {
            "params": params,
            "steps": torch.full_like(client.counts[0], results["local"].steps),
        }, client.state

    def aggregate(self, server, exchange):
        w = server["params"]
        steps = [u["steps"] for u in exchange.uploads]
        moves = [
            scale(sub(u["params"], w), 1 / h.clamp(min=1)) for u, h in zip(exchange.uploads, steps)
        ]
        mean = weighted_mean([{"h": h} for h in steps], exchange.sizes)["h"]
        return server | {"params": add(w, scale(weighted_mean(moves, exchange.sizes), mean))}

    def communication(self):
        return Messages(upload={"params": "model", "steps": "1"})


ACCEPTED = {  # the method -> what it equals, by hand
    ClientAdam: "`torch.optim.Adam` at each client, made anew in each round",
    FedAdam: "its formula in NumPy",
    FedBN: "clients' own modules, whose normalisation is never replaced",
    Cosine: "`torch.optim.SGD` with the learning rate of the round",
    HeavyBall: "its formula over `torch.optim.SGD` at the clients",
    KeepsMomentum: "`torch.optim.SGD` whose `state_dict` goes on in the next round",
    PerStep: "its formula over `torch.optim.SGD`, also where a client takes no step",
}


# --- wrong ones


def broken(**hooks):
    "FedAvg with these hooks in place of its own"
    return type("Broken", (FedAvg,), hooks, listed=False)


def wrong_upload(change, who=(1,)):
    "Those of `who` upload what `change` makes of their parameters"

    def client_result(self, client, params, results):
        return {"params": change(dict(params)) if client.id in who else params}, client.state

    return broken(client_result=client_result)


def without_bias(w):
    return {n: t for n, t in w.items() if n != "head.bias"}


def transposed(w):
    return w | {"body.0.weight": w["body.0.weight"].T}


def stretched(w):
    return w | {"body.0.weight": w["body.0.weight"][:1]}  # would be broadcast


def one_number(w):
    return w | {"head.bias": w["head.bias"].mean()}  # so would this


def scales_what_it_received(self, client, params, results):
    client.received["params"]["head.bias"].mul_(0.5)
    return {"params": params}, client.state


def writes_into_its_state(self, client, params, results):
    client.state["seen"].add_(1)
    return {"params": params}, client.state


def adds_to_its_state(self, client, params, results):
    client.state["more"] = params["head.bias"]
    return {"params": params}, client.state


def scales_in_its_step(self, client):
    def step(step):
        loss, grads = step.grad()
        step.client.received["params"]["head.bias"].mul_(0.9)
        return loss, step.sgd(grads)

    return [self.phase(client, step=step)]


def uploads_sparse(self, client, params, results):
    return {"delta": {n: t.to_sparse() for n, t in params.items()}}, client.state


def in_numpy(w):
    return {n: t.numpy() for n, t in w.items()}


def phase_with(**changes):
    "FedAvg with a phase of these fields"
    return broken(local_phases=lambda self, client: [self.phase(client, **changes)])


def started_without_bias(client, results):
    return without_bias(client.received["params"])


def replaces_in_its_step(step):
    loss, grads = step.grad()
    for n, g in grads.items():
        step.params[n] = (step.params[n] - 0.1 * g).detach()
    return loss, None


def steps_in_place(self, server, exchange):
    mean = weighted_mean([u["params"] for u in exchange.uploads], exchange.sizes)
    for n, t in server["params"].items():
        t.copy_(mean[n])
    return server


def counts_in_place(self, server, exchange):
    server["rounds"] = server.get("rounds", 0) + 1
    return server | {"params": exchange.uploads[0]["params"]}


def seen(self, federation, k):
    return {"seen": torch.zeros(())}


REFUSED = {  # what is wrong -> the method, and words of its line
    "functions of another framework alone": (
        broken(fit=lambda self, parameters, config: (parameters, 1, {})),
        ("Broken: nothing calls fit", "those of FedAvg", "expected one or more of init_server"),
    ),
    "client_result returns None": (
        broken(client_result=lambda self, c, w, r: None),
        ("client ", "round 1", "Broken.client_result returned None", "two dicts"),
    ),
    "client_result returns the model alone": (
        broken(client_result=lambda self, c, w, r: w),
        ("client ", "Broken.client_result returned", "two dicts"),
    ),
    "loss returns None": (broken(loss=lambda self, c, w, b: None), ("returned None", "expected")),
    "loss of each sample": (
        broken(loss=lambda self, c, w, b: (c.net(w, b.x, train=True)).sum(1)),
        ("phase local", "loss returned (", "one number a batch"),
    ),
    "aggregate returns None": (
        broken(aggregate=lambda self, s, e: None),
        ("round 1", "aggregate returned None", "a dict"),
    ),
    "init_server returns None": (
        broken(init_server=lambda self, f: None),
        ("Broken.init_server returned None", "a dict"),
    ),
    "init_server in another type": (
        broken(init_server=lambda self, f: {"params": {n: t.half() for n, t in f.initial.items()}}),
        ("Broken.init_server", "has the type torch.float16, expected torch.float"),
    ),
    "init_client returns None": (
        broken(init_client=lambda self, f, k: None),
        ("Broken.init_client returned None", "a dict"),
    ),
    "broadcast returns None": (
        broken(broadcast=lambda self, s: None),
        ("Broken.broadcast returned None", "a dict"),
    ),
    "a broadcast without a model": (
        broken(broadcast=lambda self, s: {"w": s["params"]}),
        ("phase local", "the broadcast has no 'params'"),
    ),
    "one phase alone": (
        broken(local_phases=lambda self, c: self.phase(c)),
        ("Broken.local_phases returned a Phase", "a list of phases"),
    ),
    "phases from a generator": (
        broken(local_phases=lambda self, c: (phase for phase in [self.phase(c)])),
        ("Broken.local_phases returned a generator", "a list of phases"),
    ),
    "a batch of -5": (
        phase_with(batch_size=-5),
        ("phase local: batch_size: expected a whole number of at least 0, got -5",),
    ),
    "half an epoch": (phase_with(epochs=1.5), ("phase local: epochs: expected a whole number",)),
    "a rate below 0": (phase_with(lr=-0.1), ("SGD lr: expected a number of at least 0",)),
    "a start without a part": (
        phase_with(start=started_without_bias),
        ("phase local: start", "'head.bias' is missing"),
    ),
    "constants are None": (
        phase_with(constants=lambda c, r: None),
        ("phase local: constants returned None", "a dict"),
    ),
    "a monitor's Boolean": (
        phase_with(monitor=lambda c, w, e, state: True),
        ("phase local: its monitor returned True", "its next state"),
    ),
    "a step's loss alone": (
        phase_with(step=lambda step: step.grad()[0]),
        ("phase local: its step returned a Tensor", "(loss, what the next step remembers)"),
    ),
    "a step that replaces parameters": (
        phase_with(step=replaces_in_its_step),
        ("phase local", "was replaced in `params`"),
    ),
    "more samples than epochs": (
        phase_with(epochs=1, samples=lambda c: [range(2), range(2)]),
        ("samples returned a list of 2 arrays", "each of its 1 epochs"),
    ),
    "a loss that is detached": (
        broken(loss=lambda self, c, w, b: cross_entropy(c.net(w, b.x), b).detach()),
        ("phase local", "depends on no parameter that it trains"),
    ),
    "a survey that is none": (
        broken(survey=lambda self: 5),
        ("Broken.survey returned 5", "a Survey, or None"),
    ),
    "a survey's answer": (
        broken(survey=lambda self: Survey(lambda c: None, lambda s, e: (s, [{}] * 3))),
        ("its survey's answer returned None",),
    ),
    "a survey that tells two of three": (
        broken(survey=lambda self: Survey(lambda c: {}, lambda s, e: (s, [{}] * 2))),
        ("its survey's assign", "a list of 3 dicts"),
    ),
    "a survey that tells nobody": (
        broken(survey=lambda self: Survey(lambda c: {}, lambda s, e: None)),
        ("its survey's assign returned None", "(the server's next state, a list of dicts)"),
    ),
    "a reply to one": (
        broken(reply=lambda self, s, e: [{}]),
        ("round 1: Broken.reply returned [{}]", "a list of 3 dicts"),
    ),
    "a server's model of arrays": (
        broken(aggregate=lambda self, s, e: {"params": in_numpy(s["params"])}),
        ("round 1: Broken.aggregate", "is a ndarray, expected a tensor"),
    ),
    "a server's model in another type": (
        broken(
            aggregate=lambda self, s, e: {"params": {n: t.half() for n, t in s["params"].items()}}
        ),
        ("round 1: Broken.aggregate", "has the type torch.float16, expected torch.float"),
    ),
    "no phase": (broken(local_phases=lambda self, c: []), ("local_phases", "at least one phase")),
    "nobody": (
        broken(select_clients=lambda self, s, f, t: []),
        ("round 1", "select_clients returned []"),
    ),
    "one client twice": (
        broken(select_clients=lambda self, s, f, t: [1, 1]),
        ("select_clients returned [1, 1]", "different clients of 0..2"),
    ),
    "a client that is not there": (
        broken(select_clients=lambda self, s, f, t: [-1]),
        ("select_clients returned [-1]",),
    ),
    "an upload without a part": (
        wrong_upload(without_bias),
        ("client 1, round 1", "'head.bias' is missing"),
    ),
    "all uploads without a part": (
        wrong_upload(without_bias, (0, 1, 2)),
        ("round 1", "aggregate", "'head.bias' is missing"),
    ),
    "an upload transposed": (
        wrong_upload(transposed),
        ("client 1", "'body.0.weight' has the shape (64, 5), expected (5, 64)"),
    ),
    "an upload of one row": (
        wrong_upload(stretched),
        ("client 1", "'body.0.weight' has the shape (1, 64), expected (5, 64)"),
    ),
    "an upload of one number": (
        wrong_upload(one_number, (0, 1, 2)),
        ("client 0", "'head.bias' has the shape (), expected (10,)"),
    ),
    "a server's model of one number": (
        broken(aggregate=lambda self, s, e: {"params": one_number(s["params"])}),
        ("aggregate", "'head.bias' has the shape ()"),
    ),
    "an upload that is sparse": (
        broken(client_result=uploads_sparse),
        ("client 0, round 1: Broken.client_result: upload: 'delta'", "expected a dense tensor"),
    ),
    "a state that is sparse": (
        broken(init_client=lambda self, f, k: {"error": f.initial["head.bias"].to_sparse()}),
        ("Broken.init_client: 'error'", "torch.sparse_coo", "expected a dense tensor"),
    ),
    "what it received": (
        broken(client_result=scales_what_it_received),
        (", round 1: Broken", "changed client.received in place"),
    ),
    "what it received, in a step": (
        broken(local_phases=scales_in_its_step),
        (", round 1: Broken", "changed client.received in place"),
    ),
    "its state": (
        broken(init_client=seen, client_result=writes_into_its_state),
        ("changed client.state in place",),
    ),
    "the dict of its state": (
        broken(client_result=adds_to_its_state),
        ("changed client.state in place",),
    ),
    "the server's model": (
        broken(aggregate=steps_in_place),
        ("round 1", "aggregate changed the server's state in place"),
    ),
    "the dict of the server": (
        broken(aggregate=counts_in_place),
        ("aggregate changed the server's state in place",),
    ),
}
DIVERGED = {  # what is not finite -> the method, and who is named
    "an upload of NaN": (wrong_upload(lambda w: w | {"head.bias": w["head.bias"] * math.nan}), 1),
    "an upload of infinity": (
        wrong_upload(lambda w: w | {"head.bias": w["head.bias"] + math.inf}),
        1,
    ),
    "a server's model of NaN": (
        broken(aggregate=lambda self, s, e: {"params": scale(s["params"], math.nan)}),
        None,
    ),
}


def idle_for(method, k: int):
    "The method; client k takes no step"
    declared = method.local_phases
    method.local_phases = lambda client: [
        replace(p, epochs=0) if client.id == k else p for p in declared(client)
    ]
    return method
