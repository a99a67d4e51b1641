"Figures from result files: what is drawn, where, and in which colour"

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex, to_rgb
import toy
from fedrepro.core.errors import InputError
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.curves import (
    FOIL,
    ACCENT,
    PALETTE,
    REST,
    SETTLED,
    STYLE,
    PANEL,
    LEGEND,
    Style,
    accuracy_figure,
    axis_start,
    curves,
    diverged_notes,
    drift_rounds,
    label_ends,
    main_row,
    over_seeds,
    page_colours,
    partition_words,
    row_styles,
    save_figure,
)
from fedrepro.reporting.figures import axis_in_words, draw, figure_in_words


@pytest.fixture
def spec():
    "Table 2 without AdapFedAvg, whose runs are FedAvg's: every row here has runs of its own"
    whole = load_spec("fedccfa/table2")
    yield replace(
        whole, rows={name: row for name, row in whole.rows.items() if name != "AdapFedAvg"}
    )
    plt.close("all")


def put(spec, tier, results, values, columns=1):
    "Runs with the constant accuracies `values`: row -> one a seed, or a record of where it diverged"
    for column in spec.tier_columns(tier)[:columns]:
        for row, seeds in values.items():
            curves = [v if isinstance(v, dict) else [v] * spec.runs(tier)[0].rounds for v in seeds]
            toy.put(spec, tier, row, curves, column.label, results)


def test_colours_show_on_white_paper():
    "Contrast with white (WCAG) of at least 2.2, so that thin lines survive a print"
    for colour in PALETTE.values():
        c = np.array(to_rgb(colour))
        light = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [
            0.2126,
            0.7152,
            0.0722,
        ]
        assert 1.05 / (light + 0.05) > 2.2


def test_only_a_split_of_labels_is_called_dirichlet():
    assert partition_words({"recipe": "dirichlet-client", "alpha": 0.6}) == "Dir(0.6)"
    assert partition_words({"recipe": "quantity-skew", "alpha": 0.6}) == "quantity-skew, alpha 0.6"
    sizes = {"recipe": "quantity-skew", "alpha": None, "sigma": 0.3}
    assert partition_words(sizes) == "quantity-skew"


def test_mean_and_band(spec, tmp_path):
    put(spec, "smoke", tmp_path, dict(FedAvg=[60, 64], FedCCFA=[80, 81]))
    ax = accuracy_figure(spec, "smoke", tmp_path).axes[0]
    lines = {
        to_hex(line.get_color()): line.get_ydata() for line in ax.lines if len(line.get_ydata()) > 2
    }
    assert np.allclose(lines[FOIL], 62)
    assert np.allclose(lines[ACCENT], 80.5)
    band = next(b for b in ax.collections if to_hex(b.get_facecolor()[0]) == FOIL)
    y = band.get_paths()[0].vertices[:, 1]
    # the sample standard deviation
    assert np.isclose((y.max() - y.min()) / 2, np.std([60, 64], ddof=1))


def test_of_many_lines_five_are_stressed_the_papers_own_fedavg_and_the_best(spec, tmp_path):
    values = {row: 50.0 + i for i, row in enumerate(list(spec.rows)[:9])} | {"FedCCFA": 40.0}
    put(spec, "smoke", tmp_path, {row: [v, v] for row, v in values.items()})
    fig = accuracy_figure(spec, "smoke", tmp_path)
    others = sorted(values, key=values.get)[-3:]
    grey = [
        line
        for line in fig.axes[0].lines
        if len(line.get_ydata()) > 2 and to_hex(line.get_color()) == REST
    ]
    assert len(grey) == len(values) - 5
    assert {line.get_linewidth() for line in grey} == {0.7}
    assert [t.get_text() for t in fig.legends[0].get_texts()] == [
        "FedAvg",
        *others,
        "FedCCFA",
        f"{len(grey)} other methods",
    ]
    assert over_seeds(pd.DataFrame(dict(row=["A"], column="c", seed=0))) == "one seed"


def test_the_same_runs_are_one_line(tmp_path):
    "AdapFedAvg has FedAvg's runs here: its line would hide, or be hidden"
    whole = load_spec("fedccfa/table2")
    put(whole, "smoke", tmp_path, dict(FedAvg=[60, 64], FedCCFA=[80, 81]))
    fig = accuracy_figure(whole, "smoke", tmp_path)
    assert len([line for line in fig.axes[0].lines if len(line.get_ydata()) > 2]) == 2
    assert [text.get_text() for text in fig.axes[0].texts] == ["concept drift", "FedAvg", "FedCCFA"]
    words = figure_in_words(whole, "smoke", tmp_path)
    assert "for FedAvg and FedCCFA on" in words
    assert words.endswith("Not drawn, with the same runs as another: AdapFedAvg (as FedAvg).")


