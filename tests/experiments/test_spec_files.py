"Specs: every committed one says what the paper says; whatever is wrong in one is said in a single line"

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal  # noqa: F401 (read from a text)

import numpy as np
import pytest

from fedrepro.core.errors import InputError
from fedrepro.core.folders import find_specs
from fedrepro.engine.method import FedAvg, load_methods
from fedrepro.engine.rows import METRICS, Metric
from fedrepro.experiments.rules import (
    SETTINGS,
    SOURCE_KINDS,
    field_rules,
    line_finder,
    read_published_csv,
)
from fedrepro.experiments.runs import build, method_settings, pick_device, run_id
from fedrepro.experiments.specs import CHECKS, NOTHING, Change, Column
from fedrepro.experiments.specs import load_spec, rests_on
from fedrepro.models.architectures import ARCHITECTURES
from fedrepro.reporting.printed_tables import render
from toy import BASE, ROOT, TOY, one_line, written

SPECS = find_specs(ROOT / "papers")
TEXT = (ROOT / "tests/spec.toml").read_text()  # Table 2 in one file, for what is wrong in one


# --- the committed specs


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_loads_and_every_value_has_a_source(name):
    "A smaller tier says that it is one; no published number stands beside part of a data set"
    spec = load_spec(name, ROOT / "papers")
    assert spec.name == name == load_spec(SPECS[name]).name
    assert spec.reductions("paper") == []
    for tier in spec.tiers:
        for column in spec.tier_columns(tier):
            for row in spec.rows:
                values = spec.values(tier, row, column)
                assert all(v.source.startswith(SOURCE_KINDS) for v in values.values())
                assert tier != "paper" or "partial" not in str(values["dataset"].value), (
                    column.label
                )
        changed = [
            v
            for layer in (spec.tiers[tier].base, *spec.tiers[tier].methods.values())
            for v in layer.values()
        ]
        assert bool(changed) == (tier != "paper")
        assert all(v.source.startswith("tier:") for v in changed)


@pytest.mark.parametrize("name", SPECS)
def test_every_published_number_is_found_exactly_once(name):
    "Every column is in the paper, and a row that is, or that says where, is there once for each column; or they say why not"
    spec = load_spec(SPECS[name])
    if spec.published is None:
        return
    lines = line_finder(read_published_csv(spec.published), name)

    def found(where):
        return lines(where).sum()

    for part in [
        *spec.columns,
        *spec.rows.values(),
        *(c for tier in spec.tiers.values() for c in tier.columns),
    ]:
        if part.unpublished:
            assert part.published == NOTHING
            assert not found(part.published)
        elif isinstance(part, Column):
            assert found(part.published), part
    for row in spec.rows.values():
        if row.unpublished or row.published == {"method": row.name} and not found(row.published):
            continue  # a row of our own
        for column in spec.columns:
            assert found(row.published | column.published) == (not column.unpublished), (
                row.name,
                column.label,
            )


def test_table_2_at_the_paper_tier_is_section_5_of_the_paper():
    spec = load_spec("fedccfa/table2", ROOT / "papers")
    settings = {(r.row, r.column, r.seed): r.settings for r in spec.runs("paper")}
    # AdapFedAvg's are FedAvg's
    assert len(settings) == 19 * 6 * 3
    assert len({c.run_id for c in spec.runs("paper")}) == 18 * 6 * 3
    for seed in (0, 1, 2):
        assert (
            settings["AdapFedAvg", "CIFAR-10, 20 clients", seed]
            == settings["FedAvg", "CIFAR-10, 20 clients", seed]
        )
    seeds = [c.seed for c in spec.runs("paper")]
    assert seeds == sorted(seeds), "the most valuable runs come first"
    s = settings["FedCCFA", "CIFAR-10, 100 clients", 2]
    assert (s["rounds"], s["participation"], s["seed"], s["network"]) == (
        200,
        0.2,
        2,
        "fedccfa_cifar",
    )
    assert s["partition"] == dict(
        recipe="dirichlet-class-5", clients=100, seed=0, alpha=0.5, per_class=5, per_class_test=2
    )
    assert s["drift"] == dict(name="sudden", at=100)
    want = dict(
        lr=0.01,
        momentum=0.9,
        weight_decay=1e-5,
        epochs=5,
        batch_size=64,
        head_lr=0.1,
        head_epochs=1,
        gamma=20.0,
        eps=0.1,
        tau=0.1,
        align_from=20,
        balanced_steps=5,
        balanced_samples=5,
        variant="as_published",
    )
    assert s["method"]["fields"] | want == s["method"]["fields"]
    assert settings["FedProx", "Fashion-MNIST, 20 clients", 0]["method"]["fields"]["mu"] == 0.01
    sparse = {row for (row, column, seed), s in settings.items() if s["every"] == 10}
    assert sparse == {"pFedMe", "Ditto"}
    assert all(
        s.get("last", 1) == (10 if row in sparse else 1) for (row, *_), s in settings.items()
    )


