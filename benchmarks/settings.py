"""Settings of a worker that leave every bit alone: is training faster with one of them?

    python -m benchmarks.settings --json benchmarks/settings/CPU.json [--turns N]

Processes that differ in the setting only train the same rounds in turns. What counts is the processor's time, which other
work on the machine disturbs less than the clock's."""

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median

from benchmarks.bench import Remote, machine, ratios
from benchmarks.workloads import Work
from fedrepro.core.files import write_atomic

USUAL, PINNED = "as workers are", "pinned to a core"
ENVIRONMENT = {
    USUAL: {},
    "huge pages for tensors": {"THP_MEM_ALLOC_ENABLE": "1"},
    "huge pages for malloc": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    PINNED: {},
}
WORKS = [
    Work("fedccfa_fmnist", clients=4, samples=1200),
    Work("fedccfa_cifar", "fedccfa_cifar", (3, 32, 32), clients=4, samples=600),
]


def measure(turns: int) -> list[dict]:
    "Rows with the processor's seconds of each turn; a first one warms up and is left out"
    remotes = {
        name: Remote("sequential", WORKS[0], "cpu", 1, more) for name, more in ENVIRONMENT.items()
    }
    os.sched_setaffinity(remotes[PINNED].process.pid, {min(os.sched_getaffinity(0))})
    rows = [
        {"setting": name, "work": w.name, "samples": w.samples, "seconds": []}
        for name in remotes
        for w in WORKS
    ]
    for turn in range(turns + 1):
        for row, work in zip(rows, WORKS * len(remotes)):
            remotes[row["setting"]].ask(work)
            seconds = remotes[row["setting"]].hear()["cpu_seconds"]
            if turn:
                row["seconds"].append(seconds)
    for remote in remotes.values():
        remote.asked.close()
        remote.end()
    return rows


def lines(found: dict) -> list[str]:
    "A line a setting and network: how many times faster than the usual one, and in how many of the turns it was faster"
    out = []
    for row in found["rows"]:
        base = next(r for r in found["rows"] if r["setting"] == USUAL and r["work"] == row["work"])
        x = ratios(row, base)
        often = f"faster in {sum(v > 1 for v in x)} of {len(x)} turns"
        if row is not base:
            out.append(f"{row['setting']:<24}{row['work']:<18}{median(x):.3f}, {often}")
    return out


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args(argv)
    found = {"machine": machine("cpu", 1), "load": os.getloadavg()[0], "rows": measure(asked.turns)}
    write_atomic(asked.json, (json.dumps(found, indent=1) + "\n").encode())
    print(*lines(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
