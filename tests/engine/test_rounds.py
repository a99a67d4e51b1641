"What a method, an evaluation or a callback does between the lines of a round is seen by the run, or refused in one line"

from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
import torch

from fedrepro.checks.harness import tiny
from fedrepro.core.trees import same_bits
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.forks import ActiveRun, run_forked
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import run
from fedrepro.engine.rows import RESERVED
from toy import one_line

LOCAL = dict(lr=0.05, epochs=1, batch_size=0)


def method(**hooks):
    "FedAvg with these hooks in place of its own"
    return type("Own", (FedAvg,), hooks, listed=False)(**LOCAL)


def ran(method, rounds=2, **more):
    return run(method, replace(tiny()), rounds, **more)  # a federation whose model is its own


# --- who takes part


def choosing(chosen):
    return method(select_clients=lambda self, server, federation, t: chosen)


def test_a_cohort_may_be_numpys_or_torchs():
    plain = ran(choosing([2, 0, 4])).snapshot
    for given in (np.array([2, 0, 4]), torch.tensor([2, 0, 4]), (2, 0, 4), np.uint8([2, 0, 4])):
        for chosen in (given, list(given)):
            assert same_bits(ran(choosing(chosen)).snapshot.server, plain.server)
    wild = choosing(np.array([3]))
    wild.lr = 1e200
    assert type(ran(wild).diverged["client"]) is int


@pytest.mark.parametrize(
    "chosen",
    [None, 3, "01", [0.0], [True, False], np.array([True, False]), [[0], [1]], np.eye(2, dtype=int)]
    + [torch.tensor([0.5]), torch.tensor(2), [0, 5], [1, 1], np.array([-1]), [None], []],
)
def test_anything_else_is_no_cohort(chosen):
    with one_line("round 1: Own.select_clients returned", "different clients of 0..4"):
        ran(choosing(chosen))


# --- what a hook writes into


def usual(server, exchange):
    return FedAvg.aggregate(FedAvg(), server, exchange)


def adds_up(self, server, exchange):
    for upload in exchange.uploads[1:]:
        exchange.uploads[0]["params"]["head.bias"].add_(upload["params"]["head.bias"])
    return usual(server, exchange)


def takes_out(self, server, exchange):
    exchange.uploads.pop()
    exchange.sizes.pop()
    return usual(server, exchange)


def turns_round(self, server, exchange):
    exchange.cohort.reverse()
    return usual(server, exchange)


def replaces_twice(self, server, exchange):
    "The second tensor may lie where the first has been"
    for _ in range(2):
        server["params"]["head.bias"] = server["params"]["head.bias"] + 1
    return server


def remembers_who(self, server, federation, t):
    server["seen"] = torch.ones(())
    return federation.cohort(t)


def replies(self, server, exchange):
    server["params"]["head.bias"].mul_(2)


def decays(self, server):
    server["params"]["head.bias"].mul_(0.9)
    return {"params": server["params"]}


def begins(self, federation):
    federation.initial["head.bias"].add_(1)
    return {"params": federation.initial}


