"""Every link and anchor of a page leads somewhere, every picture is described; where quarto is, every page renders."""

import json
import re
import shutil
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

import website
from pages import NOTEBOOKS, ROOT, cells

PAGES = [*NOTEBOOKS, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "papers").rglob("*.md"))]
MARKDOWN = MarkdownIt("commonmark").enable("table")
BIBLIOGRAPHY = set(
    re.findall(r"^@\w+\{([\w:-]+),", (ROOT / "nbs/references.bib").read_text(), re.M)
)

ADDRESS = re.compile(
    r"https://(?:[\w-]+\.)+[a-z]{2,}(?:/[\w.~%/?#=&+,:@()-]*)?|mailto:[\w.+-]+@[\w.-]+\w"
)

BADGES = (
    "https://github.com/fedrepro/fedrepro/actions/workflows/",
    "https://img.shields.io/badge/licence-",
)


# --- what a page says


def texts(path):
    "The markdown of a page, cell by cell, with what its code cells put out as markdown"
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            yield cell["source"]
        for out in cell.get("outputs", []):
            if "text/markdown" in out.get("data", {}):
                yield "".join(out["data"]["text/markdown"])


@cache
def inline(path):
    "Every inline token of a page, with its text's block token"
    parsed = [MARKDOWN.parse(text) for text in texts(path)]
    return [
        pair
        for tokens in parsed
        for pair in zip([None, *tokens], tokens)
        if pair[1].type == "inline"
    ]


def slug(heading):
    "The anchor that pandoc gives a heading"
    text = re.sub(r"[^\w\s.-]", "", re.sub(r"`|\*|\$", "", heading).strip().lower())
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s", "-", text)) or "section"


@cache
def anchors(path):
    "Every anchor of a page: its headings, and ids written as {#id}"
    headings = [
        token.content for before, token in inline(path) if before and before.type == "heading_open"
    ]
    found = {slug(re.sub(r"\s*\{#[^}]*\}$", "", heading)) for heading in headings}
    written = r"\{#([\w:-]+)[^}]*\}", r'<(?:a|span|details) id="([\w.:-]+)"'
    return found | {
        name for text in texts(path) for form in written for name in re.findall(form, text)
    }


def links(path):
    "(kind, target) of every link and picture of a page"
    for _, token in inline(path):
        for child in token.children or []:
            if child.type == "link_open":
                yield "link", child.attrGet("href")
            if child.type == "image":
                yield "image", child.attrGet("src")


def broken(path):
    "What is wrong with a page's links"
    attached = {name for cell in cells(path) for name in cell.get("attachments", {})}
    for kind, target in links(path):
        url = urlsplit(target)
        if url.scheme == "attachment":
            if url.path not in attached:
                yield f"{target}: no such attachment"
        elif url.scheme or url.netloc:
            if kind == "image" and not (path.name == "README.md" and target.startswith(BADGES)):
                yield f"{target}: a picture from the network"
            elif not ADDRESS.fullmatch(target):
                yield f"{target}: no address of a page (https://...)"
        else:
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not file.exists():
                yield f"{target}: no such file"
            elif not file.is_relative_to(ROOT):
                yield f"{target}: outside of the repository"
            elif file in PAGES and url.fragment and url.fragment not in anchors(file):
                yield f"{target}: no heading"
    text = "\n".join(texts(path))
    said = "\n".join(
        c.content for _, token in inline(path) for c in token.children or [] if c.type == "text"
    )
    for name in re.findall(r"(?<![\w.@])@([A-Za-z](?:[\w:-]*\w)?)", said):
        if re.match("(sec|eq|fig|tbl)-", name):
            if not re.search(rf"\{{#{name}\b", text):
                yield f"@{name}: no such label"
        elif name not in BIBLIOGRAPHY:
            yield f"@{name}: not in references.bib"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links(path):
    assert not list(broken(path))


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n[a](#one-thing) [b](#two) [c](no.md) ![d](https://x.org/d.png) see @fig-none\n"
        "[f](http://x.org) [g](https://x) [i](https://x.org/a_(b)?c=1#d) and [@nobody2020]\n\n"
        "```\n[e](code.md)\n```\n`@dataclass`\n"
    )
    monkeypatch.setitem(globals(), "PAGES", [page])
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert [line.split(": ")[0] for line in broken(page)] == [
        "#two",
        "no.md",
        "https://x.org/d.png",
        "http://x.org",
        "https://x",
        "@fig-none",
        "@nobody2020",
    ]


