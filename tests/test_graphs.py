"Steps with fixed memory: every method's are played, nothing of an earlier phase, client or round stays behind"

import warnings
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, OPS, masked, tiny
from fedrepro.core.trees import tensors
from fedrepro.data import partition
from fedrepro.engine.client import sgd_step
from fedrepro.engine.federation import Federation
from fedrepro.engine.lockstep import ActiveRun, run_lockstep
from fedrepro.engine.method import METHODS, FedAvg, load_methods
from fedrepro.engine.rounds import run, sequential
from fedrepro.executors import kernels
from fedrepro.executors.graphs import Graphs, RecordedPhase, StackedGraphs, slots_for
from fedrepro.executors.kernels import choose_kernel, layers_of, seconds, stack_net, with_products
from fedrepro.executors.stacks import Stacked
from fedrepro.experiments.jobs import make_jobs
from fedrepro.experiments.specs import load_spec
from fedrepro.models import networks
from toy import OURS, few

TOY = few((40, 25, 1, 33, 18))
FEW = dict(lr=0.05, epochs=3, batch_size=8)
PLAYERS = {"graphs": lambda: Graphs(2), "stacked-graphs": StackedGraphs}
TO_THE_LOOP = {
    "Flash"
}  # a client stops early by what it measures: phases with a `monitor` are left to the loop


def ends(executor, method=None, federation=TOY, rounds=3):
    return run(method or FedAvg(**FEW), federation, rounds, executor=executor).snapshot


def gap(a, b):
    return max(
        float((x - y).abs().max())
        for x, y in zip(tensors([a.server, a.states]), tensors([b.server, b.states]))
    )


def stages(player):
    slots = player.slots if isinstance(player, Graphs) else [player.slot]
    return [stage for slot in slots for stage in slot.stages.values()]


class NothingFromTheHost(TorchDispatchMode):
    "Refuses what a GPU cannot record: numbers brought to the host or from it, and shapes that depend on numbers"

    MORE = {
        "is_nonzero",
        "bincount",
        "repeat_interleave",
        "lift_fresh",
        "lift_fresh_copy",
    }  # the last two: a constant made on the host

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name in {*OPS, *self.MORE} or masked(name, args):
            raise AssertionError(f"{name} cannot be recorded")
        return op(*args, **(kwargs or {}))


def test_what_cannot_be_recorded_is_seen():
    x, mode = torch.randn(4), NothingFromTheHost()
    for wrong in (
        lambda: float(x.sum()),
        lambda: x[x > 0],
        lambda: bool((x > 0).any()),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: x.nonzero(),
        lambda: x.masked_select(x > 0),
        lambda: torch.as_tensor(np.ones(3)),
        lambda: x.unique(),
        lambda: x.masked_fill_(torch.tensor(True), 1.0),
        lambda: torch.vmap(lambda t: t * torch.tensor(2.0))(x),
    ):
        with pytest.raises(AssertionError, match="cannot be recorded"), mode:
            wrong()
    with mode:
        torch.where(x > 0, x, -1.0).mul_(2)[torch.arange(2)].sum()


@pytest.mark.parametrize("how", PLAYERS)
@pytest.mark.parametrize("name", sorted(set(OURS) - TO_THE_LOOP))
def test_every_method_is_recorded(name, how):
    "No method's code keeps its steps from being recorded, by what it remembers or by what it asks of the device; most steps are played"
    method = METHODS[name](**LOCAL | METHODS[name].check_settings | {"epochs": 3})
    federation = suited(METHODS[name], tiny())
    played, computed = [], []

    class Counted(RecordedPhase):
        def played(self, n, b):
            played.append((n, b))
            return super().played(n, b)

        def body(self, n, b):
            computed.append((n, b))
            with nullcontext() if (n, b) not in self.met else NothingFromTheHost():
                return super().body(n, b)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr("fedrepro.executors.graphs.RecordedPhase", Counted)
        patch.setattr(
            "torch.nn.functional.one_hot", lambda y, n: (y[..., None] == torch.arange(n)).long()
        )  # torch's looks at `y`, but not on a GPU
        warnings.simplefilter("error")
        player = PLAYERS[how]()
        found = run(method, federation, 2, executor=player).snapshot
    assert gap(found, run(method, federation, 2).snapshot) < 1e-10
    assert len(played) > len(computed) / 2  # which on a CPU has those that are played


@pytest.mark.parametrize("how", PLAYERS)
def test_what_stays_at_its_place_is_set_anew(how):
    "Momentum, losses and rates of one phase do not reach the next"
    method = FedAvg(**FEW, momentum=0.9, lr_decay=0.7)
    player = PLAYERS[how]()
    assert gap(ends(player, method), ends(sequential, method)) < 1e-12
    again = ends(player, method)  # from round 0, with recordings of another run
    assert gap(again, ends(sequential, method)) < 1e-12
    assert len({stage.phase.name for stage in stages(player)}) == 1 and all(
        not stage.failed for stage in stages(player)
    )


