"""Whatever a person may type, the answer is a result or one clear line: partitions, drifts, specs, published numbers, the
command line, papermill parameters. 100 generated inputs a test, the same ones each time; with FEDREPRO_NIGHTLY=1
it is 5,000 a test, new ones each night. A failure prints the decorator that repeats it."""

import contextlib
import copy
import functools
import inspect
import io
import json
import os
import signal
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import typer
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from papermill.translators import PythonTranslator

from fedrepro.checks import contract
from fedrepro.cli import app, main
from fedrepro.core import folders
from fedrepro.core.errors import InputError, choice
from fedrepro.data import concept_drift, datasets
from fedrepro.data.concept_drift import DriftSchedule, Swap, drift, drift_names, flip_labels
from fedrepro.data.partition import partition, recipe_names, recipe_settings
from fedrepro.executors import executors
from fedrepro.experiments import runner, store
from fedrepro.experiments.rules import COUNT
from fedrepro.experiments.runs import run_id
from fedrepro.experiments.spec_files import read_spec
from fedrepro.experiments.specs import Spec, load_spec
from fedrepro.reporting import compare, notebook
from fedrepro.verdicts import tables
from toy import BASE, ROOT, TOY, toml

NIGHTLY = os.environ.get("FEDREPRO_NIGHTLY") == "1"
settings.register_profile(
    "input",
    max_examples=5000 if NIGHTLY else 100,
    deadline=None,
    print_blob=True,
    derandomize=not NIGHTLY,
    suppress_health_check=list(HealthCheck),
)
inputs = settings.get_profile("input")
EACH = 30  # seconds in which every answer must have come; they take milliseconds


