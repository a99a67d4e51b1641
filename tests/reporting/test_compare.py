"A comparison of one's own: the same runs as a spec's, nothing computed twice, and one line for everything wrong"

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fedrepro.core.errors import InputError
from fedrepro.core.folders import find_specs
from fedrepro.data.datasets import DATA_CARDS
from fedrepro.engine.method import METHODS, FedAvg
from fedrepro.experiments.specs import load_spec
from fedrepro.models.networks import network_names
from fedrepro.reporting.compare import (
    COMMON,
    OPTIMISER,
    OWN_TIER,
    as_toml,
    compare,
    label_of,
    rows_of,
    scaled,
)
from fedrepro.engine.rows import METRICS
from fedrepro.reporting.printed_tables import render, seed_listing
from toy import OURS, ROOT, one_line

TINY = dict(clients=3, rounds=2, epochs=1, batch_size=64, seeds=2, quiet=True)
LINE = (
    "--clients 3 --rounds 2 --epochs 1 --batch-size 64 --seeds 2 --workers 1 --device cpu".split()
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def found(folder):
    return compare(["FedAvg", "FedProx:mu=0.1"], folder=folder, **TINY)


def test_the_numbers_are_those_of_the_rows(found):
    last = found.frame.groupby(["row", "seed"]).generalised_accuracy.agg(["last", "max", "mean"])
    for line in found.summary.to_dict("records"):
        mine = last.loc[line["row"]]
        assert line["n"] == 2
        assert np.isclose(line["mean"], mine["last"].mean())
        assert np.isclose(line["std"], mine["last"].std(ddof=1))
        assert np.isclose(line["best"], mine["max"].mean())
        assert np.isclose(line["mean_last_10"], mine["mean"].mean())
    shown = repr(found)
    assert f"{line['mean']:.2f} ± {line['std']:.2f} (2)" in shown
    assert "generalised_accuracy: %" in shown
    assert "mean last 10" in shown
    for word in ("published", "verdict", "difference", "reduced"):
        assert word not in shown


def test_a_result_shows_itself(found):
    assert "<th>last ± std (n)</th>" in found._repr_html_()
    assert "| FedAvg |" in found._repr_markdown_()
    for text in (repr(found), found._repr_html_(), found._repr_markdown_()):
        assert text.index("generalised accuracy") < text.index("personalised accuracy")
        assert "no drift" in text
    figure = found.plot()
    names = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert set(names) == {"FedAvg", "FedProx:mu=0.1"}
    assert names["FedAvg"] == "#000000", "FedAvg's colour everywhere"
    assert set(found.frame.groupby(["row", "seed"]).size()) == {2}


def test_values_in_a_text_have_their_types():
    assert rows_of(["FedADC:covering=true,beta=0.5,variant=nesterov"]) == {
        "FedADC:covering=true,beta=0.5,variant=nesterov": {
            "class": "FedADC",
            "covering": True,
            "beta": 0.5,
            "variant": "nesterov",
        }
    }


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        1e-5,
        1e22,
        3,
        True,
        'a "quoted" \\ text, ünï, 😀',
        [1, 2],
        np.float64(0.5),
        np.int64(7),
        {"value": 2, "source": "x"},
        float("inf"),
    ],
)
def test_values_are_read_back(value):
    assert tomllib.loads(f"v = {as_toml(value)}")["v"] == value


def test_every_wait_is_found():
    "A field that counts rounds and defaults to more than a short run has would leave the method without its effect"
    for name, cls in OURS.items():
        row = {k: v["value"] for k, v in scaled({"class": name}, 20).items() if k != "class"}
        left = {
            k: v
            for k, v in vars(cls()).items()
            if isinstance(v, int)
            and not isinstance(v, bool)
            and v >= 20
            and k not in row
            and k != "batch_size"
        }
        assert not left and all(1 <= v <= 5 for v in row.values()), (name, left, row)


