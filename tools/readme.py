"""README.md is nbs/index.ipynb: `python tools/readme.py` writes it. Needs no quarto."""

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVES = re.compile(r"\A(?:[ \t]*#\|[^\n]*\n?)+")


def shown(cell):
    "The cell as a reader of the page sees it; None when it is hidden"
    if cell.cell_type != "code":
        return cell
    found = DIRECTIVES.match(cell.source)
    said = [line.strip()[2:].strip() for line in found[0].splitlines()] if found else []
    if "hide" in said:
        return None
    cell.source = "" if "echo: false" in said else DIRECTIVES.sub("", cell.source)
    return cell


def from_top(markdown: str) -> str:
    "Relative links of a page in nbs/ as links from the top folder"
    markdown = re.sub(r"(?<=\]\()(?!https?:|#|mailto:|\.\./)", "nbs/", markdown)
    return markdown.replace("](../", "](")


def readme(notebook: Path = ROOT / "nbs/index.ipynb") -> str:
    "The text of README.md, from the notebook and its stored outputs"
    nb = nbformat.read(notebook, as_version=4)
    nb.metadata["language_info"] = {"name": "python"}
    nb.cells = [cell for cell in map(shown, nb.cells) if cell is not None]
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = from_top(cell.source)
        for data in (out.get("data", {}) for out in cell.get("outputs", [])):
            if "text/markdown" in data:
                data["text/markdown"] = from_top(data["text/markdown"])
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"\n```python\n\s*\n?```\n", "\n", text)  # code cells that show only their output
    # badges: pictures of other sites, which a page of ours does not ask for
    text = re.sub(r"<!-- on GitHub: (.*?) -->", r"\1", text)
    notice = "<!-- made from nbs/index.ipynb by tools/readme.py; do not edit -->\n"
    return notice + re.sub(r"[ \t]+\n", "\n", re.sub(r"\n{3,}", "\n\n", text)).strip() + "\n"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme())
