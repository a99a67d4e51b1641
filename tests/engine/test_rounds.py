"What a method, an evaluation or a callback does between the lines of a round is seen by the run, or refused in one line"

import itertools
import random
from collections import Counter as Counts, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedrepro.checks.harness import tiny
from fedrepro.core import torch_state
from fedrepro.core.errors import InputError
from fedrepro.core.trees import same_bits
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.engine import rounds
from fedrepro.engine.checkpoints import load_snapshot, save_snapshot
from fedrepro.engine.evaluation import eval_models, evaluate
from fedrepro.engine.forks import ActiveRun, run_forked
from fedrepro.engine.method import FedAvg
from fedrepro.engine.method_memory import without_cached
from fedrepro.engine.rounds import AfterRound, run, sequential
from fedrepro.engine.rows import RESERVED
from fedrepro.executors.executors import Stacked
from fedrepro.experiments.jobs import try_round
from fedrepro.models.net import Net, Network
from toy import one_line

LOCAL = dict(lr=0.05, epochs=1, batch_size=0)


def method(**hooks):
    "FedAvg with these hooks in place of its own"
    return type("Own", (FedAvg,), hooks, listed=False)(**LOCAL)


def ran(method, rounds=2, **more):
    return run(method, replace(tiny()), rounds, **more)  # a federation whose model is its own


# --- what is kept between rounds


def models_in_checkpoint(method, folder):
    "(models in the file of a run of six rounds with half of the clients, different last broadcasts)"
    federation = replace(tiny(), participation=0.5)
    at = run(method, federation, 6).snapshot
    save_snapshot(folder / "kept", at)
    kept = load_file(folder / "kept.safetensors")
    head = at.server["params"]["head.weight"]
    back = load_snapshot(folder / "kept", federation)
    assert same_bits(eval_models(method, federation, back), eval_models(method, federation, at))
    return sum(t.shape == head.shape for t in kept.values()), len({*map(id, at.last_broadcasts)})


def test_a_checkpoint_holds_no_old_model_that_nobody_reads(tmp_path):
    "FedAvg's newest model stands for all; a personal method, and one that may fine-tune, keep what a client received last"
    assert models_in_checkpoint(FedAvg(**LOCAL), tmp_path) == (1, 1)
    own = method(local_phases=lambda self, client: [self.phase(client)])
    for keeping in (method(personal=True), own):
        models, different = models_in_checkpoint(keeping, tmp_path)
        assert models == different > 1


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


# --- writes that PyTorch does not count


def updates_what_it_received(self, client, params, results):
    for n, t in client.received["params"].items():
        t.data.copy_(0.5 * t + 0.5 * params[n])  # "the local copy"
    return {"params": dict(client.received["params"])}, client.state


def counts_in_numpy(self, client, params, results):
    client.state["seen"].numpy()[...] += 1
    return {"params": params}, client.state


def counts_in_an_array(self, client, params, results):
    client.state["counts"][700] = 1  # as it prints, the middle is left out
    return {"params": params}, client.state


def moves_the_initial_model(self, client, params, results):
    if client.round:  # in round 1 it is what was received
        client.initial["head.bias"].data.add_(1)
    return {"params": params}, client.state


def reorders_its_samples(self, client, params, results):
    client.indices.copy_(client.indices.flip(0))
    return {"params": params}, client.state


def darkens_the_pictures(self, client, params, results):
    client.data.train_x[client.indices] = 0
    return {"params": params}, client.state


def darkens_one_picture(self, client, params, results):
    client.data.train_x.numpy()[client.indices[0]] = 0
    return {"params": params}, client.state


def scales_in_its_loss(self, client, params, batch):
    client.received["params"]["head.bias"].data.mul_(0.9)
    return FedAvg.loss(self, client, params, batch)


def steps_on_the_server(self, server, exchange):
    for n, t in usual(server, exchange)["params"].items():
        server["params"][n].data.copy_(t)
    return dict(server)


