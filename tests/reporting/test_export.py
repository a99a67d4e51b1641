"What leaves the project: tidy rows that are read back as they were, and LaTeX in which every brace and column closes"

import io
import math
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toy import ODD_NAMES, TOY, installed, put, stored, written

from fedrepro.core.errors import InputError
from fedrepro.engine.rows import METRICS, Metric
from fedrepro.experiments import store
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.export import (
    EXPORTS,
    MARKS,
    as_csv,
    best,
    escape,
    export,
    format_of_file,
    latex,
    tidy,
)
from fedrepro.reporting.notebook import result
from fedrepro.verdicts.tables import table
from fedrepro.verdicts.verdicts import VERDICTS

PUBLISHED = "method,clients,mean,std\nFedAvg,20,70.0,0.6\nFedProx,20,75.0,\nMOON,20,60.0,1.0\nFedAvg,100,60.0,0.5\n"


@pytest.fixture
def spec(tmp_path):
    spec = load_spec(written(tmp_path, ODD_NAMES, "demo/t_1", PUBLISHED))

    def fill(tier, row, column, values):
        rounds = 12 if tier == "paper" else 3
        put(
            spec,
            tier,
            row,
            [v and ([v - 3, v + 1] + [v] * 10)[:rounds] for v in values],
            column,
            bytes_up=10,
        )

    for tier in ("paper", "smoke"):
        fill(tier, "FedAvg", "digits, 3 clients", [70.2, 70.4, 70.6])
        fill(tier, "prox_&_%", "digits, 3 clients", [70.41, 70.39])
        fill(tier, "MOON", "digits, 3 clients", [60.0, None])
        fill(tier, "FedAvg", "digits, 4 clients", [10.0, 10.0])
    return spec


# --- rows


def test_csv_is_what_is_stored(spec):
    frame = pd.read_csv(io.BytesIO(as_csv(spec, "paper")))
    assert len(frame) == 12 * (3 + 2 + 1 + 2) + 1
    assert set(frame["table"]) == {"demo/t_1"}
    assert set(frame.tier) == {"paper"}
    for (row, column, seed), run in frame.groupby(["row", "column", "seed"]):
        (planned,) = [
            r for r in spec.runs("paper") if (r.row, r.column, r.seed) == (row, column, seed)
        ]
        head, rows = store.read(store.run_path(spec.results, planned))
        assert list(run.generalised_accuracy) == [r["generalised_accuracy"] for r in rows]
        assert list(run["round"]) == [r["round"] for r in rows]
        assert set(run.run_id) == {planned.run_id}
        assert set(run.status) == {head["status"]}
        assert set(run.clients) == {planned.settings["partition"]["clients"]}
    assert result(spec.path, "paper").frame.equals(tidy(spec, "paper"))


def test_parquet_keeps_values_and_types(spec, tmp_path):
    "pyarrow is in the extra `export`; where the developers' extra has it, it must be there"
    if not installed("pyarrow", "export"):
        pytest.skip("pyarrow is not installed: pip install 'fedrepro[export]'")
    file = export(spec, "paper", "parquet", tmp_path / "x/rows.parquet")
    assert file.read_bytes()[:4] == b"PAR1"
    assert format_of_file(file) == "parquet"
    with pytest.raises(InputError, match="ends in .parquet for --to csv"):
        export(spec, "paper", "csv", file)
    back = pd.read_parquet(file)
    pd.testing.assert_frame_equal(back, tidy(spec, "paper"), check_dtype=False)
    assert [k.kind for k in back.dtypes] == [k.kind for k in tidy(spec, "paper").dtypes]


def test_without_pyarrow_one_line_names_the_extra(spec, monkeypatch, tmp_path, refused):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(
        [
            "export",
            spec.path,
            "--tier",
            "paper",
            "--to",
            "parquet",
            "--out",
            tmp_path / "x.parquet",
        ],
        "fedrepro[export]",
    )
    assert not (tmp_path / "x.parquet").exists()


# --- LaTeX


def structure(text: str) -> list[list[list[str]]]:
    "The cells of every tabular of a document, after checking that it is closed and that each line fills its columns"
    depth = 0
    for c in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(c, 0)
        assert depth >= 0
    assert depth == 0
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    open_ = []
    found = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_.append(name)
        else:
            assert open_.pop() == name
    assert not open_
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.S
    ):
        lines = [
            re.split(r"(?<!\\)&", line)
            for line in re.sub(r"\\(toprule|midrule|bottomrule)", "", body).split(r"\\")
        ]
        lines = [[c.strip() for c in line] for line in lines if "".join(line).strip()]
        widths = [
            sum(int((re.match(r"\\multicolumn\{(\d+)\}", c) or [0, 1])[1]) for c in line)
            for line in lines
        ]
        assert set(widths) == {len(columns)}
        found.append(lines)
    return found


