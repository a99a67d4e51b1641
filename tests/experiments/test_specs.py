"The specs of LfD, FedDC, FedBSS and FedADC: each published number has one place, each tier says what it is, values are as printed"

import tomllib
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from fedrepro.core.folders import find_specs
from fedrepro.engine.method import load_methods
from fedrepro.engine.rows import METRICS, Metric
from fedrepro.experiments.rules import field_rules, line_finder, read_published_csv
from fedrepro.experiments.runs import build
from fedrepro.experiments.spec_files import read_spec
from fedrepro.experiments.specs import load_spec
from toy import SMALL, one_line, written

PAPERS = Path(__file__).resolve().parents[2] / "papers"
SPECS = [n for n in find_specs(PAPERS) if not n.startswith("fedccfa/")]
LINES = {
    "lfd/table1": 9,
    "lfd/table2": 24,
    "lfd/table3": 20,
    "lfd/table4": 20,
    "lfd/table5": 10,
    "feddc/thirdparty": 40,
    "fedbss/table1": 162,
    "fedbss/table2": 81,
    "fedbss/table2_dirichlet": 81,
    "fedadc/table1": 54,
}
# studies of one client: all columns are one run
LOCAL = ("lfd/table5", "lfd/figure1", "lfd/figure3", "lfd/figure4")
# their archives cannot be had
MISSING = {"feddc/comparison": {"EMNIST-L, D2, share 0.15", "Tiny-ImageNet, D2, share 0.15"}}
OURS = "FedAvg + normalised softmax + margin"
# rows that the papers have not
NO_COUNTERPART = {
    OURS,
    "FedAvg (momentum 0.9)",
    "FedAvg, no local momentum",
    "FedAvg on MOON's network",
}


@lru_cache(None)
def spec(name):
    return load_spec(name, PAPERS)


@lru_cache(None)
def first_runs(name, tier="paper"):
    "The first seed's runs by (row, column)"
    return {(r.row, r.column): r for r in spec(name).runs(tier, seeds=1)}


def ids(name, tier="paper", rows=None):
    return {c.run_id for c in spec(name).runs(tier, methods=rows)}


def fields(name, row, column):
    return first_runs(name)[row, column].settings["method"]["fields"]


def test_all_tables_and_figures_are_there():
    assert set(SPECS) == {
        *(
            f"lfd/{n}"
            for n in "table1 table2 table3 table4 table5 figure1 figure3 figure4 figure5 figure5_epochs readings round22 round22_plain".split()
        ),
        *(f"feddc/{n}" for n in "thirdparty comparison synthetic readings".split()),
        *(
            f"fedbss/{n}"
            for n in "table1 table2 table2_dirichlet readings figure2 figure4 figure5a figure5b".split()
        ),
        *(f"fedbss/figure3{x}" for x in "abcd"),
        *(
            f"fedadc/{n}"
            for n in "table1 readings class_covering figure1 figure2 figure3 figure4 figure5 figure6 figure7".split()
        ),
    }


# --- beside the published numbers


@pytest.mark.parametrize("name", LINES)
def test_every_published_line_has_exactly_one_place(name):
    "And each row of a column stands beside one line, but for rows of our own and columns that say why not"
    s = spec(name)
    lines = line_finder(read_published_csv(s.published), s.published)

    def named(row, column):
        return lines({**row.published, **column.published}).astype(int)

    found = sum(named(row, column) for column in s.columns for row in s.rows.values())
    assert len(found) == LINES[name]
    assert (found == 1).all()
    for column in s.columns:
        for row in s.rows.values():
            assert named(row, column).sum() == (
                row.name not in NO_COUNTERPART and not column.unpublished
            ), (row.name, column.label)
    assert (OURS in s.rows) == (name.startswith("lfd/") and name != "lfd/table1")