def test_rows_beside_published_numbers_are_what_was_run():
    "The released code's algorithms; what repairs them is a row of its own, without a published number"
    for name in ("table1", "table2", "table6", "table7", "table9", "table10"):
        spec = load_spec(SPECS[f"fedccfa/{name}"])
        paper = set(read_published_csv(spec.published)["method"])
        variants = {
            c.row: c.settings["method"]["fields"].get("variant") for c in spec.runs("paper")
        }
        for row in ("FedPAC", "Flash", "FedDrift", "FedCCFA"):
            assert row in paper
            assert variants[row] == "as_published"
        mended = {row: variants[row] for row in spec.rows if row not in paper}
        # None: Flash's default, honest
        assert len(mended) == 5
        assert set(mended.values()) == {"corrected", "adaptive", None}


def test_table_1_is_table_2_without_drift():
    one, two = (load_spec(f"fedccfa/table{n}", ROOT / "papers").runs("paper") for n in (1, 2))
    assert [a.settings | {"drift": 0} for a in one] == [b.settings | {"drift": 0} for b in two]
    assert {a.settings["drift"]["name"] for a in one} == {"none"}


# --- names


def test_no_hyper_parameter_is_called_like_a_setting():
    for name, method in load_methods().items():
        assert not set(field_rules(method)) & set(SETTINGS), name


@pytest.mark.parametrize("name", SPECS)
def test_some_rows_of_a_table_are_the_same_runs(name, tmp_path):
    "With the row that the others are compared with and without it, in a folder of one's own"
    if load_spec(SPECS[name]).difference:
        return

    def copy(text):
        (tmp_path / "copy.toml").write_text(f'extends = "{name}"\n{text}\n')
        return load_spec(tmp_path / "copy.toml")

    whole = copy("")
    rows = list(whole.rows)
    for chosen in (rows[-2:], rows[:2], list(whole.gap[:1]) or rows[:1]):
        some = copy(f"rows = {json.dumps(chosen)}")
        assert list(some.rows) == chosen
        assert some.tiers.keys() == whole.tiers.keys()
        assert ("changed copy" in some.title) == (name in CHECKS)
        for tier in whole.tiers:
            ids = [run.run_id for run in whole.runs(tier, methods=chosen)]
            assert [run.run_id for run in some.runs(tier)] == ids


def test_a_row_that_no_file_has_is_named(tmp_path):
    (tmp_path / "some.toml").write_text('extends = "fedccfa/table2"\nrows = ["FedAvgg"]\n')
    with one_line("rows: row 'FedAvgg' is unknown; did you mean 'FedAvg'"):
        load_spec(tmp_path / "some.toml")


def test_a_new_version_of_a_method_is_a_new_run(monkeypatch):
    before = load_spec(SPECS["fedccfa/table2"]).runs("smoke", methods=["FedProx"])[0]
    monkeypatch.setattr(load_methods()["FedProx"], "version", 2)
    after = load_spec(SPECS["fedccfa/table2"]).runs("smoke", methods=["FedProx"])[0]
    assert before.run_id != after.run_id
    assert run_id(before.settings) == before.run_id


# --- what is judged needs a margin


@pytest.mark.parametrize("unit, margin", [("%", None), ("", 0.02), ("", None)])
def test_published_numbers_that_are_not_in_percent_need_a_margin(
    tmp_path, unit, margin, monkeypatch
):
    monkeypatch.setitem(METRICS, "f1", Metric("f1", unit=unit, higher_is_better=True))
    raw = TOY | dict(metric="f1", published="x.published.csv")
    if margin:
        raw["margin"] = margin
    path = written(tmp_path, raw, csv="method,mean,std\nFedAvg,0.83,0.01\n")
    if unit or margin:
        assert load_spec(path).margin == margin
    else:
        with one_line("margin: expected the difference that matters, because f1 is not in percent"):
            load_spec(path)