@contextlib.contextmanager
def answered_in_time():
    def late(*_):
        raise AssertionError(f"no answer after {EACH} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(EACH)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def clear(error, *words, most: int = 400):
    "The message is one printable line of at most `most` characters that has all the words"
    line = str(error)
    assert line.isprintable() and 10 < len(line) <= most, (len(line), line)
    for word in words:
        assert word in line, (word, line)
    event("refused")


class Odd:
    "Nothing that is expected anywhere; prints badly"

    def __repr__(self):
        return "one\ntwo\x1b"


class Odder:
    def __repr__(self):
        raise RuntimeError("cannot be printed")


def deep(n):
    return functools.reduce(lambda x, _: {"a": x}, range(n), {})


def nested(n):
    return functools.reduce(lambda x, _: [x], range(n), [])


ODD = (
    st.sampled_from([float("nan"), True, None])
    | st.sampled_from([float("inf"), 0, -1, 10**5000, "1"])
    | st.sampled_from(
        [
            -float("inf"),
            -0.0,
            1,
            10**30,
            -(10**5000),
            1e308,
            1e-308,
            2.5,
            False,
            "",
            "nan",
            "a\nb\x1b[31m",
            "ü" * 5000,
            "\ud800",
            b"x",
            [],
            [1],
            (),
            {},
            {"a": 1},
            1j,
            np.float64("nan"),
            np.float32(0.5),
            np.int64(3),
            np.bool_(True),
            np.complex128(1),
            np.arange(3),
            np.arange(9999),
            np.array(2),
            Odd(),
            Odder(),
            deep(9999),
            int,
            Path("x"),
        ]
    )
)


def most_often(usual, odd=ODD, times: int = 5):
    "`times` out of `times` + 1 the `usual`, else something odd"
    return st.integers(0, times).flatmap(lambda i: odd if i == times else usual)


# --- partitions


@st.composite
def some_labels(draw, least=0):
    "Labels of any number and of 1 to 20 classes, some without a sample, some rare; or enough of every class"
    if draw(st.integers(0, 2)) == 0:
        return list(range(draw(st.integers(1, 9)))) * draw(st.integers(5, 40))
    classes = draw(st.lists(st.integers(0, 19), min_size=1, max_size=20))
    if draw(st.booleans()):
        return draw(st.lists(st.sampled_from(classes), min_size=least, max_size=30))
    n = draw(st.integers(least, 400))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    labels = rng.choice(classes, n)
    return draw(
        st.sampled_from(
            [
                labels,
                labels.tolist(),
                torch.tensor(labels, dtype=torch.int64),
                np.sort(labels).astype(np.uint8),
            ]
        )
    )


ODD_LABELS = st.sampled_from(
    [
        None,
        [],
        [[0, 1], [1]],
        [0.5],
        [-1, 0],
        ["cat"],
        [2**63],
        [10**30],
        [10**12],
        [True],
        3,
        np.zeros((2, 2), int),
        {"a": 1},
        torch.zeros(3),
        Odd(),
        [None],
        "012",
        b"012",
        [float("nan")],
        np.array([], int),
        [0, 10**5],
    ]
)
alphas = st.floats(1e-6, 1e6) | st.floats(0.05, 1) | st.sampled_from([1e-6, 1e6])
ARGUMENTS = {
    "alpha": alphas,
    "minimum": st.integers(1, 12),
    "tries": st.integers(1, 9),
    "per_class": st.integers(0, 4),
    "per_class_test": st.integers(0, 2),
    "sigma": st.floats(0, 10),
    "shards": st.integers(1, 9),
}
one_or_two = st.integers(0, 9).flatmap(
    lambda i: st.fixed_dictionaries(
        {
            k: ARGUMENTS[k]
            for k in (["alpha"], ["sigma"], ["alpha", "sigma"], [])[i % 4 if i > 7 else i % 2]
        }
    )
)


def same_sizes(counts, asked):
    return np.ptp(counts.sum(1)) <= 1


PROMISES = {  # recipe -> law of the counts (K, C) and the settings
    "iid": same_sizes,
    "iid-class": lambda c, s: np.ptp(c, axis=0).max() <= 1 and same_sizes(c, s),
    "sort": lambda c, s: (c > 0).sum(1).max() <= s["shards"],
    "shards": lambda c, s: np.ptp(c.sum(1)) <= s["shards"],
    "dirichlet-class": lambda c, s: c.sum(1).min() >= s["minimum"],
    "dirichlet-class-5": lambda c, s: c.min() >= s["per_class"],
    "dirichlet-client": lambda c, s: s["sigma"] > 0 or same_sizes(c, s),
    "quantity-skew": lambda c, s: (s["alpha"] is None) != (s["sigma"] is None),
}
ALWAYS = ("iid", "iid-class")  # nothing but impossible numbers is refused


def test_every_recipe_has_a_promise():
    "`natural` deals nothing: test_partition.py"
    assert sorted([*PROMISES, "natural"]) == recipe_names()
    assert set(ARGUMENTS) == {s for r in recipe_names() for s in recipe_settings(r)}


def deals_every_sample_once(lists, n):
    owned = np.concatenate(lists)
    assert owned.dtype == np.int64
    assert len(owned) == n
    assert (np.sort(owned) == np.arange(n)).all()


def follows(train, test):
    "A client's share of the test samples of a class is that of its training samples, up to rounding"
    share = train / np.maximum(train.sum(0), 1)
    assert (np.abs(share * test.sum(0) - test)[:, train.sum(0) > 0] <= 1 + 1e-9).all()


def check_partition(cut, recipe, labels, test, clients, asked):
    given = {**recipe_settings(recipe), **asked}
    assert cut.clients == clients
    assert cut.recipe == recipe
    assert cut.settings.items() >= asked.items()
    deals_every_sample_once(cut.train, len(labels))
    classes = cut.settings["classes"]
    counts = cut.counts(labels, classes)
    assert counts.sum(1).min() >= 1
    assert PROMISES[recipe](counts, given)
    if recipe != "dirichlet-class-5":
        assert all((np.diff(mine) > 0).all() for mine in cut.train)
    if test is None:
        return
    deals_every_sample_once(cut.test, len(test))
    shares = concept_drift.as_labels(test)
    shares = np.stack([np.bincount(shares[mine], minlength=classes) for mine in cut.test])
    if recipe == "dirichlet-class-5":
        assert shares.min() >= given["per_class_test"]
    else:
        follows(counts, shares)


@pytest.mark.parametrize("recipe", PROMISES)
def test_a_partition_is_disjoint_and_complete_or_refused(recipe):
    seen = {"dealt": 0, "refused": 0}

    # so many, that impossible ones are among them
    @settings(inputs, max_examples=5000 if NIGHTLY else 200)
    @given(st.data())
    def holds(draw):
        labels = draw.draw(some_labels(1))
        test = draw.draw(st.none() | some_labels(1))
        clients = draw.draw(st.integers(1, min(len(labels), 12)) | st.integers(1, len(labels) + 5))
        seed = draw.draw(st.integers(0, 99) | st.integers(0, 2**33))
        asked = draw.draw(
            st.fixed_dictionaries({}, optional={k: ARGUMENTS[k] for k in recipe_settings(recipe)})
            if recipe != "quantity-skew"
            else one_or_two
        )
        before = concept_drift.as_labels(labels)
        with answered_in_time():
            try:
                cut = partition(recipe, labels, test, clients=clients, seed=seed, **asked)
            except InputError as error:
                assert recipe not in ALWAYS or clients > len(labels)
                clear(error)
                seen["refused"] += 1
                return
            seen["dealt"] += 1
            check_partition(cut, recipe, before, test, clients, asked)
            assert (concept_drift.as_labels(labels) == before).all()
            assert (
                partition(
                    recipe, before.tolist(), test, clients=clients, seed=seed, **asked
                ).fingerprint
                == cut.fingerprint
            )

    holds()
    assert seen["dealt"] > 10 and seen["refused"], "all alike: this shows little"


@inputs
@given(st.data())
def test_odd_requests_for_a_partition_are_refused_or_kept(draw):
    "NaN, infinity, huge numbers, wrong types and names anywhere"
    recipe = draw.draw(most_often(st.sampled_from(recipe_names())))
    names = (
        recipe_settings(recipe)
        if isinstance(recipe, str) and recipe in recipe_names()
        else ARGUMENTS
    )
    labels = draw.draw(most_often(some_labels(1), ODD_LABELS))
    test = draw.draw(st.none() | most_often(some_labels(1), ODD_LABELS))
    each = {k: most_often(ARGUMENTS[k]) for k in names}
    asked = draw.draw(st.fixed_dictionaries(each) | st.fixed_dictionaries({}, optional=each))
    asked |= draw.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "classes": most_often(st.integers(1, 30)),
                "seed": most_often(st.integers(0, 99)),
            },
        )
    )
    if draw.draw(st.integers(0, 9)) == 0:
        asked[draw.draw(st.text(max_size=9) | st.sampled_from(["s", "Alpha", "shard"]))] = 1
    clients = draw.draw(most_often(st.integers(1, 9)))
    with answered_in_time():
        try:
            cut = partition(recipe, labels, test, **{"clients": clients, **asked})
        except InputError as error:
            return clear(error)
        assert not any(isinstance(v, (bool, np.bool_)) for v in [clients, *asked.values()]), (
            "true is no number"
        )
        check_partition(
            cut,
            recipe,
            concept_drift.as_labels(labels),
            test,
            int(clients),
            {k: v for k, v in asked.items() if k in names},
        )


