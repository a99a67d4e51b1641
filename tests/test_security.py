"Nothing that is read can run: the syntax trees of the package, the tools and the pages are walked for what could"
import ast
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from fedrepro import store
from fedrepro.experiments import load_spec
from fedrepro.tables import FORMATS, render
from fedrepro.trees import InputError

ROOT = Path(__file__).resolve().parents[1]

RULES = {  # rule -> names that are refused wherever they are mentioned: called, passed on, or fetched by getattr
    "unpickling": r"(c?pickle|_pickle|pickle5|dill|cloudpickle|joblib|jsonpickle)\.(loads?|_?Unpickler|_loads?)|(shelve|marshal|dill|joblib)\..+"
                  r"|pandas\.(read_pickle|io\.pickle.*)|torch\.(jit\.load|package\..+|hub\..+|serialization\..+)"
                  r"|fedrepro\.messages\.(loads|Unpickler)",
    "evaluation": r"(builtins\.)?(eval|exec|compile|__import__)|builtins\.__dict__|code\.(interact|Interactive.+)|pandas\.eval",
    "importing": r"importlib\.(import_module|reload|util\.(spec_from_file_location|module_from_spec)|machinery\.Source.+)|runpy\..+|imp\..+",
    "shell": r"os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*)|subprocess\.(getoutput|getstatusoutput)|pty\.spawn",
    "program": r"subprocess\.(run|Popen|call|check_call|check_output)|asyncio\.create_subprocess_\w+",
    "yaml": r"yaml\.(load|load_all|unsafe_load\w*|full_load\w*|(Unsafe|Full)?Loader)|ruamel\.yaml\..+",
    "network": r"(urllib\.request|urllib3|requests|httpx|aiohttp|http\.client|ftplib|socket|paramiko|smtplib|telnetlib)(\..+)?",
    "temporary name": r"tempfile\.mktemp|os\.(tempnam|tmpnam)",
    "native code": r"(ctypes|cffi)(\..+)?",
    "unpacking": r"shutil\.unpack_archive",
}
ANYWHERE = {"extractall": "unpacking", "exec_module": "importing", "load_module": "importing", "read_pickle": "unpickling",
            "to_pickle": "unpickling"}  # attribute of whatever object -> rule
BARE = {"eval", "exec", "compile", "__import__"}  # names that need no import
DIGESTS = {"hashlib.md5", "hashlib.sha1", "hashlib.new"}  # weak, or whatever a name says

ALLOWED = {  # (file, function, rule) -> why; * stands for anything; an entry that nothing needs fails
    ("fedrepro/data.py", "_Batch", "unpickling"): "CIFAR is distributed as pickles: a reader that knows plain values only, after the checksum",
    ("fedrepro/messages.py", "Unpickler", "unpickling"): "for what this program's own processes say; without it a round takes 1.5 times as long",
    ("fedrepro/executors.py", "_join", "unpickling"): "bytes from the parent, through a pipe",
    ("fedrepro/executors.py", "_visit", "unpickling"): "the same",
    ("fedrepro/executors.py", "Processes._answers", "unpickling"): "bytes from a worker, through a pipe",
    ("nbs/07_messages.ipynb", "*", "unpickling"): "bytes that the line before has made",
    ("fedrepro/contracts.py", "carried", "unpickling"): "bytes that the same line has made: what a worker process would see",
    ("fedrepro/rounds.py", "load_methods", "importing"): "the package's own modules",
    ("fedrepro/rounds.py", "import_file", "importing"): "--import and FEDREPRO_METHODS: a person names a Python file to be executed",
    ("fedrepro/peers.py", "*", "importing"): "Flower and pfl-research by their fixed names, when the extra is installed",
    ("fedrepro/loggers.py", "needed", "importing"): "TensorBoard, MLflow and W&B by their fixed names, when the extra is installed",
    ("fedrepro/store.py", "git", "program"): "git rev-parse and git status, for the provenance",
    ("fedrepro/bench.py", "Remote.__init__", "program"): "this Python again, with a module of this package",
    ("fedrepro/executors.py", "*", "native code"): "mallopt of the C library: how much freed memory is kept",
    ("fedrepro/fetch.py", "*", "network"): "the one module that downloads",
    ("nbs/01_data.ipynb", "Evil.__reduce__", "shell"): "the lesson that such a pickle is refused",
    ("nbs/01_data.ipynb", "*", "weak digest"): "makes the checksums of the lesson's own files",
    ("nbs/01_images.ipynb", "placed", "weak digest"): "the same",
    ("nbs/01_sources.ipynb", "", "weak digest"): "the same",
    ("nbs/01_texts.ipynb", "put", "weak digest"): "the same",
    ("nbs/5*_add_*.ipynb", "", "program"): "the command line again, on what the page has just written",
    ("nbs/63_api.ipynb", "*", "importing"): "the package's own modules, to list what is in them",
    ("tools/website.py", "do", "shell"): "hands its arguments on to subprocess.run; nobody gives shell",
    ("nbs/36_main.ipynb", "fresh", "program"): "this Python again, to show what a shell shows",
    ("tools/*", "*", "program"): "for developers: this Python again, git, and what makes a disk fail on purpose",
}


