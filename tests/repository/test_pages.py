"What readers of the site met, checked in the sources: contents, folded parts, tables, anchors, colours and sizes"

import html
import json
import re

import nbformat
import pandas as pd
import pytest
import yaml

import stored_pages
import website
from fedrepro.reporting.method_page import deviation_table
from fedrepro.reporting.grids import CELL_COLOURS
from fedrepro.experiments.specs import load_spec
from fedrepro.reporting.paper_page import at_chance, box, heading_of, papers
from fedrepro.reporting.page_text import folded, specs_of
from fedrepro.verdicts.claims import read_claims
from pages import NOTEBOOKS, ROOT, cells
from test_docs import anchors, texts

RESULTS = [p for p in NOTEBOOKS if p.parent.name == "12_results"]
PAPER_PAGES = [p for p in RESULTS if p.stem[3:] in papers()]
NAME = dict(ids=lambda p: p.relative_to(ROOT / "nbs").as_posix())


# --- anchors


def lost(path):
    "Links of a page to places of pages that are not there, also those within HTML"
    for target in re.findall(r'href="([^"]+)"|\]\(([^)\s]+)\)', "\n".join(texts(path))):
        file, _, place = html.unescape("".join(target)).partition("#")
        page = (path.parent / file).resolve() if file else path
        if (
            place
            and not file.startswith("http")
            and page in NOTEBOOKS
            and place not in anchors(page)
        ):
            yield "".join(target)


@pytest.mark.parametrize("path", NOTEBOOKS, **NAME)
def test_every_anchor_is_there(path):
    assert not list(lost(path))


def test_a_lost_anchor_is_found(tmp_path, monkeypatch):
    page = tmp_path / "one_page.ipynb"
    other = tmp_path / "two.ipynb"
    monkeypatch.setitem(globals(), "NOTEBOOKS", [page, other])

    def write(path, text):
        path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [text]}]}))

    write(other, "# Two\n## A part\n<span id='x'></span><span id=\"runs-1\"></span>")
    write(
        page,
        '<a href="two.ipynb#a-part">1</a> <a href="two.ipynb#lost">2</a> [3](two.ipynb#runs-1) [4](#here) <a href="two&#46;ipynb#gone">5</a> <a href="https://x.org/#y">6</a>',
    )
    assert list(lost(page)) == ["two.ipynb#lost", "#here", "two&#46;ipynb#gone"]


# --- what pandoc reads

BLOCK = re.compile(r"\(?(?:\d+|[A-Za-z#]|[ivxlIVXL]+)[.)] |[-+*:>|] |#+ ")


@pytest.mark.parametrize("path", NOTEBOOKS, **NAME)
def test_a_summary_starts_no_list(path):
    "Pandoc reads Markdown between raw tags: `1. ` there is a list, which swallows the end of its tag"
    summaries = re.findall(r"<summary>(.*?)</summary>", "\n".join(texts(path)), re.S)
    assert [s for s in summaries if BLOCK.match(s) or "\n" in s] == []


def test_a_summary_is_one_line_of_text():
    for text in ("1. Released code", "a) first", "(iv) fourth", "- dash", "# sharp", "IV. four"):
        line = re.search("<summary>(.*)</summary>", folded(text, "..."))[1]
        assert not BLOCK.match(line)
        assert html.unescape(line) == text
    line = re.search("<summary>(.*)</summary>", folded("a*b*c [d](e) `f` $g$ <h>", "..."))[1]
    assert not set("*[]`$<>") & set(line)
    assert html.unescape(line) == "a*b*c [d](e) `f` $g$ <h>"


@pytest.mark.parametrize("path", RESULTS, **NAME)
def test_no_fence_is_left_open(path):
    assert ":::" not in "\n".join(texts(path))


@pytest.mark.parametrize("path", RESULTS, **NAME)
def test_headings_reach_the_contents(path):
    "Quarto lists a heading that a cell puts out only where the output stands by itself: `output: asis`"
    for cell in cells(path, "code"):
        said = "\n".join(
            "".join(out.get("data", {}).get("text/markdown", "")) for out in cell["outputs"]
        )
        assert "#| output: asis" in cell["source"] or not re.search("^#+ ", said, re.M), cell[
            "source"
        ]