def test_every_data_set_has_a_network_that_fits_it():
    usual = {name: card.network for name, card in DATA_CARDS.items()}
    assert set(usual.values()) <= set(network_names())
    papers = [load_spec(p) for p in find_specs(ROOT / "papers").values()]
    used = {
        (c.settings["data"]["name"], c.settings["network"])
        for s in papers
        for t in s.tiers
        for c in s.runs(t, seeds=1)
    }
    # as Fashion-MNIST, as CIFAR-10, as ImageNet
    alike = {"MNIST", "CIFAR-100", "EMNIST-letters", "EMNIST-letters-10", "Tiny-ImageNet"}
    assert {pair for pair in usual.items() if pair not in used and pair[0] not in alike} == set()


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(methods=["FedAvgg"]), ["'FedAvgg'", "FedAvg"]),
        (dict(methods=[]), ["no method"]),
        (dict(methods=["FedAvg", "FedAvg"]), ["twice"]),
        (dict(methods=["FedAvg:lr=0.1, lr=0.2"]), ["'FedAvg:lr=0.1, lr=0.2'", "lr is set twice"]),
        (dict(methods=["FedAvg:class=FedProx"]), ["class is set twice"]),
        (dict(methods=["FedProx:mu"]), ["FedProx:mu", "key=value"]),
        (dict(methods=["FedAvg:"]), ["'FedAvg:' is neither NAME nor NAME:key=value"]),
        (dict(methods=["FedAvg:lr=0.1,"]), ["'FedAvg:lr=0.1,' is neither NAME nor"]),
        (
            dict(methods=["FedAvg:lr=[1,2]"]),
            ["'2]' is not key=value; a list of values needs a spec"],
        ),
        (dict(methods=["FedAvg:lr=0.1,0.2"]), ["'0.2' is not key=value; a list", "needs a spec"]),
        (dict(methods=["FedProx:nu=1"]), ["'nu'", "mu"]),
        (dict(methods={"x": {}}), ["'x'"]),
        (dict(methods={"a": "FedProx"}), ["'a'", "'FedProx'"]),
        (dict(methods={"FedAvg": None}), ["'FedAvg'", "None"]),
        (dict(methods={"FedAvg": {"lr": object()}}), ["object"]),
        (dict(dataset="digit"), ["'digit'", "digits"]),
        (dict(alpha=0), ["alpha", "0"]),
        (dict(alpha=0.1, partition="iid"), ["compare: alpha: partition iid has no concentration"]),
        (dict(drift_round=1), ["compare: drift_round: drift none has no such round"]),
        (dict(drift="sudden", drift_round=2), ["drift_round 2"]),
        (dict(drift=["sudden"]), ["drift"]),
        (dict(rounds="2"), ["rounds", "'2'"]),
        (dict(seeds=[1, 1]), ["seeds", "twice"]),
        (dict(clients=10**4), ["10000"]),
        (dict(executor="threads"), ["'threads'"]),
        (dict(log=["tensorbord:x"]), ["'tensorbord'"]),
    ],
)
def test_refused(change, words, tmp_path):
    with one_line(*words) as error:
        compare(**{"methods": ["FedAvg"], **TINY, "folder": tmp_path / "out", **change})
    assert not list(tmp_path.rglob("*.jsonl"))
    assert not list(tmp_path.rglob("*.toml"))
    assert "/tmp" not in str(error.value)


def test_a_setting_is_named_by_its_recipe():
    base = dict(dataset="digits", clients=3, drift="none", alpha_dirichlet=0.1)
    assert "Dir(0.1)" in label_of(base | {"partition": "dirichlet-class-5"})
    for recipe in ("quantity-skew", "dirichlet-client"):
        assert f"{recipe}, alpha 0.1" in label_of(base | {"partition": recipe})