def test_drift_stands_between_the_rounds(spec, tmp_path):
    put(spec, "smoke", tmp_path, dict(FedAvg=[60, 64]))
    (at,) = drift_rounds(spec.runs("smoke")[0])
    ax = accuracy_figure(spec, "smoke", tmp_path).axes[0]
    assert [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2] == [[at + 0.5] * 2]
    assert [t.get_text() for t in ax.texts] == ["concept drift", "FedAvg"]
    assert "sudden drift" in ax.get_title()
    assert ax.get_ylabel() == "generalised accuracy (%)"
    assert ax.get_xlabel() == "round"


@pytest.mark.filterwarnings("error")
def test_a_diverged_run_is_apart(spec, tmp_path):
    put(spec, "smoke", tmp_path, dict(FedAvg=[60, dict(round=5, client=2, norm="inf")]))
    fig = accuracy_figure(spec, "smoke", tmp_path)
    lines = [line for line in fig.axes[0].lines if len(line.get_ydata()) > 2]
    assert [(line.get_ydata()[0], len(line.get_ydata()), line.get_marker()) for line in lines] == [
        (60, 12, "None"),
        (50, 4, "x"),
    ]
    # no mean, no band of survivors
    assert {line.get_linewidth() for line in lines} == {0.8}
    assert not fig.axes[0].collections
    assert "every seed, x = diverged" in [t.get_text() for t in fig.legends[0].get_texts()]
    assert (
        fig.get_supxlabel()
        == "diverged: FedAvg, digits, 20 clients, seed 1: round 5, client 2, norm inf"
    )


def rising(start, end, rounds):
    "A curve that has come half way by a third of the rounds, and is straight from there"
    settled = int(SETTLED * rounds)
    middle = (start + end) / 2
    first = np.linspace(start, middle, settled, endpoint=False)
    return [*first, *np.linspace(middle, end, rounds - settled)]


def test_the_axis_starts_where_the_lines_have_settled(spec, tmp_path):
    "So that ends are told apart; grey lines do not count, published values stay in view"
    rounds = spec.runs("smoke")[0].rounds
    curves = {"FedAvg": rising(10, 84, rounds), "FedCCFA": rising(12, 90, rounds)}
    toy.put(
        spec, "smoke", "FedAvg", [curves["FedAvg"]], spec.tier_columns("smoke")[0].label, tmp_path
    )
    toy.put(
        spec, "smoke", "FedCCFA", [curves["FedCCFA"]], spec.tier_columns("smoke")[0].label, tmp_path
    )
    low, high = accuracy_figure(spec, "smoke", tmp_path).axes[0].get_ylim()
    assert 40 < low < 47
    assert 90 < high < 93
    assert "a third of the rounds" in axis_in_words(spec, "smoke", tmp_path)
    long = pd.DataFrame(
        [
            dict(row=row, column="c", seed=0, status="complete", round=t, generalised_accuracy=v)
            for row, values in {
                "FedAvg": [0, 0, 60, 70, 80, 80],
                "IFCA": [0, 0, 1, 1, 1, 1],
            }.items()
            for t, v in enumerate(values, 1)
        ]
    )
    assert axis_start(spec, long, row_styles(spec, ["FedAvg"])) == 60 - 20 / 20
    assert axis_start(spec, long, row_styles(spec, ["FedAvg", "IFCA"])) < 1
    ended = long.assign(status="diverged")
    assert axis_start(spec, ended, row_styles(spec, ["FedAvg"])) == -np.inf
    lower = replace(spec, metric="train_loss")
    assert axis_start(lower, long, row_styles(lower, ["FedAvg"])) == -np.inf


def test_a_published_value_is_in_view(spec, tmp_path):
    "67.81 +- 1.12 of FedAvg, below all of our lines"
    put(spec, "paper", tmp_path, dict(FedAvg=[88, 90, 92], FedCCFA=[90, 91, 92]))
    low, _ = accuracy_figure(spec, "paper", tmp_path).axes[0].get_ylim()
    assert low < 67.81


def test_text_is_large_enough_where_a_page_shrinks_a_figure():
    "At least 9 pixels on a page of 900, for as many panels as stand in a line"
    text = STYLE["font.size"] / 72 * STYLE["figure.dpi"]
    for panels, (width, _) in PANEL.items():
        pixels = (panels * width + LEGEND) * STYLE["figure.dpi"]
        assert text * min(1, 900 / pixels) >= 9, panels