@pytest.mark.parametrize("path", PAPER_PAGES, **NAME)
def test_every_table_has_a_heading_of_its_own(path):
    specs = specs_of(path.stem[3:])
    names = [heading_of(spec, specs) for spec in specs]
    headings = re.findall("^### (.*)$", "\n".join(texts(path)), re.M)
    assert len(set(names)) == len(names)
    assert len(set(headings)) == len(headings)
    assert headings
    assert [h for h in map(html.unescape, headings) if h not in names] == []


@pytest.mark.parametrize("path", PAPER_PAGES, **NAME)
def test_a_table_says_what_a_cell_holds(path):
    "Ours and, below, published: in the table's caption"
    tables = re.findall(r'<table class="numbers">.*?</table>', "\n".join(texts(path)), re.S)
    with_published = [t for t in tables if "<br><small>" in t]
    assert all(
        "<caption>ours" in t and "published" in t.split("</caption>")[0] for t in with_published
    )


def wrong_pictures(found):
    "The cells with an alternative text that do not put out one picture; a loop may show several"
    wrong = []
    for cell in found:
        pictures = [out for out in cell["outputs"] if "image/png" in out.get("data", {})]
        looped = "    plt.show()" in cell["source"]
        if "#| fig-alt" in cell["source"] and not (len(pictures) == 1 or looped and pictures):
            wrong.append(cell["source"])
    return wrong


def test_an_alternative_text_stands_over_its_own_picture():
    "A cell that was changed and not run again has the pictures of before, or none"
    for path in NOTEBOOKS:
        assert not wrong_pictures(cells(path, "code")), path
    picture = {"data": {"image/png": ""}}
    for shown in ([], [picture, picture]):
        assert wrong_pictures([{"source": "#| fig-alt: bars\nplt.show()", "outputs": shown}])


# --- the box, and what stands below it


@pytest.mark.parametrize("path", PAPER_PAGES, **NAME)
def test_a_page_opens_with_its_headline(path):
    first = next(cell for cell in cells(path, "code") if cell["outputs"])
    text = "".join(first["outputs"][0]["data"]["text/markdown"])
    assert text.startswith("> **What the paper is about.** ")
    assert "<details>" in text
    assert re.search(
        "reproduced|supported|contradicted|undecided|not tested yet|cannot be tested yet", text
    )


def boxes_shown(path, paper):
    "What the cells of a page put out that show `box(paper)`, by a call or by the name of one before"
    shown = []
    names = []
    for cell in cells(path, "code"):
        source = "".join(cell["source"])
        names += re.findall(rf'^(\w+) = box\("{paper}"\)', source, re.M)
        has = f'box("{paper}")' in source or any(f"Markdown({name}" in source for name in names)
        said = [out["data"].get("text/markdown", "") for out in cell["outputs"] if "data" in out]
        if has and said:
            shown.append("\n".join("".join(text) for text in said))
    return shown


def test_a_box_that_a_page_shows_twice_is_found_twice(tmp_path):
    out = nbformat.v4.new_output("display_data", {"text/markdown": "> old"})
    sources = ['found = box("lfd")\nMarkdown(found)', "Markdown(found)", "Markdown(other)"]
    made = [nbformat.v4.new_code_cell(source, outputs=[out]) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=made), tmp_path / "page.ipynb")
    assert boxes_shown(tmp_path / "page.ipynb", "lfd") == ["> old", "> old"]


@pytest.mark.parametrize("paper", papers())
def test_every_page_has_the_box_that_follows_from_the_store(paper):
    "The results page of a paper, and that of its method"
    said = box(paper).strip()
    pages = []
    for path in NOTEBOOKS:
        boxes = boxes_shown(path, paper)
        if boxes:
            pages.append(path)
            assert all(said in text for text in boxes), path.name
    assert {"06_methods", "12_results"} <= {page.parent.name for page in pages}