def test_the_command(said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = said("compare", "FedAvg", *LINE, "--alpha", "1", "--drift", "sudden")
    assert code == 0
    assert "2 computed, 0 were there" in err
    assert "FedAvg" in out
    assert "Dir(1), sudden drift after round 1" in out
    figure = Path(out.splitlines()[-1])
    assert figure.parent == Path("out/compare")
    assert figure.stat().st_size > 5000
    assert figure.with_suffix(".toml").exists()
    code, again, err = said(
        "compare",
        "FedAvg",
        *LINE,
        "--alpha",
        "1",
        "--drift",
        "sudden",
        "--quiet",
        "--out",
        "mine.svg",
    )
    assert (code, err) == (0, "")
    assert again.splitlines()[:-1] == out.splitlines()[:-1]
    assert Path("mine.svg").exists()
    code, table, _ = said(
        "table", figure.with_suffix(".toml"), "--tier", OWN_TIER, "--format", "csv"
    )
    assert code == 0
    assert table.count("\n") == 2
    for wrong, word in [
        ("--alpha x", "--alpha"),
        ("--clients 0", "'0'"),
        ("--dataset digit", "did you mean 'digits'"),
        ("--participation 2", "participation"),
    ]:
        refused(["compare", "FedAvg", *LINE, *wrong.split()], word)


def test_the_command_and_the_function_have_the_same_defaults():
    import inspect
    from fedrepro.cli.own import compare_command

    ours, theirs = (inspect.signature(f).parameters for f in (compare, compare_command))
    # a command may use all cores; a notebook's own methods are here alone
    same = set(ours) & set(theirs) - {"methods", "folder", "workers"}
    assert len(same) > 14
    assert {n: ours[n].default for n in same} == {n: theirs[n].default for n in same}
    assert Path(ours["folder"].default) == theirs["folder"].default


def test_a_method_of_ones_own(folder):
    class Lazy(FedAvg):
        "Keeps its first model"

        def aggregate(self, server, exchange):
            return server

    own = compare({"ours": {"class": "Lazy"}, "FedAvg": {}}, folder=folder, **TINY)
    curve = own.frame[own.frame.row == "ours"].groupby("seed").generalised_accuracy
    shown = own.summary
    assert own.report.failed == {}
    assert (curve.nunique() == 1).all()
    assert list(own.spec.rows) == ["ours", "FedAvg"]
    assert set(shown.metric) == {"generalised_accuracy"} <= set(METRICS)


OWN = {  # what these classes say themselves, where FedAvg has the common momentum, no weight decay and no clipping
    "SCAFFOLD": dict(momentum=0.0),
    "FedADC": dict(momentum=0.0),
    "FedDC": dict(momentum=0.0, weight_decay=1e-3, clip_norm=10.0),
}
TYPED = {
    "FedProx:momentum=0.5": dict(momentum=0.5),
    "FedDC:clip_norm=none,momentum=0": dict(momentum=0.0, weight_decay=1e-3),
}
USUAL = dict(lr=0.03, momentum=0.9, weight_decay=0.0, lr_decay=1.0, clip_norm=None)


@pytest.fixture
def planned(monkeypatch, tmp_path):
    "A function that returns the runs of a comparison, which are not computed"

    class Stop(Exception):
        pass

    runs = []

    def stop(found, *_, **__):
        runs.extend(found)
        raise Stop

    monkeypatch.setattr("fedrepro.reporting.compare.compute_runs", stop)

    def plan(rows, **settings):
        runs.clear()
        with pytest.raises(Stop):
            compare(rows, folder=tmp_path, seeds=1, **settings)
        return {c.row: c.settings for c in runs}

    return plan


def optimiser(settings: dict) -> dict:
    return {k: settings["method"]["fields"][k] for k in OPTIMISER}


def test_a_class_s_own_momentum_decay_and_clipping_come_before_the_common_ones(planned):
    "The learning rate, its decay, epochs and batches are common to all rows"
    found = planned(["FedAvg", *OWN, *TYPED])
    assert {row: optimiser(s) for row, s in found.items()} == {
        row: USUAL | (OWN | TYPED).get(row, {}) for row in found
    }
    assert len({repr({k: v for k, v in s.items() if k != "method"}) for s in found.values()}) == 1
    assert (
        len(
            {
                (s["method"]["fields"]["epochs"], s["method"]["fields"]["batch_size"])
                for s in found.values()
            }
        )
        == 1
    )


def test_what_is_typed_comes_before_a_class_s_own(planned):
    found = planned(
        ["FedAvg", "FedADC", "FedADC:momentum=0.2", "FedDC"], momentum=0.0, weight_decay=0.0
    )
    assert {row: optimiser(s)["momentum"] for row, s in found.items()} == {
        "FedAvg": 0.0,
        "FedADC": 0.0,
        "FedADC:momentum=0.2": 0.2,
        "FedDC": 0.0,
    }
    assert {optimiser(s)["weight_decay"] for s in found.values()} == {0.0}
    assert planned(["FedADC"], momentum=0.5)["FedADC"]["method"]["fields"]["momentum"] == 0.5


def test_every_method_has_its_own_default_or_the_common_one(planned):
    "Whoever declares a momentum, declares it below FedAvg"
    names = [n for n in OURS if n != "Union"]
    for name, settings in planned(names, clients=5).items():
        own = OURS[name]()
        said = {
            k: getattr(own, k)
            for k in COMMON
            if any(k in vars(c).get("__annotations__", {}) for c in OURS[name].__mro__[:-2])
        }
        assert optimiser(settings) == USUAL | said, name


@pytest.mark.parametrize(
    "rows, settings",
    [
        (["SCAFFOLD"], dict(momentum=0.9)),
        (["FedAvg", "SCAFFOLD"], dict(momentum=0.1)),
        (["SCAFFOLD:momentum=0.9"], {}),
        (["FedDC:momentum=0.5"], {}),
    ],
)
def test_what_a_formula_excludes_is_refused_in_one_line(rows, settings, tmp_path):
    with one_line("compare: ", "momentum", "expected 0", "plain SGD"):
        compare(rows, folder=tmp_path, **settings)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("setting", [dict(momentum=0.9), dict(weight_decay=1e-4)])
def test_what_a_method_would_not_use_is_refused_in_one_line(setting, tmp_path):
    with one_line("compare: pFedMe: ", *setting, "expected 0: its steps have none"):
        compare(["FedAvg", "pFedMe"], folder=tmp_path, **setting)
    assert not any(tmp_path.iterdir())


def test_with_a_source_of_its_own_it_is_computed(planned):
    asked = {
        "SCAFFOLD": {},
        "as printed": {"class": "SCAFFOLD", "momentum": {"value": 0.9, "source": "paper 5.1"}},
    }
    assert {row: optimiser(s)["momentum"] for row, s in planned(asked).items()} == {
        "SCAFFOLD": 0.0,
        "as printed": 0.9,
    }


def test_a_method_of_ones_own_declares_both(planned, tmp_path):
    @dataclass
    class PerStep(FedAvg):
        momentum: float = 0.0
        excluded: ClassVar[dict[str, str]] = {"momentum": "counts steps of plain SGD"}

    @dataclass
    class PerStepToo(PerStep):
        mu: float = 0.1

    try:
        assert {optimiser(s)["momentum"] for s in planned(["PerStep", "PerStepToo"]).values()} == {
            0.0
        }
        with one_line("PerStepToo: momentum 0.9: expected 0: counts steps of plain SGD"):
            compare(["PerStepToo"], momentum=0.9, folder=tmp_path)
    finally:
        for name in ("PerStep", "PerStepToo"):
            METHODS.pop(name)


def test_a_default_that_has_no_effect_is_refused():
    class Bare(FedAvg, listed=False):
        momentum = 0.0

    class Undecorated(FedAvg, listed=False):
        momentum: float = 0.0

    for cls in (Bare, Undecorated):
        with one_line(f"{cls.__name__} momentum = 0.0: changes nothing", "@dataclass"):
            cls()


def test_every_difference_between_rows_is_printed(tmp_path):
    rows = ["FedAvg", "FedProx:momentum=0.5", "FedADC"]
    small = dict(clients=3, rounds=1, seeds=1, epochs=1, folder=tmp_path, quiet=True)
    found = compare(rows, **small)
    fields = {c.row: c.settings["method"]["fields"] for c in found.spec.runs(OWN_TIER)}
    said = {
        note.partition(": ")[0]: note
        for note in found.sheet().notes
        if note.partition(": ")[0] in rows
    }
    for row, own in fields.items():
        for k, v in own.items():
            differs = any(other.get(k, "absent") != v for other in fields.values())
            assert differs == (f"{k.replace('_', ' ')} " in said[row].replace(f"{row}: ", "")), (
                row,
                k,
                said,
            )
    assert set(said) == set(rows)
    assert "momentum 0.5" in said[rows[1]]
    assert "momentum 0.9" in said["FedAvg"]


def test_a_name_of_ones_own(tmp_path):
    small = dict(clients=3, rounds=1, seeds=1, epochs=1, folder=tmp_path, quiet=True)
    assert compare("FedAvg", name="mine", **small).spec.path == tmp_path / "mine.toml"
    with pytest.raises(InputError, match="compare: name 'a/b': expected letters"):
        compare("FedAvg", name="a/b", **small)


def test_only_the_seeds_that_are_asked_for_are_shown(tmp_path):
    "A second comparison in a folder does not average the first one's seeds; a table of its file does, and says so"
    small = dict(clients=3, rounds=1, epochs=1, folder=tmp_path, quiet=True)
    first = compare("FedAvg", seeds=[0], **small)
    second = compare("FedAvg", seeds=[5], **small)
    for shown, seed in ((first, 0), (second, 5)):
        assert set(shown.frame.seed) == {seed}
        assert list(shown.summary.seeds) == [(seed,)]
        last = shown.frame.generalised_accuracy.iloc[-1]
        assert f"{last:.2f} (1)" in repr(shown)
        assert "stored seeds" not in repr(shown)
    table = render(load_spec(second.spec.path), OWN_TIER)
    mean = (first.summary["mean"] + second.summary["mean"]).iloc[0] / 2
    assert f"{mean:.2f} ± " in table
    assert "averaged over all stored seeds: 0 and 5; the spec lists 5" in table


def test_a_row_has_the_seeds_of_its_own(tmp_path):
    small = dict(clients=3, rounds=1, epochs=1, folder=tmp_path, quiet=True)
    rows = {"A": {"class": "FedAvg"}, "B": {"class": "FedAvg", "seeds": [1]}}
    found = compare(rows, seeds=[0], **small)
    assert dict(zip(found.summary.row, found.summary.seeds)) == {"A": (0,), "B": (1,)}


def test_many_seeds_are_said_by_their_ends():
    assert seed_listing([2, 0]) == "0 and 2"
    assert seed_listing(range(3, 14)) == "11 seeds from 3 to 13"
