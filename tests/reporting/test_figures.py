"Measures, differences, rounds to a target, times, and every kind of figure: what is asked for is what is recorded and drawn"

import io
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import toy
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex, to_rgb

from fedrepro.checks.harness import LOCAL, tiny
from fedrepro.core.errors import InputError
from fedrepro.core.folders import find_specs
from fedrepro.core.trees import norm, select, sub
from fedrepro.engine.rounds import AfterRound
from fedrepro.engine.evaluation import evaluate
from fedrepro.engine.method import load_methods
from fedrepro.engine.probes import MEASURES, distance_matrix
from fedrepro.engine.rows import METRICS, TIMES
from fedrepro.engine.rounds import run
from fedrepro.experiments.jobs import active_run
from fedrepro.experiments.rules import Value
from fedrepro.experiments.specs import PLOTS, load_spec
from fedrepro.reporting.curves import ACCENT, axis_label, own_rows
from fedrepro.reporting.curves import without_repeated
from fedrepro.reporting.figures import (
    FIGURES,
    best_of,
    distances_figure,
    draw,
    figure_in_words,
    points,
)
from fedrepro.reporting.paper_page import leads
from fedrepro.reporting.page_text import specs_of, started
from fedrepro.reporting.printed_tables import render
from fedrepro.verdicts.tables import table
from toy import ROOT


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def spec(name):
    return load_spec(name, ROOT / "papers")


def played(name, asked=(), rounds=2, **more):
    "A short run of a method in the federation of the contracts, and its snapshots"
    snapshots = []
    method = load_methods()[name](**LOCAL | load_methods()[name].check_settings)
    history = run(
        method,
        tiny(),
        rounds,
        evaluate,
        callbacks=[AfterRound(snapshots.append)],
        measures=asked,
        **more,
    )
    return history.rows, snapshots


# --- colours


def lab(colour):
    "A colour as lightness and two hues (CIELAB under daylight); a distance of 2 is just visible"
    rgb = np.array(to_rgb(colour))
    light = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0178, 0.1095, 0.8729]]
    xyz = to_xyz @ light
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), 841 / 108 * xyz + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def colour_distance(one, other):
    "How far two colours are apart (CIELAB, 1976)"
    return float(np.linalg.norm(lab(one) - lab(other)))


def test_distances_of_colours():
    assert colour_distance(ACCENT, ACCENT) == 0
    assert colour_distance("black", "white") == pytest.approx(100, abs=0.1)  # lightness alone
    assert colour_distance("#000000", "#010101") < 1  # one step of a screen is not visible
    assert lab("red") == pytest.approx(
        [53.2, 80.1, 67.2], abs=0.2
    )  # sRGB's red, as tables print it


def labelled(figure):
    "label -> colour of what the legends of a figure name, and the colours of bars that have names at their axis"
    found = {}
    for legend in figure.legends:
        for text, handle in zip(legend.get_texts(), legend.legend_handles):
            colour = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
            found[text.get_text()] = to_hex(colour)
    if not found:
        for ax in figure.axes:
            for k, bar in enumerate(ax.patches):
                found[f"bar {k}"] = to_hex(bar.get_facecolor())
    for word in ("every seed, x = diverged", "published ± std"):
        found.pop(word, None)
    return found


@pytest.mark.parametrize("paper", ["fedadc", "fedbss", "fedccfa", "feddc", "lfd"])
def test_labelled_lines_of_a_stored_figure_have_colours_apart(paper):
    "A distance of 20 in CIELAB, where 2 is just visible; and at least one figure of each paper has two lines"
    most = 0
    for of in specs_of(paper, ROOT / "papers"):
        if of.difference or of.plot in (
            "bubbles",
            "distances",
            "samples",
            "sorted",
            "gradient_norms",
        ):
            continue
        for tier in of.tiers:
            if not started(of, tier):
                continue
            figure = draw(of, tier)
            found = labelled(figure)
            titles = [figure.get_suptitle(), *(ax.get_title() for ax in figure.axes)]
            assert "tier" not in " ".join(titles), "the caption says it"
            plt.close(figure)
            most = max(most, len(found))
            for (one, a), (other, b) in itertools.combinations(found.items(), 2):
                assert colour_distance(a, b) > 20, (of.name, tier, one, other)
            own = own_rows(of) & set(found)
            assert not own or ACCENT in {found[row] for row in own}, of.name
    assert most > 3


# --- measures


