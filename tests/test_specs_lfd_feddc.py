"The specs of LfD and FedDC: every published number has its place, and every value is the one that its source says"
from collections import Counter
from pathlib import Path

import pytest
import torch

from fedrepro.core.errors import InputError
from fedrepro.data.transforms import dataset_names
from fedrepro.engine.method import load_methods
from fedrepro.experiments.rules import field_rules
from fedrepro.experiments.runs import build
from fedrepro.experiments.spec_files import read_spec
from fedrepro.experiments.specs import find_specs, load_spec
from fedrepro.verdicts.tables import matching, published_cell, read_published, table_rows

PAPERS = Path(__file__).resolve().parents[1] / "papers"
SPECS = {n: p for n, p in find_specs(PAPERS).items() if n.startswith(("lfd/", "feddc/"))}
LINES = {"lfd/table1": 9, "lfd/table2": 24, "lfd/table3": 20, "lfd/table4": 20, "lfd/table5": 10,
         "feddc/thirdparty": 40}
LOCAL = ("lfd/table5", "lfd/figure1", "lfd/figure3", "lfd/figure4")  # studies of one client: all columns are one run
MISSING = {"feddc/comparison": {"EMNIST-L, D2, share 0.15", "Tiny-ImageNet, D2, share 0.15"}}  # their archives cannot be had
READINGS = ("lfd/readings", "feddc/readings")
RUN = [name for name in SPECS if name not in LOCAL]
OURS = "FedAvg + normalised softmax + margin"


@pytest.fixture(scope="module")
def specs():
    assert set(SPECS) == {*LINES, *MISSING, *LOCAL, *READINGS, "lfd/figure5", "lfd/figure5_epochs", "feddc/comparison", "feddc/synthetic"}
    return {name: load_spec(path) for name, path in SPECS.items()}


def cells(spec, tier="paper"):
    "Settings by (row, column), first seed"
    return {(c.row, c.column): c for c in reversed(spec.runs(tier))}


# --- beside the published numbers

@pytest.mark.parametrize("name", LINES)
def test_every_published_line_is_hit_by_exactly_one_cell(specs, name):
    spec, paper = specs[name], read_published(specs[name])
    assert len(paper) == LINES[name]
    pairs = [r.published | c.published for c in spec.columns for r in spec.rows.values()]
    hits = Counter(i for where in pairs for i in matching(paper, where).index)
    assert hits == Counter(paper.index), "a published line has no cell, or two"
    assert sum(OURS == r for r in spec.rows) == (name.startswith("lfd/") and name != "lfd/table1")
    for c in spec.columns:  # all of our cells have a number, but for the row that is ours alone, and for columns that say why not
        empty = {r.name for r in spec.rows.values() if matching(paper, r.published | c.published).empty}
        assert empty == (set(spec.rows) if c.unpublished else set(spec.rows) & {OURS}), c.label


def test_only_the_specs_with_published_numbers_name_a_csv(specs):
    assert {name for name, spec in specs.items() if spec.published} == set(LINES)
    rows = table_rows(specs["lfd/table3"], paper := read_published(specs["lfd/table3"]))
    assert list(rows) == ["FedAvg", "FedAvgM", "FedProx", "MOON", "LfD", OURS]
    assert published_cell(paper, rows["LfD"] | specs["lfd/table3"].columns[2].published) == (58.2, 0.6)
    assert list(table_rows(specs["lfd/table1"], read_published(specs["lfd/table1"]))) == list(specs["lfd/table1"].rows)


# --- what can be run, and at what cost

@pytest.mark.parametrize("name", SPECS)
def test_what_is_missing_says_why_and_all_else_can_be_run(specs, name):
    for tier in specs[name].tiers:
        columns = specs[name].tier_columns(tier)
        gone = {c.label for c in columns if c.missing}
        want = MISSING.get(name, set()) if tier == "paper" else set()
        assert gone == want
        assert all(len(c.missing.split()) > 3 for c in columns if c.missing)
        used = {c.settings["data"]["name"] for c in specs[name].runs(tier)}
        assert used <= ({"digits", "synthetic"} if tier == "smoke" else {*dataset_names()} - {"digits"})


