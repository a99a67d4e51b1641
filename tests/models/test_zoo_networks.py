"Every network of the zoo trains as its module does in a plain loop, or is refused in one line before the first round"

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedrepro.core.errors import InputError
from fedrepro.engine.declarations import Messages
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.method import METHODS, FedAvg
from fedrepro.engine.rounds import begin, run, sequential
from fedrepro.executors.executors import Stacked
from fedrepro.models.net import Net, Network
from fedrepro.models.trials import tried
from fedrepro.models.networks import network
from toy import one_line
from zoo_methods import HeavyBall
from zoo_networks import CLASSES, IMAGE, SETTINGS, ZOO, federation, flat, fresh, plain_loop

ACCEPTED, REFUSED = (
    [name for name, one in ZOO.items() if bool(one.refused) == no] for no in (False, True)
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_as_in_a_plain_loop(name):
    fed = federation(name)
    torch.manual_seed(len(name))  # whatever the caller drew before
    end = run(FedAvg(**SETTINGS), fed, 2).snapshot.server["params"]
    right = plain_loop(name, fed, 2)
    for n, t in end.items():
        assert (
            t.dtype == torch.float64
            and float((t - right[n]).abs().max() if t.numel() else 0) < 1e-10
        ), n
    tied = {
        n
        for n, t in right.items()
        if n not in end and n not in fed.net.constants and "num_batches" not in n
    }
    assert all(any(torch.equal(right[n], right[m]) for m in end) for n in tied), tied
    for n, t in fed.net.constants.items():
        if n in right:
            assert torch.equal(t.to(right[n]), right[n])
    assert all(torch.equal(end[n], fed.initial[n]) for n in fed.net.frozen)
    assert any(not torch.equal(end[n], fed.initial[n]) for n in fed.net.trained)
    module = fresh(name)
    x = fed.data.batch(fed.data.test_x, None, torch.float64)
    module.load_state_dict(right)
    with torch.no_grad():
        gap = fed.net(end, x) - module.eval()(x)
    assert float(gap.abs().max()) < 1e-8


@pytest.mark.parametrize("method", ["FedProx", "SCAFFOLD", "FedCCFA"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_other_methods(name, method):
    fed = federation(name, (6, 4, 8))
    history = run(
        METHODS[method](
            **SETTINGS | dict(epochs=1) | ({"momentum": 0.0} if method == "SCAFFOLD" else {})
        ),
        fed,
        1,
        evaluate,
    )
    assert history.status == "complete"
    assert np.isfinite(history.rows[0]["train_loss"])
    end = history.snapshot.server["params"]
    assert all(t.isfinite().all() for t in end.values())
    assert all(torch.equal(end[n], fed.initial[n]) for n in fed.net.frozen if n in end)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_stack_is_the_loop(name):
    "Side by side, or in turn where that cannot be"
    fed = federation(name)
    loop, stack = (
        run(FedAvg(**SETTINGS), fed, 1, executor=e).snapshot.server["params"]
        for e in (sequential, Stacked())
    )
    assert all(torch.allclose(loop[n], stack[n], rtol=0, atol=1e-10) for n in loop)


@pytest.mark.parametrize("name", ["frozen body", "one_frozen_bias"])
def test_a_momentum_of_frozen_parameters_stays_a_momentum(name):
    "It is zero for them: nothing moved; by rounding, what the server computes of equal numbers is not"
    fed = federation(name)
    end = run(HeavyBall(**SETTINGS), fed, 3).snapshot.server
    assert all(torch.equal(end["params"][n], fed.initial[n]) for n in fed.net.frozen)
    assert all(float(end["v"][n].abs().max()) < 1e-12 for n in fed.net.frozen)


class Noisy(FedAvg, listed=False):
    "Adds to every number of the model, frozen or not"

    def aggregate(self, server, exchange):
        new = super().aggregate(server, exchange)["params"]
        return {"params": {n: t + 0.1 for n, t in new.items()}}


def test_what_is_added_to_frozen_parameters_is_taken_back():
    fed = federation("frozen body")
    end = run(Noisy(**SETTINGS), fed, 2).snapshot.server["params"]
    assert all(torch.equal(end[n], fed.initial[n]) for n in fed.net.frozen)


@pytest.mark.parametrize("name", ["nothing but a head", "frozen body"])
def test_a_part_that_learns_nothing_is_not_sent_alone(name):
    "Before the first round; a method that sends the head too goes on"
    for method in ("FedBABU", "FedRep"):
        with one_line(
            f"{method}: its clients send the body alone, of which network zoo trains nothing",
            "requires_grad",
        ):
            begin(METHODS[method](**SETTINGS), federation(name, (6, 4, 8)))
    for method in ("FedAvg", "FedCCFA", "FedPAC", "Ditto"):
        begin(METHODS[method](**SETTINGS), federation(name, (6, 4, 8)))


class SendsHeads(FedAvg, listed=False):
    "Clients share their heads; bodies stay as they are"

    def client_result(self, client, params, results):
        return {"params": {n: t for n, t in params.items() if n.startswith("head.")}}, client.state

    def communication(self):
        return Messages(upload={"params": "head"})


def test_a_head_that_learns_nothing_is_not_sent_alone():
    begin(SendsHeads(**SETTINGS), federation("frozen body"))
    fed = federation("batch norm")
    head_only = replace(fed, net=network_without_head_training())
    with one_line(
        "SendsHeads: its clients send the head alone, of which network zoo trains nothing"
    ):
        begin(SendsHeads(**SETTINGS), head_only)


def network_without_head_training():
    def make():
        net = ZOO["batch norm"].make()
        net.head.requires_grad_(False)
        return net

    return Net("zoo", make)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(InputError) as e:
        federation(name)
    assert str(e.value).startswith("network zoo: ")
    assert ZOO[name].refused in str(e.value)
    assert "\n" not in str(e.value)


def test_enough_of_them():
    assert len(ACCEPTED) >= 30
    assert len(REFUSED) >= 15


NEEDS_A_LOOK = [name for name in ZOO if "lambda" in name or "keeps" in name]


@pytest.mark.parametrize("name", NEEDS_A_LOOK)
def test_what_a_lambda_keeps_in_float32(name):
    "No message about types: it is trained, or the line names the parameter that would not be"
    fed = federation("nothing but a head")
    if ZOO[name].refused:
        with one_line(f"network zoo: {ZOO[name].refused}"):
            replace(fed, net=Net("zoo", ZOO[name].make), dtype=torch.float32)
        return
    fed = replace(fed, net=Net("zoo", ZOO[name].make), dtype=torch.float32)
    end = run(FedAvg(**SETTINGS), fed, 1).snapshot.server["params"]
    assert not any(torch.equal(end[n], fed.initial[n]) for n in fed.net.trained)


class Skips(nn.Module):
    "Layer drop, by Python's or NumPy's random numbers"

    def __init__(self, draw):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x):
        return x if self.training and self.draw() < 0.01 else self.layer(x)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_whose_random_numbers_they_are_is_no_matter(draw):
    "A layer that is skipped now and then has two modes, also where no trial skips it"
    found = tried(Net("zoo", lambda: flat(Skips(draw))), torch.rand(2, *IMAGE))
    assert found.draws
    assert found.has_modes


class EveryFifth(nn.Module):
    "Adds a frozen layer that follows a trained one in every fifth step, as a saved count tells"

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(8, 8)
        self.target = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.n += 1
            if int(self.n) % 5 == 0:
                self.target.weight.data.mul_(0.9)
        return self.online(x) + self.target(x)


def test_a_frozen_parameter_that_changes_later_is_refused_when_it_does():
    fed = replace(federation("nothing but a head"), net=Net("zoo", lambda: flat(EveryFifth())))
    with one_line(
        "client 0, round 3: phase local", "changed body.2.target.weight, which is frozen"
    ):
        run(FedAvg(**SETTINGS | dict(epochs=1)), fed, 4)


@pytest.mark.parametrize("given", [flat(), None, "digits_cnn"])
def test_a_builder_is_a_function(given):
    with one_line("network mine: expected a function without arguments that builds a Network"):
        Net("mine", given)


def test_a_trial_leaves_the_builders_layers_as_they_are():
    "One body for every call: its values, modes and gradients are the builder's"
    body = flat(nn.BatchNorm1d(8), nn.ReLU()).body
    before = {n: t.clone() for n, t in body.state_dict().items()}
    body.eval()
    net = Net("mine", lambda: Network(body, nn.Linear(8, CLASSES)))
    tried(net, torch.rand(2, *IMAGE))
    assert all(torch.equal(t, before[n]) for n, t in body.state_dict().items())
    assert not any(part.training for part in body.modules())
    assert all(p.grad is None and not p.is_meta for p in body.parameters())


def test_the_packages_networks_are_not_tried_beside_a_plain_loop(monkeypatch):
    def never(*args):
        raise AssertionError("it costs time")

    monkeypatch.setattr("fedrepro.models.trials._plain_steps", never)
    tried(network("digits_cnn"), torch.rand(2, 1, 8, 8))
    with pytest.raises(InputError, match="AssertionError: it costs time"):
        tried(Net("mine", flat), torch.rand(2, *IMAGE))