@pytest.mark.parametrize(
    "name", ["fedbss/table1", "fedbss/table2", "fedbss/table2_dirichlet", "fedadc/table1"]
)
def test_a_column_runs_what_its_published_lines_say(name):
    s = spec(name)
    paper = read_published_csv(s.published)
    lines = line_finder(paper, s.published)
    kinds = {
        "shards_per_client": ("shards", ["shards"]),
        "sort_and_partition_s": ("shards", ["sort"]),
        "dirichlet_alpha": ("alpha", ["dirichlet-class", "dirichlet-client"]),
        "not stated": ("recipe", ["iid", "dirichlet-class"]),
    }
    for column in s.columns:
        run = first_runs(name)[next(iter(s.rows)), column.label].settings
        for line in paper[lines(column.published)].to_dict("records"):
            assert (run["data"]["name"], run["participation"]) == (
                line["dataset"],
                line["participation"],
            )
            assert (run["partition"]["clients"], run["data"].get("noise", 0)) == (
                line["clients"],
                line.get("noise_ratio", 0),
            )
            key, recipes = kinds[line["partition"]]
            assert run["partition"]["recipe"] in recipes
            assert key == "recipe" or run["partition"][key] == line["partition_parameter"]


# --- tiers


@pytest.mark.parametrize("name", SPECS)
def test_what_is_missing_says_why_and_smaller_tiers_have_every_row_on_what_is_there(name):
    s = spec(name)
    assert set(s.tiers) == {"smoke", "small", "paper"}
    for tier in s.tiers:
        columns = s.tier_columns(tier)
        runs = s.runs(tier)
        assert {c.label for c in columns if c.missing} == (
            MISSING.get(name, set()) if tier == "paper" else set()
        )
        assert all(len(c.missing.split()) > 3 for c in columns if c.missing)
        used = {c.settings["data"]["name"] for c in runs}
        assert used <= {"digits", "synthetic"} if tier == "smoke" else not used & {"digits"}
        if tier == "paper" or name in LOCAL:
            continue
        assert {c.row for c in runs} == set(s.rows)
        assert {c.seed for c in runs} == ({0} if tier == "small" else {0, 1})
        assert len({(c.row, c.column) for c in runs}) == len(s.rows) * len(columns)
        if name.startswith(("fedbss/", "fedadc/")):
            assert not [c for c in runs if "resnet" in c.settings["network"]]
        elif name not in LOCAL:
            full = {c.column: c.rounds for c in s.runs("paper")}
            assert all(c.rounds < full.get(c.column, min(full.values())) for c in runs)


@pytest.mark.parametrize("name", [n for n in SPECS if n.startswith(("lfd/", "feddc/"))])
def test_what_is_not_tuned_yet_declares_its_grid(name):
    tuning = read_spec(spec(name).path).get("tuning", {})
    open_values = {
        (r.name, k)
        for r in spec(name).rows.values()
        for k, v in r.values.items()
        if "not tuned yet" in v.source
    }
    assert open_values == {
        (row, key) for row, grid in tuning.items() for key in grid if key != "split"
    }
    for row, grid in tuning.items():
        rules = field_rules(load_methods()[spec(name).rows[row].method])
        assert grid["split"] == "a held-out tenth of the training data"
        for key, values in ((k, v) for k, v in grid.items() if k != "split"):
            assert [rules[key](v, key) for v in values] == sorted(set(values))
            assert len(values) > 1
            value = spec(name).rows[row].values[key]
            assert value.value in values
            assert "{" + ", ".join(f"{v:g}" for v in values) + "}" in value.source


# --- values that are easily lost on the way


def has(got, want):
    "Whether nested dicts hold at least what is wanted"
    return all(
        has(got.get(k, {}), v) if isinstance(v, dict) else got.get(k) == v for k, v in want.items()
    )


