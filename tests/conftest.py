"What many tests share: commands that run in the test's process, and a federation of digits"

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fedrepro.data.datasets import DATA_CARDS, RECIPES
from fedrepro.engine.method import load_methods
from fedrepro.models.networks import ARCHITECTURES

METHODS = load_methods()
REGISTRIES = (METHODS, DATA_CARDS, RECIPES, *RECIPES.values(), ARCHITECTURES)
torch.set_num_threads(1)  # tests run side by side, and the kept numbers are those of one thread


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    "What a test registers, and variables of the environment that it sets, as `--import` does, are as before after it"
    with ExitStack() as restored:
        for registry in REGISTRIES:
            restored.enter_context(patch.dict(registry))
        restored.enter_context(patch.dict(os.environ))
        os.environ.pop("FEDREPRO_METHODS", None)
        yield


@pytest.fixture
def said(capsys, monkeypatch):
    "(exit code, stdout, stderr) of a command, run here, and by one worker unless it asks for more"
    from fedrepro.cli.main import main

    for place in ("executors.processes", "experiments.cluster"):
        monkeypatch.setattr(f"fedrepro.{place}.cores", lambda: 1)

    def said(*argv):
        code = main([str(a) for a in argv])
        return code, *capsys.readouterr()

    return said


@pytest.fixture
def refused(said):
    "Runs a command that must be refused: exit code 2, nothing on stdout, one line on stderr that has all the words"

    def refused(argv, *words):
        code, out, err = said(*argv)
        assert (
            (code, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith("fedrepro: ")
        ), (argv, code, out, err)
        for word in words:
            assert word in err, (word, err)

    return refused


@pytest.fixture(scope="session")
def board():
    "The scoreboard of the repository's own results: made once, since it reads every spec and every result"
    from fedrepro.verdicts.scoreboard import scoreboard

    return scoreboard(root=Path(__file__).resolve().parents[1] / "papers")


@pytest.fixture(scope="session")
def part():
    "Seven clients of unequal digits in float64, three of them in each round"
    from fedrepro.data import datasets, partition
    from fedrepro.engine.federation import Federation
    from fedrepro.models import networks

    digits = datasets.load("digits")
    cut = partition.partition(
        "dirichlet-class", digits.train_y.numpy(), clients=7, seed=1, alpha=0.3
    )
    return Federation(
        digits, networks.network("digits_cnn"), cut, participation=0.4, dtype=torch.float64
    )


@pytest.fixture(scope="session")
def normed(part):
    "The same clients with a network that normalises by batches"
    from torch import nn
    from fedrepro.models.net import Net, Network

    def make():
        return Network(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)), nn.Linear(8, 10)
        )

    return replace(part, net=Net("norm", make))
