"Settings of one's own: what is typed, the tier and the folder it makes, copies of a paper's table, a page's parameters"

import json
import shutil

import nbformat
import pytest
from toy import SMALL, TOY, one_line, put, written

from fedrepro.core.errors import InputError
from fedrepro.core.folders import PROJECT, find_specs
from fedrepro.experiments.rules import typed_settings
from fedrepro.experiments.specs import Change, CHECKS, load_spec
from fedrepro.experiments.own_settings import own_runs, own_tier, own_values, with_settings
from fedrepro.models.architectures import ARCHITECTURES
from fedrepro.reporting.notebook import FailedRuns, planned_table
from fedrepro.verdicts.scoreboard import scoreboard
from fedrepro.reporting.printed_tables import render
from fedrepro.verdicts.tables import table

PAPERS = PROJECT / "papers"
CSV = (
    "paper,table,dataset,method,mean,std\np,1,digits,FedAvg,90.0,0.5\np,1,digits,FedProx,91.0,0.5\n"
)
PRINTED = SMALL | {
    "published": "x.published.csv",
    "columns": [{"published": {"dataset": "digits"}}],
}


@pytest.fixture
def toy(tmp_path):
    return load_spec(written(tmp_path, PRINTED, csv=CSV))


def values(spec, tier, key):
    return {r.settings.get(key, r.settings["method"]["fields"].get(key)) for r in spec.runs(tier)}


# --- what is typed


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("rounds=50", "rounds", 50),
        ("lr=.05", "lr", 0.05),
        ("lr=1e-3", "lr", 0.001),
        ("seeds=[3, 4]", "seeds", [3, 4]),
        ("dataset=AG News", "dataset", "AG News"),
        ("drift=none", "drift", "none"),
        ("augmented=true", "augmented", True),
        ("FedProx.mu=0.1", "FedProx.mu", 0.1),
        ("dataset=a.b=c", "dataset", "a.b=c"),
        ("FedADC (beta=0.9).lr=0.1", "FedADC (beta=0.9).lr", 0.1),
        ("network=", "network", ""),
        ("rounds=1\nclients=2", "rounds", "1\nclients=2"),
    ],
)
def test_a_typed_setting_is_read_as_toml_or_is_a_text(text, key, value):
    assert typed_settings([text]) == {key: value}


@pytest.mark.parametrize(
    "texts, words",
    [
        (["rounds"], ["'rounds'", "KEY=VALUE"]),
        (["=3"], ["'=3'"]),
        (["rounds=1", "rounds=2"], ["rounds is set twice"]),
    ],
)
def test_a_typed_setting_that_is_none_is_refused(texts, words):
    with one_line("--set", *words):
        typed_settings(texts)


# --- the changed tier


@pytest.mark.parametrize(
    "given, words",
    [
        ({"roundz": 3}, ["key 'roundz' is unknown", "did you mean 'rounds'"]),
        ({"rounds": "many"}, ["rounds", "'many' is not an integer"]),
        ({"rounds": 0}, ["rounds", "from 1"]),
        ({"rounds": 2.5}, ["2.5 is not an integer"]),
        ({"rounds": True}, ["True is not an integer"]),
        ({"lr": float("nan")}, ["nan"]),
        ({"dataset": "mnist"}, ["did you mean 'MNIST'"]),
        ({"FedProxx.mu": 1}, ["row 'FedProxx'", "did you mean 'FedProx'"]),
        ({"FedAvg.mu": 1}, ["FedAvg: key 'mu'"]),
        ({"alpha_dirichlet": 0.1}, ["alpha_dirichlet", "no run", "partition iid"]),
        ({"drift_round": 1}, ["drift_round", "drift none"]),
        ({7: 1}, ["key '7' is unknown"]),
        ({"rounds": None}, ["rounds", "'none'"]),
    ],
)
def test_what_is_set_wrongly_is_one_line(toy, given, words):
    with one_line("set", *words):
        with_settings(toy, "smoke", given)


def test_every_run_has_what_was_set_and_one_row_what_is_its_own(toy):
    spec, tier = with_settings(
        toy, "smoke", {"rounds": 7, "lr": 0.5, "FedProx.mu": 0.25, "FedProx.lr": 0.125}
    )
    fields = {r.row: r.settings["method"]["fields"] for r in spec.runs(tier)}
    assert {r.rounds for r in spec.runs(tier)} == {7}
    assert fields["FedAvg"]["lr"] == 0.5
    assert fields["FedProx"]["lr"] == 0.125
    assert fields["FedProx"]["mu"] == 0.25
    assert tier == "own-smoke+FedProx.lr=0.125+FedProx.mu=0.25+lr=0.5+rounds=7"
    assert (
        with_settings(
            toy,
            "smoke",
            dict(
                reversed({"rounds": 7, "lr": 0.5, "FedProx.mu": 0.25, "FedProx.lr": 0.125}.items())
            ),
        )[1]
        == tier
    )