@pytest.mark.parametrize("paper", papers())
def test_the_page_of_a_method_has_the_deviations_that_the_ledger_has(paper):
    said = deviation_table(paper).strip()
    pages = []
    for path in NOTEBOOKS:
        sources = ["".join(cell["source"]) for cell in cells(path, "code")]
        whole = any(f'Markdown(deviation_table("{paper}"))' in source for source in sources)
        if path.parent.name == "06_methods" and whole:
            pages.append(path.name)
            assert said in "\n".join(texts(path)), path.name
    assert len(pages) == 1


def test_the_summary_and_the_readme_have_every_headline():
    for path in (ROOT / "nbs/12_results/00_summary.ipynb", ROOT / "README.md"):
        text = "\n".join(texts(path))
        assert text.count("> - **") == sum(bool(claim.headline) for claim in read_claims())
        named = set(re.findall(r"> - \*\*(.+?)\.\*\*", text))
        assert {name.lower() for name in named} == set(papers())
        table = "| paper |" if path.suffix == ".md" else "<table"
        assert text.index("> - **") < text.index(table)


def tags(cell):
    "The tags of a cell"
    return cell["metadata"].get("tags", [])


def run_ids():
    "How pages name the stored runs: the first digits of their ids"
    files = (ROOT / "papers").glob("*/results/*/*.jsonl")
    return {file.stem.split("-")[-1][:8] for file in files}


def test_make_results_runs_every_cell_that_shows_what_is_stored():
    "Each cell whose output has a claim's sentence or a run's id: of a whole page, or tagged"
    sentences = {claim.headline for claim in read_claims() if claim.headline}
    ids = run_ids()
    showing = set()
    for path in NOTEBOOKS:
        page = path.relative_to(ROOT).as_posix()
        for cell in cells(path, "code"):
            shown = json.dumps([output.get("data", output) for output in cell["outputs"]])
            said = any(sentence in shown for sentence in sentences)
            named = ids & set(re.findall(r"\b[0-9a-f]{8}\b", shown))
            if said or named:
                showing.add(page)
                assert page in stored_pages.PAGES or "stored" in tags(cell), (page, cell["source"])
    assert len(showing) > 10


def test_make_results_knows_the_pages_with_tagged_cells():
    tagged = [
        path.relative_to(ROOT).as_posix()
        for path in NOTEBOOKS
        if any("stored" in tags(cell) for cell in cells(path, "code"))
    ]
    assert tagged == list(stored_pages.TAGGED_PAGES)
    assert not set(tagged) & set(stored_pages.PAGES)


INTERNAL = re.compile(r"per hour|specs can be run|decided per|tier paper, never")


@pytest.mark.parametrize("path", RESULTS, **NAME)
def test_no_internal_words(path):
    assert not INTERNAL.findall("\n".join(texts(path)))


# --- pictures


@pytest.mark.parametrize("path", PAPER_PAGES, **NAME)
def test_every_picture_says_what_it_shows(path):
    "In its own words, no two alike; quarto gets them as a list, one for each output of a cell"
    pictures = [
        out
        for cell in cells(path, "code")
        for out in cell["outputs"]
        if "image/png" in out.get("data", {})
    ]
    words = [out["metadata"]["image/png"]["alt"] for out in pictures]
    assert len(set(words)) == len(words)
    assert all(len(w.split()) > 7 for w in words)


def test_quarto_gets_the_words_of_each_picture():
    drawn = {
        "output_type": "display_data",
        "data": {"image/png": ""},
        "metadata": {"image/png": {"alt": 'Lines: "A" ahead'}},
    }
    text = {"output_type": "display_data", "data": {"text/markdown": "### One"}, "metadata": {}}
    cell = nbformat.from_dict(
        {"cell_type": "code", "source": "#| echo: false\nshow()", "outputs": [text, drawn]}
    )
    options = yaml.safe_load("\n".join(re.findall(r"^#\| (.*)$", website.described(cell), re.M)))
    assert options == {"fig-alt": ["", 'Lines: "A" ahead'], "echo": False}
    assert (
        website.described(
            nbformat.from_dict({"cell_type": "code", "source": "x", "outputs": [text]})
        )
        == "x"
    )


