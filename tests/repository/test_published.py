"""The published numbers are those that the papers print: cells read by hand, and a digest of every table, taken from a reference of its own."""

import csv
import hashlib
import json
from pathlib import Path

import pytest

from fedrepro.experiments.specs import load_spec

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT.parent / "shared/specs/published"
ELSEWHERE = {"feddc/thirdparty": "feddc_thirdparty_fedcads_readme", "claims": "in_text_claims"}
HERE = {
    **{
        f"{p.parent.name}/{p.name.split('.')[0]}": p
        for p in (ROOT / "papers").glob("*/*.published.csv")
    },
    "claims": ROOT / "papers/claims.csv",
}


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def by_value(path):
    "The lines of a file with numbers by value: 69.10 is 69.1"

    def value(text):
        try:
            return float(text)
        except ValueError:
            return text

    return [{k: value(v) for k, v in line.items()} for line in read(path)]


def changed(path, reference):
    "Lines of one file that the other has not"
    ours = by_value(path)
    theirs = by_value(reference)
    return [line for line in ours if line not in theirs] + [
        line for line in theirs if line not in ours
    ]


def digest(path):
    "The SHA-256 of a file's lines by value, in any order"
    lines = sorted({json.dumps(line, sort_keys=True) for line in by_value(path)})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# the first, a middle and the last line of each table, and how many it has
CELLS = read(Path(__file__).parents[1].joinpath("published_cells.csv"))


def test_every_table_has_cells_read_by_hand():
    assert {cell["table"] for cell in CELLS} | {"claims"} == HERE.keys()
    assert len(CELLS) == 3 * (len(HERE) - 1)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["table"])
def test_cells_read_by_hand(cell):
    lines = read(HERE[cell["table"]])
    words = dict(part.split("=", 1) for part in cell["where"].split("|"))
    found = [(line["mean"], line["std"]) for line in lines if line | words == line]
    assert len(lines) == int(cell["lines"])
    assert found == [(cell["mean"], cell["std"])]


DIGESTS = json.loads(Path(__file__).parents[1].joinpath("published_digests.json").read_text())


def reference(name):
    "The file beside the repository from which the digest of a table was taken; skips the test where it is not there"
    if not REFERENCE.is_dir():
        pytest.skip("the reference of published numbers is not beside the repository")
    return REFERENCE / f"{ELSEWHERE.get(name, name.replace('/', '_'))}.csv"


def test_every_table_has_a_digest():
    assert DIGESTS.keys() == HERE.keys()


@pytest.mark.parametrize("name", HERE)
def test_every_cell_has_the_digest_of_the_reference(name):
    assert digest(HERE[name]) == DIGESTS[name]


@pytest.mark.parametrize("name", HERE)
def test_every_cell_is_that_of_the_reference(name):
    "Where the reference is: its digest is the one kept, and a line that differs is shown"
    assert not changed(HERE[name], reference(name))
    assert digest(reference(name)) == DIGESTS[name]


def test_a_changed_number_is_found(tmp_path):
    here = HERE["lfd/table1"]
    text = here.read_text()
    other = tmp_path / "x.csv"
    other.write_text(text.replace("69.1,0.6", "69.10,0.6"))
    assert not changed(here, other)
    assert digest(other) == digest(here)
    other.write_text(text.replace("69.1,0.6", "69.2,0.6"))
    assert len(changed(here, other)) == 2
    assert digest(other) != digest(here)


SETTINGS = {  # column of a published file -> the setting in a spec
    "dataset": "dataset",
    "clients": "clients",
    "participation": "participation",
    "partition": "partition",
    "dirichlet_alpha": "alpha_dirichlet",
    "drift": "drift",
}
OPEN = (
    "?",
    "assumed",
    "inferred",
    "not stated",
)  # so a published file marks what its paper does not say


def is_open(line, key):
    "Whether a published line says that the paper leaves this setting open"
    text = line[key]
    if key in ("clients", "dirichlet_alpha") and "setting inferred" in line["note"]:
        return True
    return not text or any(word in text for word in OPEN)


@pytest.mark.parametrize("name", sorted(HERE.keys() - {"claims"}))
def test_what_a_paper_leaves_open_is_not_said_to_be_in_it(name):
    "A spec calls a guess what the published file marks as open in all of its lines"
    lines = read(HERE[name])
    spec = load_spec(name)
    for key, setting in SETTINGS.items():
        if key not in lines[0] or not all(is_open(line, key) for line in lines):
            continue
        for column in spec.tier_columns("paper"):
            for row in spec.rows:
                value = spec.values("paper", row, column).get(setting)
                assert value is None or value.source.startswith("guess:"), (setting, column.label)


def test_which_settings_are_open_is_seen():
    "Of Table 13 none is said; of Table 5, where one column's alpha is lost, the others stand in the file"
    seen = {}
    for name in ("fedccfa/table3", "fedccfa/table5", "fedccfa/table13"):
        lines = read(HERE[name])
        seen[name] = [k for k in SETTINGS if k in lines[0] and all(is_open(n, k) for n in lines)]
    assert seen == {
        "fedccfa/table3": ["clients", "dirichlet_alpha"],
        "fedccfa/table5": [],
        "fedccfa/table13": ["dataset", "clients", "participation", "dirichlet_alpha", "drift"],
    }
