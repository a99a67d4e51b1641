"The specs of FedBSS and FedADC: each published number has one place, each tier says what it is, values are as printed"
import tomllib
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from fedrepro.core.errors import InputError
from fedrepro.experiments.rules import SOURCE_KINDS, line_finder, read_published_csv
from fedrepro.experiments.runs import build
from fedrepro.experiments.spec_files import read_spec
from fedrepro.experiments.specs import find_specs, load_spec

ROOT = Path(__file__).resolve().parents[1]
SPECS = [n for n in find_specs(ROOT / "papers") if n.startswith(("fedbss/", "fedadc/"))]
TABLES = {"fedbss/table1": 162, "fedbss/table2": 81, "fedbss/table2_dirichlet": 81, "fedadc/table1": 54}
NO_COUNTERPART = {"FedAvg (momentum 0.9)", "FedAvg, no local momentum", "FedAvg on MOON's network"}  # rows that the papers have not


@lru_cache(None)
def spec(name): return load_spec(name, ROOT / "papers")


@lru_cache(None)
def runs(name, tier="paper"):
    "The settings of the first seed's runs, by row and column"
    return {(c.row, c.column): c.settings for c in spec(name).runs(tier, seeds=1)}


def fields(name, row, column): return runs(name)[row, column]["method"]["fields"]


def hits(s):
    "A function from a row and a column to how often each published line is named, (N,)"
    lines = line_finder(read_published_csv(s.published), s.published)
    return lambda row, column: lines({**row.published, **column.published}).astype(int)


def test_all_tables_and_figures_are_there():
    assert {n.split("/")[1] for n in SPECS if n.startswith("fedbss")} == {
        "table1", "table2", "table2_dirichlet", "readings", "figure4", "figure5a", "figure5b", "figure2",
        *(f"figure3{x}" for x in "abcd")}
    assert {n.split("/")[1] for n in SPECS if n.startswith("fedadc")} == {
        "table1", "readings", "class_covering", *(f"figure{i}" for i in range(1, 8))}


@pytest.mark.parametrize("name", TABLES)
def test_every_published_line_has_exactly_one_place(name):
    s = spec(name)
    named = hits(s)
    found = sum(named(row, column) for column in s.columns for row in s.rows.values())
    assert len(found) == TABLES[name] and (found == 1).all()
    assert not [c.label for c in s.columns if c.missing]  # CIFAR-100 has a loader


@pytest.mark.parametrize("name", [*TABLES, "fedadc/figure3", "fedadc/figure4"])
def test_each_row_of_a_column_stands_beside_one_line_at_every_tier(name):
    s = spec(name)
    named = hits(s)
    for tier in s.tiers:
        for column in s.tier_columns(tier):
            for row in s.rows.values():
                assert named(row, column).sum() == (row.name not in NO_COUNTERPART), (tier, row.name, column.label)


@pytest.mark.parametrize("name", TABLES)
def test_a_column_runs_what_its_published_lines_say(name):
    s = spec(name)
    paper = read_published_csv(s.published)
    lines = line_finder(paper, s.published)
    for column in s.columns:
        run = runs(name)[next(iter(s.rows)), column.label]
        for line in paper[lines(column.published)].to_dict("records"):
            assert (run["data"]["name"], run["participation"]) == (line["dataset"], line["participation"])
            assert run["partition"]["clients"] == line["clients"]
            assert run["data"].get("noise", 0) == line.get("noise_ratio", 0)
            key, recipes = {"shards_per_client": ("shards", ["shards"]), "sort_and_partition_s": ("shards", ["sort"]),
                            "dirichlet_alpha": ("alpha", ["dirichlet-class", "dirichlet-client"]),
                            "not stated": ("recipe", ["iid", "dirichlet-class"])}[line["partition"]]
            assert run["partition"]["recipe"] in recipes
            if key != "recipe": assert run["partition"][key] == line["partition_parameter"]