class Walker(ast.NodeVisitor):
    "Collects (function, rule, what) of everything suspicious in a module"
    def __init__(self, tree: ast.Module, package: bool):
        self.names, self.inside, self.found, self.package = {}, [], set(), package
        nodes = list(ast.walk(tree))
        self.own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        for node in nodes:  # aliases first: a function may stand above the import that it uses
            if isinstance(node, ast.Import):
                for a in node.names: self.names[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom):
                module = ".".join(["fedrepro"] * bool(node.level) + [node.module or ""]).rstrip(".")
                for a in node.names: self.names[a.asname or a.name] = f"{module}.{a.name}"
        for node in nodes:
            if isinstance(node, ast.Assign) and (full := self.full(node.value)):
                for target in node.targets:
                    if isinstance(target, ast.Name) and self.rules(full): self.names[target.id] = full
        self.visit(tree)

    def note(self, rule: str, what: str): self.found.add((".".join(self.inside), rule, what))

    def full(self, node) -> str:
        "The whole name that a node mentions, through aliases, `getattr(x, 'name')` and `__import__('x')`; empty when it is computed"
        if isinstance(node, ast.Name): return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute): return f"{base}.{node.attr}" if (base := self.full(node.value)) else ""
        if not (isinstance(node, ast.Call) and node.args): return ""
        called, last = self.full(node.func), node.args[-1]
        if called == "getattr" and len(node.args) > 1: last = node.args[1]
        if not (isinstance(last, ast.Constant) and isinstance(last.value, str)): return ""
        if called == "getattr": return f"{base}.{last.value}" if (base := self.full(node.args[0])) else ""
        return last.value if called in ("__import__", "importlib.import_module") else ""

    def rules(self, full: str) -> list[str]:
        full = re.sub(r"^(np|pd)\b", lambda m: {"np": "numpy", "pd": "pandas"}[m[0]], full)
        return [] if full in BARE & self.own else [rule for rule, names in RULES.items() if re.fullmatch(names, full)]

    def enter(self, node):
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = enter

    def visit_ImportFrom(self, node):
        for a in [] if node.level else node.names:
            for rule in self.rules(f"{node.module}.{a.name if a.name != '*' else 'loads'}"): self.note(rule, f"from {node.module} import {a.name}")
    def visit_Import(self, node):
        for a in node.names:
            for rule in self.rules(a.name): self.note(rule, f"import {a.name}")

    def generic_visit(self, node):
        full = self.full(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) else ""
        for rule in self.rules(full) if full else (): self.note(rule, full)
        if full == "torch.load" and not getattr(node, "called", False): self.note("torch.load", "not called by its name")
        super().generic_visit(node)
    def visit_Attribute(self, node):
        if node.attr in ANYWHERE: self.note(ANYWHERE[node.attr], node.attr)
        self.generic_visit(node)
    def visit_Call(self, node):
        full, given = self.full(node.func), {k.arg: k.value for k in node.keywords}
        def says(key, value): return isinstance(given.get(key), ast.Constant) and given[key].value is value
        if full == "torch.load":
            node.func.called = True
            if not says("weights_only", True): self.note("torch.load", "without weights_only=True")
        if full in ("numpy.load", "np.load") and (not given.keys().isdisjoint({"allow_pickle", None}) or len(node.args) > 1) \
                and not says("allow_pickle", False): self.note("numpy.load", "allow_pickle")
        if "shell" in given and not says("shell", False): self.note("shell", "shell=")
        if full.startswith("subprocess.") and None in given: self.note("shell", "** may hold shell=True")
        part = self.full(node.args[0]) if node.args and full in ("functools.partial", "partial") else ""
        if {full, part} & DIGESTS and not says("usedforsecurity", False): self.note("weak digest", full)
        self.generic_visit(node)
    def visit_Assert(self, node):
        if self.package and self.inside: self.note("assert", "python -O takes it away")
        self.generic_visit(node)


