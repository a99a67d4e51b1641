"""The house: what a reader finds from `ls nbs` and `ls fedrepro` alone, and what keeps it so."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fedrepro
from fedrepro.core.folders import find_specs
from fedrepro.experiments.jobs import COMPUTING
from fedrepro.experiments.specs import load_spec
from fedrepro.experiments.sweep import plan_steps, read_order

ROOT = Path(__file__).resolve().parents[2]
# of the package itself: a facade, `python -m fedrepro`, nbdev's index
HAND = {"__init__", "__main__", "_modidx"}
NO_CODE = {"guides", "results", "reference"}  # folders of pages that export nothing
# the one place where an earlier package finds a later one while it runs
FOUND_BY_NAME = {("engine.method", "methods")}
CELL = 30  # lines of an exported cell, but for one function or class that is one idea
PAGES, SHARED = 16, 5  # pages a folder, public names that two packages share, at most


def test_the_tests_mirror_the_package():
    packages = {p.name for p in (ROOT / "fedrepro").iterdir() if (p / "__init__.py").exists()}
    folders = {p.parent.name for p in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == packages | {"repository"}
    assert not list((ROOT / "tests").glob("test_*.py"))


def test_files_that_run_first_are_there():
    "A renamed file would lose its place in silence"
    names = re.search(r'LONG = """(.*?)"""', (ROOT / "conftest.py").read_text(), re.S)[1].split()
    assert names and set(names) <= {
        p.stem.removeprefix("test_") for p in (ROOT / "tests").glob("*/test_*.py")
    }


# --- who imports whom


def order(root):
    "The packages in the order of their folders in nbs/"
    return [
        p.name.split("_", 1)[1]
        for p in sorted((root / "nbs").iterdir())
        if p.is_dir() and re.match(r"\d\d_", p.name)
    ]


def module(path, root):
    return ".".join(path.relative_to(root / "fedrepro").with_suffix("").parts)


def mentioned(node, name):
    "The modules of the package that a node imports, by statement or by a call with the module's name, relative to the package"
    if isinstance(node, ast.Import):
        found = [a.name for a in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = ["fedrepro", *name.split(".")][: -node.level] if node.level else []
        start = ".".join([*base, *filter(None, [node.module])])
        found = [start, *(f"{start}.{a.name}" for a in node.names)]
    elif isinstance(node, ast.Call) and getattr(
        node.func, "attr", getattr(node.func, "id", "")
    ) in ("import_module", "__import__"):
        found = [
            a.value
            for a in node.args[:1]
            if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
    else:
        found = []
    return [
        f.removeprefix("fedrepro.") for f in found if f.startswith("fedrepro.") and "__" not in f
    ]


def imports(root):
    "(module, what it imports) over the whole syntax tree of the package: statements inside functions count"
    for path in sorted((root / "fedrepro").rglob("*.py")):
        name = module(path, root)
        if name in HAND:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for other in mentioned(node, name):
                yield name, other


def upward(root):
    "Imports of a later package"
    rank = {name: i for i, name in enumerate(order(root))}
    return [
        (a, b)
        for a, b in dict.fromkeys(imports(root))
        if rank[b.split(".")[0]] > rank[a.split(".")[0]] and (a, b) not in FOUND_BY_NAME
    ]


def circle(root):
    "Modules that import each other, at once or while they run: the first is the last again"
    modules = {module(p, root) for p in (root / "fedrepro").rglob("*.py")}
    found = TopologicalSorter()
    for a, b in imports(root):
        if b in modules:
            found.add(a, b)
    try:
        found.prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_go_to_earlier_packages_only():
    assert not upward(ROOT)


def test_no_modules_import_each_other():
    assert not circle(ROOT)


def test_a_checkpoint_depends_on_all_packages_up_to_experiments():
    packages = [p for p in order(ROOT) if p not in NO_CODE]
    assert list(COMPUTING) == packages[: packages.index("experiments") + 1]


# --- folders and packages


def misplaced(root):
    "What is wrong with the folders of nbs/: one package each, numbered from 00 without a gap, pages named as their modules"
    said = []
    stems = defaultdict(list)
    packages = {p.name for p in (root / "fedrepro").iterdir() if p.is_dir() and any(p.glob("*.py"))}
    said += [
        f"{p.name}: a page in no folder"
        for p in (root / "nbs").glob("*.ipynb")
        if p.stem != "index"
    ]
    folders = [
        p for p in sorted((root / "nbs").iterdir()) if p.is_dir() and any(p.rglob("*.ipynb"))
    ]
    said += [
        f"nbs/{p.name}: expected number {i:02}"
        for i, p in enumerate(folders)
        if not re.match(rf"{i:02}_[a-z]", p.name)
    ]
    exported = set()
    for folder in folders:
        name = folder.name.split("_", 1)[-1]
        pages = sorted(p for p in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
        if len(pages) > PAGES:
            said.append(f"{folder.name}: {len(pages)} pages")
        for at, page in enumerate(pages):
            stems[page.stem].append(page)
            if not re.match(rf"{at:02}_[a-z]", page.name):
                said.append(f"{folder.name}/{page.name}: expected number {at:02}")
            for cell in json.loads(page.read_text())["cells"]:
                for target in re.findall(
                    r"^#\|[ \t]*(?:default_exp|exports?|exporti)[ \t]+(\S+)",
                    "".join(cell["source"]),
                    re.M,
                ):
                    exported.add(target)
                    if target != f"{name}.{page.stem.split('_', 1)[-1]}":
                        said.append(f"{folder.name}/{page.name}: exports {target}")
        has = name in packages
        if has == (name in NO_CODE):
            said.append(f"{folder.name}: {'a' if has else 'no'} package of that name")
    said += [
        f"fedrepro/{name}: no folder in nbs/"
        for name in packages - {f.name.split("_", 1)[-1] for f in folders}
    ]
    said += [
        f"{module(p, root)}: exported by no page"
        for p in sorted((root / "fedrepro").rglob("*.py"))
        if p.stem != "__init__" and module(p, root) not in exported | HAND
    ]
    return said + [
        f"{stem}: the name of {len(pages)} pages" for stem, pages in stems.items() if len(pages) > 1
    ]


def test_a_folder_is_a_package():
    assert not misplaced(ROOT)


# --- names


def public(path):
    "The names in `__all__`"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def shared(root):
    "(names that two modules of one package have, names that two modules have anywhere)"
    homes = defaultdict(list)
    for path in sorted((root / "fedrepro").rglob("*.py")):
        if path.stem in HAND:
            continue
        for name in public(path):
            homes[name].append(module(path, root))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    return {n: w for n, w in twice.items() if len({m.split(".")[0] for m in w}) < len(w)}, twice


def test_a_public_name_means_one_thing():
    within, anywhere = shared(ROOT)
    assert not within and len(anywhere) <= SHARED, anywhere


# --- verdicts are values


PRINTS = re.compile(r"_(in_words|sheet|grids?|notes?|html)$")  # ends of names: what a person reads


def printers(root):
    "What makes text for a person in the package verdicts, whose values reporting prints: (module, name)"
    grids = {
        (a, b) for a, b in imports(root) if a.startswith("verdicts.") and b.startswith("reporting")
    }
    named = set()
    for path in sorted((root / "fedrepro/verdicts").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and PRINTS.search(node.name):
                named.add((module(path, root), node.name))
    return grids | named


def exported_cells(root):
    "(page, lines of code, syntax tree) of every exported cell"
    for page in sorted((root / "nbs").glob("*/*.ipynb")):
        for cell in json.loads(page.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and re.search(r"^#\| *exporti?$", source, re.M):
                lines = [line for line in source.splitlines() if line and not line.startswith("#|")]
                yield page.relative_to(root / "nbs").as_posix(), len(lines), ast.parse(source)


def crowded(root):
    "Exported cells of more than `CELL` lines that define more than one function or class"
    found = []
    for page, lines, tree in exported_cells(root):
        names = [node.name for node in tree.body if hasattr(node, "name")]
        if lines > CELL and len(names) > 1:
            found.append(f"{page}: {', '.join(names)}: {lines} lines")
    return found


def test_a_long_cell_is_one_idea():
    "Two definitions that a reader cannot see at once want a sentence between them"
    assert crowded(ROOT) == []


def test_a_crowded_cell_is_found(tmp_path):
    long = "\n".join(["#| export", "def a():", *["    1"] * 30])
    pages = {"core/00_a": [long], "core/01_b": [long + "\n\n\ndef b():\n    2"]}
    for page, sources in pages.items():
        path = tmp_path / "nbs" / f"{page}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = [{"cell_type": "code", "source": [source]} for source in sources]
        path.write_text(json.dumps({"cells": cells}))
    assert crowded(tmp_path) == ["core/01_b.ipynb: a, b: 33 lines"]


def test_verdicts_print_nothing():
    assert not printers(ROOT)


# --- each of these tests finds what it is for


def house(folder, pages: dict, modules: dict):
    "A small tree: pages {path: module or None}, modules {path: code}"
    for path, target in pages.items():
        (page := folder / "nbs" / path).parent.mkdir(parents=True, exist_ok=True)
        cells = [{"cell_type": "code", "source": [f"#| default_exp {target}"]}] if target else []
        page.write_text(json.dumps({"cells": cells}))
    for path, code in modules.items():
        (file := folder / "fedrepro" / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return folder


USUAL = {
    "00_core/00_a.ipynb": "core.a",
    "00_core/01_b.ipynb": "core.b",
    "01_data/00_c.ipynb": "data.c",
}


@pytest.mark.parametrize(
    "a, b, c, found",
    [
        ("", "from .a import x", "from ..core.b import y\nfrom fedrepro.core import a", []),
        ("from ..data.c import x", "", "", [("core.a", "data.c"), ("core.a", "data.c.x")]),
        (
            "def f():\n    from fedrepro.data import c",
            "",
            "",
            [("core.a", "data"), ("core.a", "data.c")],
        ),
        ("def f():\n    import fedrepro.data.c", "", "", [("core.a", "data.c")]),
        (
            "import importlib\ndef f(): return importlib.import_module('fedrepro.data.c')",
            "",
            "",
            [("core.a", "data.c")],
        ),
    ],
)
def test_an_upward_import_is_found(tmp_path, a, b, c, found):
    assert upward(house(tmp_path, USUAL, {"core/a.py": a, "core/b.py": b, "data/c.py": c})) == found


@pytest.mark.parametrize(
    "code, found",
    [
        ("def table(spec): pass", set()),
        ("def gain_in_words(gain): pass", {("verdicts.a", "gain_in_words")}),
        ("class Board:\n    def as_sheet(self): pass", {("verdicts.a", "as_sheet")}),
        (
            "def f():\n    from ..reporting import grids",
            {("verdicts.a", "reporting"), ("verdicts.a", "reporting.grids")},
        ),
    ],
)
def test_a_verdict_that_prints_is_found(tmp_path, code, found):
    pages = {"00_verdicts/00_a.ipynb": "verdicts.a", "01_reporting/00_g.ipynb": "reporting.g"}
    assert printers(house(tmp_path, pages, {"verdicts/a.py": code})) == found


@pytest.mark.parametrize(
    "a, b, found",
    [
        ("from .b import x", "", set()),
        ("from .b import x", "def f():\n    from fedrepro.core import a", {"core.a", "core.b"}),
        ("def f(): from . import b", "from .a import x", {"core.a", "core.b"}),
    ],
)
def test_a_circle_is_found(tmp_path, a, b, found):
    assert (
        set(circle(house(tmp_path, USUAL, {"core/a.py": a, "core/b.py": b, "data/c.py": ""})))
        == found
    )


@pytest.mark.parametrize(
    "pages, modules, said",
    [
        ({}, {}, []),
        ({"03_x.ipynb": None}, {}, ["03_x.ipynb: a page in no folder"]),
        ({"00_core/01_d.ipynb": None}, {}, ["00_core/01_d.ipynb: expected number 02"]),
        (
            {"01_data/01_d.ipynb": "core.d"},
            {"core/d.py": ""},
            ["01_data/01_d.ipynb: exports core.d"],
        ),
        ({}, {"core/lonely.py": ""}, ["core.lonely: exported by no page"]),
        ({}, {"more/__init__.py": ""}, ["fedrepro/more: no folder in nbs/"]),
        ({"01_core/00_e.ipynb": "core.e"}, {"core/e.py": ""}, ["nbs/01_data: expected number 02"]),
        ({"02_models/00_f.ipynb": None}, {}, ["02_models: no package of that name"]),
        (
            {"01_data/00_a.ipynb": "data.a"},
            {"data/a.py": ""},
            ["01_data/00_c.ipynb: expected number 01", "00_a: the name of 2 pages"],
        ),
        ({f"00_core/{i:02}_p.ipynb": None for i in range(2, 20)}, {}, ["00_core: 20 pages"]),
    ],
)
def test_a_misplaced_page_is_found(tmp_path, pages, modules, said):
    usual = {
        "__init__.py": "",
        "core/__init__.py": "",
        "core/a.py": "",
        "core/b.py": "",
        "data/c.py": "",
    }
    assert misplaced(house(tmp_path, USUAL | pages, usual | modules)) == said


def test_a_name_of_two_things_is_found(tmp_path):
    x = "__all__ = ['x', 'y']"
    tree = house(
        tmp_path,
        USUAL,
        {"core/a.py": x, "core/b.py": "__all__ = ['x']", "data/c.py": "__all__ = ['y']"},
    )
    assert shared(tree) == (
        {"x": ["core.a", "core.b"]},
        {"x": ["core.a", "core.b"], "y": ["core.a", "data.c"]},
    )


# --- what was stored stays what it was


def planned():
    "The run ids of all specs at all tiers, those of more seeds that papers/order.toml asks for among them"
    specs = {name: load_spec(path) for name, path in find_specs(ROOT / "papers").items()}
    steps = read_order(ROOT / "papers/order.toml", specs)
    tiers = {tier for spec in specs.values() for tier in spec.tiers}
    parts = [part for tier in tiers for step in plan_steps(steps, specs, tier) for part in step]
    return {run.run_id for part in parts for run in part.runs}


def strays(files, ids):
    return {
        run for f in files if (run := re.search(r"([0-9a-f]{16})\.jsonl$", f.name)[1]) not in ids
    }


def test_every_stored_result_is_one_of_a_planned_run(tmp_path):
    files = sorted((ROOT / "papers").glob("*/results/*/*.jsonl"))
    ids = planned()
    assert len(files) > 300
    assert not strays(files, ids)
    assert strays([*files, tmp_path / "FedAvg-digits-4c-s0-0123456789abcdef.jsonl"], ids) == {
        "0123456789abcdef"
    }


# --- the facade


def test_every_name_of_the_facade_is_its_modules_own():
    assert set(fedrepro._HOME) | {"__version__"} == set(fedrepro.__all__)
    assert len(fedrepro.__all__) == len(set(fedrepro.__all__)) < 30
    for name, home in fedrepro._HOME.items():
        assert name in public(ROOT / "fedrepro" / f"{home.replace('.', '/')}.py"), (
            f"{name} is no public name of {home}"
        )
        assert getattr(fedrepro, name) is getattr(sys.modules[f"fedrepro.{home}"], name)
    with pytest.raises(AttributeError, match="has no attribute 'FedAvgg'"):
        fedrepro.FedAvgg


def test_the_facade_is_typed_as_it_loads():
    "What a type checker reads is what `__getattr__` does"
    block = next(
        n
        for n in ast.parse((ROOT / "fedrepro/__init__.py").read_text()).body
        if isinstance(n, ast.If)
    )
    said = {a.name: n.module for n in block.body for a in n.names if a.asname == a.name}
    assert said == fedrepro._HOME


def test_the_facade_loads_nothing_until_it_is_used():
    "No module of the package but itself, and none of the large libraries: what an import costs, without a clock"
    code = "import sys, fedrepro; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert [name for name in loaded if name.startswith("fedrepro")] == ["fedrepro"]
    assert not {"torch", "pandas", "numpy", "scipy", "typer", "rich"} & set(loaded)
