"The stored page of what is accepted is the zoos: the same names, accepted or refused, and with the words that the tests ask for"

import json
import re

import zoo_data
import zoo_methods
import zoo_networks
from toy import ROOT

PAGE = ROOT / "nbs/00_guides/07_what_is_accepted.ipynb"


def stored_tables() -> list[dict[str, str]]:
    "The tables of the page's outputs, in order: what it is -> what becomes of it"
    outputs = [
        out for cell in json.loads(PAGE.read_text())["cells"] for out in cell.get("outputs", [])
    ]
    texts = ["".join(out["data"]["text/markdown"]) for out in outputs]
    return [dict(map(in_columns, text.splitlines()[2:])) for text in texts]


def in_columns(line: str) -> list[str]:
    "The two columns of a row, as they are shown"
    found = re.fullmatch(r"\| (.*?) (?<!\\)\| (.*) \|", line)
    assert found, line
    return [re.sub(r"\\(.)", r"\1", part) for part in found.groups()]


def check(accepted: dict, refused: dict, expected: dict[str, tuple[str, ...]]):
    "`expected`: name -> the words with which it is refused; none: it is accepted"
    assert list(accepted) == [n for n, words in expected.items() if not words]
    assert list(refused) == [n for n, words in expected.items() if words]
    assert all(w in refused[n] for n, words in expected.items() for w in words)


def test_the_page_shows_every_case():
    networks, no_networks, sets, no_sets, methods, no_methods, diverged = stored_tables()
    shown = {
        name.replace("_", " "): (one.refused,) if one.refused else ()
        for name, one in zoo_networks.ZOO.items()
    }
    check(networks, no_networks, shown)
    check(sets, no_sets, {case.name: case.said for case in zoo_data.CASES})
    assert all(float(gap) < 1e-10 for gap in networks.values())
    assert all(float(gap) < 1e-6 for gap in sets.values())
    assert methods == {m.__doc__: equal for m, equal in zoo_methods.ACCEPTED.items()}
    check({}, no_methods, {name: words for name, (_, words) in zoo_methods.REFUSED.items()})
    ends = {
        name: f"round 1, {'the server' if who is None else f'client {who}'}"
        for name, (_, who) in zoo_methods.DIVERGED.items()
    }
    assert diverged == ends
