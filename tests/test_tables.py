"Verdicts against hand-worked numbers and scipy; tables from result files"
import html
import io
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from fedrepro.core.errors import InputError
from fedrepro.core.grids import Cell, as_text
from fedrepro.experiments import store
from fedrepro.experiments.specs import load_spec
from fedrepro.verdicts.summaries import seed_values, stored_runs
from fedrepro.verdicts.tables import (
    STATISTIC_WORDS, best_tier, half_width, mean_std, published_cell, q_values, read_published, render, table,
    table_rows, table_sheet, why_no_verdict)

SPEC = '''
title = "A small one"
paper = "FedCCFA"
table = "2"
kind = "table"
metric = "generalised_accuracy"
statistic = "last"
published = "t.published.csv"
spread = "trials"
trials = 3
pairing = "pooled"
[base]
source = "guess: a test"
rounds = 12
seeds = [0, 1, 2]
partition = "iid"
recipe = "plain"
dataset = "digits"
network = "digits_cnn"
drift = "sudden"
drift_round = 1
[[columns]]
clients = 3
source = "guess: a test"
published = {clients = 20}
[[columns]]
clients = 4
source = "guess: a test"
published = {clients = 100}
[[columns]]
dataset = "CINIC-10"
clients = 5
source = "guess: a test"
published = {clients = 7}
missing = "no loader"
[methods.FedAvg]
[methods.prox]
class = "FedProx"
published = {method = "FedProx <b>|"}
[methods.twin]
class = "FedProx"
[tiers.smoke.base]
source = "tier: reduced"
rounds = 3
'''
CSV = "method,clients,mean,std\nIFCA,20,50.0,1.0\nFedProx <b>|,20,70.0,\nFedAvg,20,70.0,0.6\nFedAvg,100,60.0,0.5\n"

