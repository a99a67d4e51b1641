"Leases: many drivers on one folder compute every run once, and what a killed one held is taken over"

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedrepro.engine.rounds import AfterRound
from fedrepro.experiments import leases, runner, store
from fedrepro.experiments.jobs import Job
from fedrepro.experiments.leases import (
    Lost,
    clear,
    gone,
    held,
    holder,
    lease_of,
    leases as block,
    fingerprint,
    me,
    take,
    void,
)
from test_runner import RUNS, SPEC, names, rows, small
from toy import ROOT, until

HERE = Path(__file__).parent
DRIVER = """
import json, sys
from test_leases import many
from fedrepro.experiments import runner
folder, workers, rounds = sys.argv[1:]
report = runner.compute_runs(many(int(rounds)), folder, workers=int(workers), quiet=True, checkpoint_rounds=1)
print(json.dumps([len(report.done), len(report.theirs), len(report.skipped), len(report.failed)]))
"""


def many(rounds=2):
    return [small(c, rounds) for c in SPEC.runs("smoke", methods=["FedAvg", "FedProx"], seeds=4)]


def driver(folder, workers=1, rounds=2):
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CI": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, ROOT / "tests", ROOT])),
    }
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, folder, str(workers), str(rounds)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def lease_on(folder, run, who):
    "The lease of `who` on a run"
    lease = lease_of(store.run_path(folder, run))
    lease.parent.mkdir(parents=True)
    lease.write_text(json.dumps(who))
    return lease


def elsewhere():
    return me() | {"machine": "elsewhere"}


@pytest.fixture
def dead():
    "What a process that has ended wrote into its lease"
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from fedrepro.experiments.leases import me; print(json.dumps(me()))",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return json.loads(process.stdout)


# --- one lease


@pytest.mark.skipif(sys.platform != "linux", reason="what /proc says")
def test_a_zombie_process_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = me() | {"pid": process.pid, "born": leases.start_time(process.pid)}
    assert not gone(who)
    process.kill()
    # it is dead, and still has its number
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert gone(who)
    process.communicate()


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "a.jsonl"
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            assert sum(pool.map(take, [path] * 8)) == 1
            assert held(path)
            lease_of(path).unlink()


def test_a_void_lease_passes_to_exactly_one(tmp_path, dead):
    path = tmp_path / "a.jsonl"
    start = threading.Barrier(6)

    def hurry(_):
        start.wait()
        return take(path)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(50):
            lease_of(path).write_text(json.dumps(dead))
            assert sum(pool.map(hurry, range(6))) == 1
            assert json.loads(lease_of(path).read_text())["pid"] == os.getpid()
            assert names(tmp_path) == [".a.jsonl.lease"]
            lease_of(path).unlink()


def test_a_newer_lease_is_not_cleared_in_place_of_the_judged_one(tmp_path, dead, monkeypatch):
    path = tmp_path / "a.jsonl"
    real = leases.new
    lease_of(path).write_text(json.dumps(dead))

    def slow(claim):  # between our judgement and our move somebody else has taken the lease
        real(claim)
        lease_of(path).unlink()
        lease_of(path).write_text(json.dumps(me()))

    monkeypatch.setattr(leases, "new", slow)
    clear(path.parent)
    assert json.loads(lease_of(path).read_text()) == me()
    assert names(tmp_path) == [".a.jsonl.lease"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b"[" * 9999 + b"]" * 9999]
)
def test_a_strange_lease_counts_until_its_age(tmp_path, content):
    path = tmp_path / "a.jsonl"
    lease_of(path).write_bytes(content)
    assert held(path)
    assert not take(path)
    os.utime(lease_of(path), (0, 0))
    assert void(lease_of(path))
    assert not held(path)
    assert take(path)


def test_a_lease_from_the_future_is_void_when_it_has_not_moved_for_long(tmp_path, monkeypatch):
    "So is one that nobody may read, in a folder that tells no time; one that moves is not"
    path = tmp_path / "a.jsonl"
    now = [0.0]
    lease_of(path).write_text(json.dumps(elsewhere()))
    os.utime(lease_of(path), (4e9, 4e9))

    def no_time(_):
        raise PermissionError

    monkeypatch.setattr(leases, "age", no_time)
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    for passed, there in ((0, True), (80, True), (80, False)):
        now[0] += passed
        assert held(path) is there
    os.utime(lease_of(path), (4e9 + 10, 4e9 + 10))
    assert held(path)
    now[0] += 91
    assert take(path)
    assert holder(lease_of(path)) == me()


