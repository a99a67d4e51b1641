"What the functions of `fedrepro` are given is used, or refused in one line before anything is computed"

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedrepro import (
    Federation,
    FedAvg,
    InputError,
    Network,
    architecture,
    check,
    compare,
    drift,
    evaluate,
    executor,
    load,
    load_spec,
    network,
    partition,
    run,
)
from fedrepro.core.trees import same_bits
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.data.partition import Partition
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import AfterRound
from fedrepro.experiments.runner import compute_runs
from fedrepro.reporting import compare as comparison

DIGITS = load("digits")
NET = network("digits_cnn")
SPLIT = partition("iid", DIGITS.train_y, DIGITS.test_y, clients=3)
THREE = Federation(DIGITS, NET, SPLIT)
ONE_EPOCH = FedAvg(epochs=1, batch_size=0)


def lists(*rows):
    return Partition(tuple(rows))


# --- mistakes that people make


def test_a_federation_says_which_part_is_something_else():
    labels = DIGITS.train_y
    parts = dict(data=DIGITS, net=NET, partition=SPLIT)
    mistakes = [
        (dict(net=nn.Linear(64, 10)), "net: expected a Net .*@architecture.* got Linear"),
        (dict(net="digits_cnn"), r"net: expected a Net \(`network\(name\)` gives one"),
        (dict(data="digits"), r"data: expected a Dataset \(`load\(name\)` gives one\), got 'dig"),
        (dict(data=NET, net=DIGITS), "data: expected a Dataset .* got digits_cnn"),
        (dict(partition=[[0, 1], [2]]), r"partition: expected a Partition .*Partition\(lists\)"),
        (dict(partition=lists([0], [1437])), "train samples go up to 1437, but digits has 1437"),
        (dict(drift="sudden"), "drift: expected a DriftSchedule"),
        (dict(drift=drift("sudden", clients=3, classes=8)), "schedule for 8 classes, but .* 10"),
        (dict(drift=DriftSchedule("own", 3, 20)), "schedule for 20 classes, but .* 10"),
        (dict(seed="x"), "seed: expected a whole number of at least 0, got 'x'"),
        (dict(cohorts=2.5), "cohorts: expected a whole number of at least 0, got 2.5"),
        (dict(dtype=torch.float16), "expected torch.float32 or torch.float64, got torch.float16"),
        (dict(labels=labels.numpy()), r"labels: expected a tensor \(1437,\) of whole numbers"),
        (dict(labels=labels[:5]), r"labels: expected a tensor \(1437,\) of whole numbers below 10"),
        (dict(labels=labels + 1), "labels: expected a tensor .* of whole numbers below 10"),
    ]
    for changed, line in mistakes:
        with pytest.raises(InputError, match=line):
            Federation(**(parts | changed))


SAME = np.tile(np.arange(10), (3, 1))


def own_drift(maps):
    "A schedule whose subclass gives these label maps in every round"
    cls = type("Own", (DriftSchedule,), {"label_maps": lambda self, t: maps})
    return cls("own", 3, 10)


def test_a_drift_of_one_s_own_gives_whole_numbers_for_each_client_and_class():
    wrong = [SAME[:2], SAME[:, :9], SAME - 1, SAME + 1, SAME * 1.0, SAME > 0, None, [[0], [1, 2]]]
    for maps in wrong:
        with pytest.raises(InputError, match="round 1: label_maps of drift own returned .*3, 10"):
            run(ONE_EPOCH, replace(THREE, drift=own_drift(maps)), 1)
    plain = run(ONE_EPOCH, THREE, 1).snapshot.server
    for maps in (SAME.tolist(), SAME.astype(np.int8), torch.as_tensor(SAME)):
        own = run(ONE_EPOCH, replace(THREE, drift=own_drift(maps)), 1).snapshot.server
        assert same_bits(own, plain)


def test_pooled_training_asks_for_every_label_map():
    idle = DriftSchedule("idle", 3, 10, [Swap(0, [], (0, 1))])
    twice = DriftSchedule("twice", 3, 10, [Swap(1, [0], (0, 1))] * 2)
    for still in (None, idle, twice):
        assert replace(THREE, drift=still).pooled().clients == 1
    for moving in (own_drift(SAME[:, ::-1]), DriftSchedule("one", 3, 10, [Swap(9, [0], (0, 1))])):
        with pytest.raises(InputError, match="pooled training: clients need equal labels"):
            replace(THREE, drift=moving).pooled()


def test_a_partition_has_positions():
    for rows in ([0.5, 1.2], [True, False], [-1, 0], "ab", [[0, 1]], None, ["0"]):
        with pytest.raises(InputError, match="expected positions of samples, whole numbers from 0"):
            lists([7], rows)
    with pytest.raises(InputError, match="train: 3 is not a list"):
        Partition(3)
    assert lists([1], np.array([2], np.uint8), torch.tensor([3, 0])).train[2].tolist() == [3, 0]


class Deaf:
    def after_round(self):
        pass


