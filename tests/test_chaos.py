"A sweep under faults loses nothing, computes nothing twice and leaves nothing behind; and the tool that says so can say otherwise"
import os
import random
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from everybody import every_cell
from fedrepro import store
from fedrepro.settings import run_id

CELL = every_cell(names=["FedAvg"])[0]
TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
from chaos import Storm, numbers, possible, surprises  # noqa: E402
from faults import FAULTS, Ledger, damage, read_only, writable  # noqa: E402
from swept import said  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, ps and limits of Linux")


def test_a_short_storm():
    seed = os.environ.get("FEDREPRO_SEED", "0")
    done = subprocess.run([sys.executable, TOOLS / "chaos.py", "--short", "--seeds", seed], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and not done.stderr
    last = re.search(rf"^seed {seed}: (\d+) faults \((.*?)\).* runs, .*: 0 lost, 0 duplicated, 0 wrong, 0 left behind, 0 unexplained", done.stdout, re.M)
    assert last and int(last[1]) >= 4
    assert {"kill a worker", "kill the driver", "fill the disk", "damage the data"} <= {fault[2:] for fault in last[2].split(", ")}
    assert "refused by name, and got again" in done.stdout


# --- the ledger

def content(*last, seed=0):
    settings = CELL.settings | {"seed": seed}
    head = {"settings": settings, "run_id": run_id(settings), "status": "complete", "executor": "sequential", "wall_seconds": 1., "resumed": []}
    return store.encode(head, [{"round": t, "generalised_accuracy": a} for t, a in enumerate((50., 60., 70., *(last or (80.,))), 1)])


@pytest.fixture
def ledger(tmp_path):
    found = Ledger(tmp_path, {"a.jsonl": said(*store.decode(content()))})
    store.write_atomic(tmp_path / "a.jsonl", content())
    found.look(False)
    return found


def trouble(ledger): return len(ledger.lost), len(ledger.twice), len(ledger.wrong), ledger.beside


def test_a_result_that_stays_is_no_trouble(ledger):
    ledger.look(False)
    assert trouble(ledger) == (0, 0, 0, 0) and ledger.missing == []


def test_written_again_is_computed_twice(ledger):
    store.write_atomic(ledger.folder / "a.jsonl", content())
    ledger.look(False)
    assert trouble(ledger) == (0, 1, 0, 0)


def test_two_drivers_may_compute_the_same_run(tmp_path):
    ledger = Ledger(tmp_path, {"a.jsonl": said(*store.decode(content()))})
    for _ in range(2):
        ledger.look(True)
        store.write_atomic(tmp_path / "a.jsonl", content())
    ledger.look(True)
    assert trouble(ledger) == (0, 0, 0, 1)


def test_gone_is_lost(ledger):
    (ledger.folder / "a.jsonl").unlink()
    ledger.look(False)
    assert trouble(ledger) == (1, 0, 0, 0) and ledger.missing == ["a.jsonl"]


@pytest.mark.parametrize("now", [content(80.1), content(seed=1), content()[:-1], b""])
def test_another_content_is_wrong(ledger, now):
    os.unlink(ledger.folder / "a.jsonl")
    ledger.stamps.clear()
    (ledger.folder / "a.jsonl").write_bytes(now)
    ledger.look(False)
    assert trouble(ledger) == (0, 0, 1, 0)


def test_a_damaged_result_may_be_computed_again(ledger):
    for seed in range(20):
        assert ledger.damage("a.jsonl", random.Random(seed)) and ledger.missing == ["a.jsonl"]
        ledger.look(False)
        assert ledger.missing == ["a.jsonl"]
        store.write_atomic(ledger.folder / "a.jsonl", content())
        ledger.look(False)
        assert trouble(ledger) == (0, 0, 0, 0) and ledger.missing == [] and ledger.damages["a.jsonl"] == seed + 1


def test_costs_may_differ():
    head, rows = store.decode(content())
    assert said(head | {"wall_seconds": 9., "resumed": [{}], "executor": "processes"}, rows) == said(head, rows)
    assert said(head | {"status": "diverged"}, rows) != said(head, rows)


def test_damage_always_changes_a_file(tmp_path):
    seen = set()
    for seed in range(60):
        (tmp_path / "x").write_bytes(content())
        seen.add(damage(tmp_path / "x", random.Random(seed)))
        assert (tmp_path / "x").read_bytes() != content()
    assert len(seen) == 5


WRITER = """
import sys, time
print("up", flush=True)
while True:
    try:
        with open(sys.argv[1], "wb") as file: file.write(bytes(100_000))
        print("whole", flush=True)
    except OSError as error: print(error.strerror, flush=True)
    time.sleep(.01)
"""


def test_a_limit_on_files_stands_in_for_a_full_disk(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "x"], stdout=subprocess.PIPE, text=True)
    now = storm(tmp_path).at
    now.drivers = [SimpleNamespace(pid=process.pid, up=True, workers=lambda: [])]
    def until(line): return any(found.strip() == line for found in islice(process.stdout, 1000))
    try:
        assert until("up") and until("whole")
        assert not tmp_path.is_mount() and "no file may be longer" in now.fill_disk() and until("File too large")
        (_, _, take_back), = now.undo
        take_back()
        assert until("whole")
    finally:
        process.kill()
        process.communicate()


