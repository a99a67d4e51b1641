"How a table is printed: its shape, its words, and every format"

import html
import io
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fedrepro.core.errors import InputError
from fedrepro.reporting.grids import Cell, as_text
from fedrepro.experiments.specs import load_spec
from fedrepro.experiments.own_settings import with_settings
from fedrepro.reporting.page_text import specs_of
from fedrepro.reporting.paper_page import heading_of
from fedrepro.reporting.printed_tables import (
    LAST_TEN,
    LAST_TWENTY,
    SAME_RUNS,
    ends,
    judged_beside,
    mixed_processors,
    own_settings,
    render,
    row_settings,
    table_parts,
    table_sheet,
    title,
    reduced,
)
from fedrepro.verdicts.tables import table
from toy import SMALL, written
from toy_tables import ONE, diverged, put, spec


def test_the_papers_own_shape(spec):
    "Methods down, columns across, ours above published with a letter; what has no run is folded into a sentence"
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "prox", ONE, [74.0, 74.1, 73.9])
    sheet = table_sheet(table_parts(spec, "paper", table(spec, "paper")))
    main, judged = sheet.grids
    assert main.columns == ["method", ONE]
    assert [row[0] for row in main.rows] == [
        "prox",
        "FedAvg",
        "twin",
    ]
    assert main.rows[1][1] == Cell("70.00 ± 1.00 (3)", "70.00 ± 0.60 C", "fair")
    assert main.rows[0][1].colour == "bad"
    assert judged.rows[0][3].startswith("contradicted, p")
    assert "q" in judged.rows[0][3]
    assert judged.rows[1][3] == "consistent"
    text = " ".join(render(spec, "paper").split())
    for said in [
        "FedCCFA, table 2: A small one",
        "generalised_accuracy: %, mean over all clients",
        "last evaluated round",
        "Tier paper: the published setting",
        "(no loader): CINIC-10, 5 clients",
        "not run yet: digits, 4 clients",
        "rows that the spec does not have: IFCA",
        "1 consistent",
        "95 % prediction interval",
        "X contradicted",
    ]:
        assert said in text, said


