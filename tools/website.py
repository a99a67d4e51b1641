"""The documentation site: `python tools/website.py FOLDER` renders it there, by quarto where that is installed.

Without quarto the pages are rendered plainly, in the order of `_quarto.yml`: all pages, links, anchors, pictures, no
search. With pandoc on the path formulas become MathML, as quarto makes them; one that has none ends the command."""
import configparser
import html
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import yaml
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbconvert import HTMLExporter
from nbconvert.exporters.templateexporter import TemplateExporter
from nbconvert.filters.highlight import Highlight2HTML
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parent.parent
JUNK = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".last_checked")
MATH = ("math_inline", "math_inline_double", "math_block")
DIRECTIVE = re.compile(r"^#\|[ \t]*([\w-]+):?[ \t]*(.*)\n?", re.M)


# --- what quarto and the plain site are given

def do(*command, folder: Path, **how) -> str:
    "What a command prints; raises RuntimeError with what it says if it fails"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "1"}, **how)
    if done.returncode: raise RuntimeError(f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def address() -> str:
    "Where the repository's files are shown"
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    return f"{settings['DEFAULT']['git_url']}/blob/{settings['DEFAULT']['branch']}"


def outward(text: str, page: str) -> str:
    "Links of a page in nbs/ to files of the repository that are not in nbs/, as addresses"
    def absolute(found):
        path = posixpath.normpath(posixpath.join("nbs", posixpath.dirname(page), found[1]))
        inside = path.startswith("nbs/") or path.startswith("..")
        return found[0] if inside else f"]({address()}/{path}{found[2] or ''})"
    return re.sub(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)", absolute, text)


def prepare(folder: Path) -> Path:
    "The pages as nbdev hands them to quarto, in `folder`/_proc, with links that hold outside of the repository"
    for name in ("nbs", "fedrepro"): shutil.copytree(ROOT / name, folder / name, ignore=JUNK)
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml"): shutil.copy(ROOT / name, folder)
    do(sys.executable, "-c", "from nbdev.serve import proc_nbs; proc_nbs(n_workers=2)", folder=folder)
    for path in sorted((folder / "_proc").rglob("*.ipynb")):
        page, nb = path.relative_to(folder / "_proc").as_posix(), nbformat.read(path, as_version=4)
        for cell in nb.cells:
            if cell.cell_type == "markdown": cell.source = outward(cell.source, page)
            for out in cell.get("outputs", []):
                if "text/markdown" in out.get("data", {}):
                    out.data["text/markdown"] = outward(out.data["text/markdown"], page)
        nbformat.write(nb, path)
    return folder / "_proc"


# --- markdown as pandoc reads it

def slug(heading: str) -> str:
    "The anchor that pandoc gives a heading"
    text = re.sub(r"[^\w\s.-]", "", re.sub(r"`|\*|\$", "", heading).strip().lower())
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s", "-", text)) or "section"


class Markdown:
    "Markdown of one page to HTML: anchors are unique, formulas are what `formulas` has for them, or TeX"
    def __init__(self, formulas: dict[tuple[str, bool], str]):
        self.ids, self.formulas = {}, formulas
        self.parser = MarkdownIt("commonmark", {"html": True}).enable("table").use(
            dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=True)
        rules = self.parser.renderer.rules
        for kind in MATH: rules[kind] = self.formula

    def formula(self, tokens, i, *_):
        shown = tokens[i].type != "math_inline"
        tex = " ".join(tokens[i].content.split())
        return self.formulas.get((tex, shown)) or f'<code class="math">{html.escape(tex)}</code>'

    def __call__(self, text: str) -> str:
        tokens = self.parser.parse(text)
        for opening, inline in zip(tokens, tokens[1:]):
            if opening.type != "heading_open": continue
            given = re.search(r"\s*\{#([\w:.-]+)[^}]*\}$", inline.content)
            if given: inline.children[-1].content = re.sub(r"\s*\{#[^}]*\}$", "", inline.children[-1].content)
            name = given[1] if given else slug(inline.content)
            times = self.ids[name] = self.ids.get(name, -1) + 1
            opening.attrSet("id", f"{name}-{times}" if times else name)
        return re.sub(r'(href="(?!https?:)[^"#]*)\.ipynb(["#])', r"\1.html\2",
                      self.parser.renderer.render(tokens, self.parser.options, {}))


def formulas(texts: list[str]) -> dict[tuple[str, bool], str]:
    "(TeX, displayed) -> MathML by pandoc; empty where there is none. Raises RuntimeError for what has no MathML"
    if not shutil.which("pandoc"): return {}
    seen, finder = set(), Markdown({})
    def note(tokens, i, *_):
        seen.add((" ".join(tokens[i].content.split()), tokens[i].type != "math_inline"))
        return ""
    for kind in MATH: finder.parser.renderer.rules[kind] = note
    for text in texts: finder(text)
    wanted = sorted(seen)
    asked = "\n\n".join(f"$${tex}$$" if shown else f"${tex}$" for tex, shown in wanted)
    done = subprocess.run(["pandoc", "--from=markdown", "--to=html", "--mathml", "--wrap=none"], input=asked,
                          capture_output=True, text=True)
    if done.stderr: raise RuntimeError(done.stderr)
    return dict(zip(wanted, re.findall(r"<math.*?</math>", done.stdout, re.S), strict=True))


# --- the plain site

class Body(HTMLExporter):
    "The cells of a page as HTML"
    def from_notebook_node(self, nb, markdown: Markdown):
        self.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3", parent=self))
        self.register_filter("clean_html", lambda text: text)  # cleaning it would take most of the time
        self.register_filter("markdown2html", markdown)
        for cell in nb.cells:
            if cell.cell_type == "code": self.obey(cell)
        return TemplateExporter.from_notebook_node(self, nb)[0]

    def obey(self, cell):
        "Quarto's directives: `fig-alt` is told by the pictures, a cell with `echo: false` shows its outputs only"
        said = {name: value for name, value in DIRECTIVE.findall(cell.source)}
        cell.source = DIRECTIVE.sub("", cell.source)
        if said.get("echo") == "false": cell.transient = {"remove_source": True}
        if alt := yaml.safe_load(said.get("fig-alt") or "null"):
            for out in cell.outputs:
                if "image/png" in out.get("data", {}): out.metadata["image/png"] = {"alt": alt}


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} – fedrepro</title><link rel="icon" href="{up}favicon.svg"><link rel="stylesheet" href="{up}plain.css">
<link rel="stylesheet" href="{up}styles.css"></head>
<body><header><a href="{up}index.html">fedrepro</a> {bar}<a href="#all-pages">Pages</a></header>
<main><h1>{title}</h1><p class="description">{description}</p>
{body}</main><nav id="all-pages">{nav}</nav></body></html>
"""
PLAIN = """body { margin: 0; font: 16px/1.5 system-ui, sans-serif; color: #222; }
header { padding: .6em 1em; background: #1a5fb4; } a { color: #1a5fb4; }
header a { color: #fff; margin-right: 1em; text-decoration: none; } header > a:first-child { font-weight: 600; }
nav { padding: .5em 1em; font-size: 14px; } nav ul { list-style: none; margin: 0 0 .3em; padding-left: .7em; }
main { padding: 0 1em 4em; max-width: 54em; min-width: 0; overflow-wrap: break-word; }
.description { color: #555; border-left: 3px solid #ddd; padding-left: .8em; }
pre { overflow-x: auto; background: #f6f7f8; padding: .6em; margin: .6em 0; font-size: 13px; line-height: 1.4; }
.output pre { background: none; border-left: 2px solid #ddd; } .prompt { display: none; } code { font-size: .92em; }
table { border-collapse: collapse; }
th, td { padding: .25em .6em; vertical-align: top; border-bottom: 1px solid #e4e4e4; text-align: left; }
@media (min-width: 60em) {
  body { display: grid; grid-template-columns: 17em minmax(0, 1fr); } header { grid-column: 1 / 3; }
  header > a:last-child { display: none; }
  nav { grid-column: 1; grid-row: 2; max-height: 94vh; overflow: auto; position: sticky; top: 0; }
  main { grid-row: 2; } }
"""


def front(nb) -> dict:
    "The front matter that nbdev has put before a page"
    return next((yaml.safe_load(c.source.strip().strip("-")) for c in nb.cells if c.cell_type == "raw"), None) or {}


def listing(contents, titles: dict[str, str], up: str) -> str:
    "The sidebar as nested lists"
    def item(entry):
        if isinstance(entry, str): return f'<li><a href="{up}{entry[:-6]}.html">{html.escape(titles[entry])}</a></li>'
        return f'<li><b>{html.escape(entry["section"])}</b>{listing(entry["contents"], titles, up)}</li>'
    return f"<ul>{''.join(map(item, contents))}</ul>"


def plain(processed: Path) -> Path:
    "Renders the processed pages beside themselves, as quarto would but plainly"
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text())["website"]
    files = sorted(processed.rglob("*.ipynb"))
    pages = {p.relative_to(processed).as_posix(): nbformat.read(p, as_version=4) for p in files}
    titles = {name: str(front(nb).get("title", name)) for name, nb in pages.items()}
    exporter = Body(template_name="basic")
    sources = [c.source for nb in pages.values() for c in nb.cells if c.cell_type == "markdown"]
    sources += [out.data["text/markdown"] for nb in pages.values() for c in nb.cells for out in c.get("outputs", [])
                if "text/markdown" in out.get("data", {})]
    mathml = formulas(sources)
    for name, nb in pages.items():
        up, head = "../" * name.count("/"), front(nb)
        nb.cells = [c for c in nb.cells if c.cell_type != "raw"]
        body = exporter.from_notebook_node(nb, Markdown(mathml))
        bar = "".join(f'<a href="{up}{e["href"][:-6]}.html">{e["text"]}</a>' for e in site["navbar"].get("left", []))
        (processed / name).with_suffix(".html").write_text(PAGE.format(
            up=up, bar=bar, title=html.escape(titles[name]), description=html.escape(str(head.get("description", ""))),
            nav=listing(site["sidebar"]["contents"], titles, up), body=body))
    (processed / "plain.css").write_text(PLAIN + HtmlFormatter().get_style_defs(".highlight"))
    return processed


def build(folder: Path) -> Path:
    "Renders the site in the empty `folder`; where its pages are"
    processed = prepare(folder)
    if not shutil.which("quarto"): return plain(processed)
    do("quarto", "render", "--no-cache", folder=processed)
    return processed / "_docs"


if __name__ == "__main__":
    if len(sys.argv) != 2: sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(build(Path(work)), sys.argv[1], dirs_exist_ok=True)