@pytest.mark.parametrize("name", SPECS)
def test_every_value_has_a_source_and_a_smaller_tier_says_so(name):
    s = spec(name)
    assert set(s.tiers) == {"smoke", "small", "paper"} and s.reductions("paper") == []
    for tier in s.tiers:
        for column in s.tier_columns(tier):
            for row in s.rows: assert all(v.source.startswith(SOURCE_KINDS) for v in s.values(tier, row, column).values())
        changed = [v for layer in (s.tiers[tier].base, *s.tiers[tier].methods.values()) for v in layer.values()]
        assert all(v.source.startswith("tier:") for v in changed) and bool(changed) == (tier != "paper")


@pytest.mark.parametrize("name", SPECS)
def test_smaller_tiers_have_data_that_are_there_and_no_resnet(name):
    s = spec(name)
    small = {"DomainNet"} if name == "fedbss/figure4" else {"Fashion-MNIST", "CIFAR-10"}
    for tier, sets in {"smoke": {"digits"}, "small": small}.items():
        cells = s.runs(tier)
        assert {c.settings["data"]["name"] for c in cells} <= sets
        assert not [c for c in cells if "resnet" in c.settings["network"]]
        runnable = [c for c in s.tier_columns(tier) if not c.missing]
        assert len(cells) == len(runnable) * len(s.rows) * (2 if tier == "smoke" else 1)
        assert runnable


def test_domainnet_is_a_domain_a_client(tmp_path):
    "And without its files it is refused before anything runs, in one line that says how to get them"
    s = spec("fedbss/figure4")
    for tier, network in (("paper", "resnet18"), ("small", "fedccfa_cifar")):
        cells = s.runs(tier, seeds=1)
        assert [c.row for c in cells] == ["FedAvg", "FedBSS"]
        for c in cells:
            assert c.settings["partition"] == dict(recipe="natural", clients=6, seed=0)
            assert (c.settings["network"], c.settings["participation"]) == (network, 1.)
            with pytest.raises(InputError, match="clipart_train.txt.*`fedrepro data DomainNet`") as refused: build(c, tmp_path)
            assert "\n" not in str(refused.value)


# --- FedBSS's Implementation Details

NINE = "FedAvg", "FedProx", "FedExP", "FedLC", "FedRS", "SCAFFOLD", "FedCDA", "InCo", "FedBSS"


@pytest.mark.parametrize("row", NINE)
def test_fedbss_trains_all_methods_alike(row):
    want = dict(lr=1e-3, momentum=1e-4, weight_decay=1e-5, epochs=10, batch_size=64)
    for column in spec("fedbss/table1").columns:
        s = runs("fedbss/table1")[row, column.label]
        assert s["method"]["fields"] | want == s["method"]["fields"]
        assert (s["rounds"], s["every"], s["participation"], s["partition"]["clients"]) == (200, 1, .1, 100)
        assert s["network"] == ("fedbss_cnn" if s["data"]["name"] == "Fashion-MNIST" else "resnet50")


def test_fedbss_itself_and_the_check_of_its_momentum():
    f = fields("fedbss/table1", "FedBSS", "CIFAR-10, Dir(0.5)")
    assert (f["warm_up"], f["selection"], f["aggregation"]) == (50, "cosine", "uniform")
    a, b = (fields("fedbss/table1", row, "CIFAR-10, Dir(0.5)") for row in ("FedAvg", "FedAvg (momentum 0.9)"))
    assert b == a | {"momentum": .9}
    s = spec("fedbss/table1")
    assert (s.metric, s.statistic) == ("generalised_accuracy", "mean_last_10")