def findings(code: str, package: bool = True) -> set: return Walker(ast.parse(code), package).found


def lessons(path: Path) -> str:
    "The code of a page that is not exported, as one module; a line for the shell becomes a call of os.system"
    cells = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    lines = [line for c in cells if not re.search(r"^#\|\s*export", c, re.MULTILINE) for line in c.split("\n")]
    lines = [re.sub(r"^(\s*)(!|%%?(sx|system|bash|sh|script)\b).*$", r"\1__import__('os').system('')", line) for line in lines]
    return "\n".join(line for line in lines if not re.match(r"\s*%", line))


def everything() -> dict:
    "(file, function, rule) -> what, of all there is to run"
    files = [*(ROOT / "fedrepro").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), ROOT / "conftest.py", *(ROOT / "nbs").rglob("*.ipynb")]
    found = {}
    for path in sorted(files):
        where, page = path.relative_to(ROOT).as_posix(), path.suffix == ".ipynb"
        for function, rule, what in findings(lessons(path) if page else path.read_text(), where.startswith("fedrepro/")):
            found.setdefault((where, function, rule), set()).add(what)
    return found


def test_the_list_of_exceptions_is_exact():
    found = everything()
    covered = {key: [k for k in ALLOWED if all(map(fnmatchcase, key, k))] for key in found}
    assert not {k: found[k] for k, by in covered.items() if not by}, "not allowed"
    assert not set(ALLOWED) - {k for by in covered.values() for k in by}, "allowed, but nobody needs it"
    assert all(len(reason) > 7 for reason in ALLOWED.values())


def test_the_walk_sees_the_whole_package():
    modules = {p.stem for p in (ROOT / "fedrepro").rglob("*.py")}
    assert {"store", "data", "executors", "checkpoints", "rounds", "fedccfa", "_modidx"} <= modules and len(modules) > 40
    assert sum(len(lessons(p)) > 50 for p in (ROOT / "nbs").glob("*.ipynb")) > 30


