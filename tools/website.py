"""The documentation site, rendered by quarto: `python tools/website.py FOLDER`."""

import ast
import importlib  # noqa: TID251
import inspect
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import yaml
from fastcore.docments import MarkdownRenderer

ROOT = Path(__file__).resolve().parent.parent
JUNK = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".last_checked")
REPO = re.search("^git_url = (.+)$", (ROOT / "settings.ini").read_text(), re.M)[1]
INSTALL = f"%pip install -q git+{REPO}"
BOOTSTRAP = (
    f"from importlib.util import find_spec\nif find_spec('fedrepro') is None:\n    {INSTALL}"
)


def do(*command, folder: Path):
    "Run a command that must succeed"
    subprocess.run(
        command,
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "1"},
    )


def outward(text: str, page: str) -> str:
    "Links of a page in nbs/ to files of the repository that are not in nbs/, as addresses"

    def absolute(found):
        path = posixpath.normpath(posixpath.join("nbs", posixpath.dirname(page), found[1]))
        inside = path.startswith("nbs/") or path.startswith("..")
        return found[0] if inside else f"]({REPO}/blob/main/{path}{found[2] or ''})"

    return re.sub(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)", absolute, text)


def folded_imports(cell) -> str:
    "The source of a cell, folded if it imports and prints nothing"
    try:
        body = ast.parse(cell.source).body
    except SyntaxError:
        return cell.source
    imports = (ast.Import, ast.ImportFrom)
    only = (
        body
        and isinstance(body[0], imports)
        and all(isinstance(line, (*imports, ast.Expr)) for line in body)
    )
    fold = only and not cell.outputs and "#|" not in cell.source
    return f"#| code-fold: true\n#| code-summary: imports\n{cell.source}" if fold else cell.source


def described(cell) -> str:
    "The source of a cell whose pictures carry their own descriptions, as quarto takes them: one for each output"
    words = [
        out.get("metadata", {}).get("image/png", {}).get("alt", "")
        for out in cell.get("outputs", [])
    ]
    return (
        f"#| fig-alt: {json.dumps(words, ensure_ascii=False)}\n{cell.source}"
        if any(words)
        else cell.source
    )


def dressed(nb, page: str):
    "A page as the site shows it: links that hold there, imports folded, where to run it; HTML as Markdown, without scripts"
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = outward(cell.source, page)
        if cell.cell_type == "code":
            cell.source = folded_imports(cell)
            cell.source = described(cell)
        for data in (out.get("data", {}) for out in cell.get("outputs", [])):
            if "text/html" in data:
                data["text/markdown"] = f"```{{=html}}\n{data.pop('text/html')}\n```"
            elif "text/markdown" in data:
                data["text/markdown"] = outward(data["text/markdown"], page)
    colab = REPO.replace("github.com", "colab.research.google.com/github", 1)
    nb.cells.insert(
        1,
        nbformat.v4.new_markdown_cell(
            f"::: {{.page-links}}\n[Open in Colab]({colab}/blob/main/nbs/{page}) (run `{INSTALL}` there first) · "
            f'<a href="{"../" * page.count("/")}notebooks/{page}" download>Download the notebook</a>\n:::'
        ),
    )
    return nb


def prepare(folder: Path) -> Path:
    "The pages as quarto gets them, in `folder`/_proc: processed by nbdev, dressed, and the API's pages"
    for name in ("nbs", "fedrepro"):
        shutil.copytree(ROOT / name, folder / name, ignore=JUNK)
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml"):
        shutil.copy(ROOT / name, folder)
    do(
        sys.executable,
        "-c",
        "from nbdev.serve import proc_nbs; proc_nbs(n_workers=2)",
        folder=folder,
    )
    for path in sorted((folder / "_proc").rglob("*.ipynb")):
        page = path.relative_to(folder / "_proc").as_posix()
        nbformat.write(dressed(nbformat.read(path, as_version=4), page), path)
    reference(folder / "_proc")
    return folder / "_proc"


def entries(module) -> dict:
    "name -> public function, class or method that a module defines, in the order of its source"
    own = {
        n: o
        for n, o in vars(module).items()
        if n in module.__all__ and getattr(o, "__module__", "") == module.__name__
    }
    own |= {
        f"{n}.{m}": f
        for n, o in own.items()
        if inspect.isclass(o)
        for m, f in vars(o).items()
        if not m.startswith("_")
        and inspect.isfunction(f)
        and f.__module__ == module.__name__
        and f.__doc__
    }
    lines = {
        n: inspect.getsourcelines(o)[1]
        for n, o in own.items()
        if inspect.isclass(o) or inspect.isfunction(o)
    }
    return {n: (own[n], lines[n]) for n in sorted(lines, key=lines.get)}


def rendered(obj) -> str:
    "The signature of an object and its docstring, whose asterisks are asterisks; without one the signature alone"
    page = MarkdownRenderer(obj)
    docs = inspect.getdoc(obj) if obj.__doc__ else ""
    page.docs = re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", docs)
    return re.sub(" object at 0x[0-9a-f]+", "", page._repr_markdown_())


