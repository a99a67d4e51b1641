"""Parameters that papermill passes to a method's page are checked before anything is computed."""

from pathlib import Path

import nbformat
import papermill
import pytest

NBS = Path(__file__).parents[2] / "nbs"


def test_a_wrong_parameter_stops_in_the_first_cell(tmp_path):
    "Pays for a kernel; what else is refused, and that every page asks `planned_table`, is in test_input.py"
    said = "parameter 'sped' is unknown; did you mean 'spec'? accepted: data, device, imports, lessons, methods, "
    page, out = next(NBS.rglob("14_fedccfa.ipynb")), tmp_path / "out.ipynb"
    with pytest.raises(papermill.PapermillExecutionError) as stopped:
        papermill.execute_notebook(
            page, out, {"sped": "papers/fedccfa/table2.toml"}, cwd=NBS, progress_bar=False
        )
    assert (
        stopped.value.ename == "UnknownName"
        and said in stopped.value.evalue
        and stopped.value.evalue.isprintable()
    )
    assert stopped.value.traceback == [f"UnknownName: {stopped.value.evalue}"]  # no frames
    assert len(str(stopped.value).strip().splitlines()) == 3  # two of papermill's before the line
    cells = [c for c in nbformat.read(out, 4).cells if c.cell_type == "code"]
    checked = next(
        i for i, c in enumerate(cells) if "planned_table(spec=" in "".join(c.source.split())
    )
    assert cells[checked].execution_count and not any(
        c.execution_count for c in cells[checked + 1 :]
    )
