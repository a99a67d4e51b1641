"Verdicts against hand-worked numbers and scipy; tables from result files"

import html
import io
import math
import os
import re
from dataclasses import replace
import pandas as pd
import pytest
import toy
from fedrepro.core.errors import InputError
from fedrepro.core.grids import Cell, as_text
from fedrepro.experiments.specs import load_spec
from fedrepro.verdicts.summaries import seed_values
from fedrepro.verdicts.tables import (
    STATISTIC_WORDS,
    q_values,
    read_published,
    render,
    table,
    table_rows,
    table_sheet,
)
from toy import BASE, TOY, written

GUESS = dict(source="guess: a test")
RAW = TOY | dict(
    title="A small one",
    paper="FedCCFA",
    table="2",
    published="t.published.csv",
    spread="trials",
    trials=3,
    pairing="pooled",
    base={k: v for k, v in BASE.items() if k != "clients"}
    | dict(rounds=12, seeds=[0, 1, 2], drift="sudden", drift_round=1),
    columns=[
        GUESS | dict(clients=3, published=dict(clients=20)),
        GUESS | dict(clients=4, published=dict(clients=100)),
        GUESS | dict(clients=5, published=dict(clients=7), dataset="CINIC-10", missing="no loader"),
    ],
    methods={
        "FedAvg": {},
        "prox": {"class": "FedProx", "published": {"method": "FedProx <b>|"}},
        "twin": {"class": "FedProx"},
    },
    tiers={"smoke": {"base": dict(rounds=3, source="tier: reduced")}},
)
CSV = "method,clients,mean,std\nIFCA,20,50.0,1.0\nFedProx <b>|,20,70.0,\nFedAvg,20,70.0,0.6\nFedAvg,100,60.0,0.5\n"


@pytest.fixture
def spec(tmp_path):
    return load_spec(written(tmp_path, RAW, "demo/t", CSV))


def put(spec, tier, row, column, values):
    "Runs of `row` that end in these values, one a seed; None or a record: diverged"

    def curve(v):
        return (
            v
            if v is None or isinstance(v, dict)
            else ([v - 3, v + 1] + [v] * 10)[: spec.runs(tier)[0].rounds]
        )

    toy.put(spec, tier, row, list(map(curve, values)), column)


ONE = "digits, 3 clients"


@pytest.mark.parametrize(
    "text, word",
    [
        ("method,mean\nA,1\n", "'std' is missing"),
        ("", "cannot be read"),
        ("method,mean,std\nA,x,1\n", "mean 'x' is not"),
    ],
)
def test_damaged_published_numbers(spec, text, word):
    spec.published.write_text(text)
    with pytest.raises(InputError, match=word):
        read_published(spec)


def test_rows_keep_the_published_order_and_lose_nothing(spec):
    rows = table_rows(spec, read_published(spec))
    assert list(rows) == ["IFCA", "prox", "FedAvg", "twin"]
    table2 = load_spec("fedccfa/table2")
    paper = read_published(table2)
    published = list(dict.fromkeys(paper.method))
    assert [r for r in table_rows(table2, paper) if r in published] == published


def test_table(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "prox", ONE, [72.5])
    long = table(spec, "paper").set_index(["column", "row"])
    avg = long.loc[ONE, "FedAvg"]
    assert (avg["mean"], avg["std"], avg.n, avg.difference, avg.verdict) == (
        70.0,
        1.0,
        3,
        0.0,
        "consistent",
    )
    assert (avg["last"], avg.best, avg["values"], avg.seeds) == (
        70.0,
        71.0,
        "69.00 70.00 71.00",
        (0, 1, 2),
    )
    assert math.isclose(avg.mean_last_10, 70.0)
    assert long.loc[ONE, "prox"].verdict == "undecided" and math.isnan(long.loc[ONE, "prox"]["std"])
    assert (
        long.loc[ONE, "IFCA"].verdict
        == long.loc["digits, 4 clients", "FedAvg"].verdict
        == "not run"
    )
    assert (
        long.loc[ONE, "IFCA"].published_mean == 50.0
        and long.loc["digits, 4 clients", "FedAvg"].published_mean == 60.0
    )


def test_a_diverged_trial_is_not_averaged_away(spec):
    put(spec, "paper", "FedAvg", ONE, [69, None, 71])
    avg = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert math.isnan(avg["mean"]) and (avg.n, avg.diverged, avg.verdict) == (2, 1, "diverged")
    assert (
        all(math.isnan(avg[s]) for s in STATISTIC_WORDS) and avg["values"] == "69.00 diverged 71.00"
    )
    assert "diverged (1 of 3)" in render(spec, "paper")


RECORDS = [
    (dict(round=2, client=2, norm="1.5e+30"), "round 2, client 2, norm 1.5e+30"),
    (dict(round=12, client=None, norm="nan"), "round 12, server, norm nan"),
]


@pytest.mark.parametrize("tier", ["smoke", "paper"])
@pytest.mark.parametrize("record, words", RECORDS)
def test_every_format_says_who_diverged_where(spec, tier, record, words):
    record = record | dict(round=min(record["round"], spec.runs(tier)[0].rounds))
    words = words.replace("round 12", f"round {record['round']}")
    put(spec, tier, "FedAvg", ONE, [69.0, record, None])
    long = table(spec, tier).set_index(["column", "row"])
    line = long.loc[ONE, "FedAvg"]
    assert (
        line.diverged_runs == f"seed 1: {words}; seed 2: round 2, client 0, norm inf"
        and line.diverged == 2
    )
    assert (long.drop(index=(ONE, "FedAvg")).diverged_runs == "").all()
    note = f"diverged: FedAvg, {ONE}, {line.diverged_runs}"
    for format in ("text", "md", "html"):
        out = html.unescape(" ".join(render(spec, tier, format).split()))
        assert (
            out.count(note) == 1
            and out.count("A run has diverged when") == 1
            and "diverged (2 of 3)" in out
        )
    assert f"\n\n{note}\n\n" in render(spec, tier, "md")  # a paragraph of its own
    csv = pd.read_csv(io.StringIO(render(spec, tier, "csv")), keep_default_na=False).set_index(
        ["column", "row"]
    )
    assert (
        csv.loc[ONE, "FedAvg"].diverged_runs == line.diverged_runs
        and csv.loc[ONE, "FedAvg"]["mean"] == ""
    )
    run = seed_values(spec, tier).set_index(["row", "seed"]).loc["FedAvg"]
    assert run.diverged.tolist() == ["", words, "round 2, client 0, norm inf"]


