"The notebooks as tests read them, without the package"

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notebooks(folder: str) -> list[Path]:
    "The notebooks below a folder of the repository"
    return sorted(
        p for p in (ROOT / folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
    )


NOTEBOOKS = notebooks("nbs")


def cells(path: Path, kind: str = "") -> list[dict]:
    "The cells of a notebook, of one kind or all, sources joined; a markdown file is one cell"
    if path.suffix == ".md":
        return [{"cell_type": "markdown", "source": path.read_text()}]
    found = json.loads(path.read_text())["cells"]
    return [
        {**cell, "source": "".join(cell["source"])}
        for cell in found
        if kind in ("", cell["cell_type"])
    ]
