"Clients side by side: every method is the loop, and what cannot share a stack is trained in turn, with the reason"

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, tiny
from fedrepro.core.trees import same_bits, tensors
from fedrepro.engine.client import SGD, sgd_step
from fedrepro.engine.method import METHODS, FedAvg
from fedrepro.engine.rounds import begin, close_round, open_round, run, sequential
from fedrepro.executors import executors, stacks
from fedrepro.executors.executors import Stacked
from fedrepro.models.net import Net, Network
from toy import OURS, few, one_line

TOY = few((40, 25, 1, 33, 18))
FEW = dict(lr=0.05, epochs=3, batch_size=8)
IN_TURN = {  # the methods of the package with phases that do not share a stack
    "AdaptiveFedAvg": "a step of its own",
    "FedADC": "a step of its own",
    "FedADCPlus": "a step of its own",
    "FedDyn": "a step of its own",
    "Flash": "may end early",
    "pFedMe": "a step of its own",
}


def ends(executor, method=None, federation=TOY, rounds=3):
    return run(method or FedAvg(**FEW), federation, rounds, executor=executor).snapshot


def gap(a, b):
    pairs = zip(tensors([a.server, a.states]), tensors([b.server, b.states]), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def same(a, b):
    return same_bits([a.server, a.states], [b.server, b.states])


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_method_is_the_loop(name):
    "To 1e-10 in float64; only what is known not to share a stack is trained in turn"
    cls = METHODS[name]
    executor = Stacked()
    method = cls(**LOCAL | cls.check_settings | {"epochs": 3})
    federation = suited(cls, tiny())
    assert (
        gap(ends(executor, method, federation, 2), ends(sequential, method, federation, 2)) < 1e-10
    )
    assert bool(executor.in_turn) is (name in IN_TURN)
    assert all(IN_TURN[name] in why for why in executor.in_turn.values())


def test_what_is_known_of_one_method_is_not_believed_of_the_next():
    executor = Stacked()
    ends(executor, METHODS["FedDyn"](**FEW))
    assert executor.in_turn
    ends(executor, FedAvg(**FEW))
    assert not executor.in_turn


@pytest.mark.parametrize(
    "settings",
    [
        dict(momentum=0.9, lr_decay=0.7),
        dict(weight_decay=0.1, momentum=0.0),
        dict(clip_norm=0.01),
        dict(batch_size=0, weight_decay=0.0),
        dict(epochs=0),
    ],
    ids=str,
)
def test_unequal_clients_with_every_setting_of_the_local_optimiser(settings):
    method = FedAvg(**FEW | settings)
    executor = Stacked()
    assert gap(ends(executor, method), ends(sequential, method)) < 1e-12
    assert not executor.in_turn


def test_all_clients_of_a_kind_share_one_stack(monkeypatch):
    sizes = []
    usual = executors.train_stack
    monkeypatch.setattr(
        executors,
        "train_stack",
        lambda clients, *more: sizes.append(len(clients)) or usual(clients, *more),
    )
    ends(Stacked(), rounds=2)
    assert sizes == [5, 5]


def test_seeds_share_a_stack():
    runs = [replace(TOY, seed=seed) for seed in (0, 1, 7)]
    method = METHODS["SCAFFOLD"](**FEW)
    starts = [begin(method, federation) for federation in runs]
    opened = [open_round(method, *pair) for pair in zip(runs, starts)]
    executor = Stacked()
    answers = iter(executor(method, [client for now in opened for client in now.clients]))
    for federation, start, now in zip(runs, starts, opened):
        mine = [next(answers) for _ in now.clients]
        assert (
            gap(
                close_round(method, federation, start, now, mine),
                ends(sequential, method, federation, 1),
            )
            < 1e-12
        )
    assert not executor.in_turn


class Asks(FedAvg, listed=False):
    def loss(self, client, params, batch):
        loss = super().loss(client, params, batch)
        return loss if loss.item() < 2 else loss / 2


class Decides(FedAvg, listed=False):
    def adjust_gradient(self, client, params, grads):
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        return {n: g / norm for n, g in grads.items()} if norm > 1 else grads


class KnowsItsSize(FedAvg, listed=False):
    def loss(self, client, params, batch):
        return super().loss(client, params, batch) / client.n


class Draws(FedAvg, listed=False):
    def loss(self, client, params, batch):
        return super().loss(client, params, batch) * (1 + 0.1 * torch.rand(()))


class Picks(Asks, listed=False):
    "Its samples are drawn from a generator that it spawns, before its loss is seen to fail"

    def local_phases(self, client):
        return [
            self.phase(client, samples=lambda c: c.rng.spawn(1)[0].permutation(c.n)[: c.n // 2 + 1])
        ]


class Closing(FedAvg, listed=False):
    "A loss for each client: none of them is another's"

    def local_phases(self, client):
        scale = client.id + 1.0
        return [self.phase(client, loss=lambda c, w, batch: scale * self.loss(c, w, batch))]


class Counts(FedAvg, listed=False):
    "A rate that falls with the steps: the memory is a number"

    def local_phases(self, client):
        return [self.phase(client, step=self.step)]

    def step(self, step):
        count = 1 if step.memory is None else step.memory + 1
        loss, grads = step.grad()
        sgd_step(step.moving, grads, None, SGD(step.phase.sgd.lr / count))
        return loss, count


@pytest.mark.parametrize(
    "cls, why",
    [
        (Asks, "item"),
        (Decides, "data-dependent"),
        (KnowsItsSize, "no attribute 'n'"),
        (Draws, "random"),
        (Picks, "item"),
        (Counts, "a step of its own"),
    ],
)
def test_code_for_one_client_is_trained_in_turn_and_says_so_once(cls, why, capsys):
    method = cls(**FEW)
    executor = Stacked()
    assert same(ends(executor, method), ends(sequential, method))
    assert why in executor.in_turn["local"]
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert "stacked: phase local" in line
    assert "in turn" in line


def test_a_loss_of_each_clients_own_is_no_others():
    method = Closing(**FEW)
    executor = Stacked()
    assert same(ends(executor, method), ends(sequential, method))
    assert not executor.in_turn


def network(*layers):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), *layers, nn.ReLU())
    return Network(body, nn.Linear(12, 10))


@pytest.mark.parametrize(
    "layer, why",
    [
        (lambda: nn.BatchNorm1d(12), "whole batch"),
        (lambda: nn.BatchNorm1d(12, track_running_stats=False), "whole batch"),
        (lambda: nn.Dropout(0.3), "random numbers"),
    ],
)
def test_networks_that_cannot_share_a_stack(layer, why):
    federation = replace(TOY, net=Net("own", lambda: network(layer())))
    method = FedAvg(**FEW)
    executor = Stacked()
    assert same(ends(executor, method, federation), ends(sequential, method, federation))
    assert why in executor.in_turn["local"]


class Unknown(nn.Module):
    "A layer that asks its input for a number"

    def forward(self, x):
        return x * 2 if float(x.detach().sum()) > 0 else x


def test_a_layer_that_vmap_does_not_know():
    federation = replace(TOY, net=Net("own", lambda: network(Unknown())))
    executor = Stacked()
    assert same(ends(executor, federation=federation), ends(sequential, federation=federation))
    assert executor.in_turn


def test_what_is_drawn_after_a_phase_is_the_same():
    class Noisy(FedAvg, listed=False):
        def client_result(self, client, params, results):
            return {"params": {n: t + 0.01 * torch.rand(()) for n, t in params.items()}}, {}

    executor = Stacked()
    assert gap(ends(executor, Noisy(**FEW)), ends(sequential, Noisy(**FEW))) < 1e-12
    assert not executor.in_turn


class Forgets(FedAvg, listed=False):
    "An ordinary loss, for which rows of padding count"

    def loss(self, client, params, batch):
        return F.cross_entropy(client.net(params, batch.x, train=True), batch.y)


class Follows(FedAvg, listed=False):
    "Ties the outputs to those of the received model: nothing before the first step, and rows of padding after it"

    def loss(self, client, params, batch):
        out = client.net(params, batch.x, train=True)
        with torch.no_grad():
            old = client.net(client.received["params"], batch.x, train=False)
        return super().loss(client, params, batch) + F.mse_loss(out, old)


class Centres(nn.Module):
    def forward(self, z):
        return z - z.mean(0)


class Attends(nn.Module):
    "Attention without batch_first: along the batch"

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2)

    def forward(self, z):
        return self.attention(z[:, None], z[:, None], z[:, None])[0][:, 0]