def adds_to_an_upload(self, server, exchange):
    exchange.uploads[0]["params"]["head.bias"].numpy()[0] += 1
    return usual(server, exchange)


def remembers(self, federation, k):
    return {"seen": torch.zeros(2), "counts": np.full(2000, np.nan)}


UNCOUNTED = {  # hooks, and the line without its end
    "received": (
        dict(client_result=updates_what_it_received),
        "client 0, round 1: Own.client_result changed client.received in place (params, body.fc1.weight)",
    ),
    "state": (
        dict(init_client=remembers, client_result=counts_in_numpy),
        "client 0, round 1: Own.client_result changed client.state in place (seen)",
    ),
    "an array": (
        dict(init_client=remembers, client_result=counts_in_an_array),
        "client 0, round 1: Own.client_result changed client.state in place (counts)",
    ),
    "initial": (
        dict(client_result=moves_the_initial_model),
        "round 2: Own.client_result changed client.initial in place (head.bias)",
    ),
    "indices": (
        dict(client_result=reorders_its_samples),
        "client 0, round 1: Own.client_result changed client.indices in place;",
    ),
    "data": (
        dict(client_result=darkens_the_pictures),
        "client 0, round 1: Own.client_result changed client.data in place (train_x)",
    ),
    "data, one sample": (
        dict(client_result=darkens_one_picture),
        "client 0, round 1: Own.client_result changed client.data, its own samples, in place",
    ),
    "a loss": (
        dict(loss=scales_in_its_loss),
        "client 0, round 1: Own, phase local, changed client.received in place (params, head.bias)",
    ),
    "server": (
        dict(aggregate=steps_on_the_server),
        "round 1: Own.aggregate changed the server's state in place (params, body.fc1.weight)",
    ),
    "an upload": (
        dict(aggregate=adds_to_an_upload),
        "round 1: Own's server changed what was sent in place (0, 0, params, head.bias)",
    ),
}


@pytest.mark.parametrize("executor", [sequential, Stacked()])
@pytest.mark.parametrize("what", UNCOUNTED)
def test_a_write_that_pytorch_does_not_count_is_refused(what, executor):
    hooks, line = UNCOUNTED[what]
    with one_line(line):
        run(method(**hooks), own_copy(), 2, executor=executor)


def test_what_is_not_written_into_stays_as_it_is():
    "NaN is equal to NaN, and an array, an object and tensors of all kinds may be in a state"

    def init_client(self, federation, k):
        odd = torch.zeros(()).expand(1), torch.zeros(0), torch.tensor(1 + 1j).conj()
        return remembers(self, federation, k) | {
            "odd": odd,
            "free": {1, 2},
            "rng": random.Random(0),
        }

    own = ran(method(init_client=init_client)).snapshot.server
    assert same_bits(own, ran(FedAvg(**LOCAL)).snapshot.server)


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


def scales_a_state(method, federation, snapshot):
    snapshot.states[2]["seen"].mul_(0.5)


def scales_a_state_uncounted(method, federation, snapshot):
    snapshot.states[2]["seen"].numpy()[0] = 7


def replaces_a_state(method, federation, snapshot):
    snapshot.states[2] = {"seen": torch.ones(2)}


def scales_a_broadcast(method, federation, snapshot):
    snapshot.last_broadcasts[0]["more"].data.mul_(0.5)


def darkens(method, federation, snapshot):
    federation.data.train_x.sub_(1)


def darkens_uncounted(method, federation, snapshot):
    federation.data.test_x.numpy()[0] = 0


def reorders(method, federation, snapshot):
    federation.indices[1].copy_(federation.indices[1].flip(0))


def moves_the_start(method, federation, snapshot):
    federation.initial["head.bias"].data.add_(1)