def test_search_finds_lessons_before_modules():
    "Whatever quarto's order is; where to run a page is no answer to a search for `install`"
    where = "Open in Colab (run %pip install -q git+https://x.org first there first) · Download the notebook"
    items = [
        {
            "href": "13_reference/api/core.files.html#stamp",
            "title": "core.files",
            "text": "s " * 500,
        },
        {
            "href": "00_guides/reproduce.html",
            "title": "Reproduce",
            "text": f"{where}\nBy one command",
        },
        {"href": "13_reference/questions.html", "title": "Questions", "text": "How long?"},
    ]
    found = website.sorted_search(items)
    assert [item["title"] for item in found] == ["Reproduce", "Questions", "core.files"]
    assert "install" not in found[0]["text"]
    assert "By one command" in found[0]["text"]
    assert found[1] == items[2]
    assert len(found[2]["text"]) == 200


def test_llms_txt_lists_every_page_then_the_modules():
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    lines = website.llms(config, ROOT / "nbs", ["core.files", "core.trees"]).splitlines()
    listed = [line for line in lines if line.startswith("- [")]
    assert len(listed) == len(NOTEBOOKS) + 2
    assert all(
        re.fullmatch(r"- \[.+\]\(https://\S+/[a-z]\w*\.html\): \S.*", x) for x in listed[:-2]
    )
    assert listed[-1].endswith("/13_reference/api/core.trees.html)")
    assert lines.index("## Start") < lines.index("## Developers") < lines.index("## API")


def test_the_api_shows_docstrings_as_they_are_written():
    "Asterisks outside of code are escaped; a function without a docstring has none"

    def power(x):
        "x ** 2, which is `x * x`"

    def bare(x):
        return x

    assert r"*x \*\* 2, which is `x * x`*" in website.rendered(power)
    assert website.rendered(bare).strip().endswith("```")


# --- colours and sizes

STYLES = re.sub(r"/\*.*?\*/", "", (ROOT / "nbs/styles.scss").read_text(), flags=re.S)
RULES = [
    (selector.strip(), dict(re.findall(r"([\w-]+):\s*([^;]+);", body)))
    for many, body in re.findall(r"([^{};]+)\{([^{}]*)\}", STYLES[: STYLES.index("@media print")])
    for selector in re.split(r",(?![^(]*\))", many)
]
PAPER = {"light": "#ffffff", "dark": "#222222"}  # of the themes cosmo and darkly


def light(colour):
    "Relative luminance as WCAG has it"
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(
        w * (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4)
        for w, c in zip((0.2126, 0.7152, 0.0722), parts)
    )


def contrast(a, b):
    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_what_is_wide_scrolls_by_itself():
    "Formulas, also in lines of text, tables and outputs: on a phone the page must not"
    scrolls = {selector for selector, rule in RULES if rule.get("overflow-x") == "auto"}
    for part in ("p:has(math)", "span.math", "table", ".cell-output-display"):
        assert any(part in selector for selector in scrolls), part
    code = [rule for selector, rule in RULES if selector == "main.content pre.sourceCode code"]
    assert any(rule.get("overflow-wrap") == "anywhere" for rule in code)


def test_print_has_the_text_alone():
    "As wide as the sheet: without quarto's columns, and nothing is cut where a screen would scroll"
    sheet = STYLES[STYLES.index("@media print") :]
    rules = {}
    for many, body in re.findall(r"([^{};]+)\{([^{}]*)\}", sheet):
        for selector in many.split(","):
            found = dict(re.findall(r"([\w-]+):\s*([^;]+);", body))
            rules[selector.strip()] = rules.get(selector.strip(), {}) | found
    assert rules["body.docked #quarto-content.page-columns"]["display"] == "block"
    assert rules["body.docked #quarto-content main.content"]["max-width"] == "none"
    for part in ("#quarto-header", "#quarto-sidebar", "#quarto-margin-sidebar", ".page-navigation"):
        assert rules[part]["display"] == "none !important"
    scrolls = {selector for selector, rule in RULES if rule.get("overflow-x") == "auto"}
    for part in ("main.content table", ".cell-output-display"):
        assert part in scrolls
        assert rules[part]["overflow"] == "visible"
    assert rules["main.content pre"]["white-space"] == "pre-wrap"


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#808080", "#ffffff") == pytest.approx(3.95, abs=0.01)