@pytest.mark.parametrize("recipe", PROMISES)
def test_a_number_too_long_to_print_is_refused_in_one_line(recipe):
    "Python prints no whole number of more than 4,300 digits: a message that tried would be a traceback"
    labels = list(range(4)) * 20
    for name in recipe_settings(recipe):
        for value in (10**5000, -(10**5000)):
            with pytest.raises(InputError) as error:
                partition(recipe, labels, clients=2, **{name: value})
            said = str(error.value)
            assert said.isprintable() and name in said and len(said) <= 400, said


# --- label noise and concept drift


@inputs
@given(
    some_labels(1), most_often(st.floats(0, 1)), most_often(st.integers(1, 30)), st.integers(0, 99)
)
def test_noise_hits_exactly_its_share_or_is_refused(labels, ratio, classes, seed):
    before = concept_drift.as_labels(labels)
    try:
        noisy = flip_labels(labels, ratio, classes, np.random.default_rng(seed))
    except InputError as error:
        return clear(error)
    assert not isinstance(ratio, bool)
    assert (noisy != before).sum() == round(float(ratio) * len(before))
    assert 0 <= noisy.min() <= noisy.max() < classes
    assert (concept_drift.as_labels(labels) == before).all()


def check_schedule(s, around):
    "Label maps are permutations that change only when announced; concepts name them; the swaps backwards restore the labels"
    start = np.tile(np.arange(s.classes), (s.clients, 1))
    rounds = sorted({max(0, t + d) for t in [0, *s.change_rounds, *around] for d in (-1, 0, 1)})
    for t in rounds:
        maps = s.label_maps(t)
        before = s.label_maps(t - 1) if t else start
        assert (np.sort(maps) == start).all()
        assert (s.concept_maps[s.concepts(t)] == maps).all()
        assert t in s.change_rounds or (maps == before).all()
    assert (s.concept_maps[0] == np.arange(s.classes)).all()
    assert len(np.unique(s.concept_maps, axis=0)) == len(s.concept_maps)
    end = max(s.change_rounds, default=0) + 1
    back = [Swap(end + i, swap.clients, swap.labels) for i, swap in enumerate(reversed(s.swaps))]
    assert (
        DriftSchedule("and back", s.clients, s.classes, [*s.swaps, *back]).label_maps(10**40)
        == start
    ).all()


