"Runs side by side, states that wait on the host, and executors asked for by name"

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedrepro.checks.harness import tiny_network
from fedrepro.core.errors import InputError
from fedrepro.core.trees import moved, same_bits
from fedrepro.data import concept_drift, datasets
from fedrepro.engine import rounds
from fedrepro.engine.declarations import with_hooks
from fedrepro.engine.evaluation import Evaluator, evaluate
from fedrepro.engine.forks import ActiveRun, run_forked
from fedrepro.engine.method import FedAvg, load_methods
from fedrepro.engine.rounds import park_states, run
from fedrepro.executors.executors import executor, pick_executor
from fedrepro.executors.processes import Processes
from fedrepro.models.net import Net
from toy import few

TOY = few((40, 25, 1, 33, 18))
LOCAL = dict(lr=0.05, epochs=2, batch_size=8)


def drifting(at):
    return replace(TOY, drift=concept_drift.drift("sudden", clients=5, classes=10, at=at))


def same(a, b):
    return a.rows == b.rows and same_bits(
        [a.snapshot.server, a.snapshot.states], [b.snapshot.server, b.snapshot.states]
    )


@pytest.mark.parametrize(
    "name", ["FedAvg", "SCAFFOLD", "FedCCFA", "FedDrift", "Ditto", "Flash", "FedBABU"]
)
def test_forks_have_the_bits_of_runs_alone(name):
    method = load_methods()[name](**LOCAL)
    federations = [TOY, drifting(1), drifting(2), drifting(2)]
    together = run_forked(
        [ActiveRun(method, fed, 3, family="one", evaluate=Evaluator()) for fed in federations]
    )
    assert all(
        same(run(method, fed, 3, evaluate), ours) for fed, ours in zip(federations, together)
    )


def test_states_wait_on_the_host_above_a_limit(monkeypatch):
    asked = []
    monkeypatch.setattr(
        rounds, "moved", lambda message, device: asked.append(str(device)) or moved(message, device)
    )
    states = [{"c": torch.zeros(100)}] * 2  # 400 bytes each, five clients: 2,000
    for limit, device, goes in [(1999, "cuda", True), (2000, "cuda", False), (10, "cpu", False)]:
        asked.clear()
        out = park_states(SimpleNamespace(clients=5, device=device), states, limit)
        assert (asked == ["cpu"]) is goes
        assert same_bits(out, states)


@pytest.mark.parametrize("name", ["FedAvg", "FedCCFA", "FedDrift", "Union"])
def test_processes_serve_every_run_of_a_pack(name):
    "Workers know one federation, but every client brings its own labels, rows and first model"
    method = load_methods()[name](**LOCAL)
    federations = (
        [TOY, replace(TOY, seed=1)] if name == "Union" else [TOY, drifting(1), replace(TOY, seed=1)]
    )
    with Processes(TOY, 2) as pool:
        together = run_forked(
            [
                ActiveRun(method, fed, 3, family=str(fed.seed), evaluate=Evaluator())
                for fed in federations
            ],
            pool,
        )
    assert all(
        same(run(method, fed, 3, evaluate), ours) for fed, ours in zip(federations, together)
    )


def test_what_an_executor_refuses():
    class Mine(FedAvg):
        pass

    Mine.__module__ = "__main__"
    with pytest.raises(InputError, match="processes: needs the device cpu, not cuda"):
        Processes(SimpleNamespace(device="cuda"), 2)
    other = replace(TOY, data=datasets.load("digits", recipe="plain"))
    with Processes(TOY, 1) as pool, pytest.raises(InputError, match="not for other clients"):
        run(FedAvg(**LOCAL), other, 1, executor=pool)
    edited = replace(TOY, net=Net(TOY.net.name, tiny_network))
    with Processes(TOY, 1) as pool, pytest.raises(InputError, match="a network of the same build"):
        run(FedAvg(**LOCAL), edited, 1, executor=pool)
    local = replace(TOY, net=Net("local", lambda: tiny_network()))
    with pytest.raises(InputError, match="the federation cannot be sent to a worker .*<lambda>"):
        Processes(local, 1)
    hooked = with_hooks(FedAvg(**LOCAL), {"extra_metrics": lambda self, server: {}})
    with (
        Processes(TOY, 1) as pool,
        pytest.raises(InputError, match="the method cannot be sent to a wo"),
    ):
        run(hooked, TOY, 1, executor=pool)
    with (
        Processes(TOY, 1) as pool,
        pytest.raises(InputError, match="Mine is defined in a notebook"),
    ):
        run(Mine(**LOCAL), TOY, 1, executor=pool)
    with pytest.raises(
        InputError,
        match="executor 'threads' is unknown; accepted: auto, processes, sequential, stacked",
    ):
        pick_executor("threads", TOY)


def test_an_executor_that_hides_seconds_is_refused_where_they_are_asked_for():
    measures = ("collaboration_seconds",)
    assert pick_executor("auto", TOY, 2, measures) == "sequential"
    assert pick_executor("sequential", TOY, 2, measures) == "sequential"
    for name in ("processes", "stacked"):
        with pytest.raises(InputError, match=f"executor {name}: hides the seconds"):
            pick_executor(name, TOY, 2, measures)
        with executor(name, TOY, 2) as hiding:
            said = f"run: executor {type(hiding).__name__} hides the seconds"
            with pytest.raises(InputError, match=said):
                run(FedAvg(**LOCAL), TOY, 1, executor=hiding, measures=measures)
            assert run(FedAvg(**LOCAL), TOY, 0, executor=hiding).snapshot.round == 0
