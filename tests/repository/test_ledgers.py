"The ledgers of deviations: keys, and links to lines of code at fixed commits"

import re
import tomllib
from pathlib import Path
import pytest
from fedrepro.core.errors import InputError
from fedrepro.reporting.notebook import read_ledger
from fedrepro.reporting.deviations import values_touched
from fedrepro.reporting.page_text import specs_of

LEDGERS = sorted(Path(__file__).parents[2].glob("papers/*/deviations.toml"))
KEYS = ["name", "paper", "code", "link", "ours", "cells", "touches", "switch"]
OPTIONAL = {"link", "touches"}
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
        assert list(entry) == [k for k in KEYS if k in entry], entry["name"]
        assert set(KEYS) - set(entry) <= OPTIONAL, entry["name"]
        assert "link" not in entry or links(entry), entry["name"]
        assert (
            isinstance(entry.get("link", ""), str)
            or len(set(links(entry))) == len(links(entry)) > 1
        ), entry["name"]
        for link in links(entry):
            assert is_place(link), (entry["name"], link)
    assert any(links(e) for e in entries)


@pytest.mark.parametrize("path", LEDGERS, ids=lambda p: p.parent.name)
def test_what_an_entry_touches_is_there(path):
    "Every limit names an experiment, a row, a method, a data set or a number of clients of the paper's specs"
    there = {}
    for spec in specs_of(path.parent.name):
        for tier in spec.tiers:
            for row in spec.rows.values():
                for key, values in values_touched(spec, row, tier).items():
                    there.setdefault(key, set()).update(values)
    for entry in tomllib.loads(path.read_text())["deviation"]:
        for key, values in entry.get("touches", {}).items():
            assert set(values) <= there[key], (entry["name"], key)


def test_a_limit_of_another_name_is_refused(tmp_path):
    "A key that nothing reads would limit nothing"
    texts = "".join(
        f'{key} = "x"\n' for key in ("name", "paper", "code", "ours", "cells", "switch")
    )
    (tmp_path / "a").mkdir()
    ledger = tmp_path / "a/deviations.toml"
    ledger.write_text(f'[[deviation]]\n{texts}touches = {{dataset = ["MNIST"]}}\n')
    with pytest.raises(InputError, match="touches.*'dataset'.*datasets"):
        read_ledger("a", tmp_path)


def test_what_a_released_code_does_is_linked():
    without = {
        p.parent.name: [
            e["name"] for e in tomllib.loads(p.read_text())["deviation"] if not links(e)
        ]
        for p in LEDGERS
        if p.parent.name in ("fedccfa", "feddc")
    }
    assert without == {
        # these entries say what a code has not, or are about the text alone
        "fedccfa": [
            "Numbers of tables and figures",
            "Formulas",
            "Claims about Table 1",
            "Claims about Tables 8 and 10",
            "Settings of Tables 3 to 5 and 11",
        ],
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
