"A sweep: the same bits on any number of workers; failures, Ctrl-C and kills lose nothing that is finished"

import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fedrepro.core.errors import InputError
from fedrepro.core.fingerprints import own_digest
from fedrepro.engine import method
from fedrepro.executors import processes
from fedrepro.experiments import runner, store
from fedrepro.experiments.jobs import Job, TimeUp
from fedrepro.experiments.leases import leases
from fedrepro.experiments.runs import make_method, method_part
from fedrepro.experiments.specs import load_spec

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_spec("fedccfa/table2", ROOT / "papers")


def small(run, rounds=2):
    "A run as given, but on four clients, without drift, in so many rounds"
    s = run.settings
    return replace(
        run,
        settings=s
        | dict(rounds=rounds, drift=dict(name="none"), partition=s["partition"] | dict(clients=4)),
    )


RUNS = [small(r) for r in SPEC.runs("smoke", methods=["FedAvg", "FedCCFA"])]


def rows(folder, runs=RUNS):
    return [store.read(store.run_path(folder, r))[1] for r in runs]


def names(folder):
    return sorted(p.name for p in Path(folder).rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    "The results of one process, one run after the other"
    folder = tmp_path_factory.mktemp("reference")
    report = runner.compute_runs(RUNS, folder, quiet=True)
    assert len(report.done) == len(RUNS) == 4
    assert report.exit_code == 0
    return folder


def test_what_a_result_says(reference):
    head, found = store.read(store.run_path(reference, RUNS[-1]))
    assert head["status"] == "complete"
    assert head["threads"] == 1
    assert head["executor"] == "sequential"
    assert head["device"] == "cpu"
    assert head["wall_seconds"] > 0
    assert head["peak_memory_mb"] > 10
    assert len(head["data_fingerprint"]) == 64
    began = datetime.fromisoformat(head["started"])
    assert began.utcoffset() == timedelta(0)
    assert began <= datetime.now(timezone.utc)
    assert head["bytes_up"] == found[-1]["bytes_up"] > 0
    assert [r["round"] for r in found] == [1, 2]
    assert all(
        0 <= r[m] <= 100 for r in found for m in ("generalised_accuracy", "personalised_accuracy")
    )


@pytest.mark.parametrize(
    "workers",
    [1, pytest.param(2, marks=pytest.mark.nightly("a pool of processes for each of five calls"))],
)
def test_when_time_is_up_the_rest_is_left_for_another_time(reference, tmp_path, workers):
    """Nothing starts, or a run stops at a round with a checkpoint; nobody has failed, and the next call ends with the same bits.

    Pays for five calls of a second and more."""
    report = runner.compute_runs(RUNS, tmp_path, workers=workers, quiet=True, until=time.time() - 1)
    assert len(report.later) == 4
    assert not report.failed
    assert report.exit_code == 0
    assert not names(tmp_path)
    assert report.summary() == "0 computed, 0 were there, 4 left for another time"
    done = []
    while len(done) < 4:  # a second a call: some calls stop in the middle
        report = runner.compute_runs(
            RUNS, tmp_path, workers=workers, quiet=True, until=time.time() + 1 + len(done)
        )
        assert not report.failed
        assert len(report.done) + len(report.skipped) + len(report.later) == 4
        done.append(report)
    runner.compute_runs(RUNS, tmp_path, workers=workers, quiet=True)
    assert rows(tmp_path) == rows(reference)
    assert names(tmp_path) == names(reference)


def test_halves_of_files_are_removed_after_an_hour(tmp_path):
    "What a kill left: parts of files, and a checkpoint's tensors without json; not what may still be written, nor what is not ours"
    kept = tmp_path / "checkpoints"
    name = "0123456789abcdef-000002"
    kept.mkdir()
    half = [
        tmp_path / ".x.jsonl.1.partial",
        kept / f".{name}.json.1.partial",
        kept / f"{name}.safetensors",
    ]
    others = [
        kept / "mine.safetensors",
        kept / "fedcba9876543210-000001.safetensors",
        kept / "fedcba9876543210-000001.json",
    ]
    for path in half + others:
        path.write_bytes(b"x")
    runner.remove_leftovers(tmp_path)
    assert all(p.exists() for p in half + others)
    for path in half + others:
        os.utime(path, (0, 0))
    runner.remove_leftovers(tmp_path)
    assert not any(p.exists() for p in half)
    assert all(p.exists() for p in others)
    for path in others:
        path.unlink()
    runner.remove_leftovers(tmp_path)
    assert not kept.exists()


def test_nothing_is_computed_twice_and_damage_is_repaired(reference, tmp_path, capsys):
    for path in reference.rglob("*.jsonl"):
        (tmp_path / "smoke").mkdir(exist_ok=True)
        (tmp_path / "smoke" / path.name).write_bytes(path.read_bytes())
    broken = store.run_path(tmp_path, RUNS[1])
    broken.write_bytes(broken.read_bytes()[:100])
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.jsonl") if p != broken}
    report = runner.compute_runs(RUNS + RUNS, tmp_path, quiet=True)
    assert report.done == [broken]
    assert len(report.skipped) == 3
    assert rows(tmp_path) == rows(reference)
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items())
    assert "set aside" in capsys.readouterr().err