def test_a_run_without_the_metric_is_not_left_out(spec):
    put(spec, "paper", "FedAvg", ONE, [70.0, math.nan, 72.0])
    avg = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert math.isnan(avg["mean"]) and (avg.n, avg.diverged, avg.verdict) == (2, 0, "not measured")
    put(spec, "smoke", "FedAvg", ONE, [math.nan])
    avg = table(spec, "smoke").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert (
        avg.verdict == "not measured"
        and "no run yet" not in render(spec, "smoke")
        and "To run it" not in render(spec, "smoke")
    )


def test_only_the_paper_tier_is_judged(spec):
    put(spec, "smoke", "FedAvg", ONE, [70, 70, 70])
    avg = table(spec, "smoke").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert (
        avg.verdict == "not comparable"
        and math.isnan(avg.difference)
        and avg.published_mean == 70.0
    )
    text = render(spec, "smoke")
    assert "rounds 3 (paper 12)" in text and "not comparable with the published numbers" in text
    assert "reproduced" not in text
    put(spec, "smoke", "prox", ONE, [70])
    both = replace(
        spec,
        rows=spec.rows
        | {"twin": replace(spec.rows["twin"], published=spec.rows["prox"].published)},
    )
    assert "Judged" not in render(both, "smoke")


def test_the_papers_own_shape(spec):
    "Methods down, columns across, ours above published with a letter; what has no run is folded into a sentence"
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "prox", ONE, [74.0, 74.1, 73.9])
    sheet = table_sheet(spec, "paper", table(spec, "paper"))
    main, judged = sheet.grids
    assert main.columns == ["method", ONE] and [row[0] for row in main.rows] == [
        "prox",
        "FedAvg",
        "twin",
    ]
    assert (
        main.rows[1][1] == Cell("70.00 ± 1.00 (3)", "70.00 ± 0.60 C", "fair")
        and main.rows[0][1].tone == "bad"
    )
    assert (
        judged.rows[0][3].startswith("contradicted, p")
        and "q" in judged.rows[0][3]
        and judged.rows[1][3] == "consistent"
    )
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
    sheet = table_sheet(spec, "paper", table(spec, "paper"))
    for width in (40, 80, 200):
        text = as_text(sheet, width)
        assert max(map(len, text.splitlines())) <= width and text.count("70.00 ± 1.00 (3)") == 2
    assert "\x1b[" in as_text(sheet, 80, colours=True) and "\x1b[" not in text


def test_q_counts_the_papers_other_tables(spec):
    put(spec, "paper", "prox", ONE, [74.0, 74.1, 73.9])
    (p,) = table(spec, "paper").p.dropna()
    assert q_values(spec) == {("prox", ONE): pytest.approx(p)}
    other = RAW | dict(published="u.published.csv", base=RAW["base"] | dict(batch_size=32))
    put(
        load_spec(written(spec.path.parents[1], other, "demo/u", CSV)),
        "paper",
        "FedAvg",
        ONE,
        [70.0, 70.1, 70.2],
    )
    assert q_values(spec)[("prox", ONE)] == pytest.approx(2 * p)


def test_another_tables_rows_are_not_borrowed(spec):
    other = load_spec(written(spec.path.parents[1], RAW, "demo/readings", CSV))
    assert (
        set(table(other, "paper").row) == {"prox", "FedAvg", "twin"} < set(table(spec, "paper").row)
    )


def test_markdown_and_html_are_escaped(spec):
    put(spec, "paper", "prox", ONE, [69, 70, 71])
    changed = replace(spec, rows={"<script>|x": replace(spec.rows["prox"], name="<script>|x")})
    md, page = render(changed, "paper", "md"), render(changed, "paper", "html")
    assert "| <script>\\|x |" in md and "<script>" not in page and "&lt;script&gt;&#124;x" in page
    rows = [line for line in md.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", r)) for r in rows} == {3, 7}


def test_without_runs_it_says_how_to_make_them(spec):
    assert "fedrepro run demo/t --tier paper" in render(spec, "paper")
    with pytest.raises(InputError, match="'pdf'.*csv, html, md, text"):
        render(spec, "paper", "pdf")
    with pytest.raises(InputError, match="'big'.*paper, smoke"):
        render(spec, "big")


def test_an_answer_that_is_kept_sees_a_new_result(spec, tmp_path, said, monkeypatch):
    "That it is kept, and given without torch: test_main.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    put(spec, "paper", "FedAvg", ONE, [69.0, 70.0])
    for p in spec.path.parent.rglob("*.*"):
        os.utime(p, (1e9, 1e9))
    argv = ["table", str(spec.path), "--tier", "paper"]
    assert said(*argv) == said(*argv) and "69.50 ± 0.71 (2)" in said(*argv)[1]
    put(spec, "paper", "FedAvg", ONE, [69.0, 70.0, 71.0])
    assert "70.00 ± 1.00 (3)" in said(*argv)[1]
