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
from fedrepro.cli.main import main

SPEC = '''
title = "A small one"
paper = "FedCCFA"
table = "2"
kind = "table"
metric = "generalised_accuracy"
statistic = "last"
published = "t.published.csv"
[base]
source = "guess: a test"
rounds = 2
seeds = [0, 1]
partition = "iid"
recipe = "plain"
network = "digits_cnn"
clients = 3
epochs = 1
batch_size = 64
[[columns]]
dataset = "digits"
source = "guess: a test"
published = {clients = 20}
[methods.FedAvg]
[methods.FedProx]
mu = {value = 0.1, source = "guess: a test"}
[tiers.smoke.base]
rounds = {value = 1, source = "tier: reduced"}
'''
CSV = "method,clients,mean,std\nFedAvg,20,67.81,1.12\nIFCA,20,87.02,0.06\n"

@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "papers/demo/t.toml"
    path.parent.mkdir(parents=True)
    path.write_text(SPEC)
    (path.parent / "t.published.csv").write_text(CSV)
    return path

@pytest.fixture
def said(capsys):
    def said(*argv):
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err
    return said

def refused(answer, *words):
    "One line on stderr that has all the words, nothing on stdout, exit code 2"
    code, out, err = answer
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith("fedrepro: "), answer
    for word in words: assert word in err, (word, err)

def test_lists(said, spec):
    code, out, err = said("methods", "--json")
    methods = {m["name"]: m for m in json.loads(out)}
    assert code == 0 and err == "" and {"FedAvg", "FedProx", "FedRep", "FedCCFA"} <= set(methods)
    assert methods["FedProx"]["hooks"] == ["loss"] and methods["FedProx"]["fields"]["mu"] == .01
    assert methods["FedRep"]["personal"] and not methods["FedAvg"]["personal"]
    assert len(methods) >= 32 and methods["SCAFFOLD"]["state"] == {"server": ["params", "c", "clients"], "client": ["c"]}
    assert methods["SCAFFOLD"]["communication"]["upload"] == {"params": "model", "change": "trained"} and "FedAvg" in methods["FedProx"]["limit"]
    code, out, _ = said("datasets", "--json")
    assert {d["name"]: d["present"] for d in json.loads(out)}["digits"] is True
    code, out, _ = said("tables", "--json")
    table, *ours = json.loads(out)
    assert "fedccfa/table2" in [t["name"] for t in ours], "the package's tables stay beside one's own"
    assert table["name"] == "demo/t" and table["tiers"]["smoke"] == {"finished": 0, "runs": 4}
    for command, word in [("methods", "FedCCFA"), ("datasets", "Fashion-MNIST"), ("tables", "smoke 0/4")]:
        code, out, _ = said(command)
        assert code == 0 and word in out

def test_some_columns_alone(said, spec, monkeypatch):
    from fedrepro.experiments import runner
    asked = []
    def note(cells, *_, **__):
        asked.append([c.column for c in cells])
        return runner.SweepReport()
    monkeypatch.setattr(runner, "compute_runs", note)
    more = '[[columns]]\nlabel = "again, with 5"\ndataset = "digits"\nclients = 5\nsource = "guess: a test"\n[methods.FedAvg]'
    two = spec.with_name("two.toml")
    two.write_text(spec.read_text().replace("[methods.FedAvg]", more))
    for given, columns in [("digits", {"digits, 3 clients", "again, with 5"}), ("again, with 5", {"again, with 5"}),
                           ("digits, 3 clients , again, with 5", {"digits, 3 clients", "again, with 5"})]:
        asked.clear()
        assert said("run", two, "--datasets", given, "--quiet")[0] == 0 and set(asked[0]) == columns
    asked.clear()
    assert said("run", spec, two, "--datasets", "again, with 5", "--quiet")[0] == 0
    assert set(sum(asked, [])) == {"again, with 5"}, "a column that only one of the tables has"