@pytest.fixture
def spec(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/t.toml").write_text(SPEC)
    (tmp_path / "demo/t.published.csv").write_text(CSV)
    return load_spec(tmp_path / "demo/t.toml")

def put(spec, tier, row, column, values, results=None):
    """Write runs of `row` whose last rounds are `values`: v-3, v+1, v, then v again

    One a seed; None = diverged in round 1 at client 0, nan = complete without the metric, {...} = diverged so after v-3"""
    for c in spec.runs(tier, methods=[row], seeds=len(values)):
        if c.column != column: continue
        v, head = values[c.seed], dict(settings=c.settings, run_id=c.run_id, status="complete")
        curve = [] if v is None else [50.] if isinstance(v, dict) else ([v - 3, v + 1] + [v] * 10)[:c.rounds]
        if v is None or isinstance(v, dict):
            head |= dict(status="diverged", diverged=v or dict(round=1, client=0, norm="inf"))
        rows = [dict(round=t, generalised_accuracy=a) for t, a in enumerate(curve, 1)]
        store.write(store.run_path(results or spec.results, c), head, rows)

ONE = "digits, 3 clients"

def test_published_trials_of_fedccfa():
    "metrics.md section 2: the printed ± is the sample standard deviation"
    for values, mean, std in [([10, 10, 81.1], 33.70, 41.05), ([10, 10, 28], 16.00, 10.39)]:
        assert np.allclose(mean_std(values), (mean, std), atol=.005)

@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_interval_is_scipys(n):
    x = np.random.default_rng(n).normal(70, 2, n)
    low, high = stats.t.interval(.95, n - 1, loc=x.mean(), scale=stats.sem(x))
    assert math.isclose(half_width(x), (high - low) / 2, rel_tol=1e-12)

def test_interval_by_hand():
    "t(.975, 1) = 12.706, t(.975, 2) = 4.303"
    assert abs(half_width([1, 3]) - 12.706) < 1e-3 and abs(half_width([1., 2., 3.]) - 2.4841) < 1e-4
    assert math.isnan(half_width([1.])) and math.isnan(half_width([])) and math.isnan(mean_std([])[0])

def test_what_has_no_verdict():
    assert why_no_verdict([70.] * 3, 0, 70., False) == "not comparable"
    assert why_no_verdict([70.] * 3, 1, 70., True) == why_no_verdict([], 1, 70., False) == "diverged"
    assert why_no_verdict([], 0, 70., True) == why_no_verdict([], 0, math.nan, False) == "not run"
    assert why_no_verdict([70.], 0, math.nan, True) == "not published" and why_no_verdict([70.], 0, 70., True) == ""
    assert why_no_verdict([70., math.nan], 0, 70., True) == why_no_verdict([math.nan], 0, 70., False) == "not measured"
    assert why_no_verdict([math.nan], 1, 70., True) == "diverged"

def test_matching_and_one_line_only():
    paper = pd.DataFrame(dict(method=list("AAB"), clients=["20", "100", "?"], mean=[1., 2., 3.], std=[.1, np.nan, .3]))
    assert published_cell(paper, {"method": "A", "clients": 20}) == (1., .1)
    assert math.isnan(published_cell(paper, {"method": "A", "clients": 100})[1])
    assert published_cell(paper, {"clients": "?"})[0] == paper["mean"][paper.method == "B"].item()
    assert math.isnan(published_cell(paper, {"method": "C"})[0])
    with pytest.raises(InputError, match="2 lines match"): published_cell(paper, {"method": "A"})
    with pytest.raises(InputError, match="'round'.*clients"): published_cell(paper, {"round": 1})

@pytest.mark.parametrize("text, word", [("method,mean\nA,1\n", "'std' is missing"), ("", "cannot be read"),
                                        ("method,mean,std\nA,x,1\n", "mean 'x' is not")])
def test_damaged_published_numbers(spec, text, word):
    spec.published.write_text(text)
    with pytest.raises(InputError, match=word): read_published(spec)

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
    assert (avg["mean"], avg["std"], avg.n, avg.difference, avg.verdict) == (70., 1., 3, 0., "consistent")
    assert (avg["last"], avg.best, avg["values"], avg.seeds) == (70., 71., "69.00 70.00 71.00", "0 1 2")
    assert math.isclose(avg.mean_last_10, 70.)
    assert long.loc[ONE, "prox"].verdict == "undecided" and math.isnan(long.loc[ONE, "prox"]["std"])
    assert long.loc[ONE, "IFCA"].verdict == long.loc["digits, 4 clients", "FedAvg"].verdict == "not run"
    assert long.loc[ONE, "IFCA"].published_mean == 50. and long.loc["digits, 4 clients", "FedAvg"].published_mean == 60.

def test_rows_with_equal_settings_share_their_runs(spec):
    put(spec, "paper", "prox", ONE, [72.5, 73.])
    assert set(seed_values(spec, "paper").row) == {"prox", "twin"}

def test_a_diverged_trial_is_not_averaged_away(spec):
    put(spec, "paper", "FedAvg", ONE, [69, None, 71])
    avg = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert math.isnan(avg["mean"]) and (avg.n, avg.diverged, avg.verdict) == (2, 1, "diverged")
    assert all(math.isnan(avg[s]) for s in STATISTIC_WORDS) and avg["values"] == "69.00 diverged 71.00"
    assert "diverged (1 of 3)" in render(spec, "paper")

RECORDS = [(dict(round=2, client=2, norm="1.5e+30"), "round 2, client 2, norm 1.5e+30"),
           (dict(round=12, client=None, norm="nan"), "round 12, server, norm nan")]

@pytest.mark.parametrize("tier", ["smoke", "paper"])
@pytest.mark.parametrize("record, words", RECORDS)
def test_every_format_says_who_diverged_where(spec, tier, record, words):
    record = record | dict(round=min(record["round"], spec.runs(tier)[0].rounds))
    words = words.replace("round 12", f"round {record['round']}")
    put(spec, tier, "FedAvg", ONE, [69., record, None])
    long = table(spec, tier).set_index(["column", "row"])
    line = long.loc[ONE, "FedAvg"]
    assert line.diverged_runs == f"seed 1: {words}; seed 2: round 1, client 0, norm inf" and line.diverged == 2
    assert (long.drop(index=(ONE, "FedAvg")).diverged_runs == "").all()
    note = f"diverged: FedAvg, {ONE}, {line.diverged_runs}"
    for format in ("text", "md", "html"):
        out = html.unescape(" ".join(render(spec, tier, format).split()))
        assert out.count(note) == 1 and out.count("A run has diverged when") == 1 and "diverged (2 of 3)" in out
    assert f"\n\n{note}\n\n" in render(spec, tier, "md")  # a paragraph of its own
    csv = pd.read_csv(io.StringIO(render(spec, tier, "csv")), keep_default_na=False).set_index(["column", "row"])
    assert csv.loc[ONE, "FedAvg"].diverged_runs == line.diverged_runs and csv.loc[ONE, "FedAvg"]["mean"] == ""
    run = seed_values(spec, tier).set_index(["row", "seed"]).loc["FedAvg"]
    assert run.diverged.tolist() == ["", words, "round 1, client 0, norm inf"]

def test_no_statistic_is_one_of_the_survivors(spec):
    put(spec, "paper", "FedAvg", ONE, [70., None, 72.])
    for statistic in STATISTIC_WORDS:
        frame = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
        assert all(math.isnan(frame[f"{statistic}{end}"]) for end in ("", "_std")) and math.isnan(frame.difference)
    text = render(spec, "paper")
    assert "71.00" not in text and "A run has diverged when" in text

def test_a_run_without_the_metric_is_not_left_out(spec):
    put(spec, "paper", "FedAvg", ONE, [70., math.nan, 72.])
    avg = table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert math.isnan(avg["mean"]) and (avg.n, avg.diverged, avg.verdict) == (2, 0, "not measured")
    put(spec, "smoke", "FedAvg", ONE, [math.nan])
    avg = table(spec, "smoke").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert avg.verdict == "not measured" and "no run yet" not in render(spec, "smoke") and "To run it" not in render(spec, "smoke")

def test_without_divergence_nothing_is_said_of_it(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    assert not any("diverged" in render(spec, "paper", f) for f in ("text", "md", "html"))

def test_only_the_paper_tier_is_judged(spec):
    put(spec, "smoke", "FedAvg", ONE, [70, 70, 70])
    avg = table(spec, "smoke").set_index(["column", "row"]).loc[ONE, "FedAvg"]
    assert avg.verdict == "not comparable" and math.isnan(avg.difference) and avg.published_mean == 70.
    text = render(spec, "smoke")
    assert "rounds 3 (paper 12)" in text and "not comparable with the published numbers" in text
    assert "reproduced" not in text

def test_seeds_beyond_the_specs_count(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71, 72, 73])
    assert table(spec, "paper").set_index(["column", "row"]).loc[ONE, "FedAvg"].n == 5

def test_results_of_another_folder(spec, tmp_path):
    put(spec, "paper", "FedAvg", ONE, [69], tmp_path / "other")
    assert not stored_runs(spec, "paper") and len(stored_runs(spec, "paper", tmp_path / "other")) == 1

def test_the_papers_own_shape(spec):
    "Methods down, columns across, ours above published with a letter; what has no run is folded into a sentence"
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "prox", ONE, [74., 74.1, 73.9])
    sheet = table_sheet(spec, "paper", table(spec, "paper"))
    main, judged = sheet.grids
    assert main.columns == ["method", ONE] and [row[0] for row in main.rows] == ["prox", "FedAvg", "twin"]
    assert main.rows[1][1] == Cell("70.00 ± 1.00 (3)", "70.00 ± 0.60 C", "fair") and main.rows[0][1].tone == "bad"
    assert judged.rows[0][3].startswith("contradicted, p") and "q" in judged.rows[0][3] and judged.rows[1][3] == "consistent"
    text = " ".join(render(spec, "paper").split())
    for said in ["FedCCFA, table 2: A small one", "generalised_accuracy: %, mean over all clients", "last evaluated round",
                 "Tier paper: the published setting", "(no loader): CINIC-10, 5 clients", "not run yet: digits, 4 clients",
                 "rows that the spec does not have: IFCA", "1 consistent", "95 % prediction interval", "X contradicted"]: assert said in text, said