DC = dict(momentum=0, clip_norm=10)
DC_CUTS = {
    "IID": dict(recipe="iid"),
    "D1": dict(recipe="dirichlet-client", alpha=0.6, sigma=0),
    "D2": dict(recipe="dirichlet-client", alpha=0.3, sigma=0),
}
OF_THE_CODE = {
    f"{d}, {p}, share {s}": (d, p, s)
    for d in ("CIFAR-10", "MNIST")
    for p in DC_CUTS
    for s in (1.0, 0.15)
}
BSS = "FedAvg FedProx FedExP FedLC FedRS SCAFFOLD FedCDA InCo FedBSS".split()
AT_THE_PAPER_TIER = [  # spec, rows (none: all), beginning of the column's name, what their settings hold
    (
        "lfd/table2",
        [],
        "",
        dict(  # LfD 5.1
            rounds=100,
            participation=1.0,
            data=dict(recipe="LfD"),
            fields=dict(lr=0.01, momentum=0.9, weight_decay=1e-5, batch_size=128),
            partition=dict(
                recipe="dirichlet-class", clients=10, seed=0, alpha=0.5, minimum=10, tries=1000
            ),
        ),
    ),
    ("lfd/table2", ["Union"], "", dict(fields=dict(epochs=3))),
    ("lfd/table2", ["FedAvg", "FedProx", "MOON", "LfD", OURS], "", dict(fields=dict(epochs=10))),
    ("lfd/table2", ["LfD"], "BindingDB", dict(fields=dict(weight=1, margin=0.15))),
    ("lfd/table2", [OURS], "AGNews", dict(fields=dict(weight=0, margin=0.15))),
    ("lfd/table2", ["LfD", OURS], "CIFAR-100", dict(fields=dict(tau=0.05))),
    ("lfd/table2", ["MOON"], "", dict(fields=dict(tau=0.5))),  # another temperature
    ("lfd/table2", [], "CIFAR-100", dict(network="resnet18_cifar")),
    ("lfd/table2", [], "BindingDB", dict(network="dta_cnn")),
    ("lfd/table2", [], "AGNews", dict(network="text_cnn", data=dict(name="AG News"))),
    (
        "lfd/table3",
        [],
        "CINIC-10",
        dict(
            data=dict(name="CINIC-10", recipe="LfD"),
            network="resnet18_cifar",
            partition=dict(recipe="dirichlet-class", alpha=0.5),
        ),
    ),
    *(
        (
            "feddc/comparison",
            [],
            column,
            dict(  # its released code
                network="feddc_mlp" if d == "MNIST" else "feddc_lenet",
                rounds=300 if d == "MNIST" else 600,
                participation=s,
                partition=dict(clients=100) | DC_CUTS[p],
                fields=DC
                | dict(lr=0.1, lr_decay=0.998, weight_decay=1e-3, epochs=5, batch_size=50),
            ),
        )
        for column, (d, p, s) in OF_THE_CODE.items()
    ),
    ("feddc/comparison", ["FedDC"], "MNIST, ", dict(fields=dict(alpha=0.1))),
    ("feddc/comparison", ["FedDC"], "CIFAR-10, D1", dict(fields=dict(alpha=0.01))),
    ("feddc/comparison", ["FedDyn"], "CIFAR-10, ", dict(fields=dict(alpha=0.01))),
    # 1e-4 without the factor 1/2
    ("feddc/comparison", ["FedProx"], "MNIST, ", dict(fields=dict(mu=2e-4))),
    (
        "feddc/synthetic",
        [],
        "",
        dict(
            network="feddc_linear",
            rounds=300,
            participation=0.15,
            partition=dict(recipe="natural", clients=20, seed=0),
            fields=DC | dict(lr=0.1, lr_decay=1.0, weight_decay=1e-5, epochs=10, batch_size=10),
        ),
    ),
    ("feddc/synthetic", ["FedProx"], "", dict(fields=dict(mu=2e-4))),
    ("feddc/synthetic", ["FedDyn"], "", dict(fields=dict(alpha=0.01))),
    ("feddc/synthetic", ["FedDC"], "", dict(fields=dict(alpha=0.005))),
    (
        "fedbss/table1",
        BSS,
        "",
        dict(  # FedBSS, Implementation Details
            rounds=200,
            every=1,
            participation=0.1,
            partition=dict(clients=100),
            fields=dict(lr=1e-3, momentum=1e-4, weight_decay=1e-5, epochs=10, batch_size=64),
        ),
    ),
    ("fedbss/table1", BSS, "Fashion-MNIST", dict(network="fedbss_cnn")),
    ("fedbss/table1", BSS, "CIFAR", dict(network="resnet50")),
    (
        "fedbss/table1",
        ["FedBSS"],
        "",
        dict(fields=dict(warm_up=50, selection="cosine", aggregation="uniform")),
    ),
    (
        "fedbss/table1",
        [],
        "CIFAR-100, 8 shards",
        dict(partition=dict(recipe="shards", clients=100, seed=0, shards=8)),
    ),
    (
        "fedbss/table1",
        [],
        "CIFAR-10, Dir(0.3)",
        dict(
            partition=dict(
                recipe="dirichlet-class", clients=100, seed=0, alpha=0.3, minimum=10, tries=1000
            )
        ),
    ),
    (
        "fedbss/table2",
        [],
        "CIFAR-100, noise 0.3",
        dict(data=dict(noise=0.3), partition=dict(recipe="iid", clients=100)),
    ),
    (
        "fedbss/table2_dirichlet",
        [],
        "CIFAR-100, noise 0.3",
        dict(
            data=dict(noise=0.3),
            partition=dict(recipe="dirichlet-class", clients=100, alpha=0.5, minimum=10),
        ),
    ),
    (
        "fedbss/figure4",
        ["FedAvg", "FedBSS"],
        "",
        dict(
            network="resnet18",
            participation=1.0,
            partition=dict(recipe="natural", clients=6, seed=0),
        ),
    ),
    (
        "fedadc/table1",
        [],
        "",
        dict(  # FedADC IV-C
            rounds=500, partition=dict(clients=100), fields=dict(epochs=2, batch_size=50)
        ),
    ),
    ("fedadc/table1", [], "CIFAR-10,", dict(partition=dict(recipe="sort", shards=2))),
    ("fedadc/table1", [], "CIFAR-100,", dict(partition=dict(recipe="dirichlet-client", sigma=0.0))),
    (
        "fedadc/table1",
        ["MOON", "FedGKD", "FedNTD", "FedRS", "FedAvg", "FedAvg on MOON's network"],
        "",
        dict(fields=dict(momentum=0.9)),
    ),
    (
        "fedadc/table1",
        ["FedProx", "FedDyn", "FedADC", "FedADC+", "FedAvg, no local momentum"],
        "",
        dict(fields=dict(momentum=0.0)),
    ),
    (
        "fedadc/table1",
        ["FedADC"],
        "CIFAR-10,",
        dict(network="fedadc_cnn", fields=dict(weight_decay=5e-5, alpha=1.0, variant="nesterov")),
    ),
    (
        "fedadc/table1",
        ["FedADC+"],
        "CIFAR-100,",
        dict(network="fedadc_resnet18", fields=dict(weight_decay=5e-4, alpha=1.0, lam=0.35)),
    ),
    (
        "fedadc/table1",
        ["MOON"],
        "CIFAR-10,",
        dict(network="fedadc_moon_cnn", fields=dict(lr=0.01, tau=0.5, weight_decay=1e-5)),
    ),
    (
        "fedadc/table1",
        ["FedAvg on MOON's network"],
        "CIFAR-100,",
        dict(network="fedadc_moon_resnet18", fields=dict(weight_decay=5e-4)),
    ),
    ("fedadc/table1", ["FedDyn"], "", dict(fields=dict(weight_decay=1e-3))),
    ("fedadc/table1", ["FedRS"], "", dict(fields=dict(alpha=0.5))),
    ("fedadc/table1", ["FedGKD"], "CIFAR-10,", dict(fields=dict(weight=0.1, tau=0.5, models=1))),
    ("fedadc/table1", ["FedNTD"], "CIFAR-10,", dict(fields=dict(beta=0.3, tau=1.0))),
    (
        "fedadc/figure1",
        [],
        "",
        dict(  # IV-B
            rounds=500,
            participation=0.2,
            fields=dict(epochs=1, batch_size=64, weight_decay=4e-4, momentum=0.0),
        ),
    ),
    ("fedadc/figure5", [], "", dict(participation=0.02, partition=dict(clients=500))),
    ("fedadc/figure6", [], "", dict(participation=0.01, partition=dict(clients=1000))),
]


