"""Texts: what is read is what was written, nothing comes from the test set, every method can use token numbers."""

import hashlib
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from fedrepro.checks.contract import suited
from fedrepro.checks.harness import LOCAL, gap
from fedrepro.core.errors import InputError
from fedrepro.data import datasets, texts
from fedrepro.data.datasets import Texts
from fedrepro.data.partition import partition
from fedrepro.data.sources import Source
from fedrepro.data.datasets import recipe_for
from fedrepro.engine.evaluation import eval_models, evaluate
from fedrepro.engine.federation import Federation
from fedrepro.engine.rounds import run, sequential
from fedrepro.executors.executors import Stacked
from fedrepro.models.networks import network
from toy import OURS as METHODS


def put(path, content: str) -> dict[str, str]:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return {path.name: hashlib.md5(content.encode()).hexdigest()}


@pytest.fixture
def pairs(tmp_path):
    train = put(tmp_path / "pairs/train.csv", "SMILES,Protein,Y,cluster\nCCO,MKV,1,0\nCN,MK,0,7\n")
    test = put(tmp_path / "pairs/test.csv", "Y,Protein,SMILES\n1.0,MW,CCN\n")
    return Source(
        "Pairs",
        "pairs",
        partial(texts.read_pairs, lengths=(4, 3)),
        train,
        test,
        (2, 1),
        (),
        class_names=("no", "yes"),
    )


# --- reading


def test_the_last_numbers_are_left_out_and_order_does_not_matter():
    said = [("b", "a", "c"), ("a", "b"), ("c", "c", "d")]
    assert texts.vocabulary(said, least=2, most=4) == ("<padding>", "<unknown>", "c", "a")
    assert (
        texts.vocabulary(said[::-1])
        == texts.vocabulary(said)
        == ("<padding>", "<unknown>", "c", "a", "b", "d")
    )


def test_files_that_are_no_text(pairs, tmp_path):
    (tmp_path / "pairs/train.csv").write_bytes(b"SMILES,Protein,Y\n\xff\xfe,x,1\n")
    with pytest.raises(InputError, match="train.csv is damaged.*copy it again"):
        pairs.read(pairs, tmp_path)
    with pytest.raises(InputError, match="train.csv is refused: .*utf-8"):
        pairs.read(replace(pairs, train={"train.csv": ""}), tmp_path)


def test_the_declared_format_of_bindingdb(tmp_path):
    "Taken as it is, and read to see whether it can be"
    put(tmp_path / "bindingdb/train.csv", "SMILES,Protein,Y\nCCO,MKV,1\n")
    put(tmp_path / "bindingdb/test.csv", "SMILES,Protein,Y\nCCO,MKV,0\n")
    assert datasets.download("BindingDB", tmp_path) == tmp_path / "bindingdb"
    assert datasets.load("BindingDB", tmp_path, recipe="LfD").shape == (100, 4, 1000, 5)
    put(tmp_path / "bindingdb/test.csv", "nothing\n")
    with pytest.raises(InputError, match="no column SMILES"):
        datasets.download("BindingDB", tmp_path)


@pytest.mark.parametrize(
    "name, train, test",
    [
        ("AG News (partial)", [2514, 2504, 2518, 2457], [1900] * 4),
        ("BindingDB (partial)", [6163, 4635], [2903, 2017]),
    ],
)
def test_the_partial_copies(name, train, test):
    "The balance that the page states"
    if not datasets.DATA_CARDS[name].source.present(datasets.data_dir()):
        pytest.skip(f"{name} is not in {datasets.data_dir()}")
    d = datasets.load(name)
    assert d.train_y.bincount().tolist() == train
    assert d.test_y.bincount().tolist() == test
    assert d.train_x.shape[1] == sum(d.lengths)
    assert all(len(v) <= n for v, n in zip(d.vocabularies, d.shape[1::2]))


def test_pictures_are_augmented_texts_are_not():
    with pytest.raises(InputError, match="recipe 'LfD' changes pictures, not texts"):
        Texts(
            "t",
            *toy_parts(4, 6, 0),
            *toy_parts(4, 6, 1),
            ("0", "1"),
            recipe_for("LfD", "CIFAR-10"),
            lengths=(6,),
            vocabularies=(("a",) * 9,),
        )


# --- learning


def toy_parts(n, length, seed):
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randint(4, 9, (n, length), generator=rng)
    x[:, 0] = 2 + y
    x[::2, -1] = texts.PADDING  # the shorter ones
    return x.int(), y


@cache
def toy(net):
    "Three clients with rows that begin with a word which tells the class"
    lengths = (6,) if net == "text_cnn" else (15, 55)
    names = tuple((tuple("abcdefghi"),) * len(lengths))
    d = Texts(
        "toy",
        *toy_parts(24, sum(lengths), 0),
        *toy_parts(12, sum(lengths), 1),
        ("0", "1"),
        recipe_for("plain", "AG News"),
        lengths=lengths,
        vocabularies=names,
    )
    split = partition("iid", d.train_y.numpy(), d.test_y.numpy(), clients=3)
    return Federation(d, network(net, 2, d.shape), split, dtype=torch.float64)


@pytest.mark.parametrize(
    "net, name",
    [
        *(("text_cnn", name) for name in sorted(METHODS)),
        *(("dta_cnn", name) for name in ("FedFM", "LfD", "MOON")),
    ],
)
def test_every_method_has_a_round_on_texts(net, name):
    "With whatever it does to features and weights, alone and where a stack is asked for; the vector of padding stays 0"
    method = METHODS[name](**LOCAL | METHODS[name].check_settings | dict(epochs=1))
    federation = suited(METHODS[name], toy(net))
    ends = [run(method, federation, 2, evaluate, executor=e) for e in (sequential, Stacked())]
    for h in ends:
        assert h.status == "complete"
        assert 0 <= h.rows[-1]["generalised_accuracy"] <= 100
    assert gap(*(h.snapshot.server for h in ends))[0] < 1e-9
    embeddings = [
        w
        for h in ends
        for model in eval_models(method, federation, h.snapshot)
        for n, w in model.items()
        if n.endswith("embed.weight")
    ]
    assert embeddings
    assert not any(w[texts.PADDING].any() for w in embeddings)
