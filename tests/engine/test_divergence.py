"A run that blows up is a recorded outcome with round, client and norm; nothing is clipped unless a spec says so"

import ast
import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch

from fedrepro.checks.contract import suited
from fedrepro.core.trees import same_bits
from fedrepro.data import concept_drift, datasets, partition
from fedrepro.engine import divergence
from fedrepro.engine.client import SGD
from fedrepro.engine.divergence import (
    client_diverged,
    largest_norm,
    norms,
    record,
    refuse_diverged,
    server_diverged,
    stacked_norms,
    surely_finite,
)
from fedrepro.engine.rows import EXPLODED, in_words
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.federation import Federation
from fedrepro.engine.forks import ActiveRun, run_forked
from fedrepro.engine.method import METHODS, FedAvg
from fedrepro.engine.rounds import AfterRound, run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.experiments.runs import build
from fedrepro.experiments.specs import load_spec
from fedrepro.models import networks
from toy import BASE, OURS, ROOT, TOY, written

SHORT = dict(lr=0.05, epochs=1, batch_size=64)
nan = math.nan
inf = math.inf


def federation(clients=4, **more):
    digits = datasets.load("digits")
    cut = partition.partition(
        "dirichlet-class",
        digits.train_y.numpy(),
        digits.test_y.numpy(),
        clients=clients,
        seed=0,
        alpha=0.5,
    )
    return Federation(digits, networks.network("digits_cnn"), cut, **more)


FED = federation()
START = FED.initial


def arranged(name):
    return suited(METHODS[name], FED)


def judged_once(method, federation, at, final):
    return {"generalised_accuracy": 50.0}


# --- the measure


@pytest.mark.parametrize("share, found", [(0.999, False), (1.001, True)])
def test_the_border(share, found):
    model = {"body.w": torch.tensor([1e6 * share], dtype=torch.float64)}
    fine = {"body.w": torch.tensor([1.0])}
    for up, kept in ((model, fine), (fine, model)):
        assert bool(client_diverged(1, [0], [(up, kept, 0)], [0.0], 1e6)) == found
    assert bool(server_diverged(1, model, 1e6)) == found
    assert bool(client_diverged(1, [0], [(fine, fine, 0)], [EXPLODED * share], 1e6)) == found
    assert bool(client_diverged(1, [0], [(fine, fine, 0)], [-EXPLODED * share], 1e6)) == found


def test_a_message_may_lie_in_two_places():
    "A number on the host beside a model on a GPU, for which the device `meta` stands here"
    model = {"body.w": torch.zeros(3, device="meta"), "head.b": torch.zeros(2, device="meta")}
    half = torch.tensor(0.5)
    for message in ({"half": half, **model}, {**model, "half": half}, {**model, "head.c": half}):
        both = norms(message, buffers=["body.w"])
        assert both.shape == (2,) and both.device.type == "meta"
    of_three = stacked_norms([norms({}), norms(model), norms({"half": half})])
    assert of_three.shape == (3, 2) and of_three.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_quick_look_never_passes_what_has_diverged(dtype, monkeypatch):
    "`surely_finite` decides only where the look at each message would find nothing"
    rng = torch.Generator().manual_seed(0)

    def message(size):
        return {
            "body.w": torch.nn.functional.normalize(
                torch.randn(50, generator=rng, dtype=dtype), dim=0
            )
            * size,
            "counts": torch.tensor([9]),
        }

    def seen(given, losses):
        return client_diverged(2, [*range(len(given))], given, losses, 1e6)

    quick = {}
    for size in (0.0, 1.0, 4e5, 6e5, 9.9e5, 1.1e6, 1e30, inf, nan):
        for clients in (1, 5):
            for loss in (0.0, 1.1 * EXPLODED, nan):
                given = [({"params": message(1.0)}, {"own": message(1.0)}, 0)] * (clients - 1) + [
                    ({"params": message(size)}, {"own": message(2.0)}, 0)
                ]
                losses = [1.0] * (clients - 1) + [loss]
                quick[size, clients, loss], found = (
                    surely_finite(given, losses, 1e6),
                    seen(given, losses),
                )
                with monkeypatch.context() as exact:
                    exact.setattr(divergence, "surely_finite", lambda *_: False)
                    assert seen(given, losses) == found
    assert {case for case, passed in quick.items() if passed} == {
        (size, clients, 0.0) for size in (0.0, 1.0, 4e5) for clients in (1, 5)
    }


