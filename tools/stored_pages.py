"Runs the pages that show stored runs or specs again: all of them, or `python tools/stored_pages.py PAGE...`"

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "nbs/index.ipynb",
    "nbs/00_guides/03_add_table.ipynb",
    "nbs/00_guides/05_reproduce.ipynb",
    "nbs/07_experiments/04_specs.ipynb",
    "nbs/07_experiments/07_store.ipynb",
    "nbs/07_experiments/13_sweep.ipynb",
    "nbs/08_verdicts/00_independent.ipynb",
    "nbs/08_verdicts/01_summaries.ipynb",
    "nbs/08_verdicts/02_verdicts.ipynb",
    "nbs/08_verdicts/03_tables.ipynb",
    "nbs/08_verdicts/04_claims.ipynb",
    "nbs/08_verdicts/05_swings.ipynb",
    "nbs/08_verdicts/06_scoreboard.ipynb",
    "nbs/08_verdicts/07_agreement.ipynb",
    "nbs/08_verdicts/08_printed.ipynb",
    "nbs/08_verdicts/09_headlines.ipynb",
    "nbs/09_reporting/02_printed_tables.ipynb",
    "nbs/09_reporting/03_printed_claims.ipynb",
    "nbs/09_reporting/05_figures.ipynb",
    "nbs/09_reporting/06_export.ipynb",
    "nbs/09_reporting/09_paper_page.ipynb",
    "nbs/09_reporting/10_method_page.ipynb",
    "nbs/09_reporting/11_page_text.ipynb",
    "nbs/09_reporting/12_deviations.ipynb",
    "nbs/09_reporting/13_paper_facts.ipynb",
    "nbs/11_cli/00_options.ipynb",
    "nbs/11_cli/02_reproduce.ipynb",
    "nbs/11_cli/04_look_up.ipynb",
    "nbs/11_cli/05_main.ipynb",
    "nbs/12_results/00_summary.ipynb",
    "nbs/12_results/01_fedccfa.ipynb",
    "nbs/12_results/02_lfd.ipynb",
    "nbs/12_results/03_fedadc.ipynb",
    "nbs/12_results/04_fedbss.ipynb",
    "nbs/12_results/05_feddc.ipynb",
    "nbs/12_results/06_checklists.ipynb",
    "nbs/13_reference/04_speed.ipynb",  # shows the stored measurements
)
# pages that train for their lessons: only their cells with the tag `stored` run
TAGGED_PAGES = (
    "nbs/06_methods/10_lfd.ipynb",
    "nbs/06_methods/11_feddc.ipynb",
    "nbs/06_methods/12_fedadc.ipynb",
    "nbs/06_methods/13_fedbss.ipynb",
    "nbs/06_methods/14_fedccfa.ipynb",
)


def run_again(page: Path) -> None:
    "Runs a page, or only its tagged cells where it has any, and writes the new outputs into it"
    notebook = nbformat.read(page, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(page.parent)}},
    )
    tagged = [cell for cell in notebook.cells if "stored" in cell.metadata.get("tags", [])]
    with client.setup_kernel():
        for position, cell in enumerate(notebook.cells):
            if cell.cell_type == "code" and (cell in tagged or not tagged):
                client.execute_cell(cell, position)
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})
    nbformat.write(notebook, page)


def main(pages: list[str]) -> None:
    "Runs these pages again, or all that show stored runs or specs"
    for page in pages or [*PAGES, *TAGGED_PAGES]:
        print(page, flush=True)
        run_again(ROOT / page)


if __name__ == "__main__":
    main(sys.argv[1:])