REFUSED = {
    "unpickling": ["from .messages import loads\nloads(b)", "from fedrepro import messages\nmessages.loads(b)", "from . import messages as m\nm.Unpickler(f)",
                   "import pickle\npickle.load(f)", "import pickle as p\np.loads(b)", "from pickle import loads\nloads(b)", "from pickle import loads as quick",
                   "from pickle import *", "import pickle\nclass U(pickle.Unpickler): pass", "import pickle\nread = pickle.loads\nread(b)",
                   "import pickle\ngetattr(pickle, 'loads')(b)", "import pickle\nlist(map(pickle.loads, bs))", "__import__('pickle').loads(b)",
                   "def f(b): return pickle.loads(b)\nimport pickle", "def f():\n import pickle as q\n return q.load", "from importlib import import_module as m\nm('pickle').loads(b)",
                   "import cloudpickle\ncloudpickle.loads(b)", "import dill\ndill.load(f)", "import joblib\njoblib.load(f)", "import shelve\nshelve.open(f)",
                   "import marshal\nmarshal.loads(b)", "import pandas as pd\npd.read_pickle(f)", "import pandas\npandas.read_pickle(f)", "frame.to_pickle(f)",
                   "import torch\ntorch.jit.load(f)", "import torch\ntorch.hub.load(a, b)", "from torch import hub\nhub.load(a)", "import _pickle\n_pickle.loads(b)"],
    "torch.load": ["import torch\ntorch.load(f)", "import torch as t\nt.load(f, map_location='cpu')", "from torch import load\nload(f)",
                   "import torch\ntorch.load(f, weights_only=False)", "import torch\ntorch.load(f, weights_only=safe)", "import torch\nread = torch.load",
                   "import torch\ntorch.load(f, **more)", "import torch\nlist(map(torch.load, fs))"],
    "numpy.load": ["import numpy as np\nnp.load(f, allow_pickle=True)", "import numpy\nnumpy.load(f, allow_pickle=x)", "from numpy import load\nload(f, **more)",
                   "import numpy as np\nnp.load(f, None, True)"],
    "evaluation": ["eval(x)", "exec(x)", "compile(x, '', 'exec')", "__import__(x)", "f = eval\nf(x)", "import builtins\nbuiltins.exec(x)", "list(map(eval, xs))",
                   "from builtins import eval as e\ne(x)", "import pandas as pd\npd.eval(x)"],
    "importing": ["import importlib\nimportlib.import_module(x)", "from importlib import util\nutil.spec_from_file_location(a, b)", "spec.loader.exec_module(m)",
                  "import runpy\nrunpy.run_path(p)", "from importlib.machinery import SourceFileLoader"],
    "shell": ["import os\nos.system(x)", "from os import system as s\ns(x)", "import os\nos.popen(x)", "import subprocess\nsubprocess.run(x, shell=True)",
              "import subprocess\nsubprocess.run(x, **more)", "import subprocess\nsubprocess.getoutput(x)", "import os\nos.execv(x, y)", "Popen(x, shell=s)"],
    "program": ["import subprocess\nsubprocess.run([x])", "from subprocess import Popen\nPopen([x])", "import subprocess as s\ns.check_output([x])"],
    "yaml": ["import yaml\nyaml.load(x)", "from yaml import load\nload(x)", "import yaml\nyaml.load(x, Loader=yaml.Loader)", "import yaml\nyaml.unsafe_load(x)"],
    "network": ["import requests", "import urllib.request\nurllib.request.urlopen(x)", "from urllib.request import urlopen", "from urllib import request", "import socket as s",
                "import http.client", "import httpx\nhttpx.get(x)"],
    "temporary name": ["import tempfile\ntempfile.mktemp()", "from tempfile import mktemp"],
    "native code": ["import ctypes", "from ctypes import CDLL"],
    "unpacking": ["import tarfile\ntarfile.open(f).extractall(d)", "z.extractall(d)", "import shutil\nshutil.unpack_archive(f)"],
    "weak digest": ["import hashlib\nhashlib.md5(b)", "from hashlib import md5\nmd5(b)", "import hashlib\nhashlib.new('md5', b)", "import hashlib\nhashlib.sha1(b, usedforsecurity=True)",
                    "import hashlib\nfrom functools import partial\npartial(hashlib.new, 'md5')"],
    "assert": ["def f(x): assert x"],
}
FINE = ["import pickle\npickle.dumps(x)", "import torch\ntorch.load(f, weights_only=True)", "import numpy as np\nnp.load(f)\nnp.load(f, allow_pickle=False)", "model.eval()",
        "import re\nre.compile(x)", "import json\njson.loads(x)", "import hashlib\nhashlib.md5(b, usedforsecurity=False)\nhashlib.sha256(b)", "import os\nos.path.join(x)",
        "import yaml\nyaml.safe_load(x)", "import tempfile\ntempfile.mkstemp()", "assert x", "def compile(x): return x\ncompile(3)", "from .data import load\nload(f)",
        "import importlib.util\nimportlib.util.find_spec(x)", "from urllib.parse import urlsplit\nurlsplit(x)", "run(x, shell=False)"]


