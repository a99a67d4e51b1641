"""Are all executors the sequential loop? Every method, in float64 after three rounds and in float32 after one.

In float32 two nearly equal numbers may change places under a maximum, which moves what follows by far more than rounding; it
happens to the loop as well, against itself in float64. So there the median of three initialisations is judged: a difference
that is the executor's shows in all of them. All three are kept.

    python -m benchmarks.equal --device cuda --json benchmarks/equality/cuda.json [--minutes 9]

The file is written as it goes. A run that is stopped, or whose minutes are over, is continued by the same command at the same
commit. Exit code 1 if a difference is above 1e-10 (float64) or 1e-5 (float32), 2 for bad arguments, 3 if some are left."""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks import bench
from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, tiny
from fedrepro.core.errors import InputError, choice
from fedrepro.core.files import write_atomic
from fedrepro.core.trees import tensors
from fedrepro.data import datasets, partition
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.executors.processes import cores
from fedrepro.models import networks

ALLOWED = {"float64": 1e-10, "float32": 1e-5}


def on(federation: Federation, device: str, dtype: torch.dtype) -> Federation:
    "The same federation, elsewhere and in another precision"
    return replace(federation, data=federation.data.to(device), dtype=dtype)


def convolutional() -> Federation:
    "Five clients of unequal size with a small convolutional network"
    digits = datasets.load("digits")
    whole = partition.partition(
        "dirichlet-class-5",
        digits.train_y.numpy(),
        digits.test_y.numpy(),
        clients=5,
        alpha=0.5,
        per_class=2,
    )
    return Federation(digits, networks.network("digits_cnn"), whole)


def gap(a, b) -> float:
    "The largest difference of two snapshots, relative to the largest number where that is above 1; nan where one is"
    pairs = list(zip(tensors([a.server, a.states]), tensors([b.server, b.states]), strict=True))
    far = [
        float((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1))
        for x, y in pairs
        if x.numel()
    ]
    return float(np.max(far, initial=0.0))  # Python's max would drop a nan


def rows(device: str, names: list[str], known: set[tuple] = frozenset(), ends: float = math.inf):
    "One for each method, network, precision and executor, but for those that are `known`; None where one would begin after `ends`"
    for name in names:
        for network, federation in (("mlp", tiny()), ("cnn", convolutional())):
            cls = load_methods()[name]
            method, federation = cls(**LOCAL | cls.check_settings), suited(cls, federation)
            if cls.pooled and network == "cnn":
                continue  # one client: the first network says it all
            for precision, rounds, seeds in (("float64", 3, 1), ("float32", 1, 3)):
                others = [
                    e
                    for e in EXECUTORS
                    if e != "sequential" and (name, network, precision, e) not in known
                ]
                if not others:
                    continue
                there = on(federation, device, getattr(torch, precision))
                heres = [replace(there, seed=seed) for seed in range(seeds)]
                loops = [run(method, here, rounds).snapshot for here in heres]
                for executor in others:
                    if time.monotonic() > ends:
                        return (yield None)
                    used = EXECUTORS[executor]()
                    started = time.perf_counter()
                    found = [run(method, here, rounds, executor=used).snapshot for here in heres]
                    seconds = round(time.perf_counter() - started, 3)
                    remarks = sorted({*getattr(used, "alone", {}).values()})
                    gaps = [gap(loop, played) for loop, played in zip(loops, found)]
                    counts = float(np.median(gaps))
                    yield {
                        "method": name,
                        "network": network,
                        "precision": precision,
                        "executor": executor,
                        "gap": counts,
                        "gaps": gaps,
                        "allowed": ALLOWED[precision],
                        "seconds": seconds,
                        "remarks": remarks,
                    }


def stored(file: Path | None, machine: dict) -> list[dict]:
    "The rows of a file of the same machine and commit; none where there is no such file"
    if file is None or not file.is_file():
        return []
    found = json.loads(file.read_text())
    return found["rows"] if found["machine"] == machine else []


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--methods", default="", metavar="A,B")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing new after so many"
    )
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    try:
        names = [
            choice(n, load_methods(), "method") for n in filter(None, asked.methods.split(","))
        ] or sorted(load_methods())
    except InputError as error:
        parser.error(str(error))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        False  # float32 is to be compared, not TF32
    )
    machine, ends = bench.machine(asked.device, cores()), time.monotonic() + 60 * asked.minutes
    found = stored(asked.json, machine)
    known = {tuple(r[k] for k in ("method", "network", "precision", "executor")) for r in found}
    left = False
    for row in rows(asked.device, names, known, ends):
        if left := row is None:
            break
        found.append(row)
        if asked.json:
            write_atomic(
                asked.json,
                (json.dumps({"machine": machine, "rows": found}, indent=1) + "\n").encode(),
            )
        if not row["gap"] <= row["allowed"]:
            print(*(f"{k} {v}" for k, v in row.items()), sep=", ", flush=True)
    worst = {
        p: float(np.max([r["gap"] for r in found if r["precision"] == p], initial=0.0))
        for p in ALLOWED
    }
    broken = [r for r in found if not r["gap"] <= r["allowed"]]
    print(
        f"{len(found)} comparisons on {asked.device}, {len(broken)} above what is allowed; the largest: {worst}"
    )
    return 1 if broken else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