# --- README and sidebar


def test_readme_is_the_index_page():
    from readme import readme

    assert (ROOT / "README.md").read_text() == readme(), (
        "README.md is not nbs/index.ipynb: run `make readme`"
    )


def listed(contents):
    for entry in contents:
        if isinstance(entry, str):
            yield entry
        elif "href" in entry:
            yield entry["href"]
        else:
            yield from listed(entry["contents"])


def test_sidebars_list_every_page_once():
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text())["website"]
    names = [page for bar in site["sidebar"] for page in listed(bar["contents"])]
    assert sorted(names) == [p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS]


def test_the_map_has_every_page():
    told = set(re.findall(r"\]\((nbs/[0-9].*?\.ipynb)\)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert told == {p.relative_to(ROOT).as_posix() for p in ROOT.glob("nbs/[0-9]*/*.ipynb")}


# --- what a page, a module or a spec refers to, its reader can open

MODULES = sorted(p for p in (ROOT / "fedrepro").rglob("*.py") if p.name != "_modidx.py")
PAPERS = sorted((ROOT / "papers").rglob("*.toml"))
NOTES = "(?:checks|data|design|engine|experiments|house|language|methods|metrics|models|sources|specs|style|verdicts)"
NOWHERE = re.compile(
    rf"""\({NOTES},?[ ]N?[0-9]+\)            # (metrics 13), (methods N7)
                      | (?<!\w)\({NOTES}:[ ][^)]*\)          # (specs: Which alpha); not def f(specs: list)
                      | (?<![\w.$\\^{{-])N[0-9]{{1,2}}(?!\w)  # N3
                      | \b[Tt]he[ ]issue\b | \b[Ii]ssue[ ]\#?[0-9]+ | \breview,?[ ][0-9]+""",
    re.X,
)
FILES = {p.name for p in PAGES if p.suffix == ".md"}


@cache
def ledger(folder):
    "The names of a paper's deviations; of all papers, outside of their folders"
    files = (
        [folder / "deviations.toml"]
        if (folder / "deviations.toml").exists()
        else (ROOT / "papers").glob("*/deviations.toml")
    )
    return {
        entry["name"] for file in files for entry in tomllib.loads(file.read_text())["deviation"]
    }


def unnamed(listed, names):
    "What is left of `A, B` when the names that it begins with are taken away; a name may have a comma of its own"
    while fits := [n for n in names if re.match(rf"{re.escape(n)}(?:[,;] |$)", listed)]:
        listed = listed[len(max(fits, key=len)) :].lstrip(",; ")
    return listed


def written(path):
    "All that a reader sees of a file; of a notebook markdown, code, and what it put out as text"
    if path.suffix != ".ipynb":
        return path.read_text()
    outputs = [out for cell in cells(path) for out in cell.get("outputs", [])]
    said = [
        "".join(part)
        for out in outputs
        for part in (
            out.get("text", ""),
            *(out.get("data", {}).get(f"text/{kind}", "") for kind in ("plain", "markdown")),
        )
    ]
    return "\n".join([*(cell["source"] for cell in cells(path)), *said])


def nowhere(path):
    "References of a file that lead nowhere: to notes that only their author has, to no entry of the ledger"
    text = written(path)
    yield from (hit[0] for hit in NOWHERE.finditer(text))
    yield from (
        hit[0] for hit in re.finditer(r"(?<![\w./{*-])[\w-]+\.md\b", text) if hit[0] not in FILES
    )
    for hit in re.finditer(r"\(deviations: ([^()]*)\)", text):
        if unnamed(" ".join(hit[1].split()), ledger(path.parent)):
            yield hit[0]


def test_references_lead_somewhere():
    assert {
        p.relative_to(ROOT).as_posix(): found
        for p in [*PAGES, *MODULES, *PAPERS]
        if (found := list(nowhere(p)))
    } == {}


@pytest.mark.parametrize(
    "said, found",
    [
        ("(metrics 13)", 1),
        ("(experiments, 2)", 1),
        ("(methods N7)", 1),
        ("(specs: Which alpha)", 1),
        ("as N13 says", 1),
        ("the issue's targets", 1),
        ("issue 16", 1),
        ("(second review, 2)", 1),
        ("experiments.md, section 2", 1),
        ("section N3 of models.md", 2),
        ("(deviations: Which alpha)", 1),
        ("(deviations: Cohorts, Beta)", 1),
        ("(deviations: Cohorts, FedDrift: previous data)", 0),
        (
            "README.md, https://x.org/notes.md, $N_1$, (upload 1), (paper 5.1), f(specs: list), an issue",
            0,
        ),
    ],
)
def test_a_reference_to_nothing_is_found(tmp_path, said, found):
    "In a module, in a page's markdown, code and output, in a spec beside its ledger"
    (tmp_path / "deviations.toml").write_text(
        '[[deviation]]\nname = "Cohorts"\n[[deviation]]\nname = "FedDrift: previous data"\n'
    )
    parts = [
        {"cell_type": "markdown", "source": [said]},
        {
            "cell_type": "code",
            "source": [f"# {said}"],
            "outputs": [{"text": [said]}, {"data": {"text/plain": [said]}}],
        },
    ]
    for name, text, times in [
        ("a.py", f'"{said}"', 1),
        ("a.toml", f'source = "guess: {said}"', 1),
        ("a.ipynb", json.dumps({"cells": parts}), 4),
    ]:
        (tmp_path / name).write_text(text)
        assert len(list(nowhere(tmp_path / name))) == found * times, name


# --- pictures


def speechless(path):
    "Pictures of a page without words: nothing, a file's name, or what a program says about every picture"
    for cell in cells(path):
        drawn = [out for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
        said = re.search(r"^#\| fig-alt: (\".+\")$", cell["source"], re.M)
        words = [
            yaml.safe_load(said[1])
            if said
            else out.get("metadata", {}).get("image/png", {}).get("alt", "")
            for out in drawn
        ]
        if any(len(w.split()) <= 7 for w in words):
            yield f"cell {cell.get('id')}: {said and said[1]}"
    for _, token in inline(path):
        for child in token.children or []:
            alt = child.content if child.type == "image" else "a page tells it in words"
            if len(alt.split()) < 4 or re.search(r"\.(png|svg|jpe?g)$|^No description", alt):
                yield f"picture {child.attrGet('src')}: {alt!r}"
            if child.type == "html_inline" and child.content.startswith("<img"):
                yield f"{child.content}: write ![...](...)"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_picture_is_described(path):
    assert not list(speechless(path))


def test_a_picture_without_words_is_found(tmp_path):
    page = tmp_path / "page.ipynb"
    drawn = [{"data": {"image/png": ""}}]
    page.write_text(
        json.dumps(
            {
                "cells": [
                    {
                        "cell_type": "markdown",
                        "source": [
                            "![](p.png) ![p.png](p.png) <img src='p.png'> ![Two curves that cross at round 5](p.png)"
                        ],
                    },
                    {"cell_type": "code", "source": ["plot()"], "outputs": drawn, "id": "a"},
                    {
                        "cell_type": "code",
                        "source": ['#| fig-alt: "A curve"\n'],
                        "outputs": drawn,
                        "id": "b",
                    },
                    {
                        "cell_type": "code",
                        "source": [
                            '#| fig-alt: "Two curves that rise, and then cross at round 5"\n'
                        ],
                        "outputs": drawn,
                        "id": "c",
                    },
                    {
                        "cell_type": "code",
                        "source": ["show()"],
                        "outputs": [
                            drawn[0]
                            | {
                                "metadata": {
                                    "image/png": {
                                        "alt": "Two curves that rise, and then cross at round 5"
                                    }
                                }
                            }
                        ],
                        "id": "d",
                    },
                ]
            }
        )
    )
    assert [line.split(":")[0] for line in speechless(page)] == [
        "cell a",
        "cell b",
        "picture p.png",
        "picture p.png",
        "<img src='p.png'>",
    ]
    assert (
        sum(
            "image/png" in out.get("data", {})
            for p in NOTEBOOKS
            for c in cells(p)
            for out in c.get("outputs", [])
        )
        > 50
    )


# --- rendering


@pytest.mark.skipif(
    not shutil.which("quarto"),
    reason="quarto is not on the path; links, anchors and pictures are checked in the sources",
)
def test_the_rendered_site(tmp_path):
    "nbdev names the pages without the number in front when quarto renders them"
    folder = website.build(tmp_path)
    html = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.html")}
    assert {re.sub(r"^\d+\w?_", "", p.stem) for p in NOTEBOOKS} <= {
        re.sub(r"^\d+\w?_", "", Path(name).stem) for name in html
    }


def test_pages_show_code_and_hide_the_machinery(tmp_path):
    """What a page teaches is on it, exported code included; nbdev's directives and hidden cells are not

    Imports are folded, a line below the title says where to run it, and every module has a page of the API."""
    processed = sorted((folder := website.prepare(tmp_path)).rglob("*.ipynb"))
    assert len(processed) == len(NOTEBOOKS)
    for path in processed:
        code = cells(path, "code")
        assert "blob/main/nbs/" + path.relative_to(folder).as_posix() in cells(path)[1]["source"]
        assert not any(
            re.match(r"(import|from) .*$(?:\n(import|from|    ).*$)*\Z", c["source"], re.M)
            for c in code
        ), path.name
        assert not any("text/html" in out.get("data", {}) for c in code for out in c["outputs"]), (
            path.name
        )
        assert not any(
            re.search(r"^#\|\s*(default_exp|export|hide)\b", c["source"], re.M) for c in code
        ), path.name
        source = next(p for p in NOTEBOOKS if p.name == path.name)
        exported = "\n".join(
            c["source"] for c in cells(source) if re.match(r"#\|\s*export", c["source"])
        )
        defined = set(re.findall(r"^(?:def|class) (\w+)", exported, re.M))
        shown = "\n".join(c["source"] for c in code)
        missing = {n for n in defined if not re.search(rf"^(?:def|class) {n}\b", shown, re.M)}
        assert not missing, f"{path.name} does not show {missing}"
    api = {p.stem: p.read_text() for p in (folder / "13_reference/api").glob("*.qmd")}
    assert set(api) == {
        name for p in NOTEBOOKS for name in re.findall(r"#\| default_exp ([\w.]+)", p.read_text())
    }
    assert re.search(
        r"^## run \{#run\}\n\n\[source\]\(https://\S+/engine/rounds\.py#L\d+\)\n\n```python\ndef run\(",
        api["engine.rounds"],
        re.M,
    )


# --- the API reference is what the package has


def test_api_reference_is_up_to_date(monkeypatch):
    "The stored page says what its code makes of the package now"
    monkeypatch.chdir(ROOT / "nbs")
    page = cells(ROOT / "nbs/13_reference/02_api.ipynb", "code")
    names = {"__name__": "api"}
    for cell in page:
        if not re.search(r"^Markdown\(", cell["source"], re.M):
            exec(cell["source"], names)
    stored = [
        "".join(out["data"]["text/markdown"])
        for cell in page
        for out in cell["outputs"]
        if "text/markdown" in out.get("data", {})
    ]
    assert stored == [names["index"]()], (
        "nbs/13_reference/02_api.ipynb is older than the package: run it again"
    )


# --- what publishes it

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflow(path):
    "It says what it may do and for how long; actions have a version; neither a secret nor what an event says reaches a command"
    flow = yaml.safe_load(text := path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    assert "pull_request_target" not in text
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= (120 if path.name == "nightly.yml" else 60)
        assert job.get("permissions") in (None, {"pages": "write", "id-token": "write"})
        for step in job["steps"]:
            assert (
                re.fullmatch(r"[\w.-]+/[\w./-]+@v\d+(\.\d+)*", step["uses"])
                if "uses" in step
                else "${{" not in step["run"]
            ), step