def test_home_folders_are_known(said, spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert said("run", spec, "--seeds", 1, "--methods", "FedAvg", "--results", "~/there", "--quiet")[0] == 0
    assert len(list((tmp_path / "home/there/smoke").glob("*.jsonl"))) == 1 and not (tmp_path / "~").exists()

def test_two_specs_share_runs(said, spec):
    other = spec.with_name("u.toml")
    other.write_text(spec.read_text().replace("A small one", "Another one").replace("rounds = 2", 'rounds = 2\ndrift = "sudden"\ndrift_round = 0'))
    code, out, err = said("run", spec, other, "--seeds", 1, "--workers", 1, "--methods", "FedAvg", "--device", "cpu")
    assert code == 0 and "A small one" in out and "Another one" in out and "2 computed" in err
    refused(said("run", spec, other, "--methods", "FedAvg,FedAvgg"), "'FedAvgg'", "FedAvg")
    code, out, err = said("run", spec, spec, "--seeds", 1, "--workers", 1, "--methods", "FedAvg", "--executor", "stacked")
    assert code == 0 and out.count("A small one") == 1 and "0 computed, 1 were there" in err
    refused(said("run", spec, "--executor", "threads"), "'threads'", "stacked")

OWN = '''
from dataclasses import dataclass
from fedrepro.engine.method import FedAvg
@dataclass
class Halfway(FedAvg):
    "Goes half of FedAvg's way"
    def aggregate(self, server, exchange):
        mean = super().aggregate(server, exchange)["params"]
        return server | {"params": {n: (t + mean[n]) / 2 for n, t in server["params"].items()}}
'''

@pytest.mark.parametrize("more", [["--workers", "2"], ["--workers", "2", "--executor", "processes", "--seeds", "1"]])
def test_a_method_in_a_file_of_ones_own(spec, more):
    own = spec.with_name("halfway_method.py")
    own.write_text(OWN)
    spec.write_text(spec.read_text().replace("[methods.FedAvg]", "[methods.FedAvg]\n[methods.Halfway]"))
    refused((p := fresh("run", spec)).args and (p.returncode, p.stdout, p.stderr), "'Halfway'")
    done = fresh("--import", own, "run", spec, "--device", "cpu", "--methods", "Halfway", *more)
    assert done.returncode == 0 and "0 were there" in done.stderr and "Halfway" in done.stdout, done.stderr
    listed = json.loads(fresh("--import", own, "methods", "--json").stdout)
    assert "Halfway" in [m["name"] for m in listed]
    for name, text in [("gone.py", None), ("wrong.py", "1 / 0"), ("json.py", "x = 1")]:
        if text: spec.with_name(name).write_text(text)
        p = fresh("--import", spec.with_name(name), "methods")
        refused((p.returncode, p.stdout, p.stderr), name)

def test_data_option_says_where(said, tmp_path, monkeypatch):
    for argv in (["--data", tmp_path], []):
        if not argv: monkeypatch.setenv("FEDREPRO_DATA", str(tmp_path))
        mnist = next(d for d in json.loads(said("datasets", "--json", *argv)[1]) if d["name"] == "MNIST")
        assert not mnist["present"] and Path(mnist["folder"]).is_relative_to(tmp_path)

def test_run_table_figure(said, spec, tmp_path):
    code, out, err = said("run", spec, "--tier", "smoke", "--seeds", 1, "--methods", "FedAvg", "--quiet")
    assert code == 0 and err == "" and "not comparable" in out and "IFCA" in out
    files = list((spec.parent / "results/smoke").iterdir())
    assert len(files) == 1
    before = files[0].read_bytes()
    code, again, err = said("run", "demo/t", "--tier", "smoke", "--device", "cpu")  # the first is kept
    assert code == 0 and "3 computed, 1 were there" in err and files[0].read_bytes() == before
    assert len(list(files[0].parent.iterdir())) == 4
    for kind, word in [("text", "± "), ("md", "| FedAvg |"), ("csv", "published_mean"), ("html", "<table")]:
        code, out, err = said("table", spec, "--tier", "smoke", "--format", kind)
        assert code == 0 and err == "" and word in out
    assert said("table", spec, "--tier", "smoke")[1] == again
    code, out, err = said("figure", spec, "--tier", "smoke")
    assert code == 0 and out.strip() == str(Path("out/demo_t_smoke.png")) and Path(out.strip()).stat().st_size > 5000
    code, out, err = said("figure", spec, "--tier", "smoke", "--out", tmp_path / "x/y.pdf")
    assert code == 0 and (tmp_path / "x/y.pdf").exists()
    assert json.loads(said("tables", "--json")[1])[0]["tiers"]["smoke"]["finished"] == 4

def test_results_option(said, spec, tmp_path):
    there = tmp_path / "elsewhere"
    assert said("run", spec, "--seeds", 1, "--methods", "FedAvg", "--results", there, "--quiet")[0] == 0
    assert len(list(there.glob("smoke/*.jsonl"))) == 1 and not (spec.parent / "results").exists()
    assert "(1)" in said("table", spec, "--results", there)[1] and "(1)" not in said("table", spec)[1]

def test_data_command(said):
    code, out, err = said("data", "digits")
    assert code == 0 and Path(out.strip()).is_dir()

def test_help_and_version(said):
    assert said("--version") == (0, fedrepro.__version__ + "\n", "")
    for argv in (["--help"], ["-h"], ["run", "--help"]): assert said(*argv)[0] == 0
    out = said("run", "--help")[1]
    for option in "tier methods datasets seeds device data results workers executor quiet".split(): assert f"--{option}" in out

@pytest.mark.parametrize("argv, words", [
    (["tabel"], ["'tabel'", "run, sweep, table, figure"]),
    (["run"], ["SPEC"]),
    (["run", "SPEC", "--seed", "3"], ["--seed;", "--seeds"]),
    (["run", "SPEC", "--seeds", "many"], ["--seeds", "'many'", "whole number"]),
    (["run", "SPEC", "--seeds", "0"], ["--seeds", "'0'", "at least 1"]),
    (["run", "SPEC", "--workers", "-1"], ["--workers", "'-1'", "at least 1"]),
    (["run", "SPEC", "--methods", "FedAvg,FedFoo"], ["'FedFoo'", "FedAvg", "FedProx"]),
    (["run", "SPEC", "--methods", ""], ["''", "FedAvg", "FedProx"]),
    (["run", "SPEC", "--datasets", "digtis"], ["'digtis'", "did you mean 'digits'", "digits, 3 clients"]),
    (["run", "SPEC", "--datasets", ""], ["''", "digits"]),
    (["run", "SPEC", "--results", "~nosuch/r"], ["--results", "~nosuch/r", "no such user"]),
    (["run", "SPEC", "--data", "~nosuch"], ["--data", "~nosuch", "no such user"]),
    (["figure", "SPEC", "--out", "~nosuch/a.png"], ["--out", "~nosuch", "no such user"]),
    (["run", "SPEC", "--results", ""], ["--results", "''"]),
    (["run", "SPEC", "--results", "x\0y"], ["--results", "is no path"]),
    (["run", "a" * 5000], ["spec 'aaa", "is unknown"]),
    (["run", "SPEC", "--seeds", "9" * 5000], ["--seeds", "at most 1000000"]),
    (["run", "SPEC", "--seeds", "1001"], ["seeds", "1001", "[1, 1000]"]),
    (["--import", "a:b.py", "run", "SPEC"], ["'a:b.py'", "':'"]),
    (["run", "SPEC", "--tier", "big"], ["'big'", "paper", "smoke"]),
    (["run", "SPEC", "--device", "gpu"], ["'gpu'", "auto", "cpu", "cuda"]),
    (["run", "nowhere.toml"], ["nowhere.toml"]),
    (["run", "SPEC", "more"], ["more"]),
    (["table", "SPEC", "--tier", "big"], ["'big'", "paper", "smoke"]),
    (["table", "SPEC", "--format", "pdf"], ["'pdf'", "csv", "html", "md", "text"]),
    (["table", "nowhere.toml"], ["nowhere.toml"]),
    (["table", "SPEC", "--results", "nowhere"], ["'nowhere'"]),
    (["figure", "SPEC"], ["no finished run", "fedrepro run demo/t --tier smoke"]),
    (["figure", "SPEC", "--results", "nowhere"], ["'nowhere'"]),
    (["data", "minst"], ["'minst'", "MNIST", "CIFAR-10", "digits"]),
    (["methods", "--jsn"], ["--jsn", "--json"])])
def test_refused(said, spec, argv, words):
    refused(said(*(str(spec) if a == "SPEC" else a for a in argv)), *words)

@pytest.mark.parametrize("old, new, words", [
    ("rounds = 2", "rounds = 2\nronds = 3", ["ronds", "rounds"]),
    ("rounds = 2", 'rounds = "two"', ["rounds", "'two'", "integer"]),
    ("rounds = 2", "rounds = 0", ["rounds", "0"]),
    ("rounds = 2", "rounds = 2.5", ["rounds", "2.5"]),
    ('title = "A small one"', "title = [", ["TOML"]),
    ('title = "A small one"', 'titel = "A"', ["titel", "title"]),
    ("[methods.FedAvg]", "[methods.FedAvgg]", ["'FedAvgg'", "FedAvg"]),
    ("mu = {", "mew = {", ["mew", "mu"]),
    ("mu = {value = 0.1", "mu = {value = true", ["mu", "True", "number"]),
    ('dataset = "digits"', 'dataset = "CIFAR"', ["'CIFAR'", "CIFAR-10"]),
    ('network = "digits_cnn"', 'network = "vgg"', ["'vgg'", "digits_cnn"]),
    ('partition = "iid"', 'partition = "idd"', ["'idd'", "iid"]),
    ('published = "t.published.csv"', 'published = "t.csv"', ["t.csv"])])
def test_wrong_spec(said, spec, old, new, words):
    assert SPEC.count(old) == 1
    spec.write_text(SPEC.replace(old, new))
    refused(said("run", spec), *words, "t.toml")

def test_missing_and_damaged_data(said, spec, tmp_path):
    spec.write_text(SPEC.replace('"digits"', '"MNIST"').replace('"digits_cnn"', '"fedccfa_fmnist"'))
    refused(said("run", spec, "--data", tmp_path / "empty"), "MNIST", str(tmp_path / "empty"), "--data")
    folder = tmp_path / "bad/MNIST/raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"): (folder / f"{part}-{kind}-ubyte").write_bytes(b"no")
    refused(said("run", spec, "--data", tmp_path / "bad"), "damaged", "MNIST/raw")

