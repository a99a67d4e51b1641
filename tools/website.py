"""The documentation site, rendered by quarto: `python tools/website.py FOLDER`."""
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
JUNK = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".last_checked")


def do(*command, folder: Path, **how) -> str:
    "What a command prints; raises RuntimeError with what it says if it fails"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "1"}, **how)
    if done.returncode: raise RuntimeError(f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def outward(text: str, page: str) -> str:
    "Links of a page in nbs/ to files of the repository that are not in nbs/, as addresses"
    address = re.search("^git_url = (.+)$", (ROOT / "settings.ini").read_text(), re.M)[1] + "/blob/main"
    def absolute(found):
        path = posixpath.normpath(posixpath.join("nbs", posixpath.dirname(page), found[1]))
        inside = path.startswith("nbs/") or path.startswith("..")
        return found[0] if inside else f"]({address}/{path}{found[2] or ''})"
    return re.sub(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)", absolute, text)


def prepare(folder: Path) -> Path:
    "The pages as nbdev hands them to quarto, in `folder`/_proc, with links that hold outside of the repository"
    for name in ("nbs", "fedrepro"): shutil.copytree(ROOT / name, folder / name, ignore=JUNK)
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml"): shutil.copy(ROOT / name, folder)
    do(sys.executable, "-c", "from nbdev.serve import proc_nbs; proc_nbs(n_workers=2)", folder=folder)
    for path in sorted((folder / "_proc").rglob("*.ipynb")):
        page, nb = path.relative_to(folder / "_proc").as_posix(), nbformat.read(path, as_version=4)
        for cell in nb.cells:
            if cell.cell_type == "markdown": cell.source = outward(cell.source, page)
            for out in cell.get("outputs", []):
                if "text/markdown" in out.get("data", {}):
                    out.data["text/markdown"] = outward(out.data["text/markdown"], page)
        nbformat.write(nb, path)
    return folder / "_proc"


def build(folder: Path) -> Path:
    "Renders the site in the empty `folder`; where its pages are"
    do("quarto", "render", "--no-cache", folder=prepare(folder))
    return folder / "_proc/_docs"


if __name__ == "__main__":
    if len(sys.argv) != 2: sys.exit(__doc__)
    if not shutil.which("quarto"):
        print("the site is rendered by quarto, which is not on the path: install it from https://quarto.org", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(build(Path(work)), sys.argv[1], dirs_exist_ok=True)