def test_fedbss_partitions_and_noise():
    def split(name, column): return runs(name)["FedAvg", column]["partition"]
    for seed, name in ((s, n) for s in (0, 2) for n in SPECS if n not in ("fedbss/figure4",)):  # a trial has draws of its own
        for c in spec(name).runs("paper", seeds=[seed]):
            assert c.settings["partition"]["seed"] == c.settings["cohort_seed"] == c.seed == seed
    assert split("fedbss/table1", "CIFAR-100, 8 shards") == dict(recipe="shards", clients=100, seed=0, shards=8)
    assert split("fedbss/table1", "CIFAR-10, Dir(0.3)") == dict(recipe="dirichlet-class", clients=100, seed=0, alpha=.3,
                                                                minimum=10, tries=1000)
    two, other = (runs(n)["FedAvg", "CIFAR-100, noise 0.3"] for n in ("fedbss/table2", "fedbss/table2_dirichlet"))
    assert two["data"]["noise"] == .3 and two["partition"] == dict(recipe="iid", clients=100, seed=0)
    assert other == two | {"partition": split("fedbss/table1", "CIFAR-10, Dir(0.3)") | {"alpha": .5}}


def test_fedbss_readings_stand_beside_table_1():
    "Two rows are Table 1's runs, and stand alone beside its numbers; each other row changes what it says"
    s, columns = spec("fedbss/readings"), ("Fashion-MNIST, 2 shards", "Fashion-MNIST, Dir(0.5)")
    named = hits(s)
    for tier in s.tiers:
        ids = {c.run_id for c in s.runs(tier, ["FedAvg", "FedBSS"])}
        assert ids <= {c.run_id for c in spec("fedbss/table1").runs(tier)}
        for column in s.tier_columns(tier):
            beside = {r.name: int(named(r, column).sum()) for r in s.rows.values()}
            assert beside == {name: int(name in ("FedAvg", "FedBSS")) for name in s.rows}
    assert all(bool(r.unpublished) == (name not in ("FedAvg", "FedBSS")) for name, r in s.rows.items())
    cells = {c.row: c.settings for c in s.runs("paper", seeds=1) if c.column == columns[1]}
    assert {c.column for c in s.runs("paper")} == set(columns)
    method = {row: found["method"] for row, found in cells.items()}
    base = method["FedBSS"]["fields"]
    assert method["FedBSS, all clients"]["fields"] == base | {"aggregation": "all"}
    assert method["FedBSS, by size"]["fields"] == base | {"aggregation": "size"}
    assert method["FedBSS, one step an epoch"]["fields"] == base | {"batch_size": 0}
    assert cells["FedBSS, 250 rounds"] == cells["FedBSS"] | {"rounds": 250}
    for row, how in (("FedAvg, uniform", "uniform"), ("FedAvg, all clients", "all")):
        assert method[row]["class"] == "FedBSS" and method[row]["fields"] == base | {"warm_up": 1000, "aggregation": how}
        assert cells[row]["rounds"] <= method[row]["fields"]["warm_up"], "its first stage never ends, so it is FedAvg"
    assert {c.settings["rounds"] for t in ("smoke", "small") for c in s.runs(t, ["FedBSS, 250 rounds"])} == {15, 25}


def test_fedbss_ablations_share_runs_with_table_1():
    def ids(name, rows): return Counter(c.run_id for c in spec(name).runs("paper", methods=rows))
    ours = Counter(c.run_id for c in spec("fedbss/table1").runs("paper", methods=["FedBSS"])
                   if c.column == "CIFAR-10, Dir(0.5)")
    assert ids("fedbss/figure5a", ["warm-up 50"]) == ours == ids("fedbss/figure3d", ["warm-up 50"])
    for tier, warm_ups in dict(smoke=[0, 1, 3, 6], small=[0, 3, 5, 10], paper=[0, 25, 50, 100]).items():
        s = spec("fedbss/figure5a")
        found = [c.settings["method"]["fields"]["warm_up"] for c in s.runs(tier, seeds=1)]
        assert found == warm_ups
    assert [c.settings["method"]["fields"]["selection"] for c in spec("fedbss/figure5b").runs("paper", seeds=1)] == [
        "filter", "linear", "cosine"]


# --- FedADC's section IV

