"""Every table and figure at tier smoke: `python tools/smoke.py out/smoke [SPEC ...]` runs, prints and draws each; names those that cannot be.

The results stay in the folder, and a second call goes on from them. Exit code 1 unless every cell of every table is a
number (or diverged) and every figure is drawn; a table of differences is printed only."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from fedrepro.core.folders import find_specs
from fedrepro.experiments.progress import brief
from fedrepro.experiments.runner import compute_runs
from fedrepro.experiments.specs import Spec, load_spec
from fedrepro.reporting.curves import save_figure
from fedrepro.reporting.figures import draw
from fedrepro.reporting.printed_tables import render
from fedrepro.verdicts.tables import table

TIER = "smoke"


def trouble(spec: Spec, folder: Path) -> str:
    "What is wrong with a table or figure as it is shown; empty when nothing is"
    results = folder / spec.folder
    name = spec.name.replace("/", "_")
    try:
        if not spec.difference:
            # else: no curves of its own
            save_figure(draw(spec, TIER, results), folder / f"{name}.png", dpi=60)
        if spec.kind != "table":
            return ""
        text = render(spec, TIER, "text", results)
    except Exception as error:
        return brief(error)
    (folder / f"{name}.txt").write_text(text)
    lines = table(spec, TIER, results)  # a row that only the paper has is never run
    empty = int((lines["verdict"] == "not run")[lines["row"].isin(spec.rows)].sum())
    return f"{empty} cells have no run" if empty else ""


def main(folder: Path, names: list[str], workers: int = 2) -> int:
    specs = [load_spec(name) for name in names or find_specs()]
    planned: dict[str, list] = {}
    for spec in specs:
        planned.setdefault(spec.folder, []).extend(spec.runs(TIER, seeds=1))
    failed = {}
    for paper, runs in planned.items():
        report = compute_runs(runs, folder / paper, workers=workers)
        print(f"{paper}: {report.summary()}", flush=True)
        failed |= report.failed
        if report.interrupted:
            return report.exit_code
    found = {spec.name: why for spec in specs if (why := trouble(spec, folder))}
    for name, why in [*((c.describe(), why) for c, why in failed.items()), *found.items()]:
        print(f"{name}: {why}")
    print(f"{len(specs)} tables and figures, {len(found)} with trouble, {len(failed)} runs failed")
    return 1 if found or failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