# --- what a tier changes


@pytest.mark.parametrize("name", SPECS)
def test_what_a_tier_is_said_to_change_is_so_in_every_run_and_nothing_is_left_out(name):
    spec = load_spec(SPECS[name])
    labels = [column.label for column in spec.columns]
    for tier in set(spec.tiers) - {"paper"}:
        changes = spec.reductions(tier)
        for column in spec.tier_columns(tier):
            for row in spec.rows:
                values = spec.values(tier, row, replace(column, same_as={}))
                said = set()
                for change in changes:
                    if row in (change.rows or spec.rows):
                        if column.label in (change.columns or [column.label]):
                            assert values[change.key].value == change.new != change.paper
                            said.add(change.key)
                if column.label in labels:
                    there = spec.columns[labels.index(column.label)]
                    paper = spec.values("paper", row, replace(there, same_as={}))
                    assert said == {
                        k for k in values if k not in paper or values[k].value != paper[k].value
                    }


# --- layers, on a written spec


def test_layers_from_general_to_special(tmp_path):
    row = dict(lr=0.3, source="tuned: toy")
    raw = TOY | dict(
        base=BASE | dict(lr=0.1, momentum=0.1, epochs=1),
        columns=[
            dict(
                lr=0.2,
                momentum=0.2,
                source="paper",
                methods={"half": dict(momentum=0.6, epochs=7, source="paper")},
            )
        ],
        methods={
            "FedAvg": row,
            "half": {"class": "FedAvg", "momentum": 0.5, "clients": 5, "source": "paper"},
        },
        tiers={
            "smoke": dict(
                base=dict(epochs=3, lr=0.9, source="tier: x"),
                methods={"half": dict(epochs=4, source="tier: x")},
            )
        },
    )
    spec = load_spec(written(tmp_path, raw))

    def fields(tier, row):
        found = spec.runs(tier, methods=[row])[0].settings["method"]["fields"]
        return [found[k] for k in ("lr", "momentum", "epochs")]

    assert fields("paper", "FedAvg") == [0.3, 0.2, 1]
    assert fields("smoke", "FedAvg") == [0.3, 0.2, 3]
    assert fields("paper", "half") == [0.2, 0.6, 7]
    assert fields("smoke", "half") == [0.2, 0.6, 4]
    assert spec.runs("smoke", methods=["half"])[0].settings["partition"]["clients"] == 5
    assert spec.reductions("smoke") == [
        Change("epochs", 3, 1, rows=("FedAvg",)),
        Change("epochs", 4, 7, rows=("half",)),  # the rate of both is the column's at every tier
    ]
    wrong = TOY | dict(
        columns=[dict(methods={"hlaf": dict(lr=0.1, source="paper")})],
        methods={"half": {"class": "FedAvg"}},
    )
    with pytest.raises(
        InputError, match="columns 1.methods: row 'hlaf' is unknown; did you mean 'half'"
    ):
        load_spec(written(tmp_path, wrong))


def test_noise_and_drift_reach_the_federation(tmp_path):
    raw = TOY | dict(
        base=BASE
        | dict(
            noise=0.3,
            drift="reoccurring",
            drift_round=0,
            drift_back=1,
            partition="dirichlet-class",
            alpha_dirichlet=0.7,
        )
    )
    method, federation, rounds = build(load_spec(written(tmp_path, raw)).runs("paper")[0])
    wrong = (federation.labels != federation.data.train_y).double().mean().item()
    assert rounds == 2
    assert abs(wrong - 0.3) < 0.01
    assert federation.drift.change_rounds == (0, 1)
    assert federation.partition.settings["alpha"] == 0.7