def test_unwritable_results(said, spec, tmp_path):
    (tmp_path / "file").write_text("")
    refused(said("run", spec, "--results", tmp_path / "file"), str(tmp_path / "file"), "--results")
    refused(said("table", spec, "--results", tmp_path / "file"), str(tmp_path / "file"))

def test_damaged_results_are_set_aside(said, spec):
    said("run", spec, "--seeds", 1, "--methods", "FedAvg", "--quiet")
    file, = (spec.parent / "results/smoke").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    code, out, err = said("table", spec)
    assert code == 0 and "not run" in out and "set aside" in err and not file.exists()

def test_wrong_figure_file(said, spec, tmp_path):
    said("run", spec, "--seeds", 1, "--methods", "FedAvg", "--quiet")
    refused(said("figure", spec, "--out", tmp_path / "a.doc"), "'doc'", "png")
    (tmp_path / "file").write_text("")
    refused(said("figure", spec, "--out", tmp_path / "file/a.png"), str(tmp_path / "file"))

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(said, spec):
    refused(said("run", spec, "--device", "cuda"), "'cuda'", "accepted: auto, cpu")

def test_a_failed_run_is_exit_1(said, spec, monkeypatch):
    from fedrepro.experiments import runner
    def broken(*_, **__): raise RuntimeError("broken")
    monkeypatch.setattr(runner, "run_job", broken)
    code, out, err = said("run", spec, "--seeds", 1, "--workers", 1)
    assert code == 1 and "broken" in err and "not run" in out

