"Files of one's own: executed before any name is looked up, whatever they raise, and files that are no files"

import os
import subprocess
import sys

import pytest
import torch

from fedrepro.engine.checkpoints import CheckpointWriter, load_message, save_message
from fedrepro.experiments import store
from fedrepro.experiments.leases import lease_of
from fedrepro.experiments.specs import load_spec
from toy import ROOT, SMALL, one_line, written

DATA = """import torch
from fedrepro.data import datasets
from fedrepro.models.architectures import architecture
from fedrepro.models.net import Network
def parts():
    x, y = torch.arange(120 * 36, dtype=torch.uint8).reshape(120, 1, 6, 6), torch.arange(120) % 3
    return dict(train_x=x, train_y=y, test_x=x[:30], test_y=y[:30], class_names=("a", "b", "c"))
datasets.add_data_set("stripes", parts, (.5,), (.3,))
@architecture(1, 6, 6)
def stripes_net(classes, shape):
    return Network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4)), torch.nn.Linear(4, classes))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    "Writes a file of one's own under a module name that no other test has; what it registers is forgotten"
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(text, name=""):
        path = tmp_path / f"{name}{tmp_path.name}.py".replace("-", "_")
        path.write_text(text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_every_command_knows_what_an_imported_file_brings(said, own, tmp_path):
    "Pays for two comparisons of two rounds"
    file = own(DATA)
    stripes = SMALL | dict(base=SMALL["base"] | dict(dataset="stripes", network="stripes_net"))
    spec = written(tmp_path / "papers", stripes, "demo/t")
    little = "--clients 3 --rounds 1 --seeds 1 --quiet".split()
    for command in (
        ["datasets"],
        ["data", "stripes"],
        ["plan", spec, "--tier", "smoke", "--device", "cpu"],
        ["table", spec],
        ["compare", "FedAvg", "--dataset", "stripes", *little],
        ["compare", "FedAvg", "--dataset", "stripes", "--network", "stripes_net", *little],
    ):
        os.environ["FEDREPRO_METHODS"] = ""
        code, out, err = said(*command, "--import", file.name)
        others = [row for row in err.splitlines() if not row.startswith("fedrepro: rough times")]
        assert (code, others) == (0, []), (command, err)
        assert command[0] != "datasets" or "stripes" in out


# --- what a person's code raises

METHODS = """import os, sys, threading, time
from dataclasses import dataclass
from fedrepro.core.errors import InputError
from fedrepro.engine.method import FedAvg
@dataclass
class Plain(FedAvg): "As FedAvg"
"""


def raising(hook: str, line: str, rest: str = "self, *args") -> str:
    "A file of a method called Broken whose `hook` executes `line`, the last of the file but one"
    return (
        METHODS
        + f"@dataclass\nclass Broken(FedAvg):\n    'Broken'\n    def {hook}({rest}):\n        {line}\n        return super().{hook}(*args)\n"
    )


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    "hook, line, words",
    [
        ("init_server", "raise OSError(2, 'No such file', 'weights.pt')", "FileNotFoundError"),
        ("init_server", "sys.exit(3)", "SystemExit: 3"),
        ("loss", "open('/nowhere/at/all')", "FileNotFoundError"),
        ("aggregate", "raise InputError('mine')", "mine"),
        ("local_phases", "{}['a key']", "KeyError: 'a key'"),
        ("eval_params", "1 / 0", "ZeroDivisionError"),
    ],
)
def test_one_run_fails_and_the_others_go_on(said, own, tmp_path, hook, line, words):
    "Pays for three runs of one round"
    text = raising(hook, line)
    spec = written(
        tmp_path / "papers", SMALL | dict(methods={"Broken": {}, "FedAvg": {}}), "demo/t"
    )
    file = own(text)
    code, out, err = said("run", spec, "--import", file, "--seeds", 1, "--workers", 1)
    failures = [
        row for row in err.splitlines() if " failed: " in row and row.startswith("fedrepro: Broken")
    ]
    assert code == 1 and len(failures) == 1 and words in failures[0] and "FedAvg" in out, err
    where = f"({file.name}:{text.splitlines().index(f'        {line}') + 1})"
    assert words == "mine" or where in failures[0], failures
    assert "Traceback" not in err
    assert [p.name.split("-")[0] for p in tmp_path.rglob("*.jsonl")] == ["FedAvg"]


@pytest.mark.parametrize(
    "hook, body, words",
    [
        ("reply(self, server, exchange)", "return [{}]", "Broken.reply returned [{}]; expected"),
        (
            "eval_params(self, message, state)",
            "return {n: t for n, t in message['params'].items() if n != 'head.bias'}",
            "Broken.eval_params: 'head.bias' is missing",
        ),
        (
            "local_phases(self, client)",
            "return [self.phase(client, batch_size=-5)]",
            "batch_size: expected a whole number of at least 0, got -5",
        ),
    ],
)
def test_what_a_hook_returns_is_refused_before_the_first_round_of_any_run(
    refused, own, tmp_path, hook, body, words
):
    "FedAvg's run, which comes first, is not computed either"
    file = own(f"{METHODS}@dataclass\nclass Broken(FedAvg):\n    def {hook}:\n        {body}\n")
    spec = written(
        tmp_path / "papers", SMALL | dict(methods={"FedAvg": {}, "Broken": {}}), "demo/t"
    )
    refused(["run", spec, "--import", file, "--seeds", 1, "--workers", 1], words)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_plan_goes_on_after_a_method_that_raises(said, own, tmp_path):
    "One line for each cell of the table that fails; the table is printed, and the exit code says that something is wrong"
    file = own(raising("init_server", "1 / 0"))
    spec = written(
        tmp_path / "papers", SMALL | dict(methods={"Broken": {}, "FedAvg": {}}), "demo/t"
    )
    line = ["plan", spec, "--import", file, "--tier", "smoke", "--device", "cpu"]
    for more in (["--measure"], ["--measure", "--json"], ["--sbatch", tmp_path / "jobs.sh"]):
        code, out, err = said(*line, *more)
        failing = [row for row in err.splitlines() if " fails: " in row]
        assert code == 1 and "demo/t" in out and len(failing) == 1, err
        assert failing[0].startswith("fedrepro: Broken on digits")
        assert f"ZeroDivisionError: division by zero ({file.name}:11)" in failing[0]
    assert (tmp_path / "jobs.sh").exists()


@pytest.mark.parametrize(
    "line, words",
    [
        ("raise KeyError('beta')", "Broken cannot be made: KeyError: 'beta'"),
        ("raise ValueError('beta')", "Broken refuses its values: beta"),
        ("open('/nowhere/at/all')", "Broken cannot be made: FileNotFoundError"),
        ("sys.exit()", "Broken cannot be made: SystemExit"),
    ],
)
def test_a_method_that_cannot_be_made_is_refused_with_its_line(refused, own, tmp_path, line, words):
    file = own(
        f"{METHODS}@dataclass\nclass Broken(FedAvg):\n    def __post_init__(self):\n        {line}\n"
    )
    spec = written(tmp_path / "papers", SMALL | dict(methods={"Broken": {}}), "demo/t")
    refused(["run", spec, "--import", file], words, f"({file.name}:10)")


@pytest.mark.parametrize(
    "body, words",
    [
        (
            "def parts(): raise OSError(5, 'Input/output error')",
            "OSError: [Errno 5] Input/output error",
        ),
        ("def parts(): return dict(train_x=open('/nowhere/x.npy'))", "FileNotFoundError"),
        ("def parts(): sys.exit()", "SystemExit"),
    ],
)
def test_a_reader_that_raises_is_not_the_disk(said, own, tmp_path, body, words):
    "A data set of one's own in one column: the other column is computed; a plan and a comparison end in one line"
    file = own(
        f"import sys\nfrom fedrepro.data import datasets\n{body}\n"
        "datasets.add_data_set('mine', parts, (0.,), (1.,))\n"
    )
    columns = [{}, dict(label="mine", dataset="mine", source="guess: toy")]
    spec = written(
        tmp_path / "papers", SMALL | dict(columns=columns, methods={"FedAvg": {}}), "demo/t"
    )
    code, out, err = said("run", spec, "--import", file, "--seeds", 1, "--workers", 1)
    assert code == 1
    assert words in err
    assert f"{file.name}:3" in err
    assert "output:" not in err
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1
    for command in (["compare", "FedAvg", "--dataset", "mine"], ["plan", spec, "--device", "cpu"]):
        code, out, err = said(*command)
        others = [row for row in err.splitlines() if not row.startswith("fedrepro: rough times")]
        assert code == 1 and len(others) == 1, err
        assert words in err or "ended the program" in err


def test_runs_of_one_job_fail_alone(said, own, tmp_path):
    "Runs that differ in their drift are one job: only the one whose drift the method cannot do fails"
    text = raising("init_client", "1 / 0 if 'sudden' in str(args[0].drift) else None")
    columns = [
        dict(label="none", drift="none", source="guess: toy"),
        dict(label="sudden", drift="sudden", drift_round=1, source="guess: toy"),
    ]
    spec = written(
        tmp_path / "papers",
        SMALL | dict(columns=columns, methods={"Broken": {}}, tiers={"own": {}}),
        "demo/t",
    )
    code, out, err = said("run", spec, "--import", own(text), "--seeds", 1, "--workers", 1)
    assert code == 1 and "Broken on sudden" in err and "1 computed" in err and "1 failed" in err, (
        err
    )


def test_the_message_of_an_error_is_one_line(own):
    from fedrepro.core.errors import InputError, brief

    assert "\n" not in brief(ValueError("a\nb " * 400))
    assert len(brief(ValueError("a\nb " * 400))) < 600
    assert brief(Unprintable()) == "Unprintable: a message that cannot be printed"
    assert brief(InputError("x")) == "x"


def test_a_file_that_cannot_be_imported_names_its_line(refused, own):
    file = own("import os\n\nos.listdir('/nowhere/at/all')\n")
    refused(["methods", "--import", file], "FileNotFoundError", f"({file.name}:3)")


# --- a method that moves, and one that leaves a thread


def test_a_method_that_changes_the_working_folder_moves_nothing(said, own, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file = own(
        raising("aggregate", "os.chdir('elsewhere') if os.path.isdir('elsewhere') else None")
    )
    written(tmp_path / "papers", SMALL | dict(methods={"Broken": {}}), "demo/t")
    code, out, err = said(
        "run",
        "papers/demo/t.toml",
        "--import",
        file.name,
        "--results",
        "r",
        "--quiet",
        "--checkpoint",
        1,
    )
    assert (code, err) == (0, "")
    assert "Broken" in out
    assert "2)" in out
    assert os.getcwd() == str(tmp_path)
    assert [p.parent.name for p in tmp_path.rglob("*.jsonl")] == ["smoke"] * 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_thread_that_a_method_leaves_does_not_keep_the_command(own, tmp_path):
    "Pays for one command in a process of its own"
    file = own(
        raising(
            "init_server",
            "threading.Thread(target=lambda: [time.sleep(.1) for _ in range(10_000)]).start()",
        )
    )
    spec = written(tmp_path / "papers", SMALL | dict(methods={"Broken": {}}), "demo/t")
    line = [
        sys.executable,
        "-m",
        "fedrepro",
        "run",
        spec,
        "--import",
        file,
        "--seeds",
        "1",
        "--workers",
        "1",
        "--quiet",
    ]
    done = subprocess.run(
        list(map(str, line)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (
        done.returncode == 0
        and "Broken" in done.stdout
        and len(list(tmp_path.rglob("*.jsonl"))) == 1
    ), done.stderr


# --- what is no file


def odd_files(path):
    "Makes, one after the other, what is no regular file at `path`, or a huge one"

    def huge(p):
        with open(p, "wb") as file:
            file.truncate(2**42)

    for make in (os.mkfifo, lambda p: os.symlink("/dev/zero", p), os.mkdir, huge):
        make(path)
        yield path
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def test_odd_leases_and_checkpoints_stop_nothing(said, own, tmp_path):
    spec = written(tmp_path / "papers", SMALL | dict(methods={"FedAvg": {}}), "demo/t")
    (run,) = load_spec(spec).runs("smoke", seeds=1)
    result = store.run_path(tmp_path / "r", run)
    result.parent.mkdir(parents=True)
    for path in odd_files(lease_of(result)):
        code, out, err = said(
            "run", spec, "--seeds", 1, "--results", tmp_path / "r", "--workers", 1, "--no-wait"
        )
        assert code in (0, 1) and len(err.splitlines()) < 5, err
        assert path.is_dir() or result.exists() or "in the hands of others" in err, err
        result.unlink(missing_ok=True)
    kept = result.parent / "checkpoints"
    name = CheckpointWriter(kept, [run.run_id], {}).name
    for suffix in ("json", "safetensors"):
        kept.mkdir(exist_ok=True)
        for _ in odd_files(kept / f"{name}-000001.{suffix}"):
            code, out, err = said(
                "run", spec, "--seeds", 1, "--results", tmp_path / "r", "--workers", 1, "--quiet"
            )
            assert code == 0 and result.exists(), err
            result.unlink()
            kept.mkdir(exist_ok=True)


def test_a_checkpoint_whose_tensors_have_grown_is_damaged(tmp_path):
    save_message(tmp_path / "c", {"rounds": {}}, {"t": torch.ones(3)})
    assert load_message(tmp_path / "c")["t"].tolist() == [1.0, 1.0, 1.0]
    with open(tmp_path / "c.safetensors", "r+b") as file:
        file.truncate(2**42)
    with one_line("checkpoint c: cannot be read"):
        load_message(tmp_path / "c")


def test_odd_specs_and_published_numbers_are_refused_in_one_line(refused, said, own, tmp_path):
    path = tmp_path / "papers/demo/t.toml"
    path.parent.mkdir(parents=True)
    for odd in odd_files(path):
        refused(["table", odd], "t.toml")
    refused(["table", "papers"], "spec 'papers' is a folder; expected a toml file")
    spec = written(tmp_path / "papers", SMALL | dict(published="t.csv"), "demo/u")
    for odd in odd_files(spec.with_name("t.csv")):
        refused(["table", spec], "t.csv")


@pytest.mark.parametrize(
    "row, words",
    [
        ({"lr": 1e308}, ["lr", "1e+308"]),
        ({"epochs": 10**400}, ["epochs", "expected a whole number"]),
        ({"lr": float("inf")}, ["lr", "inf"]),
        ({"batch_size": 2**70}, ["batch_size"]),
    ],
)
def test_huge_numbers_are_refused_in_one_line(refused, own, tmp_path, row, words):
    refused(
        [
            "table",
            written(
                tmp_path / "papers",
                SMALL | dict(methods={"FedAvg": row | {"source": "guess: x"}}),
                "demo/t",
            ),
        ],
        *words,
    )


def test_a_spec_may_begin_with_a_byte_order_mark(said, own, tmp_path):
    spec = written(tmp_path / "papers", SMALL, "demo/t")
    spec.write_bytes(b"\xef\xbb\xbf" + spec.read_bytes().replace(b"\n", b"\r\n"))
    assert said("table", spec)[0] == 0


# --- names that are nearly right


@pytest.mark.parametrize(
    "line, words",
    [
        ("tabel", "did you mean 'table'? accepted: "),
        ("table table2", "did you mean 'fedbss/table2' or 'fedccfa/table2' or 'lfd/table2'?"),
        ("notebook fedccfa .", "(.); accepted: --out"),
        ("methods FedAvgg", "did you mean 'FedAvg'?"),
        ("run fedccfa/table2 --seed 3", "did you mean '--seeds'?"),
    ],
)
def test_what_is_nearly_right_is_proposed(refused, own, line, words):
    refused(line.split(), words)


def test_one_method_is_shown_with_its_fields(said, own):
    code, out, err = said("methods", "FedProx")
    assert (code, err) == (0, "")
    assert "mu" in out
    assert "FedAvg" not in out.split("\n")[0]
    assert "SCAFFOLD" not in out


def test_no_type_stands_beside_a_flag(said, own):
    for command in ([], ["run"], ["plan"], ["methods"]):
        out = said(*command, "-h")[1]
        assert "<bool>" not in out and "--help" in out and "-h " in out, out