# --- what is wrong


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "rounds = {value = 200",
            'rounds = {value = "200"',
            "base.rounds: '200' is not an integer",
        ),
        (
            'source = "paper B.2"',
            'source = "somewhere"',
            "'somewhere' does not begin with one of: paper, code",
        ),
        (
            "[methods.FedProx]",
            "[methods.FedPrx]",
            "method 'FedPrx' is unknown; did you mean 'FedProx'?",
        ),
        (
            "mu = {value = 0.01",
            "mu = {value = 1e19",
            "mu: expected a number from -1e+18 to 1e+18, got 1e+19",
        ),
        ('dataset = "Fashion-MNIST"', 'dataset = "FashionMNIST"', "did you mean 'Fashion-MNIST'"),
        (
            "drift_round = {value = 100",
            "drift_round = {value = 200",
            "drift_round 200 comes after the last of 200 rounds",
        ),
        ("value = [0, 1, 2]", "value = [0, 1, 1]", "names a seed twice"),
        ('kind = "table"', "kind = 3", "kind: 3 is not a text"),
        (
            "participation = 1.0",
            "participation = 1.5",
            "participation: expected a number above 0, at most 1, got 1.5",
        ),
        ('paper = "FedCCFA"', "", "paper is not given"),
        ('metric = "generalised_accuracy"', 'metric = "accuracy"', "metric 'accuracy' is unknown"),
        ("table2.published.csv", "table9.csv", "table9.csv does not exist"),
        ("[base]", "[base", "not valid TOML"),
        (
            "[tiers.paper]",
            "[tiers.paper.base]\nrounds = 3",
            "the tier paper is the published setting",
        ),
        (
            "[tiers.small.methods.FedCCFA]",
            "[tiers.small.methods.FedCFA]",
            "row 'FedCFA' is unknown; did you mean 'FedCCFA'",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path, old, new, says):
    folder = tmp_path / "fedccfa"
    folder.mkdir()
    (folder / "table2.published.csv").write_text("method\n")
    assert old in TEXT
    (folder / "table2.toml").write_text(TEXT.replace(old, new, 1))
    with one_line(says, str(folder / "table2.toml")):
        load_spec(folder / "table2.toml")


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(columns=[]), "no columns"),
        (dict(methods={}), "no methods"),
        (dict(columns={}), "is not a list"),
        (dict(base=3), "not a table"),
        (dict(columns=[{}, {}]), "two columns are named 'digits, 4 clients'"),
        (dict(methods={"x": {"class": 3}}), "method 3 is unknown"),
        (dict(columns=[{"published": {"clients": [1]}}]), "neither text nor number"),
        (dict(tiers={"../up": {}}), "'../up' cannot name a tier"),
        (dict(methods={"a\nb": {"class": "FedAvg"}}), "'a\\nb' is not a text of one line"),
        (dict(base=BASE | dict(drift="sudden")), "drift_round is not given"),
        (
            dict(base=BASE | dict(clients=10**9)),
            "expected a whole number from 1 to 100000, got 1000000000",
        ),
        (
            dict(methods={"FedAvg": {"untuned": ""}}),
            "untuned: the length of '': expected a whole number of at least 1, got 0",
        ),
        (
            dict(methods={"FedAvg": {"unpublished": "ours", "published": {"method": "x"}}}),
            "published and unpublished contradict each other",
        ),
        (dict(methods={"A": 5, "FedAvg": {"like": "A"}}), "methods.A: 5 is not a table"),
        (
            dict(base=BASE | dict(partition_seed="trial")),
            "partition_seed 'trial' is unknown; accepted: seed",
        ),
        (dict(methods={"$\\frac$": {"class": "FedAvg"}}), "has more than one '$'"),
    ],
)
def test_wrong_parts_are_named(tmp_path, change, says):
    with one_line(says):
        load_spec(written(tmp_path, TOY | change))


def test_what_a_row_says_of_itself(tmp_path):
    "A row takes `untuned` from the row that it is like; why it stands beside nothing is its own"
    rows = {
        "FedProx": {
            "untuned": "mu: the grid was not searched",
            "mu": 0.1,
            "source": "guess: toy",
            "unpublished": "a row of ours",
        },
        "other": {"like": "FedProx", "mu": 0.2, "source": "guess: toy"},
        "FedAvg": {},
    }
    tiers = {"smoke": {"caption": "Too small to tell."}}
    s = load_spec(
        written(
            tmp_path,
            TOY
            | dict(
                methods=rows,
                tiers=tiers,
                columns=[{}, {"label": "b", "unpublished": "nothing is printed"}],
            ),
        )
    )
    assert {n: (r.untuned, r.unpublished) for n, r in s.rows.items()} == {
        "FedProx": ("mu: the grid was not searched", "a row of ours"),
        "other": ("mu: the grid was not searched", ""),
        "FedAvg": ("", ""),
    }
    assert s.rows["FedProx"].published == s.columns[1].published == NOTHING
    assert s.columns[0].published == {}
    assert s.tier("smoke").caption == "Too small to tell."
    assert s.tier("paper").caption == ""


