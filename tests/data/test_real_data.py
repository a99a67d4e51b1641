"""The real data sets, where they are present: official sizes, statistics and torchvision's own reading of them."""

import json

import numpy as np
import pytest
import torch
from fedrepro.core.folders import data_dir, find_specs
from fedrepro.data.datasets import DATA_CARDS, load
from fedrepro.experiments.runs import build
from fedrepro.experiments.specs import load_spec

NAMES = {
    "MNIST": "MNIST",
    "Fashion-MNIST": "FashionMNIST",  # ours -> torchvision's
    "CIFAR-10": "CIFAR10",
    "CIFAR-100": "CIFAR100",
}
PRINTS = {
    "MNIST": "3ee7f568b8fdc891",
    "Fashion-MNIST": "90fb00bb668ec4c4",
    "CIFAR-10": "cb85cdd084bdd771",
}


def present(name, **settings):
    "The data set, or a skip that says how to get it"
    source = DATA_CARDS[name].source
    if not all((data_dir() / source.folder / f).is_file() for f in source.files):
        pytest.skip(
            f"{name} is not in {data_dir() / source.folder}; `fedrepro data {name}` downloads it"
        )
    return load(name, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_as_published(name):
    d = present(name)
    assert (len(d.train_y), len(d.test_y)) == DATA_CARDS[name].source.sizes
    assert d.train_x.dtype == torch.uint8
    assert d.shape == ((3, 32, 32) if "CIFAR" in name else (1, 28, 28))
    assert d.classes == len(d.test_y.unique())
    for c, (mean, std) in enumerate(zip(d.recipe.mean, d.recipe.std)):
        histogram = (
            np.bincount(d.train_x[:, c].numpy().ravel(), minlength=256) / d.train_x[:, c].numel()
        )
        level = np.arange(256) / 255
        assert abs(histogram @ level - mean) < 6e-5
        assert abs(np.sqrt(histogram @ level**2 - (histogram @ level) ** 2) - std) < 6e-5


@pytest.mark.parametrize("name", NAMES)
def test_as_torchvision_reads_it(name):
    d = present(name)
    import torchvision

    theirs = getattr(torchvision.datasets, NAMES[name])(data_dir(), train=False)
    pixels = torch.as_tensor(theirs.data)
    assert torch.equal(
        d.test_x, pixels.permute(0, 3, 1, 2) if pixels.ndim == 4 else pixels[:, None]
    )
    assert d.test_y.tolist() == list(map(int, theirs.targets))
    if "CIFAR" in name:
        assert list(d.class_names) == theirs.classes


@pytest.mark.parametrize("name", PRINTS)
def test_fingerprints(name):
    assert present(name).fingerprint.startswith(PRINTS[name])


@pytest.mark.parametrize("name", ["MNIST", "Fashion-MNIST", "CIFAR-10"])
def test_every_small_run_can_be_built(name):
    "Reduced data sets are large enough for the clients that share them; pays for each partition of the small tier, made once"
    present(name)
    runs = [
        r
        for spec in find_specs()
        for r in load_spec(spec).runs("small", seeds=1)
        if r.settings["data"]["name"] == name
    ]
    parts = {
        json.dumps([r.settings["data"], r.settings["partition"]], sort_keys=True): r for r in runs
    }
    assert len(parts) > 2
    for run in parts.values():
        _, federation, _ = build(run)
        assert federation.clients == run.settings["partition"]["clients"]
        assert min(federation.partition.sizes) > 0