WRITES = {
    "aggregate, an upload": (dict(aggregate=adds_up), "round 1: Own's server changed what was"),
    "aggregate, the uploads": (dict(aggregate=takes_out), "round 1: Own's server changed what was"),
    "aggregate, the cohort": (dict(aggregate=turns_round), "round 1: Own's server changed what "),
    "aggregate, twice": (dict(aggregate=replaces_twice), "round 1: Own.aggregate changed the serv"),
    "select_clients": (dict(select_clients=remembers_who), "round 1: Own changed the server's sta"),
    "reply": (dict(reply=replies), "round 1: Own.reply changed the server's state in place"),
    "broadcast": (dict(broadcast=decays), "Own changed the federation's initial model in place"),
    "init_server": (dict(init_server=begins), "Own changed the federation's initial model in pl"),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_hook_that_writes_into_what_it_was_given_is_refused(what):
    hooks, line = WRITES[what]
    with one_line(line):
        ran(method(**hooks))


class Writes:
    def after_round(self, state):
        state.snapshot.server["params"]["head.bias"].add_(1)


def test_an_evaluation_or_a_callback_that_writes_into_the_server_s_state_is_refused():
    def evaluate(method, federation, snapshot, final):
        Writes().after_round(run_of(snapshot))
        return {}

    def run_of(snapshot):
        return type("State", (), {"snapshot": snapshot})

    with one_line("round 1: evaluate changed the server's state in place"):
        ran(FedAvg(**LOCAL), evaluate=evaluate)
    with one_line("round 1: callback Writes changed the server's state in place"):
        ran(FedAvg(**LOCAL), callbacks=[Writes()])


def test_uploads_may_be_made_in_inference_mode():
    "Such tensors count no writes, and nobody can write into them outside it"

    @torch.inference_mode()
    def client_result(self, client, params, results):
        return {"params": {n: t + 0 for n, t in params.items()}}, client.state

    own = ran(method(client_result=client_result)).snapshot.server
    assert same_bits(own, ran(FedAvg(**LOCAL)).snapshot.server)


# --- what a method keeps on itself


def counts(self, server, exchange):
    self.rounds = getattr(self, "rounds", 0) + 1
    return usual(server, exchange)


def fills(self, server, exchange):
    self.seen[exchange.cohort] += 1
    return usual(server, exchange)


def draws(self, server, exchange):
    self.rng.random()
    return usual(server, exchange)


def steps(self, server, exchange):
    self.layer.weight.grad = torch.ones_like(self.layer.weight)
    self.optimiser.step()
    return usual(server, exchange)


def adds(self, server, exchange):
    with torch.no_grad():
        self.layer.weight.add_(1)
    return usual(server, exchange)


def at_a_client(self, client, params, results):
    self.last = client.id
    return {"params": params}, client.state


def with_things(self, federation):
    "What a method may have, as long as it does not change"
    self.seen = np.zeros(federation.clients)
    self.rng = np.random.default_rng(0)
    self.layer = torch.nn.Linear(1, 1)
    self.optimiser = torch.optim.SGD(self.layer.parameters(), 1.0, momentum=0.5)
    return {"params": federation.initial}


KEEPS = {
    "a number": (dict(aggregate=counts), "rounds"),
    "an array": (dict(aggregate=fills), "seen"),
    "a generator": (dict(aggregate=draws), "rng"),
    "an optimiser": (dict(aggregate=steps), "layer"),
    "a module": (dict(aggregate=adds), "layer"),
    "a client's": (dict(client_result=at_a_client), "last"),
}


@pytest.mark.parametrize("what", KEEPS)
def test_what_a_method_keeps_on_itself_is_refused(what):
    "A resumed run would not have it, and a second run of the same object begin with it"
    hooks, name = KEEPS[what]
    with one_line(f"round 1: Own.{name} has changed", "expected it in the server's or a client's"):
        ran(method(init_server=with_things, **hooks))


def test_what_does_not_change_may_be_on_a_method():
    class Caches(FedAvg, listed=False):
        @cached_property
        def half(self):
            return self.lr / 2

        def aggregate(self, server, exchange):
            assert self.half == self.lr / 2
            return super().aggregate(server, exchange)

    plain = ran(FedAvg(**LOCAL)).snapshot.server
    for own in (method(init_server=with_things), Caches(**LOCAL)):
        assert same_bits(ran(own).snapshot.server, plain)


# --- what follows a round


@pytest.mark.parametrize("name", RESERVED)
def test_a_metric_cannot_have_the_name_of_a_column_that_every_row_has(name):
    with one_line(f"round 1: evaluate returned {name!r}, which every row has already"):
        ran(FedAvg(**LOCAL), evaluate=lambda *what: {name: 1.0})
    with one_line(f"Own.extra_metrics: {name!r} is in every row"):
        ran(method(extra_metrics=lambda self, server: {name: 1.0}), evaluate=evaluate)


class Answers:
    def __init__(self, answer, at=1):
        self.answer = answer
        self.at = at

    def after_round(self, state):
        return self.answer if state.snapshot.round >= self.at else None


@pytest.mark.parametrize("yes", [True, np.bool_(True), torch.tensor(True), np.float64(1) > 0])
def test_a_callback_ends_a_run_with_any_kind_of_true(yes):
    assert ran(FedAvg(**LOCAL), 3, callbacks=[Answers(yes)]).snapshot.round == 1
    no = yes != yes  # of the same kind
    assert ran(FedAvg(**LOCAL), 3, callbacks=[Answers(no), Answers(None)]).snapshot.round == 3


@pytest.mark.parametrize("answer", [1, "stop", 0.5, [], torch.tensor(1), torch.ones(2) > 0])
def test_any_other_answer_of_a_callback_is_refused(answer):
    with one_line("round 1: callback Answers returned", "expected None, or True to end the run"):
        ran(FedAvg(**LOCAL), callbacks=[Answers(answer)])


def test_forks_end_where_each_would_have_ended_alone():
    def active(callbacks, at):
        swap = replace(tiny(), drift=DriftSchedule("one", 5, 10, [Swap(at, [0], (1, 2))]))
        return ActiveRun(FedAvg(**LOCAL), swap, 4, family="one", callbacks=callbacks)

    def runs():
        return [
            active([], 2),
            active([Answers(np.bool_(True), 1)], 2),
            active([Answers(True, 3)], 3),
        ]

    alone = [run(r.method, r.federation, 4, callbacks=r.callbacks).snapshot for r in runs()]
    found = [history.snapshot for history in run_forked(runs())]
    assert [at.round for at in found] == [at.round for at in alone] == [4, 1, 3]
    assert same_bits([at.server for at in found], [at.server for at in alone])
    both = run_forked(runs(), callbacks=[Answers(True, 2)])
    assert [history.snapshot.round for history in both] == [2, 1, 2]


def test_everything_that_is_uploaded_is_counted():
    "A hundred numbers of 8 bytes, and an array of float32"

    def client_result(self, client, params, results):
        more = {"list": [1.0] * 100, "array": np.zeros(50, np.float32)}
        return {"params": params} | more, client.state

    usual = ran(method(), 1).snapshot
    more = ran(method(client_result=client_result), 1).snapshot
    cohort = len(tiny().cohort(0))
    assert more.bytes_up - usual.bytes_up == cohort * (800 + 200)