def test_interrupted_is_130(said, spec, monkeypatch):
    from fedrepro.experiments import runner
    def stop(*_, **__): raise KeyboardInterrupt
    monkeypatch.setattr(runner, "run_job", stop)
    code, out, err = said("run", spec, "--workers", 1)
    assert code == 130 and out == "" and "finished runs are kept" in err

def test_our_own_mistakes_are_not_hidden(spec, monkeypatch):
    from fedrepro.verdicts import tables
    def broken(*_): raise ValueError("a bug")
    monkeypatch.setattr(tables, "render", broken)
    with pytest.raises(ValueError, match="a bug"): main(["table", str(spec)])

def fresh(*argv, **kw):
    env = os.environ | {"PYTHONPATH": str(Path(fedrepro.__file__).parents[1])}
    command = [sys.executable, "-m", "fedrepro", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **kw)

def test_process(spec):
    done = fresh("run", spec, "--seeds", "2", "--methods", "FedAvg", "--workers", "2", "--device", "cpu")
    assert done.returncode == 0 and "2 computed" in done.stderr and "FedAvg" in done.stdout
    bad = fresh("tabel")
    assert (bad.returncode, bad.stdout) == (2, "") and len(bad.stderr.splitlines()) == 1

def test_help_has_groups_in_order(said):
    out = said("--help")[1]
    groups = {"Start here": ["compare", "data"], "Reproduce": ["run", "sweep", "table", "figure"], "Your own": ["export", "log"],
              "Look up": ["methods", "datasets", "tables", "scoreboard", "claims"]}
    at = [out.index(title) for title in groups]
    assert at == sorted(at) and "Commands" not in out and "fedrepro compare FedAvg FedCCFA" in out and "fedrepro run fedccfa/table2" in out
    for title, end, names in zip(groups, [*at[1:], len(out)], groups.values()):
        part = out[out.index(title):end]
        for name in names: assert f" {name} " in part, (title, name)