@pytest.mark.parametrize(
    "name, rows, column, want", AT_THE_PAPER_TIER, ids=lambda v: v if isinstance(v, str) else ""
)
def test_settings_are_those_that_the_paper_prints(name, rows, column, want):
    found = {
        key: c
        for key, c in first_runs(name).items()
        if key[0] in (rows or spec(name).rows) and key[1].startswith(column)
    }
    assert {row for row, _ in found} == set(rows or spec(name).rows)
    for key, c in found.items():
        assert has(c.settings | {"fields": c.settings["method"]["fields"]}, want), key


@pytest.mark.parametrize(
    "name, values",
    [
        ("lfd/table4", {(50, 0.25), (50, 0.5), (100, 0.25), (100, 0.5)}),
        ("feddc/comparison", {(100, 1.0), (100, 0.15), (500, 0.02)}),
    ],
)
def test_clients_and_shares_of_a_table(name, values):
    assert {
        (c.settings["partition"]["clients"], c.settings["participation"])
        for c in first_runs(name).values()
    } == values


def test_table_1_of_lfd_ties_each_part_in_both_ways():
    tied = {
        r: fields("lfd/table1", r, c) for r, c in first_runs("lfd/table1") if r != "No constraint"
    }
    parts = ("all", "extractor", "header", "classifier")
    assert {(f["kind"], f["part"]) for f in tied.values()} == {
        (k, p) for k in ("feature", "parameter") for p in parts
    }
    for row, f in tied.items():
        where = spec("lfd/table1").rows[row].published
        assert where["constraint_kind"] == f["kind"]
        assert where["constraint_target"].endswith(f["part"])