def test_a_set_value_wins_over_tier_column_and_row(tmp_path):
    raw = SMALL | {
        "columns": [
            {
                "participation": 0.5,
                "source": "guess: x",
                "methods": {"FedProx": {"mu": 0.3, "source": "guess: x"}},
            }
        ]
    }
    raw |= {
        "tiers": {
            "smoke": {
                "base": {"rounds": 1, "source": "tier: x"},
                "methods": {"FedProx": {"mu": 0.4, "source": "tier: x"}},
            }
        }
    }
    spec, tier = with_settings(
        load_spec(written(tmp_path, raw)), "smoke", {"rounds": 3, "participation": 0.75, "mu": 0.5}
    )
    assert values(spec, tier, "rounds") == {3}
    assert values(spec, tier, "participation") == {0.75}
    assert values(spec, tier, "mu") == {None, 0.5}


def test_a_column_says_what_of_it_was_replaced(tmp_path):
    columns = [
        {"dataset": "digits", "source": "guess: x"},
        {"label": "half", "participation": 0.5, "source": "guess: x"},
    ]
    spec = load_spec(written(tmp_path, SMALL | {"columns": columns}))
    changed, tier = with_settings(
        spec, "smoke", {"dataset": "MNIST", "participation": 0.75, "clients": 5}
    )
    assert [c.label for c in changed.tier_columns(tier)] == [
        "MNIST, 5 clients",
        "half, with participation = 0.75",
    ]
    with one_line("FedAvg on digits, 3 clients and FedAvg on half", "same run"):
        own_runs(spec, "smoke", spec.runs("smoke"), {"participation": 0.75})
    chosen = [r for r in spec.runs("smoke") if r.column == "half"]
    assert {r.column for r in own_runs(spec, "smoke", chosen, {"participation": 0.75}, 1)[2]} == {
        "half, with participation = 0.75"
    }


def test_a_network_that_does_not_fit_is_refused_before_any_run():
    spec = load_spec("fedccfa/table2")
    with one_line("digits", "fedccfa_fmnist", "too small"):
        own_runs(spec, "small", spec.runs("small", ["FedAvg"]), {"dataset": "digits"})


def test_no_row_shows_anothers_runs_any_more():
    spec = load_spec("fedbss/table2")
    changed, tier = with_settings(spec, "paper", {"participation": 0.5})
    assert any(c.same_as for c in spec.columns)
    assert not any(c.same_as for c in changed.tier_columns(tier))
    assert {r.method for r in changed.runs(tier, ["InCo"], 1)} != {"FedAvg"}


def test_a_difference_changes_both_its_tables():
    changed, tier = with_settings(load_spec("fedccfa/table8"), "smoke", {"epochs": 1})
    assert values(changed, tier, "epochs") == {1}
    assert {r.table for r in changed.runs(tier)} == {
        "fedccfa/table2",
        "fedccfa/table1",
    }


def test_names_of_tiers_are_names_of_folders(toy):
    names = [
        own_tier("smoke", own_values(toy, g))
        for g in (
            {"dataset": "AG News"},
            {"dataset": "BindingDB (partial)"},
            {"partition": "iid", "lr": 0.1, "momentum": 0.2, "weight_decay": 0.3, "epochs": 5},
        )
    ]
    assert all(
        len(n) <= 80
        and n.startswith("own-smoke+")
        and not set(n) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.=+-")
        for n in names
    )
    assert len(set(names)) == len(names)


# --- results of one's own are nobody else's