def test_a_result_that_another_process_writes_between_two_looks_is_taken(
    reference, tmp_path, monkeypatch
):
    "In a rehearsal of 2,000 runs three of a hundred drivers refused such a result as no result"
    done = store.run_path(tmp_path, RUNS[0])
    look = store.is_complete

    def late(path):
        found = look(path)
        if Path(path) == done and not found:
            done.write_bytes(store.run_path(reference, RUNS[0]).read_bytes())
        return found

    monkeypatch.setattr(store, "is_complete", late)
    report = runner.compute_runs(RUNS[:2], tmp_path, quiet=True)
    assert report.exit_code == 0
    assert report.theirs == [done]
    assert rows(tmp_path, RUNS[:2]) == rows(reference, RUNS[:2])


def test_a_damaged_result_of_another_driver_is_computed_again(reference, tmp_path):
    (tmp_path / "smoke").mkdir()
    store.run_path(tmp_path, RUNS[0]).write_bytes(
        store.run_path(reference, RUNS[0]).read_bytes()[:100]
    )
    report = runner.SweepReport(elsewhere=[RUNS[0]])
    with runner.Progress([RUNS[0]], True) as progress:
        assert runner.awaited(report, progress, tmp_path, float("inf"), True, {}) == [RUNS[0]]
        assert report.theirs == []


# --- refused before anything is computed


def test_bad_input_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_job", lambda *_, **__: pytest.fail("something was computed"))
    (tmp_path / "file").write_text("")
    fashion = SPEC.runs("small", methods=["FedAvg"], seeds=1)
    three = replace(RUNS[-1], settings=RUNS[-1].settings | dict(participation=0.5))
    for runs, given in [
        (RUNS, dict(results=tmp_path / "file")),
        (fashion, dict(data=tmp_path / "nothing")),
        (RUNS, dict(device="gpu")),
        (RUNS, dict(workers=0)),
        (RUNS, dict(workers=True)),
        ([three], {}),
    ]:
        with pytest.raises(InputError) as error:
            runner.compute_runs(runs, **dict(results=tmp_path / "r") | given)
        assert "\n" not in str(error.value)
    assert names(tmp_path / "r") == []


# --- failures


def test_a_failing_run_does_not_stop_the_others(reference, tmp_path, monkeypatch, capsys):
    real = runner.run_job

    def fails(job, callbacks):
        if job.runs == [RUNS[0]]:
            raise ZeroDivisionError("a slip\nof the pen")
        return real(job, callbacks)

    monkeypatch.setattr(runner, "run_job", fails)
    report = runner.compute_runs(RUNS, tmp_path, quiet=True)
    assert report.exit_code == 1
    assert len(report.done) == 3
    assert list(report.failed) == [RUNS[0]]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert RUNS[0].describe() in said
    assert "ZeroDivisionError: a slip of the pen (test_runner.py:" in said


def test_runs_that_are_described_alike_fail_one_by_one(tmp_path, monkeypatch, capsys):
    "Those of two tables, say"
    monkeypatch.setattr(runner, "run_job", lambda *_: 1 / 0)
    report = runner.compute_runs([RUNS[0], small(RUNS[0], 3)], tmp_path, quiet=True)
    assert report.summary() == "0 computed, 0 were there, 2 failed"
    assert capsys.readouterr().err.count(f"{RUNS[0].describe()} failed: ") == 2