when = st.integers(0, 300) | st.integers(0, 10**30)


@inputs
@given(
    most_often(st.sampled_from(drift_names()), ODD | st.text(max_size=9)),
    most_often(st.integers(1, 40)),
    most_often(st.integers(1, 15)),
    st.fixed_dictionaries(
        {}, optional={"at": most_often(when), "step": most_often(when), "back": most_often(when)}
    ),
)
def test_any_drift_is_a_schedule_or_refused(name, clients, classes, more):
    with answered_in_time():
        try:
            s = drift(name, clients=clients, classes=classes, **more)
        except InputError as error:
            return clear(error)
        if s.clients * s.classes < 10**5:
            check_schedule(s, [100])
    rounds = {"at": 100, "step": 10, "back": 50, **more}
    wanted = {
        "none": [],
        "sudden": [rounds["at"]],
        "reoccurring": [rounds["at"], rounds["at"] + rounds["back"]],
        "incremental": [rounds["at"] + g * rounds["step"] for g in range(3)],
    }[name]
    reached = {"incremental": sum(s.clients > g for g in (0, 3, 6))}.get(name, len(wanted))
    assert list(s.change_rounds) == [int(t) for t in wanted][:reached]


# --- specs

KEPT = ("FedAvg", "FedProx", "AdapFedAvg (rate used)", "FedRep", "FedCCFA")
FILES = {
    p.name: p.read_bytes()
    for p in (ROOT / "papers/fedccfa").iterdir()
    if p.suffix in (".toml", ".csv")
}
REAL = read_spec(ROOT / "papers/fedccfa/table2.toml")  # with all that it inherits
REAL = {k: v for k, v in REAL.items() if k not in ("methods", "rows", "tuning")} | {
    "methods": {name: REAL["methods"][name] for name in KEPT}
}
for tier in REAL["tiers"].values():
    tier |= (
        {"methods": {k: v for k, v in tier["methods"].items() if k in KEPT}}
        if "methods" in tier
        else {}
    )


class Long(int):
    "A number with more digits than Python prints"

    def __repr__(self):
        return "Long"


numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, Long(16**5000), 1e308, 0.0, -0.0, 5e-324])
)
texts = st.text(max_size=8) | st.sampled_from(
    [
        "x" * 30_000,
        "a\nb",
        "\x1b[31m",
        "\x00",
        "none",
        "nan",
        "../..",
        "FedAvg",
        "paper",
        "_base.toml",
        "guess: x",
        "guess:\nx",
        "é" * 99,
    ]
)
plain = st.booleans() | numbers | texts | st.dates() | st.datetimes() | st.times()
anything = (
    st.recursive(
        plain,
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["value", "source", "base", "dataset"]) | texts, x, max_size=3
            )
        ),
        max_leaves=6,
    )
    | st.integers(1, 300).map(deep)
    | st.integers(1, 300).map(nested)
)


def places(raw, path=()):
    "All key paths of nested dicts and lists"
    items = (
        raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    )
    return [path] + [p for k, v in items for p in places(v, (*path, k))]


MEANT = [
    "extends",
    "like",
    "rows",
    "tuning",
    "class",
    "published",
    "missing",
    "label",
    "source",
    "columns",
    "shards",
]


