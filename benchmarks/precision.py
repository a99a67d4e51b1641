"""What bf16 does to accuracies: the small runs of FedCCFA's tables on Fashion-MNIST with 20 clients, again in bf16.

    python -m benchmarks.precision [--tables 2,1] [--workers N]

The runs go to benchmarks/precision/, beside no published number; those that are there are skipped. The page on speed compares them
with the float32 runs of the same settings and seeds in papers/fedccfa/results."""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fedrepro.core.errors import InputError
from fedrepro.experiments import store
from fedrepro.experiments.runner import compute_runs
from fedrepro.experiments.runs import PlannedRun
from fedrepro.experiments.specs import load_spec

FOLDER = Path(__file__).resolve().parent/"precision"
METHODS, COLUMN, TIER, SEEDS = ("FedAvg", "FedCCFA"), "Fashion-MNIST, 20 clients", "small", [0, 1, 2]


def pairs(table: int) -> list[tuple[PlannedRun, PlannedRun]]:
    "(float32, bf16) of every method and seed in a table of FedCCFA: the settings differ in nothing else"
    cells = load_spec(f"fedccfa/table{table}").runs(TIER, METHODS, SEEDS)
    return [(c, replace(c, settings=c.settings | {"precision": "bf16"})) for c in cells if c.column == COLUMN]


def stored(table: int) -> list[tuple[PlannedRun, list[dict], list[dict]]]:
    "(bf16 run, float32 rows, bf16 rows) of all pairs of which both are stored"
    theirs = load_spec(f"fedccfa/table{table}").results
    paths = [(b, store.run_path(theirs, a), store.run_path(FOLDER, b)) for a, b in pairs(table)]
    return [(b, store.read(x)[1], store.read(y)[1]) for b, x, y in paths if x.exists() and y.exists()]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="2", metavar="A,B")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args(argv)
    try:
        for table in asked.tables.split(","):
            report = compute_runs([b for _, b in pairs(int(table))], FOLDER, workers=asked.workers)
            if report.failed: return 1
    except (InputError, ValueError) as error: parser.error(str(error))
    return 0


if __name__ == "__main__": sys.exit(main())