@pytest.mark.parametrize("error, status", [(RuntimeError, "failed"), (TimeUp, "later")])
def test_a_failed_job_blames_no_run_of_others_and_none_with_a_result(
    reference, tmp_path, monkeypatch, error, status
):
    def fails(*_):
        raise error("broken")

    (tmp_path / "smoke").mkdir()
    store.run_path(tmp_path, RUNS[0]).write_bytes(store.run_path(reference, RUNS[0]).read_bytes())
    monkeypatch.setattr(runner, "run_job", fails)
    with leases([store.run_path(tmp_path, RUNS[1])]):
        found = runner.attempt(Job(RUNS[:3], tmp_path))
    assert [o.status for o in found] == ["theirs", "elsewhere", status]


@pytest.mark.parametrize(
    "device, how, jobs, workers, want",
    [
        ("cuda", "auto", 3, 4, 3),
        ("cpu", "sequential", 3, 4, 3),
        ("cpu", "auto", 3, 4, 0),
        ("cpu", "auto", 4, 4, 4),
        ("cpu", "auto", 9, 4, 4),
        ("cuda", "auto", 1, 4, 0),
        ("cuda", "processes", 9, 4, 0),
        ("cpu", "sequential", 9, 1, 0),
    ],
)
def test_few_jobs_have_a_process_each_unless_their_clients_have(
    monkeypatch, device, how, jobs, workers, want
):
    seen = []
    monkeypatch.setattr(runner, "run_here", lambda jobs, *_: seen.append((0, jobs[0].workers)))
    monkeypatch.setattr(runner, "run_apart", lambda jobs, n, *_: seen.append((n, jobs[0].workers)))
    runner.run_near([Job(RUNS, "x", device=device, executor=how)] * jobs, None, None, workers)
    assert seen == [(want, 1 if want else workers)]


