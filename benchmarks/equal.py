"""Are all executors the sequential loop? Every method, in float64 after three rounds and in float32 after one.

In float32 two nearly equal numbers may change places under a maximum, which moves what follows by far more than rounding; it
happens to the loop as well, against itself in float64. So there the median of three initialisations is judged: a difference
that is the executor's shows in all of them. All three are kept.

    python benchmarks/equal.py --device cuda --json benchmarks/equality/cuda.json

Exit code 1 if a difference is above 1e-10 (float64) or 1e-5 (float32), 2 for bad arguments."""
import argparse
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks import bench
from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, tiny
from fedrepro.core.errors import InputError, choice
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
    whole = partition.partition("dirichlet-class-5", digits.train_y.numpy(), digits.test_y.numpy(), clients=5, alpha=.5, per_class=2)
    return Federation(digits, networks.network("digits_cnn"), whole)


def gap(a, b) -> float:
    "The largest difference of two snapshots, relative to the largest number where that is above 1"
    pairs = list(zip(tensors([a.server, a.states]), tensors([b.server, b.states]), strict=True))
    return max(float((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1)) for x, y in pairs if x.numel())


def rows(device: str, names: list[str]):
    "One for each method, network, precision and executor"
    for name in names:
        for network, federation in (("mlp", tiny()), ("cnn", convolutional())):
            cls = load_methods()[name]
            method, federation = cls(**LOCAL | cls.check_settings), suited(cls, federation)
            if cls.pooled and network == "cnn": continue  # one client: the first network says it all
            for precision, rounds, seeds in (("float64", 3, 1), ("float32", 1, 3)):
                there = on(federation, device, getattr(torch, precision))
                heres = [replace(there, seed=seed) for seed in range(seeds)]
                loops = [run(method, here, rounds).snapshot for here in heres]
                for executor, make in EXECUTORS.items():
                    if executor == "sequential": continue
                    with warnings.catch_warnings(record=True) as told:
                        warnings.simplefilter("always")
                        started = time.perf_counter()
                        found = [run(method, here, rounds, executor=make()).snapshot for here in heres]
                        seconds = round(time.perf_counter() - started, 3)
                        remarks = sorted({str(w.message) for w in told if "not recorded" in str(w.message)})
                    gaps = [gap(loop, played) for loop, played in zip(loops, found)]
                    yield {"method": name, "network": network, "precision": precision, "executor": executor, "gap": median(gaps),
                           "gaps": gaps, "allowed": ALLOWED[precision], "seconds": seconds, "remarks": remarks}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--methods", default="", metavar="A,B")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    if asked.device == "cuda" and not torch.cuda.is_available(): parser.error("--device cuda: PyTorch sees no GPU here")
    try: names = [choice(n, load_methods(), "method") for n in filter(None, asked.methods.split(","))] or sorted(load_methods())
    except InputError as error: parser.error(str(error))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 is to be compared, not TF32
    found = []
    for row in rows(asked.device, names):
        found.append(row)
        bad = row["gap"] > row["allowed"]
        if bad or row["remarks"]: print(*(f"{k} {v}" for k, v in row.items()), sep=", ", flush=True)
    worst = {p: max(r["gap"] for r in found if r["precision"] == p) for p in ALLOWED}
    broken = [r for r in found if not r["gap"] <= r["allowed"]]
    print(f"{len(found)} comparisons on {asked.device}, {len(broken)} above what is allowed; the largest: {worst}")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"machine": bench.machine(asked.device, cores()), "rows": found}, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__": sys.exit(main())
