"Every way of ending is like Ctrl-C: what is finished is kept, nothing is left behind, and the same command goes on"

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest

from fedrepro.experiments import store
from toy import ROOT, SMALL, until, written

LONG = SMALL | dict(
    base=SMALL["base"] | dict(every=500),
    tiers={
        "smoke": {  # FedAvg's runs are soon over, FedProx's are not
            "base": dict(rounds=500, source="tier: reduced"),
            "methods": {"FedAvg": dict(rounds=1, source="tier: reduced")},
        }
    },
)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.fixture
def write(tmp_path):
    return lambda raw: written(tmp_path / "papers", raw, "demo/t")


def listen():
    "As from a terminal, whatever this process has been told"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(*command, **more):
    env = {k: v for k, v in os.environ.items() if k != "CI"} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listen) | more
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=env,
        text=True,
        start_new_session=True,
        **pipes,
    )


def alive(session):
    with suppress(ProcessLookupError):
        os.killpg(session, 0)
        return True
    return False


def left(results):
    "Names of what is neither a result nor a checkpoint"
    return [
        p.name
        for p in results.rglob("*")
        if p.is_file() and p.suffix != ".jsonl" and p.parent.name != "checkpoints"
    ]


@pytest.mark.parametrize(
    "number, workers, everybody",
    [
        (signal.SIGINT, 2, True),
        (signal.SIGTERM, 2, False),
        (signal.SIGKILL, 2, False),
        pytest.param(signal.SIGHUP, 1, True, marks=pytest.mark.nightly("handled as SIGTERM is")),
    ],
)
def test_a_driver_that_is_ended_keeps_what_is_finished_and_ends_its_workers(
    write, tmp_path, number, workers, everybody
):
    """Ctrl-C, a scheduler, a kill of the driver alone, a closed terminal; pays for a driver and its workers

    One line and an exit code of its own, no lease, no semaphore; a run goes on from its checkpoint. A kill lets nobody say anything."""
    results = tmp_path / "r"
    process = started(
        "-m",
        "fedrepro",
        "run",
        write(LONG),
        "--workers",
        workers,
        "--results",
        results,
        "--checkpoint",
        1,
        "--device",
        "cpu",
    )

    def amid():
        "Each worker is amid a long run, of which two checkpoints are kept: it writes no result and takes no lease"
        kept = Counter(p.name.rpartition("-")[0] for p in results.rglob("checkpoints/*.json"))
        long = [name for name, times in kept.items() if times > 1]
        return len(list(results.rglob("*.jsonl"))) >= workers and len(long) >= workers

    until(lambda: amid() or process.poll() is not None)
    (os.killpg if everybody else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=60)
    until(lambda: not alive(process.pid), 20)
    kept = len(list(results.rglob("*.jsonl")))
    assert out == "" and kept == workers and amid(), err
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number and left(results) == [], err
    *before, last = err.splitlines()
    assert (
        all("complete" in line for line in before)
        and f"{kept} computed, 0 were there; interrupted" in last
        and "the same command goes on" in last
    ), err


LATE = """
import os, signal, sys
from fedrepro.cli.main import interrupts
with interrupts():
    try: os.kill(os.getpid(), signal.SIGTERM); signal.pause()
    except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGINT); signal.pause()
"""


def test_a_second_signal_ends_at_once():
    process = started("-c", LATE)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


def test_what_nohup_ignores_stays_ignored():
    script = "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nfrom fedrepro.cli.main import interrupts\nwith interrupts(): os.kill(os.getpid(), signal.SIGHUP)"
    assert started("-c", script).wait(60) == 0


METHODS = "import sys\nfrom fedrepro.engine.method import FedAvg\n{}class Mine(FedAvg):\n    def init_server(self, federation): {}\n"


@pytest.mark.parametrize(
    "top, hook, words",
    [
        ("sys.exit(0)\n", "pass", "SystemExit: 0"),
        ("", "sys.exit(0)", "SystemExit: 0"),
        (
            "",
            "sys.exit(0) if federation.seed else None; return super().init_server(federation)",
            "SystemExit: 0",
        ),
    ],
)
def test_what_ends_the_program_is_no_success(said, write, tmp_path, top, hook, words):
    "`sys.exit(0)` in a file of methods, in a method before anything is computed, and in one of its runs"
    # the name of a module is taken once a process
    (own := tmp_path / f"{tmp_path.name}.py").write_text(METHODS.format(top, hook))
    spec = write(SMALL | dict(methods={"FedAvg": {}, "Mine": {}}))
    code, _, err = said("--import", own, "run", spec, "--workers", 1, "--results", tmp_path / "r")
    done = [store.read(p)[0]["settings"]["seed"] for p in (tmp_path / "r").rglob("Mine*.jsonl")]
    assert code
    assert words in err
    assert done == ([0] if "seed" in hook else [])


@pytest.mark.parametrize("where", ["closed", "gone", "full"])
def test_nobody_reads_what_is_said(said, write, tmp_path, monkeypatch, where):
    "Stderr closed, or its reader gone, or its disk full: the run is computed all the same. Pays for a driver whose stderr is closed"
    command = [
        "run",
        write(SMALL | dict(methods={"FedAvg": {}})),
        "--workers",
        1,
        "--seeds",
        1,
        "--results",
        tmp_path / "r",
    ]
    monkeypatch.delenv("CI", raising=False)
    if where == "closed":
        started(
            "-m", "fedrepro", *command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(2)
        ).wait(60)
    else:
        read, write = os.pipe()
        os.close(read)
        stream = open(write if where == "gone" else "/dev/full", "w")
        monkeypatch.setattr(sys, "stderr", stream)
        assert said(*command)[0] == 0
        with suppress(OSError):
            stream.close()
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1