def change(raw, draw):
    "One change anywhere: another value, another key, one less, one twice, one of another place"
    where = draw.draw(st.sampled_from([p for p in places(raw) if p]))
    parent = raw
    for key in where[:-1]:
        parent = parent[key]
    key = where[-1]
    how = draw.draw(
        st.sampled_from(["value", "value", "add", "delete", "twice", "move", "wrap", "number"])
    )
    if how == "value":
        parent[key] = draw.draw(anything)
    if how == "number":
        parent[key] = draw.draw(numbers)
    if how == "wrap":
        parent[key] = {"value": parent[key], "source": draw.draw(texts)}
    if how == "delete":
        del parent[key]
    if how == "move":
        parent[key] = copy.deepcopy(
            draw.draw(
                st.sampled_from(
                    [REAL["base"], REAL["columns"], REAL["methods"], REAL["tiers"], "200"]
                )
            )
        )
    if how == "add" and isinstance(parent, dict):
        parent[draw.draw(st.sampled_from(MEANT) | texts)] = draw.draw(
            anything | st.sampled_from(KEPT)
        )
    elif how in ("add", "twice"):
        if isinstance(parent, list):
            parent.insert(0, copy.deepcopy(parent[key]))
        else:
            parent[draw.draw(st.sampled_from(["FedAvg", "second", "rounds", "dataset"]))] = (
                copy.deepcopy(parent[key])
            )


def check_spec(path: Path) -> Spec | None:
    "The spec, with all its tiers resolved into runs of settings that have a name; None when refused in one clear line that names the file"
    with answered_in_time():
        try:
            spec = load_spec(path)
        except InputError as error:
            return clear(error, path.parent.name, most=560 + len(str(path)))
        for tier in spec.tiers:
            runs = spec.runs(tier)
            assert len({(r.row, r.column, r.seed) for r in runs}) == len(runs)
            for r in runs:
                s = r.settings
                assert len(r.run_id) == 16
                assert r.describe().isprintable()
                assert json.loads(json.dumps(s))
                assert run_id(json.loads(json.dumps(s))) == r.run_id
                assert 1 <= s["rounds"] <= 10**6
                assert 0 < s["participation"] <= 1
                assert 1 <= s["partition"]["clients"] <= 10**5
                assert store.file_name(s)
    event("accepted")
    return spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@inputs
@given(st.data())
def test_any_change_of_a_spec_is_a_spec_or_one_clear_line(folder, draw):
    raw = copy.deepcopy(REAL)
    for _ in range(draw.draw(st.integers(1, 3))):
        change(raw, draw)
    (folder / "x.toml").write_text("\n".join(toml(raw)), encoding="utf-8")
    check_spec(folder / "x.toml")


# --- published numbers

words = st.sampled_from(
    [
        "FedAvg",
        "FedProx",
        "Other",
        "",
        "20",
        "20.0",
        "100",
        "1.5",
        "nan",
        "inf",
        "-1",
        "about 3",
        "a,b",
        '"',
        "x\ny",
        "\x00",
        "True",
        "1e999",
        "é",
    ]
)
rows = st.lists(
    st.tuples(
        st.sampled_from(["FedAvg", "FedAvg", "FedProx", "Other"]),
        st.sampled_from(["", "", "a", "b"]),
        st.sampled_from(["20", "100", "20.0"]),
        st.sampled_from(["1.5", "2", ""]),
        st.sampled_from(["1", ""]),
    ).map(list),
    max_size=6,
)
filters = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["FedAvg", "FedProx", "Nobody"]),
        "clients": st.sampled_from([20, 20.0, 100, "20"]),
        "variant": st.sampled_from(["a", "", "c"]),
        "other": numbers | texts,
    },
)


@inputs
@given(st.data())
def test_published_numbers_are_accepted_where_the_table_can_use_them(folder, draw):
    "What `load_spec` accepts, no table refuses later; what it refuses is one clear line"
    lines = [["method", "variant", "clients", "mean", "std"], *draw.draw(rows)]
    for _ in range(draw.draw(st.sampled_from([0, 0, 0, 1, 2]))):
        line = draw.draw(st.sampled_from(lines))
        line[draw.draw(st.integers(0, len(line) - 1))] = draw.draw(words)
        if draw.draw(st.integers(0, 4)) == 0:
            line.append("more")
    content = "\n".join(map(",".join, lines)).encode()
    if draw.draw(st.integers(0, 9)) == 0:
        content = draw.draw(st.binary(max_size=60)) + content
    (folder / "z.csv").write_bytes(content)
    raw = {
        k: copy.deepcopy(REAL[k])
        for k in ("title", "paper", "table", "kind", "metric", "statistic", "base")
    }
    raw |= {
        "published": "z.csv",
        "columns": [REAL["columns"][0] | {"published": draw.draw(filters)}],
        "methods": {
            name: REAL["methods"][name]
            | draw.draw(st.just({}) | st.fixed_dictionaries({"published": filters}))
            for name in KEPT[:2]
        },
    }
    (folder / "z.toml").write_text("\n".join(toml(raw)), encoding="utf-8")
    if spec := check_spec(folder / "z.toml"):
        assert len(tables.table(spec, "paper", folder / "none")) >= 2