@pytest.mark.parametrize("name", ["FedAvg", "FedRep", "FedCCFA", "FedPAC"])
def test_measures_add_columns_and_change_nothing_else(name):
    asked = ("collaboration_seconds", "update_norm") + (
        ("distances_class_1",) if name == "FedCCFA" else ()
    )
    plain, (rows, _) = played(name)[0], played(name, asked)
    added = set().union(*rows) - set().union(*plain)
    assert {*TIMES, "update_norm", "update_norm_clients"} <= added
    assert [{k: v for k, v in row.items() if k not in added} for row in rows] == plain
    assert not set(plain[0]) & {*TIMES, "update_norm"}


def test_the_norm_is_that_of_the_servers_extractor():
    rows, (one, two) = played("FedAvg", ("update_norm",))
    moved = norm(sub(*(select(s.server["params"], "body.") for s in (two, one))))
    assert math.isclose(rows[1]["update_norm"], float(moved), rel_tol=1e-12)
    assert rows[1]["update_norm_clients"] > 0
    with pytest.raises(InputError, match="update_norm.*no single model"):
        played("IFCA", ("update_norm",))


def test_distances_are_those_of_the_clustering():
    rows, snapshots = played("FedCCFA", ("distances_class_3",))
    clients, matrix = distance_matrix(rows[-1], 3)
    assert np.allclose(matrix, snapshots[-1].server["madd"][3])
    assert len(clients) == 3
    assert clients == sorted(clients)
    assert distance_matrix(rows[-1], 4) == ([], [])
    with pytest.raises(InputError, match="keeps no distances"):
        played("FedAvg", ("distances_class_3",))
    three_classes = {"madd": np.zeros((3, 2, 2))}
    with pytest.raises(InputError, match="distances_class_3: expected a class from 0 to 2"):
        MEASURES["distances_class_3"](load_methods()["FedCCFA"](), None, {}, three_classes, None)


def test_seconds_are_measured_where_they_are_seen():
    "FedPAC and FedCCFA have a client's and a server's part; FedAvg has none"
    for name in ("FedPAC", "FedCCFA"):
        row = played(name, ("collaboration_seconds",))[0][-1]
        assert row["seconds_collaboration_client"] > 0 < row["seconds_collaboration_server"]
        assert (
            row["seconds_collaboration"]
            == row["seconds_collaboration_client"] + row["seconds_collaboration_server"]
        )
    assert all(math.isnan(played("FedAvg", ("collaboration_seconds",))[0][-1][k]) for k in TIMES)


def test_asking_for_a_measure_is_another_run_and_asking_for_none_is_the_same(tmp_path):
    planned = spec("fedccfa/figure1").runs("smoke")[0]
    assert planned.settings["measures"] == ["update_norm"]
    assert active_run(planned, None, "cpu").measures == ("update_norm",)
    assert "measures" not in spec("fedccfa/table2").runs("smoke")[0].settings
    (tmp_path / "p").mkdir()
    text = (ROOT / "tests/spec.toml").read_text().replace('published = "table2.published.csv"', "")

    def with_measures(value):
        (tmp_path / "p/t.toml").write_text(
            text.replace("[base]", f'[base]\nmeasures = {{value = {value}, source = "paper"}}', 1)
        )
        return load_spec(tmp_path / "p/t.toml").runs("smoke")[0].run_id

    assert with_measures("[]") != with_measures('["update_norm"]')
    for wrong, says in (
        ('["update_nrom"]', "did you mean 'update_norm'"),
        ('["update_norm", "update_norm"]', "twice"),
        ('"x"', "not a list"),
    ):
        with pytest.raises(InputError, match=says):
            with_measures(wrong)


# --- specs: no id of a run that was there changes


def test_no_run_that_was_committed_has_another_name():
    "One run of every row at the paper tier, as it was before there were measures; a method's new `version` renews its ids"
    for name, was in json.loads((ROOT / "tests/run_ids.json").read_text()).items():
        runs = [
            r
            for r in spec(name).runs("paper", list(was["ids"]), [was["seed"]])
            if r.column == was["column"]
        ]
        assert {r.row: r.run_id[:8] for r in runs} == was["ids"], name


# --- a difference of two tables


def put(of, tier, row, values, results):
    "Runs of `row` in the first column that end with `values`, one a seed, after half a point a round (None = diverged in round 3)"
    rounds = of.runs(tier, [row], 1)[0].rounds
    curves = [
        dict(round=3, client=1, norm="inf")
        if v is None
        else [v - 0.5 * t for t in range(rounds)][::-1]
        for v in values
    ]
    toy.put(of, tier, row, curves, of.tier_columns(tier)[0].label, results)