@pytest.mark.parametrize("name", RUN)
def test_smaller_tiers_have_every_row_on_one_seed_and_fewer_steps(specs, name):
    spec = specs[name]
    for tier in ("smoke", "small"):
        found = spec.runs(tier)
        assert {c.row for c in found} == set(spec.rows)
        assert {c.seed for c in found} == ({0} if tier == "small" else {0, 1})
        assert max(c.rounds for c in found) < min(c.rounds for c in spec.runs("paper"))
        assert len({(c.row, c.column) for c in found}) == len(spec.rows) * len({c.column for c in found})


@pytest.mark.parametrize("name", RUN)
def test_every_smoke_run_can_begin(specs, name):
    torch.set_num_threads(1)
    for cell in specs[name].runs("smoke"):
        method, federation, rounds = build(cell)
        server = method.init_server(federation)  # here a network without the part that is tied would be refused
        assert rounds == cell.rounds and set(method.broadcast(server)) <= set(server)


# --- values that are easily lost on the way

@pytest.mark.parametrize("name", SPECS)
def test_what_is_not_tuned_yet_declares_its_grid(specs, name):
    spec, tuning = specs[name], read_spec(SPECS[name]).get("tuning", {})
    open_values = {(r.name, k) for r in spec.rows.values() for k, v in r.values.items() if "not tuned yet" in v.source}
    assert open_values == {(row, key) for row, grid in tuning.items() for key in grid if key != "split"}
    for row, grid in tuning.items():
        rules = field_rules(load_methods()[spec.rows[row].method])
        assert grid["split"] == "a held-out tenth of the training data"
        for key, values in ((k, v) for k, v in grid.items() if k != "split"):
            assert [rules[key](v, key) for v in values] == sorted(set(values)) and len(values) > 1
            value = spec.rows[row].values[key]
            printed = "{" + ", ".join(f"{v:g}" for v in values) + "}"
            assert value.value in values and printed in value.source


def test_lfd_at_the_paper_tier_is_section_5_1(specs):
    found = cells(specs["lfd/table2"])
    fields = {key: c.settings["method"]["fields"] for key, c in found.items()}
    for c in found.values():
        s, f = c.settings, c.settings["method"]["fields"]
        assert (s["rounds"], s["participation"], s["data"]["recipe"]) == (100, 1.0, "LfD")
        assert s["partition"] == dict(recipe="dirichlet-class", clients=10, seed=s["seed"], alpha=.5, minimum=10, tries=1000)
        assert s["cohort_seed"] == s["seed"]
        assert (f["lr"], f["momentum"], f["weight_decay"], f["batch_size"]) == (.01, .9, 1e-5, 128)
        assert f["epochs"] * s["rounds"] == (300 if c.row == "Union" else 1000)
    assert {fields[r, "CIFAR-10"]["tau"] for r in ("LfD", OURS)} == {.1}
    assert {fields[r, "CIFAR-100"]["tau"] for r in ("LfD", OURS)} == {.05}
    assert {fields["MOON", c]["tau"] for c in ("CIFAR-10", "CIFAR-100")} == {.5}  # another temperature
    assert [fields[r, "CIFAR-10"]["weight"] for r in ("LfD", OURS)] == [1, 0]
    assert {fields[r, "CIFAR-10"]["margin"] for r in ("LfD", OURS)} == {.15}
    networks = {(column, c.settings["network"]) for (_, column), c in found.items()}
    assert networks == {("CIFAR-10", "moon_cnn"), ("CIFAR-100", "resnet18_cifar"), ("BindingDB", "dta_cnn"),
                        ("AGNews", "text_cnn")}
    assert {c.column: c.settings["data"]["name"] for c in found.values()}["AGNews"] == "AG News"