def completed(*words):
    "What a shell would offer for the last of the words, and the modules that were loaded for it"
    code = ("import sys; from fedrepro.cli.main import main; code = main(); "
            "print('torch' in sys.modules, 'pandas' in sys.modules, file=sys.stderr); sys.exit(code)")
    env = os.environ | {"_FEDREPRO_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr

@pytest.mark.parametrize("words, some", [
    (["fedrepro", "comp"], {"compare"}), (["fedrepro", "run", "fedccfa/table1"], {"fedccfa/table1", "fedccfa/table10"}),
    (["fedrepro", "run", "x", "--methods", "FedAvg,FedCC"], {"FedAvg,FedCCFA"}), (["fedrepro", "compare", "FedA"], {"FedAvg", "FedADC"}),
    (["fedrepro", "compare", "FedAvg", "--dataset", "dig"], {"digits"}), (["fedrepro", "data", "Fash"], {"Fashion-MNIST"}),
    (["fedrepro", "table", "x", "--tier", "s"], {"smoke", "small"}), (["fedrepro", "export", "x", "--to", "l"], {"latex"})])
def test_names_are_completed_without_torch(words, some):
    code, names, err = completed(*words)
    assert code == 0 and some <= set(names) and err == "False False\n", (names, err)

def test_completion_can_be_shown(said, monkeypatch):
    from typer import completion
    monkeypatch.setattr(completion, "_get_shell_name", lambda: "bash")
    code, out, err = said("--show-completion")
    assert (code, err) == (0, "") and "_FEDREPRO_COMPLETE=complete_bash" in out
    assert "--install-completion" in said("--help")[1]

def test_help_needs_no_torch():
    code = ("import sys; from fedrepro.cli.main import main; main(['--help']); "
            "assert not {'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_list_of_commands_is_the_whole_table(said, spec, tmp_path):
    "One line a job for any engine; each computes its runs alone, and prints no table"
    code, out, _ = said("plan", spec, "--list", "--results", tmp_path / "r")
    lines = [shlex.split(line) for line in out.splitlines()]
    assert code == 0 and len(lines) == 4 and all(line[:2] == ["fedrepro", "run"] for line in lines)
    assert said(*lines[0][1:]) == (0, "", "") and len(list((tmp_path / "r").rglob("*.jsonl"))) == 1
    code, out, _ = said("plan", spec, "--list", "--results", tmp_path / "r")
    assert [shlex.split(line) for line in out.splitlines()] == lines[1:]
    refused(said("run", spec, "--runs", "0123", "--results", tmp_path / "r"), "--runs: at tier smoke, run '0123' is unknown")
