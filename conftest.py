"""nbval on notebooks that nbdev has cleaned: `pytest --nbval nbs/06_methods/14_fedccfa.ipynb`; tests that run nightly alone; long files first."""

import os

import pytest

# files of more than 20 s, the longest first
LONG = """runner resume contract stacks bands leases cluster lab input main readme release same_bits local_study divergence types plan
golden golden_memory figures tables claims""".split()


def pytest_collection_modifyitems(items):
    """Let cleaned cells (execution count null) have outputs, leave `nightly` to `make nightly`.

    Long files come first, so that the workers of `-n 2 --dist loadfile --no-loadscope-reorder` end together."""

    def rank(item):
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=rank)
    for item in items:
        marked = item.get_closest_marker("nightly")
        if marked and os.environ.get("FEDREPRO_NIGHTLY") != "1":
            item.add_marker(pytest.mark.skip(reason=f"make nightly: {marked.args[0]}"))
        cell = getattr(item, "cell", None)
        if cell is None:
            continue
        if cell.outputs and cell.execution_count is None:
            cell.execution_count = 1