@pytest.mark.parametrize("mode", PAPER)
def test_text_stands_out(mode):
    "Every colour of text on its page, and links on the colours of verdicts"
    mine = [
        (s, rule["color"])
        for s, rule in RULES
        if "color" in rule and s.startswith(f".quarto-{mode} ")
    ]
    assert len(mine) >= 8
    for selector, colour in mine:
        grounds = (
            [ground for ground, _ in CELL_COLOURS.values()]
            if "background" in selector
            else [PAPER[mode]]
        )
        assert min(contrast(colour, ground) for ground in grounds) >= 4.5, selector
    named = [s for s, rule in RULES if "color" in rule and not s.startswith(".quarto-")]
    assert named == [], "a colour for both modes cannot stand out in both"


def specificity(selector):
    "(ids, classes, elements) of a selector"
    plain = re.sub(r"\[[^]]*\]", ".a", selector)
    return (
        len(re.findall(r"#[\w-]+", plain)),
        len(re.findall(r"\.[\w-]+|:(?!:)[\w-]+", plain)),
        len(re.findall(r"(?:^|[\s>+])[a-z]\w*", plain)),
    )


def test_specificity():
    assert (
        specificity("main.content pre.sourceCode code")
        == (0, 2, 3)
        > specificity("pre.sourceCode")
        == (0, 1, 1)
        > specificity("main pre")
        == (0, 0, 2)
    )


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("main.content pre.sourceCode", "pre.sourceCode"),
        ("main.content table", ".table"),
        ("main.content table td", ".table > * > *"),
    ],
)
def test_our_rules_win(ours, theirs):
    "Quarto and Bootstrap name classes: a rule of elements alone loses to theirs"
    assert ours in [s for s, _ in RULES]
    assert specificity(ours) > specificity(theirs)


def test_code_holds_110_characters():
    "At 1280 pixels: both columns and their gaps leave the rest; a character of a monospaced font is .6 of its size"
    sizes = {s: rule["font-size"] for s, rule in RULES if "font-size" in rule}
    left, right = (int(n) for n in re.findall(r"(\d+)px(?=\s*\[(?:body-start|page-end)\])", STYLES))
    room = min(1000, 1280 - left - right - 2.2 * 17) - 2 * 0.4 * 17  # pixels; 17 in a rem
    assert (
        room / (0.6 * 17 * float(sizes["main.content pre.sourceCode"].removesuffix("rem"))) >= 110
    )


def test_tables_have_lines_and_room():
    (cell,) = [rule for s, rule in RULES if s == "main.content table td"]
    assert "border-bottom" in cell
    assert float(re.search(r"([\d.]+)em$", cell["padding"])[1]) >= 0.5
    assert all(
        dict(RULES)[s]["text-align"] == "right"
        for s in ("main.content table.numbers td + td", "main.content table td.number")
    )


# --- what a page says of methods at chance


def test_chance_is_said_only_of_accuracies_at_chance(tmp_path):
    "With what shows that the code is right; neither of a difference of tables, nor of a method that is below chance or above it somewhere"
    of = load_spec("fedadc/table1")
    frame = pd.DataFrame(
        [
            dict(row=row, column=c.label, mean=mean, metric=of.metric)
            for row, means in dict(
                MOON=(9.9, 10.2), FedAvg=(10.0, 40.0), FedProx=(5.0, 5.0)
            ).items()
            for c, mean in zip(of.tier_columns("small"), means)
        ]
    )
    (said,) = at_chance(of, "small", frame, tmp_path)
    assert (
        said
        == "MOON is at chance here. What speaks for its code: its checks hold (MOON(mu=0.0) = FedAvg())."
    )
    assert at_chance(load_spec("fedccfa/table8"), "small", frame) == []