def test_a_run_says_what_it_cannot_use_before_the_first_round():
    began = []

    class Seen(FedAvg):
        def init_server(self, federation):
            began.append(federation)
            return super().init_server(federation)

    mistakes = [
        (dict(rounds=2.5), "rounds: expected a whole number of at least 0, got 2.5"),
        (dict(every=0), "every: expected a whole number of at least 1, got 0"),
        (dict(last=-1), "last: expected a whole number of at least 0, got -1"),
        (dict(evaluate=0.5), r"evaluate: expected a function of \(method, .* got 0.5"),
        (dict(evaluate=lambda snapshot: {}), r"evaluate: expected a function of \(method, fed"),
        (dict(callbacks=print), "callbacks: .* is not a list"),
        (dict(callbacks=[print]), r"has no after_round\(state\); AfterRound\(function\) has one"),
        (dict(callbacks=[Deaf()]), r"Deaf.after_round: expected a function \(self, state\)"),
        (
            dict(executor="processes"),
            r"executor: expected the one inside of `with fedrepro.executor\(name",
        ),
        (
            dict(executor=executor("stacked", THREE)),
            "executor: expected the one inside of .*, got <contextlib",
        ),
        (dict(measures=["norm"]), "run: measure 'norm' is unknown; .*accepted: .*update_norm"),
        (dict(start={}), "start: expected a Snapshot"),
        (dict(federation=SPLIT), "federation: expected a Federation .* got iid: 3 clients"),
    ]
    for changed, line in mistakes:
        with pytest.raises(InputError, match=line):
            run(**(dict(method=Seen(epochs=1), federation=THREE, rounds=1) | changed))
    for state, line in [
        (torch.no_grad(), "run: its caller sets torch's grad mode to False, where a run has True"),
        (torch.inference_mode(), "its caller sets torch's grad mode to False"),
        (torch.autocast("cpu", torch.bfloat16), "its caller sets torch's autocast on cpu to True"),
    ]:
        with state, pytest.raises(InputError, match=line):
            run(Seen(epochs=1), THREE, 1)
    assert not began
    for method in (FedAvg, "FedAvg", THREE):
        with pytest.raises(InputError, match=r"run: method: expected a FedAvg \(an object of"):
            run(method, THREE, 1)
    with pytest.raises(InputError, match="round 1: evaluate returned 3.0; expected a dict"):
        run(ONE_EPOCH, THREE, 1, lambda *what: 3.0)


def test_a_run_goes_on_from_a_snapshot_of_its_own_kind():
    history = run(ONE_EPOCH, THREE, 1)
    with pytest.raises(InputError, match="start: expected a Snapshot .* got History"):
        run(ONE_EPOCH, THREE, 2, start=history)
    two = replace(THREE, partition=lists([0, 1], [2]))
    with pytest.raises(InputError, match="start: it is of 3 clients, but the federation has 2"):
        run(ONE_EPOCH, two, 2, start=history.snapshot)
    other = replace(THREE, net=network("feddc_linear", 10, (1, 8, 8)))
    with pytest.raises(InputError, match="'body.conv1.weight' is no part of feddc_linear"):
        run(ONE_EPOCH, other, 2, start=history.snapshot)
    scaffold = load_methods()["SCAFFOLD"](epochs=1, batch_size=0)
    with pytest.raises(InputError, match="start: its server has no 'c'; .* a snapshot of SCAFFOLD"):
        run(scaffold, THREE, 2, start=history.snapshot)
    with pytest.raises(InputError, match="start: it has 1 rounds; expected at most the 0"):
        run(ONE_EPOCH, THREE, 0, start=history.snapshot)
    later = run(ONE_EPOCH, THREE, 2, start=history.snapshot, callbacks=[AfterRound(lambda s: None)])
    whole = run(ONE_EPOCH, THREE, 2)
    assert same_bits(later.snapshot.server, whole.snapshot.server)


def test_a_method_goes_on_with_what_it_keeps_beside_the_network():
    class Counting(FedAvg):
        def init_server(self, federation):
            server = super().init_server(federation)
            return server | {"params": server["params"] | {"rounds": torch.zeros(())}}

        def broadcast(self, server):
            return {"params": {n: t for n, t in server["params"].items() if n != "rounds"}}

        def aggregate(self, server, exchange):
            params = super().aggregate(server, exchange)["params"]
            return server | {"params": params | {"rounds": server["params"]["rounds"] + 1}}

    method = Counting(epochs=1, batch_size=0)
    first = run(method, THREE, 1).snapshot
    again = run(method, THREE, 2, start=first).snapshot.server["params"]
    assert again["rounds"] == 2
    assert same_bits(again, run(method, THREE, 2).snapshot.server["params"])
    with pytest.raises(InputError, match="start: 'rounds' is no part of digits_cnn"):
        run(ONE_EPOCH, THREE, 2, start=first)


