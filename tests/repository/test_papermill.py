"""Parameters that papermill passes to a method's page are checked before anything is computed."""

import ast
import builtins
from pathlib import Path

import nbformat
import papermill
import pytest

NBS = Path(__file__).parents[2] / "nbs"


def test_a_wrong_parameter_stops_in_the_first_cell(tmp_path):
    "Pays for a kernel; what else is refused, and that every page asks `planned_table`, is in test_input.py"
    said = "parameter 'sped' is unknown; did you mean 'spec'? accepted: data, device, imports, lessons, methods, "
    page = next(NBS.rglob("14_fedccfa.ipynb"))
    out = tmp_path / "out.ipynb"
    with pytest.raises(papermill.PapermillExecutionError) as stopped:
        papermill.execute_notebook(
            page, out, {"sped": "papers/fedccfa/table2.toml"}, cwd=NBS, progress_bar=False
        )
    assert stopped.value.ename == "UnknownName"
    assert said in stopped.value.evalue
    assert stopped.value.evalue.isprintable()
    assert stopped.value.traceback == [f"UnknownName: {stopped.value.evalue}"]  # no frames
    assert len(str(stopped.value).strip().splitlines()) == 3  # two of papermill's before the line
    cells = [c for c in nbformat.read(out, 4).cells if c.cell_type == "code"]
    checked = next(
        i for i, c in enumerate(cells) if "planned_table(spec=" in "".join(c.source.split())
    )
    assert cells[checked].execution_count
    assert not any(c.execution_count for c in cells[checked + 1 :])


def covered_calls(page):
    "Calls of builtins that a cell covers with a value of its own, as the parameter `set` does"
    covered = set()
    calls = []
    for cell in nbformat.read(page, 4).cells:
        if cell.cell_type != "code" or cell.source.lstrip().startswith("%"):
            continue
        tree = ast.parse(cell.source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in covered:
                    calls.append(ast.unparse(node))
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            covered |= names & set(dir(builtins))
    return calls


@pytest.mark.parametrize("page", sorted(NBS.rglob("[0-9]*.ipynb")), ids=lambda p: p.stem)
def test_no_cell_calls_a_builtin_that_an_earlier_one_covers(page):
    assert covered_calls(page) == []


def test_a_call_of_a_covered_builtin_is_found(tmp_path):
    cells = ["set: dict = {}", "sorted(order) == [1]", "assert set(order) == {1}"]
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(page, tmp_path / "page.ipynb")
    assert covered_calls(tmp_path / "page.ipynb") == ["set(order)"]
