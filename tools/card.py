"""nbs/card.png, which a link to the site shows elsewhere: `python tools/card.py`. Drawn from committed results."""
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from PIL import Image

from fedrepro.experiments import load_spec
from fedrepro.plots import METHOD_COLOURS
from fedrepro.store import load_results

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("FedAvg", "FedRep", "FedCCFA")


def curves():
    "Mean accuracy over seeds by method and round: Fashion-MNIST, 20 clients, sudden drift, tier small"
    spec = load_spec(ROOT / "papers/fedccfa/table2.toml")
    wanted = {c.run_id for c in spec.cells("small", methods=METHODS) if c.column == "Fashion-MNIST, 20 clients"}
    rows = load_results(spec.results / "small")
    rows = rows[rows.run_id.isin(wanted)]
    return rows.groupby(["method", "round"])["generalised_accuracy"].mean().unstack(0)


def draw(path: Path):
    "1200 by 630 pixels: name and purpose on the left, three curves on the right"
    matplotlib.use("agg")
    fig = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="#15202b")
    words = dict(color="white", ha="left", transform=fig.transFigure)
    fig.text(.055, .74, "fedrepro", fontsize=62, weight="bold", **words)
    fig.text(.058, .60, "Five federated-learning papers", fontsize=21.5, **words)
    fig.text(.058, .53, "and their baselines, explained in", fontsize=21.5, **words)
    fig.text(.058, .46, "notebooks and regenerated beside", fontsize=21.5, **words)
    fig.text(.058, .39, "the published numbers", fontsize=21.5, **words)
    fig.text(.058, .13, "LfD   FedDC   FedADC   FedBSS   FedCCFA", fontsize=16, **{**words, "color": "#9fb3c8"})
    ax = fig.add_axes((.575, .17, .345, .66), facecolor="#15202b")
    found = curves()
    colours = {"FedAvg": "#d7dee5", **{m: METHOD_COLOURS[m] for m in METHODS[1:]}}
    for method in METHODS:
        ax.plot(found.index, found[method], color=colours[method], lw=3.5)
        ax.text(found.index[-1] + 1, found[method].iloc[-1], method, color=colours[method], fontsize=15, va="center")
    ax.axvline(20.5, color="#9fb3c8", ls="--", lw=1)
    ax.text(21, 32, "concept drift", color="#9fb3c8", fontsize=13)
    ax.set_ylim(28, 95)
    ax.set_xlabel("round", color="#9fb3c8", fontsize=14)
    ax.set_title("accuracy (%), Fashion-MNIST, reduced runs", color="#9fb3c8", fontsize=14, loc="left")
    ax.tick_params(colors="#9fb3c8", labelsize=12)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#9fb3c8")
    fig.savefig(path, metadata={"Software": None})
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__": draw(ROOT / "nbs/card.png")