def zero_head():
    net = network()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    return net


@pytest.mark.parametrize(
    "cls, make",
    [
        (Forgets, network),
        (Forgets, zero_head),
        (Follows, network),
        (FedAvg, lambda: network(Centres())),
        (FedAvg, lambda: network(Attends())),
    ],
)
@pytest.mark.parametrize("more", [{}, dict(clip_norm=0.1)], ids=str)
def test_what_sees_the_padding_is_trained_in_turn_and_says_so(cls, make, more):
    federation = replace(TOY, net=Net("own", make))
    method = cls(**FEW, **more)
    executor = Stacked()
    assert same(ends(executor, method, federation), ends(sequential, method, federation))
    assert "sees rows of padding" in executor.in_turn["local"]


class Words(nn.Module):
    "Pixels as words, some of them padding"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3, padding_idx=0)
        self.last = nn.Linear(36, 12)

    def forward(self, z):
        return self.last(self.embed(z.long().clamp(0, 4)).flatten(1))


def halved(gradient):
    return gradient / 2


class HalvesItsGradient(nn.Module):
    def forward(self, z):
        if z.requires_grad:
            z.register_hook(halved)
        return z


def hooked():
    net = network(nn.Linear(12, 12))
    net.body[2].register_full_backward_hook(lambda layer, into, out: (halved(into[0]),))
    return net