def test_table_8_is_table_2_minus_table_1_run_by_run(tmp_path):
    one, two, eight = (spec(f"fedccfa/table{n}") for n in (1, 2, 8))
    ours = {c.run_id for c in eight.runs("small")}
    assert ours == {c.run_id for s in (one, two) for c in s.runs("small")}
    put(one, "paper", "FedAvg", [90.0, 92.0, 93.0], tmp_path)
    put(two, "paper", "FedAvg", [67.0, 70.0], tmp_path)
    put(two, "paper", "FedProx", [70.0, 70.0, 70.0], tmp_path)  # no partner
    put(one, "paper", "FedRep", [80.0, 80.0], tmp_path)
    put(two, "paper", "FedRep", [60.0, None], tmp_path)
    frame = (
        table(eight, "paper", tmp_path)
        .set_index(["column", "row"])
        .loc["Fashion-MNIST, 20 clients"]
    )
    avg = frame.loc["FedAvg"]
    assert (avg["values"], avg.n, avg.seeds, avg["mean"], avg["std"]) == (
        (-23.0, -22.0),
        2,
        (0, 1),
        -22.5,
        pytest.approx(0.5**0.5),
    )
    # the paper prints no spread of a difference, and two are few
    assert avg.published_mean == -22.76
    assert avg.verdict == "undecided"
    assert frame.loc["FedProx"].verdict == "not run"
    assert frame.loc["FedRep"].verdict == "diverged"
    assert frame.loc["FedRep"].n == 1
    assert "fedccfa/table2 minus fedccfa/table1, points, run by run" in " ".join(
        render(eight, "paper", results=tmp_path).split()
    )
    with pytest.raises(InputError, match="no curves of its own"):
        draw(eight, "paper", tmp_path)


def test_all_84_published_differences_are_table_2_minus_table_1():
    keys = ["method", "dataset", "clients"]
    one, two, eight = (
        pd.read_csv(ROOT / f"papers/fedccfa/table{n}.published.csv").set_index(keys)["mean"]
        for n in (1, 2, 8)
    )
    gap = (two - one - eight).dropna()
    assert len(eight) == 84
    assert len(gap) >= 80
    assert gap.abs().max() < 0.0101


@pytest.mark.parametrize(
    "value, says",
    [
        ('["fedccfa/table2"]', "not two different"),
        ('["fedccfa/table2", "fedccfa/table2"]', "not two different"),
        ('["fedccfa/table2", "fedccfa/tabel1"]', "did you mean 'fedccfa/table1'"),
        ('["fedccfa/table2", "fedccfa/table8"]', "itself a difference"),
        ('["fedccfa/table2", "fedccfa/table3"]', "row 'FedAvg' is unknown"),
        ('"fedccfa/table2"', "not a list"),
    ],
)
def test_wrong_differences_are_named(tmp_path, value, says):
    folder = tmp_path / "fedccfa"
    folder.mkdir()
    for p in (ROOT / "papers/fedccfa").glob("*.*"):
        (folder / p.name).write_bytes(p.read_bytes())
    text = (
        (folder / "table8.toml").read_text().replace('["fedccfa/table2", "fedccfa/table1"]', value)
    )
    (folder / "mine.toml").write_text(text)
    with toy.one_line(says):
        load_spec(folder / "mine.toml")


# --- rounds to a target


def aimed(target):
    one = spec("fedccfa/table1")
    columns = tuple(
        replace(c, target=Value(target, "guess: test")) for c in one.tier_columns("smoke")
    )
    return replace(one, tiers=one.tiers | {"smoke": replace(one.tiers["smoke"], columns=columns)})