# --- the command line

OWN = TOY | dict(
    base=BASE | dict(rounds=1, clients=3),
    columns=[{}, {"label": "b, c", "clients": 2, "source": "guess: toy"}],
    methods={"FedAvg": {}, "FedProx": {}},
    tiers={"smoke": {"base": {}}},
)
JUNK = [
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "2",
    "1e9",
    "nan",
    "9" * 5000,
    "1001",
    "~",
    "~nosuch",
    "~nosuch/x",
    ".",
    "..",
    "a" * 5000,
    "a/" * 3000,
    "\0",
    "x\0y",
    "\n",
    "\x1b[31m",
    "\udc80",
    "😀",
    "x.toml",
    "papers/own/t.toml",
    "papers/own/bad.toml",
    "papers/own",
    "file",
    "file/x",
    "folder",
    "none",
    "--help",
    "--tier",
    "--seeds=3",
    "x.png",
    "x.doc",
    "own.py",
]
# stays in the folder
junk = st.sampled_from(JUNK) | st.text(max_size=6).map(
    lambda t: t.replace("/", "").replace("..", "")
)
VALUES = {
    "tier": ["smoke", "paper", "smok"],
    "methods": ["FedAvg", "FedAvg,FedProx", "FedAvg, FedFoo", ","],
    "datasets": ["digits", "b, c", "digits,b, c", "MNIST"],
    "seeds": ["1", "3", "1000"],
    "device": ["auto", "cpu", "gpu"],
    "data": ["folder", "none"],
    "results": ["folder", "none"],
    "workers": ["1", "2", "1000000"],
    "executor": ["auto", "stacked", "processes", "threads"],
    "format": ["text", "md", "csv", "html", "pdf"],
    "out": ["folder/x.png", "x.pdf", "file/x.png"],
    "spec": ["own/t", "papers/own/t.toml", "fedccfa/table1"],
    "specs": ["own/t", "papers/own/t.toml"],
    "name": ["digits", "MNIST", "minst"],
    "imports": ["own.py", "wrong.py", "stops.py"],
    "file": ["x.json", "folder"],
    "rounds": ["1", "2"],
    "samples": ["100"],
}
COMMANDS = typer.main.get_command(app.app)


@st.composite
def command_lines(draw):
    "A command with its own options and values that mostly fit, then at most two changes"
    name = draw(st.sampled_from([*sorted(COMMANDS.commands), *["run"] * 12]))

    def values(p):
        return most_often(st.sampled_from(VALUES.get(p.name, ["1"])), junk)

    def words(p):
        if p.param_type_name == "argument":
            return [
                draw(values(p))
                for _ in range(
                    draw(st.sampled_from([1, 1, 1, 1, 2] if p.nargs < 0 else [1, 1, 1, 1, 0]))
                )
            ]
        return (
            []
            if draw(st.integers(0, 3))
            else [draw(st.sampled_from(p.opts)), *([] if p.is_flag else [draw(values(p))])]
        )

    line = (
        [w for p in COMMANDS.params if not draw(st.integers(0, 5)) for w in words(p)]
        + [name]
        + [w for p in COMMANDS.commands[name].params for w in words(p)]
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(line)))
        line[at : at + draw(st.integers(0, 1))] = [draw(junk)] * draw(st.integers(0, 1))
    return line


@pytest.fixture
def own(tmp_path, monkeypatch):
    "A working folder with specs; what computes or downloads is replaced by a note of it"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "papers/own").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    for name, text in {
        "papers/own/t.toml": "\n".join(toml(OWN)),
        "file": "",
        "own.py": "x = 1",
        "wrong.py": "1 / 0",
        "stops.py": "raise ValueError('a\\nb')",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "ours/papers/fedccfa").mkdir(parents=True)
    for name, content in FILES.items():
        if name[0] == "_" or "table1." in name:
            (tmp_path / "ours/papers/fedccfa" / name).write_bytes(content)
    # few tables: `tables` reads them all
    monkeypatch.setattr(folders, "roots", lambda: [tmp_path, tmp_path / "ours"])
    done = []

    def pretend(
        runs, results, data=None, device="cpu", workers=1, quiet=False, executor="auto", **_
    ):
        COUNT(workers, "workers")
        choice(executor, executors.executor_names(), "executor")
        for t in {r.tier for r in runs}:
            store.check_writable(Path(results) / t)
        done.append(runs)
        return runner.SweepReport(
            failed={"x": "y"} if len(runs) == 2 else {}, interrupted=len(runs) == 4
        )

    for module in (runner, compare):
        monkeypatch.setattr(module, "compute_runs", pretend)
    monkeypatch.setattr(contract, "describe_method", lambda method: {})
    monkeypatch.setattr(
        datasets,
        "download",
        lambda name, folder=None: choice(name, datasets.dataset_names(), "data set"),
    )
    return done