def test_seeds_that_follow_the_trial_are_the_same_runs_as_if_they_were_written(tmp_path):
    def ids(**base):
        s = load_spec(written(tmp_path, TOY | dict(base=BASE | dict(seeds=[0, 3]) | base)))
        return {
            c.seed: (c.run_id, c.settings["partition"]["seed"], c.settings["cohort_seed"])
            for c in s.runs("paper")
        }

    own = ids(partition_seed="seed", cohort_seed="seed")
    fixed = ids(partition_seed=3, cohort_seed=3)
    assert own[0] == ids()[0]
    assert own[3] == fixed[3] != ids()[3]
    assert own[3][1:] == (3, 3)
    assert own[0] == ids(partition_seed=0, cohort_seed=0)[0]
    assert ids(partition_seed="seed")[3][1:] == (3, 0)


def test_unknown_names_and_unreadable_files(tmp_path):
    with one_line("did you mean 'fedccfa/table2'"):
        load_spec("fedccfa/tabel2")
    for name in ("a" * 5000, "a/" * 3000, "a\0b", "", "~"):
        with one_line("is unknown"):
            load_spec(name)
    with one_line("'.' is a folder; expected a toml file"):
        load_spec(".")
    for content in (b"\xff\xfe\x00", b"x = " + b"[" * 100_000):
        (tmp_path / "odd.toml").write_bytes(content)
        with one_line("not valid TOML"):
            load_spec(tmp_path / "odd.toml")
    spec = load_spec(SPECS["fedccfa/table2"])
    for call in (
        lambda: spec.runs("smal"),
        lambda: spec.runs("smoke", methods=["FedAvgg"]),
        lambda: spec.runs("smoke", seeds=0),
        lambda: spec.runs("smoke", seeds=[1, 1]),
        lambda: spec.runs("smoke", seeds=[-1]),
        lambda: pick_device("tpu"),
    ):
        with one_line():
            call()


def test_a_folder_of_ones_own_comes_first_and_hides_nothing(tmp_path, monkeypatch):
    own = written(tmp_path / "papers", TOY)
    monkeypatch.chdir(tmp_path)
    assert list(find_specs())[0] == "toy/x"
    assert set(SPECS) < set(find_specs())
    assert load_spec("toy/x").title == "t"
    assert load_spec("fedccfa/table2").paper == "FedCCFA"
    (tmp_path / "papers/fedccfa").mkdir()
    (tmp_path / "papers/fedccfa/table2.toml").write_text(own.read_text())
    assert load_spec("fedccfa/table2").title == "t"
    assert find_specs()["fedccfa/table2"].is_relative_to(tmp_path)
    assert load_spec("fedccfa/table1").paper == "FedCCFA"


def test_a_spec_rests_on_digests_not_on_contents(tmp_path):
    "A folder may have a csv of any size beside its specs"
    spec = tmp_path / "x.toml"
    table = tmp_path / "large.csv"
    spec.write_text("")
    table.write_bytes(b"1,2,3\n" * 200_000)
    files = rests_on(spec)
    assert spec in files
    assert table in files
    assert len(repr(files)) < 100_000
    table.write_bytes(b"1,2,4\n" * 200_000)
    assert rests_on(spec) != files


def test_what_replaces_a_name_of_the_package_is_refused_after_a_spec_was_read(monkeypatch):
    "The runs of a spec follow from what its names stand for now, in every process"
    spec = load_spec("fedccfa/table2")
    network = spec.runs("small", ["FedAvg"], seeds=1)[0].settings["network"]
    monkeypatch.setitem(ARCHITECTURES, network, lambda *args: None)
    with pytest.raises(InputError, match=f"{network} is a network of the package and was replaced"):
        load_spec("fedccfa/table2").runs("small", ["FedAvg"], seeds=1)


def test_a_file_that_an_editor_locks_is_no_spec(tmp_path):
    "A link to nowhere beside it"
    path = written(tmp_path, TOY)
    for name in ("x.csv", "x.toml"):
        path.with_name(f".#{name}").symlink_to("user@host.123")
    assert list(find_specs(tmp_path)) == ["toy/x"]
    assert load_spec(path).title == "t"


CSV = "method,variant,clients,mean,std\nFedAvg,,20,1,2\nFedAvg,,100,3,\nOther,a,20,5,6\nOther,b,20,7,8\n"


