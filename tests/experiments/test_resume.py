"A run that is killed goes on from its checkpoint and ends with the bits that it would have had"

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everybody import every_run
from fedrepro.checks.harness import tiny
from fedrepro.core.errors import Damaged, InputError
from fedrepro.core.trees import same_bits, tensors
from fedrepro.engine import checkpoints
from fedrepro.engine.checkpoints import CheckpointWriter, load_snapshot, save_snapshot
from fedrepro.engine.method import FedAvg, load_methods
from fedrepro.engine.rounds import run
from fedrepro.experiments import jobs, runner, store
from fedrepro.experiments.jobs import Job
from toy import OURS

SCRIPT = Path(__file__).parents[1].joinpath("everybody.py")
COST = ("started", "wall_seconds", "peak_memory_mb", "resumed", "executor")


def run_job(runs, results, tell=lambda run_id, rounds: None, **how):
    return jobs.run_job(Job(runs, results, **how), [Told(tell)])


@dataclass
class Told:
    "A callback: `tell(run_id, rounds)`"

    tell: Callable

    def after_round(self, state):
        self.tell(state.name, state.snapshot.round)


def started(folder: Path, workers: int, names=()) -> subprocess.Popen:
    "The sweep in a session of its own"
    return subprocess.Popen(
        [sys.executable, SCRIPT, folder, str(workers), *names],
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


def events(folder: Path) -> int:
    "Changes whenever something has been written, also while files come and go under the eyes"
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_mtime_ns
            except FileNotFoundError:
                continue  # renamed since it was listed, as every file written is
    return total


def half_way(folder: Path) -> bool:
    "Whether some run has kept a round, and is not over"
    try:
        return any(folder.rglob("checkpoints/*-00000[12].json"))
    except FileNotFoundError:
        return False  # the folder went with its last checkpoint


def killed_until_done(folder: Path, workers: int, kills: int, seed: int, names=()) -> int:
    """Start the sweep, kill it with all its workers, and again; returns the kills

    First when a run is half way, so that one goes on, then at random moments after something has been written."""
    rng = random.Random(seed)
    done = 0
    while True:
        process = started(folder, workers, names)
        before = events(folder)
        if done == kills:
            said = process.communicate(timeout=300)[1].decode()
            assert process.returncode == 0, said
            return done
        while done == 0 and process.poll() is None:
            time.sleep(0.005)
            if not half_way(folder):
                continue
            os.killpg(process.pid, signal.SIGSTOP)
            if half_way(folder):
                break
            os.killpg(process.pid, signal.SIGCONT)
        while events(folder) == before and process.poll() is None:
            time.sleep(0.01)
        if done:
            time.sleep(rng.uniform(0, 2))
        if process.poll() is not None:
            return done
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done += 1


def results(folder: Path) -> dict:
    "What each file says, without what the run has cost"
    found = store.load_runs(folder / "smoke")
    return {
        path.name: ({k: v for k, v in head.items() if k not in COST}, rows)
        for path, head, rows in found
    }


def last_states(folder: Path) -> dict:
    "Parameters, states and all else that the last checkpoint of every job holds, without costs; the tensors by their digest"
    found = {}
    for path in sorted((folder / "smoke" / "checkpoints").glob("*.json")):
        about = checkpoints.read_description(path.with_suffix(""))
        checkpoints.load_message(path.with_suffix(""))  # whole
        text = json.dumps(
            [
                [run, [part for part in state["dict"] if part[0] != "cost"]]
                for run, state in about["message"]["dict"]
            ]
        )
        found[path.name.rsplit("-", 1)[0]] = about["rounds"], about["sha256"], text
    return found


# One or two of each kind of state that a method keeps: none, at the server, at clients, models of clients, clusters, samples
# chosen. That every method goes on from a checkpoint is a law of the contract; here processes are killed.
SOME = ("FedAvg", "FedAvgM", "SCAFFOLD", "FedDC", "LfD", "Ditto", "IFCA", "FedBSS", "FedCCFA")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    "The folder of the sweep of these methods (none: of all), computed once without a disturbance"
    folders = {}

    def computed(names):
        if names not in folders:
            folders[names] = tmp_path_factory.mktemp("undisturbed")
            process = started(folders[names], 1, names)
            said = process.communicate(timeout=300)[1].decode()
            assert process.returncode == 0, said
        return folders[names]

    return computed


ALL_METHODS = pytest.param(
    (), marks=pytest.mark.nightly("the contract resumes every method; here are some")
)


@pytest.mark.parametrize("names", [SOME, ALL_METHODS])
def test_the_sweep_has_every_method(undisturbed, names):
    folder = undisturbed(names)
    heads = [head for _, head, _ in store.load_runs(folder / "smoke")]
    methods = set(names or OURS)
    assert {head["settings"]["method"]["class"] for head in heads} == methods
    assert len(heads) == len(methods) + 2
    assert all(head["resumed"] == [] and head["status"] == "complete" for head in heads)
    assert all(set(rounds.values()) == {4} for rounds, _, _ in last_states(folder).values())


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(
    "names, workers, kills",
    [  # the first kill of each is not at random
        (SOME, 2, 3),
        pytest.param((), 1, 6, marks=pytest.mark.nightly("seven starts of a sweep of all methods")),
        pytest.param((), 2, 4, marks=pytest.mark.nightly("five starts of a sweep of all methods")),
    ],
)
def test_killed_anywhere_it_ends_with_the_same_bits(undisturbed, tmp_path, names, workers, kills):
    "Pays for a run of each method twice, and for a start of the sweep after each kill"
    whole = undisturbed(names)
    seed = int(os.environ.get("FEDREPRO_SEED", 0)) + workers
    assert killed_until_done(tmp_path, workers, kills, seed, names) >= 2, (
        "the sweep was over before it could be killed"
    )
    assert results(tmp_path) == results(whole)
    assert last_states(tmp_path) == last_states(whole)
    heads = [head for _, head, _ in store.load_runs(tmp_path / "smoke")]
    assert any(head["resumed"] for head in heads), "no run went on from a checkpoint"


# --- at every round, of a forked job


@pytest.fixture(scope="module")
def fork():
    return every_run(names=["FedCCFA"])


class Killed(BaseException):
    pass


def killing(at):
    def tell(run_id, rounds):
        if rounds == at:
            raise Killed

    return tell


@pytest.fixture(scope="module")
def forked(fork, tmp_path_factory):
    return [store.read(p)[1] for p in run_job(fork, tmp_path_factory.mktemp("fork"))]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_a_forked_job_goes_on(fork, forked, tmp_path, at, every):
    with pytest.raises(Killed):
        run_job(fork, tmp_path, checkpoint_rounds=every, tell=killing(at))
    seen = []
    found = [
        store.read(p)
        for p in run_job(
            fork, tmp_path, checkpoint_rounds=every, tell=lambda run, done: seen.append(done)
        )
    ]
    assert [rows for _, rows in found] == forked
    last = (at - 1) // every * every
    assert (
        seen[0] == (last or 1)
        and [[r["round"] for r in head["resumed"]] for head, _ in found]
        == [[min(last, most)] if last else [] for most in (4, 2)]  # they part after round 2
    )
    assert [p.name for p in (tmp_path / "smoke").iterdir() if not p.name.endswith(".jsonl")] == []


def test_each_run_of_a_job_may_go_on_alone(fork, forked, tmp_path):
    with pytest.raises(Killed):
        run_job(fork, tmp_path, checkpoint_rounds=1, tell=killing(4))
    first = store.read(run_job(fork[1:], tmp_path)[0])
    assert first[1] == forked[1]
    assert [r["round"] for r in first[0]["resumed"]] == [2]
    assert (tmp_path / "smoke" / "checkpoints").exists()  # the other still needs it
    assert store.read(run_job(fork, tmp_path)[0])[1] == forked[0]
    assert not (tmp_path / "smoke" / "checkpoints").exists()


# --- a checkpoint that must not be used


@pytest.fixture
def stopped(fork, tmp_path):
    with pytest.raises(Killed):
        run_job(fork, tmp_path, checkpoint_rounds=1, tell=killing(4))
    return tmp_path


def rounds_of(fork, folder):
    "The rounds that a second call reports, and its rows"
    seen = []
    paths = run_job(fork, folder, tell=lambda run, done: seen.append(done))
    return seen[0], [store.read(p)[1] for p in paths]


@pytest.mark.parametrize("what", ["code", "versions", "device", "data"])
def test_other_code_starts_anew(fork, forked, stopped, monkeypatch, capsys, what):
    real = jobs.checkpoint_fingerprint
    monkeypatch.setattr(jobs, "checkpoint_fingerprint", lambda *a: real(*a) | {what: "other"})
    assert rounds_of(fork, stopped) == (1, forked)
    assert (
        "checkpoints of other code, versions, data, device or executor are not used"
        in capsys.readouterr().err
    )


def test_another_executor_starts_anew(fork, forked, stopped, capsys):
    "A run has the bits of one executor; those of worker processes are those of the loop"
    active = jobs.active_run(fork[0], None, "cpu")
    assert (
        jobs.checkpoint_fingerprint(active, "cpu", "processes")
        == jobs.checkpoint_fingerprint(active, "cpu")
        != jobs.checkpoint_fingerprint(active, "cpu", "stacked")
    )
    seen = []
    paths = run_job(fork, stopped, tell=lambda run, done: seen.append(done), executor="stacked")
    assert seen[0] == 1
    assert {store.read(p)[0]["executor"] for p in paths} == {"stacked"}
    assert "executor are not used" in capsys.readouterr().err


def test_a_truncated_result_does_not_take_its_checkpoint_along(fork, forked, stopped):
    "It is read before the checkpoint goes: the run goes on from there"
    kept = {p.name: p.read_bytes() for p in (stopped / "smoke" / "checkpoints").iterdir()}
    paths = run_job(fork, stopped)
    (stopped / "smoke" / "checkpoints").mkdir()
    for name, content in kept.items():
        (stopped / "smoke" / "checkpoints" / name).write_bytes(content)
    for path in paths:
        path.write_bytes(path.read_bytes()[:-20])
    runner.remove_leftovers(stopped / "smoke")
    assert rounds_of(fork, stopped) == (3, forked)


def sealed(body):
    return f"{body}\n{checkpoints.digest(body.encode())}\n"


def test_a_sealed_but_malformed_checkpoint_is_set_aside(tmp_path, capsys):
    "A description that is none, and a message that names a tensor which is not there"
    content, _ = checkpoints.to_bytes([torch.zeros(2)])
    (tmp_path / "x-2.safetensors").write_bytes(content)
    about = {
        "format": 2,
        "sha256": checkpoints.digest(content),
        "axes": [],
        "message": {"tensor": 7},
        "rounds": {"a": 1},
        "marks": {},
    }
    for name, body in (("x-1", '{"format": 2, "rounds": {"a": "b"}}'), ("x-2", json.dumps(about))):
        (tmp_path / f"{name}.json").write_text(sealed(body))
    assert CheckpointWriter(tmp_path, ["a"], {}).find() == {}
    assert capsys.readouterr().err.count("malformed; it is set aside") == 2
    assert sorted(p.name for p in tmp_path.glob("*.json*")) == [
        "x-1.json.damaged",
        "x-2.json.damaged",
    ]


def of_gpu(tmp_path, monkeypatch):
    "(FedCDA's snapshot, its path): kept as by a run on a GPU that has `cache`, `picked`, `origin` and states on the host"
    method = load_methods()["FedCDA"](lr=0.05, epochs=1, batch_size=8, warmup=1)
    at = run(method, tiny(), 2).snapshot
    at = replace(at, states=[{"seen": torch.ones(2)} for _ in at.states])
    waiting = [at.server[part] for part in ("cache", "picked", "origin")]
    host = {id(t) for t in tensors([waiting, at.states])}
    assert host.isdisjoint(map(id, tensors(at.server["params"])))
    there = lambda kept: [i for i, t in enumerate(kept) if id(t) in host]
    with monkeypatch.context() as gpu:
        gpu.setattr(checkpoints, "on_host", there)
        save_snapshot(tmp_path / "kept", at)
    return at, tmp_path / "kept"


def places(message):
    return {t.device.type for t in tensors(message)}


def test_what_waited_on_the_host_comes_back_there(tmp_path, monkeypatch):
    "Under the device `meta`, which stands for a GPU; on the CPU, and from a checkpoint that does not say, all is one place"
    at, path = of_gpu(tmp_path, monkeypatch)
    gpu = SimpleNamespace(device="meta", clients=len(at.states))
    back = load_snapshot(path, gpu)
    for part in ("cache", "picked", "origin"):
        assert places(back.server[part]) == {"cpu"}
        assert same_bits(back.server[part], at.server[part])
    assert places(back.states) == {"cpu"}
    assert places(back.server["params"]) == places(back.last_broadcasts) == {"meta"}
    assert same_bits(load_snapshot(path, tiny()).server, at.server)

    body = json.loads(path.with_name("kept.json").read_text().splitlines()[0])
    assert body.pop("host")
    text = json.dumps(body)
    path.with_name("kept.json").write_text(f"{text}\n{checkpoints.digest(text.encode())}\n")
    assert places(checkpoints.load_message(path, "meta")) == {"meta"}
    save_snapshot(path, at)  # of a run on the CPU
    assert places(checkpoints.load_message(path, "meta")) == {"meta"}


def test_a_checkpoint_of_a_newer_format_is_left_alone(tmp_path, capsys):
    (tmp_path / "x-1.json").write_text(sealed('{"format": 3}'))
    assert CheckpointWriter(tmp_path, ["a"], {}).find() == {}
    assert "format 3, not 2; it is not used" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["x-1.json"]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_flipped_byte_is_found_and_the_one_before_taken(fork, forked, stopped, capsys, suffix):
    rng = random.Random(1)
    newest = sorted((stopped / "smoke" / "checkpoints").glob(f"*{suffix}"))[-1]
    content = bytearray(newest.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    newest.write_bytes(content)
    assert rounds_of(fork, stopped) == (2, forked)
    assert "it is set aside" in capsys.readouterr().err


def test_a_hundred_damages_of_a_checkpoint_are_all_found(tmp_path):
    federation = tiny()
    at = run(FedAvg(lr=0.1, epochs=1, batch_size=8), federation, 1).snapshot
    save_snapshot(tmp_path / "kept", at)
    assert same_bits(load_snapshot(tmp_path / "kept", federation).server, at.server)
    rng = random.Random(0)
    for n in range(100):
        path = tmp_path / ("kept.json" if n % 2 else "kept.safetensors")
        content = path.read_bytes()
        i = rng.randrange(len(content))
        path.write_bytes(
            rng.choice(
                [
                    content[:i],
                    content[:i] + bytes([content[i] ^ (1 + rng.randrange(255))]) + content[i + 1 :],
                    content + b"x",
                ]
            )
        )
        with pytest.raises(Damaged, match="kept"):
            load_snapshot(tmp_path / "kept", federation)
        path.write_bytes(content)
    (tmp_path / "kept.safetensors").unlink()
    with pytest.raises(Damaged):
        load_snapshot(tmp_path / "kept", federation)


# --- where nothing can be kept


@pytest.mark.parametrize(
    "odd",
    [
        np.array(["a"]),
        torch.zeros(2, dtype=torch.complex128).to_sparse(),
        np.arange(3)[::-1],
        {1, 2},
    ],
)
def test_what_no_file_can_hold_is_refused_in_one_line(odd, tmp_path):
    with pytest.raises(InputError, match="cannot be kept") as refused:
        checkpoints.save_message(tmp_path / "x", {}, {"odd": odd})
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_stop_a_run(fork, forked, tmp_path, monkeypatch, capsys):
    def full(path, content):
        raise InputError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(checkpoints, "write_atomic", full)
    paths = run_job(fork, tmp_path, checkpoint_rounds=1)
    assert [store.read(p)[1] for p in paths] == forked
    assert (
        "No space left on device); the run goes on without this checkpoint"
        in capsys.readouterr().err
    )


def test_another_process_may_remove_the_empty_folder_at_any_time(tmp_path, monkeypatch):
    "Between a look at it and its listing: 1 of 4,000 runs failed after its last round"
    look = os.scandir

    def late(path):
        if Path(path).is_dir() and Path(path).name == "checkpoints":
            Path(path).rmdir()
        return look(path)

    monkeypatch.setattr(os, "scandir", late)
    writer = CheckpointWriter(tmp_path / "checkpoints", ["0" * 16], {})
    folder = tmp_path / "checkpoints"
    for use in (writer.mine, writer.find, writer.clear, lambda: runner.remove_leftovers(tmp_path)):
        folder.mkdir(exist_ok=True)
        use()
    assert not folder.exists()


def test_checkpoints_that_cannot_be_removed_cost_no_result(
    fork, forked, tmp_path, monkeypatch, capsys
):
    "The folder became read-only: the run is whole, what it leaves is said, and the next run removes it"
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path.parent.name == "checkpoints" and path.exists():
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    with monkeypatch.context() as m:
        m.setattr(Path, "unlink", refuse)
        paths = run_job(fork, tmp_path, checkpoint_rounds=1)
    assert [store.read(p)[1] for p in paths] == forked
    said = capsys.readouterr().err
    assert "cannot be written (Operation not permitted); it stays until the next run" in said
    left = list((tmp_path / "smoke" / "checkpoints").iterdir())
    # from the third on, none could go
    assert left
    assert said.count("goes on without this checkpoint") == len(left) // 2 - 2
    paths[0].unlink()
    run_job(fork, tmp_path, checkpoint_rounds=0)
    assert not (tmp_path / "smoke" / "checkpoints").exists()


def test_a_checkpoint_of_a_run_with_a_result_is_removed_when_nothing_is_left_to_compute(
    fork, tmp_path, monkeypatch
):
    "What a kill left between the result and the removal, or a folder that was read-only; not that of an unfinished run"
    with monkeypatch.context() as m:
        m.setattr(checkpoints.CheckpointWriter, "clear", lambda self, finished: None)
        run_job(fork[:1], tmp_path, checkpoint_rounds=1)
    kept = tmp_path / "smoke" / "checkpoints"
    with pytest.raises(Killed):
        run_job(fork[1:2], tmp_path, checkpoint_rounds=1, tell=killing(3))
    heads = {
        p: set(checkpoints.read_description(p.with_suffix(""))["rounds"])
        for p in kept.glob("*.json")
    }
    assert {fork[0].run_id} in heads.values()
    assert {fork[1].run_id} in heads.values()
    runner.compute_runs(fork[:1], tmp_path, quiet=True)
    assert {p for p in kept.glob("*.json")} == {
        p for p, runs in heads.items() if runs == {fork[1].run_id}
    }
    run_job(fork[1:2], tmp_path, checkpoint_rounds=0)
    assert not kept.exists()


def test_no_checkpoints_when_none_are_asked_for(fork, tmp_path):
    with pytest.raises(Killed):
        run_job(fork, tmp_path, checkpoint_rounds=0, tell=killing(4))
    assert not list(tmp_path.rglob("*.*"))


def test_by_default_about_once_a_minute_and_a_twentieth_of_the_time(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    keeper = CheckpointWriter(tmp_path, ["a"], {}, last=now[0])
    now[0] += 59
    assert not keeper.due(1)
    now[0] += 1
    assert keeper.due(2)

    def slow(*_):
        now[0] += 10

    monkeypatch.setattr(checkpoints, "save_message", slow)
    keeper.keep({"a": {}}, {"a": 2})
    now[0] += 199
    assert not keeper.due(3)
    now[0] += 1
    assert keeper.due(4)


def test_one_slow_round_ends_no_run_long_before_its_time(monkeypatch, tmp_path):
    "What disturbed the machine for one round is forgotten ten rounds later; until then the next may be as slow"
    clock = [1000.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(checkpoints.time, "time", lambda: clock[0])
    writer = CheckpointWriter(tmp_path, ["a"], {}, round_ended=clock[0], until=clock[0] + 200)

    def over_after(seconds):
        clock[0] += seconds
        return writer.over()

    assert not over_after(90)  # at 90 s: the next may end at 180 s
    assert not over_after(5)
    assert over_after(16)  # at 111 s: it may end at 201 s
    assert [over_after(2) for _ in range(8)] == 7 * [True] + [False]  # the slow one is forgotten
    assert not over_after(10)  # at 137 s: 16 s is the slowest of ten
    assert over_after(48)  # at 185 s


def test_a_diverged_run_beside_others_goes_on_as_diverged(tmp_path):
    "It had diverged before the kill, and diverges in the same round again when the run beside it goes on"
    wild, calm = every_run(names=["FedAvg"])
    method = wild.settings["method"]
    wild = replace(
        wild,
        settings=wild.settings | dict(method=method | dict(fields=method["fields"] | dict(lr=1e6))),
    )
    reference = [store.read(p) for p in run_job([wild, calm], tmp_path / "a")]
    with pytest.raises(Killed):
        run_job([wild, calm], tmp_path / "b", checkpoint_rounds=1, tell=killing(3))
    again = [store.read(p) for p in run_job([wild, calm], tmp_path / "b")]
    assert [head["status"] for head, _ in again] == ["diverged", "complete"]
    assert [r["round"] for r in again[1][0]["resumed"]] == [2]
    assert [(h.get("diverged"), rows) for h, rows in again] == [
        (h.get("diverged"), rows) for h, rows in reference
    ]
