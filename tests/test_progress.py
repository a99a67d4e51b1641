"What is said while runs are computed: all of them, each table's, with the time left"
import contextlib
import io
from dataclasses import replace

import pytest

from fedrepro.experiments import progress
from fedrepro.experiments.progress import Progress
from fedrepro.experiments.specs import load_spec

CELLS = load_spec("fedccfa/table2").runs("smoke", ["FedAvg", "FedCCFA"], 2)
MORE = [replace(c, table="fedccfa/table6") for c in CELLS[2:]] + [replace(CELLS[0], table="fedccfa/table6", seed=9, settings=CELLS[0].settings | {"seed": 9})]


@pytest.fixture
def clock(monkeypatch):
    "Seconds that only a test lets pass"
    now = [0.]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("CI", raising=False)
    return now


def complete(seen: Progress, cell):
    for n in range(1, cell.rounds + 1): seen.round(cell.run_id, n)
    with contextlib.redirect_stderr(io.StringIO()) as heard: seen.finish(cell.run_id, "complete")
    return heard.getvalue()


def test_bars(clock, monkeypatch):
    "At a terminal, and nowhere else: one for all, one for each table, one for each run in progress"
    with Progress(CELLS + MORE) as seen: assert seen.bars is None
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    with Progress(CELLS + MORE, quiet=True) as seen: assert seen.bars is None
    with Progress(CELLS + MORE) as seen:
        clock[0] = 10.
        complete(seen, CELLS[2])
        seen.round(CELLS[3].run_id, 1)
        bars = {t.description: (t.completed, t.total, t.fields["left"]) for t in seen.bars.tasks}
    rounds = CELLS[0].rounds
    part = 10 / (rounds + 1)  # seconds a round
    assert bars == {"1 of 5 runs": (rounds + 1, 5 * rounds, f"about {part * (4 * rounds - 1):.0f} s left"),
                    "fedccfa/table2 1 of 4 runs": (rounds + 1, 4 * rounds, f"about {part * (3 * rounds - 1):.0f} s left"),
                    "fedccfa/table6 1 of 3 runs": (rounds + 1, 3 * rounds, f"about {part * (2 * rounds - 1):.0f} s left"),
                    CELLS[3].describe(): (1, rounds, "")}


def test_a_line_in_jupyterlab(clock, monkeypatch, capsys):
    "Shown to a person who runs a cell, and gone when it ends; papermill's kernels have no session name"
    said = []
    class Handle:
        def update(self, data, raw): said.append(data["text/plain"])
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: Handle())
    for session in ({}, {"JPY_SESSION_NAME": "page.ipynb"}):
        for name, value in session.items(): monkeypatch.setenv(name, value)
        with Progress(CELLS[:2]) as seen:
            for n in range(1, CELLS[0].rounds + 1):
                clock[0] += 1
                seen.round(CELLS[0].run_id, n)
            seen.finish(CELLS[0].run_id, "complete")
        assert bool(said) == bool(session)
        if not session: assert "1 of 2 runs" in capsys.readouterr().err
    assert said[-2].startswith("███") and "1 of 2 runs, 12 of 24 rounds, about 12 s left" in said[-2] and said[-1] == ""
    assert capsys.readouterr().err == ""


def test_rounds_that_were_there_do_not_count_for_the_pace(clock):
    seen, rounds = Progress(CELLS), CELLS[0].rounds
    seen.round(CELLS[0].run_id, rounds - 1)  # kept by an earlier process
    assert seen.left() == ""
    clock[0] = 2.
    seen.round(CELLS[0].run_id, rounds)
    assert seen.left() == f"about {progress.duration(2 * 3 * rounds)} left"
