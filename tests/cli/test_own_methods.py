"Methods, partitions and metrics of one's own whose runs would be silently other ones, or be lost at their end"

import sys

import numpy as np
import pytest

from fedrepro.experiments import store
from toy import SMALL, written

METHOD = """import json
from dataclasses import dataclass
import numpy as np
import torch
from typing import ClassVar
from fedrepro.data.partition import PARTITIONS
from fedrepro.engine.method import FedAvg

"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    "Writes a file of one's own under a module name that no other test has; what it registers is forgotten"
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(text):
        path = tmp_path / f"{tmp_path.name}.py".replace("-", "_")
        path.write_text(METHOD + text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def spec_of(tmp_path, row, values=None, **changes):
    return written(
        tmp_path / "papers", SMALL | dict(methods={row: values or {}}) | changes, "demo/t"
    )


def rows_of(tmp_path):
    "Label of the drift -> rows, of all runs that are stored"
    found = {}
    for path in sorted(tmp_path.rglob("*.jsonl")):
        head, rows = store.read(path)
        found[head["settings"]["drift"]["name"]] = rows
    return found


# --- fields


def test_a_field_that_moves_each_time_it_is_made_is_refused(refused, own, tmp_path):
    "A run makes its method again from the fields that name it: the rate would be scaled twice"
    file = own(
        "@dataclass\nclass Scaled1(FedAvg):\n    def __post_init__(self):\n        super().__post_init__()\n"
        "        self.lr = self.lr * 0.25\n"
    )
    spec = spec_of(tmp_path, "Scaled1", {"lr": 0.08, "source": "guess: toy"})
    words = ["Scaled1 changes its field lr each time it is made, from 0.02 to 0.005", "expected"]
    refused(["run", spec, "--import", file], *words)
    refused(["compare", "Scaled1:lr=0.08", "--import", file], *words)


@pytest.mark.parametrize(
    "line, words",
    [
        ("pooled: bool = True", "Own2.pooled: a method says with pooled what it is"),
        ("version: str = 'v2'", "Own2.version: a method says with version what it is"),
        ("version = 'v2'", "Own2.version = 'v2': expected a whole number"),
        ("source: float = 0.5", "Own2.source: a spec says with this key where a value is from"),
        ("fractions = 'beta'", "Own2.fractions = 'beta': expected a set of names"),
        ("positive = {'beta'}", "Own2.positive: field 'beta' is unknown"),
    ],
)
def test_a_declaration_that_would_say_something_else_is_refused(
    refused, own, tmp_path, line, words
):
    file = own(f"@dataclass\nclass Own2(FedAvg):\n    {line}\n")
    refused(["run", spec_of(tmp_path, "Own2"), "--import", file], words)


def test_a_field_may_be_negative_where_it_says_so(said, refused, own, tmp_path):
    text = "@dataclass\nclass Power3(FedAvg):\n    power: float = -0.5\n    rates: tuple = (0.9, 0.99)\n"
    file = own(text + "    signed = {'power'}\n")
    values = {"power": -2.0, "rates": [0.5, 0.6], "source": "guess: toy"}
    spec = spec_of(tmp_path, "Power3", values)
    code, _, err = said("run", spec, "--import", file, "--seeds", 1)
    assert code == 0, err
    (path,) = tmp_path.rglob("*.jsonl")
    fields = store.read(path)[0]["settings"]["method"]["fields"]
    assert (fields["power"], fields["rates"]) == (-2.0, [0.5, 0.6])


def test_without_a_word_a_field_is_not_negative(refused, own, tmp_path):
    file = own("@dataclass\nclass Power4(FedAvg):\n    power: float = -0.5\n")
    refused(["run", spec_of(tmp_path, "Power4"), "--import", file], "Power4 power", "-0.5")


# --- what is recorded


@pytest.mark.parametrize(
    "metrics, words",
    [
        ("{'alpha': 0.5}", "'alpha' is what a table of runs says of each run"),
        ("{0: 0.1}", "the name 0: expected a text"),
        ("{'large': 2**70}", "'large': expected a whole number of at most 2^63"),
    ],
)
def test_numbers_that_cannot_be_stored_are_refused_before_the_first_round(
    refused, own, tmp_path, metrics, words
):
    file = own(
        f"@dataclass\nclass Says5(FedAvg):\n    def extra_metrics(self, server):\n        return {metrics}\n"
    )
    refused(["run", spec_of(tmp_path, "Says5"), "--import", file], "Says5.extra_metrics", words)


# --- partitions

RECIPE = """def mine{n}(train_labels, test_labels, clients, classes, seed):
    order = {order}
    return tuple(np.array_split(order, clients)), None


