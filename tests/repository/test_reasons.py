"""A reason is a value: no code takes a sentence of ours apart to learn what it says"""

import ast
from pathlib import Path
import pytest
from fedrepro.verdicts.independent import Kind, Reason, kind_of

PACKAGE = Path(__file__).resolve().parents[2] / "fedrepro"
SENTENCES = {  # what holds a sentence, or a reason, wherever it stands
    *("reason", "reasons", "why", "lacks", "gone", "state", "status", "verdict", "verdicts"),
    *("note", "notes", "says", "same_runs", "unpublished", "untuned", "missing", "caveat"),
    *("setting", "heading", "published_setting", "plus_minus", "judged_in_words"),
}
CUTS = {  # methods of a text, or of a column of texts, that look into it
    *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix"),
    *("removesuffix", "replace", "find", "index", "contains", "strip", "lstrip", "rstrip"),
    *("match", "fullmatch", "extract"),
}
SEARCHES = {"findall", "finditer", "fullmatch", "match", "search", "split", "sub", "subn"}  # of re


def called(node: ast.AST) -> str:
    "The name that an expression ends with: `line['why']`, `c.why`, `c.why.str`, `why` and `why(...)` are all `why`"
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return called(node.value) if node.attr in ("str", "iloc", "loc") else node.attr
    if isinstance(node, ast.Subscript):
        key = node.slice
        named = isinstance(key, ast.Constant) and isinstance(key.value, str)
        return key.value if named else called(node.value)
    if isinstance(node, ast.Call):
        inner = node.args[0] if called(node.func) == "str" and node.args else node.func
        return called(inner)
    return ""


def taken_apart(node: ast.AST) -> ast.AST | None:
    "The text that an expression looks into, if it does"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of = node.func.value
        if isinstance(of, ast.Name) and of.id == "re":
            texts = [a for a in node.args if not isinstance(a, ast.Constant)]
            return texts[-1] if node.func.attr in SEARCHES and texts else None
        return of if node.func.attr in CUTS else None
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        left = node.left
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            return node.comparators[0]
    return None


def offences(text: str) -> list[str]:
    "The expressions in Python code that look into a sentence"
    found = []
    for node in ast.walk(ast.parse(text)):
        of = taken_apart(node)
        if of is not None and called(of) in SENTENCES:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("folder", ["verdicts", "reporting", "cli"])
def test_no_code_takes_a_sentence_apart(folder):
    files = sorted((PACKAGE / folder).glob("*.py"))
    assert len(files) > 4
    found = {f.name: offences(f.read_text()) for f in files}
    assert {name: where for name, where in found.items() if where} == {}


@pytest.mark.parametrize(
    "planted",
    [
        'c.why.split(": ")[0]',
        'c.why.startswith("diverged")',
        '"diverged" in c.why',
        'frame.same_runs.str.startswith("row")',
        'found.verdict.str.split(" (", regex=False)',
        'line["verdict"].partition(": ")[2]',
        're.findall(r"diverged: ([^;]*)", line["why"])',
        'setting(run, tier).replace(", no drift", "")',
        'str(reason).removeprefix("row ")',
        're.sub("^x", "", why)',
    ],
)
def test_a_sentence_that_is_taken_apart_is_found(planted):
    assert len(offences(f"x = {planted}")) == 1


@pytest.mark.parametrize(
    "fine", ['name.split("/")', '"lr" in row', "word in VERDICTS", 'metric.removesuffix("_x")']
)
def test_what_is_no_sentence_may_be_cut(fine):
    assert offences(f"x = {fine}") == []


# --- what a reason prints as


@pytest.mark.parametrize(
    "reason, says",
    [
        (Reason(Kind.SAME_ROW, ("A",)), "row A"),
        (Reason(Kind.SAME_ROW, ("A",), (2, 3)), "row A in 2 of 3 seeds"),
        (Reason(Kind.SAME_TABLE, ("4",)), "table 4"),
        (Reason(Kind.DIFFERENCE, ("2", "1")), "tables 2 and 1"),
        (Reason(Kind.NOT_RUN, ("A", "B")), "not run: A, B"),
        (Reason(Kind.DIVERGED, ("A",), (1, 3)), "diverged: A (1 of 3 seeds)"),
        (Reason(Kind.NO_COMMON_SEED), "no seed in common"),
        (Reason(Kind.UNTUNED, because="mu"), "untuned: mu"),
        (Reason(Kind.GUESSED, because="the text lost it"), "the text lost it"),
        (Reason(Kind.DASH), "-"),
    ],
)
def test_a_reason_in_words(reason, says):
    assert str(reason) == says
    assert kind_of(reason) is reason.kind
    assert kind_of(None) == ""


def test_equal_reasons_are_one():
    "So a set, or a dict, names each of them once"
    assert len({Reason(Kind.NOT_RUN, ("A",)), Reason(Kind.NOT_RUN, ("A",))}) == 1
    assert Reason(Kind.NOT_RUN, ("A",)) != Reason(Kind.NOT_MEASURED, ("A",))