def reference(pages: Path):
    "Writes 13_reference/api/MODULE.qmd for every module in the index of the API, and leads the index there"
    index = pages / "13_reference/02_api.ipynb"
    source = rf"{re.escape(REPO)}/blob/main/fedrepro/([\w/]+)\.py"
    (pages / "13_reference/api").mkdir()
    for path in dict.fromkeys(re.findall(rf"\]\({source}\)", index.read_text())):
        name = "fedrepro." + path.replace("/", ".")
        module = importlib.import_module(name)  # noqa: TID251 a module of our own index
        file = f"{REPO}/blob/main/fedrepro/{path}.py"
        parts = [
            f"---\ntitle: {path.replace('/', '.')}\ndescription: '{module.__doc__.replace(chr(39), 2 * chr(39))}'\nsidebar: reference\n"
            "repo-actions: false\n---",  # the page is in no repository; the module is, and is linked below
            f"[All modules](../02_api.ipynb) · [source]({file})",
        ]
        for name, (obj, line) in entries(module).items():
            parts.append(
                f"##{'#' * name.count('.')} {name} {{#{name}}}\n\n[source]({file}#L{line})\n\n{rendered(obj)}"
            )
        (pages / f"13_reference/api/{path.replace('/', '.')}.qmd").write_text(
            "\n\n".join(parts) + "\n"
        )
    index.write_text(
        re.sub(
            rf"\]\({source}\)", lambda m: f"](api/{m[1].replace('/', '.')}.qmd)", index.read_text()
        )
    )


def is_api(href: str) -> bool:
    "Whether an address of the site is that of a module's page"
    return "13_reference/api/" in href


def sorted_search(items: list[dict]) -> list[dict]:
    """The entries of quarto's search index, those of modules last and with their first lines alone.

    A lesson says more about a word than a signature does. The line that says where to run a page is in none."""
    found = []
    for item in sorted(items, key=lambda item: is_api(item["href"])):
        text = re.sub(
            r"Open in Colab \(run .*? there first\) · Download the notebook", "", item["text"]
        )
        found.append(item | {"text": text[:200] if is_api(item["href"]) else text})
    return found


def sidebar_pages(contents: list) -> list[str]:
    "The pages of a sidebar, from top to bottom"
    found = []
    for entry in contents:
        if isinstance(entry, str):
            found.append(entry)
        elif "href" in entry:
            found.append(entry["href"])
        else:
            found += sidebar_pages(entry["contents"])
    return found


def llms(config: dict, notebooks: Path, modules: list[str]) -> str:
    "llms.txt: the pages by sidebar, each with its title and what it says of itself, then the modules of the API"
    site = config["website"]
    lines = []
    for bar in site["sidebar"]:
        lines.append(f"\n## {bar['title']}\n")
        for page in sidebar_pages(bar["contents"]):
            first = nbformat.read(notebooks / page, as_version=4).cells[0].source
            title, about = re.match(r"# (.+)\s*>?\s*(.*)", first).groups()
            folder, _, name = page.removesuffix(".ipynb").rpartition("/")
            place = posixpath.join(folder, re.sub(r"^\d+\w?_", "", name))  # as nbdev names it
            address = f"{site['site-url']}/{place}.html"
            lines.append(f"- [{title}]({address}): {about}")
    lines.append("\n## API\n")
    for module in modules:
        lines.append(f"- [{module}]({site['site-url']}/13_reference/api/{module}.html)")
    return f"# {site['title']}\n\n> {site['description']}\n" + "\n".join(lines) + "\n"


def build(folder: Path) -> Path:
    "Renders the site in the empty `folder`; where its pages are. Each is there as a notebook that installs the package"
    do("quarto", "render", "--no-cache", folder=prepare(folder))
    index = folder / "_proc/_docs/search.json"
    index.write_text(json.dumps(sorted_search(json.loads(index.read_text())), ensure_ascii=False))
    modules = [path.stem for path in sorted((folder / "_proc/13_reference/api").glob("*.qmd"))]
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    (folder / "_proc/_docs/llms.txt").write_text(llms(config, ROOT / "nbs", modules))
    for path in (folder / "nbs").rglob("*.ipynb"):
        nb = nbformat.read(path, as_version=4)
        to = folder / "_proc/_docs/notebooks" / path.relative_to(folder / "nbs")
        nb.cells.insert(1, nbformat.v4.new_code_cell(BOOTSTRAP, id="bootstrap"))
        to.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, to)
    return folder / "_proc/_docs"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not shutil.which("quarto"):
        print(
            "the site is rendered by quarto, which is not on the path: install it from https://quarto.org",
            file=sys.stderr,
        )
        sys.exit(2)
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(build(Path(work)), sys.argv[1], dirs_exist_ok=True)