def beside(tmp_path, csv: str | bytes, row: dict, column: dict) -> Path:
    "A spec with one row and one column beside the published `csv`"
    raw = dict(
        published="x.csv",
        columns=[{"published": column}],
        methods={"FedAvg": {"published": row} if row else {}},
    )
    return written(tmp_path, TOY | raw, csv=csv or b"\n")


@pytest.mark.parametrize(
    "csv, row, column, says",
    [
        ("method,mean\nFedAvg,1", {}, {}, "column 'std' is missing"),
        ("method,mean,std\nFedAvg,1,0e400", {}, {}, "cannot be read as csv"),
        ("method,mean,std\nFedAvg,about 3,", {}, {}, "mean 'about 3' is not a finite number"),
        ("method,mean,std\nFedAvg,1,2,3", {}, {}, "more fields than the first"),
        ("method,mean,std\n3,1,2", {}, {}, "method: 3 is not a text"),
        (b"method,mean,std\n\xff\xfe,1,2", {}, {}, "cannot be read as csv ('utf-8'"),
        (CSV, {}, {"client": 20}, "column 'client' is unknown; did you mean 'clients'?"),
        (CSV, {}, {}, "2 lines of x.csv match {'method': 'FedAvg'}"),
        (CSV, {"metod": "FedAvg"}, {"clients": 20}, "did you mean 'method'?"),
    ],
)
def test_published_numbers_are_checked_before_anything_runs(tmp_path, csv, row, column, says):
    with one_line(says, str(tmp_path / "toy/x.")):
        load_spec(beside(tmp_path, csv, row, column))


def test_published_numbers_that_fit(tmp_path):
    spec = load_spec(beside(tmp_path, CSV, {}, {"clients": 20.0}))
    assert [len(render(spec, "paper", f)) > 0 for f in ("text", "csv")] == [True, True]
    # a row that the paper does not have
    load_spec(beside(tmp_path, CSV, {"method": "FedDyn"}, {"clients": 20}))
    load_spec(beside(tmp_path, CSV.replace("1,2", "1.5 , 2"), {}, {"clients": 20}))


def test_a_column_of_which_no_line_is_printed_is_refused(tmp_path):
    raw = TOY | {"published": "x.published.csv", "columns": [{"published": {"dataset": "CIFAR10"}}]}
    csv = "method,dataset,mean,std\nFedAvg,CIFAR-10,81.3,0.4\n"
    path = written(tmp_path, raw, csv=csv)
    with one_line("published: no line of x.published.csv is of column", "CIFAR10"):
        load_spec(path)


def test_a_printed_csv_is_read_without_the_blanks_around_its_texts(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("method,dataset,mean,std\nFedAvg , CIFAR-10,81.3,0.4\n")
    line = read_published_csv(path).iloc[0]
    assert (line.method, line.dataset) == ("FedAvg", "CIFAR-10")
    path.write_text("method,mean,std,mean\nFedAvg,81.3,0.4,80\n")
    with one_line("p.csv: column 'mean' is there twice"):
        read_published_csv(path)


def test_a_field_with_the_name_of_a_setting_is_refused():
    "Its value would set both: half of the labels wrong, for a method that adds noise"

    @dataclass
    class Noisy(FedAvg, listed=False):
        noise: float = 0.001

    with one_line("Noisy.noise: an experiment has a setting noise; expected another name"):
        field_rules(Noisy)
    for method in load_methods().values():
        field_rules(method)


def test_fields_of_a_method_may_be_lists_or_none_and_have_types_as_texts():
    @dataclass
    class Own(FedAvg, listed=False):
        layers: "list[int] | None" = None
        kind: "Literal['near', 'far'] | None" = None
        teacher: "Unknown | None" = None  # noqa: F821 (for type checkers alone)

    rules = field_rules(Own)
    assert rules["layers"]([1, 2], "layers") == [1, 2]
    assert rules["layers"]("none", "layers") is None
    assert rules["kind"]("far", "kind") == "far"
    assert rules["lr"].kind is float
    assert rules["teacher"](3, "teacher") == 3


def test_what_cannot_name_a_run_is_refused():
    @dataclass
    class Own(FedAvg, listed=False):
        steps: int = np.int64(3)
        weights: np.ndarray = field(default_factory=lambda: np.arange(2))
        criterion: object = None

    settings = method_settings(Own())
    assert (settings["steps"], settings["weights"]) == (3, [0, 1])
    with one_line("Own criterion: a function cannot name a run; expected a number"):
        method_settings(Own(criterion=lambda: 1))