def test_results_lie_in_a_folder_of_their_own_and_are_never_judged(toy, said):
    put(toy, "paper", "FedAvg", [[90.0, 90.0], [90.2, 90.2]])
    before = render(toy, "paper")
    assert "Verdicts: 1" in before
    code, out, err = said(
        "run", toy.path, "--tier", "paper", "--set", "rounds=1", "--methods", "FedAvg", "--quiet"
    )
    assert code == 0 and {p.name for p in toy.results.iterdir()} == {
        "paper",
        "own-paper+rounds=1",
    }, (code, err)
    assert "changed: rounds = 1" in out
    assert "not comparable" in out
    assert "rounds 1 (paper 2)" in out
    assert "Verdicts" not in out
    changed, tier = with_settings(toy, "paper", {"rounds": 1})
    assert not set(table(changed, tier).verdict) & {
        "reproduced",
        "consistent",
        "undecided",
        "contradicted",
        "differs slightly",
    }
    assert render(toy, "paper") == before
    # shown again
    assert said("table", toy.path, "--set", "rounds=1")[1].splitlines()[0] == out.splitlines()[0]
    assert (
        said(
            "run",
            toy.path,
            "--tier",
            "paper",
            "--set",
            "rounds=1",
            "--methods",
            "FedAvg",
            "--quiet",
        )[1]
        == out
    )


def test_the_scoreboard_does_not_see_them(toy, monkeypatch):
    monkeypatch.chdir(toy.path.parents[1])
    root = toy.path.parents[1]
    changed, tier = with_settings(toy, "paper", {"rounds": 3})
    put(changed, tier, "FedAvg", [[90.0] * 3, [90.0] * 3], results=toy.results)
    board = scoreboard(root=root)
    assert len(board)
    assert set(board.status) == {"runnable", "missing"}
    assert not (board.n > 0).any()


def test_what_changes_nothing_stays_the_tier(toy):
    assert with_settings(toy, "paper", {}) == (toy, "paper")
    spec, tier = with_settings(toy, "paper", {"rounds": 2, "seeds": [5, 6]})
    assert tier == "paper"
    assert {r.seed for r in spec.runs(tier)} == {5, 6}
    assert spec.title == toy.title


def test_a_setting_must_be_read_by_a_run_that_is_asked_for(toy, refused):
    "FedProx alone has mu"
    some = toy.runs("smoke", ["FedAvg"])
    for given in ({"mu": 0.3, "rounds": 7}, {"FedProx.mu": 0.3}, {"mu": 0.1}):
        with one_line("mu: no run that is asked for of toy/x at tier smoke reads it"):
            own_runs(toy, "smoke", some, given)
        assert own_runs(toy, "smoke", toy.runs("smoke"), given)[2]
    assert own_runs(toy, "smoke", [], {"mu": 0.3})[2] == []  # a table without the rows asked for
    words = ["--methods", "FedAvg", "--set", "mu=0.3", "--set", "rounds=7"]
    refused(["run", toy.path, *words], "set mu: no run that is asked for")


def test_commands_say_in_one_line_what_is_wrong(toy, refused):
    for command in ("run", "plan", "table", "figure"):
        refused([command, toy.path, "--set", "roundz=3"], "did you mean 'rounds'")
    refused(["run", toy.path, "--set", "rounds"], "KEY=VALUE")
    assert not toy.results.exists()


def test_a_plan_prints_commands_that_set_the_same(toy, said):
    _, out, _ = said(
        "plan",
        toy.path,
        "--tier",
        "smoke",
        "--set",
        "rounds=2",
        "--set",
        "FedProx.mu=0.5",
        "--list",
        "--methods",
        "FedProx",
    )
    runs = {
        r.run_id
        for r in own_runs(
            toy, "smoke", toy.runs("smoke", ["FedProx"]), {"rounds": 2, "FedProx.mu": 0.5}
        )[2]
    }
    assert "--tier smoke --set rounds=2 --set FedProx.mu=0.5" in out
    assert {line.split()[4] for line in out.splitlines()} == runs
    code, out, _ = said("table", toy.path, "--tier", "smoke", "--set", "rounds=2")
    assert code == 0
    assert "--tier smoke --set rounds=2" in out


def test_a_plan_leaves_out_tiers_that_cannot_have_the_settings(said, refused):
    "A drift after round 50 comes after the last of tier smoke, and of small"
    words = ["plan", "fedccfa/table2", "--methods", "FedAvg", "--seeds", 1, "--set"]
    code, out, _ = said(*words, "drift_round=50", "--json")
    assert code == 0
    assert [line["tier"] for line in json.loads(out)] == ["own-paper+drift_round=50"]
    refused([*words, "drift_round=500"], "drift_round 500 comes after the last of 12 rounds")


# --- copies of a paper's table


def copied(folder, text="", extends="fedccfa/table2"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "mine.toml").write_text(f'extends = "{extends}"\n{text}')
    return load_spec(folder / "mine.toml")