OUTSIDE = {
    scales_a_state: "the clients' states in place (2, seen)",
    scales_a_state_uncounted: "the clients' states in place (2, seen)",
    replaces_a_state: "the clients' states in place (2, seen)",
    scales_a_broadcast: "the clients' last broadcasts in place (0, more)",
    darkens: "the federation's data in place (train_x)",
    darkens_uncounted: "the federation's data in place (test_x)",
    reorders: "the federation's indices in place (0, 1)",
    moves_the_start: "the federation's initial model in place (head.bias)",
}


def own_copy():
    "A federation whose model, samples and indices are its own"
    federation = tiny()
    data = replace(federation.data, **{n: t.clone() for n, t in federation.data.tensors.items()})
    rows = [part.copy() for part in federation.partition.train]
    return replace(federation, data=data, partition=replace(federation.partition, train=rows))


@pytest.mark.parametrize("writes", OUTSIDE)
def test_an_evaluation_or_a_callback_that_writes_into_anything_is_refused(writes):
    federation = own_copy()
    own = method(
        init_client=remembers,
        broadcast=lambda self, server: {"params": server["params"], "more": torch.ones(1)},
    )

    def evaluate(method, federation, snapshot, final):
        writes(method, federation, snapshot)
        return {}

    def after_round(state):
        writes(own, federation, state.snapshot)

    with one_line(f"round 1: evaluate changed {OUTSIDE[writes]}"):
        run(own, federation, 2, evaluate)
    federation = own_copy()
    callback = SimpleNamespace(after_round=after_round)
    with one_line(f"round 1: callback SimpleNamespace changed {OUTSIDE[writes]}"):
        run(own, federation, 2, callbacks=[callback])
    federation = own_copy()
    looks = AfterRound(lambda snapshot: writes(own, federation, snapshot))
    with one_line(f"round 1: callback AfterRound changed {OUTSIDE[writes]}"):
        run(own, federation, 2, callbacks=[looks])


def test_a_server_that_writes_into_the_data_is_refused():
    def select_clients(self, server, federation, t):
        federation.data.train_y.numpy()[:2] = 0
        return federation.cohort(t)

    with one_line("round 1: Own changed the federation's data in place (train_y)"):
        run(method(select_clients=select_clients), own_copy(), 1)


def test_a_method_s_hook_that_writes_in_an_evaluation_is_refused():
    def eval_params(self, message, state):
        state["seen"].data.add_(1)
        return message["params"]

    own = method(init_client=remembers, eval_params=eval_params)
    with one_line(
        "round 1: Own, in the evaluation, changed the clients' states in place (0, seen)"
    ):
        ran(own, evaluate=evaluate)


def test_data_of_any_size_are_compared_after_the_first_and_the_last_round(monkeypatch):
    monkeypatch.setattr(rounds, "CONTENTS_LIMIT", 0)

    def evaluate(method, federation, snapshot, final):
        if final:
            federation.data.test_x.numpy()[0] = 0
        return {}

    with one_line("round 2: a hook, the evaluation or a callback changed", "in place (test_x)"):
        run(FedAvg(**LOCAL), own_copy(), 2, evaluate)

    def look(snapshot):
        if snapshot.round == 2:
            federation.data.train_x.numpy()[0] = 0

    federation = own_copy()
    with one_line("round 2: a hook, the evaluation or a callback changed", "in place (train_x)"):
        run(FedAvg(**LOCAL), federation, 2, callbacks=[AfterRound(look)])


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


class Counter:
    "An object of one's own"

    seen = 0

    def __init__(self):
        self.n = 0
        self.look = lambda n: n  # functions count by which they are

    @cached_property
    def half(self):
        return 0.5


def with_objects(self, federation):
    self.twister = random.Random(0)
    self.queue = deque([0.0])
    self.ids = itertools.count()
    self.layer = torch.nn.Linear(1, 1)
    self.optimiser = torch.optim.SGD(self.layer.parameters(), 1.0)
    self.decay = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda t: 0.5**t)
    self.counter = Counter()
    self.federation = federation
    return {"params": federation.initial}


def steps_the_decay(self):
    self.optimiser.step()
    self.decay.step()


