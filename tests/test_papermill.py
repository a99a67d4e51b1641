"""Parameters that papermill passes to a method's page are checked before anything is computed."""
from pathlib import Path
import nbformat
import papermill
import pytest

NBS = Path(__file__).parents[1] / "nbs"


@pytest.mark.parametrize("page, parameters, said", [
    ("14_fedccfa", {"spec": "papers/fedccfa/table2.toml", "tier": "smok"}, "tier 'smok' is unknown; did you mean 'smoke'? accepted: paper, small, smoke"),
    ("14_fedccfa", {"spec": "papers/fedccfa/table2.toml", "seeds": "two"}, "parameter seeds = 'two': expected a whole number"),
    ("10_lfd", {"spec": ["a", "b\nc"] * 99}, "parameter spec = ['a', 'b\\nc', 'a'"),
    ("12_fedadc", {"spec": "fedccfa/table2", "data": "~nosuch/data"}, "parameter data = '~nosuch/data': there is no such user"),
])
def test_a_wrong_parameter_stops_in_the_first_cell(tmp_path, page, parameters, said):
    page, out = next(NBS.rglob(f"{page}.ipynb")), tmp_path / "out.ipynb"
    with pytest.raises(papermill.PapermillExecutionError) as stopped:
        papermill.execute_notebook(page, out, parameters, cwd=NBS, progress_bar=False)
    assert stopped.value.ename == "InputError" and said in stopped.value.evalue and stopped.value.evalue.isprintable()
    cells = [c for c in nbformat.read(out, 4).cells if c.cell_type == "code"]
    checked = next(i for i, c in enumerate(cells) if "planned_table(spec=" in c.source)
    assert cells[checked].execution_count and not any(c.execution_count for c in cells[checked + 1:])
