"How much curves swing in their last ten rounds: the F-test against scipy's own numbers and by simulation, and a table of it"
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import f as fisher

from fedrepro.experiments import store
from fedrepro.experiments.specs import load_spec
from fedrepro.verdicts.swings import f_test, swings

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("ours, theirs, runs", [([1.2], .8, 1), ([3., .5, 2.], 1.1, 1), ([.4], .9, 3)])
def test_against_the_distribution_written_out(ours, theirs, runs):
    F, df = np.mean(np.square(ours)) / theirs ** 2, (9 * len(ours), 9 * runs)
    found = f_test(ours, theirs, runs)
    assert found["ratio"] == pytest.approx(math.sqrt(F))
    assert found["p"] == pytest.approx(2 * min(fisher.cdf(F, *df), 1 - fisher.cdf(F, *df)), abs=1e-9)
    for end, q in (("low", .975), ("high", .025)): assert found[end] == pytest.approx(math.sqrt(F / fisher.ppf(q, *df)))
    assert (found["p"] < .05) == (not found["low"] < 1 < found["high"])


def test_a_table_of_swings(tmp_path):
    of = load_spec("fedbss/readings", ROOT / "papers")
    def put(row, swing, seed=0, status="complete"):
        cell = next(c for c in of.runs("small", [row], [seed]) if "2 shards" in c.column)
        rows = [{"round": t, "generalised_accuracy": 50. + swing * (-1) ** t} for t in range(1, cell.rounds + 1)]
        head = dict(settings=cell.settings, run_id=cell.run_id, status=status, cpu="x", device="cpu")
        if status == "diverged": head |= dict(diverged=dict(round=cell.rounds, client=1, norm="inf"))
        store.write(store.run_path(tmp_path, cell), head, rows[:-1] if status == "diverged" else rows)
    for seed, size in ((0, 6.), (1, 5.5)): put("FedAvg", size, seed)
    put("FedBSS, all clients", .07)
    put("FedBSS", 3., status="diverged")
    found = swings(of, "small", tmp_path)
    assert list(found.row) == ["FedAvg"] and found.n[0] == 2 and found.published[0] == 6.30 and found.word[0] == "alike"
    both = swings(of, "small", tmp_path, {"FedBSS, all clients": "FedBSS"}).set_index("row")
    assert both.published["FedBSS, all clients"] == .07 and both.word["FedBSS, all clients"] == "alike"
    other = swings(of, "small", tmp_path, {"FedBSS, all clients": "FedAvg"}).set_index("row")
    assert other.word["FedBSS, all clients"] == "swings less" and other.p["FedBSS, all clients"] < 1e-6