@pytest.mark.parametrize(
    "make", [lambda: network(Words()), lambda: network(HalvesItsGradient()), hooked]
)
@pytest.mark.parametrize("sizes", [(40, 25, 1, 33, 18), (16, 8, 24), (16, 16)], ids=str)
def test_what_vmap_loses_of_a_gradient_is_trained_in_turn_and_says_so(make, sizes):
    "Also where nothing is padded"
    federation = replace(few(sizes), net=Net("own", make))
    executor = Stacked()
    assert same(ends(executor, federation=federation), ends(sequential, federation=federation))
    assert "torch.vmap computes another gradient" in executor.in_turn["local"]


def answering(monkeypatch, question, answers):
    "Clients that are asked one after the other; those that follow say no"
    left = list(answers)
    monkeypatch.setattr(stacks, question, lambda *_: left.pop(0) if left else False)


ONE_CLIENT = [
    ("goes_elsewhere", [False, False]),
    ("goes_elsewhere", [True, False, False, False]),
    ("sees_padding", [False]),
    ("sees_padding", [True, False, False]),
]
TWO_CLIENTS = [
    ("goes_elsewhere", [True, True], "another gradient"),
    ("goes_elsewhere", [True, False, True], "another gradient"),
    ("sees_padding", [True, True], "sees rows of padding"),
    ("sees_padding", [True, False, True], "sees rows of padding"),
]


@pytest.mark.parametrize("question, answers", ONE_CLIENT)
def test_one_client_alone_is_stacked_all_the_same(monkeypatch, question, answers):
    "In float32 a tie under a maximum may fall otherwise, for one client of one round"
    answering(monkeypatch, question, answers)
    executor = Stacked()
    method = FedAvg(**FEW)
    assert gap(ends(executor, method, TOY), ends(sequential, method, TOY)) < 1e-12
    assert not executor.in_turn


