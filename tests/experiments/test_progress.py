"What is said while runs are computed: how many have ended, and the time left"

import contextlib
import io

import pytest

from fedrepro.experiments import progress
from fedrepro.experiments.progress import Progress
from fedrepro.experiments.specs import load_spec

RUNS = load_spec("fedccfa/table2").runs("smoke", ["FedAvg", "FedCCFA"], 2)


@pytest.fixture
def clock(monkeypatch):
    "Seconds that only a test lets pass"
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("CI", raising=False)
    return now


def complete(seen: Progress, run):
    for n in range(1, run.rounds + 1):
        seen.round(run.run_id, n)
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        seen.finish(run.run_id, "complete")
    return heard.getvalue()


def test_a_bar_at_a_terminal(clock, monkeypatch):
    "It replaces itself, names the run that has moved last, and goes when all is done"
    said = []

    class Status:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            said.append("gone")

        def update(self, text):
            said.append(text.plain)

    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("rich.console.Console.status", Status)
    with Progress(RUNS) as seen:
        clock[0] = 10.0
        seen.round(RUNS[3].run_id, 1)
        clock[0] = 14.0
        for n in range(2, 6):
            seen.round(RUNS[3].run_id, n)
        clock[0] = 15.0
        complete(seen, RUNS[2])
    rounds = RUNS[0].rounds
    what = f"0 of 4 runs, 1 of {4 * rounds} rounds, {RUNS[3].describe()}"
    assert said[0].startswith("░░") and said[0].endswith(what), "ten seconds of start are no pace"
    assert said[-2].startswith("█" * (30 * (rounds + 5) // (4 * rounds)) + "░")
    assert "1 of 4 runs" in said[-2]
    assert said[-1] == "gone"


def test_a_line_in_jupyterlab(clock, monkeypatch, capsys):
    "Shown to a person who runs a cell, and gone when it ends; papermill's kernels have no session name"
    said = []

    class Handle:
        def update(self, data, raw):
            said.append(data["text/plain"])

    monkeypatch.setattr("IPython.display.display", lambda *_, **__: Handle())
    for session in ({}, {"JPY_SESSION_NAME": "page.ipynb"}):
        for name, value in session.items():
            monkeypatch.setenv(name, value)
        with Progress(RUNS[:2]) as seen:
            for n in range(1, RUNS[0].rounds + 1):
                clock[0] += 1
                seen.round(RUNS[0].run_id, n)
            seen.finish(RUNS[0].run_id, "complete")
        assert bool(said) == bool(session)
        if not session:
            assert "1 of 2 runs" in capsys.readouterr().err
    assert said[-2].startswith("███")
    assert f"1 of 2 runs, 12 of 24 rounds, {RUNS[0].describe()}, about 12 s left" in said[-2]
    assert said[-1] == ""
    assert capsys.readouterr().err == ""


def test_no_time_left_is_guessed_from_the_start(clock):
    "A start of 10 s and rounds of a quarter of a second: after the fifth round the guess is right, before there is none"
    seen = Progress(RUNS)
    rounds = RUNS[0].rounds
    for n in range(1, rounds + 1):
        clock[0] = 10 + 0.25 * n
        seen.round(RUNS[1].run_id, n)
        left = f", about {progress.duration(0.25 * (4 * rounds - n))} left"
        assert seen.text() == "0 of 4 runs" + left * (n >= 5), n


def test_rounds_that_were_there_do_not_count_for_the_pace(clock):
    seen = Progress(RUNS)
    rounds = RUNS[0].rounds
    seen.round(RUNS[0].run_id, rounds - 5)  # kept by an earlier process
    assert seen.text() == "0 of 4 runs"
    for n in range(4, -1, -1):
        clock[0] += 2.0
        seen.round(RUNS[0].run_id, rounds - n)
    assert seen.text() == f"0 of 4 runs, about {progress.duration(2 * 3 * rounds)} left"
    seen.quiet = True
    seen.finish(RUNS[1].run_id, "failed")
    assert seen.text() == f"1 of 4 runs, about {progress.duration(2 * 2 * rounds)} left"