def test_a_claim_of_one_who_died_taking_over_is_in_nobodys_way(tmp_path, dead):
    path = tmp_path / "a.jsonl"
    lease_of(path).write_text(json.dumps(dead))
    inode, stamp = fingerprint(lease_of(path))
    (tmp_path / f".a.jsonl.lease.{inode}-{stamp}.partial").write_text(json.dumps(dead))
    assert take(path)
    assert names(tmp_path) == [".a.jsonl.lease"]


def test_ones_own_alone_is_released_and_kept_alive(tmp_path):
    path = tmp_path / "a.jsonl"
    other = json.dumps(elsewhere())
    with block([path]) as ours:
        ours.check()
        lease_of(path).write_text(other)
        os.utime(lease_of(path), (0, 0))
        ours.beat()
        assert lease_of(path).stat().st_mtime == 0
        with pytest.raises(Lost, match="a.jsonl has passed to somebody else"):
            ours.check()
    assert lease_of(path).read_text() == other


def test_a_holder_without_progress_gives_no_sign_of_life(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    now = [0.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])

    def lives():
        os.utime(lease_of(path), (0, 0))
        ours.beat()
        return lease_of(path).stat().st_mtime > 0

    with block([path]) as ours:
        now[0] += 3000
        assert lives()
        ours.progress()
        now[0] += 20_000
        assert lives()  # a round has taken 3,000 s
        now[0] += 20_000
        assert not lives()
        ours.progress()
        assert lives()


def test_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 0.05)
    path = tmp_path / "a.jsonl"
    with block([path]) as ours:
        assert ours == {path}
        os.utime(lease_of(path), (0, 0))
        until(lambda: lease_of(path).stat().st_mtime > 1, 10)
    assert names(tmp_path) == []


