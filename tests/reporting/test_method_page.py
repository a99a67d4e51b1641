"The pages of methods: what the five papers' pages have, and where sentences about released code lead"

import ast
import builtins
import re

import pytest

from fedrepro.reporting import method_page
from fedrepro.reporting.curves import ACCENT, FOIL, REST
from fedrepro.reporting.method_page import PAPER_LINKS
from pages import ROOT, cells
from toy import OURS

NBS = ROOT / "nbs/06_methods"
FIVE = {
    "lfd": NBS / "10_lfd.ipynb",
    "feddc": NBS / "11_feddc.ipynb",
    "fedadc": NBS / "12_fedadc.ipynb",
    "fedbss": NBS / "13_fedbss.ipynb",
    "fedccfa": NBS / "14_fedccfa.ipynb",
}
PAGES = sorted(NBS.glob("*.ipynb"))
PLACE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[\w./-]+#L\d+")


def outputs(cell, kind):
    "The outputs of a kind, such as text/markdown, of a cell"
    return ["".join(o["data"][kind]) for o in cell.get("outputs", []) if kind in o.get("data", {})]


@pytest.mark.parametrize("paper", FIVE)
def test_the_first_five_cells(paper):
    at = PAPER_LINKS[paper]
    first = cells(FIVE[paper])[:5]
    shown = "\n".join(text for c in first for text in outputs(c, "text/markdown"))
    for link in (
        f"https://arxiv.org/abs/{at.arxiv}",
        f"https://arxiv.org/pdf/{at.arxiv}",
        f"12_results/{at.results}.ipynb",
    ):
        assert link in shown
    assert (NBS.parent / f"12_results/{at.results}.ipynb").is_file()
    assert ("github.com" in shown) == bool(at.repository)
    assert at.commit in shown
    assert any(outputs(c, "image/png") for c in first)


@pytest.mark.parametrize("paper", FIVE)
def test_order_and_length(paper):
    made = cells(FIVE[paper])
    page = [c["source"] for c in made]
    assert len(page) <= (110 if paper in LESSONS else 60)

    def only(text):
        found = [
            i for i, s in enumerate(page) if text in s and "import" not in s.split(text)[0][-9:]
        ]
        return found[-1]

    drawing, table, numbers, ledger, last = map(
        only,
        ("message_figure(", "algorithm_table(", "stored_numbers(", "deviation_table(", "compare("),
    )
    assert max(drawing, table) < numbers < ledger < last == len(page) - 1
    assert f"12_results/{PAPER_LINKS[paper].results}.ipynb" in page[-2]
    assert page[-2].count("](") >= 2
    assert outputs(made[drawing], "image/png")
    assert outputs(made[last], "text/html")
    assert "<table" in outputs(made[numbers], "text/markdown")[0]
    assert "<details" in outputs(made[ledger], "text/markdown")[0]


# --- pages that build their method step by step

# paper -> the equations that its page shows
LESSONS = {
    "lfd": range(1, 11),
    "fedadc": range(1, 10),
    "fedbss": range(1, 7),
    "feddc": range(1, 7),
    "fedccfa": range(3, 11),
}
LARGE = 300_000  # bytes of such a page, outputs and all


@pytest.mark.parametrize("paper", LESSONS)
def test_a_lesson_shows_every_equation(paper):
    prose = [c["source"] for c in cells(FIVE[paper], "markdown")]
    shown = [
        n
        for n in LESSONS[paper]
        if any(re.search(rf"\(eq\. {n}\b", p) and "$$" in p for p in prose)
    ]
    assert shown == [*LESSONS[paper]]


@pytest.mark.parametrize("paper", LESSONS)
def test_a_lesson_opens_with_its_problem_and_a_picture(paper):
    "What is set by papermill, and imports, follow"
    made = cells(FIVE[paper])
    at = next(i for i, c in enumerate(made) if "parameters" in c["metadata"].get("tags", []))
    before = [c for c in made[:at] if c["cell_type"] == "code"]
    assert made[1]["source"].startswith("## The problem")
    assert any(outputs(c, "image/png") for c in before)
    assert max(c["source"].count("\n") for c in before) < 8


@pytest.mark.parametrize("paper", LESSONS)
def test_cells_of_a_lesson_are_short(paper):
    "At most 40 lines, but for a class, which is one idea"
    sources = [c["source"] for c in cells(FIVE[paper], "code")]
    assert [s for s in sources if s.count("\n") >= 40 and "\n@dataclass\nclass" not in s] == []
    assert FIVE[paper].stat().st_size < LARGE


# --- the algorithm, line by line


def test_a_drawing_has_every_message():
    for method in OURS.values():
        messages = method().communication()
        drawn = {
            step for step, way, _ in method_page.round_steps(messages, "works", "works") if way
        }
        assert drawn == {
            name
            for name in ("broadcast", "survey", "assigned", "upload", "reply")
            if getattr(messages, name)
        }


@pytest.mark.parametrize("paper", FIVE)
def test_code_fits_the_column(paper):
    assert not [
        line
        for c in cells(FIVE[paper], "code")
        for line in c["source"].split("\n")
        if len(line) > 110 and not line.startswith("#|")
    ]


# --- sentences about released code

SAYS = re.compile(
    r"released (?:code|server|version)|(?:authors'|official|FedDC's|FedDyn's|FedCCFA's) code"
    r"|\b[Tt]h(?:e|at) code(?:'s)?\b(?= \w)",
    re.S,
)


def statements():
    "(page, sentence) in prose about what a released code does"
    for path in PAGES:
        for cell in cells(path, "markdown"):
            for part in re.split(r"\n\s*\n|\n(?=- |\*\*)", cell["source"]):
                text = re.sub(r"\s+", " ", part)
                for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z`$*])", text):
                    if SAYS.search(sentence) and not sentence.startswith("#"):
                        yield path.stem, sentence


def test_sentences_about_released_code_lead_to_its_lines():
    said = [s for s in statements() if "could find" not in s[1]]
    alone = [s for s in said if not PLACE.search(s[1])]
    assert len(said) > 25 and len(alone) <= 0.2 * len(said), alone


COLOURS = re.compile(r"\b(?:black|gr[ae]y|orange|blue|red|green|violet|purple|pink|yellow)\b")


@pytest.mark.parametrize("paper", FIVE)
def test_an_opening_names_only_the_colours_that_every_figure_has(paper):
    "FedAvg is black, the paper's method orange, unlabelled rows grey; what the others get is chosen for each picture"
    assert (FOIL, ACCENT, REST) == ("#000000", "#d55e00", "#bbbbbb")
    opening = cells(FIVE[paper], "markdown")[:2]
    words = {word for cell in opening for word in COLOURS.findall(cell["source"])}
    assert words <= {"black", "orange", "grey"}, words


@pytest.mark.parametrize("paper", FIVE)
def test_the_runs_need_no_lesson(paper):
    "With `lessons: false` the cells between the parameters and the runs are passed over"
    sources = [cell["source"] for cell in cells(FIVE[paper], "code")]
    planned = next(i for i, s in enumerate(sources) if "job = planned_table(" in s)
    runs = next(s for s in sources if "papermill_description=Runs" in s)
    there = set(vars(builtins))
    for source in sources[: planned + 1]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.alias):
                there.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                there.add(node.id)
    used = {node.id for node in ast.walk(ast.parse(runs)) if isinstance(node, ast.Name)}
    assert used <= there