def test_colours_of_a_page():
    "A page's own method and FedAvg as in the figures; nobody else has their colours, however many there are"
    found = page_colours("FedBSS", *map(str, range(9)))
    assert (found["FedBSS"], found["FedAvg"]) == (ACCENT, FOIL)
    assert not {ACCENT, FOIL} & {found[str(k)] for k in range(9)}
    assert len({found[str(k)] for k in range(7)}) == 7


def test_many_diverged_runs_are_counted():
    long = pd.DataFrame(
        dict(
            row="A",
            column="c",
            seed=range(9),
            status="diverged",
            diverged="round 1",
            round=1,
            m=0.0,
        )
    )
    notes = diverged_notes(pd.concat([long, long.assign(round=2)]))
    assert len(notes) == 7
    assert notes[-1] == "and 3 more: see the table"
    assert not diverged_notes(long.assign(status="complete"))


@pytest.mark.parametrize("tier, columns, drawn", [("smoke", 1, False), ("paper", 3, True)])
def test_published_values_only_in_the_paper_tier(spec, tmp_path, tier, columns, drawn):
    put(spec, tier, tmp_path, dict(FedAvg=[60, 64, 62]), columns)
    fig = accuracy_figure(spec, tier, tmp_path)
    panels = [ax for ax in fig.axes if ax.get_title()]
    assert len(panels) == columns
    diamonds = [m for ax in panels for m in ax.lines if m.get_marker() == "D"]
    assert (
        bool(diamonds)
        == drawn
        == ("published ± std" in [t.get_text() for t in fig.legends[0].get_texts()])
    )
    if drawn:
        assert diamonds[0].get_ydata()[0] == 67.81


def test_only_what_has_runs_has_its_published_value(spec, tmp_path):
    "A mark in a colour that the legend does not name says nothing"
    put(spec, "paper", tmp_path, dict(FedCCFA=[90, 90, 90]))
    marks = [
        line
        for line in accuracy_figure(spec, "paper", tmp_path).axes[0].lines
        if line.get_marker() == "D"
    ]
    assert [to_hex(line.get_color()) for line in marks] == [ACCENT]
    figure = accuracy_figure(replace(spec, published=None), "paper", tmp_path)
    assert not figure.legends[0].get_texts()
    assert [t.get_text() for t in figure.axes[0].texts] == ["concept drift", "FedCCFA"]


def test_rows_of_one_method_differ(spec):
    again = replace(spec.rows["FedCCFA"], name="again")
    mine = replace(spec.rows["FedAvg"], name="mine", method="Mine")
    twice = replace(spec, rows=spec.rows | {"again": again, "mine": mine})
    styles = row_styles(twice, ["FedAvg", "FedCCFA", "again", "mine"])
    assert styles["FedCCFA"].colour != styles["again"].colour
    assert styles["FedCCFA"].dashes != styles["again"].dashes
    assert len({styles[row].colour for row in ("FedAvg", "FedCCFA", "again", "mine")}) == 4
    assert {s.colour for r, s in styles.items() if r in spec.rows} == {ACCENT, FOIL, REST}
    # the paper's own is on top of all but its dashed variants, and thick
    solid = [s.line["zorder"] for s in styles.values() if not s.dashes]
    assert styles["FedCCFA"].line["zorder"] == max(solid)
    assert [r for r, s in styles.items() if s.width == styles["FedCCFA"].width] == ["FedCCFA"]


def test_files(spec, tmp_path):
    put(spec, "smoke", tmp_path, dict(FedAvg=[60, 64]))

    def draw(name):
        return save_figure(accuracy_figure(spec, "smoke", tmp_path), tmp_path / name)

    one = draw("new/a.png")
    two = draw("new/b.png")
    assert one.read_bytes() == two.read_bytes()
    assert draw("a.pdf").read_bytes() == draw("b.pdf").read_bytes()
    with pytest.raises(InputError, match="'doc'.*png"):
        draw("a.doc")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        draw("file/a.png")
    assert not plt.get_fignums()


