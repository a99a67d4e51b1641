"What a release is: an sdist and a wheel that work without the repository, old results, the citation, the hooks"

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import fedrepro
from fedrepro.core import folders
from fedrepro.experiments import specs, store
from fedrepro.reporting.notebook import read_ledger
from test_repository import tracked

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
QUIET = {
    **os.environ,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_REQUIRE_VIRTUALENV": "1",
    "OMP_NUM_THREADS": "1",
}


def done(*command, cwd, **environment):
    "The output of a command that succeeds"
    ran = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, env=QUIET | environment
    )
    assert ran.returncode == 0, f"{command}: {ran.stdout[-3000:]}{ran.stderr[-3000:]}"
    return ran.stdout


def known_to_git() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in tracked()]


def copied(names, folder: Path) -> Path:
    "A copy of these files of the repository"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


# --- sdist and wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "(sdist, the wheel made from it, the wheel made from the tree)"
    tree = copied(
        [n for n in known_to_git() if not n.startswith("tests/")], tmp_path_factory.mktemp("tree")
    )
    first = tree / "dist"
    second = tree / "direct"
    done(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        first,
        cwd=tree,
    )
    done(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--wheel",
        "--outdir",
        second,
        cwd=tree,
    )
    return *first.glob("*.tar.gz"), *first.glob("*.whl"), *second.glob("*.whl")


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def expected() -> set[str]:
    "What a wheel must hold: modules, specs, published numbers, ledgers, committed results, a template, the papers' pages and a guide"
    names = [n for n in known_to_git() if n.startswith("fedrepro/") and n != "fedrepro/_modidx.py"]
    data = r"papers/([a-z]+/)?[^/]+\.(toml|csv)|papers/answers\.json|papers/new_method\.py|papers/[a-z]+/results/[a-z]+/[^/]+\.jsonl"
    pages = r"nbs/06_methods/1[0-4]_[^/]+\.ipynb"
    carried = [
        n
        for n in known_to_git()
        if re.fullmatch(rf"{data}|{pages}|nbs/00_guides/01_your_method\.ipynb", n)
    ]
    return {*names, *(f"fedrepro/{n}" for n in carried)}


def stored(wheel):
    "Bytes of the committed results in a wheel, which grow with every sweep, and of their entries: 76 bytes and twice the name"
    with zipfile.ZipFile(wheel) as files:
        found = [f for f in files.infolist() if "/results/" in f.filename]
    return sum(f.compress_size + 76 + 2 * len(f.filename) for f in found)


def test_the_wheel_holds_what_it_needs_and_nothing_else(built):
    files = content(built[1])
    mine = {name for name in files if ".dist-info/" not in name}
    assert mine == expected()
    for name in (
        "py.typed",
        "papers/order.toml",
        "papers/claims.csv",
        "papers/fedccfa/table2.toml",
        "papers/lfd/deviations.toml",
        "papers/fedccfa/table2.published.csv",
        "papers/fedccfa/_base.toml",
        "nbs/06_methods/14_fedccfa.ipynb",
        "methods/fedccfa.py",
    ):
        assert f"fedrepro/{name}" in mine
    large = {name: len(text) for name, text in files.items() if len(text) >= 500_000}
    assert all("/results/" in name and size < 1_000_000 for name, size in large.items())
    assert built[1].stat().st_size - stored(built[1]) < 2_000_000
    for name in mine:
        assert (
            files[name] == (ROOT / re.sub("^fedrepro/(?=papers/|nbs/)", "", name)).read_bytes()
        ), name