def test_rounds_to_a_target_and_never(tmp_path):
    of = aimed(78.0)
    # of 12 rounds, half a point each: 78 in round 8 and 10
    put(of, "smoke", "FedAvg", [80.0, 79.0], tmp_path)
    put(of, "smoke", "FedProx", [80.0, 77.0], tmp_path)
    put(of, "smoke", "FedRep", [60.0, 61.0], tmp_path)
    put(of, "smoke", "Ditto", [80.0, None], tmp_path)
    frame = table(of, "smoke", tmp_path).set_index("row")
    assert (frame.loc["FedAvg"].to_target, frame.loc["FedAvg"].to_target_reached) == (9.0, 2)
    # two rounds later: the mean of five is that of the third
    assert frame.loc["FedAvg"].to_target_5 == 11.0
    prox = frame.loc["FedProx"]
    assert math.isnan(prox.to_target)
    assert str(prox.to_target_each) == "8, > 12"
    assert prox.to_target_reached == 1
    text = " ".join(render(of, "smoke", results=tmp_path).split())
    for said in (
        "9.0 ± 1.4 (2)",
        "8, > 12 (1 of 2 reached)",
        "> 12 (0 of 2 reached)",
        "78 (guess: test)",
    ):
        assert said in text, said
    # diverged; not run
    assert (
        frame.loc["Ditto"].to_target_each.rounds == frame.loc["FedFM"].to_target_each.rounds == ()
    )
    csv = pd.read_csv(io.StringIO(render(of, "smoke", "csv", tmp_path))).set_index("row")
    assert csv.loc["FedAvg"].to_target == 9.0
    assert math.isnan(csv.loc["FedProx"].to_target)
    assert "to_target" not in table(spec("fedccfa/table1"), "smoke", tmp_path)


# --- seconds


def test_seconds_are_never_judged(tmp_path):
    of = spec("fedccfa/table12")
    for c in of.runs("paper", ["FedPAC", "FedCCFA"], 2):
        rows = [
            dict(round=t, seconds_collaboration=1.35 if c.row == "FedPAC" else 0.5)
            for t in range(1, c.rounds + 1)
        ]
        toy.stored(c, rows, tmp_path, cpu="Processor X", device="cpu")
    frame = (
        table(of, "paper", tmp_path).set_index(["column", "row"]).loc["Fashion-MNIST, 20 clients"]
    )
    assert list(frame.verdict) == ["other hardware"] * 2
    assert frame.difference.isna().all()
    text = " ".join(render(of, "paper", results=tmp_path).split())
    assert "reproduced" not in text
    assert "Processors: Processor X" in text
    assert "published 2.76" in text
    assert " best " not in text
    assert "not judged" in text
    # the last ten
    assert (
        of.runs("paper")[0].settings["rounds"] - of.runs("paper")[0].settings["drift"]["at"] == 10
    )


# --- figures


def test_every_plot_has_somebody_who_draws_it():
    assert sorted(FIGURES) == sorted(PLOTS)
    used = {spec(name).plot for name in find_specs(ROOT / "papers")}
    assert used == set(PLOTS)
    assert set(TIMES) <= set(METRICS)
    assert "update_norm" in MEASURES
    assert all(METRICS[name].definition.startswith(("of the", "the part")) for name in TIMES)
    assert [axis_label(m) for m in ("generalised_accuracy", TIMES[0], "used_models")] == [
        "generalised accuracy (%)",
        "seconds collaboration (s)",
        "global models in use",
    ]


@pytest.mark.parametrize(
    "name, lines, x",
    [
        ("fedccfa/figure5", ["digits, 20 clients"], [5.0, 10.0, 20.0, 50.0, 100.0]),
        ("fedccfa/figure6", ["digits, 20 clients"], [0.05, 0.1, 0.15, 0.2]),
        ("lfd/figure5_epochs", None, [1, 2, 4]),
        ("fedbss/figure5b", ["digits, Dir(0.5)"], ["filter", "linear", "cosine"]),
        (
            "fedadc/figure7",
            ["digits, Dir(0.1), C=0.2"],
            ["global model", "plain", "proximal", "self-confidence"],
        ),
    ],
)
def test_a_metric_against_a_setting(tmp_path, name, lines, x):
    of = spec(name)
    for i, c in enumerate(of.runs("smoke")):
        toy.stored(
            c,
            [{"round": t, of.metric: 50.0 + i + t / c.rounds} for t in range(1, c.rounds + 1)],
            tmp_path,
        )
    found = points(of, "smoke", tmp_path)
    assert list(dict.fromkeys(found.x)) == x
    assert sorted(set(found.line)) == sorted(lines or of.rows)
    ax = draw(of, "smoke", tmp_path).axes[0]
    assert (
        [" ".join(t.get_text().split("\n")).replace("- ", "-") for t in ax.get_xticklabels()]
        == [str(v) for v in x]
        if isinstance(x[0], str)
        else list(ax.get_xticks()) == x
    )
    drawn = {bar.get_label(): bar.lines[0].get_ydata() for bar in ax.containers}
    first = (
        found[found.line == found.line.iloc[0]]
        .groupby("x", sort=not isinstance(x[0], str))
        .y.mean()
    )
    assert np.allclose(np.asarray(drawn[found.line.iloc[0]], float), first)
    assert "; the highest" in figure_in_words(of, "smoke", tmp_path)


