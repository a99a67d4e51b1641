"Loggers hear what is stored, once, and nothing that happens to them happens to a run"

import json
import types
from pathlib import Path

import pytest

from fedrepro.core.errors import InputError
from fedrepro.experiments import loggers as module, store
from fedrepro.experiments.loggers import LOGGERS, Loggers, log_stored, logged_run, steps
from fedrepro.experiments.runner import compute_runs
from fedrepro.experiments.specs import load_spec

from toy import ODD_NAMES, ROOT, installed, stored, written


@pytest.fixture
def planned(tmp_path):
    "Two runs with results, written as a run would: one complete, one diverged"
    spec = load_spec(
        written(tmp_path, {k: v for k, v in ODD_NAMES.items() if k != "published"}, "demo/t")
    )
    planned = spec.runs("smoke", methods=["FedAvg"], seeds=2)[::3]
    rows = [
        dict(round=t, generalised_accuracy=10.0 * t, train_loss=None if t == 2 else 1 / t)
        for t in (1, 2, 3)
    ]
    stored(planned[0], rows, spec.results)
    stored(
        planned[1],
        rows[:2],
        spec.results,
        status="diverged",
        diverged=dict(round=3, client=0, norm="inf"),
    )
    return planned


@pytest.fixture
def results(planned, tmp_path):
    return tmp_path / "demo/results"


class Listed:
    "Keeps what it is given"

    def __init__(self):
        self.runs = []

    def __call__(self, run):
        self.runs.append(run)


# --- what a logger is given


def test_it_is_given_what_is_stored(planned, results):
    listed = Listed()
    log_stored(Loggers.of([listed]), planned, results)
    assert [(r.run_id, r.status) for r in listed.runs] == [
        (planned[0].run_id, "complete"),
        (planned[1].run_id, "diverged"),
    ]
    first = [
        (1, {"generalised_accuracy": 10.0, "train_loss": 1.0}),
        (2, {"generalised_accuracy": 20.0}),
    ]
    assert [r.rows for r in listed.runs] == [
        [*first, (3, {"generalised_accuracy": 30.0, "train_loss": 1 / 3})],
        first,
    ]
    run = listed.runs[0]
    assert run.settings["row"] == "FedAvg"
    assert run.settings["clients"] == 3
    assert run.settings["lr"] == 0.01
    assert "alpha" not in run.settings
    json.dumps(run.settings)


def test_a_run_is_sent_once(planned, results):
    listed = Listed()
    loggers = Loggers.of([listed])
    for _ in range(2):
        log_stored(loggers, planned, results)
    assert len(listed.runs) == len(loggers.seen) == 2


def test_functions_of_one_name_are_loggers_of_their_own():
    def log(run):
        pass

    assert list(Loggers.of([log, lambda run: None, lambda run: None, log]).loggers) == [
        "log",
        "<lambda>",
        "<lambda> 3",
        "log 4",
    ]


def test_rounds_that_come_again_are_counted():
    assert steps([dict(round=5, a=1.0), dict(round=5, a=2.0)]) == [
        (1, {"round": 5, "a": 1.0}),
        (2, {"round": 5, "a": 2.0}),
    ]
    assert steps([dict(round=5, a=1.0), dict(round=9, a=None)]) == [(5, {"a": 1.0}), (9, {})]


def test_new_runs_are_sent_by_the_process_that_asked(tmp_path):
    "Pays for two workers: they send nothing themselves"
    planned = load_spec("fedccfa/table2", ROOT / "papers").runs(
        "smoke", methods=["FedAvg"], seeds=2
    )
    for r in planned:
        r.settings.update(
            rounds=1, drift={"name": "none"}, partition=r.settings["partition"] | {"clients": 2}
        )
    listed = Listed()
    report = compute_runs(planned, tmp_path, workers=2, quiet=True, on_done=Loggers.of([listed]))
    assert len(report.done) == 2
    kept = {r.run_id: store.read(store.run_path(tmp_path, r))[1][0] for r in planned}
    assert {r.run_id: r.rows for r in listed.runs} == {
        n: [(1, {k: v for k, v in row.items() if k != "round" and v is not None})]
        for n, row in kept.items()
    }


# --- what goes wrong stays there


@pytest.mark.parametrize(
    "asked, words",
    [
        ("tensorbord:x", ["'tensorbord'", "mlflow"]),
        ("tensorboard", ["where?", "DIR"]),
        ("wandb: ", ["where?", "PROJECT"]),
        ("", ["''"]),
    ],
)
def test_refused(asked, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv in (["run", "fedccfa/table2", "--log", asked], ["compare", "FedAvg", "--log", asked]):
        refused(argv, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", sorted(LOGGERS))
def test_a_missing_extra_is_named(kind, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(InputError, match=rf"fedrepro\[{kind}\]"):
        Loggers.of([f"{kind}:out/x"])


# --- the three, by stores on this machine


def test_tensorboard(planned, results, tmp_path):
    if not installed("tensorboard", "tensorboard"):
        pytest.skip("tensorboard is not installed: pip install 'fedrepro[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    there = tmp_path / "tb"
    for _ in range(2):
        log_stored(Loggers.of([f"tensorboard:{there}"]), planned, results)
    assert sorted(p.name for p in there.iterdir()) == sorted(logged_run(r).slug for r in planned)
    read = EventAccumulator(str(there / logged_run(planned[0]).slug))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("generalised_accuracy")] == [
        (1, 10.0),
        (2, 20.0),
        (3, 30.0),
    ]
    assert [e.step for e in read.Scalars("train_loss")] == [1, 3]
    text = read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text.strip("`\n")) == logged_run(planned[0]).settings


def test_a_kill_leaves_nothing_that_looks_finished(planned, results, tmp_path, monkeypatch):
    "A folder of TensorBoard gets its name when the run is whole"

    class Writer:
        def __init__(self, folder):
            self.folder = Path(folder)
            self.folder.mkdir(parents=True)

        def add_text(self, *_):
            (self.folder / "events").write_text("")

        def add_scalar(self, *_):
            raise KeyboardInterrupt

        def close(self):
            pass

    monkeypatch.setattr(module, "needed", lambda *_: types.SimpleNamespace(SummaryWriter=Writer))
    asked = [f"tensorboard:{tmp_path / 'tb'}"]
    folder = tmp_path / "tb"
    with pytest.raises(KeyboardInterrupt):
        log_stored(Loggers.of(asked), planned, results)
    assert [p.name for p in folder.iterdir()] == [f".{logged_run(planned[0]).slug}.partial"]
    Writer.add_scalar = lambda *_: None
    log_stored(Loggers.of(asked), planned, results)
    assert sorted(p.name for p in folder.iterdir()) == sorted(logged_run(r).slug for r in planned)


# --- the command


def test_stored_runs_are_sent_by_run(planned, said, monkeypatch, tmp_path):
    "Nothing is computed: what is there is sent"
    listed = Listed()
    monkeypatch.setitem(LOGGERS, "kept", lambda where: listed)
    code, out, err = said(
        "run",
        tmp_path / "demo/t.toml",
        "--tier",
        "smoke",
        "--runs",
        ",".join(r.run_id for r in planned),
        "--log",
        "kept:x",
    )
    assert (code, out) == (0, "")
    assert "0 computed, 2 were there" in err
    assert len(listed.runs) == 2