def test_a_copy_in_any_folder_is_the_papers_table_until_it_is_changed(tmp_path):
    original = load_spec("fedccfa/table2")
    same = copied(tmp_path / "a")
    assert same.origin is None
    assert "paper" in same.tiers
    assert same.published == original.published
    assert {r.run_id for r in same.runs("paper")} == {r.run_id for r in original.runs("paper")}
    assert same.results == tmp_path / "a" / "results"
    more = copied(
        tmp_path / "b", '[methods.Mine]\nclass = "FedProx"\nmu = {value = 1.0, source = "guess: x"}'
    )
    assert more.origin is None
    assert "Mine" in more.rows


@pytest.mark.parametrize(
    "text, words",
    [
        ('[base]\nrounds = {value = 150, source = "guess: x"}', "rounds = 150"),
        ('[base]\nalpha_dirichlet = {value = 0.1, source = "guess: x"}', "alpha_dirichlet = 0.1"),
        ('[methods.FedProx]\nmu = {value = 1.0, source = "guess: x"}', "FedProx: mu = 1.0"),
        ("margin = 50.0", "margin = 50.0"),
        ('statistic = "best"', "statistic = best"),
        ('[methods.Mine]\nclass = "FedProx"\npublished = {method = "FedAvg"}', "other runs"),
    ],
)
def test_a_changed_copy_has_no_tier_paper_and_its_title_says_why(tmp_path, text, words):
    spec = copied(tmp_path / "x", text)
    assert spec.origin.name == "fedccfa/table2"
    assert "paper" not in spec.tiers
    assert words in spec.title
    with one_line("no tier paper", "fedccfa/table2", "own-paper"):
        spec.runs("paper")
    assert "not comparable" in render(spec, "own-paper") if words != "other runs" else True


def test_a_changed_copy_says_at_every_tier_what_differs_from_the_paper(tmp_path):
    spec = copied(tmp_path / "x", '[base]\nalpha_dirichlet = {value = 0.2, source = "guess: x"}')
    changes = spec.reductions("small")
    assert Change("alpha_dirichlet", 0.2, 0.5) in changes
    assert Change("rounds", 40, 200) in changes


def test_a_copied_folder_that_was_edited_is_no_paper(tmp_path):
    folder = tmp_path / "papers" / "fedccfa"
    folder.mkdir(parents=True)
    for file in ("_base.toml", "_grid.toml", "table2.toml", "table2.published.csv"):
        shutil.copy(PAPERS / "fedccfa" / file, folder)
    assert load_spec(folder / "table2.toml").origin is None
    base = folder / "_base.toml"
    base.write_text(base.read_text().replace("lr = {value = 0.01", "lr = {value = 0.02", 1))
    assert load_spec(folder / "table2.toml").origin.name == "fedccfa/table2"
    csv = folder / "table2.published.csv"
    base.write_text((PAPERS / "fedccfa" / "_base.toml").read_text())
    # a published number that the paper does not have
    csv.write_text(csv.read_text().replace("67.81", "57.81"))
    assert load_spec(folder / "table2.toml").origin is not None


def test_a_changed_copy_is_judged_nowhere(tmp_path, monkeypatch):
    "Not in the scoreboard of a folder with a copy of the same name, nor on the page of a paper"
    from fedrepro.reporting.page_text import specs_of

    folder = tmp_path / "papers" / "fedccfa"
    spec = copied(
        folder,
        '[base]\nrounds = {value = 3, source = "guess: x"}\ndrift_round = {value = 1, source = "guess: x"}',
    )
    put(spec, "own-paper", "FedAvg", [[90.0] * 3], "Fashion-MNIST, 20 clients")
    assert "90.00 (1)" in render(spec, "own-paper")
    assert "reproduced" not in render(spec, "own-paper")
    monkeypatch.chdir(tmp_path)
    assert "fedccfa/mine" in find_specs()
    assert "fedccfa/mine" not in [s.name for s in specs_of("fedccfa")]


def test_the_package_has_no_changed_copies():
    found = {name: load_spec(path) for name, path in find_specs(PAPERS).items()}
    assert not [name for name, spec in found.items() if spec.origin]
    assert set(CHECKS) <= set(found)


def test_a_copy_that_says_nothing_of_a_paper_is_nobodys(tmp_path):
    assert load_spec(written(tmp_path, TOY)).origin is None