@pytest.mark.parametrize("question, answers, why", TWO_CLIENTS)
def test_of_two_clients_it_is_believed(monkeypatch, question, answers, why):
    answering(monkeypatch, question, answers)
    executor = Stacked()
    ends(executor, FedAvg(**FEW), TOY)
    assert why in executor.in_turn["local"]


def test_a_loss_without_weights_is_stacked_where_nothing_is_padded():
    federation = few((16, 8, 24))
    executor = Stacked()
    method = Forgets(**FEW)
    assert gap(ends(executor, method, federation), ends(sequential, method, federation)) < 1e-12
    assert not executor.in_turn


def test_draws_of_numpy_are_one_clients_own():
    "One number would serve all clients of a stack"

    class Mixes(FedAvg, listed=False):
        def loss(self, client, params, batch):
            return super().loss(client, params, batch) * np.random.beta(1, 1)

    executor = Stacked()
    assert same(ends(executor, Mixes(**FEW)), ends(sequential, Mixes(**FEW)))
    assert "random numbers" in executor.in_turn["local"]


def test_an_error_of_the_methods_own_is_raised_as_in_the_loop():
    class Wrong(FedAvg, listed=False):
        def loss(self, client, params, batch):
            raise KeyError("prototypes")

    for executor in (sequential, Stacked()):
        with pytest.raises(KeyError, match="prototypes"):
            ends(executor, Wrong(**FEW))


class KeepsInConstants(FedAvg, listed=False):
    "Local momentum where the phase's constants are"

    def adjust_gradient(self, client, params, grads):
        old = client.constants.get("g", grads)
        client.constants["g"] = {n: 0.9 * old[n] + 0.1 * g for n, g in grads.items()}
        return client.constants["g"]


class WritesIntoConstants(FedAvg, listed=False):
    def local_phases(self, client):
        return [self.phase(client, constants=lambda c, r: {"g": torch.zeros_like(c.counts)})]

    def adjust_gradient(self, client, params, grads):
        client.constants["g"].add_(grads["head.bias"])
        return grads


@pytest.mark.parametrize("cls", [KeepsInConstants, WritesIntoConstants])
def test_writes_into_the_constants_are_refused_in_every_executor(cls):
    "In a stack they would be lost"
    for executor in (sequential, Stacked()):
        with one_line(
            f"round 1: {cls.__name__}, phase local, changed client.constants in place",
            "expected what one step leaves to the next",
        ):
            ends(executor, cls(**FEW), few((16, 8, 24)))


def test_first_participations_are_a_kind_of_their_own():
    "Who has no state yet, and who has, in one cohort"

    class Remembers(FedAvg, listed=False):
        def client_result(self, client, params, results):
            return {"params": params}, {"before": params["head.bias"]}

        def adjust_gradient(self, client, params, grads):
            if "before" not in client.state:
                return grads
            pull = params["head.bias"] - client.state["before"]
            return grads | {"head.bias": grads["head.bias"] + 0.1 * pull}

    federation = replace(TOY, participation=0.6)
    executor = Stacked()
    method = Remembers(**FEW)
    assert (
        gap(ends(executor, method, federation, 4), ends(sequential, method, federation, 4)) < 1e-12
    )
    assert not executor.in_turn


def test_constants_of_other_names_are_not_mixed_up():
    class Named(FedAvg, listed=False):
        def local_phases(self, client):
            return [self.phase(client, constants=self.named)]

        def named(self, client, results):
            return {f"mine {client.id % 2}": client.counts, "own": client.counts * client.id}

        def loss(self, client, params, batch):
            (name,) = [n for n in client.constants if n.startswith("mine")]
            scale = 1 + client.constants[name].sum() / client.constants["own"].sum().clamp(min=1)
            return super().loss(client, params, batch) * scale / 100

    executor = Stacked()
    assert same(ends(executor, Named(**FEW)), ends(sequential, Named(**FEW)))
    assert "different things" in executor.in_turn["local"]
