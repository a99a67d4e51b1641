"A method says only what differs"

import ast
from itertools import combinations

import pytest

from toy import OURS as METHODS, ROOT


def documents(node):
    "The line numbers of all docstrings inside a node"
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [
        n.body[0]
        for n in ast.walk(node)
        if isinstance(n, kinds) and ast.get_docstring(n) is not None
    ]
    return {i for n in nodes for i in range(n.lineno, n.end_lineno + 1)}


def code(name):
    "The lines of a method's class, without docstrings, comments and empty lines"
    source = (ROOT / (METHODS[name].__module__.replace(".", "/") + ".py")).read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    lines = source.split("\n")
    skipped = documents(node)
    kept = [
        lines[i - 1].strip() for i in range(node.lineno, node.end_lineno + 1) if i not in skipped
    ]
    return [line for line in kept if line and not line.startswith("#")]


def test_no_two_methods_say_the_same():
    runs = {
        name: {tuple(lines[i : i + 8]) for i in range(len(lines) - 7)}
        for name in METHODS
        for lines in [code(name)]
    }
    shared = [(a, b, both) for a, b in combinations(runs, 2) if (both := runs[a] & runs[b])]
    assert not shared


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_near_fedavg(name):
    "At most two methods stand between it and FedAvg, itself included; the stages of a page, which are no methods, aside"
    assert sum(c.__name__ in METHODS for c in METHODS[name].__mro__) <= 3