def test_a_terminal_of_any_width_gets_whole_numbers(spec):
    put(spec, "paper", "FedAvg", ONE, [69, 70, 71])
    put(spec, "paper", "FedAvg", "digits, 4 clients", [69, 70, 71])
    sheet = table_sheet(spec, "paper", table(spec, "paper"))
    for width in (40, 80, 200):
        text = as_text(sheet, width)
        assert max(map(len, text.splitlines())) <= width and text.count("70.00 ± 1.00 (3)") == 2
    assert "\x1b[" in as_text(sheet, 80, colours=True) and "\x1b[" not in text

def test_q_counts_the_papers_other_tables(spec):
    put(spec, "paper", "prox", ONE, [74., 74.1, 73.9])
    p, = table(spec, "paper").p.dropna()
    assert q_values(spec) == {("prox", ONE): pytest.approx(p)}
    other = spec.path.with_name("u.toml")
    other.write_text(SPEC.replace("t.published", "u.published").replace("rounds = 12", "rounds = 12\nbatch_size = 32", 1))
    other.with_name("u.published.csv").write_text(CSV)
    put(load_spec(other), "paper", "FedAvg", ONE, [70., 70.1, 70.2])
    assert q_values(spec)[("prox", ONE)] == pytest.approx(2 * p)

