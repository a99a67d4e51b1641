"""What people bring as data is right to a computation by hand, or refused in one line; and nothing changes it"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrepro.checks.harness import tiny
from fedrepro.core.trees import same_bits
from fedrepro.data import datasets, transforms
from fedrepro.data.datasets import Dataset, Texts, shortened
from fedrepro.data.partition import Partition, partition
from fedrepro.data.datasets import recipe_for
from fedrepro.data.transforms import Recipe, pixel_statistics
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import FedAvg
from fedrepro.engine.rounds import run
from fedrepro.executors.executors import EXECUTORS
from fedrepro.experiments import local_study
from fedrepro.models.networks import network, network_names
from toy import OURS, SMALL, one_line, written
from zoo_data import CASES, MEASURED, by_hand, floats, labels, pictures, usual

ACCEPTED = [c for c in CASES if not c.said]
REFUSED = [c for c in CASES if c.said]
LOCAL = dict(lr=0.05, epochs=1, batch_size=8)


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name.replace(" ", "-"))


def test_the_zoo_is_large():
    assert len(ACCEPTED) >= 30
    assert len(REFUSED) >= 30
    assert len({c.name for c in CASES}) == len(CASES)


# --- by hand


def perceptron(params: dict, x: np.ndarray) -> np.ndarray:
    "Logits (N, C) of two hidden layers with ReLU"
    w = {n: t.double().numpy() for n, t in params.items()}
    for layer in ("body.fc1", "body.fc2"):
        x = np.maximum(x @ w[f"{layer}.weight"].T + w[f"{layer}.bias"], 0)
    return x @ w["head.weight"].T + w["head.bias"]


def federated(data: Dataset, clients: int = 3) -> Federation:
    "`data` among a few clients, with a perceptron in float64"
    net = network("tabular_mlp" if len(data.shape) == 1 else "feddc_mlp", data.classes, data.shape)
    cut = partition(
        "iid", data.train_y.numpy(), data.test_y.numpy(), clients=clients, classes=data.classes
    )
    return Federation(data, net, cut, dtype=torch.float64)


@named(ACCEPTED)
def test_right_to_a_computation_by_hand(case, tmp_path):
    parts = case.make(tmp_path)
    mean, std, train, test = by_hand(parts, case.scale)
    data = Dataset("own", **parts)
    assert data.scale == case.scale
    assert data.classes == len(parts["class_names"]) == len(data.class_names)
    assert np.allclose(np.array(data.recipe.mean), mean.astype(float), rtol=1e-12, atol=1e-300)
    assert np.allclose(np.array(data.recipe.std), std.astype(float), rtol=1e-9, atol=1e-300)

    federation = federated(data)
    params = federation.initial
    for k in range(3):
        client = federation.client(k, 0, {"params": params}, {})
        batch = client.batch(np.arange(client.n)[::-1].copy())
        rows = federation.partition.train[k][::-1]
        assert np.allclose(batch.x.numpy(), train[rows].astype(float), rtol=1e-6, atol=1e-6)
        assert batch.y.tolist() == parts["train_y"][rows.copy()].tolist()
    single = data.batch(data.test_x, None, torch.float32)
    assert single.dtype == torch.float32
    assert np.allclose(single.numpy(), test.astype(float), rtol=1e-4, atol=1e-4)

    right = (
        perceptron(params, test.astype(float).reshape(len(test), -1)).argmax(1)
        == parts["test_y"].numpy()
    )
    row = evaluate(FedAvg(**LOCAL), federation, run(FedAvg(**LOCAL), federation, 0).snapshot)
    assert row["generalised_accuracy"] == pytest.approx(100 * right.mean(), abs=1e-9)


@named(ACCEPTED)
def test_training_changes_nothing(case, tmp_path):
    data = Dataset("own", **case.make(tmp_path))
    before = data.fingerprint
    kept = {n: t.clone() for n, t in data.tensors.items()}
    history = run(FedAvg(**LOCAL), federated(data), 2, evaluate)
    assert not history.diverged
    assert np.isfinite([list(row.values()) for row in history.rows]).all()
    assert all(torch.equal(t, kept[n]) for n, t in data.tensors.items())
    assert data.digest() == before


@named(REFUSED)
def test_refused_in_one_line(case, tmp_path):
    with one_line(*case.said):
        Dataset("own", **case.make(tmp_path))


# --- nothing changes the data


def as_floats(federation: Federation) -> Federation:
    "The same federation with its pixels in the type in which it computes: nothing has to be converted, so nothing is copied"
    data = federation.data
    kept = {n: getattr(data, n).double() for n in ("train_x", "test_x")}
    return replace(federation, data=replace(data, **kept, recipe=replace(data.recipe, crop=0)))


@pytest.mark.parametrize("name", OURS)
def test_no_method_changes_the_data(name):
    "And how often a run is evaluated changes no accuracy"
    last = {}
    for every in (1, 3):
        federation = as_floats(tiny())
        before = federation.data.fingerprint
        method = OURS[name](**LOCAL | OURS[name].check_settings)
        if method.pooled:
            federation = replace(federation, drift=None)
        last[every] = run(method, federation, 3, evaluate, every=every).rows[-1]
        assert federation.data.digest() == before
    assert {n: v for n, v in last[1].items() if "accuracy" in n} == {
        n: v for n, v in last[3].items() if "accuracy" in n
    }


@pytest.mark.parametrize("name", ["sequential", "stacked"])
def test_no_executor_changes_the_data(name):
    federation = as_floats(tiny())
    before = federation.data.fingerprint
    run(FedAvg(**LOCAL), federation, 2, evaluate, executor=EXECUTORS[name]())
    assert federation.data.digest() == before


@pytest.mark.parametrize(
    "part, value", [("train_x", 0.0), ("test_x", torch.nan), ("train_y", 99), ("test_y", -1)]
)
def test_a_change_is_seen_even_where_it_is_no_data_set_any_more(part, value):
    data = Dataset("own", **floats(1, 8, 8))
    assert data.digest() == data.fingerprint
    getattr(data, part)[2] = value
    assert data.digest() != data.fingerprint


def test_a_batch_is_its_readers_own():
    "Of pictures, tables and texts: who writes into it does not write into the data"
    some = Dataset("own", **floats(1, 8, 8, dtype=torch.float64))
    rows = Dataset("own", **floats(5, dtype=torch.float64))
    tokens = torch.tensor([[2, 3, 0], [3, 2, 2]])
    texts = Texts(
        "own",
        tokens,
        labels(2),
        tokens,
        labels(2),
        ("a", "b"),
        recipe_for("plain", "AG News"),
        lengths=(3,),
        vocabularies=(("<padding>", "<unknown>", "x", "y"),),
    )
    for data in (some, rows, texts):
        for x in (data.train_x, data.test_x[:1], data.test_x.split(1)[0]):
            before = data.fingerprint
            data.batch(x, None, torch.float64).zero_()
            assert data.digest() == before


def test_another_device_is_not_another_check(monkeypatch):
    data = Dataset("own", **floats(1, 8, 8))
    known = data.fingerprint
    for name in ("pixels", "class_numbers", "fitting"):
        monkeypatch.setattr(datasets, name, lambda *a: pytest.fail("checked again"))
    moved = data.to("cpu")
    assert moved.__dict__["fingerprint"] == known
    assert moved.recipe == data.recipe
    assert moved is not data


def test_an_expanded_set_takes_no_memory():
    parts = pictures(3, 8, 8)
    x = parts["train_x"][:1].expand(50_000, 3, 8, 8)
    data = Dataset(
        "own",
        **parts
        | {"train_x": x, "train_y": labels(50_000), "recipe": Recipe("own", (0.5,), (0.5,))},
    )
    assert data.train_x.untyped_storage().nbytes() == parts["train_x"].untyped_storage().nbytes()


# --- statistics


@pytest.mark.parametrize(
    "dtype, top",
    [
        (torch.uint8, 255),
        (torch.int16, 2**15 - 1),
        (torch.uint16, 2**16 - 1),
        (torch.int32, 2**31 - 1),
    ],
)
def test_the_largest_numbers_do_not_overflow(dtype, top):
    "Half of the pixels are 0 and half the largest there is: mean and deviation are both the half of it"
    x = torch.zeros(2400, 1, 8, 8, dtype=torch.int64)
    x[::2] = top
    found = pixel_statistics(x.to(dtype), 1.0)
    assert found == {"mean": (top / 2,), "std": (top / 2,)}
    assert isinstance(found["std"][0], float)


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e12])
def test_an_offset_takes_no_digits(offset):
    steps = torch.arange(8, dtype=torch.float64)[:, None].repeat(300, 1)
    found = pixel_statistics(steps + offset, 1.0)
    assert found["mean"][0] == offset + 3.5
    assert found["std"][0] == pytest.approx(5.25**0.5, rel=1e-12)


def test_bits_are_measured_as_numbers():
    x = torch.arange(40).reshape(10, 1, 2, 2) % 4 == 0
    assert (
        pixel_statistics(x, 1.0)
        == pixel_statistics(x.byte(), 1.0)
        == {"mean": (0.25,), "std": (pytest.approx(0.1875**0.5),)}
    )


# --- shortened sets


def test_a_set_sorted_by_class_keeps_its_classes():
    data = Dataset(
        "own",
        **pictures(1, 8, 8, n=300, m=60)
        | {"train_y": labels(300).sort().values, "test_y": labels(60)},
    )
    few = data.first(12, 6)
    assert few.train_y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert few.test_y.tolist() == [0, 1, 2] * 2
    assert torch.equal(few.train_x[4:8], data.train_x[100:104])
    assert torch.equal(few.test_x, data.test_x[:6])
    with one_line("train_samples 2: own has samples of 3 classes, expected at least one of each"):
        data.first(2, None)
    with one_line("train_samples 301: own has 300"):
        data.first(301, None)
    with one_line("train_samples of own: expected a whole number of at least 1, got 0"):
        data.first(0, None)


@pytest.mark.parametrize("counts", [(90, 9, 1), (1, 1, 98), (0, 50, 50), (33, 33, 34)])
@pytest.mark.parametrize("n", [3, 10, 99, 100])
def test_shares_of_a_shortened_set(counts, n):
    y = torch.arange(3).repeat_interleave(torch.tensor(counts))
    rows = torch.arange(100)[shortened(y, n, "train_samples", "own")]
    kept = y[rows].bincount(minlength=3)
    assert len(rows) == n
    assert torch.equal(rows, rows.unique())
    for c, there in enumerate(counts):
        assert (kept[c] > 0) == (there > 0)
        assert abs(int(kept[c]) - there * n / 100) <= 2


def test_groups_are_shortened_with_their_samples():
    data = Dataset(
        "own",
        **usual(
            train_y=labels(24).sort().values, train_groups=torch.arange(24), test_groups=labels(9)
        ),
    )
    assert data.first(6, None).groups[0].tolist() == [0, 1, 8, 9, 16, 17]
    assert len(data.first(6, None).groups[1]) == 9


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_shipped_sets_are_shortened_as_before(name):
    data = datasets.load(name)
    for n in (100, 300, 1000):
        assert torch.equal(data.first(n, None).train_x, data.train_x[:n])


# --- networks for tables and for pictures


@pytest.mark.parametrize(
    "name",
    [n for n in network_names() if n not in ("text_cnn", "dta_cnn", "feddc_linear", "tabular_mlp")],
)
def test_a_network_for_pictures_says_what_takes_tables(name):
    with one_line(f"network {name}", "tabular_mlp", "(12,)"):
        network(name, 3, (12,))


def test_a_table_is_learned():
    "Three classes on a line: the perceptron separates them, and a column of large units does not disturb"
    r = np.random.default_rng(0)
    y = torch.from_numpy(r.integers(0, 3, 400))
    x = torch.stack(
        [
            y + 0.1 * torch.from_numpy(r.normal(size=400)),
            1e9 + 1e6 * torch.from_numpy(r.normal(size=400)),
        ],
        1,
    )
    data = Dataset(
        "line", x[:300], y[:300], x[300:], y[300:], ("left", "middle", "right"), MEASURED
    )
    assert repr(data) == "line: 300 + 100 rows of 2 features, 3 classes, recipe own"
    assert data.shape == (2,)
    found = run(FedAvg(lr=0.1, epochs=5, batch_size=20), federated(data), 4, evaluate).rows[-1]
    assert found["generalised_accuracy"] > 99


def test_clients_of_a_table_in_a_stack():
    federation = federated(Dataset("own", **floats(5, dtype=torch.float64)))
    ends = [
        run(FedAvg(**LOCAL), federation, 2, executor=EXECUTORS[name]()).snapshot.server["params"]
        for name in ("sequential", "stacked")
    ]
    assert all(torch.allclose(ends[0][n], ends[1][n], atol=1e-12) for n in ends[0])


# --- texts


@pytest.mark.parametrize(
    "change, said",
    [
        (
            dict(train_x=torch.tensor([[2, 4, 0], [3, 2, 2]])),
            "train_x: tokens from 0 to 4, expected 0 to 3: the vocabulary has 4 names",
        ),
        (dict(test_x=torch.tensor([[2, -1, 0], [3, 2, 2]])), "test_x: tokens from -1 to 3"),
        (dict(lengths=(4,)), "train_x: expected token numbers (N, 4)"),
        (dict(lengths=(1, 2)), "with a vocabulary for each"),
        (
            dict(train_x=torch.rand(2, 3), test_x=torch.rand(2, 3)),
            "train_x: expected token numbers (N, 3)",
        ),
        (dict(test_y=torch.tensor([1, 2])), "test_y: labels from 1 to 2, expected 0 to 1"),
    ],
)
def test_texts_that_do_not_fit(change, said):
    tokens = torch.tensor([[2, 3, 0], [3, 2, 2]])
    parts = dict(
        train_x=tokens,
        train_y=labels(2),
        test_x=tokens,
        test_y=labels(2),
        class_names=("a", "b"),
        recipe=recipe_for("plain", "AG News"),
        lengths=(3,),
        vocabularies=(("<padding>", "<unknown>", "x", "y"),),
    )
    assert Texts("own", **parts).shape == (3, 4)
    with one_line("own: ", said):
        Texts("own", **parts | change)


# --- a reader in a person's file


def registered(monkeypatch, returned, statistics=((), ())):
    "The data set `own4`, whose reader returns this"

    def read_own():
        return returned

    card = datasets.DataCard("own4", read_own, statistics)
    monkeypatch.setitem(datasets.DATA_CARDS, "own4", card)


def given(**more):
    "What a right reader returns"
    return {n: v for n, v in usual(**more).items() if n != "recipe"}


@pytest.mark.parametrize(
    "returned, said",
    [
        (None, "returned NoneType None"),
        ((1, 2), "returned tuple (1, 2)"),
        ([], "returned list []"),
        (
            {n: v for n, v in given().items() if n != "class_names"},
            "returned no class_names; expected a dict with train_x",
        ),
        ({"x": 1, "y": 2}, "returned no train_x and no train_y"),
        (given(classes=3), "whose key 'classes' is unknown"),
        (given(recipe=1) | {"recipe": 1}, "whose key 'recipe' is unknown"),
        (given(test_label=1), "whose key 'test_label' is unknown; did you mean"),
    ],
)
def test_a_reader_that_returns_something_else(monkeypatch, returned, said):
    registered(monkeypatch, returned)
    with one_line("data set 'own4': its reader read_own (test_zoo_data.py, line", said):
        datasets.load("own4")


def test_what_a_reader_returns_is_checked_as_a_data_set(monkeypatch):
    registered(monkeypatch, given(train_y=labels(24) + 1))
    with one_line("own4: train_y: labels from 1 to 3", "subtract 1"):
        datasets.load("own4")
    registered(monkeypatch, given())
    data = datasets.load("own4")
    assert data.recipe.name == "plain"
    assert data.batch(data.train_x, None, torch.float64).mean().abs() < 1e-12


@pytest.mark.parametrize(
    "statistics", [(0.5, 0.5), None, ((0.5,),), ((0.5,), (0.0,)), (("a",), ("b",))]
)
def test_statistics_that_are_none(monkeypatch, statistics):
    registered(monkeypatch, given(), statistics)
    with one_line():
        datasets.load("own4")


def test_a_card_without_a_reader(monkeypatch):
    monkeypatch.setitem(datasets.DATA_CARDS, "own4", datasets.DataCard("own4"))
    for ask in (datasets.load, datasets.download):
        with one_line(
            "data set 'own4': its card has nothing to read; expected a function or a Sou"
        ):
            ask("own4")


def test_one_statement_registers_a_data_set():
    datasets.add_data_set("own4", given, (0.5,), (0.25,))
    loaded = datasets.load("own4")
    assert loaded.recipe.mean == (0.5,)
    assert loaded.recipe.std == (0.25,)
    assert datasets.DATA_CARDS["own4"].source is None
    for name, read in (("digits", given), ("", given), ("own4", 3), ("own4", None)):
        with one_line("data set "):
            datasets.add_data_set(name, read)
    for name in ("med/path", "a\\b", "a\nb", "a" * 81, "\ud800", 3):
        with one_line("data set ", "expected"):
            datasets.add_data_set(name, given)
        with one_line("data set ", "expected"):
            datasets.DataCard(name, given)
    assert "med/path" not in datasets.DATA_CARDS
    with one_line("its Source is called 'MNIST'"):
        datasets.add_data_set("own4", datasets.DATA_CARDS["MNIST"].source)


FILE = """from fedrepro.data import datasets
import torch
def read_mine():
    x, y = torch.randint(256, (60, 1, 8, 8), dtype=torch.uint8), torch.arange(60) % 4
    return dict(train_x=x, train_y=y, test_x=x, test_y=y)