def test_what_a_damaged_record_says():
    assert in_words(dict(round=2, client=1)) == "round 2, client 1, norm unknown"


# --- a client, the server, a loss, in real rounds


@dataclass
class Faulty(FedAvg, listed=False):
    "FedAvg in which client `who` breaks in round `when` (from 0)"

    what: str = "upload"
    who: int = 2
    when: int = 1
    value: ClassVar[float] = nan  # a field would have to be finite

    def broken(self, client):
        return client.id == self.who and client.round >= self.when

    def init_client(self, federation, k):
        return {"own": torch.zeros(2)}

    def client_result(self, client, params, results):
        wrong = (
            {n: torch.full_like(w, self.value) for n, w in params.items()}
            if self.broken(client)
            else params
        )
        return (
            {"params": wrong if self.what == "upload" else params},
            {"own": wrong["head.bias"][:2] if self.what == "state" else client.state["own"]},
        )

    def aggregate(self, server, exchange):
        new = super().aggregate(server, exchange)
        if self.what == "server" and exchange.round >= self.when:
            new["params"] = {n: w * self.value for n, w in new["params"].items()}
        return new

    def reply(self, server, exchange):
        size = self.value if self.what == "reply" and exchange.round >= self.when else 0.0
        return [{"own": torch.full((2,), size)} for _ in exchange.cohort]

    def loss(self, client, params, batch):
        wrong = self.value if self.what == "loss" and client.round >= self.when else 0.0
        return super().loss(client, params, batch) + wrong