def at_each_line(look, work):
    """Do `work()`, with `look()` before each line of leases.py that it executes

    An interrupt at a line, or what others see when the process is killed there, is found by asking at all of them."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != leases.__file__:
            return None
        if event == "line":
            look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("stale", [False, True])
def test_a_lease_is_never_there_without_a_name(tmp_path, dead, stale):
    "Whenever its process is killed, it stands in nobody's way"
    path = tmp_path / "a.jsonl"
    lines = []
    if stale:
        lease_of(path).write_text(json.dumps(dead))

    def look():
        lines.append(holder(lease_of(path)))
        assert lines[-1] or not lease_of(path).exists()

    assert at_each_line(look, lambda: take(path))
    assert len(lines) > 10
    assert holder(lease_of(path)) == me()


def test_without_hard_links_a_lease_is_taken_as_well(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"

    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with block([path]) as ours:
        assert ours == {path}
        assert holder(lease_of(path)) == me()
        with block([path]) as theirs:
            assert theirs == set()
    assert names(tmp_path) == []


def test_an_interrupt_at_any_line_leaves_no_lease(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = []
    me()  # asks once what machine this is
    whole = block([path])
    at_each_line(lambda: lines.append(1), whole.__enter__)
    assert holder(lease_of(path)) == me()
    whole.__exit__(None, None, None)
    for stop in range(len(lines)):
        left = iter(lines[:stop])

        def look():
            if next(left, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            at_each_line(look, block([path]).__enter__)
        assert not lease_of(path).exists(), stop


@pytest.mark.parametrize("step", ["open", "write"])
def test_without_a_place_for_leases_the_work_goes_on(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, step, full)
        assert take(tmp_path / "a.jsonl")
        with block([tmp_path / "a.jsonl"]) as ours:
            assert ours == {tmp_path / "a.jsonl"}
    assert names(tmp_path) == []


def test_leftovers_of_the_dead_are_removed(tmp_path, dead):
    for name, who in [("a", dead), ("b", me()), ("c", dead | {"machine": "elsewhere"})]:
        lease_of(tmp_path / name).write_text(json.dumps(who))
    runner.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".b.lease", ".c.lease"]


# --- many drivers


@pytest.mark.parametrize("there", ["a lease", "a result"])
def test_one_that_stood_still_leaves_what_others_took(alone, tmp_path, there):
    "Between two rounds its lease passes to somebody, or somebody has even finished: it writes nothing, and removes nothing"
    run = many()[0]
    path = store.run_path(tmp_path, run)
    other = json.dumps(elsewhere())

    def stand_still(snapshot):
        if snapshot.round != 1:
            return
        lease_of(path).unlink()
        if there == "a lease":
            lease_of(path).write_text(other)
        else:
            path.write_bytes(store.run_path(alone, run).read_bytes())
        os.utime(lease_of(path) if there == "a lease" else path, (1, 1))

    found = runner.attempt(Job([run], tmp_path), [AfterRound(stand_still)])
    assert [o.status for o in found] == ["elsewhere"]
    left = lease_of(path) if there == "a lease" else path
    assert names(tmp_path) == [left.name]
    assert left.stat().st_mtime == 1


def test_a_void_lease_that_cannot_be_taken_is_named(tmp_path, monkeypatch, dead):
    "Somebody else's folder, say: the run has failed at the second look, the others are computed"
    lease = lease_on(tmp_path, RUNS[0], dead)

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    def take_over(lease):
        with monkeypatch.context() as m:
            m.setattr(os, "replace", refuse)
            return real(lease)

    real = leases.take_over
    monkeypatch.setattr(leases, "take_over", take_over)
    report = runner.compute_runs(RUNS[:2], tmp_path, quiet=True)
    (why,) = report.failed.values()
    assert report.exit_code == 1
    assert len(report.done) == 1
    assert list(report.failed) == [RUNS[0]]
    assert f"the lease of process {dead['pid']} on " in why
    assert str(lease) in why
    assert "remove the file" in why
    assert "last sign of life 20" in why


def test_it_is_said_who_is_waited_for(tmp_path, monkeypatch, capsys):
    lease = lease_on(tmp_path, RUNS[0], me() | {"machine": "elsewhere now"})
    monkeypatch.setattr(runner, "QUIETLY", -1.0)
    monkeypatch.setattr(runner.time, "sleep", lambda _: lease.unlink())
    monkeypatch.delenv("CI", raising=False)
    runner.compute_runs(RUNS[:1], tmp_path)
    said = [line for line in capsys.readouterr().err.splitlines() if "waiting" in line]
    assert len(said) == 1
    assert (
        f"{RUNS[0].describe()} is held by process {os.getpid()} on elsewhere, last sign of life 20"
        in said[0]
    )
    assert "after 90 s" in said[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    runner.compute_runs(many(), folder, quiet=True)
    return folder


def test_what_others_compute_is_left_to_them_and_waited_for(tmp_path, monkeypatch):
    first = RUNS[0]
    looks = []
    lease = lease_on(tmp_path, first, elsewhere())
    report = runner.compute_runs(RUNS, tmp_path, quiet=True, wait=False)
    assert report.summary() == "3 computed, 0 were there, 1 in the hands of others"
    assert report.elsewhere == [first]
    assert report.exit_code == 0
    report = runner.compute_runs(RUNS, tmp_path, quiet=True, until=time.time() + 2)
    assert report.summary() == "0 computed, 3 were there, 1 left for another time"

    def glance(_):  # it fails there: its lease ends without a result
        looks.append(held(store.run_path(tmp_path, first)))
        lease.unlink()

    monkeypatch.setattr(runner.time, "sleep", glance)
    report = runner.compute_runs(RUNS, tmp_path, quiet=True)
    assert report.summary() == "1 computed, 3 were there"
    assert looks == [True]


def test_what_others_finish_is_counted_as_theirs(alone, tmp_path, monkeypatch):
    runs = many()
    lease = lease_on(tmp_path, runs[0], elsewhere())

    def glance(_):
        store.run_path(tmp_path, runs[0]).write_bytes(store.run_path(alone, runs[0]).read_bytes())
        lease.unlink()

    monkeypatch.setattr(runner.time, "sleep", glance)
    report = runner.compute_runs(runs, tmp_path, quiet=True)
    assert report.summary() == "7 computed, 0 were there, 1 computed by others"
    assert rows(tmp_path, runs) == rows(alone, runs)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX sessions and signals")
def test_three_drivers_share_the_work_and_take_over_what_a_killed_one_held(tmp_path):
    """Every run is computed once. The first dies in the middle of its first run, while the others wait for it or are at other runs.

    Pays for three drivers, one with a pool"""
    folder = tmp_path / "r"
    rounds = 6
    killed = driver(folder, rounds=rounds)
    until(lambda: list(folder.rglob("*-000001.json")))  # a checkpoint: it is in the middle of a run
    os.killpg(killed.pid, signal.SIGSTOP)
    (lease,) = folder.rglob(".*.lease")
    others = [driver(folder, workers, rounds) for workers in (1, 2)]
    until(lambda: len(list(folder.rglob(".*.lease"))) >= 3)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    counts = []
    for process in others:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and not err, err.decode()
        counts.append(json.loads(out))
    assert sum(done for done, *_ in counts) == 8 and all(
        sum(c) == 8 and not c[3] for c in counts
    ), counts
    assert all(store.is_complete(store.run_path(folder, c)) for c in many(rounds))
    assert not lease.exists()
    assert all(n.endswith(".jsonl") and n[0] != "." for n in names(folder)), names(folder)
