"The nightly look at every table and figure finds what is missing"

from pathlib import Path

import smoke
from fedrepro.experiments.specs import load_spec
from fedrepro.experiments import store

ROOT = Path(__file__).resolve().parents[2]


def test_what_was_not_run_is_named(tmp_path, capsys):
    spec = load_spec("feddc/synthetic", ROOT / "papers")
    runs = spec.runs("smoke", seeds=1)
    assert "no finished run" in smoke.trouble(spec, tmp_path)
    assert smoke.main(tmp_path, [spec.name], 1) == 0
    assert "1 tables and figures, 0 with trouble, 0 runs failed" in capsys.readouterr().out
    store.run_path(tmp_path / "feddc", runs[1]).unlink()
    assert smoke.trouble(spec, tmp_path) == "1 cells have no run"
    assert smoke.main(tmp_path, [spec.name], 1) == 0
    assert smoke.trouble(spec, tmp_path) == ""


def test_a_table_of_differences_is_printed_and_not_drawn(tmp_path):
    table8 = load_spec("fedccfa/table8", ROOT / "papers")
    assert table8.difference
    assert smoke.trouble(table8, tmp_path) == "19 cells have no run"
    assert [file.name for file in tmp_path.iterdir()] == ["fedccfa_table8.txt"]