CASES = [
    ("upload", nan, 2),
    ("upload", inf, 2),
    ("upload", 1e30, 2),
    ("state", nan, 2),
    ("server", nan, None),
    ("server", inf, None),
    ("server", 1e9, None),
    ("reply", nan, None),
    ("loss", nan, 0),
    ("loss", inf, 0),
    ("loss", 1e8, 0),
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("what, value, client", CASES)
def test_who_is_recorded_whoever_computes(what, value, client, executor):
    before = []
    method = Faulty(**SHORT, what=what)
    method.value = value
    history = run(
        method,
        FED,
        4,
        judged_once,
        callbacks=[AfterRound(before.append)],
        executor=EXECUTORS[executor](),
    )
    assert history.status == "diverged"
    assert (
        history.diverged["round"],
        history.diverged["client"],
    ) == (2, client)
    assert set(history.diverged) == {"round", "client", "norm"}
    assert not 0 <= float(history.diverged["norm"]) <= EXPLODED
    assert [r["round"] for r in history.rows] == [1]
    assert before[-1] is history.snapshot
    assert history.snapshot.round == 2
    if client is not None:
        assert same_bits(before[0].server, before[1].server)  # what diverged is not averaged


@pytest.mark.parametrize("seed", range(3))
def test_the_client_is_its_number_not_its_place_in_the_cohort(seed):
    part = federation(8, participation=0.25, cohorts=seed)
    method = Faulty(**SHORT, who=next(k for k in part.cohort(1) if k not in part.cohort(0)), when=0)
    assert run(method, part, 2).diverged == record(2, method.who, nan)


def test_a_diverged_run_is_not_gone_on_from():
    at = run(Faulty(**SHORT), FED, 4).snapshot
    assert run(Faulty(**SHORT), FED, 9, start=at).snapshot is at


@pytest.mark.parametrize(
    "settings",
    [
        ("SlowMo", dict(alpha=1e12)),
        ("FedAvgM", dict(server_lr=1e12)),
        ("FedAvgM", dict(beta=1e200)),
        ("FedADC", dict(alpha=1e40)),
        ("SlowMo", dict(beta=1e200)),
    ],
    ids=str,
)
def test_a_server_that_overshoots(settings):
    name, wild = settings
    history = run(METHODS[name](**SHORT | wild), FED, 4)
    assert history.status == "diverged"
    assert history.diverged["client"] is None


def test_the_nan_of_a_quotient():
    "FedExP divides by the clients' agreement: where nobody moves and eps underflows, that is 0/0"
    assert run(
        METHODS["FedExP"](**SHORT | dict(lr=0.0, eps=1e-60)), FED, 2, evaluate
    ).diverged == record(1, None, nan)


# --- every method: never an exception, never a false alarm


@pytest.mark.parametrize("name", OURS)
def test_a_wild_learning_rate_is_an_outcome(name):
    for lr in (1e3, 1e30):
        history = run(
            METHODS[name](**SHORT | METHODS[name].check_settings | dict(lr=lr)),
            arranged(name),
            2,
            evaluate,
        )
        if lr == 1e30:
            assert history.status == "diverged"
        assert history.status == "complete" or (
            history.diverged["round"] in (1, 2) and history.diverged["client"] in (None, 0, 1, 2, 3)
        )
        assert all(math.isfinite(r["generalised_accuracy"]) for r in history.rows)


@pytest.mark.parametrize("name", OURS)
def test_a_sane_run_stays_five_orders_below(name):
    method = METHODS[name](**SHORT | METHODS[name].check_settings)
    largest = []
    federation = arranged(name)

    def watched(method, clients):
        results = EXECUTORS["sequential"]()(method, clients)
        largest.extend(
            max(float(norms(up)[1]), float(norms(kept)[1])) / largest_norm(federation.initial)
            for up, kept, _ in results
        )
        largest.extend(abs(float(loss)) / EXPLODED for _, _, loss in results)
        return results

    def watch(at):
        largest.append(
            float(norms(method.broadcast(at.server))[1]) / largest_norm(federation.initial)
        )

    assert (
        run(method, federation, 3, callbacks=[AfterRound(watch)], executor=watched).status
        == "complete"
    )
    assert 0 < max(largest) < 1e-4


# --- what is judged


def test_a_counter_is_no_weight():
    assert refuse_diverged(START, [START | {"body.batches": torch.tensor(10**15)}] * 2) is None


@pytest.mark.parametrize(
    "name, wild",
    [
        ("FedCCFA", dict(finetune_epochs=1, finetune_lr=1e30)),
        ("FedADCPlus", dict(calibration="plain", calibration_lr=1e30)),
    ],
)
def test_fine_tuning_that_diverges_is_recorded(name, wild):
    seen = []
    history = run(
        METHODS[name](**SHORT | wild), FED, 2, evaluate, callbacks=[AfterRound(seen.append)]
    )
    assert seen[-1] is history.snapshot  # a checkpoint would keep it
    assert history.status == "diverged"
    assert history.diverged["round"] == 2
    assert history.diverged["client"] == 0
    # the last round has no metrics: its models were not finite
    assert [r["round"] for r in history.rows] == [1]


# --- beside others


def test_a_course_that_diverges_leaves_the_others_their_bits():
    makes = [
        lambda: ActiveRun(FedAvg(**SHORT), FED, 3, family="calm", evaluate=evaluate),
        lambda: ActiveRun(Faulty(**SHORT), FED, 3, family="wild", evaluate=evaluate),
        lambda: ActiveRun(
            FedAvg(**SHORT), replace(FED, seed=1), 3, family="other", evaluate=evaluate
        ),
    ]
    together = run_forked([make() for make in makes])
    alone = [run_forked([make()])[0] for make in makes]
    assert [h.status for h in together] == ["complete", "diverged", "complete"]
    for a, b in zip(together, alone):
        assert a.rows == b.rows
        assert same_bits(a.snapshot.server, b.snapshot.server)
        assert repr(a.diverged) == repr(b.diverged)


def drifting(at):
    swap = concept_drift.DriftSchedule(
        "test", FED.clients, 10, (concept_drift.Swap(at, tuple(range(FED.clients)), (0, 1)),)
    )
    return replace(FED, drift=swap)


@pytest.mark.parametrize("when", [1, 2])
def test_runs_that_share_their_first_rounds_diverge_alone(when):
    "The drifts begin in round 2: what happens before belongs to both"
    makes = [
        lambda d=d: ActiveRun(Faulty(**SHORT, when=when), d, 4, family="one", evaluate=evaluate)
        for d in (drifting(2), drifting(3))
    ]
    for history in run_forked([make() for make in makes]):
        assert history.diverged == record(when + 1, 2, nan)
        assert [r["round"] for r in history.rows] == list(range(1, when + 1))


def test_an_evaluation_that_finds_divergence_ends_all_who_share_it():
    def judge(method, federation, at, final):
        refuse_diverged(
            START,
            [
                {"body.w": torch.tensor([nan if at.round == 2 and k == 3 else 1.0])}
                for k in range(4)
            ],
        )
        return {}

    ends = run_forked(
        [
            ActiveRun(FedAvg(**SHORT), d, 4, family="one", evaluate=judge)
            for d in (drifting(2), drifting(3))
        ]
    )
    assert [(h.status, h.diverged, len(h.rows)) for h in ends] == [
        ("diverged", record(2, 3, nan), 1)
    ] * 2


# --- clipping


def test_nothing_is_clipped_by_default():
    "FedDC is the one method whose released code clips in every example; its field says so, and every result file repeats it"
    given = {
        name: f.default
        for name in OURS
        for f in fields(METHODS[name])
        if f.name == "clip_norm" and f.default is not None
    }
    assert given == {"FedDC": 10.0}
    assert SGD(0.1).clip_norm is None
    assert all(any(f.name == "clip_norm" for f in fields(METHODS[name])) for name in OURS)


def test_a_spec_that_clips(tmp_path):
    plain, clips = (
        load_spec(written(tmp_path, TOY | dict(base=BASE | dict(rounds=1) | more), name)).runs(
            "paper"
        )[0]
        for name, more in {"demo/plain": {}, "demo/clips": dict(clip_norm=0.5)}.items()
    )
    assert plain.run_id != clips.run_id
    assert (
        plain.settings["method"]["fields"]["clip_norm"],
        clips.settings["method"]["fields"]["clip_norm"],
    ) == (None, 0.5)
    method, fed, rounds = build(clips)
    ends = [
        run(m, fed, rounds).snapshot.server["params"]
        for m in (build(plain)[0], method, replace(method, clip_norm=1e9))
    ]
    assert not same_bits(ends[0], ends[1])
    assert same_bits(ends[0], ends[2])


def uses(tree):
    "(function, what) of everything that clips, or that repairs a NaN"
    for f in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        for n in ast.walk(f):
            word = (
                n.attr
                if isinstance(n, ast.Attribute)
                else n.id
                if isinstance(n, ast.Name)
                else n.name
                if isinstance(n, ast.alias)
                else ""
            )
            if word in ("clip_norm", "clipped", "nan_to_num") or word.startswith("clip_grad"):
                yield f.name, word


def test_one_place_clips():
    files = [p for p in sorted((ROOT / "fedrepro").rglob("*.py"))]
    found = {(p.stem, *use) for p in files for use in uses(ast.parse(p.read_text()))}
    assert found == {
        ("client", "bounded", "clip_norm"),
        ("client", "bounded", "clipped"),
        ("method", "phase", "clip_norm"),
        ("compare", "compare", "clip_norm"),  # passes on what a person typed
        ("clustered", "cluster_distances", "nan_to_num"),
        ("harness", "apart", "nan_to_num"),
    }


def test_a_hidden_clip_is_seen():
    for code in ("torch.nn.utils.clip_grad_norm_(g, 1)", "g.nan_to_num()", "clipped(g, 1)"):
        assert list(uses(ast.parse(f"def f(g): {code}")))


def test_an_entry_of_a_state_that_has_nan_is_named(capsys):
    "The upload is sound, so the record alone would tell nothing"
    kept = {"known": torch.ones(2), "curve": torch.tensor([1.0, math.nan])}
    sound = {"body.0": torch.ones(4)}
    end = client_diverged(1, [3], [(sound, kept, 2.3)], [2.3], 1e6)
    assert end == {"round": 1, "client": 3, "norm": "nan"}
    assert "round 1: client 3 has diverged: 'curve' in its state has NaN" in capsys.readouterr().err
    assert client_diverged(1, [3], [({"body.0": torch.ones(4) * math.nan}, {}, 2.3)], [2.3], 1e6)
    assert not capsys.readouterr().err