@pytest.fixture(scope="module")
def tally():
    return {0: 0, 1: 0, 2: 0, 130: 0}


def said(argv):
    "Exit code, stdout and stderr of a command; the code and the lines are as they must be"
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), answered_in_time():
            code = main.main(argv)
    finally:
        os.environ.pop("FEDREPRO_METHODS", None)
    out, err = ((f.flush(), f.buffer.getvalue().decode())[1] for f in (out, err))
    assert code in (0, 1, 2, 130), code
    if code == 2:
        assert (
            err.endswith("\n")
            and err.startswith("fedrepro: ")
            and err[:-1].isprintable()
            and len(err) < 1100
            and out == ""
        ), (out, err)
    assert "Traceback" not in err
    return code, out, err


@inputs
# one of two runs fails: 1
@example(argv="run own/t --tier smoke --seeds 1 --methods FedAvg".split())
@example(argv="run own/t --tier smoke --seeds 1".split())  # interrupted: 130
@given(argv=command_lines())
def test_any_command_line_is_done_or_refused_in_one_line(own, tally, argv):
    "Exit code 2 is one line, said before anything is computed"
    own.clear()
    code, out, err = said(argv)
    tally[code] += 1
    event(f"exit code {code}")
    assert not (code == 2 and own), ("refused after the work was done", err)


def test_all_exit_codes_were_seen(tally):
    assert (
        not sum(tally.values())
        or min(tally[0], tally[2]) > inputs.max_examples / 10
        and tally[1]
        and tally[130]
    ), tally


# --- papermill parameters

PAGES = ["10_lfd", "11_feddc", "12_fedadc", "13_fedbss", "14_fedccfa"]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_hands_all_its_parameters_over(page):
    "The cell's names, types and defaults are those of `planned_table`, which the next cell calls with each of them"
    cells = [
        c
        for c in nbformat.read(ROOT / f"nbs/06_methods/{page}.ipynb", 4).cells
        if c.cell_type == "code"
    ]
    at = next(i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", []))
    names = {}
    exec(cells[at].source, names)
    types = names["__annotations__"]
    defaults = {k: v for k, v in names.items() if not k.startswith("__")}
    # the page's own table
    wanted = {
        n: p for n, p in inspect.signature(notebook.planned_table).parameters.items() if n != "main"
    }
    assert defaults == {n: p.default for n, p in wanted.items()}
    assert types == {n: p.annotation for n, p in wanted.items()}
    assert {p.name for p in PythonTranslator.inspect(cells[at])} == set(wanted), (
        "a second = in a line, even in a comment, papermill cannot read"
    )
    assert (
        "".join(cells[at + 1].source.split())
        .rpartition(",main=")[0]
        .endswith(f"job=planned_table({','.join(f'{n}={n}' for n in wanted)}")
    )


ids = st.lists(st.integers(0, 6), max_size=4) | st.sets(st.integers(0, 4)) | ODD

pairs = (
    st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True)
    | ODD
    | st.lists(st.integers(-1, 6), max_size=3)
)


@inputs
@given(
    st.lists(st.tuples(most_often(st.integers(0, 6)), ids, pairs), max_size=6),
    most_often(st.integers(1, 6)),
    most_often(st.integers(1, 6)),
    st.booleans(),
)
def test_any_schedule_of_ones_own(swaps, clients, classes, odd):
    made = []
    for swap in swaps:
        try:
            made.append(Swap(*swap))
        except InputError as error:
            clear(error)
    try:
        s = DriftSchedule("any", clients, classes, [*made, "x"] if odd and len(made) > 4 else made)
    except InputError as error:
        return clear(error)
    if s.clients * s.classes < 10**5:
        check_schedule(s, [3])