def test_a_locked_folder_takes_nothing(tmp_path):
    read_only(tmp_path, True)
    locked = not writable(tmp_path)
    read_only(tmp_path, False)
    assert writable(tmp_path) and locked == ("read-only" in possible(list(FAULTS), tmp_path)) and writable(tmp_path)
    assert locked or os.geteuid() == 0  # root needs a file system that knows chattr +i


# --- what a driver says

def driver(code, *lines, suffered=()):
    return SimpleNamespace(process=SimpleNamespace(returncode=code), lines=["up", *lines], suffered=set(suffered))


FULL = "fedrepro: FedAvg on digits failed: r/x.jsonl: cannot be written (No space left on device)"


@pytest.mark.parametrize("fine", [
    driver(0, "fedrepro: 1 of 2 runs: FedAvg on digits: complete, about 3 s left", "fedrepro: 2 computed, 0 were there"),
    driver(1, FULL, "fedrepro: 0 computed, 1 were there, 1 failed", suffered=["fill the disk"]),
    driver(-9, suffered=["SIGKILL"]), driver(130, "fedrepro: 1 computed, 0 were there; interrupted: ...", suffered=["SIGINT"]),
    driver(2, "fedrepro: MNIST/raw/x is damaged: its MD5 is 1, expected 2", suffered=["damage the data"])])
def test_explained(fine): assert surprises(fine) == []


@pytest.mark.parametrize("strange", [
    driver(0, "Traceback (most recent call last):"), driver(0, "fedrepro: results folder r cannot be written (No space left on device)"),
    driver(1, FULL), driver(1, suffered=["fill the disk"]), driver(-9), driver(130), driver(-15, suffered=["SIGKILL"]),
    driver(1, "fedrepro: FedAvg on digits failed: KeyError: 3 (packs.py:3)", suffered=FAULTS)])
def test_unexplained(strange): assert len(surprises(strange)) == 1


def storm(tmp_path, seed=0, faults=14):
    sweep = SimpleNamespace(reference={f"{i}.jsonl": ({}, []) for i in range(10)})
    return Storm(sweep, seed, faults, tmp_path, list(FAULTS))


def test_a_seed_is_a_schedule(tmp_path):
    first = storm(tmp_path).schedule
    assert first == storm(tmp_path).schedule != storm(tmp_path, seed=1).schedule and {kind for _, _, kind in first} == set(FAULTS)
    assert [after for after, *_ in first] == sorted(after for after, *_ in first) and first[0][0] == 0 and first[-1][0] < 10
    assert {"kill a worker", "kill the driver", "fill the disk", "damage the data"} == {kind for _, _, kind in storm(tmp_path, faults=4).schedule}


def test_what_nobody_needs_is_left_behind(tmp_path):
    now = storm(tmp_path)
    now.at.foreign = {"odd"}
    for name in ("0.jsonl", "1.jsonl.damaged", "odd/inside", "checkpoints/x.json.damaged", "more.jsonl", ".0.jsonl.x.partial", "checkpoints/x-1.json"):
        path = now.ledger.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    left = {p.name for p in now.ledger.folder.rglob("*") if not now.belongs(p)}
    assert left == {"more.jsonl", ".0.jsonl.x.partial", "x-1.json"}
    shutil.rmtree(now.ledger.folder / "checkpoints")
    (now.ledger.folder / "checkpoints").mkdir()
    assert not now.belongs(now.ledger.folder / "checkpoints")


def test_only_what_was_damaged_is_set_aside(tmp_path):
    now = storm(tmp_path)
    now.ledger.damages["0.jsonl"] += 2
    once = "fedrepro: r/0.jsonl: the last line is cut off; set aside as 0.jsonl.damaged\n"
    assert now.damages(once + once.replace(".damaged", ".1.damaged")) == []
    assert len(now.damages(once)) == 1 and len(now.damages(2 * once + once.replace("0.", "1."))) == 1
    now.at.halves.add("abc-000002")
    head = "fedrepro: checkpoint abc-000002: json is damaged; it is set aside\n"
    assert now.damages(2 * once + head) == [] and len(now.damages(2 * once + head.replace("2", "3"))) == 1


def test_seeds_are_numbers():
    assert numbers("7") == [7] and numbers("1..4") == [1, 2, 3, 4] and numbers("1,4") == [1, 4]