def test_the_sdist_makes_the_same_wheel(built):
    assert content(built[1]) == content(built[2])
    with tarfile.open(built[0]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert names >= {
        "pyproject.toml",
        "tools/wheel.py",
        "LICENSE",
        "CITATION.cff",
        "constraints.txt",
        "papers/fedccfa/table2.toml",
    }
    assert not [n for n in names if re.search(r"(^|/)(tests|out|_modidx\.py|\.\w[^/]*)(/|$)", n)]
    assert built[0].stat().st_size - stored(built[1]) < 2_000_000


# --- where the repository is not

DEMO = r"""
import json, os, sys, matplotlib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
import torch
torch.set_num_threads(1)
matplotlib.use("Agg")
import fedrepro
from fedrepro.cli.main import main
from fedrepro.core.folders import find_specs, roots
from fedrepro.experiments.specs import load_spec
from fedrepro.cli.own import copy_page
from fedrepro.reporting.notebook import planned_table, read_ledger
from fedrepro.experiments.store import provenance

def said(*arguments):
    with redirect_stdout(StringIO()) as out: code = main([*arguments])
    return [code, out.getvalue()]

few = ["--tier", "smoke"]
found = {
    "run": said("run", "fedccfa/table2", *few, "--methods", "FedAvg,FedProx", "--seeds", "1", "--workers", "1", "--device", "cpu", "--quiet"),
    "table": said("table", "papers/fedccfa/table2.toml", *few), "figure": said("figure", "fedccfa/table2", *few),
    "scoreboard": said("scoreboard"), "other": said("table", "lfd/table1", "--tier", "paper"),
    "committed": said("table", "fedccfa/table2"), "guide": said("notebook", "your_method"),
    "specs": len(find_specs()), "results": load_spec("lfd/table1").results.as_posix(), "ledgers": len(read_ledger("feddc")),
    "page": copy_page("14_fedccfa", "mine").as_posix(), "commit": provenance()["git_commit"],
    "job": [r.describe() for r in planned_table("papers/fedccfa/table2.toml", methods="FedAvg", seeds=1).runs],
    "skipped": len(planned_table("fedccfa/table2", methods="FedAvg", seeds=1).run().skipped),
    "package": fedrepro.__file__, "roots": [str(r) for r in roots()],
    "modules": sorted({m.__file__ for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").endswith(".py")}),
    "files": sorted(p.as_posix() for p in Path().rglob("*") if p.is_file())}
Path("said.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def alone(built, tmp_path_factory):
    "(folder of the installed wheel, what the demo said there); the repository is on no path: -S leaves out *.pth files. Pays for its runs"
    other = tmp_path_factory.mktemp("other")
    empty = tmp_path_factory.mktemp("empty")
    package = other / "package"  # within a repository that is not ours
    done("git", "init", "-q", cwd=other)
    done(
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "theirs",
        cwd=other,
    )
    done(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        package,
        built[1],
        cwd=empty,
    )
    before = sorted(package.rglob("*"))
    libraries = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    done(
        sys.executable,
        "-S",
        "-c",
        DEMO,
        cwd=empty,
        CI="1",
        PYTHONPATH=os.pathsep.join([str(package), *libraries]),
    )
    assert sorted(package.rglob("*")) == before, "something was written into the installed package"
    return package, json.loads((empty / "said.json").read_text())


def test_the_demo_runs_without_the_repository(alone):
    package, said = alone
    assert Path(said["package"]) == package / "fedrepro/__init__.py"
    assert not [
        m
        for m in said["modules"]
        if Path(m).is_relative_to(ROOT) and ".venv" not in m and "site-packages" not in m
    ]
    assert not [r for r in said["roots"] if Path(r) == ROOT]
    for command in ("run", "table", "figure", "scoreboard", "other", "committed", "guide"):
        assert said[command][0] == 0, command
    assert "[tier paper]" in said["committed"][1] and re.search(
        r"FedCCFA +\d\d\.\d\d", said["committed"][1]
    ), "runs that the wheel carries"
    assert "01_your_method.ipynb" in said["files"]
    assert " decided" in said["scoreboard"][1]
    for text in (said["run"][1], said["table"][1]):
        assert re.search(r"FedProx .*\d\d\.\d\d", text)
        assert "published" in text.lower()
    assert said["specs"] == len(folders.find_specs(ROOT / "papers"))
    assert said["ledgers"] == len(read_ledger("feddc", ROOT / "papers"))
    assert "1024" in said["scoreboard"][1].replace(",", "")
    assert said["job"] == ["FedAvg on digits, 20 clients, seed 0 (smoke)"]
    assert said["skipped"] == 1


def test_results_of_an_installed_package_lie_in_the_working_folder(alone):
    _, said = alone
    assert said["results"] == "papers/lfd/results"
    assert said["page"] == "mine/14_fedccfa.ipynb"
    kept = [f for f in said["files"] if f.endswith(".jsonl")]
    assert len(kept) == 2
    assert all(f.startswith("papers/fedccfa/results/smoke/Fed") for f in kept)
    assert "out/fedccfa_table2_smoke.png" in said["files"]
    assert said["commit"] is None


def test_results_of_the_repository_lie_beside_the_spec():
    assert not folders.INSTALLED
    assert folders.PACKAGE == ROOT / "fedrepro"
    assert (
        specs.load_spec("fedccfa/table2", ROOT / "papers").results.resolve()
        == ROOT / "papers/fedccfa/results"
    )


# --- upgrading: tests/old holds results as they were written by older versions


def test_results_of_older_versions_are_read(tmp_path, capsys):
    "The first results that were ever committed: version 0.1.0 before its release, format 1"
    shutil.copytree(ROOT / "tests/old/0.1.0", tmp_path / "small")
    frame = store.load_results(tmp_path / "small")
    assert set(frame.run_id) == {"f48d4922777d81f6"}
    assert set(frame.method) == {"FedAvg"}
    assert list(frame["round"]) == list(range(1, 41))
    assert frame.generalised_accuracy.iloc[-1] == 69.661
    assert capsys.readouterr().err == ""


def test_results_of_another_format_are_refused_in_one_line_and_left_alone(tmp_path, capsys):
    shutil.copytree(ROOT / "tests/old/format-0", tmp_path / "small")
    before = {p.name: p.read_bytes() for p in (tmp_path / "small").iterdir()}
    assert not len(store.load_results(tmp_path / "small"))
    line, *others = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"format 0, not {store.RESULT_FORMAT}: written by another version; it is not used"
    )
    assert not others
    assert {p.name: p.read_bytes() for p in (tmp_path / "small").iterdir()} == before


# --- citation


def test_citation():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cff["cff-version"], cff["version"], cff["license"]) == (
        "1.2.0",
        fedrepro.__version__,
        "Apache-2.0",
    )
    assert cff["message"]
    for entry in (cff, *cff["references"]):
        assert entry["title"] and entry["authors"], entry
    assert {paper["abbreviation"] for paper in cff["references"]} == {
        "FedCCFA",
        "FedDC",
        "LfD",
        "FedBSS",
        "FedADC",
    }
    assert {paper["url"] for paper in cff["references"]} <= set(
        re.findall(r"https://arxiv\.org/abs/[\d.]+", (ROOT / "README.md").read_text())
    )


# --- git hooks (what ruff, nbdev and the repository's test find: test_security.py, test_repository.py)

HOOKS = {
    hook["id"]: hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
}


def hooked(name: str, tree: Path, files: list[str]):
    "Run a hook as pre-commit does: its command, and the files of its kind"
    command, *arguments = shlex.split(HOOKS[name]["entry"])
    return subprocess.run(
        [shutil.which(command, path=BIN), *arguments, *files],
        cwd=tree,
        capture_output=True,
        text=True,
        env=QUIET,
    )


def test_the_commands_of_all_hooks_are_there_and_the_tree_is_tidy(tmp_path):
    for hook in HOOKS.values():
        assert hook["language"] == "system" and shutil.which(
            shlex.split(hook["entry"])[0], path=BIN
        ), hook
    names = known_to_git()
    # a hook mends what it finds
    tree = copied([name for name in names if not name.endswith(".png")], tmp_path)
    done("git", "init", "-q", cwd=tree)
    for name in ("ends-of-lines", "line-feeds", "ends-of-files", "merges"):
        ran = hooked(
            name,
            tree,
            [
                str(p.relative_to(tree))
                for p in tree.rglob("*")
                if p.is_file() and ".git" not in p.parts
            ],
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    ran = hooked("sizes", ROOT, names)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    "name, text",
    [
        ("ruff", "print(nothing_of_this_name)\n"),
        ("ends-of-lines", "an end \n"),
        ("line-feeds", "a\r\n"),
        ("ends-of-files", "a,b"),
        ("merges", "<<<<<<< HEAD\n"),
        ("sizes", "x" * 1_024_001),
    ],
)
def test_a_hook_finds_what_it_is_for(name, text, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "wrong.py").write_bytes(text.encode())
    done("git", "init", "-q", cwd=tmp_path)
    ran = hooked(name, tmp_path, ["wrong.py"])
    assert ran.returncode
    assert "wrong.py" in ran.stdout


def test_without_its_papers_there_is_no_wheel(tmp_path):
    tree = copied(
        [
            n
            for n in known_to_git()
            if n.startswith(("fedrepro/", "tools/wheel", "pyproject", "LICENSE", "README"))
        ],
        tmp_path,
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--skip-dependency-check",
            "--wheel",
            ".",
        ],
        cwd=tree,
        capture_output=True,
        text=True,
        env=QUIET,
    )
    assert ran.returncode
    assert "a wheel needs papers/*.toml" in ran.stdout + ran.stderr
