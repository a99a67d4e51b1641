"""nbval on notebooks that nbdev has cleaned: `pytest --nbval nbs/06_methods/14_fedccfa.ipynb`; tests that run nightly alone."""
import os
import re

import pytest

NOT_RUN = re.compile(r"^#\|\s*(eval:\s*false|slow|cuda)\b", re.MULTILINE)


def pytest_collection_modifyitems(items):
    "Honour nbdev's directives, let cleaned cells (execution count null) have outputs, and leave `nightly` to `make nightly`"
    for item in items:
        marked = item.get_closest_marker("nightly")
        if marked and os.environ.get("FEDREPRO_NIGHTLY") != "1": item.add_marker(pytest.mark.skip(reason=f"make nightly: {marked.args[0]}"))
        cell = getattr(item, "cell", None)
        if cell is None: continue
        if NOT_RUN.search(cell.source): item.add_marker(pytest.mark.skip(reason="the cell's nbdev directive says so"))
        elif cell.outputs and cell.execution_count is None: cell.execution_count = 1
