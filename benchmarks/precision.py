"""What bf16 does to accuracies: small runs of FedCCFA's tables on Fashion-MNIST again in bf16.

    python -m benchmarks.precision [--tables 2,1] [--clients 100,20] [--workers N]

The runs go to benchmarks/precision/, beside no published number; those that are there are skipped. The page on speed compares them
with float32 runs of the same settings and seeds: those in papers/fedccfa/results where there are, else computed here too."""
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
METHODS, TIER, SEEDS = ("FedAvg", "FedCCFA"), "small", [0, 1, 2]


def pairs(table: int, clients: int) -> list[tuple[PlannedRun, PlannedRun]]:
    "(float32, bf16) of every method and seed in a table of FedCCFA: the settings differ in nothing else"
    cells = load_spec(f"fedccfa/table{table}").runs(TIER, METHODS, SEEDS)
    return [(c, replace(c, settings=c.settings | {"precision": "bf16"})) for c in cells
            if c.column == f"Fashion-MNIST, {clients} clients"]


def place(cell: PlannedRun) -> Path:
    "The file of a run: among the paper's results if it is there, else here"
    theirs = store.run_path(load_spec(cell.table).results, cell)
    return theirs if theirs.exists() else store.run_path(FOLDER, cell)


def stored(table: int, clients: int) -> list[tuple[PlannedRun, tuple, tuple]]:
    "(bf16 run, float32 header and rows, bf16 header and rows) of all pairs of which both are stored"
    paths = [(b, place(a), place(b)) for a, b in pairs(table, clients)]
    return [(b, store.read(x), store.read(y)) for b, x, y in paths if x.exists() and y.exists()]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="2", metavar="A,B")
    parser.add_argument("--clients", default="100", metavar="N,M")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args(argv)
    try:
        for clients in asked.clients.split(","):
            both = [pair for table in asked.tables.split(",") for pair in pairs(int(table), int(clients))]
            cells = [b for _, b in both] + [a for a, _ in both if place(a).is_relative_to(FOLDER)]
            if compute_runs(cells, FOLDER, workers=asked.workers).failed: return 1
    except (InputError, ValueError) as error: parser.error(str(error))
    return 0


if __name__ == "__main__": sys.exit(main())