def test_the_small_tier_says_that_its_texts_are_partial(specs):
    for c in specs["lfd/table2"].tier_columns("small"):
        name, source = c.values["dataset"].value, c.values["dataset"].source
        assert name == c.label and ("partial copy" in source) == name.endswith("(partial)") == (name != "CIFAR-10")


def test_cinic_10_of_lfd_and_its_files(specs, tmp_path):
    found = {row: c for (row, column), c in cells(specs["lfd/table3"]).items() if column == "CINIC-10"}
    assert set(found) == set(specs["lfd/table3"].rows)
    for c in found.values():
        assert (c.settings["data"], c.settings["network"]) == (dict(name="CINIC-10", recipe="LfD"), "resnet18_cifar")
        assert (c.settings["partition"]["recipe"], c.settings["partition"]["alpha"]) == ("dirichlet-class", .5)
    with pytest.raises(InputError, match="CINIC-10.tar.gz.*`fedrepro data CINIC-10`"): build(found["LfD"], tmp_path)


def test_cells_that_are_one_setting_are_one_run(specs):
    "CIFAR-10 with 10 clients and beta 0.5 stands in Tables 2 and 3 and in Figure 5"
    two, three, five = (cells(specs[f"lfd/{n}"]) for n in ("table2", "table3", "figure5"))
    for row in specs["lfd/figure5"].rows:
        same = two[row, "CIFAR-10"], three[row, "CIFAR-10, beta 0.5"], five[row, "CIFAR-10, E = 10"]
        assert len({c.run_id for c in same}) == 1, row
    assert cells(specs["lfd/table1"])["No constraint", "CIFAR-10"].run_id in {c.run_id for c in two.values()}
    for name, spec in specs.items():
        for tier in spec.tiers:
            ids = Counter(c.run_id for c in spec.runs(tier))
            same = len(spec.tier_columns(tier)) if name in LOCAL else 1
            assert not ids or set(ids.values()) == {same}, f"{name}, {tier}: two cells are the same run"


def test_table_1_ties_each_part_in_both_ways(specs):
    found = cells(specs["lfd/table1"])
    fields = {r: c.settings["method"]["fields"] for (r, _), c in found.items() if r != "No constraint"}
    assert {(f["kind"], f["part"]) for f in fields.values()} == {(k, p) for k in ("feature", "parameter")
                                                                 for p in ("all", "extractor", "header", "classifier")}
    for row, where in ((r, specs["lfd/table1"].rows[r].published) for r in fields):
        assert where["constraint_kind"] == fields[row]["kind"]
        assert where["constraint_target"].endswith(fields[row]["part"])


def test_table_4_and_figure_5_have_their_grids(specs):
    four = [c.settings for c in specs["lfd/table4"].runs("paper")]
    shares = {(s["partition"]["clients"], s["participation"]) for s in four}
    assert shares == {(50, .25), (50, .5), (100, .25), (100, .5)}
    epochs = {c.settings["method"]["fields"]["epochs"] for c in specs["lfd/figure5"].runs("paper")}
    assert epochs == {1, 5, 10, 20, 30}


OF_THE_CODE = {f"{d}, {p}, share {s}" for d in ("CIFAR-10", "MNIST") for p in ("IID", "D1", "D2") for s in (1.0, .15)}


def test_feddc_has_a_column_for_whatever_its_introduction_names(specs):
    spec = specs["feddc/comparison"]
    more = {c.label: c for c in spec.columns if c.label not in OF_THE_CODE}
    names = {"MNIST", "CIFAR-10"} | {c.values["dataset"].value for c in more.values()}
    assert names == {"MNIST", "Fashion-MNIST", "CIFAR-10", "CIFAR-100", "EMNIST-letters-10", "Tiny-ImageNet"}
    found = {column: c.settings for (row, column), c in cells(spec).items() if row == "FedDC"}
    assert {found[label]["partition"]["clients"] for label in found if "500 clients" in label} == {500}
    assert {found[label]["partition"]["sigma"] for label in found if "unequal" in label} == {.3}
    assert not [c.label for c in spec.columns if c.target and c.label not in OF_THE_CODE]
    assert all("no claim rests on it" in c.target.source for c in spec.columns if c.target)


