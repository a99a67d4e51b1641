"""What a sweep costs beside its runs: many tiny runs, here, in worker processes and on a Dask cluster of this machine.

    python tools/overhead.py --runs 1000 --workers 2

For each way: seconds in all, the runs' own seconds (as their files say), the seconds in which the workers start (all of
a pass of one run a worker, but for the run), and what is left of the time a run. Then the speed of the workers over one
process, on longer runs. Ways take turns; times are of this machine as it is now."""
import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from fedrepro import store
from fedrepro.cluster import pool
from fedrepro.experiments import load_spec
from fedrepro.runner import run_cells


def cells(runs: int, rounds: int) -> list:
    "Runs of FedAvg on digits with four clients, each with a seed of its own; those of one round are tiny"
    cell = load_spec("fedccfa/table2").cells("smoke", ["FedAvg"], 1)[0]
    s = cell.settings | {"rounds": rounds, "every": rounds, "drift": {"name": "none"}}
    if rounds == 1: s["method"] = s["method"] | {"fields": s["method"]["fields"] | {"epochs": 1, "batch_size": 64}}
    s["partition"] = s["partition"] | {"clients": 4}
    return [replace(cell, seed=seed, settings=s | {"seed": seed}) for seed in range(runs)]


def timed(todo: list, workers: int, scheduler: str | None) -> tuple[float, float]:
    "(seconds from the first look to the last file, the runs' own seconds)"
    with tempfile.TemporaryDirectory() as folder, pool(scheduler, None, workers, quiet=True) as tasks:
        started = time.perf_counter()
        report = run_cells(todo, folder, workers=workers, quiet=True, how="sequential", pool=tasks)
        seconds = time.perf_counter() - started
        assert len(report.done) == len(todo), report.summary()
        return seconds, sum(store.read(p)[0]["wall_seconds"] for p in Path(folder).rglob("*.jsonl"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    ways = {"one process": (1, None), f"{given.workers} processes": (given.workers, None), f"Dask, {given.workers} workers": (given.workers, "local")}
    for turn in range(given.turns):
        for name, (workers, scheduler) in ways.items():
            (first, alone), (seconds, own) = (timed(cells(n, 1), workers, scheduler) for n in (workers, given.runs))
            start = workers * first - alone
            left = 1000 * (seconds - (own + start) / workers) / given.runs
            print(f"turn {turn + 1}, {given.runs} tiny runs, {name}: {seconds:.1f} s, the runs themselves {own:.1f} s, "
                  f"workers' start {start:.1f} s; beside them {left:.1f} ms a run", flush=True)
    for turn in range(given.turns):
        took = {name: timed(cells(8, 60), workers, scheduler)[0] for name, (workers, scheduler) in ways.items()}
        one = took["one process"]
        print(f"turn {turn + 1}, 8 longer runs: " + "; ".join(f"{name} {s:.1f} s ({one / s:.2f}x)" for name, s in took.items()), flush=True)


if __name__ == "__main__": main()