def test_fedadc_table_1_is_section_iv_c():
    s = spec("fedadc/table1")
    cells = s.runs("paper")
    assert len(cells) == 11 * 6 * 4 == len({c.run_id for c in cells})
    for c in cells:
        f, data = c.settings["method"]["fields"], c.settings["data"]["name"]
        assert (c.rounds, f["epochs"], f["batch_size"], c.settings["partition"]["clients"]) == (500, 2, 50, 100)
        usual = {"CIFAR-10": 5e-5, "CIFAR-100": 5e-4}[data]
        assert f["weight_decay"] == {"FedDyn": 1e-3, "MOON": 1e-5}.get(c.row, usual)
        with_momentum = "MOON", "FedGKD", "FedNTD", "FedRS", "FedAvg", "FedAvg on MOON's network"
        assert f["momentum"] == (.9 if c.row in with_momentum else 0.)
        want = dict(recipe="sort", shards=2) if data == "CIFAR-10" else dict(recipe="dirichlet-client", sigma=0.)
        assert want.items() <= c.settings["partition"].items()
        networks = ("fedadc_moon_cnn", "fedadc_moon_resnet18") if "MOON" in c.row else ("fedadc_cnn", "fedadc_resnet18")
        assert c.settings["network"] == networks[data == "CIFAR-100"]


@pytest.mark.parametrize("row, want", [
    ("MOON", dict(lr=.01, tau=.5)), ("FedGKD", dict(weight=.1, tau=.5, models=1)), ("FedNTD", dict(beta=.3, tau=1.)),
    ("FedRS", dict(alpha=.5)), ("FedADC", dict(alpha=1., variant="nesterov")), ("FedADC+", dict(alpha=1., lam=.35))])
def test_fedadc_values_of_the_methods(row, want):
    assert want.items() <= fields("fedadc/table1", row, "CIFAR-10, s=2, C=0.1").items()


def test_what_was_tuned_and_not_printed_is_called_a_guess():
    s = spec("fedadc/table1")
    for row, keys in dict(FedAvg="lr", MOON="mu", FedGKD="lr", FedNTD="lr", FedDyn="lr alpha", FedProx="lr mu",
                          FedADC="lr beta", FedRS="lr").items():
        values = s.values("paper", row, s.columns[0])
        for key in keys.split(): assert values[key].source.startswith(("guess:", "tuned:")), (row, key)


def test_fedavg_stands_beside_its_numbers_with_a_local_momentum_and_once_alone():
    s = spec("fedadc/table1")
    for tier in s.tiers:
        cells = {(c.row, c.column): c.settings for c in s.runs(tier, seeds=1)}
        for column in s.tier_columns(tier):
            own, none, moon = (cells[row, column.label] for row in ("FedAvg", "FedAvg, no local momentum", "FedAvg on MOON's network"))
            assert (own["method"]["fields"]["momentum"], none["method"]["fields"]["momentum"]) == (.9, 0.)
            assert moon["method"] == own["method"] and moon["network"] == cells["MOON", column.label]["network"]
    for row in s.rows.values(): assert bool(row.untuned) and bool(row.unpublished) == (row.name in NO_COUNTERPART)
    one = {c.settings["method"]["fields"]["momentum"] for c in spec("fedadc/figure1").runs("paper", ["FedAvg"])}
    assert one == {0.}  # IV-B, section II


def test_the_weight_decay_of_iv_a_is_in_the_tuning_tables():
    grids = read_spec(spec("fedadc/table1").path)["tuning"]
    found = {row for row, grid in grids.items() if grid.get("weight_decay") == [0., 1e-5, 5e-5, 1e-4]}
    assert found == set(grids) - {"MOON", "FedDyn"}  # which have a value of their own