OBJECTS = {
    "twister": lambda self: self.twister.random(),
    "queue": lambda self: self.queue.append(1.0),
    "ids": lambda self: next(self.ids),
    "layer": lambda self: self.layer.weight.data.add_(1),
    "optimiser": lambda self: self.optimiser.param_groups[0].update(lr=0.5),
    "counter": lambda self: vars(self.counter).update(n=1),
    "decay": steps_the_decay,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_a_method_changes_is_memory_too(name):
    def aggregate(self, server, exchange):
        OBJECTS[name](self)
        return usual(server, exchange)

    name = "optimiser" if name == "decay" else name  # the first that changes
    with one_line(f"round 1: Own.{name} has changed", "expected it in the server's or a client's"):
        ran(method(init_server=with_objects, aggregate=aggregate))


def test_an_object_that_does_not_change_may_be_on_a_method():
    def aggregate(self, server, exchange):
        assert self.counter.half
        assert self.federation.indices
        assert self.layer.eval()
        return usual(server, exchange)

    own = ran(method(init_server=with_objects, aggregate=aggregate)).snapshot.server
    assert same_bits(own, ran(FedAvg(**LOCAL)).snapshot.server)


REMEMBERED: dict = {}
SEEN = torch.zeros(10)
TOTAL = 0
DRAWS = np.random.default_rng(0)
COUNTER = Counter()
LAYER = torch.nn.Linear(1, 1)
DECAY = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(LAYER.parameters(), 1.0), 1)
CYCLE = itertools.cycle([0.1, 0.01])
RATES = (rate for rate in (0.1, 0.05, 0.01))
TABLE = pd.DataFrame({"loss": [0.0] * 10})
COINS = torch.distributions.Categorical(torch.ones(2))
LOGGED: list = []  # by a callback


def in_a_dict(self, client, params, results):
    REMEMBERED[client.id] = params
    return {"params": params}, client.state


def in_a_tensor(self, client, params, results):
    SEEN.numpy()[client.id] += 1
    return {"params": params}, client.state


def in_a_number(self, client, params, results):
    def count():
        global TOTAL
        TOTAL += 1

    count()
    return {"params": params}, client.state


def by_another_function(self, client, params, results):
    draw()
    return {"params": params}, client.state


def draw():
    return DRAWS.random()


def in_an_object(self, client, params, results):
    COUNTER.n += 1
    return {"params": params}, client.state


def in_a_class(self, client, params, results):
    Counter.seen += 1
    return {"params": params}, client.state


def in_a_default(self, client, params, results, memory=[]):  # noqa: B006
    memory.append(client.id)
    return {"params": params}, client.state


def in_its_class(self, client, params, results):
    type(self).memory[client.id] = 1
    return {"params": params}, client.state


def in_a_new_one(self, client, params, results):
    type(self).last = client.id
    return {"params": params}, client.state


def in_a_module(self, client, params, results):
    LAYER.weight.data.add_(1)
    return {"params": params}, client.state


def in_a_schedule(self, client, params, results):
    DECAY.optimizer.step()
    DECAY.step()
    return {"params": params}, client.state


def in_a_cycle(self, client, params, results):
    next(CYCLE)
    return {"params": params}, client.state


def in_an_iterator(self, client, params, results):
    next(RATES)
    return {"params": params}, client.state


def in_a_table(self, client, params, results):
    TABLE.loc[0, "loss"] += 1
    return {"params": params}, client.state


def in_a_function(self, client, params, results):
    draw.calls = getattr(draw, "calls", 0) + 1
    return {"params": params}, client.state