def test_a_round_that_is_asked_for_ends_its_recordings():
    class Rising(FedAvg):
        def loss(self, client, params, batch):
            return super().loss(client, params, batch) * (1 + client.round)

    for make in PLAYERS.values():
        player = make()
        assert gap(ends(player, Rising(**FEW)), ends(sequential, Rising(**FEW))) < 1e-12
        assert all(stage.asked for stage in stages(player))


class Counts(FedAvg, listed=False):
    "A rate that falls with the steps: the memory is a number"

    def local_phases(self, client):
        return [self.phase(client, step=self.step)]

    def step(self, step):
        count = 1 if step.memory is None else step.memory + 1
        loss, grads = step.grad()
        sgd_step(
            step.moving,
            grads,
            None,
            replace(step.phase.sgd, lr=step.phase.sgd.lr / count, momentum=0.0),
        )
        return loss, count


def test_a_memory_that_is_no_tensors_is_carried_and_nothing_is_recorded():
    assert gap(ends(Stacked(), Counts(**FEW)), ends(sequential, Counts(**FEW))) < 1e-12
    for make in PLAYERS.values():
        with pytest.warns(
            UserWarning,
            match="phase local: its steps are not recorded: its memory is not always the same tensors",
        ):
            found = ends(make(), Counts(**FEW))
        assert gap(found, ends(sequential, Counts(**FEW))) < 1e-12


