"""What no single notebook can own: the tree is what nbdev makes of the notebooks, and it is fit for a reader."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pages import NOTEBOOKS as PAGES, ROOT, cells, notebooks

BIN = Path(sys.executable).parent
NOTEBOOKS = [*PAGES, *notebooks("benchmarks")]
MODULES = sorted((ROOT / "fedrepro").rglob("*.py"))
TEXT = {
    ".py",
    ".ipynb",
    ".md",
    ".toml",
    ".csv",
    ".ini",
    ".yml",
    ".txt",
    ".json",
    ".jsonl",
    ".css",
    "",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(paths):
    return dict(argvalues=paths, ids=[p.relative_to(ROOT).as_posix() for p in paths])


def tracked():
    "Every file that is in git or could be added to it"
    out = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    assert out.returncode == 0, (
        f"not a git checkout: cannot tell which files belong to it ({out.stderr})"
    )
    return [ROOT / name for name in out.stdout.split("\0") if name and (ROOT / name).is_file()]


# --- the modules are what the notebooks export


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "A copy of the sources, exported afresh (the modules are removed first) and cleaned"
    copy = tmp_path_factory.mktemp("exported")
    junk = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".last_checked")
    for folder in ("nbs", "fedrepro", "benchmarks", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=junk, symlinks=True)
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    for module in (copy / "fedrepro").rglob("*.py"):
        if module.relative_to(copy / "fedrepro").as_posix() not in ("__init__.py", "__main__.py"):
            module.unlink()
    for command, *more in (
        ["nbdev_export"],
        ["python", "tools/export_benchmarks.py"],
        ["nbdev_clean"],
        ["nbdev_clean", "--fname", "benchmarks"],
    ):
        done = subprocess.run(
            [BIN / command, *more],
            cwd=copy,
            capture_output=True,
            text=True,
            env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "1"},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return copy


def different(copy, paths):
    "Those of `paths` whose copy has other bytes"
    return [
        name
        for path in paths
        if (copy / (name := path.relative_to(ROOT).as_posix())).read_bytes() != path.read_bytes()
    ]


def test_export_leaves_no_difference(exported):
    "fedrepro/ is what nbdev_export makes of nbs/, benchmarks/ what tools/export_benchmarks.py makes of its notebooks"
    made = sorted((exported / "fedrepro").rglob("*.py"))
    assert [p.relative_to(exported) for p in made] == [p.relative_to(ROOT) for p in MODULES]
    assert not different(exported, [*MODULES, *(ROOT / "benchmarks").glob("*.py")])


def test_clean_leaves_no_difference(exported):
    assert not different(exported, NOTEBOOKS)


# --- packaging


def test_one_version_everywhere():
    version = re.search(r"^version = (.+)$", (ROOT / "settings.ini").read_text(), re.M)[1]
    assert f'__version__ = "{version}"' in (ROOT / "fedrepro/__init__.py").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_agree_with_the_declared_ranges():
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    extras = PROJECT["optional-dependencies"]
    for need in map(Requirement, [*PROJECT["dependencies"], *extras["run"], *extras["dev"]]):
        if need.name == "fedrepro":
            continue
        assert need.name in pins and need.specifier.contains(pins[need.name]), (
            f"{need}: pinned {pins.get(need.name)}"
        )


# --- what the package imports when it runs


def imported(path):
    "Top-level names of the modules that a file imports from outside the package, wherever in it"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_the_package_imports_only_what_it_declares():
    distributions = {re.match(r"[\w-]+", need)[0] for need in PROJECT["dependencies"]}
    allowed = {{"scikit-learn": "sklearn", "pillow": "PIL"}.get(d, d) for d in distributions} | {
        "fedrepro",
        *sys.stdlib_module_names,
    }
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        for name in imported(path)
        if name not in allowed
    }
    assert not found, f"not a declared dependency (nbdev and fastcore never are): {sorted(found)}"


def test_every_dependency_is_imported_by_what_is_shipped():
    "By a module, or by a page that a wheel carries; what other pages import belongs to the extra `run`"
    carried = re.findall(r'"(nbs/[^"]+)"', (ROOT / "tools/wheel.py").read_text())
    code = "\n".join(
        cell["source"] for pattern in carried for page in ROOT.glob(pattern) for cell in cells(page)
    )
    names = {
        *re.findall(r"^(?:import|from) (\w+)", code, re.M),
        *(name for path in MODULES for name in imported(path)),
    }
    needs = [re.match(r"[\w-]+", need)[0] for need in PROJECT["dependencies"]]
    assert [
        need
        for need in needs
        if {"scikit-learn": "sklearn", "pillow": "PIL"}.get(need, need) not in names
    ] == []


def test_the_formatter_finds_nothing_to_do():
    "`ruff format` owns the form of lines, in notebooks and files; what is exported is formatted in its notebook"
    done = subprocess.run(
        [BIN / "ruff", "format", "--no-cache", "--check", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- nothing of one machine

MACHINE = re.compile(
    r"(?<![\w.~:/-])/(?:work|root|home|farm|Users|opt|mnt)/\w"
    r"|/tmp/(?:ipykernel|bash|tmp)|site-packages/\w"
)


def test_no_paths_of_one_machine():
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path == Path(__file__).resolve():
            continue
        for i, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{i}: {MACHINE.search(line)[0]}")
    assert not found, found


@pytest.mark.parametrize(
    "text, hit",
    [
        ("in /home/ann/data", True),
        ('"/tmp/ipykernel_12/3.py"', True),
        ("https://a.org/home/x", False),
        ("~/.cache/fedrepro", False),
    ],
)
def test_the_path_pattern(text, hit):
    assert bool(MACHINE.search(text)) is hit


# --- notebooks as they are committed

TIMING = re.compile(r"\d+(?:\.\d+)?\s?(?:it/s|s/it)\b|Wall time|CPU times|\bper loop\b")


@pytest.mark.parametrize("path", **named(NOTEBOOKS))
def test_notebook_leaves_nothing_behind(path):
    "No widget state, warnings, errors, timings or execution counts; pictures stay small"
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) <= {"kernelspec"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in cells(path, "code"):
        where = f"{path.name}, cell {cell['id']}"
        assert cell["execution_count"] is None and set(cell["metadata"]) <= {"tags"}, where
        for out in cell["outputs"]:
            assert out["output_type"] != "error" and out.get("name") != "stderr", f"{where}: {out}"
            data = {**out.get("data", {}), "text": out.get("text", "")}
            assert not any("widget" in kind for kind in data), f"{where}: a widget"
            assert not TIMING.search(json.dumps([data["text"], data.get("text/plain")])), (
                f"{where}: a timing"
            )
            most = 200_000  # base64: panels of many methods
            assert len(data.get("image/png", "")) < most, (
                f"{where}: a picture over {most * 3 // 4000} KB"
            )


@pytest.mark.parametrize("path", **named(NOTEBOOKS))
def test_notebook_form(path):
    "Title and one-line description first; distinct cell ids; imports alone in their cell; no export in a run"
    everything = cells(path)
    assert re.match(r"# [^\n]+\n+> [^\n]+$", everything[0]["source"].strip()), (
        "title, > description"
    )
    assert len({cell["id"] for cell in everything}) == len(everything)
    for cell in cells(path, "code"):
        assert "nbdev_export(" not in cell["source"]
        if not re.search(r"^#\|\s*export", cell["source"], re.M):
            continue
        kinds = {
            isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(cell["source"]).body
        }
        assert len(kinds) < 2, (
            f"{path.name}, cell {cell['id']}: imports and other code in one exported cell"
        )