def test_names_stand_at_the_ends_of_their_lines(spec, tmp_path):
    "In the line's colour, beside its last value, apart from each other and below the panel's top"
    ends = dict(FedAvg=68.0, FedRep=87.6, IFCA=88.0, FedCCFA=89.0)
    put(spec, "smoke", tmp_path, {row: [end, end] for row, end in ends.items()})
    fig = accuracy_figure(spec, "smoke", tmp_path)
    ax = fig.axes[0]
    names = {text.get_text(): text for text in ax.texts if text.get_text() in ends}
    low, high = ax.get_ylim()
    places = {row: low + names[row].xy[1] * (high - low) for row in ends}
    assert np.isclose(places["FedAvg"], 68.0), "one that is alone stays where its line ends"
    heights = [names[row].xy[1] for row in sorted(ends, key=ends.get)]
    assert min(np.diff(heights)) > 0.099
    assert max(heights) <= 1
    assert to_hex(names["FedCCFA"].get_color()) == ACCENT
    assert not fig.legends[0].get_texts(), "no name stands twice"


def test_names_stand_in_the_legend_where_they_do_not_fit(spec, tmp_path):
    "Four lines that all end at the top, and names of many letters"
    rows = list(spec.rows)[:4]
    put(spec, "smoke", tmp_path, {row: [50.0, 90.0] for row in rows})
    long = curves(spec, "smoke", tmp_path)
    styles = row_styles(spec, rows)
    crowded, ax = plt.subplots()
    ax.set_ylim(0, 70)
    assert not label_ends(ax, long, spec.metric, styles)
    ax.set_ylim(60, 80)
    renamed = long.replace({"row": {rows[0]: "a name of more letters than fit"}})
    assert not label_ends(
        ax, renamed, spec.metric, {"a name of more letters than fit": Style(FOIL)}
    )
    assert [
        t.get_text() for t in label_ends(ax, long, spec.metric, {rows[0]: Style(FOIL)})
    ] == rows[:1]
    plt.close(crowded)


def test_what_single_runs_differ_by_looks_no_larger_than_it_is(tmp_path):
    "One seed a setting: points that no line joins, on an axis of at least five points"
    of = load_spec("fedccfa/figure5")
    for k, run in enumerate(of.runs("smoke", seeds=1)):
        rows = [{"round": t, of.metric: 64.5 + 0.2 * k} for t in range(1, run.rounds + 1)]
        toy.stored(run, rows, tmp_path)
    ax = draw(of, "smoke", tmp_path).axes[0]
    (bars,) = ax.containers
    assert bars.lines[0].get_linestyle() == "None"
    low, high = ax.get_ylim()
    assert high - low >= 5 - 1e-9
    assert low < 64.5
    assert high > 65.3
    assert ax.get_title() == "digits, 20 clients, one seed"
    assert not ax.figure.legends
    assert "\n" in ax.get_ylabel(), "an axis' words fit beside it"


def test_one_seed_has_no_error_bar(tmp_path):
    "A bar of length nothing would say that the seeds agree"
    of = load_spec("fedccfa/figure5")
    for k, run in enumerate(of.runs("smoke", seeds=1)):
        toy.stored(
            run, [{"round": t, of.metric: 50.0 + k} for t in range(1, run.rounds + 1)], tmp_path
        )
    (bars,) = [c for c in draw(of, "smoke", tmp_path).axes[0].containers]
    assert not bars.has_yerr


def test_the_papers_default_variant_is_thick_and_a_dashed_one_lies_above():
    "So that of two lines close together both are seen"
    both = load_spec("fedadc/figure2")
    red, blue = (row_styles(both, both.rows)[row] for row in list(both.rows)[::-1])
    assert (red.width, red.dashes, red.colour) == (1.6, "", ACCENT)
    assert blue.dashes
    assert blue.line["zorder"] > red.line["zorder"]
    assert blue.line["linewidth"] < red.line["linewidth"]
    weights = load_spec("fedccfa/table5")
    styles = row_styles(weights, weights.rows)
    assert max(styles, key=lambda row: styles[row].width) == "adaptive gamma=20"
    assert main_row(load_spec("fedccfa/table2")) == "FedCCFA"


@pytest.mark.parametrize("ends", [[float("nan"), 80.0], [float("nan")] * 2])
def test_a_line_that_does_not_end_in_a_number_has_no_name_at_its_end(spec, tmp_path, ends):
    "A metric of one's own may be NaN: the others are drawn as ever"
    rows = list(spec.rows)[:2]
    put(spec, "smoke", tmp_path, {row: [end] for row, end in zip(rows, ends)})
    fig = accuracy_figure(spec, "smoke", tmp_path)
    names = [text.get_text() for text in fig.axes[0].texts if text.get_text() in rows]
    assert names == [row for row, end in zip(rows, ends) if end == end]
    fig.canvas.draw()
    assert figure_in_words(spec, "smoke", tmp_path)
