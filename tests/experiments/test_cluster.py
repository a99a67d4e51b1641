"A Dask cluster over TCP: the same results as without one; what dies loses nothing; what cannot work is refused"

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from fedrepro.core.errors import InputError
from fedrepro.core.files import code_digest
from fedrepro.experiments import cluster, runner, store
from fedrepro.experiments.cluster import DIED, LOST, DriverTicket, Pool, connect, outcomes
from fedrepro.experiments.jobs import Job
from fedrepro.experiments.runner import failed
from fedrepro.experiments.leases import lease_of, me
from test_leases import alone, dead, many  # noqa: F401
from test_runner import RUNS, names, rows
from toy import ROOT, until

ENV = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "1h",
}


class Cluster:
    "A scheduler and workers as processes of their own, as somebody starts them by hand"

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes = []
        file = folder / "scheduler.json"
        self.scheduler = self.start(
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--dashboard-address",
            ":0",
            "--no-show",
            "--scheduler-file",
            file,
        )
        until(lambda: file.exists() and file.read_text().strip().endswith("}"))
        self.address = json.loads(file.read_text())["address"]

    def start(self, *command) -> subprocess.Popen:
        log = open(self.folder / f"log{len(self.processes)}", "wb")
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "dask", *map(str, command)],
                cwd=self.folder,
                env=ENV,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
        return self.processes[-1]

    def worker(self, threads=1):
        return self.start(
            "worker",
            self.address,
            "--nthreads",
            threads,
            "--no-nanny",
            "--no-dashboard",
            "--death-timeout",
            60,
        )

    def workers(self, client, n):
        until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == n)

    def end(self):
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def started(folder, workers):
    made = Cluster(folder)
    try:
        for _ in range(workers):
            made.worker()
        with connect(made.address) as client:
            made.workers(client, workers)
            made.pool = Pool(client, report=False)
            yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    "A scheduler and two workers, started once for this file"
    with started(tmp_path_factory.mktemp("cluster"), 2) as made:
        yield made


def plain(folder, runs):
    "Headers without what a run has cost, and rows"
    found = [store.read(store.run_path(folder, r)) for r in runs]
    return [
        (
            {
                k: v
                for k, v in head.items()
                if k not in ("started", "wall_seconds", "peak_memory_mb")
            },
            rows,
        )
        for head, rows in found
    ]


def test_two_workers_over_tcp_write_the_same_files(two, alone, tmp_path):
    heard = []
    progress = runner.Progress.round
    with patch.object(
        runner.Progress, "round", lambda self, *what: heard.append(what) or progress(self, *what)
    ):
        report = runner.compute_runs(many(), tmp_path, quiet=True, pool=two.pool)
    assert report.summary() == "8 computed, 0 were there"
    assert plain(tmp_path, many()) == plain(alone, many())
    assert names(tmp_path) == names(alone)
    assert {run for run, _ in heard} <= {c.run_id for c in many()}
    assert len(heard) > 8
    assert (
        runner.compute_runs(many(), tmp_path, quiet=True, pool=two.pool).summary()
        == "0 computed, 8 were there"
    )


def test_what_is_asked_for_first_is_computed_first(two, tmp_path):
    runs = many()
    before = []
    runner.compute_runs(
        runs, tmp_path, quiet=True, pool=lambda jobs, *more: two.pool(jobs[::-1], *more)
    )
    ended = sorted(runs, key=lambda r: store.run_path(tmp_path, r).stat().st_mtime_ns)
    before = [runs.index(r) for r in ended]
    assert before[0] >= 4 and before[-1] <= 3, before


def test_a_time_budget_counts_for_workers(two, tmp_path):
    report = runner.compute_runs(many(), tmp_path, quiet=True, pool=two.pool, until=time.time() - 1)
    assert len(report.later) == 8
    assert names(tmp_path) == []


# --- refused


def test_workers_that_cannot_work_are_refused(two, tmp_path, monkeypatch):
    def said():
        with pytest.raises(InputError) as error:
            runner.compute_runs(RUNS, tmp_path, quiet=True, pool=two.pool)
        assert "\n" not in str(error.value)
        assert names(tmp_path) == []
        return str(error.value)

    monkeypatch.setattr(cluster, "code_digest", lambda: "other")
    assert said().startswith("worker tcp://127.0.0.1:")
    assert "has other code than the driver" in said()
    monkeypatch.undo()
    monkeypatch.setattr(
        Pool, "check", lambda pool, order: lease_of(order.flag).unlink() or checked(pool, order)
    )
    assert "does not see" in said()
    monkeypatch.undo()
    extra = two.worker(threads=2)
    two.workers(two.pool.client, 3)
    assert "has 2 threads; start it with --nthreads 1" in said()
    os.killpg(extra.pid, signal.SIGKILL)
    two.workers(two.pool.client, 2)
    monkeypatch.setattr(cluster, "ANSWER", 1.0)
    os.killpg(two.processes[1].pid, signal.SIGSTOP)
    try:
        assert "does not answer for 1 s" in said()
    finally:
        os.killpg(two.processes[1].pid, signal.SIGCONT)


checked = Pool.check


