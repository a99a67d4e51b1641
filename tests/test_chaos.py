"A sweep under faults loses nothing, computes nothing twice and leaves nothing behind; and the tool that says so can say otherwise"
import os
import random
import sys
from pathlib import Path

import pytest

from everybody import every_cell
from fedrepro.experiments import store
from fedrepro.experiments.runs import run_id

CELL = every_cell(names=["FedAvg"])[0]
TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
from chaos import FAULTS, Storm, damage, said  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and mounts of Linux")

def content(last=80., seed=0):
    settings = CELL.settings | {"seed": seed}
    head = {"settings": settings, "run_id": run_id(settings), "status": "complete", "executor": "sequential", "wall_seconds": 1., "resumed": []}
    return store.encode(head, [{"round": t, "generalised_accuracy": a} for t, a in enumerate((50., 60., 70., last), 1)])

@pytest.fixture
def storm(tmp_path):
    "A storm that has seen its only result whole"
    now = Storm(tmp_path / "x.toml", {"a.jsonl": said(*store.decode(content()))}, tmp_path, 0, 6)
    store.write_atomic(now.tier / "a.jsonl", content())
    now.look()
    now.look()
    return now

def trouble(storm): return len(storm.lost), len(storm.twice), len(storm.wrong), len(storm.left())

def test_a_result_that_stays_is_no_trouble(storm): assert trouble(storm) == (0, 0, 0, 0)

@pytest.mark.parametrize("now, found", [(content(), (0, 1, 0, 0)), (content(80.1), (0, 1, 1, 0)), (content(seed=1), (0, 1, 1, 0)), (content()[:-1], (0, 1, 1, 0)), (None, (1, 0, 0, 0))])
def test_written_again_or_otherwise_or_gone(storm, now, found):
    os.unlink(storm.tier / "a.jsonl") if now is None else store.write_atomic(storm.tier / "a.jsonl", now)
    storm.look()
    assert trouble(storm) == found

def test_a_damaged_result_may_be_computed_again(storm):
    storm.kill_all = lambda: "killed"
    for seed in range(20):
        assert storm.damage_result() and not storm.stamps
        storm.look()
        assert not storm.stamps and trouble(storm) == (0, 0, 0, 0)
        store.write_atomic(storm.tier / "a.jsonl", content())
        storm.look()
        assert storm.stamps and trouble(storm) == (0, 0, 0, 0)

def test_what_nobody_needs_is_left_behind(storm):
    for name in ("a.jsonl.damaged", "checkpoints/x.json.damaged", "more.jsonl", ".0.jsonl.x.partial", "checkpoints/x-1.json"):
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
    def schedule(seed): return Storm(tmp_path, {f"{i}.jsonl": () for i in range(10)}, tmp_path, seed, 14).schedule
    assert schedule(0) == schedule(0) != schedule(1) and {kind for _, kind in schedule(0)} == set(FAULTS) - {"fill the disk"}