def test_the_default_is_the_highest_tier_with_runs(spec):
    assert best_tier(spec) == "smoke"
    put(spec, "smoke", "FedAvg", ONE, [70.])
    assert best_tier(spec) == "smoke"
    put(spec, "paper", "FedAvg", ONE, [70.])
    assert best_tier(spec) == "paper"

def test_another_tables_rows_are_not_borrowed(spec):
    other = spec.path.with_name("readings.toml")
    other.write_text(SPEC)
    assert set(table(load_spec(other), "paper").row) == {"prox", "FedAvg", "twin"} < set(table(spec, "paper").row)

def test_markdown_and_html_are_escaped(spec):
    put(spec, "paper", "prox", ONE, [69, 70, 71])
    changed = replace(spec, rows={"<script>|x": replace(spec.rows["prox"], name="<script>|x")})
    md, page = render(changed, "paper", "md"), render(changed, "paper", "html")
    assert "| <script>\\|x |" in md and "<script>" not in page and "&lt;script&gt;&#124;x" in page
    rows = [line for line in md.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", r)) for r in rows} == {3, 5}

def test_csv_is_the_long_form(spec):
    put(spec, "paper", "FedAvg", ONE, [69.125, 70, 71])
    csv = pd.read_csv(io.StringIO(render(spec, "paper", "csv")))
    assert len(csv) == 3 * 4 and {"mean", "best_std", "values", "seeds", "verdict"} <= set(csv.columns)
    assert np.isclose(csv["mean"].dropna().item(), 70.0417, atol=1e-4)

def test_without_runs_it_says_how_to_make_them(spec):
    assert "fedrepro run demo/t --tier paper" in render(spec, "paper")
    with pytest.raises(InputError, match="'pdf'.*csv, html, md, text"): render(spec, "paper", "pdf")
    with pytest.raises(InputError, match="'big'.*paper, smoke"): render(spec, "big")

def test_the_second_answer_needs_no_torch(spec, tmp_path):
    "Asked again while nothing has changed, a command answers from what it kept; a new result is seen"
    put(spec, "paper", "FedAvg", ONE, [69., 70.])
    def age():
        for p in spec.path.parent.rglob("*.*"): os.utime(p, (1e9, 1e9))
    code = ("import sys; from fedrepro.cli.main import main; "
            f"main(['table', {str(spec.path)!r}, '--tier', 'paper']); print('torch' in sys.modules)")
    def ask(): return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
                                     env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "kept")}).stdout.rsplit("\n", 2)
    age()
    first, again = ask(), ask()
    assert first[0] == again[0] and "69.50 ± 0.71 (2)" in again[0] and (first[1], again[1]) == ("True", "False")
    put(spec, "paper", "FedAvg", ONE, [69., 70., 71.])
    assert "70.00 ± 1.00 (3)" in ask()[0]