@pytest.mark.parametrize("rule, code", [(rule, code) for rule, codes in REFUSED.items() for code in codes])
def test_every_rule_fires(rule, code):
    assert rule in {r for _, r, _ in findings(code)}


@pytest.mark.parametrize("code", FINE)
def test_harmless_code_passes(code): assert not findings(code)


def test_no_rule_is_untried():
    assert {*RULES, *ANYWHERE.values(), "torch.load", "numpy.load", "weak digest", "assert"} == set(REFUSED)


def test_a_finding_names_its_function():
    assert findings("import pickle\nclass A:\n def f(self):\n  return [pickle.loads(b) for b in self]") == {("A.f", "unpickling", "pickle.loads")}


def test_a_shell_line_of_a_page_is_seen(tmp_path):
    for line in ("!pip install x", "  !ls", "%%bash", "%sx ls"):
        page = tmp_path / "page.ipynb"
        page.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["if True:\n" if line[0] == " " else "", line]}]}))
        assert ("", "shell", "os.system") in findings(lessons(page), False)


# --- what SECURITY.md says

def test_every_test_that_is_pointed_to_exists():
    said = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(said) > 12
    for file, test in said:
        tree = ast.parse((ROOT / file).read_text())
        assert not test or test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, f"{file}::{test}"


def test_text_in_files_stays_text(tmp_path):
    "Specs, published numbers and results full of what would run if anything were evaluated"
    mark = tmp_path / "ran"
    evil = [f"__import__('os').system('touch {mark}')", f"$(touch {mark})", f"`touch {mark}`", f"{{{{ open('{mark}', 'w') }}}}", f"!!python/object/apply:os.system ['touch {mark}']"]
    (tmp_path / "papers").mkdir()
    name = evil[0][:70]
    csv = "method,mean,std\n" + "".join(f'"{text[:70]}",1,1\n' for text in evil)
    (tmp_path / "papers/t.csv").write_text(csv)
    spec = (f"title = {json.dumps(evil[1])}\npaper = {json.dumps(evil[2][:70])}\ntable = '1'\nkind = 'table'\nmetric = 'generalised_accuracy'\nstatistic = 'last'\n"
            f"published = 't.csv'\n[base]\nsource = {json.dumps('guess: ' + evil[4])}\nrounds = 1\nseeds = [0]\npartition = 'iid'\nrecipe = 'plain'\ndataset = 'digits'\n"
            f"network = 'digits_cnn'\nclients = 2\n[[columns]]\nlabel = {json.dumps(evil[3][:70])}\n[methods.FedAvg]\npublished = {{method = {json.dumps(name)}}}\n")
    (tmp_path / "papers/t.toml").write_text(spec)
    loaded = load_spec(tmp_path / "papers/t.toml")
    cell = loaded.cells("paper")[0]
    head = dict(settings=cell.settings, run_id=cell.run_id, status="complete", cpu=evil[0], executor=evil[1], versions={evil[2]: evil[3]})
    store.write(store.run_path(loaded.results, cell), head, [dict(round=1, generalised_accuracy=1., **{evil[4]: 2.})])
    for format in FORMATS: assert evil[3][:20] in render(loaded, "paper", format) or format == "html"
    for wrong in evil:
        with pytest.raises(InputError): load_spec(wrong)
    assert not mark.exists()


def test_files_with_methods_run_when_methods_are_looked_up_and_not_before(tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    env = os.environ | {"FEDREPRO_METHODS": str(tmp_path / "mine.py")}
    for code, runs in [("import fedrepro.store, fedrepro.tables, fedrepro.runner", 0), ("from fedrepro.rounds import load_methods; load_methods(); load_methods()", 1)]:
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, timeout=120).returncode == 0
        assert (len((tmp_path / "ran").read_text()) if (tmp_path / "ran").exists() else 0) == runs


def test_the_command_takes_no_module_from_the_working_folder(tmp_path):
    "An installed command, unlike `python -m`"
    for name in ("typer", "json", "torch", "fedrepro"): (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    command = Path(sys.executable).with_name("fedrepro")
    done = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 0 and not (tmp_path / "ran").exists(), done.stderr