def test_table_5_asks_its_start_for_every_class_and_shows_both_ratios():
    for name in ("lfd/table5", "lfd/figure4"):
        asked = {
            tier: {c.settings["study"].get("class_accuracy") for c in spec(name).runs(tier)}
            for tier in spec(name).tiers
        }
        assert asked == {"paper": {10.0}, "small": {None}, "smoke": {None}}
    metrics = [(c.metric, bool(c.unpublished)) for c in spec("lfd/table5").columns]
    assert metrics == [
        ("lp_existing", False),
        ("lp_absent", False),
        ("lp_means_existing", True),
        ("lp_means_absent", True),
    ]


def test_feddc_has_a_column_for_whatever_its_introduction_names():
    more = {c.label: c for c in spec("feddc/comparison").columns if c.label not in OF_THE_CODE}
    assert {"MNIST", "CIFAR-10"} | {c.values["dataset"].value for c in more.values()} == {
        "MNIST",
        "Fashion-MNIST",
        "CIFAR-10",
        "CIFAR-100",
        "EMNIST-letters-10",
        "Tiny-ImageNet",
    }
    assert len(first_runs("feddc/comparison")) == (len(OF_THE_CODE) + 5) * 5
    assert {
        c.settings["partition"]["sigma"]
        for (_, label), c in first_runs("feddc/comparison").items()
        if "unequal" in label
    } == {0.3}
    assert all(
        c.label in OF_THE_CODE and "no claim rests on it" in c.target.source
        for c in spec("feddc/comparison").columns
        if c.target
    )


def test_synthetic_data_reach_the_clients_as_they_were_made():
    for tier, rounds in (("smoke", 12), ("small", 60)):
        _, federation, asked = build(
            next(c for (row, _), c in first_runs("feddc/synthetic", tier).items() if row == "FedDC")
        )
        assert asked == rounds
        assert [len(p) for p in federation.partition.train] == [200] * 20
        assert federation.net.count() == 155
        assert not any(t.any() for t in federation.net.init(0).values())
        assert all(
            (federation.data.groups[0][mine] == k).all()
            for k, mine in enumerate(federation.partition.train)
        )


# --- runs that are the same, and rows that change one thing


def test_cells_that_are_one_setting_are_one_run():
    "CIFAR-10 with 10 clients and beta 0.5 stands in LfD's Tables 2 and 3 and in Figure 5; within a spec no two are the same run"
    places = {"table2": "CIFAR-10", "table3": "CIFAR-10, beta 0.5", "figure5": "CIFAR-10, E = 10"}
    for row in spec("lfd/figure5").rows:
        assert (
            len({first_runs(f"lfd/{name}")[row, column].run_id for name, column in places.items()})
            == 1
        ), row
    assert first_runs("lfd/table1")["No constraint", "CIFAR-10"].run_id in ids("lfd/table2")
    for name in [n for n in SPECS if n.startswith(("lfd/", "feddc/"))]:
        for tier in spec(name).tiers:
            found = Counter(c.run_id for c in spec(name).runs(tier))
            assert not found or set(found.values()) == {
                len(spec(name).tier_columns(tier)) if name in LOCAL else 1
            }, (name, tier)
    assert len(spec("fedadc/table1").runs("paper")) == len(ids("fedadc/table1")) == 11 * 6 * 4


def test_a_trial_of_fedbss_and_fedadc_has_draws_of_its_own():
    for name in (
        n for n in SPECS if n.startswith(("fedbss/", "fedadc/")) and n != "fedbss/figure4"
    ):
        for c in spec(name).runs("paper", seeds=[0, 2]):
            assert c.settings["partition"]["seed"] == c.settings["cohort_seed"] == c.seed
    assert {c.seed for c in spec("fedadc/figure2").runs("paper")} == set(range(10))


