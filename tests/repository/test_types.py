"The types that `py.typed` promises: mypy finds nothing wrong in the package (settings in pyproject.toml)"

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def mypy(*arguments, cwd=ROOT):
    "mypy's verdict; its cache is kept from one run to the next, so that torch is read once"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        *arguments,
    ]
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_every_module_is_checked():
    "No module is left out, by the settings or by itself; what is ignored in a line names the error"
    for part in SETTINGS["overrides"]:
        assert part.keys() == {"module", "ignore_missing_imports"}, part
        assert not [
            name for name in part["module"] if name.startswith("fedrepro") or name == "*"
        ], part
    assert SETTINGS["packages"] == ["fedrepro"]
    assert SETTINGS["check_untyped_defs"]
    assert "exclude" not in SETTINGS
    assert SETTINGS["disable_error_code"] == ["var-annotated"]
    assert (ROOT / "fedrepro/py.typed").exists()
    for file in (ROOT / "fedrepro").rglob("*.py"):
        assert not re.search(
            r"type: ignore(?!\[)|# *mypy:|no_type_check", file.read_text(encoding="utf-8")
        ), file


def test_the_package_has_no_type_error():
    "Pays for reading torch, where there is no cache"
    found = mypy()
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_user_is_told(tmp_path):
    "The types arrive in the code of others: the first line is right, the two others are not"
    (tmp_path / "mine.py").write_text(
        "from fedrepro.data.datasets import load; from fedrepro.engine.method import FedAvg; from fedrepro.engine.rounds import run\n"
        "load('digits').fingerprint.upper()\nload('digits').train_z\nrun(FedAvg(lr='0.1'), 1, 2)\n"
    )
    found = mypy(
        "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "mine.py"), cwd=tmp_path
    ).stdout
    assert 'mine.py:3: error: "Dataset" has no attribute "train_z"' in found
    assert '"FedAvg" has incompatible type "str"' in found
    assert "mine.py:2" not in found