@pytest.mark.parametrize("paper", ["fedbss", "fedadc", "lfd", "feddc"])
def test_readings_change_one_thing_of_a_row_that_a_table_has(paper):
    "And each is measured: an effect of claims.toml subtracts it from the row that it is like"
    s, effects = load_spec(f"{paper}/readings"), tomllib.loads((ROOT / f"papers/{paper}/claims.toml").read_text())["effect"]
    measured = {row: base for e in effects if e["spec"] == f"{paper}/readings" for row, base in zip(e["rows"], e["against"])}
    cells = {(c.row, c.column): c.settings for c in s.runs("paper", seeds=1)}
    for row, base in measured.items():
        for column in s.columns:
            a, b = cells[row, column.label], cells[base, column.label]
            mine, theirs = a["method"]["fields"], b["method"]["fields"]
            changed = {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}
            if a["method"]["class"] == b["method"]["class"]: assert 1 <= len(changed) + (a["rounds"] != b["rounds"]) <= 2
            assert {k: v for k, v in a.items() if k not in ("method", "rounds")} == {k: v for k, v in b.items() if k not in ("method", "rounds")}
    assert set(measured) | set(measured.values()) == set(s.rows), "a row that nothing measures"


def test_fedrs_on_cifar_100_is_not_published():
    s = spec("fedadc/table1")
    paper = read_published_csv(s.published)
    blank = paper[paper["mean"].isna()]
    assert len(blank) == 4 and set(zip(blank["method"], blank["dataset"])) == {("FedRS", "CIFAR-100")}


@pytest.mark.parametrize("tier", ["smoke", "small", "paper"])
def test_fedadc_figures_that_repeat_runs(tier):
    def ids(name): return {c.run_id for c in spec(f"fedadc/{name}").runs(tier)}
    assert ids("figure2") < ids("figure1")
    assert ids("figure3") <= ids("table1")
    if tier == "paper":
        assert ids("figure3") | ids("figure4") < ids("table1")
        assert len(ids("table1") & ids("readings")) == 5 * 4
        assert len(ids("table1") & ids("class_covering")) == 8 and len(ids("table1") & ids("figure7")) == 4


def test_fedadc_figures_1_and_2_are_section_iv_b():
    for c in spec("fedadc/figure1").runs("paper"):
        f = c.settings["method"]["fields"]
        assert (f["epochs"], f["batch_size"], f["weight_decay"], f["momentum"]) == (1, 64, 4e-4, 0.)
        assert (c.settings["participation"], c.rounds) == (.2, 500)
    assert {c.seed for c in spec("fedadc/figure2").runs("paper")} == set(range(10))
    both = [(r["partition"]["shards"], r["method"]["fields"].get("variant")) for r in runs("fedadc/figure2").values()]
    assert both == [(s, variant) for s in (2, 3, 4) for variant in ("heavy_ball", "nesterov")]


@pytest.mark.parametrize("name, clients, share, epochs", [
    ("figure5", 500, .02, [2, 2, 5, 5]), ("figure6", 1000, .01, [10, 10])])
def test_fedadc_with_many_clients(name, clients, share, epochs):
    cells = [c.settings for c in spec(f"fedadc/{name}").runs("paper", seeds=1)]
    assert [c["method"]["fields"]["epochs"] for c in cells] == epochs
    assert {(c["partition"]["clients"], c["participation"]) for c in cells} == {(clients, share)}
    assert {(c["method"]["class"], c["method"]["fields"]["weight_decay"]) for c in cells} == {
        ("FedDyn", 1e-3), ("FedADCPlus", 5e-4)}


def test_fedadc_calibration_is_judged_on_the_clients_own_test_shares():
    s = spec("fedadc/figure7")
    cells = {c.row: c.settings["method"] for c in s.runs("paper", seeds=1)}
    assert s.metric == "personalised_accuracy" and {m["class"] for m in cells.values()} == {"FedADCPlus"}
    assert "calibration" not in cells["global model"]["fields"]
    assert {row: m["fields"].get("calibration") for row, m in cells.items() if row != "global model"} == {
        "plain": "plain", "proximal": "proximal", "self-confidence": "self-confidence"}


def test_fedadc_cohorts_that_cover():
    cells = {c.row: c.settings["method"]["fields"] for c in spec("fedadc/class_covering").runs("paper", seeds=1)}
    for row in ("FedADC", "FedADC+"): assert cells[f"{row}, covering"] == cells[row] | {"covering": True}