ELSEWHERE = {
    "a module": (in_a_module, "Own's global test_rounds.LAYER"),
    "a schedule": (in_a_schedule, "Own's global test_rounds.DECAY"),
    "a cycle": (in_a_cycle, "Own's global test_rounds.CYCLE"),
    "an iterator": (in_an_iterator, "Own's global test_rounds.RATES"),
    "a table": (in_a_table, "Own's global test_rounds.TABLE"),
    "a function": (in_a_function, "an attribute of draw"),
    "a dict": (in_a_dict, "Own's global test_rounds.REMEMBERED"),
    "a tensor": (in_a_tensor, "Own's global test_rounds.SEEN"),
    "a number": (in_a_number, "Own's global test_rounds.TOTAL"),
    "a generator": (by_another_function, "Own's global test_rounds.DRAWS"),
    "an object": (in_an_object, "Own's global test_rounds.COUNTER"),
    "another class": (in_a_class, "Counter.seen (of the class)"),
    "a default": (in_a_default, "a default value of in_a_default"),
    "its class": (in_its_class, "Own.memory (of the class)"),
    "a new one": (in_a_new_one, "Own.last (of the class)"),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_memory_outside_of_a_method_s_object_is_refused(what):
    "Worker processes would not share it, and the next run would begin with it"
    hook, name = ELSEWHERE[what]
    with one_line(f"round 1: {name} has changed", "expected it in the server's or a client's"):
        ran(method(client_result=hook, memory={}))


def test_an_object_of_a_library_that_is_only_read_may_be_a_global():
    "Reading may rearrange a table, or compute what an object keeps"

    def reads(self, server, exchange):
        assert TABLE.mean().sum() >= 0
        assert TABLE.to_numpy().size
        assert COINS.logits.shape == (2,)
        assert LAYER.eval()(torch.ones(1)).shape == (1,)
        assert DECAY.get_last_lr()
        return usual(server, exchange)

    TABLE["round"] = 1.0  # in a block of its own until somebody reads
    ran(method(aggregate=reads))


def test_a_callback_may_write_into_a_global():
    def after_round(state):
        LOGGED.append(state.snapshot.round)

    def looks(self, server, exchange):
        assert len(LOGGED) == exchange.round
        return usual(server, exchange)

    LOGGED.clear()
    ran(method(aggregate=looks), callbacks=[SimpleNamespace(after_round=after_round)])
    assert LOGGED == [1, 2]


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


class Cached(FedAvg, listed=False):
    @cached_property
    def losses(self):
        return {}

    @cached_property
    def rng(self):
        return np.random.default_rng(0)


def fills_what_is_cached(self, client, params, results):
    self.losses[client.id] = 1.0
    return {"params": params}, client.state


def draws_from_what_is_cached(self, client, params, results):
    self.rng.random()
    return {"params": params}, client.state


@pytest.mark.parametrize(
    "name, hook", [("losses", fills_what_is_cached), ("rng", draws_from_what_is_cached)]
)
def test_a_cached_property_is_no_store(name, hook):
    cls = type("Own", (Cached,), {"client_result": hook}, listed=False)
    with one_line(f"round 1: Own.{name} has changed", "a client's state", "client.rng"):
        ran(cls(**LOCAL))


def test_a_worker_gets_a_method_without_what_it_has_cached():
    method = Cached(**LOCAL)
    assert without_cached(method) is method
    method.losses[0] = 1.0
    bare = without_cached(method)
    assert bare.losses == {}
    assert method.losses == {0: 1.0}


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


class Seen(NamedTuple):
    rounds: int
    best: float


class Keeps(FedAvg, listed=False):
    "Keeps objects of several kinds"

    def init_client(self, federation, k):
        return {"seen": Seen(0, 0.0), "count": Counts("aab"), "lists": defaultdict(list)}

    def client_result(self, client, params, results):
        state = client.state
        seen = Seen(state["seen"].rounds + 1, state["seen"].best)
        lists = state["lists"]
        assert lists.default_factory is list
        return {"params": params}, {"seen": seen, "count": state["count"], "lists": lists}


def test_a_state_keeps_the_kinds_of_its_parts():
    ended = run(Keeps(**LOCAL), tiny(), 2).snapshot
    known = [state for state in ended.states if state["seen"].rounds]
    assert known
    assert all(state["count"] == Counts("aab") for state in known)


class Mean(FedAvg, listed=False):
    "Keeps a number of NumPy's"

    def aggregate(self, server, exchange):
        return super().aggregate(server, exchange) | {"mean": np.mean(exchange.sizes)}


def test_a_number_of_numpy_is_kept(tmp_path):
    federation = tiny()
    ended = run(Mean(**LOCAL), federation, 1).snapshot
    save_snapshot(str(tmp_path / "kept"), ended)
    again = load_snapshot(str(tmp_path / "kept"), federation)
    assert type(again.server["mean"]) is np.float64
    assert again.server["mean"] == ended.server["mean"]


def test_a_state_that_cannot_be_kept_is_refused_before_a_run():
    try_round(Mean(**LOCAL), tiny())
    with pytest.raises(InputError, match="Keeps: of its state a checkpoint: a Seen cannot be kept"):
        try_round(Keeps(**LOCAL), tiny())


class Halves:
    "A callback that would go on with half of the server's model"

    def after_round(self, state):
        server = state.snapshot.server
        half = {n: t / 2 for n, t in server["params"].items()}
        state.snapshot = replace(state.snapshot, server=server | {"params": half})


def test_a_snapshot_that_a_callback_replaces_is_refused():
    "The run would go on from its own"
    with one_line("round 1: callback Halves replaced state.snapshot", "method's aggregate"):
        ran(FedAvg(**LOCAL), callbacks=[Halves()])


def test_a_start_of_another_type_is_refused():
    federation = tiny()
    start = run(FedAvg(**LOCAL), federation, 1).snapshot
    single = replace(federation, dtype=torch.float32)
    with one_line("run: start: params: ", "has the type torch.float64, expected torch.float32"):
        run(FedAvg(**LOCAL), single, 2, start=start)


def test_two_runs_in_two_threads_are_refused():
    "Each would take the other's random numbers; within a run, another one may be run"
    federation = tiny()
    inside = []

    class RunsOthers:
        def after_round(self, state):
            inside.append(run(FedAvg(**LOCAL), tiny(), 1).snapshot.server)
            with ThreadPoolExecutor(1) as pool, one_line("run: another thread of this process"):
                pool.submit(run, FedAvg(**LOCAL), tiny(), 1).result()

    end = run(FedAvg(**LOCAL), federation, 2, callbacks=[RunsOthers()]).snapshot
    alone = [run(FedAvg(**LOCAL), federation, rounds).snapshot.server for rounds in (1, 2)]
    assert same_bits([*inside, end.server], [alone[0], alone[0], alone[1]])


def test_a_federation_that_another_thread_makes_changes_no_run():
    "It waits until the run's random numbers are drawn"
    net = Net(
        "drops", lambda: Network(nn.Sequential(nn.Flatten(), nn.Dropout()), nn.Linear(64, 10))
    )
    federation = replace(tiny(), net=net)
    alone = run(FedAvg(**LOCAL), federation, 3).snapshot.server
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, FedAvg(**LOCAL), federation, 3)
        while not running.done():
            replace(federation, seed=5).initial
    assert same_bits([running.result().snapshot.server], [alone])


def test_a_thread_that_waits_for_another_says_so(monkeypatch):
    monkeypatch.setattr(torch_state, "SEEDING_PATIENCE", 0.01)
    with torch_state.global_seed(0), torch_state.global_seed(1), ThreadPoolExecutor(1) as pool:
        with one_line("random numbers: another thread of this process"):
            pool.submit(lambda: replace(tiny(), seed=3).initial).result()


def test_inference_mode():
    "Refused where a federation is made; whoever asks for its first model may be in it"
    federation = replace(tiny())
    with torch.inference_mode():
        with one_line("Federation: its caller has torch's inference mode on"):
            replace(federation, seed=4)
        first = federation.initial
    assert not any(t.is_inference() for t in first.values())