def test_a_terminal_of_any_width_gets_whole_numbers(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "FedAvg", "digits, 4 clients", [69, 70, 71])
    sheet = table_sheet(table_parts(spec, "paper", table(spec, "paper")))
    for width in (40, 80, 200):
        text = as_text(sheet, width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("70.00 ± 1.00 (3)") == 2
    assert "\x1b[" in as_text(sheet, 80, colours=True)
    assert "\x1b[" not in text


def test_every_format_says_who_diverged_where(spec, diverged):
    tier, words = diverged
    said = f"seed 1: {words}; seed 2: round 2, client 0, norm inf"
    note = f"diverged: FedAvg, {ONE}, {said}"
    for format in ("text", "md", "html"):
        out = html.unescape(" ".join(render(spec, tier, format).split()))
        assert out.count(note) == 1
        assert out.count("A run has diverged when") == 1
        assert "diverged (2 of 3)" in out
    assert f"\n\n{note}\n\n" in render(spec, tier, "md")  # a paragraph of its own
    csv = pd.read_csv(io.StringIO(render(spec, tier, "csv")), keep_default_na=False).set_index(
        ["column", "row"]
    )
    assert csv.loc[ONE, "FedAvg"].diverged_runs == said
    assert csv.loc[ONE, "FedAvg"]["mean"] == ""


def test_markdown_and_html_are_escaped(spec):
    put(spec, "paper", "prox", ONE, [69, 70, 71])
    changed = replace(spec, rows={"<script>|x": replace(spec.rows["prox"], name="<script>|x")})
    md = render(changed, "paper", "md")
    page = render(changed, "paper", "html")
    assert "| <script>\\|x |" in md
    assert "<script>" not in page
    assert "&lt;script&gt;&#124;x" in page
    rows = [line for line in md.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", r)) for r in rows} == {3, 7}


def test_without_runs_it_says_how_to_make_them(spec):
    assert f"fedrepro run {spec.path} --tier paper" in render(spec, "paper")
    with pytest.raises(InputError, match="'pdf'.*csv, html, md, text"):
        render(spec, "paper", "pdf")
    with pytest.raises(InputError, match="'big'.*paper, smoke"):
        render(spec, "big")


@pytest.mark.parametrize("verb", ["table", "figure"])
def test_the_command_that_is_printed_can_be_typed(tmp_path, said, monkeypatch, verb):
    "From a folder of one's own with a space in its name, with settings, results and a file of one's own"
    folder = written(tmp_path, SMALL, "m y/tab").parent
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDREPRO_METHODS", "")
    Path(f"a {verb}.py").write_text("x = 1\n")
    Path("o ut").mkdir()
    words = ["tab.toml", "--tier", "smoke", "--set", "FedProx.mu=0.5", "--results", "o ut"]
    _, out, err = said(verb, *words, "--import", f"a {verb}.py")
    (line,) = [line for line in (out + err).splitlines() if "fedrepro run " in line]
    assert shlex.split(line.partition("fedrepro run ")[2]) == [
        *words,
        "--import",
        str(folder.resolve() / f"a {verb}.py"),
    ]


@pytest.mark.parametrize("typed", ["{}", "demo/t", "demo/t.toml"])
@pytest.mark.parametrize("command", ["table", "export"])
def test_an_answer_that_is_kept_sees_a_new_result(
    spec, tmp_path, said, monkeypatch, command, typed
):
    "That it is kept, and given without torch: test_main.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    put(spec, "paper", "FedAvg", ONE, [69.0, 70.0])
    for p in spec.path.parent.rglob("*.*"):
        os.utime(p, (1e9, 1e9))
    argv = [command, typed.format(spec.path), "--tier", "paper"]
    argv += ["--to", "latex"] * (command == "export")
    assert said(*argv) == said(*argv)
    assert "69.50" in said(*argv)[1]
    put(spec, "paper", "FedAvg", ONE, [69.0, 70.0, 74.0])
    assert "71.00" in said(*argv)[1]


def test_a_mean_over_the_runs_that_did_not_diverge_is_not_printed(spec):
    put(spec, "paper", "FedAvg", ONE, [69, None, 71])
    assert "diverged (1 of 3)" in render(spec, "paper")


def test_a_run_without_the_metric_is_no_missing_run(spec):
    put(spec, "smoke", "FedAvg", ONE, [math.nan])
    assert "no run yet" not in render(spec, "smoke")
    assert "To run it" not in render(spec, "smoke")


def test_a_dash_for_a_metric_that_was_not_a_number_says_so(spec):
    put(spec, "smoke", "FedAvg", ONE, [math.nan, 70.0])
    put(spec, "smoke", "twin", ONE, [60.0])
    text = " ".join(render(spec, "smoke").split())
    said = "a dash: generalised_accuracy was not a number (NaN): "
    assert said + f"FedAvg, {ONE}, seed 0 (3 of 3 evaluated rounds)" in text
    assert text.count("was not a number") == 1
    assert "twin, " not in text.partition(said)[2].partition("rounds)")[0]


def test_a_reduced_tier_says_what_it_changes_and_judges_nothing(spec):
    put(spec, "smoke", "FedAvg", ONE, [70, 70, 70])
    text = render(spec, "smoke")
    assert "rounds 3 (paper 12)" in text
    assert "not comparable with the published numbers" in text
    assert "reproduced" not in text
    put(spec, "smoke", "prox", ONE, [70])
    both = replace(
        spec,
        rows=spec.rows
        | {"twin": replace(spec.rows["twin"], published=spec.rows["prox"].published)},
    )
    assert "Judged" not in render(both, "smoke")


def test_the_settings_that_are_printed_are_those_of_the_runs(tmp_path):
    source = {"source": "tier: reduced"}
    reduced = {"base": {"rounds": 1} | source, "methods": {"FedProx": {"epochs": 2} | source}}
    toy = load_spec(written(tmp_path, SMALL | {"tiers": {"smoke": reduced}}))
    assert "rounds 1" in own_settings(toy, "smoke")
    assert row_settings(toy, "smoke") == ["FedProx: mu 0.1, epochs 2"]
    of_one, tier = with_settings(toy, "smoke", {"FedProx.mu": 0.3})
    assert row_settings(of_one, tier) == ["FedProx: mu 0.3, epochs 2"]
    of_all, tier = with_settings(toy, "smoke", {"mu": 0.3, "batch_size": 32})
    assert "batch size 32" in own_settings(of_all, tier)
    assert "mu 0.3" in own_settings(of_all, tier)
    assert row_settings(of_all, tier) == ["FedProx: epochs 2"]


def test_a_recipe_that_has_nothing_for_a_data_set_is_called_plain(tmp_path):
    "FedADC uses CIFAR, so its recipe neither crops nor flips the digits"
    changed = SMALL | {"base": SMALL["base"] | {"recipe": "FedADC"}}
    of_paper = load_spec(written(tmp_path, changed, "toy/of_paper"))
    said = own_settings(of_paper, "smoke")
    assert "recipe FedADC," in said and said.endswith(
        "; recipe FedADC has nothing for digits: plain"
    )
    assert "has nothing" not in own_settings(load_spec(written(tmp_path, SMALL, "toy/t")), "smoke")


def test_lists_of_one_length_are_shown_by_their_values():
    "Others by their length; the rounds of a study are four here and in the paper"
    assert "study rounds 2, 5, 10, 20 (paper 10, 50, 100, 200)" in reduced(
        load_spec("fedbss/figure3c"), "small"
    )
    assert "seeds 1 (paper 3)" in reduced(load_spec("fedbss/figure3c"), "small")


def test_processors_that_differ_within_a_cell_are_named():
    frame = pd.DataFrame(
        dict(
            row=["x", "y", "z"],
            column="C",
            seeds=[(0, 1), (0, 1), ()],
            cpus=[("A", "B"), ("A",), ()],
        )
    )
    assert mixed_processors(frame) == ["Processors differ within 1 of 2 cells (A and B): x"]


def test_a_row_with_the_runs_of_another_has_no_letter_of_its_own(spec):
    put(spec, "paper", "prox", ONE, [74.0, 74.1, 73.9])
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    parts = table_parts(spec, "paper", table(spec, "paper"))
    cells = {row[0]: row[1] for row in parts.main.rows}
    assert cells["twin"].below.endswith("= prox")
    assert cells["twin"].colour == ""
    assert cells["FedAvg"].below.endswith(" C")
    assert SAME_RUNS in parts.ends
    alone = table(spec, "paper")
    assert SAME_RUNS not in ends(spec, "paper", alone[alone.row != "twin"])


def test_a_page_has_the_rows_that_are_only_published(spec):
    "IFCA is in the paper and not in the spec; a command shows what is run, or the rows that were asked for"
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    frame = table(spec, "paper")
    page = table_parts(spec, "paper", frame, link=lambda line: "")
    cells = {row[0]: row[1] for row in page.main.rows}
    assert cells["IFCA"] == Cell("–", "50.00 ± 1.00")
    assert [row[0] for row in table_parts(spec, "paper", frame).main.rows] == ["FedAvg"]
    put(spec, "paper", "prox", ONE, [74.0, 74.1, 73.9])
    asked = render(spec, "paper", rows=["FedAvg", "prox"])
    assert "prox" in asked
    assert "twin" not in asked.split("Judged")[0]


def test_the_legend_has_the_words_of_the_columns(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    parts = table_parts(spec, "paper", table(spec, "paper"))
    for name, words in zip(parts.judged.columns[-2:], (LAST_TEN, LAST_TWENTY), strict=True):
        assert words.startswith(f"{name.capitalize()}: ")
        assert words in parts.ends


def test_a_table_of_the_last_ten_rounds_does_not_repeat_its_difference(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    last_ten = replace(spec, statistic="mean_last_10")
    parts = table_parts(last_ten, "paper", table(last_ten, "paper"))
    assert parts.judged.columns[-2:] == ["verdict", "std, last 20"]
    assert LAST_TEN not in parts.ends
    beside = judged_beside(parts.main, parts.judged)
    assert {len(row) for row in beside.rows} == {len(beside.columns)}


def test_what_is_no_table_of_the_paper_is_not_called_one():
    about = load_spec("fedadc/class_covering")
    assert heading_of(about, specs_of("fedadc")) == f"Section IV-E: {about.title}"
    assert title(about).startswith("FedADC, section IV-E: ")
