"The ledgers of deviations: keys, and links to lines of code at fixed commits"

import re
import tomllib
from pathlib import Path
import pytest

LEDGERS = sorted(Path(__file__).parents[2].glob("papers/*/deviations.toml"))
KEYS = ["name", "paper", "code", "link", "ours", "cells", "switch"]  # link may be missing
LINES = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[\w./-]+(\?plain=1)?"
    r"#L([1-9]\d*)(?:-L([1-9]\d*))?"
)


def links(entry):
    return [entry["link"]] if isinstance(entry.get("link"), str) else entry.get("link", [])


def is_place(link):
    "Whether it names lines of a file at a commit; a Markdown file has line numbers only as plain text"
    place = LINES.fullmatch(link)
    if place is None:
        return False
    plain, first, last = place.groups()
    return bool(plain) == (".md" in link) and (last is None or int(first) < int(last))


@pytest.mark.parametrize("path", LEDGERS, ids=lambda p: p.parent.name)
def test_keys_and_links_of_a_ledger(path):
    entries = tomllib.loads(path.read_text())["deviation"]
    assert len({e["name"] for e in entries}) == len(entries) > 10
    for entry in entries:
        assert all(entry[k] for k in ("name", "paper", "code", "ours", "cells")), entry["name"]
        assert list(entry) == [k for k in KEYS if k in entry] and set(KEYS) - set(entry) <= {
            "link"
        }, entry["name"]
        assert "link" not in entry or links(entry), entry["name"]
        assert (
            isinstance(entry.get("link", ""), str)
            or len(set(links(entry))) == len(links(entry)) > 1
        ), entry["name"]
        for link in links(entry):
            assert is_place(link), (entry["name"], link)
    assert any(links(e) for e in entries)


def test_what_a_released_code_does_is_linked():
    without = {
        p.parent.name: [
            e["name"] for e in tomllib.loads(p.read_text())["deviation"] if not links(e)
        ]
        for p in LEDGERS
        if p.parent.name in ("fedccfa", "feddc")
    }
    assert without == {
        "fedccfa": ["Numbers of tables and figures"],  # these entries say what a code has not
        "feddc": ["Published numbers", "Messages", "Data sets without an example", "Targets"],
    }


AT = "https://github.com/a/b/blob/" + "0" * 40


@pytest.mark.parametrize(
    "link",
    [
        "https://github.com/a/b/blob/main/c.py#L1",
        f"{AT}/c.py",
        f"{AT}/c.py#L7-L3",
        f"{AT}/README.md#L1",
        f"{AT}/c.py#L1".replace("github.com", "example.org"),
    ],
)
def test_what_is_no_place_is_seen(link):
    assert not is_place(link)
