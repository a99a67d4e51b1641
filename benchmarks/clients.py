"""What a client costs that does not take part: the start of a run and one round of ten participants, by clients.

    python -m benchmarks.clients [--clients 100,1000,10000,60000] [--methods FedDC,FedDrift]

Every client has two made pictures of 8 x 8 in four classes, the network has two linear layers, and labels are swapped
in three rounds. A method is linear if ten times the clients take about ten times the seconds to start, and a round much
less; what takes longer is printed with a mark. The start includes a model of its own for every client of the methods
that keep one."""

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedrepro.checks.contract import suited
from fedrepro.core.errors import InputError, choice
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.data.datasets import Dataset
from fedrepro.data.partition import Partition
from fedrepro.data.transforms import Recipe
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import load_methods
from fedrepro.engine.rounds import begin, next_round
from fedrepro.models.architectures import Net, Network

COUNTS, PARTICIPANTS, EACH, CLASSES = (100, 1_000, 10_000, 60_000), 10, 2, 4
# marked: the seconds grow more than twice as fast as the clients, and are more than half a second
LINEAR, NOISE = 2.0, 0.5


def small_network() -> Network:
    "Two linear layers"
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), nn.Linear(4, CLASSES))


def federation(clients: int) -> Federation:
    "`clients` clients of two samples each, of which ten take part in a round"
    rng, n = np.random.default_rng(0), clients * EACH
    pictures = torch.from_numpy(rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, CLASSES, n))
    names = tuple(f"class {c}" for c in range(CLASSES))
    data = Dataset(
        "made", pictures, labels, pictures[:8], labels[:8], names, Recipe("plain", (0.5,), (0.3,))
    )
    swaps = tuple(
        Swap(t, tuple(range(0, clients, 3)), (c, c + 1)) for t, c in ((1, 0), (2, 1), (3, 2))
    )
    drift = DriftSchedule("made", clients, CLASSES, swaps)
    cut = Partition(tuple(np.arange(n).reshape(clients, EACH)))
    return Federation(
        data, Net("small_network", small_network), cut, drift, participation=PARTICIPANTS / clients
    )


def seconds(name: str, clients: int) -> tuple[float, float]:
    "Seconds of CPU to start, and of the first round: other processes do not disturb them"
    cls = load_methods()[name]
    method, place = cls(epochs=1, batch_size=0), suited(cls, federation(clients))
    begin(method, suited(cls, federation(20)))  # what is loaded once
    at = time.process_time()
    start = begin(method, place)
    then = time.process_time()
    next_round(method, replace(place), start)
    return then - at, time.process_time() - then


def marked(found: list[float], counts: list[int]) -> str:
    "A mark if the seconds grow faster than the clients"
    steps = list(zip(found, found[1:], counts, counts[1:]))
    return "  *" if any(b > NOISE and b / a > LINEAR * n / m for a, b, m, n in steps) else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--clients", default=",".join(map(str, COUNTS)), help="numbers, separated by commas"
    )
    parser.add_argument(
        "--methods", default="", help="names, separated by commas; default: all of the package"
    )
    given = parser.parse_args()
    counts, known = [int(n) for n in given.clients.split(",")], load_methods()
    names = [choice(n, known, "method") for n in given.methods.split(",") if n] or sorted(known)
    torch.set_num_threads(1)
    print(
        "CPU seconds".ljust(16),
        *(f"{f'{what}, {n:,}':>16}" for what in ("start", "round") for n in counts),
    )
    for name in names:
        try:
            both = list(zip(*(seconds(name, n) for n in counts)))
        except InputError as error:
            print(name.ljust(16), error)
        else:
            cells = [f"{s:16.3f}" for part in both for s in part]
            print(name.ljust(16), *cells, marked(list(both[0]), counts), flush=True)


if __name__ == "__main__":
    main()
