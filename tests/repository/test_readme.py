"Every command of the README and of the guide to reproducing is run: here, or where this file says it is"

import ast
import builtins
import json
import re
import shlex
import shutil

import pytest

from toy import ROOT

# what another place runs, and the text by which that place shows it
ELSEWHERE = {
    r"make test": (".ci/run", "exec make test"),
    r"make demo": ("Makefile", "$(MAKE) --no-print-directory demo OUT=$(OUT)/test"),
    r"(python3 -m venv \.venv && )?\. \.venv/bin/activate": (
        "Makefile",
        "@$(PYTHON) -m venv $(VENV)",
    ),
    r"pip install -c constraints\.txt -e '\.\[dev\]'": (
        "Makefile",
        "-m pip install -qq --no-input -c constraints.txt -e '.[dev]'",
    ),
    r"papermill nbs/06_methods/14_fedccfa\.ipynb .*": (
        "Makefile",
        "$(PAGE) $(OUT)/14_fedccfa_table2_$(TIER).ipynb -p spec $(SPEC) -p tier $(TIER)",
    ),
    r"fedrepro compare FedAvg FedCCFA --alpha 0\.1 --drift sudden": (
        "tests/cli/test_main.py",
        'line.startswith("A minute")',
    ),
    r"jupyter lab nbs": ("tests/repository/test_lab.py", '[BIN / "jupyter", "lab", *options]'),
    r"pip install 'dist/fedrepro-.*\.whl\[run\]'": (
        "tests/repository/test_release.py",
        '"--target",',
    ),
}
# what is run with less to do: the same command and options
LESS = [
    ("data Fashion-MNIST", "data digits"),
    ("--tier small", "--tier smoke"),
    ("--tier paper", "--tier smoke"),
    ("--datasets 'Fashion-MNIST, 100 clients'", "--datasets 'digits, 20 clients'"),
    ("dataset=MNIST", "dataset=digits"),
    ("2h", "1s"),
    ("--rounds 20", "--rounds 2 --clients 4 --seeds 1"),
]


def commands() -> list[str]:
    "Each command in the README's shell blocks, without its comment"
    guide = json.loads((ROOT / "nbs/00_guides/05_reproduce.ipynb").read_text())["cells"]
    told = [
        (ROOT / "README.md").read_text(),
        *("".join(cell["source"]) for cell in guide if cell["cell_type"] == "markdown"),
    ]
    blocks = [
        block for text in told for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    ]
    lines = [re.sub(r"\s#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    found = [
        " ".join(part.split())
        for line in lines
        if not line.startswith("#")
        for part in line.split(";")
        if part.strip()
    ]
    return list(dict.fromkeys(found))


def place(command: str):
    "Where a command is run, if not here"
    return next(
        (where for pattern, where in ELSEWHERE.items() if re.fullmatch(pattern, command)), None
    )


HERE = [c for c in commands() if place(c) is None]


def test_the_list_is_exact():
    assert len(HERE) >= 14
    assert len(HERE) == len(set(HERE))
    assert all(c.startswith("fedrepro ") for c in HERE)
    for pattern in ELSEWHERE:
        assert [c for c in commands() if re.fullmatch(pattern, c)], (
            f"nobody is told {pattern} any more"
        )


@pytest.mark.parametrize("command", [c for c in commands() if place(c)])
def test_it_is_run_elsewhere(command):
    file, text = place(command)
    assert text in (ROOT / file).read_text(), f"{file} no longer runs it"


def parameters(line):
    "Parameter -> value of a line that runs papermill"
    words = shlex.split(line)
    return {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-p"}


def test_papermill_in_the_guide_asks_for_what_the_makefile_asks_for():
    "But for the folder of the results"
    make = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"^\t\$\(BIN\)/papermill .*", make, re.M)
    for name in ("SPEC", "TIER", "METHODS"):
        value = re.search(rf"^{name}\s*:= (\S+)$", make, re.M)[1]
        line = line.replace(f"$({name})", value)
    asked = parameters(line.replace("$(RESULTS)", "out/results").replace("$", ""))
    (told,) = [c for c in commands() if c.startswith("papermill") and "-p results" in c]
    assert parameters(told) == asked
    assert asked["lessons"] == "False"


def test_the_example_imports_all_that_it_uses():
    "What it prints is compared on the index page, where more may be imported than is shown"
    text = "\n".join(
        re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[:2]
    )
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name | ast.alias)]
    used = {n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    given = {
        n.name if isinstance(n, ast.alias) else n.id
        for n in names
        if isinstance(n, ast.alias) or isinstance(n.ctx, ast.Store)
    }
    assert used - given - vars(builtins).keys() == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A folder with the papers, where commands may write"
    here = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "papers", here / "papers", ignore=shutil.ignore_patterns("results"))
    return here


@pytest.mark.parametrize("command", HERE)
def test_it_runs(command, folder, said, monkeypatch):
    monkeypatch.chdir(folder)
    for much, little in LESS:
        command = command.replace(much, little)
    if re.match("fedrepro (run|plan) ", command):
        row = "FedProx" if "FedProx." in command else "FedAvg"  # one that reads what is set
        command += f" --methods {row} --seeds 1"
    code, out, err = said(*shlex.split(command)[1:])
    assert code == 0 and (out + err).strip(), (command, out[-500:], err[-2000:])