PARTITIONS["mine{n}"] = mine{n}
"""


def own_partition(tmp_path, n, **changes):
    base = SMALL["base"] | dict(partition=f"mine{n}")
    return written(tmp_path / "papers", SMALL | dict(base=base) | changes, "demo/t")


def test_a_partition_by_the_global_generator_is_that_of_its_seed(said, own, tmp_path):
    "The same for all methods of a table, another one for another seed"
    file = own(RECIPE.format(n=6, order="np.random.permutation(len(train_labels))"))
    code, _, err = said("run", own_partition(tmp_path, 6), "--import", file)
    assert code == 0, err
    prints = {}
    for path in tmp_path.rglob("*.jsonl"):
        head, _ = store.read(path)
        prints.setdefault(head["settings"]["partition"]["seed"], set()).add(
            head["partition_fingerprint"]
        )
    assert [len(found) for found in prints.values()] == [1] * len(prints)
    assert len(set.union(*prints.values())) == len(prints)


def test_a_partition_that_no_seed_decides_is_refused(refused, own, tmp_path):
    order = "np.random.default_rng().permutation(len(train_labels))"
    file = own(RECIPE.format(n=7, order=order))
    words = ["partition recipe mine7: two draws with one seed differ", "default_rng(seed)"]
    refused(["run", own_partition(tmp_path, 7), "--import", file], *words)


def test_a_partition_from_a_file_that_has_changed_is_refused(said, refused, own, tmp_path):
    "Its source is the same, so its stored runs would be taken for those of the new file"
    order = "np.array(json.load(open('order.json')))"
    file = own(RECIPE.format(n=8, order=order))
    order = np.arange(1437)
    (tmp_path / "order.json").write_text(str(order.tolist()))
    spec = own_partition(tmp_path, 8)
    command = ["run", spec, "--import", file, "--seeds", 1]
    code, _, err = said(*command)
    assert code == 0, err
    (tmp_path / "order.json").write_text(str(order[::-1].tolist()))
    refused(command, "partition recipe mine8 gave clients other samples", "--results")


# --- drift


def test_a_method_that_looks_ahead_at_the_drift_shares_no_rounds(said, own, tmp_path):
    "Columns that differ in their drift alone are one job; the method's state is that of its own column"
    file = own(
        "@dataclass\nclass Knows9(FedAvg):\n    def init_server(self, federation):\n"
        "        when = min(federation.drift.change_rounds, default=-1)\n"
        "        return super().init_server(federation) | {'when': when}\n"
        "    def extra_metrics(self, server):\n        return {'knows': server['when']}\n"
    )
    columns = [
        dict(label="none", drift="none", source="guess: toy"),
        dict(label="sudden", drift="sudden", drift_round=1, source="guess: toy"),
    ]
    tiers = {"smoke": {"base": {"rounds": 2, "source": "tier: reduced"}}}
    spec = spec_of(tmp_path, "Knows9", columns=columns, tiers=tiers)
    code, _, err = said("run", spec, "--import", file, "--seeds", 1)
    assert code == 0, err
    found = rows_of(tmp_path)
    assert {name: rows[-1]["knows"] for name, rows in found.items()} == {"none": -1, "sudden": 1}
