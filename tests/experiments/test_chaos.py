"A sweep under faults loses nothing, computes nothing twice and leaves nothing behind; and the tool that says so can say otherwise"

import faulthandler
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from chaos import FAULTS, PATIENCE, Storm, damage, said
from everybody import every_run
from fedrepro.core.trees import same_bits
from fedrepro.data import datasets, partition
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import run
from fedrepro.executors import processes
from fedrepro.experiments import store
from fedrepro.experiments.runs import run_id
from fedrepro.models import networks

RUN = every_run(names=["FedAvg"])[0]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and mounts of Linux")


def content(last=80.0, seed=0):
    settings = RUN.settings | {"seed": seed}
    head = {
        "settings": settings,
        "run_id": run_id(settings),
        "status": "complete",
        "executor": "sequential",
        "wall_seconds": 1.0,
        "resumed": [],
    }
    return store.encode(
        head,
        [
            {"round": t, "generalised_accuracy": a}
            for t, a in enumerate((50.0, 60.0, 70.0, last), 1)
        ],
    )


@pytest.fixture
def storm(tmp_path):
    "A storm that has seen its only result whole"
    now = Storm(tmp_path / "x.toml", {"a.jsonl": said(*store.decode(content()))}, tmp_path, 0, 6)
    store.write_atomic(now.tier / "a.jsonl", content())
    now.look()
    now.look()
    return now


def trouble(storm):
    return len(storm.lost), len(storm.twice), len(storm.wrong), len(storm.left())


def test_a_result_that_stays_is_no_trouble(storm):
    assert trouble(storm) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "now, found",
    [
        (content(), (0, 1, 0, 0)),
        (content(80.1), (0, 1, 1, 0)),
        (content(seed=1), (0, 1, 1, 0)),
        (content()[:-1], (0, 1, 1, 0)),
        (None, (1, 0, 0, 0)),
    ],
)
def test_written_again_or_otherwise_or_gone(storm, now, found):
    os.unlink(storm.tier / "a.jsonl") if now is None else store.write_atomic(
        storm.tier / "a.jsonl", now
    )
    storm.look()
    assert trouble(storm) == found


def test_a_damaged_result_may_be_computed_again(storm):
    storm.kill_all = lambda: "killed"
    for seed in range(20):
        assert storm.damage_result()
        assert not storm.stamps
        storm.look()
        assert not storm.stamps
        assert trouble(storm) == (0, 0, 0, 0)
        store.write_atomic(storm.tier / "a.jsonl", content())
        storm.look()
        assert storm.stamps
        assert trouble(storm) == (0, 0, 0, 0)


def test_what_nobody_needs_is_left_behind(storm):
    for name in (
        "a.jsonl.damaged",
        "checkpoints/x.json.damaged",
        "more.jsonl",
        ".0.jsonl.x.partial",
        "checkpoints/x-1.json",
    ):
        (storm.tier / name).parent.mkdir(exist_ok=True)
        (storm.tier / name).touch()
    assert {Path(p).name for p in storm.left()} == {"more.jsonl", ".0.jsonl.x.partial", "x-1.json"}


def test_damage_always_changes_a_file(tmp_path):
    seen = set()
    for seed in range(60):
        (tmp_path / "x").write_bytes(content())
        seen.add(damage(tmp_path / "x", random.Random(seed)))
        assert (tmp_path / "x").read_bytes() != content()
    assert len(seen) == 3


def test_a_seed_is_a_schedule(tmp_path):
    def schedule(seed):
        return Storm(tmp_path, {f"{i}.jsonl": () for i in range(10)}, tmp_path, seed, 14).schedule

    assert schedule(0) == schedule(0) != schedule(1)
    assert {kind for _, kind in schedule(0)} == set(FAULTS) - {"fill the disk"}


@pytest.fixture
def bounded():
    "A hang says where it is, and ends the test run"

    def renew(seen):
        print(dict(seen), flush=True)
        faulthandler.dump_traceback_later(4 * PATIENCE, exit=True)

    yield renew
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.nightly("some minutes")
def test_killed_workers_hold_up_nobody(monkeypatch, bounded):
    """Half of them at random moments of a run, half in the midst of large answers; pays for a worker after each death

    Forty, or as many as FEDREPRO_KILLS says."""
    # a task that is hit three times would fail, as it should
    monkeypatch.setattr(processes, "TRIES", 10**6)
    kills = int(os.environ.get("FEDREPRO_KILLS", 40))
    large = 1 << 24
    rng = random.Random(0)
    struck = Counter()
    wrong = 0
    data = datasets.load("digits")
    net = networks.network("feddc_mlp", 10, (1, 8, 8))
    cut = partition.partition("iid", data.train_y.numpy(), data.test_y.numpy(), clients=8)
    federation = Federation(data, net, cut)
    method = FedAvg(lr=0.05, epochs=5, batch_size=8)
    alone = run(method, federation, 2).snapshot.server

    def writers():
        "Workers that stand still in the midst of an answer, because nobody reads it"
        with suppress(OSError):
            return [
                w
                for w in pool.pool.workers.values()
                if "send" in Path(f"/proc/{w.process.pid}/wchan").read_text()
            ]

    def strike(staff):
        if not any(worker.ready for worker in staff):
            return
        worker = rng.choice(staff)
        when = "wrote" if staff == writers() else "computed" if worker.ready else "started"
        with suppress(OSError):
            os.kill(worker.process.pid, signal.SIGKILL)  # it may have ended just now
        struck[when] += 1

    def storm():
        while struck.total() < kills / 2:
            time.sleep(rng.uniform(0, 1))
            strike(list(pool.pool.workers.values()))

    with processes.Processes(federation, 4) as pool:
        (thread := Thread(target=storm, daemon=True)).start()
        while thread.is_alive():
            bounded(struck)
            wrong += not same_bits(run(method, federation, 2, executor=pool).snapshot.server, alone)
        while struck.total() < kills:
            bounded(struck)
            for _, kind, what in pool.pool.work([processes.dumps((bytes, (large,)))] * 8):
                wrong += kind == "done" and len(what) != large
                late = time.monotonic() + 3
                while struck.total() < kills and time.monotonic() < late and not writers():
                    time.sleep(0.01)
                if struck.total() < kills:
                    strike(writers() or [])
    print(dict(struck))
    assert not wrong
    assert struck.total() == kills
    assert struck["wrote"] > kills / 4
