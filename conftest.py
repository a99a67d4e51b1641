"""nbval on notebooks that nbdev has cleaned: `pytest --nbval nbs/06_methods/14_fedccfa.ipynb`; tests that run nightly alone; long files first."""

import os
import re

import pytest

NOT_RUN = re.compile(r"^#\|\s*(eval:\s*false|slow|cuda)\b", re.MULTILINE)
LONG = """runner resume contracts stacks bands leases cluster lab input cli readme release determinism local_study divergence types costs
golden golden_memory figures tables claims""".split()  # files of more than 20 s, the longest first


def pytest_collection_modifyitems(items):
    """Honour nbdev's directives, let cleaned cells (execution count null) have outputs, leave `nightly` to `make nightly`.

    Long files come first, so that the workers of `-n 2 --dist loadfile --no-loadscope-reorder` end together."""

    def rank(item):
        return (
            LONG.index(name)
            if (name := item.path.stem.removeprefix("test_")) in LONG
            else len(LONG)
        )

    items.sort(key=rank)
    for item in items:
        marked = item.get_closest_marker("nightly")
        if marked and os.environ.get("FEDREPRO_NIGHTLY") != "1":
            item.add_marker(pytest.mark.skip(reason=f"make nightly: {marked.args[0]}"))
        cell = getattr(item, "cell", None)
        if cell is None:
            continue
        if NOT_RUN.search(cell.source):
            item.add_marker(pytest.mark.skip(reason="the cell's nbdev directive says so"))
        elif cell.outputs and cell.execution_count is None:
            cell.execution_count = 1
