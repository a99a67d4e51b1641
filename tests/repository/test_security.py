"Nothing that is read can run: ruff's rules S, with the exceptions that pyproject.toml names, and files full of what would run"

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from html import escape
from pathlib import Path

import pytest

from fedrepro.core.errors import InputError
from fedrepro.reporting.grids import FORMATS
from fedrepro.experiments import store
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.printed_tables import render

ROOT = Path(__file__).resolve().parents[2]
RUFF = [Path(sys.executable).with_name("ruff"), "check", "--no-cache", "--output-format", "json"]
EXCEPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"][
    "per-file-ignores"
]


def ruff(*more, where=("fedrepro", "nbs", "benchmarks", "tools", "conftest.py"), folder=ROOT):
    "(file, rule) of what ruff finds"
    done = subprocess.run([*RUFF, *more, *where], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return {
        (Path(f["filename"]).relative_to(folder).as_posix(), f["code"])
        for f in json.loads(done.stdout)
    }


def test_ruff_finds_nothing():
    assert not ruff()


def test_every_exception_is_needed():
    "Each is named with its file and rule; without it ruff would find something there"
    found = ruff("--config", "lint.per-file-ignores = {}")
    for files, rules in EXCEPTIONS.items():
        before, names, after = (
            re.fullmatch(r"([^{]*)\{?([^{}]*)\}?([^}]*)", files).groups()
            if "{" in files
            else ("", files, "")
        )
        for rule in {r for r in rules if re.match(r"S\d|TID", r)}:
            there = {
                file
                for file, code in found
                if code == rule and any(fnmatch(file, before + n + after) for n in names.split(","))
            }
            assert there or files == "tests/*", f"{files}: {rule} is allowed, but nobody needs it"


PLANTED = {
    "S101": "def f(x): assert x",
    "S102": "exec(x)",
    "S301": "import pickle\npickle.loads(b)",
    "S302": "import marshal\nmarshal.loads(b)",
    "S306": "import tempfile\ntempfile.mktemp()",
    "S307": "eval(x)",
    "S310": "from urllib.request import urlopen\nurlopen(x)",
    "S202": "import tarfile\ntarfile.open(f).extractall(d)",
    "S324": "import hashlib\nhashlib.md5(b)",
    "S506": "import yaml\nyaml.load(x)",
    "S602": "import subprocess\nsubprocess.run(x, shell=True)",
    "S603": "import subprocess\nsubprocess.run([x])",
    "S605": "import os\nos.system(x)",
    "S606": "import os\nos.execv(x, y)",
    "TID251": [
        "import torch as t\nt.load(f)",
        "from torch import load",
        "import joblib\njoblib.load(f)",
        "import pandas as pd\npd.read_pickle(f)",
        "import importlib\nimportlib.import_module(x)",
        "import runpy\nrunpy.run_path(x)",
        "import socket",
        "import requests",
        "from pickle import Unpickler",
        "import ctypes",
        "import shutil\nshutil.unpack_archive(f)",
    ],
}


def test_a_planted_offence_is_found(tmp_path):
    planted = [
        (rule, code)
        for rule, codes in PLANTED.items()
        for code in ([codes] if isinstance(codes, str) else codes)
    ]
    (tmp_path / "fedrepro").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for i, (_, code) in enumerate(planted):
        (tmp_path / f"fedrepro/planted_{i}.py").write_text(code + "\n")
    found = ruff(where=["fedrepro"], folder=tmp_path)
    assert not [
        (rule, code)
        for i, (rule, code) in enumerate(planted)
        if (f"fedrepro/planted_{i}.py", rule) not in found
    ]


def test_what_ruff_has_no_rule_for():
    "`np.load` has to say allow_pickle=False, or nothing; nobody calls `__import__`; no shell in a page"
    pages = [
        *(ROOT / "fedrepro").rglob("*.py"),
        *(ROOT / "nbs").rglob("*.ipynb"),
        *(ROOT / "tools").glob("*.py"),
    ]
    assert len(pages) > 100
    assert not [
        p
        for p in pages
        if re.search(
            r'allow_pickle\s*=\s*(?!False)|\b__import__\(|^ *"(!|%%(bash|sh|script|system))',
            p.read_text(),
            re.M,
        )
    ]


# --- what SECURITY.md says


def test_every_test_that_is_pointed_to_exists():
    said = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(said) > 12
    for file, test in said:
        tree = ast.parse((ROOT / file).read_text())
        assert not test or test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (
            f"{file}::{test}"
        )


def test_text_in_files_stays_text(tmp_path):
    "Specs, published numbers and results full of what would run if anything were evaluated"
    mark = tmp_path / "ran"
    evil = [
        f"__import__('os').system('touch {mark}')",
        f"$(touch {mark})",
        f"`touch {mark}`",
        f"{{{{ open('{mark}', 'w') }}}}",
        f"!!python/object/apply:os.system ['touch {mark}']",
    ]
    (tmp_path / "papers").mkdir()
    name = evil[0][:70]
    csv = "method,mean,std\n" + "".join(f'"{text[:70]}",1,1\n' for text in evil)
    (tmp_path / "papers/t.csv").write_text(csv)
    spec = (
        f"title = {json.dumps(evil[1])}\npaper = {json.dumps(evil[2][:70])}\ntable = '1'\nkind = 'table'\nmetric = 'generalised_accuracy'\nstatistic = 'last'\n"
        f"published = 't.csv'\n[base]\nsource = {json.dumps('guess: ' + evil[4])}\nrounds = 1\nseeds = [0]\npartition = 'iid'\nrecipe = 'plain'\ndataset = 'digits'\n"
        f"network = 'digits_cnn'\nclients = 2\n[[columns]]\nlabel = {json.dumps(evil[3][:70])}\n[methods.FedAvg]\npublished = {{method = {json.dumps(name)}}}\n"
    )
    (tmp_path / "papers/t.toml").write_text(spec)
    loaded = load_spec(tmp_path / "papers/t.toml")
    cell = loaded.runs("paper")[0]
    head = dict(
        settings=cell.settings,
        run_id=cell.run_id,
        status="complete",
        cpu=evil[0],
        executor=evil[1],
        versions={evil[2]: evil[3]},
    )
    store.write(
        store.run_path(loaded.results, cell),
        head,
        [dict(round=1, generalised_accuracy=1.0, **{evil[4]: 2.0})],
    )
    for format in FORMATS:
        assert (escape if format == "html" else str)(evil[3][:20]) in render(
            loaded, "paper", format
        )
    for wrong in evil:
        with pytest.raises(InputError):
            load_spec(wrong)
    assert not mark.exists()


def test_files_with_methods_run_when_methods_are_looked_up_and_not_before(tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    code = (
        "import os, fedrepro.experiments.store, fedrepro.verdicts.tables, fedrepro.experiments.runner; assert not os.path.exists('ran')\n"
        "from fedrepro.engine.method import load_methods; load_methods(); load_methods(); assert open('ran').read() == 'x'"
    )
    env = os.environ | {"FEDREPRO_METHODS": str(tmp_path / "mine.py"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
