"The command line: what it prints, its exit codes, and one clear line for everything a person can get wrong"

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedrepro
from fedrepro.cli import app, look_up
from fedrepro.cli.app import EXAMPLES
from fedrepro.cli.main import OF_ONES_OWN
from fedrepro.cli.own import page_files
from fedrepro.core import folders
from fedrepro.engine.method import METHODS
from fedrepro.experiments import runner
from toy import ROOT, SMALL, written

CSV = "method,clients,mean,std\nFedAvg,20,67.81,1.12\nIFCA,20,87.02,0.06\n"
RAW = SMALL | dict(published="t.published.csv", columns=[dict(published={"clients": 20})])
ONE = ["--seeds", 1, "--methods", "FedAvg", "--quiet"]


@pytest.fixture
def write(tmp_path):
    return lambda raw, name="t": written(tmp_path / "papers", raw, f"demo/{name}", CSV)


@pytest.fixture
def spec(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    return write(RAW)


# --- what is done


def test_lists(said, spec, monkeypatch):
    "Pays for reading every spec of the package once"
    code, out, err = said("methods", "--json")
    methods = {m["name"]: m for m in json.loads(out)}
    assert (code, err) == (0, "")
    assert len(methods) >= 32
    assert methods["FedRep"]["personal"]
    assert methods["FedProx"]["hooks"] == ["loss"]
    assert methods["SCAFFOLD"]["state"] == {"server": ["params", "c", "clients"], "client": ["c"]}
    assert methods["SCAFFOLD"]["communication"]["upload"] == {
        "params": "model",
        "change": "trained",
    }
    assert "FedAvg" in methods["FedProx"]["limit"]
    assert {d["name"]: d["present"] for d in json.loads(said("datasets", "--json")[1])}[
        "digits"
    ] is True
    table, *ours = json.loads(said("tables", "--json")[1])
    assert "fedccfa/table2" in [t["name"] for t in ours], (
        "the package's tables stay beside one's own"
    )
    assert table["name"] == "demo/t"
    assert table["tiers"]["smoke"] == {"finished": 0, "runs": 4}
    monkeypatch.setattr(folders, "roots", lambda: [spec.parents[2]])
    for command, word in [
        ("methods", "FedCCFA"),
        ("datasets", "Fashion-MNIST"),
        ("tables", "smoke 0/4"),
    ]:
        code, out, _ = said(command)
        assert code == 0
        assert word in out


def test_some_columns_alone(said, spec, write, monkeypatch):
    asked = []

    def note(runs, *_, **__):
        return asked.append({r.column for r in runs}) or runner.SweepReport()

    monkeypatch.setattr(runner, "compute_runs", note)
    first, second = "digits, 3 clients", "again, with 5"
    two = write(
        RAW | dict(columns=[*RAW["columns"], dict(label=second, clients=5, source="guess: toy")]),
        "two",
    )
    for given, columns in [
        ("digits", {first, second}),
        (second, {second}),
        (f"{first} , {second}", {first, second}),
    ]:
        assert said("run", two, "--datasets", given, "--quiet")[0] == 0
        assert asked.pop() == columns
    assert said("run", spec, two, "--datasets", second, "--quiet")[0] == 0
    assert set().union(*asked) == {second}, "a column that only one of the tables has"


def test_run_table_figure(said, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "roots", lambda: [tmp_path])  # `tables` reads every spec
    code, out, err = said("run", spec, "--tier", "smoke", *ONE)
    assert code == 0
    assert err == ""
    assert "not comparable" in out
    assert "IFCA" in out
    (file,) = (spec.parent / "results/smoke").iterdir()
    before = file.read_bytes()
    # the first is kept
    code, again, err = said("run", "demo/t", "--tier", "smoke", "--device", "cpu")
    assert code == 0
    assert "3 computed, 1 were there" in err
    assert file.read_bytes() == before
    assert len(list(file.parent.iterdir())) == 4
    for kind, word in [
        ("text", "± "),
        ("md", "| FedAvg |"),
        ("csv", "published_mean"),
        ("html", "<table"),
    ]:
        code, out, err = said("table", spec, "--tier", "smoke", "--format", kind)
        assert code == 0
        assert err == ""
        assert word in out
    assert said("table", spec, "--tier", "smoke")[1] == again
    code, out, err = said("figure", spec, "--tier", "smoke")
    assert code == 0
    assert out.strip() == "out/demo_t_smoke.png"
    assert Path(out.strip()).stat().st_size > 5000
    assert said("figure", spec, "--tier", "smoke", "--out", tmp_path / "x/y.pdf")[0] == 0
    assert (tmp_path / "x/y.pdf").exists()
    assert json.loads(said("tables", "--json")[1])[0]["tiers"]["smoke"]["finished"] == 4


def test_where_results_and_data_lie(said, spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert said("run", spec, *ONE, "--results", "~/there")[0] == 0
    assert len(list((tmp_path / "home/there/smoke").glob("*.jsonl"))) == 1
    assert not (tmp_path / "~").exists()
    assert not (spec.parent / "results").exists()
    assert "(1)" in said("table", spec, "--results", "~/there")[1]
    assert "(1)" not in said("table", spec)[1]
    code, out, err = said("data", "digits")
    assert code == 0
    assert Path(out.strip()).is_dir()
    for argv in (["--data", tmp_path], []):
        if not argv:
            monkeypatch.setenv("FEDREPRO_DATA", str(tmp_path))
        mnist = next(
            d for d in json.loads(said("datasets", "--json", *argv)[1]) if d["name"] == "MNIST"
        )
        assert not mnist["present"]
        assert Path(mnist["folder"]).is_relative_to(tmp_path)


def test_two_specs_share_runs(said, refused, spec, write):
    other = write(
        RAW | dict(title="Another one", base=RAW["base"] | dict(drift="sudden", drift_round=0)), "u"
    )
    code, out, err = said("run", spec, other, *ONE[:4], "--device", "cpu")
    assert code == 0
    assert "A small one" in out
    assert "Another one" in out
    assert "2 computed" in err
    refused(["run", spec, other, "--methods", "FedAvg,FedAvgg"], "'FedAvgg'", "FedAvg")
    code, out, err = said("run", spec, spec, *ONE[:4], "--executor", "stacked")
    assert code == 0
    assert out.count("A small one") == 1
    assert "0 computed, 1 were there" in err


OWN = """
from dataclasses import dataclass
from fedrepro.engine.method import FedAvg
@dataclass
class Halfway(FedAvg):
    "Goes half of FedAvg's way"
    def aggregate(self, server, exchange):
        mean = super().aggregate(server, exchange)["params"]
        return server | {"params": {n: (t + mean[n]) / 2 for n, t in server["params"].items()}}
"""


def test_a_method_in_a_file_of_ones_own(said, refused, write, spec):
    "Pays for two worker processes that compute a run each, and two that compute its clients: all have to know the file"
    own = spec.with_name("halfway_method.py")
    own.write_text(OWN)
    spec = write(RAW | dict(methods=RAW["methods"] | {"Halfway": {}}))
    refused(["run", spec], "'Halfway'")
    for more in (["--seeds", 2], ["--executor", "processes", "--seeds", 1, "--results", "apart"]):
        code, out, err = said(
            "run",
            spec,
            "--device",
            "cpu",
            "--methods",
            "Halfway",
            "--workers",
            2,
            *more,
            "--import",
            own,
        )
        assert code == 0 and "0 were there" in err and "Halfway" in out, err
    assert "Halfway" in [
        m["name"] for m in json.loads(said("--import", own, "methods", "--json")[1])
    ]
    for name, text in [("gone.py", None), ("wrong.py", "1 / 0"), ("json.py", "x = 1")]:
        if text:
            spec.with_name(name).write_text(text)
        refused(["--import", spec.with_name(name), "methods"], name)


def test_a_folder_with_the_separator_of_paths(refused, tmp_path, monkeypatch):
    folder = tmp_path / "a:b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("mydata.py").write_text("")
    refused(["--import", "mydata.py", "tables"], "'mydata.py' has a ':' in its path", "a:b/mydata")


def test_what_new_method_writes_runs(said, refused, tmp_path, monkeypatch):
    "Pays for the contract of a method in a process of its own, and for two runs of 12 rounds"
    monkeypatch.chdir(tmp_path)
    code, out, err = said("new-method", "my_method.py")
    assert (code, out) == (0, "my_method.py\nmy_method.toml\n")
    assert "--import my_method.py" in err
    checked = subprocess.run([sys.executable, "my_method.py"], capture_output=True, text=True)
    assert checked.returncode == 0 and "MyMethod(mu=0.0) = FedAvg()" in checked.stdout, (
        checked.stderr
    )
    _, out, _ = said("plan", "my_method.toml", "--import", "my_method.py", "--seeds", 3, "--list")
    del METHODS["MyMethod"], sys.modules["my_method"]
    monkeypatch.setenv("FEDREPRO_METHODS", "")
    assert said(*shlex.split(out.splitlines()[-1])[1:]) == (0, "", ""), (
        "a line of a list says what it needs"
    )
    run = err.strip().splitlines()[-1].split("fedrepro ")[1].split()
    code, out, err = said(*run, "--seeds", 1, "--quiet")
    assert (code, err) == (0, "")
    assert "MyMethod" in out
    assert "published" not in out
    assert "not run" not in out
    refused(["new-method", "my_method.py"], "my_method.py exists")


def test_pages_are_listed_and_copied(said, refused, tmp_path):
    code, out, _ = said("notebook")
    assert code == 0
    assert "01_your_method" in out
    assert len(out.splitlines()) == len(page_files()) + 2
    for name, file in [("14_fedccfa", "14_fedccfa"), ("your_method", "01_your_method")]:
        assert said("notebook", name, "--out", tmp_path)[1].strip() == str(
            tmp_path / f"{file}.ipynb"
        )
        assert (tmp_path / f"{file}.ipynb").read_bytes() == page_files()[file].read_bytes()
    refused(["notebook", "14_fedccfa", "--out", tmp_path], "exists; it is not replaced")


TORCHLESS = [
    "table fedccfa/table2",
    "claims",
    "export fedccfa/table2 --to latex",
    "datasets",
    "methods",
    "data digits",
    "notebook",
]


def test_what_was_answered_once_is_answered_without_torch(tmp_path):
    "Pays for every answer once; `tables` and `scoreboard` are answered the same way"
    code = (
        "import sys; from fedrepro.cli.main import main\n"
        "for line in sys.argv[2:]: assert main(line.split()) in (0, 2), line\n"
        "assert not set(sys.argv[1].split()) & set(sys.modules)"
    )

    def ask(without, *lines):
        done = subprocess.run(
            [sys.executable, "-c", code, without, *lines],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = ask("", *TORCHLESS)
    assert ask("torch pandas matplotlib scipy", *TORCHLESS) == first


def test_a_table_of_ones_own_rests_on_its_numbers_wherever_they_lie(said, tmp_path, monkeypatch):
    "A csv in another folder could be changed, and the table printed the old numbers"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    csv = tmp_path / "numbers.csv"
    csv.write_text(CSV)
    spec = written(tmp_path, RAW | dict(published="../numbers.csv"), "demo/t")
    for k, mean in enumerate(["67.81", "70.25"]):
        csv.write_text(CSV.replace("67.81", mean))
        for file in (csv, spec):
            os.utime(file, (k, k))  # what has changed just now is not cached
        for _ in range(2):
            code, out, _ = said("table", spec, "--tier", "paper", "--format", "csv")
            assert code == 0
            assert mean in out
    assert len(list((tmp_path / "cache").rglob("answers/*.json"))) == 1


def test_what_lies_below_a_spec_is_not_looked_at(tmp_path):
    "A spec in a home folder made each table walk through all of it"
    spec = written(tmp_path, RAW | dict(published="numbers/t.csv"), "t")
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/more.toml").write_text("")
    (tmp_path / "other.toml").write_text("")
    (tmp_path / "other.csv").write_text(CSV)
    names = ["results", "t.toml", "other.toml", "other.csv", "numbers/t.csv"]
    assert set(app.files_beside(spec)) == {tmp_path / name for name in names}
    assert app.files_beside("fedccfa/table2") == []


def test_a_removed_working_folder_is_named(refused, tmp_path, monkeypatch):
    "It was called an error of the output"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused(["tables"], "the working folder has been removed")


# --- the answers that are shipped

PAPERS = folders.PROJECT / "papers"


@pytest.fixture
def ship(tmp_path, monkeypatch):
    "Ships one answer, made from the package as it is, to a person with an empty cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(app, "SHIPPED", tmp_path / "answers.json")

    def ship(text=None, **changed):
        whole = {"made_from": app.made_from(), "answers": {"what 1": ["shipped"]}} | changed
        app.SHIPPED.write_text(json.dumps(whole) if text is None else text)

    ship()
    return ship


def answered(question=("what", 1), places=(PAPERS,)):
    return app.cached_answer([*question], places, lambda: ["computed"])[0]


def test_a_first_answer_is_the_shipped_one(ship, tmp_path):
    assert answered() == "shipped"
    assert answered(places=[None, tmp_path / "none", PAPERS]) == "shipped"
    link = tmp_path / "papers"
    link.symlink_to(PAPERS)
    assert answered(places=[link]) == "shipped"
    assert not (tmp_path / "cache").exists()


def test_a_shipped_answer_rests_on_the_package_alone(ship, tmp_path, monkeypatch):
    (tmp_path / "papers").mkdir()
    assert answered(places=[PAPERS, tmp_path / "papers"]) == "computed"
    assert answered(question=("what", 2)) == "computed"
    monkeypatch.setenv("FEDREPRO_METHODS", "mine.py")
    assert answered() == "computed"


@pytest.mark.parametrize("text", ["", "[]", '{"made_from": ""}', '{"answers": {"what 1": [1]}}'])
def test_a_damaged_file_of_answers_is_none(ship, text):
    ship(text)
    assert answered() == "computed"


def test_a_shipped_answer_is_not_used_once_a_file_has_changed(ship, tmp_path, monkeypatch):
    "A line of code, a spec, a result more: each is another digest; what is no source is not"
    tree = tmp_path / "tree"
    package = tree / "fedrepro"
    for name in ("fedrepro/a.py", "papers/p/t.toml", "papers/p/results/smoke/r.jsonl"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("1")
    monkeypatch.setattr(app, "PACKAGE", package)
    monkeypatch.setattr(app, "PROJECT", tree)
    first = app.made_from()
    for name in ("fedrepro/_modidx.py", "fedrepro/a.pyc", "papers/answers.json", "b.py"):
        (tree / name).write_text("2")
    assert app.made_from() == first
    seen = {first}
    for name in ("fedrepro/a.py", "papers/p/t.toml", "papers/p/results/smoke/s.jsonl"):
        (tree / name).write_text("2")
        seen.add(app.made_from())
    assert len(seen) == 4
    (tree / "papers").rename(package / "papers")  # as a wheel has it
    monkeypatch.setattr(app, "PROJECT", package)
    assert app.made_from() in seen


def test_the_shipped_answers_say_what_is_computed():
    "Where one does not, `python tools/answers.py` writes them again; scoreboard and claims rest on the same runs"
    kept = json.loads(app.SHIPPED.read_text())["answers"]
    mine = [m for m in look_up.method_lines() if m["module"].startswith("fedrepro.")]
    now = {
        "methods False": mine,
        "sources": look_up.source_lines(),
        "tables": look_up.table_lines(),
    }
    assert {question: kept[question] for question in now} == json.loads(json.dumps(now))
    assert {*kept} == {*now, "scoreboard None text", "claims paper None text"}


def test_a_plan_needs_no_data_and_has_a_line_a_tier(said, write, spec, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = RAW["base"] | dict(dataset="CINIC-10", network="fedccfa_cifar")
    spec = write(RAW | dict(base=base, tiers=RAW["tiers"] | {"paper": {}}))
    code, out, err = said(
        "plan", spec, "--data", tmp_path / "none", "--device", "cpu", "--seeds", 1
    )
    lines = [line.split() for line in out.splitlines()[2:]]
    assert code == 0 and [line[1] for line in lines] == ["smoke", "paper"], out
    assert all("2 of 2" in line for line in out.splitlines()[2:])
    assert "measured" not in out
    assert "--measure" in err
    assert len(err.splitlines()) == 1
    words = ["plan", spec, "--data", tmp_path / "none", "--device", "cpu", "--seeds", 1]
    code, measured, err = said(*words, "--measure")
    assert (code, err) == (0, "") and measured.count("measured") == 2, measured
    assert said(*words) == (0, measured, "")
    code, out, err = said(
        "plan", spec, "--device", "cpu", "--seeds", 1, "--sbatch", tmp_path / "jobs.sh", "--json"
    )
    assert code == 0
    assert json.loads(out)
    assert err == f"{tmp_path / 'jobs.sh'}\n"


def test_a_script_is_checked_before_anything_is_tried(refused, spec, tmp_path, monkeypatch):
    monkeypatch.setattr("fedrepro.experiments.plan.plan", lambda *given: 1 / 0)
    for wrong in (["--hours", 0], ["--account", "a b"]):
        refused(["plan", spec, "--sbatch", tmp_path / "jobs.sh", *wrong], wrong[0])


@pytest.mark.parametrize(
    "out, words",
    [("x.xyz", "format of the figure"), ("afile/x.png", "is not a folder"), ("d.png", "a folder")],
)
def test_where_a_file_goes_is_checked_before_anything_is_computed(
    refused, spec, tmp_path, monkeypatch, out, words
):
    "Of a figure its format too; nothing is run, drawn, priced or exported for a file that cannot be written"
    (tmp_path / "afile").write_text("")
    (tmp_path / "d.png").mkdir()
    for what in (
        "experiments.plan.plan",
        "reporting.compare.compute_runs",
        "reporting.figures.draw",
        "reporting.export.export",
    ):
        monkeypatch.setattr(f"fedrepro.{what}", lambda *given, **more: 1 / 0)
    file = tmp_path / out
    refused(["compare", "FedAvg", "--results", tmp_path / "c", "--out", file], str(file), words)
    refused(["figure", spec, "--tier", "smoke", "--out", file], str(file), words)
    assert not (tmp_path / "c").exists()
    if words != "format of the figure":
        refused(["plan", spec, "--sbatch", file], str(file), words)
        refused(
            ["export", spec, "--tier", "smoke", "--out", file, "--to", "parquet"], str(file), words
        )


def test_a_login_node_needs_no_gpu(said, spec, tmp_path, monkeypatch):
    "The jobs get the device that was typed; what is priced here is this processor"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "jobs.sh"
    words = ["plan", spec, "--seeds", 1, "--methods", "FedAvg"]
    code, _, err = said(*words, "--device", "cuda", "--sbatch", script)
    assert code == 0
    assert "their times are those of a CPU" in err
    assert "--gres=gpu:1" in script.read_text()
    assert "--device cuda" in script.read_text()
    code, *_ = said(*words, "--sbatch", script)
    assert code == 0
    assert "--device" not in script.read_text()
    assert "gres" not in script.read_text()
    code, out, _ = said(*words, "--device", "cuda", "--list")
    assert code == 0
    assert "--device cuda" in out
    assert said(*words, "--device", "cuda")[0] == 2


# --- what is refused


@pytest.mark.parametrize(
    "argv, words",
    [
        (["tabel"], ["'tabel'", "run, sweep, table, figure"]),
        (["run"], ["SPEC", "`fedrepro tables` lists them"]),
        (["run", "fedcfa/table2"], ["did you mean 'fedccfa/table2'? `fedrepro tables` lists them"]),
        (["run", "nowhere.toml"], ["nowhere.toml"]),
        (["run", "a" * 5000], ["spec 'aaa", "is unknown"]),
        (["run", "SPEC", "more"], ["more"]),
        (["compare", "FedNova"], ["'FedNova'", "--import FILE.py"]),
        (["compare", "FedAvg", "--dataset", "shapes"], ["'shapes'", "digits", OF_ONES_OWN]),
        (["compare", "FedAvg", "--network", "mine"], ["compare: network", "'mine'", OF_ONES_OWN]),
        (["compare", "FedAvg", "--metric", "macro_f1"], ["'macro_f1'", OF_ONES_OWN]),
        (["compare", "FedAvg", "--partition", "mine"], ["'mine'", OF_ONES_OWN]),
        (["compare", "FedAvg", "--drift", "mine"], ["'mine'", OF_ONES_OWN]),
        (["run", "SPEC", "--set", "cohorts=mine"], ["'mine'", OF_ONES_OWN]),
        (["--import", "a:b.py", "run", "SPEC"], ["'a:b.py'", "':'"]),
        (["notebook", "fedcfa"], ["page 'fedcfa' is unknown", "`fedrepro notebook` lists them"]),
        (["notebook", "fedccfa"], ["14_fedccfa, 01_fedccfa"]),
        (["new-method", "mine.txt"], ["my_method.py"]),
        (["new-method", "none.py"], ["none.py: expected a file such as my_method.py"]),
        (["new-method", "fedavg.py"], ["there is a method FedAvg already"]),
        (["new-method", "random.py"], ["random.py: a module is called 'random' already"]),
        (["new-method", "torch.py"], ["torch.py: a module is called 'torch' already"]),
        (["new-method", "test.py"], ["test.py: a module is called 'test' already"]),
        (["run", "SPEC", "--seed", "3"], ["--seed;", "--seeds"]),
        (["run", "SPEC", "--seeds", "many"], ["--seeds", "'many'", "whole number"]),
        (["run", "SPEC", "--seeds", "9" * 5000], ["--seeds", "from 1 to 1000000"]),
        (["run", "SPEC", "--seeds", "1001"], ["seeds", "1001", "from 1 to 1000"]),
        (
            ["plan", "SPEC", "--list", "--sbatch", "FILE"],
            ["--list and --sbatch", "expected one of them"],
        ),
        (["plan", "SPEC", "--list", "--json"], ["--list and --json", "expected one of them"]),
        (["plan", "SPEC", "--list", "--measure"], ["--list and --measure"]),
        (["plan", "SPEC", "--list", "--device", "tpu"], ["'tpu'", "auto, cpu, cuda"]),
        (["plan", "SPEC", "--account", "ml"], ["--account: expected --sbatch FILE"]),
        (["plan", "SPEC", "--at-once", "3"], ["--at-once: expected --sbatch FILE"]),
        (["plan", "SPEC", "--hours", "2000"], ["--hours: expected --sbatch FILE"]),
        (["run", "SPEC", "--executor", "threads"], ["'threads'", "stacked"]),
        (["run", "SPEC", "--tier", "big"], ["'big'", "paper", "smoke"]),
        (["run", "SPEC", "--methods", "FedAvg,FedFoo"], ["'FedFoo'", "FedAvg", "FedProx"]),
        (["run", "SPEC", "--methods", ""], ["''", "FedAvg"]),
        (
            ["run", "SPEC", "--datasets", "digtis"],
            ["'digtis'", "did you mean 'digits'", "digits, 3 clients"],
        ),
        (["run", "SPEC", "--results", "~nosuch/r"], ["--results", "~nosuch/r", "no such user"]),
        (["run", "SPEC", "--results", ""], ["--results", "''"]),
        (["run", "SPEC", "--results", "x\0y"], ["--results", "is no path"]),
        (["run", "SPEC", "--results", "FILE"], ["file", "--results"]),
        (["table", "SPEC", "--format", "pdf"], ["'pdf'", "csv", "html", "md", "text"]),
        (["table", "SPEC", "--results", "nowhere"], ["'nowhere'"]),
        (["figure", "SPEC"], ["no finished run", "fedrepro run demo/t --tier smoke"]),
        (["data", "minst"], ["'minst'", "MNIST", "CIFAR-10", "digits"]),
    ],
)
def test_refused(refused, spec, argv, words):
    spec.with_name("file").write_text("")
    refused([{"SPEC": spec, "FILE": spec.with_name("file")}.get(a, a) for a in argv], *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(refused, spec):
    refused(["run", spec, "--device", "cuda"], "'cuda'", "accepted: auto, cpu")


@pytest.mark.parametrize(
    "error, code, words",
    [(RuntimeError("broken"), 1, "broken"), (KeyboardInterrupt(), 130, "finished runs are kept")],
)
def test_a_run_that_fails_or_is_interrupted(said, spec, monkeypatch, error, code, words):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(runner, "run_job", broken)
    found, out, err = said("run", spec, "--seeds", 1)
    assert found == code
    assert words in err
    assert "not run" in out if code == 1 else out == ""


def test_our_own_mistakes_are_not_hidden(said, spec, monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr("fedrepro.reporting.printed_tables.table_sheet", broken)
    with pytest.raises(ValueError, match="a bug"):
        said("table", spec)


# --- help


def test_the_advertised_example_shows_the_papers_point(said, tmp_path, monkeypatch):
    "Pays for two runs of 20 rounds: the help's first command with one seed; each accuracy is FedCCFA's by ten points"
    (line,) = [
        line.split("fedrepro ")[1] for line in EXAMPLES.splitlines() if line.startswith("A minute")
    ]
    assert f"fedrepro {line}" in " ".join(said("--help")[1].split())
    assert f"fedrepro {line}" in (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    code, out, err = said(*line.split(), "--seeds", 1, "--quiet")
    assert (code, err) == (0, ""), out
    first, second = out.split("personalised accuracy\n")
    for table in (first.split("generalised accuracy\n")[1], second):
        last = {
            row[0]: float(row[1])
            for row in map(str.split, table.splitlines())
            if row and row[0] in ("FedAvg", "FedCCFA")
        }
        assert last["FedCCFA"] > last["FedAvg"] + 10, last
    assert Path(out.splitlines()[-1]).stat().st_size > 5000


def test_help_and_version(said):
    assert said("--version") == (0, fedrepro.__version__ + "\n", "")
    assert said("-h")[0] == 0
    out = said("run", "--help")[1]
    for option in "tier methods datasets seeds device data results workers executor quiet".split():
        assert f"--{option}" in out
    out = said("--help")[1]
    assert said() == (0, out, ""), "without a command: the help"
    groups = {
        "Start here": ["compare", "data"],
        "Reproduce": ["run", "sweep", "table", "figure"],
        "Your own": ["new-method", "export"],
        "Look up": ["methods", "datasets", "tables", "scoreboard", "claims"],
    }
    at = [out.index(title) for title in groups]
    assert at == sorted(at)
    assert "Commands" not in out
    assert "--install-completion" in out
    assert "fedrepro compare FedAvg FedCCFA" in out
    assert "fedrepro run fedccfa/table2" in out
    for title, end, names in zip(groups, [*at[1:], len(out)], groups.values()):
        for name in names:
            assert f" {name} " in out[out.index(title) : end], (title, name)


COMPLETED = [  # what a shell would offer for the last word, some of it
    ("fedrepro comp", {"compare"}),
    ("fedrepro run fedccfa/table1", {"fedccfa/table1", "fedccfa/table10"}),
    ("fedrepro compare FedA", {"FedAvg", "FedADC"}),
    ("fedrepro compare FedAvg --drift s", {"sudden"}),
    ("fedrepro compare FedAvg --dataset dig", {"digits"}),
    ("fedrepro data Fash", {"Fashion-MNIST"}),
    ("fedrepro table x --tier s", {"smoke", "small"}),
]


def test_names_are_completed_and_help_is_shown_without_torch():
    code = (
        "import os, sys; from fedrepro.cli.main import main\nfor line in sys.argv[1:]:\n"
        "    os.environ |= {'_FEDREPRO_COMPLETE': 'complete_bash', 'COMP_WORDS': line, 'COMP_CWORD': str(line.count(' '))}\n"
        "    print('#', flush=True); assert main([]) == 0\ndel os.environ['_FEDREPRO_COMPLETE']; main(['--help'])\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *(line for line, _ in COMPLETED)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for (line, some), offered in zip(COMPLETED, done.stdout.split("#\n")[1:]):
        assert some <= set(offered.split("\n")), (line, offered)


def test_a_row_of_equal_runs_is_not_added_to_the_rows_asked_for(said, write, tmp_path):
    "A row that shows another's runs stands in the table of all rows, and where it was asked for itself"
    twins = RAW["methods"] | {"Twin": RAW["methods"]["FedAvg"] | {"class": "FedAvg"}}
    spec = write(RAW | dict(methods=twins))
    words = ["run", spec, "--results", tmp_path / "r", "--seeds", 1, "--quiet", "--methods"]

    def rows(asked):
        code, out, _ = said(*words, asked)
        assert code == 0
        return [line.split()[0] for line in out.splitlines() if line[:4] in ("FedA", "Twin")]

    assert rows("FedAvg") == ["FedAvg"]
    assert rows("Twin") == ["Twin"]
    assert rows("FedAvg,Twin") == ["FedAvg", "Twin"]


def test_a_list_of_commands_is_the_whole_table(said, refused, write, spec, tmp_path):
    "One line a job for any engine; each computes its runs alone, and prints no table"
    again = write(RAW, "again")
    other = write(RAW | dict(tiers={"own": RAW["tiers"]["smoke"]}), "other")
    code, out, _ = said("plan", spec, again, other, "--list", "--results", tmp_path / "r")
    lines = [shlex.split(line) for line in out.splitlines()]
    tiers = [(line[2], line[line.index("--tier") + 1]) for line in lines]
    assert code == 0 and tiers == [(str(spec), "smoke")] * 4 + [(str(other), "own")] * 4, (
        "runs that tables share: once"
    )
    code, out, _ = said("plan", spec, "--list", "--results", tmp_path / "r")
    lines = [shlex.split(line) for line in out.splitlines()]
    assert code == 0
    assert len(lines) == 4
    assert all(line[:2] == ["fedrepro", "run"] for line in lines)
    assert said(*lines[0][1:]) == (0, "", "")
    assert len(list((tmp_path / "r").rglob("*.jsonl"))) == 1
    code, out, _ = said("plan", spec, "--list", "--results", tmp_path / "r")
    assert [shlex.split(line) for line in out.splitlines()] == lines[1:]
    refused(
        ["run", spec, "--runs", "0123", "--results", tmp_path / "r"],
        "--runs: at tier smoke, run '0123' is unknown",
    )


@pytest.mark.parametrize(
    "key, command",
    [
        ("metric", "table"),
        ("beside", "figure"),
        ("dataset", "run"),
        ("network", "table"),
        ("partition", "figure"),
        ("cohorts", "plan"),
        ("drift", "export"),
        ("measures", "table"),
        ("recipe", "table"),
    ],
)
def test_a_name_that_a_file_may_bring_is_answered_with_how(said, tmp_path, key, command):
    "After a good run with --import, a table without it says what is missing"
    value = ["mine"] if key in ("beside", "measures") else "mine"
    top = key in ("metric", "beside")
    changed = {key: value} if top else {"base": SMALL["base"] | {key: value}}
    code, out, err = said(command, written(tmp_path, SMALL | changed, "toy/t"))
    assert (code, out) == (2, "")
    assert "'mine' is unknown" in err
    assert err.rstrip().endswith(OF_ONES_OWN)
    assert "\n" not in err.rstrip()