@pytest.mark.parametrize(
    "extends, words",
    [
        ("fedccfa/tabel2", ["extends", "did you mean 'fedccfa/table2'"]),
        ("table2.toml", ["does not exist", "fedccfa/table2"]),
        ("../../x", ["not the name of a file"]),
        ("/etc/passwd", ["not the name"]),
        ("fedccfa/..", ["unknown"]),
    ],
)
def test_what_cannot_be_extended_is_one_line(tmp_path, extends, words):
    with one_line(*words):
        copied(tmp_path / "x", extends=extends)


def test_a_method_added_to_a_copy_is_a_row_where_the_paper_lists_its_rows(tmp_path):
    text = '[methods.Mine]\nclass = "FedAvg"\n'
    assert list(copied(tmp_path / "x", text, "fedccfa/table3").rows)[-1] == "Mine"


# --- a page's parameters


def test_a_page_plans_its_own_table_with_other_settings():
    job = planned_table(main="fedccfa/table2", set={"rounds": 8}, methods="FedAvg", seeds=1)
    assert job.tier == "own-smoke+rounds=8"
    assert {r.rounds for r in job.runs} == {8}
    assert len(job.runs) == 1
    assert planned_table(main="fedccfa/table2") is None
    for wrong, words in [
        (dict(set=[1]), "parameter set"),
        (dict(lessons="no"), "parameter lessons"),
        (dict(set={"roundz": 1}), "did you mean 'rounds'"),
        (dict(imports=3), "parameter imports = 3: expected the paths of Python files"),
        (dict(imports="nowhere.py"), "nowhere.py"),
    ]:
        with one_line(words):
            planned_table(main="fedccfa/table2", **wrong)


def test_a_page_knows_what_its_imports_bring(tmp_path, monkeypatch):
    "A network in one file and a data set in the other; relative to the folder that holds `papers/`"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers").mkdir()
    monkeypatch.setitem(ARCHITECTURES, "page_net", None)
    (tmp_path / "page_net.py").write_text(
        "from torch import nn\nfrom fedrepro import Network, architecture\n@architecture(1, 8, 8)\n"
        "def page_net(classes, shape): return Network(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    (tmp_path / "page_set.py").write_text(
        "from fedrepro.data import datasets\nread = datasets.DATA_CARDS['digits'].read\n"
        "datasets.add_data_set('page_set', read, (0.5,), (0.5,))\n"
    )
    own = SMALL | dict(base=SMALL["base"] | dict(dataset="page_set", network="page_net"))
    spec = written(tmp_path / "papers", own, "demo/t")
    for files in ("page_net.py, page_set.py", ["page_net.py", "page_set.py"]):
        job = planned_table(spec=str(spec), imports=files, methods="FedAvg", seeds=1)
        assert {*job.runs[0].settings["sources"]} == {"network", "data"}
    with one_line("parameter imports: methods file", "bad.py: ZeroDivisionError", "(bad.py:2)"):
        (tmp_path / "bad.py").write_text("\n1 / 0\n")
        planned_table(spec=str(spec), imports="bad.py")


def test_failed_runs_are_one_line_in_a_notebook():
    assert FailedRuns("1 failed")._render_traceback_() == ["FailedRuns: 1 failed"]


@pytest.mark.parametrize("page", ["10_lfd", "11_feddc", "12_fedadc", "13_fedbss", "14_fedccfa"])
def test_no_lesson_calls_what_the_parameter_set_hides(page):
    import ast

    cells = nbformat.read(PROJECT / f"nbs/06_methods/{page}.ipynb", 4).cells
    calls = [
        n
        for c in cells
        if c.cell_type == "code"
        for n in ast.walk(ast.parse(c.source))
        if isinstance(n, ast.Name) and n.id == "set" and isinstance(n.ctx, ast.Load)
    ]
    assert len(calls) == 1  # where it is handed over


def test_without_lessons_a_kernel_runs_the_cells_of_the_runs_alone():
    from IPython.core.interactiveshell import InteractiveShell
    from fedrepro.reporting.notebook import skip_lessons

    shell = InteractiveShell.instance()
    try:
        skip_lessons(True)
        shell.run_cell("skipped = 1")
        shell.run_cell("# papermill_description=Runs\ndone = 1")
        skip_lessons(False)
        shell.run_cell("again = 1")
        assert {"skipped", "done", "again"} & shell.user_ns.keys() == {"done", "again"}
    finally:
        skip_lessons(False)
        InteractiveShell.clear_instance()


def test_a_notebook_prints_one_line_for_a_users_mistake():
    assert InputError("rounds: expected 1")._render_traceback_() == [
        "InputError: rounds: expected 1"
    ]