def test_a_step_that_cannot_be_recorded_is_computed(monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("fedrepro.executors.graphs.Recording", refuse)
    with pytest.warns(
        UserWarning, match="not recorded: operation not permitted when stream is capturing$"
    ):
        found = ends(Graphs(1))
    assert gap(found, ends(sequential)) < 1e-12


def test_only_fixed_memory_is_read_when_a_step_is_played(monkeypatch):
    "As on a GPU: whatever a recorded step reads must be where it was when it was recorded"
    seen = []

    def body(self, n, b, usual=RecordedPhase.body):
        now = tuple(
            t.data_ptr()
            for t in [
                *self.own.values(),
                *(self.memory or []),
                self.total,
                *(t for t in self.batch if t is not None),
                *(t for t in self.actor.leaves if isinstance(t, torch.Tensor)),
            ]
        )
        if not self.first:
            seen.append((id(self), now))
        return usual(self, n, b)

    monkeypatch.setattr(RecordedPhase, "body", body)
    player = StackedGraphs()
    ends(player, load_methods()["SCAFFOLD"](**FEW))
    for stage in stages(player):
        assert len({now for key, now in seen if key == id(stage)}) <= 1
    assert len(seen) > 10


def test_networks_with_batch_normalisation_keep_their_statistics():
    net = networks.network("resnet18_cifar_plain", 10, (1, 8, 8))
    federation = Federation(
        TOY.data,
        net,
        partition.Partition([rows[:12] for rows in TOY.partition.train[:2]], None),
        dtype=torch.float64,
    )
    method = FedAvg(lr=0.01, epochs=1, batch_size=4)
    assert slots_for(net) == 1 and slots_for(TOY.net) == 8
    loop, played = (ends(e, method, federation, 1) for e in (sequential, Graphs()))
    assert gap(loop, played) < 1e-10 and any("running_var" in n for n in loop.server["params"])


RECORDED = {
    ("FedProx", "mu"),
    ("FedCCFA", "gamma"),
    ("FedDyn", "alpha"),
    ("MOON", "mu"),
    ("FedGKD", "weight"),
}


@pytest.mark.parametrize("name", sorted(set(OURS) - {"Union"}))
def test_any_number_of_any_method_may_be_a_grid(name):
    "Two values of each field that is a number and not a whole one, side by side: each run is what it is alone, some recorded too"
    usual = METHODS[name](**LOCAL | METHODS[name].check_settings)
    federation = suited(METHODS[name], tiny())
    for knob in [f.name for f in fields(usual) if type(getattr(usual, f.name)) is float]:
        methods = [usual, replace(usual, **{knob: 0.75 * getattr(usual, knob)})]
        alone = [run(m, federation, 2).snapshot for m in methods]
        for executor in (Stacked(), StackedGraphs())[: 1 + ((name, knob) in RECORDED)]:
            found = run_lockstep([ActiveRun(m, federation, 2) for m in methods], executor)
            assert max(gap(h.snapshot, one) for one, h in zip(alone, found)) < 1e-10, (
                knob,
                executor,
            )


@pytest.mark.parametrize(
    "use",
    [lambda loss, knob: loss * 2 if knob > 1 else loss, lambda loss, knob: loss * float(knob)],
    ids=["if", "float"],
)
def test_a_field_that_is_not_declared_stackable_keeps_its_runs_apart(use):
    class Decides(FedAvg):
        knob: float = 0.0

        def loss(self, client, params, batch):
            return use(super().loss(client, params, batch), self.knob)

    def make(knob):
        m = Decides(**FEW)
        m.knob = knob
        return m

    methods, executor, sizes = [make(0.5), make(2.0)], Stacked(), []
    plain = executor.train
    executor.train = lambda clients, *more: sizes.append(len(clients)) or plain(clients, *more)
    found = run_lockstep([ActiveRun(m, TOY, 2) for m in methods], executor)
    assert sizes == [5, 5, 5, 5]
    for m, history in zip(methods, found):
        assert gap(history.snapshot, run(m, TOY, 2).snapshot) < 1e-12


# --- the convolutions of a stack


@pytest.fixture
def kept(monkeypatch, tmp_path):
    "No choice known, and none kept but here"
    monkeypatch.setattr(kernels, "_asked", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedrepro" / "convolutions"


@pytest.mark.parametrize("name", ["fedccfa_cifar", "fedbss_cnn", "digits_cnn", "feddc_resnet18"])
def test_products_are_convolutions(name):
    "Every convolution of a network by products, in a stack of two models: outputs and gradients"
    shape = {"fedbss_cnn": (1, 28, 28), "digits_cnn": (1, 8, 8), "feddc_resnet18": (3, 8, 8)}.get(
        name, (3, 32, 32)
    )
    net = networks.network(name, 10, shape)
    found = layers_of(net, shape)
    assert {f"{n}.weight" for n in found} == {
        n for n, p in net.module.named_parameters() if p.dim() == 4
    }
    trees = [net.init(s, torch.float64) for s in (0, 1)]
    both = {n: torch.stack([w[n] for w in trees]).requires_grad_() for n in trees[0]}
    x, w = (
        torch.randn(2, 1, *shape, dtype=torch.float64),
        torch.randn(2, 1, 10, dtype=torch.float64),
    )
    outs = [torch.vmap(n)(both, x) for n in (net.plain, with_products(net, tuple(found)))]
    grads = [torch.autograd.grad((out * w).sum(), list(both.values())) for out in outs]
    assert torch.allclose(*outs, atol=1e-10) and all(
        torch.allclose(a, b, atol=1e-9) for a, b in zip(*grads)
    )
    assert (
        with_products(net, tuple(found)) is with_products(net, tuple(found))
        and with_products(net, ()) is net.plain
    )


def test_the_faster_way_is_chosen_once_and_kept(kept):
    layer, asked = torch.nn.Conv2d(3, 4, 5), []

    def timer(layer, shape, way, clients, *_):
        asked.append((way, clients))
        return {"grouped": 2.0, "product": 1.0}[way]

    def choice(clients, timer=timer):
        return choose_kernel(
            layer, (3, 8, 8), clients, 16, torch.float32, torch.device("cpu"), timer
        )

    assert choice(20) == "product" and asked == [("grouped", 32), ("product", 32)]
    assert choice(17) == "product" and len(asked) == 2  # both are thirty-two
    assert choice(16) == "product" and len(asked) == 4
    kernels._asked.clear()  # another process
    assert choice(20, None) == "product" and len(list(kept.iterdir())) == 2


def test_a_way_that_needs_too_much_memory_is_not_chosen(kept):
    def timer(layer, shape, way, *_):
        if way == "product":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    assert (
        choose_kernel(
            torch.nn.Conv2d(1, 2, 3), (1, 8, 8), 5, 4, torch.float32, torch.device("cpu"), timer
        )
        == "grouped"
    )


def test_trials_take_time_and_a_cpu_has_no_choice(kept):
    layer, shape = layers_of(TOY.net, (1, 8, 8))["body.conv1"]
    for way in ("grouped", "product"):
        assert 0 < seconds(layer, shape, way, 2, 4, torch.float32, torch.device("cpu")) < 60
    assert (
        stack_net(TOY.net, (1, 8, 8), 20, 64, torch.float32, torch.device("cpu")) is TOY.net.plain
        and not kept.exists()
    )


def test_a_grid_of_a_figure_is_one_pack():
    "Five weights of the alignment, and with more seeds as many as a job may have"
    runs = load_spec("fedccfa/figure5").runs("smoke", seeds=1)
    assert [len(p) for p in make_jobs(runs)] == [1] * 5 and [
        len(p) for p in make_jobs(runs, stack=True)
    ] == [5]
    assert [len(p) for p in make_jobs(runs, stack=True, most=2)] == [2, 2, 1]
    assert sorted(r.run_id for p in make_jobs(runs, stack=True, most=2) for r in p) == sorted(
        r.run_id for r in runs
    )