def dies(job, callbacks, deaths, folder):
    "A task whose worker is killed the first `deaths[run_id]` times that it comes to that run; module level, because workers import it"
    run = job.runs[0].run_id
    if (seen := len(list(folder.glob(f"{run}*")))) < deaths.get(run, 0):
        (folder / f"{run}{seen}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return runner.attempt(job, callbacks)


def test_a_killed_worker_loses_no_run(reference, tmp_path, monkeypatch):
    """The runs beside it are whole, and its own is tried again before it fails, here twice; there need be no semaphores.

    Pays for a new worker after each death"""

    def none(*_, **__):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", none)
    monkeypatch.setattr(processes, "TRIES", 2)
    report = runner.SweepReport()
    task = partial(dies, deaths={RUNS[0].run_id: 1, RUNS[1].run_id: 9}, folder=tmp_path)
    with runner.Progress(RUNS, quiet=True) as progress:
        runner.run_apart([Job([r], tmp_path) for r in RUNS], 2, report, progress, task)
    kept = [r for r in RUNS if r != RUNS[1]]
    assert sorted(report.done) == sorted(store.run_path(tmp_path, c) for c in kept)
    assert rows(tmp_path, kept) == rows(reference, kept)
    assert list(report.failed) == [RUNS[1]]


# --- methods of one's own

OWN = """
from fedrepro.engine.method import FedAvg
class {name}(FedAvg):
    def init_server(self, federation):
        {line}
        return super().init_server(federation)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    "Writes a file with a method, loads it as --import does, and gives a planned run of it"
    known = dict(method.METHODS)
    monkeypatch.setenv("FEDREPRO_METHODS", str(tmp_path / "own_methods.py"))

    def own(name="Spoils", line="pass"):
        sys.modules.pop("own_methods", None)
        (tmp_path / "own_methods.py").write_text(OWN.format(name=name, line=line))
        method.load_methods()
        return replace(
            RUNS[0],
            settings=RUNS[0].settings
            | dict(method=method_part(make_method(name, dict(lr=0.01), "own"))),
        )

    yield own
    sys.modules.pop("own_methods", None)
    method.METHODS.clear()
    method.METHODS.update(known)


def test_a_method_that_changes_the_data_writes_no_result_and_spoils_no_other(
    own, reference, tmp_path
):
    spoils = own(line="federation.data.train_x.zero_()")
    report = runner.compute_runs([spoils, RUNS[1]], tmp_path / "r", quiet=True)
    assert list(report.failed.values()) == [
        "RuntimeError: the data digits were changed while Spoils ran; its result is void (jobs.py:"
        + next(iter(report.failed.values())).rsplit(":", 1)[1]
    ]
    assert report.done == [store.run_path(tmp_path / "r", RUNS[1])]
    assert rows(tmp_path / "r", RUNS[1:2]) == rows(reference, RUNS[1:2])


def test_the_name_of_a_method_of_the_package_is_refused(own):
    with pytest.raises(
        InputError, match="SCAFFOLD of own_methods has the name of a method of the package"
    ):
        own("SCAFFOLD")


def test_an_edited_method_is_computed_again(own):
    first = own()
    same = own()
    edited = own(line="None")
    assert first.run_id == same.run_id != edited.run_id
    assert len(first.settings["method"]["source"]) == 16
    assert store.encode(dict(settings=first.settings, run_id=first.run_id, status="diverged"), [])
    assert "source" not in RUNS[0].settings["method"]


@pytest.mark.parametrize("kind", ["", "@property", "@staticmethod", "@classmethod"])
def test_the_source_of_a_method_from_a_notebook(kind):
    found = []
    for line in ("1", "2"):
        text = f"class Typed(FedAvg):\n    {kind}\n    def cohort(*a): return [{line}]"
        exec(text, {"FedAvg": method.FedAvg, "__name__": "nowhere"}, spaces := {})
        found.append(own_digest(spaces["Typed"]))
    method.METHODS.pop("Typed")
    assert found[0]
    assert found[0] != found[1]


def test_the_source_of_a_typed_method_is_the_same_in_every_process():
    "Also of a script on standard input, with addresses and sets among what its functions hold"
    script = """
from fedrepro.engine.method import FedAvg
from fedrepro.experiments.runs import method_part
class Typed(FedAvg):
    def cohort(self, k): return (lambda: 3)() if k in {"a", "b", "c", "d"} else [i for i in (1, 2)]
print(method_part(Typed())["source"])
"""

    def source(seed):
        env = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-"],
            input=script,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=env,
        ).stdout

    assert source("1") == source("2") != ""


@pytest.mark.parametrize("moment", ["note", "finish"])
def test_an_interrupt_between_a_result_and_its_note(tmp_path, monkeypatch, moment):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        *((runner, "note") if moment == "note" else (runner.Progress, "finish")), interrupt
    )
    report = runner.compute_runs(RUNS[:2], tmp_path, quiet=True)
    assert report.exit_code == 130
    assert report.done == [store.run_path(tmp_path, RUNS[0])]


def test_an_interrupt_counts_what_others_have_computed_once(tmp_path):
    def pool(jobs, report, progress):
        (path,) = runner.run_job(jobs[0])
        report.theirs.append(path)
        raise KeyboardInterrupt

    report = runner.compute_runs(RUNS[:2], tmp_path, quiet=True, pool=pool)
    assert report.summary().startswith("0 computed, 0 were there, 1 computed by others;")


# --- what is said


def test_quiet_and_ci_are_silent(reference, tmp_path, capsys, monkeypatch):
    for n, (given, ci) in enumerate([(dict(quiet=True), ""), ({}, "true")]):
        monkeypatch.setenv("CI", ci)
        assert runner.compute_runs(RUNS[:1], tmp_path / str(n), **given).exit_code == 0
        assert capsys.readouterr() == ("", "")
    monkeypatch.delenv("CI")
    runner.compute_runs(RUNS[:1], tmp_path / "loud")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fedrepro: 1 of 1 runs: {RUNS[0].describe()}: complete\n"


def test_two_workers_give_the_same_bits_in_any_order(reference, tmp_path):
    report = runner.compute_runs(RUNS[::-1], tmp_path, workers=2, quiet=True)
    assert len(report.done) == 4
    assert not report.failed
    assert rows(tmp_path) == rows(reference)
    heads = [
        [store.read(store.run_path(f, r))[0]["partition_fingerprint"] for r in RUNS]
        for f in (tmp_path, reference)
    ]
    assert heads[0] == heads[1]
    assert names(tmp_path) == names(reference)