def test_rows_that_the_paper_tuned_and_we_did_not_say_so(specs):
    for name in ("lfd/table1", "lfd/table2", "lfd/table3", "lfd/table4", "lfd/table5", "lfd/figure1", "lfd/figure5"):
        said = {r.name for r in specs[name].rows.values() if r.untuned}
        assert said == {r for r in specs[name].rows if r in ("FedAvgM", "FedProx", "MOON") or "constraint: " in r}, name


def test_table_5_asks_its_start_for_every_class_and_shows_both_ratios(specs):
    for name in ("lfd/table5", "lfd/figure4"):
        asked = {tier: {c.settings["study"].get("class_accuracy") for c in specs[name].runs(tier)} for tier in specs[name].tiers}
        assert asked == {"paper": {10.}, "small": {None}, "smoke": {None}}
    metrics = [(c.metric, bool(c.unpublished)) for c in specs["lfd/table5"].columns]
    assert metrics == [("lp_existing", False), ("lp_absent", False), ("lp_means_existing", True), ("lp_means_absent", True)]


def test_feddc_is_as_in_its_released_code(specs):
    found = cells(specs["feddc/comparison"])
    assert len(found) == (2 * 3 * 2 + 5) * 5
    for (row, column), c in found.items():
        if column not in OF_THE_CODE: continue
        s, f, mnist = c.settings, c.settings["method"]["fields"], column.startswith("MNIST")
        keys = ("lr", "lr_decay", "momentum", "weight_decay", "clip_norm", "epochs", "batch_size")
        assert [f[key] for key in keys] == [.1, .998, 0, 1e-3, 10, 5, 50]
        assert (s["network"], s["rounds"]) == (("feddc_mlp", 300) if mnist else ("feddc_lenet", 600))
        cut = s["partition"]
        assert cut["clients"] == 100 and str(s["participation"]) == column.split("share ")[1]
        assert cut["recipe"] == ("iid" if "IID" in column else "dirichlet-client")
        if "IID" not in column: assert (cut["alpha"], cut["sigma"]) == ({"D1": .6, "D2": .3}[column.split(", ")[1]], 0)
        if row == "FedDC": assert f["alpha"] == (.1 if mnist else .01)
        if row == "FedDyn": assert f["alpha"] == .01
        if row == "FedProx": assert f["mu"] == 2e-4  # 1e-4 without the factor 1/2


def test_feddc_on_synthetic_data_is_as_in_its_released_code(specs):
    found = cells(specs["feddc/synthetic"])
    assert [row for row, _ in found] == ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC"][::-1]
    for (row, _), c in found.items():
        s, f = c.settings, c.settings["method"]["fields"]
        keys = ("lr", "lr_decay", "momentum", "weight_decay", "clip_norm", "epochs", "batch_size")
        assert [f[key] for key in keys] == [.1, 1., 0, 1e-5, 10, 10, 10]
        assert (s["network"], s["rounds"], s["participation"]) == ("feddc_linear", 300, .15)
        assert s["partition"] == dict(recipe="natural", clients=20, seed=0)
        assert {"FedProx": f.get("mu") == 2e-4, "FedDyn": f.get("alpha") == .01, "FedDC": f.get("alpha") == .005}.get(row, True)


def test_synthetic_data_reach_the_clients_as_they_were_made(specs):
    for tier, rounds in (("smoke", 12), ("small", 60)):
        cell = next(c for c in specs["feddc/synthetic"].runs(tier) if c.row == "FedDC")
        _, federation, asked = build(cell)
        assert asked == rounds and [len(p) for p in federation.partition.train] == [200] * 20
        assert federation.net.count() == 155 and not any(t.any() for t in federation.net.init(0).values())
        groups = federation.data.groups[0]
        assert all((groups[mine] == k).all() for k, mine in enumerate(federation.partition.train))