def test_the_worker_of_a_killed_driver_stops(tmp_path, dead, monkeypatch):
    "At the end of a round, without a result; nobody else has failed"
    flag = tmp_path / "driver"
    seen = []
    lease_of(flag).write_text(json.dumps(me()))

    def log_event(topic, event):
        seen.append(event[1])
        lease_of(flag).write_text(json.dumps(dead))

    monkeypatch.setattr(
        cluster,
        "dask",
        lambda: SimpleNamespace(
            get_worker=lambda: SimpleNamespace(address="here", log_event=log_event)
        ),
    )
    monkeypatch.setattr(cluster, "GLANCE", 0.0)
    assert [
        o.status
        for o in cluster.work_there(Job(RUNS[:1], tmp_path), DriverTicket(code_digest(), flag))
    ] == ["elsewhere"]
    assert seen == [1]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "nonsense://x", ""])
def test_an_address_where_nobody_answers(address):
    with pytest.raises(InputError, match="no scheduler answers there"):
        connect(address or "tcp://", 0.5)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\xff" * 4096]
)
def test_an_address_where_somebody_else_answers(answer):
    "One that accepts and says nothing, a web server, and garbage"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    held[-1].sendall(answer)

        held = []
        began = time.monotonic()
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(InputError, match="no scheduler answers there"):
            connect(f"127.0.0.1:{server.getsockname()[1]}", 1.0)
        assert time.monotonic() - began < 10
        for each in held:
            each.close()


def test_a_gpu_is_the_workers_affair(monkeypatch):
    "The machine of the driver may have none"

    def none(device):
        raise InputError("no GPU here")

    monkeypatch.setattr(cluster, "pick_device", none)
    monkeypatch.delenv("FEDREPRO_SCHEDULER", raising=False)
    for scheduler in (None, "local"):
        with pytest.raises(InputError, match="no GPU here"):
            cluster.usual_workers("cuda", scheduler)
    assert cluster.usual_workers("cuda", "tcp://host:8786") == 1
    monkeypatch.setenv("FEDREPRO_SCHEDULER", "tcp://host:8786")
    assert cluster.usual_workers("cuda") == 1


def test_without_dask(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r"fedrepro\[sweep\]"), cluster.pool("local"):
        pass


# --- what dies


def test_what_became_of_a_task():
    killed = type("KilledWorker", (Exception,), {})("twice")
    one = Job(RUNS[:1], "")
    done = [runner.Outcome("done", Path("path"))]
    ends = {
        "finished": done,
        "error": failed(one.runs, DIED),
        "cancelled": failed(one.runs, LOST),
        "lost": failed(one.runs, LOST),
    }
    for status, said in ends.items():
        future = SimpleNamespace(status=status, result=lambda: done, exception=lambda: killed)
        assert outcomes(future, one) == said
    future = SimpleNamespace(status="error", exception=lambda: ValueError("a\nb"))
    assert outcomes(future, Job(RUNS[:2], "")) == failed(RUNS[:2], "ValueError: a b")


@pytest.mark.parametrize("deaths", [0, 2, 3])
def test_a_local_worker_that_dies_as_it_starts_is_started_again(deaths, monkeypatch):
    "As the rehearsal kills it; Dask raises what it raises then"
    tries = []

    def start(**asked):
        tries.append(asked)
        if len(tries) > deaths:
            return "a cluster"
        raise RuntimeError("Nanny failed to start.") from RuntimeError(
            "Nanny failed to start worker process"
        )

    monkeypatch.setattr(cluster, "dask", lambda: SimpleNamespace(LocalCluster=start))
    if deaths < 3:
        assert cluster.local_cluster(2) == "a cluster"
        assert len(tries) == deaths + 1
        assert tries[0]["n_workers"] == 2
    else:
        with pytest.raises(
            InputError,
            match=r"^--scheduler local: its workers do not start \(Nanny failed to start worker process\)$",
        ):
            cluster.local_cluster(2)


def test_workers_and_scheduler_die(two, alone, tmp_path):
    "A worker is killed: another computes its run. The scheduler is killed: what is finished stays, the next call computes the rest alone. Last: it ends `two`"
    results, (first, second), alive = tmp_path / "r", two.processes[1:3], []

    def assail(jobs, report, progress):
        listen = Pool.listen

        def watched(pool, heard, futures, report, progress, ours):
            real = heard.get
            seen = []

            def get(timeout):
                what = real(timeout=timeout)
                seen.append(what)
                if len(seen) == 2:
                    os.killpg(first.pid, signal.SIGKILL)
                if len(report.done) == 3:
                    alive.append(second.poll() is None)
                    os.killpg(two.scheduler.pid, signal.SIGKILL)
                return what

            listen(pool, SimpleNamespace(get=get), futures, report, progress, ours)

        with patch.object(Pool, "listen", watched):
            two.pool(jobs, report, progress)

    report = runner.compute_runs(many(), results, quiet=True, pool=assail)
    assert alive[0]
    assert len(report.done) >= 3
    assert report.failed
    assert set(report.failed.values()) == {LOST}
    assert report.exit_code == 1
    there = len(list(results.rglob("*.jsonl")))
    again = runner.compute_runs(many(), results, quiet=True)
    assert len(again.skipped) >= there
    assert not again.failed
    assert rows(results, many()) == rows(alone, many())
    # theirs: `second` may end the run that it was at
    assert len(again.skipped) + len(again.done) + len(again.theirs) == 8