@pytest.mark.parametrize("paper", ["fedccfa", "fedbss", "fedadc", "lfd", "feddc"])
def test_readings_change_one_thing_of_a_row_that_a_table_has(paper):
    "And each is measured: an effect of claims.toml subtracts it from the row that it is like"
    s = spec(f"{paper}/readings")
    effects = tomllib.loads((PAPERS / f"{paper}/claims.toml").read_text())["effect"]
    measured = {
        row: base
        for e in effects
        if e["spec"] == f"{paper}/readings"
        for row, base in zip(e["rows"], e["against"])
    }

    def rest(run):
        may_differ = ("method", "rounds", "cohorts", "network")
        return {k: v for k, v in run.items() if k not in may_differ}

    for row, base in measured.items():
        for column in s.columns:
            a, b = (first_runs(f"{paper}/readings")[r, column.label].settings for r in (row, base))
            mine = a["method"]["fields"]
            theirs = b["method"]["fields"]
            changed = {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}
            others = sum(a.get(k) != b.get(k) for k in ("rounds", "cohorts", "network"))
            if a["method"]["class"] == b["method"]["class"]:
                assert 1 <= len(changed) + others <= 2
            assert rest(a) == rest(b)
    assert set(measured) | set(measured.values()) == set(s.rows), "a row that nothing measures"


def test_what_is_measured():
    assert (spec("fedbss/table1").metric, spec("fedbss/table1").statistic) == (
        "generalised_accuracy",
        "mean_last_10",
    )
    assert spec("fedadc/figure7").metric == "personalised_accuracy"
    for n in ("figure5", "figure6"):
        methods = [c.settings["method"] for c in first_runs(f"fedadc/{n}").values()]
        assert {(m["class"], m["fields"]["weight_decay"]) for m in methods} == {
            ("FedDyn", 1e-3),
            ("FedADCPlus", 5e-4),
        }
    assert {c.settings["method"]["class"] for c in first_runs("fedadc/figure7").values()} == {
        "FedADCPlus"
    }


UNREAD = {
    "base.alpha_dirichlet": dict(base=dict(alpha_dirichlet=0.1)),
    "base.shards": dict(base=dict(shards=2)),
    "base.sigma": dict(base=dict(sigma=0.3)),
    "base.drift_round": dict(base=dict(drift_round=1)),
    "base.drift_step": dict(base=dict(drift="sudden", drift_round=0, drift_step=2)),
    "columns 2.per_class": dict(
        columns=[{}, dict(clients=2, per_class=9, source="guess: toy")],
    ),
    "columns 1.methods.FedProx.minimum": dict(
        columns=[dict(methods=dict(FedProx=dict(minimum=2, source="guess: toy")))]
    ),
    "methods.FedAvg.tries": dict(methods=dict(FedAvg=dict(tries=3, source="guess: toy"))),
    "tiers.smoke.base.alpha_dirichlet": dict(
        tiers=dict(smoke=dict(base=dict(alpha_dirichlet=0.1, source="tier: reduced")))
    ),
    "tiers.smoke.methods.FedAvg.shards": dict(
        tiers=dict(smoke=dict(methods=dict(FedAvg=dict(shards=2, source="tier: reduced"))))
    ),
}


@pytest.mark.parametrize("where", UNREAD)
def test_a_setting_of_a_partition_or_drift_that_no_run_reads_is_refused(where, tmp_path):
    "It would be printed as if it mattered"
    more = UNREAD[where]
    raw = SMALL | more | dict(base=SMALL["base"] | more.get("base", {}))
    with one_line(where, "no run reads it (partition iid, drift"):
        load_spec(written(tmp_path, raw, "toy/x"))


def test_a_setting_that_some_run_reads_is_taken(tmp_path):
    "One of two columns, a row that is like another, what is so anyway, and what a file inherits"
    skewed = dict(partition="dirichlet-class", source="guess: toy")
    one = SMALL | dict(
        base=SMALL["base"] | dict(alpha_dirichlet=0.5, drift_step=10),
        columns=[{}, skewed | {"label": "s"}],
    )
    load_spec(written(tmp_path, one, "toy/one"))
    rows = dict(
        FedAvg={},
        first=dict({"class": "FedAvg"}, shards=2, source="guess: toy"),
        second=dict(like="first", partition="shards", source="guess: toy"),
    )
    load_spec(written(tmp_path, SMALL | dict(methods=rows), "toy/two"))
    (tmp_path / "toy/three.toml").write_text(
        'extends = "one.toml"\n[[columns]]\nclients = 2\nsource = "guess: toy"\n'
    )
    load_spec(tmp_path / "toy/three.toml")
    (tmp_path / "toy/four.toml").write_text(
        'extends = "three.toml"\n[base]\nalpha_dirichlet = {value = 0.1, source = "guess: toy"}\n'
    )
    with one_line("four.toml: base.alpha_dirichlet: no run reads it"):
        load_spec(tmp_path / "toy/four.toml")