def test_a_setting_of_a_method_is_a_number_or_none_or_true_or_false():
    class Choosy(FedAvg):
        __annotations__ = {"stale": bool, "least": int | None}
        stale = True
        least = None

    from dataclasses import dataclass

    Choosy = dataclass(Choosy)
    with pytest.raises(InputError, match="FedAvg clip_norm: expected a number .* got 'x'"):
        FedAvg(clip_norm="x")
    with pytest.raises(InputError, match="Choosy stale: expected True or False, got 'no'"):
        Choosy(stale="no")
    with pytest.raises(InputError, match="Choosy least: expected a whole number .* got 2.5"):
        Choosy(least=2.5)
    assert Choosy(stale=False, least=3).least == 3


def test_a_network_of_one_s_own_has_a_usual_shape():
    with pytest.raises(
        InputError, match=r"as in @architecture\(3, 32, 32\): expected .* got <func"
    ):

        @architecture
        def unregistered(classes, shape):
            return None

    @architecture()
    def shapeless(classes, shape):
        return Network(nn.Flatten(), nn.Linear(64, classes))

    with pytest.raises(InputError, match="network shapeless needs a shape"):
        network("shapeless")
    assert network("shapeless", 10, (1, 8, 8)).classes == 10


def test_a_comparison_takes_names(tmp_path):
    mistakes = [
        ([FedAvg], "method <class .*FedAvg'>: expected its name, like 'FedAvg'"),
        ([FedAvg()], r"method FedAvg\(lr=0.01.*: expected its name, like 'FedAvg'"),
        (FedAvg, "methods: <class .* is not a list"),
        (None, "methods: None is not a list"),
    ]
    for methods, line in mistakes:
        with pytest.raises(InputError, match=line):
            compare(methods, folder=tmp_path)
    with pytest.raises(InputError, match="log: 1 is neither a text KIND:WHERE nor a function"):
        compare(["FedAvg"], log=[1], folder=tmp_path)
    with pytest.raises(InputError, match="data folder: expected a path, got 3"):
        compute_runs([], tmp_path, data=3)
    assert not list(tmp_path.iterdir())


# --- anything at all


class Computed(Exception):
    "What was given would be computed"


def entered(**given):
    "An executor, and out of it again"
    with executor(**given):
        pass


ANYTHING = [
    *(None, -1, 0, 2.5, float("nan"), "x", "", [], {}, [1, 2], ("a",), True, object(), FedAvg),
    *(np.float32(1), torch.tensor(3), "FedAvg", print, np.arange(3)),
]
DOORS = {
    load: dict(name="digits", data=None, recipe=None, device="cpu"),
    network: dict(name="digits_cnn", classes=10, shape=(1, 8, 8)),
    partition: dict(
        recipe="dirichlet-class",
        train_labels=DIGITS.train_y,
        test_labels=DIGITS.test_y,
        clients=3,
        alpha=0.5,
        seed=0,
        classes=None,
    ),
    drift: dict(name="sudden", clients=3, classes=10, at=1, step=10, back=50),
    Federation: dict(
        data=DIGITS,
        net=NET,
        partition=SPLIT,
        drift=None,
        seed=0,
        participation=1.0,
        cohorts=None,
        dtype=torch.float32,
        labels=None,
    ),
    run: dict(
        method=ONE_EPOCH,
        federation=THREE,
        rounds=0,
        evaluate=evaluate,
        every=1,
        callbacks=(),
        start=None,
        last=1,
        measures=(),
    ),
    compare: dict(
        methods=["FedAvg"],
        dataset="digits",
        clients=2,
        alpha=None,
        drift="none",
        rounds=1,
        epochs=1,
        participation=1.0,
        lr=0.03,
        batch_size=16,
        seeds=1,
        metric="generalised_accuracy",
        momentum=None,
        weight_decay=None,
        lr_decay=1.0,
        clip_norm=None,
        name=None,
        drift_round=None,
        partition=None,
        network=None,
        device="cpu",
        workers=1,
        executor="auto",
        log=None,
        folder="out",
    ),
    entered: dict(name="sequential", federation=THREE, workers=1),
    load_spec: dict(spec="fedccfa/table2", root=None),
    FedAvg: dict(
        lr=0.1, momentum=0.9, weight_decay=0.0, epochs=1, batch_size=8, lr_decay=1.0, clip_norm=None
    ),
    check: dict(method=FedAvg, federation=None),
}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_anything_is_taken_or_refused_in_a_line(door, tmp_path, monkeypatch):
    def computed(*runs, **options):
        raise Computed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "compute_runs", computed)
    monkeypatch.setattr("fedrepro.checks.contract.PROMISES", [])
    given = DOORS[door]
    wrong = []
    for name in given:
        for value in ANYTHING:
            try:
                door(**(given | {name: value}))
            except InputError as error:
                assert str(error).splitlines() == [str(error)]
            except Computed:
                pass
            except Exception as error:
                wrong.append(f"{name} = {value!r}: {type(error).__name__}: {error}")
    assert not wrong
