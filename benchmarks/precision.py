"""What bf16 does to accuracies: runs of FedCCFA's Table 2, a hundred clients at tier small, in float32 and in bf16.

    python -m benchmarks.precision [--networks fedccfa_fmnist,fedccfa_cifar] [--workers N]

Runs that are stored are skipped: float32 ones among the paper's results, all others in benchmarks/precision/, beside no
published number. The tier has no column of CIFAR-10; it is made from that of Fashion-MNIST, with 12 rounds in place of
40. The page on speed says what came out."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

from fedrepro.core.errors import InputError, choice
from fedrepro.core.folders import spec_path
from fedrepro.experiments import store
from fedrepro.experiments.runner import compute_runs
from fedrepro.experiments.runs import PlannedRun
from fedrepro.experiments.spec_files import read_spec
from fedrepro.experiments.specs import Spec, load_spec, spec_from
from fedrepro.verdicts.verdicts import default_margin, verdict_words

FOLDER = Path(__file__).resolve().parent / "precision"
METHODS, TIER, SEEDS, NETWORKS = (
    ("FedAvg", "FedCCFA"),
    "small",
    [0, 1, 2],
    ("fedccfa_fmnist", "fedccfa_cifar"),
)
METRIC = "generalised_accuracy"


def spec() -> Spec:
    "Table 2 at tier small, with a hundred clients only, and with CIFAR-10 too"
    path = spec_path("fedccfa/table2")
    raw = read_spec(path)
    columns = raw["tiers"][TIER]["columns"]
    hundred = next(c for c in columns if c["clients"] == 100)
    other = {
        "dataset": "CIFAR-10",
        "network": "fedccfa_cifar",
        "published": {"dataset": "CIFAR-10", "clients": 100},
        "rounds": {"value": 12, "source": "tier: reduced from 200"},
        "drift_round": {"value": 6, "source": "tier: reduced from 100"},
    }
    columns[:] = [hundred, hundred | other]
    return spec_from(raw, path)


def pairs(network: str) -> list[tuple[PlannedRun, PlannedRun]]:
    "(float32, bf16) of every method and seed: the settings differ in nothing else"
    runs = [r for r in spec().runs(TIER, METHODS, SEEDS) if r.settings["network"] == network]
    return [(r, replace(r, settings=r.settings | {"precision": "bf16"})) for r in runs]


def place(run: PlannedRun) -> Path:
    "The file of a run: among the paper's results if it is there, else here"
    theirs = store.run_path(load_spec("fedccfa/table2").results, run)
    return theirs if theirs.exists() else store.run_path(FOLDER, run)


def last(run: PlannedRun) -> float:
    "The accuracy (%) that a stored run ends with"
    return store.read(place(run))[1][-1][METRIC]


def accuracies(network: str, method: str) -> tuple[list[float], list[float]]:
    "What the stored runs end with, seed by seed: float32, bf16"
    both = [
        pair
        for pair in pairs(network)
        if pair[0].row == method and all(place(run).exists() for run in pair)
    ]
    return [last(a) for a, _ in both], [last(b) for _, b in both]


@dataclass(frozen=True)
class Equivalence:
    "What bf16 changes, seed by seed, and the word that the rule of verdicts has for it; numbers in accuracy points"

    word: str
    difference: float  # bf16 minus float32, mean over the seeds
    far_end: float  # the far end of its 90 % interval
    margin: float  # below which a difference does not matter


def judged(exact: list[float], rough: list[float]) -> Equivalence:
    "The verdict on the differences: both precisions of a seed begin with one model and see the same batches"
    d, n, margin = np.subtract(rough, exact), len(exact), default_margin(float(np.mean(exact)))
    se = float(d.std(ddof=1)) / n**0.5
    far_end = abs(float(d.mean())) + float(stats.t.ppf(0.95, n - 1)) * se
    return Equivalence(
        str(verdict_words(d.mean(), se, n - 1, margin)), float(d.mean()), far_end, margin
    )


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS), metavar="A,B")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args(argv)
    try:
        for network in asked.networks.split(","):
            both = pairs(choice(network, NETWORKS, "network"))
            runs = [run for pair in both for run in pair if place(run).is_relative_to(FOLDER)]
            if compute_runs(runs, FOLDER, workers=asked.workers).failed:
                return 1
    except (InputError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