UNRECORDED = {
    "a study of one client": (
        dict(metric="test_loss"),
        "no run records test_loss; expected study = 'slice' in its",
    ),
    "another study": (
        dict(
            metric="test_loss",
            base=SMALL["base"] | dict(study="local", study_client="client 0", study_epochs=1),
        ),
        "no run records test_loss; expected study = 'slice'",
    ),
    "no study": (
        dict(
            metric="personalised_accuracy",
            base=SMALL["base"] | dict(study="local", study_client="client 0", study_epochs=1),
        ),
        "no run records personalised_accuracy; expected no study",
    ),
    "a measure": (dict(metric="update_norm_clients"), "expected measures = ['update_norm']"),
    "a metric beside the first": (
        dict(beside=["seconds_collaboration"]),
        "no run records seconds_collaboration; expected measures = ['collaboration_seconds']",
    ),
    "a column's own": (
        dict(columns=[{}, dict(label="b", metric="cka")]),
        "b: metric: no run records cka",
    ),
}


@pytest.mark.parametrize("what", UNRECORDED)
def test_a_metric_that_no_run_records_is_refused_before_the_first_round(what, tmp_path):
    "All runs were computed, and then no table could be printed"
    more, words = UNRECORDED[what]
    with one_line("toy/x.toml", words):
        load_spec(written(tmp_path, SMALL | more, "toy/x"))


def test_a_metric_that_some_row_records_is_taken(tmp_path):
    "A row may have a setting that the others have not"
    measured = dict({"class": "FedAvg"}, measures=["update_norm"], source="guess: toy")
    raw = SMALL | dict(metric="update_norm", methods=dict(FedProx={}, second=measured))
    assert load_spec(written(tmp_path, raw, "toy/x")).metric == "update_norm"


@pytest.mark.parametrize("higher", [False, None])
def test_the_best_round_needs_a_metric_of_which_the_highest_is_the_best(
    higher, tmp_path, monkeypatch
):
    "The highest loss was printed as the best evaluated round, and its first round had reached any target"
    loss = Metric("own_loss", higher_is_better=higher, compute=len)
    monkeypatch.setitem(METRICS, "own_loss", loss)
    raw = SMALL | dict(metric="own_loss")
    load_spec(written(tmp_path, raw, "toy/last"))
    target = dict(target=1.5, source="guess: toy")
    for name, more in {"best": dict(statistic="best"), "target": dict(columns=[target])}.items():
        with one_line(f"{name}: expected a metric with higher_is_better = True", str(higher)):
            load_spec(written(tmp_path, raw | more, "toy/x"))
    monkeypatch.setitem(METRICS, "own_loss", Metric("own_loss", higher_is_better=True, compute=len))
    load_spec(written(tmp_path, raw | dict(statistic="best"), "toy/best"))


@pytest.mark.parametrize(
    "same_as", [{"FedAvg": "FedAvg"}, {"FedAvg": "FedProx", "FedProx": "FedAvg"}]
)
def test_a_row_shows_the_runs_of_a_row_that_has_some(same_as, tmp_path):
    "Two rows that named each other were printed with each other's numbers"
    raw = SMALL | dict(columns=[dict(same_as=same_as)])
    with one_line("columns 1.same_as.FedAvg", "has no runs of its own here"):
        load_spec(written(tmp_path, raw, "toy/x"))


def test_a_spec_without_methods_says_so(tmp_path):
    "Not that a setting of its base is unknown, which only the methods have"
    raw = {key: value for key, value in SMALL.items() if key != "methods"}
    for path in (
        written(tmp_path, raw, "toy/none"),
        written(tmp_path, raw | {"methods": {}}, "toy/empty"),
    ):
        with one_line(f"{path.name}: no methods: nothing to run"):
            load_spec(path)