def test_the_table(spec):
    text = latex(spec, "paper")
    first, second = structure(text)
    cells = {line[0]: line[1:] for line in first[2:]}
    # the third has nothing published
    assert first[1] == ["", "ours", "published", "ours", "published"]
    assert len(second[1]) == 4
    assert cells["FedAvg"] == [
        r"\textbf{70.40} $\pm$ 0.20$^{\approx}$",
        r"70.00 $\pm$ 0.60",
        r"\textbf{10.00} $\pm$ 0.00$^{\neq}$",
        r"\textbf{60.00} $\pm$ 0.50",
    ]
    assert cells[r"prox\_\&\_\%"][:2] == [
        r"\textbf{70.40} $\pm$ 0.01$^{\neq}$",
        r"\textbf{75.00}",
    ], "equal as printed: both are the best"
    assert cells["MOON"] == ["diverged (1 of 2)", r"60.00 $\pm$ 1.00", "--", "--"]
    assert (
        "100\\% of a\\_b \\& $<$c$>$ \\#1 \\{x\\} \\textasciitilde{}\\textasciicircum{} $\\pm$ $\\lambda$"
        in text
    )
    assert r"$^{\approx}$ consistent" in text
    assert r"$^{\neq}$ contradicted" in text
    assert "reproduced" not in text
    assert "No mean is taken" in text
    assert text.count(r"\caption{") == text.count(r"\label{tab:demo-t-1-paper-") == 2
    assert r"generalised\_accuracy" in text
    assert set(re.findall(r"\\([a-zA-Z]+)", text)) <= set(
        "usepackage begin end centering caption label toprule midrule bottomrule multicolumn textbf pm approx neq lambda textasciitilde textasciicircum".split()
    ), "nothing but LaTeX's own and booktabs"


def test_columns_that_latex_prints_alike_are_refused(tmp_path):
    columns = [
        dict(label=label, clients=n, source="guess: toy")
        for n, label in enumerate(("数据一", "数据二"), 3)
    ]
    of = load_spec(written(tmp_path, TOY | dict(columns=columns)))
    put(of, "paper", "FedAvg", [[50.0, 60.0]])
    with pytest.raises(InputError, match="alike: '数据一' and '数据二'"):
        latex(of, "paper")


@pytest.mark.parametrize("higher", [False, None])
def test_where_more_is_not_better_the_highest_is_not_the_best(higher, tmp_path, monkeypatch):
    "One statistic in LaTeX, as in the printed table; of a loss the csv has no best round"
    loss = Metric("own_loss", higher_is_better=higher, compute=len)
    monkeypatch.setitem(METRICS, "own_loss", loss)
    of = load_spec(written(tmp_path, TOY | dict(metric="own_loss")))
    for run, losses in zip(of.runs("paper", seeds=2), ([3.0, 2.0], [5.0, 4.0])):
        rows = [dict(round=t, own_loss=loss) for t, loss in enumerate(losses, 1)]
        stored(run, rows, of.results)
    (cells,) = structure(latex(of, "paper"))
    assert cells[1:] == [["", "last"], ["FedAvg", r"3.00 $\pm$ 1.41"]]
    assert "Bold" not in latex(of, "paper")
    (line,) = table(of, "paper").itertuples()
    assert (line.last, math.isnan(line.best)) == (3.0, higher is False)


def test_the_highest_is_the_highest_that_is_printed():
    "81.815 is printed 81.81 and 70.405 70.41, as Python's format rounds; NumPy rounds to 81.82 and 70.4"
    frame = pd.DataFrame(dict(row=["a", "b", "c"], metric="generalised_accuracy"))
    assert best(frame.assign(mean=[81.815, 81.82, 81.8]), "mean") == {"b"}
    assert best(frame.assign(mean=[70.405, 70.40, 70.41]), "mean") == {"a", "c"}


def test_only_the_paper_tier_has_marks(spec):
    text = latex(spec, "smoke")
    structure(text)
    assert not any(f"{MARKS[word]}" in text for word in VERDICTS)
    assert "not comparable" in text
    assert "rounds 3 (paper 12)" in text
    assert "$n$ = 2 to 3" in text


def test_no_text_becomes_a_command():
    every = "".join(map(chr, range(32, 0x17F)))
    assert (
        len(re.findall(r"(?<!\\)[{}]", re.sub(r"\\text\w+\{\}|\$[^$]*\$", "", escape(every)))) == 0
    )
    assert escape("\\input{/etc/passwd}") == r"\textbackslash{}input\{/etc/passwd\}"
    assert escape("漢\n") == "??"


# --- the command


def test_the_command(spec, said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["export", spec.path, "--tier", "paper"]
    assert said(*argv) == (0, as_csv(spec, "paper").decode(), "")
    assert said(*argv, "--to", "latex") == (0, latex(spec, "paper"), "")
    code, out, err = said(*argv, "--to", "latex", "--out", "a/b.tex")
    assert (code, out, err) == (0, "a/b.tex\n", "")
    assert Path("a/b.tex").read_text() == latex(spec, "paper")
    for more, word in [
        (["--to", "xlsx"], "csv, latex, parquet"),
        (["--results", "nowhere"], "'nowhere'"),
        (["--results", "."], "no finished run"),
        (["--tier", "big"], "'big'"),
        (["--out", "a/b.tex/c.csv"], "a/b.tex"),
        (["--out", "x.xls"], "x.xls: the file ends in .xls; expected csv: .csv, .txt; parquet"),
        (["--out", "x.parquet", "--to", "csv"], "ends in .parquet for --to csv"),
        (["--out", "x.csv", "--to", "latex"], "ends in .csv for --to latex"),
    ]:
        refused([*argv, *more], word)
    assert not list(Path().glob("x.*"))
    for out, content in [
        ("rows.csv", as_csv(spec, "paper").decode()),
        ("rows", as_csv(spec, "paper").decode()),
        ("rows.TEX", latex(spec, "paper")),
    ]:
        assert said(*argv, "--out", out) == (0, f"{out}\n", "")
        assert Path(out).read_text() == content
    assert set(EXPORTS) == {"csv", "parquet", "latex"}
    assert np.isclose(table(spec, "paper")["mean"].iloc[0], 70.4)
