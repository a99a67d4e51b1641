"""One small run of every method on digits, in which each default counts: the numbers that tools/bands.py keeps"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import nn
from toy import OURS as METHODS

from fedrepro.checks.contract import suited
from fedrepro.core.trees import squared_norm, sub
from fedrepro.data import datasets, partition
from fedrepro.data.concept_drift import DriftSchedule, Swap
from fedrepro.engine.client import Batch, cross_entropy
from fedrepro.engine.evaluation import eval_models, evaluate, finetuned
from fedrepro.engine.federation import Federation
from fedrepro.engine.rounds import begin, run, sequential
from fedrepro.models import networks
from fedrepro.models.net import Net, Network

TYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Cell:
    "Where a method's numbers are taken; a method without a cell of its own has this one"

    first: int = 0  # index of the first round
    rounds: int = 4
    # concept drift: rounds after the first, client, its two labels
    swaps: tuple = ((1, 0, (1, 2)), (1, 1, (3, 4)))
    samples: int = 450  # training images, the first ones
    clients: int = 3
    participation: float = 0.67  # two of three
    alpha: float = 0.5  # Dirichlet concentration
    seed: int = 0  # of the partition
    network: Callable | None = None  # None = digits_cnn
    why: str = ""  # it differs

    @property
    def text(self) -> str:
        "What differs from the usual cell, and why; empty for that one"
        usual = vars(Cell())
        named = [
            f"{n} {getattr(v, '__name__', v)}"
            for n, v in vars(self).items()
            if n != "why" and v != usual[n]
        ]
        return f"{', '.join(named)}: {self.why}" if named else ""


def two_blocks() -> Network:
    "A ResNet of one stage with two blocks of 8 channels"
    from torchvision.models.resnet import BasicBlock

    layers = OrderedDict(
        conv1=nn.Conv2d(1, 8, 3, padding=1),
        layer1=nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8)),
        pool=nn.AdaptiveAvgPool2d(2),
        flatten=nn.Flatten(),
    )
    return Network(nn.Sequential(layers), nn.Linear(32, 10))


CELLS = {
    "FedBSS": Cell(first=49, why="warm_up is 50"),
    "FedCCFA": Cell(
        first=19,
        participation=1.0,
        why="align_from is 20, clusters need three participants, and some distances lie near eps",
    ),
    "FedCDA": Cell(
        first=46,
        rounds=6,
        swaps=((4, 0, (1, 2)), (4, 1, (3, 4))),
        clients=5,
        participation=1.0,
        samples=300,
        seed=30,
        why="warmup is 50; here the choice turns on smooth, on three models, on three batches",
    ),
    "FedDrift": Cell(
        rounds=5,
        swaps=((3, 0, (0, 7)), (3, 1, (0, 4))),
        participation=1.0,
        samples=1437,
        seed=2,
        why="one client's loss must rise by a little less than delta, another's by more",
    ),
    "FedFM": Cell(first=19, why="align_from is 20"),
    "Flash": Cell(rounds=5, participation=1.0, why="until some client nearly stops early"),
    "InCo": Cell(
        network=two_blocks,
        participation=0.34,
        seed=2,
        why="needs a stage with two blocks, and updates that reach both limits",
    ),
    "pFedMe": Cell(samples=200, why="its steps cost time"),
}


def cell_of(name: str) -> Cell:
    return CELLS.get(name, Cell())


@cache
def digits(samples: int) -> datasets.Dataset:
    "The first training images of digits, shifted by up to a pixel, and its test set"
    whole = datasets.load("digits")
    return replace(
        whole,
        train_x=whole.train_x[:samples],
        train_y=whole.train_y[:samples],
        recipe=replace(whole.recipe, name="golden", crop=1),
    )


def inputs(t: torch.Tensor) -> int:
    "Inputs of each output of a layer with these weights; 64 for biases, whose layer is not known"
    return t[0].numel() if t.dim() > 1 else 64


class Start(Net):
    """A network that starts in float64 from numpy's draws, as PyTorch draws in float32, which processors round.

    With `nudge` each number is a rounding unit more or less, by a coin of that seed."""

    nudge = 0

    def init(self, seed: int, dtype=torch.float32) -> dict:
        made = super().init(seed, dtype)
        rng = np.random.default_rng(seed)
        if dtype == torch.float64:  # constants stay
            made = {
                n: t
                if t.min() == t.max()
                else torch.as_tensor(rng.uniform(-1, 1, t.shape) / inputs(t) ** 0.5)
                for n, t in made.items()
            }
        if not self.nudge:
            return made
        coin = torch.Generator().manual_seed(self.nudge)
        unit = torch.finfo(dtype).eps
        return {
            n: t * (1 + unit * (2 * torch.randint(2, t.shape, generator=coin) - 1).to(dtype))
            for n, t in made.items()
        }


def federation(name: str, dtype: torch.dtype, nudge: int = 0) -> Federation:
    "The federation of a method's cell"
    cell = cell_of(name)
    d = digits(cell.samples)
    swaps = tuple(Swap(cell.first + t, (k,), labels) for t, k, labels in cell.swaps)
    split = partition.partition(
        "dirichlet-class",
        d.train_y.numpy(),
        d.test_y.numpy(),
        clients=cell.clients,
        seed=cell.seed,
        alpha=cell.alpha,
    )
    usual = networks.network("digits_cnn", shape=d.shape)
    net = (
        Start(cell.network.__name__, cell.network)
        if cell.network
        else Start(usual.name, usual.make)
    )
    net.nudge = nudge
    drift = DriftSchedule("golden", cell.clients, 10, swaps)
    made = Federation(d, net, split, drift, participation=cell.participation, dtype=dtype)
    return suited(METHODS[name], made)


def test_loss(federation: Federation, trees: list[dict], t: int) -> float:
    "Mean over clients of the mean cross-entropy on the whole test set, labelled as in round t"
    d = federation.data
    maps = torch.as_tensor(federation.label_maps(t))
    x = d.batch(d.test_x, None, federation.dtype)
    w = torch.ones(len(d.test_y), dtype=federation.dtype)
    with torch.no_grad():
        losses = [
            cross_entropy(federation.net(params, x), Batch(x, concept[d.test_y], w))
            for params, concept in zip(trees, maps)
        ]
    return float(torch.stack(losses).double().mean())


class Judge:
    "`evaluate`; `test_loss` of the final models; how far the judged ones `moved` in the round, a root mean square"

    def __init__(self, method, federation, at):
        self.before = eval_models(method, federation, at)

    def __call__(self, method, federation, at, final) -> dict:
        now = eval_models(method, federation, at)
        ways = torch.stack([squared_norm(sub(a, b)) for a, b in zip(now, self.before)]).double()
        tuned = finetuned(method, federation, at, now) if final else None
        self.before = now
        return evaluate(method, federation, at, final) | {
            "moved": math.sqrt(float(ways.mean())),
            "test_loss": test_loss(federation, tuned or now, at.round - 1),
        }


def numbers(
    name: str, type: str = "float64", nudge: int = 0, executor: Callable = sequential, **changed
) -> dict:
    """Quantity -> its value after each round of a method's cell, None where there is none.

    `changed`: other hyper-parameters. Raises InputError for those that are refused."""
    cell = cell_of(name)
    method = METHODS[name](**changed)
    where = federation(name, TYPES[type], nudge)
    start = replace(begin(method, where), round=cell.first)
    judge = Judge(method, where, start)
    end = cell.first + cell.rounds
    rows = run(method, where, end, judge, start=start, executor=executor).rows
    names = sorted({n for row in rows for n in row} - {"round"})
    return {n: [row.get(n) for row in rows] + [None] * (cell.rounds - len(rows)) for n in names}