datasets.add_data_set("mine4", read_mine)
"""


def test_a_reader_in_an_imported_file(tmp_path, said, monkeypatch):
    "One line names the reader, its file and what is missing; nothing is computed"
    (tmp_path / "mine.py").write_text(FILE)
    raw = SMALL | dict(base=SMALL["base"] | dict(dataset="mine4"))
    code, out, err = said(
        "run",
        written(tmp_path, raw),
        "--import",
        tmp_path / "mine.py",
        "--results",
        tmp_path / "r",
        "--workers",
        1,
    )
    assert code != 0
    assert not list(tmp_path.rglob("*.jsonl"))
    assert "its reader read_mine (mine.py, line 3) returned no class_names" in err
    assert "Traceback" not in err


# --- a study of one client reads the test set too


def test_a_study_changes_nothing():
    federation = as_floats(tiny())
    before = federation.data.fingerprint
    for _ in range(2):
        local_study.test_logits(FedAvg(**LOCAL), federation, federation.initial)
    assert federation.data.digest() == before


def test_padding_changes_nothing():
    federation = as_floats(tiny())
    client = federation.client(1, 0, {"params": federation.initial}, {})
    plain = client.batch(np.arange(5))
    padded = replace(client, pad=3).batch(np.arange(5))
    assert same_bits([padded.x[:5]], [plain.x])
    assert padded.w.tolist() == [1.0] * 5 + [0.0] * 3


def test_a_partition_of_ones_own_with_one_sample_each():
    data = Dataset("own", **pictures(1, 8, 8, n=3))
    federation = replace(federated(data), partition=Partition(([2], [0], [1]), ([0, 1], [], [5])))
    assert [federation.client(k, 0, {}, {}).batch(np.arange(1)).y.tolist() for k in range(3)] == [
        [2],
        [0],
        [1],
    ]
    assert np.isfinite(
        run(FedAvg(**LOCAL), federation, 2, evaluate).rows[-1]["personalised_accuracy"]
    )