def test_a_setting_that_is_none_is_a_name(tmp_path):
    columns = [dict(label=str(v), clip_norm=v, source="guess: toy") for v in (1.0, "none", 10.0)]
    of = load_spec(
        toy.written(
            tmp_path,
            toy.TOY | dict(kind="figure", plot="against", against="clip_norm", columns=columns),
        )
    )
    toy.put(of, "paper", "FedAvg", [[50.0, 60.0]])
    assert [t.get_text() for t in draw(of, "paper").axes[0].get_xticklabels()] == [
        "1.0",
        "none",
        "10.0",
    ]


def test_curves_of_several_metrics(tmp_path):
    of = spec("fedccfa/figure8")
    for c in of.runs("smoke", seeds=1):
        toy.stored(
            c,
            [
                dict(round=t, generalised_accuracy=50.0, used_models=3)
                for t in range(1, c.rounds + 1)
            ],
            tmp_path,
        )
    axes = [ax for ax in draw(of, "smoke", tmp_path).axes if ax.get_title()]
    assert [ax.get_ylabel() for ax in axes] == ["generalised accuracy (%)"] * 4 + [
        "global models in use"
    ] * 4
    assert [
        len({line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 2}) for ax in axes
    ] == [0, 1, 3, 2] * 2
    # at the first of several
    assert [[t.get_text() for t in ax.texts] for ax in axes] == [[], *[["concept drift"]] * 3] * 2
    assert "global models in use" in figure_in_words(of, "smoke", tmp_path)


def test_matrices_are_drawn_as_they_were_kept(tmp_path):
    of = spec("fedccfa/figure7")
    (c,) = of.runs("smoke")
    pairs = {
        f"distance_{k}_{i}_{j}": 0.01 * (i + j) * k
        for k in (1, 5)
        for i in range(20)
        for j in range(i + 1, 20)
    }
    toy.stored(c, [dict(round=c.rounds, generalised_accuracy=50.0) | pairs], tmp_path)
    fig = distances_figure(of, "smoke", tmp_path)
    one, five = [ax.images[0].get_array() for ax in fig.axes if ax.images and ax.get_title()]
    assert one[3, 8] == one[8, 3] == pytest.approx(0.11)
    assert five[0, 2] == pytest.approx(0.1)
    assert one[4, 4] == 0
    bold = [t.get_text() for t in fig.axes[0].get_xticklabels() if t.get_fontweight() == "bold"]
    assert bold == ["0", "1", "2", "10", "11", "12"]


def test_without_runs_it_says_what_to_type(tmp_path):
    for name in ("fedccfa/figure1", "fedccfa/figure5", "fedccfa/figure7"):
        with pytest.raises(InputError, match=f"fedrepro run {name} --tier smoke"):
            draw(spec(name), "smoke", tmp_path)
        assert figure_in_words(spec(name), "smoke", tmp_path).endswith(".")


def test_the_same_runs_are_ranked_once_and_equal_values_are_level():
    def lines(**rows):
        out = []
        for row, (y, trace) in rows.items():
            out.append(dict(row=row, column="A", seed=0, status="complete", y=y, trace=trace))
        return pd.DataFrame(out)

    same = lines(a=(67.7, "x"), b=(67.7, "x"), c=(60.0, "z"))
    level = lines(a=(67.701, "x"), b=(67.704, "y"), c=(60.0, "z"))
    name = "generalised_accuracy"
    assert (
        best_of(without_repeated(same), name)
        == "; the highest is a on A with 67.70 %, before c with 60.00"
    )
    assert (
        best_of(level, name) == "; the highest are b and a on A with 67.70 %, before c with 60.00"
    )


def test_where_a_method_leads_pooled_training_is_no_rival_and_a_setting_counts_once():
    columns, here, there = leads("lfd")
    tables = [load_spec("lfd/table2"), load_spec("lfd/table3")]
    assert "Union" in tables[0].rows
    assert there <= columns
    own = {c.label for c in tables[1].tier_columns("small")}
    assert columns < len(own) + len(tables[0].tier_columns("small"))
    assert leads("fedbss")[0] == 2  # not the second partition beside the same numbers
