"""Every method's golden numbers are inside their bands (tests/bands.json), and the bands are narrow enough to see a default change."""

import dataclasses
import json
import os

import pytest

import bands
import golden
from golden import METHODS, numbers

KEPT = json.loads(bands.BANDS.read_text())
NIGHTLY = os.environ.get("FEDREPRO_NIGHTLY") == "1"


@pytest.mark.parametrize("name", METHODS)
def test_numbers_stay_in_their_bands(name):
    lines = bands.check(name)
    assert not lines, "\n" + "\n".join(lines)


# --- the bands see a changed default

FIELDS = [(name, f.name) for name, cls in METHODS.items() for f in dataclasses.fields(cls)]
FEW = [
    ("FedAvg", "weight_decay"),
    ("FedProx", "mu"),
    ("FedCCFA", "align_from"),
    ("FedCDA", "smooth"),
    ("FedBSS", "warm_up"),
    ("pFedMe", "weight_decay"),
]


@pytest.mark.parametrize("name, field", FIELDS if NIGHTLY else FEW)
def test_a_changed_default_leaves_its_band(name, field):
    f = METHODS[name].__dataclass_fields__[field]
    far = bands.caught(name, f, KEPT[name]["float64"])
    why = bands.UNSEEN.get((name, field))
    assert far < 1 if why else far > 1, (
        f"{name}.{field}, in place of {f.default!r} {bands.others(name, f)}: {far} bands off; said to be unseen: {why}"
    )


def test_the_table_of_what_is_caught_is_complete():
    "Each hyper-parameter is two bands off or said to be unseen, and why; its text and number come from the table, not from hand"
    for name, field in FIELDS:
        said = KEPT[name]["fields"][field]
        why = bands.UNSEEN.get((name, field))
        if why:
            assert said == why
        else:
            assert (
                said[0] == bands.others(name, METHODS[name].__dataclass_fields__[field])
                and said[1] >= bands.SHOWS
            ), (name, field)
    assert len(bands.UNSEEN) <= 12
    assert len(bands.ROUGH) <= 1
    assert all((name, field) in FIELDS for name, field in bands.UNSEEN)


def test_a_change_of_the_code_leaves_its_band(monkeypatch):
    "One term of one method, by a thousandth"
    loss = METHODS["FedProx"].loss
    monkeypatch.setattr(METHODS["FedProx"], "loss", lambda *a: loss(*a) * 1.001)
    lines = bands.check("FedProx")
    assert any("float64" in line and "train_loss" in line for line in lines)
    monkeypatch.setattr(METHODS["FedProx"], "loss", lambda *a: loss(*a) * 1.5)
    assert any("float32" in line for line in bands.check("FedProx"))


def test_the_line_names_method_quantity_value_band_and_command(tmp_path):
    kept = json.loads(json.dumps({"FedAvg": KEPT["FedAvg"]}))
    kept["FedAvg"]["float64"]["moved"][2] = [0.5, 0.001]
    kept["FedAvg"]["fields"]["gone"] = [[1], 2.0]
    del kept["FedAvg"]["fields"]["lr"]
    (file := tmp_path / "b.json").write_text(json.dumps(kept))
    unknown, gone, line = bands.check("FedAvg", file)
    value = repr(numbers("FedAvg")["moved"][2])
    assert line.startswith(
        f"FedAvg: moved after round 3 in float64 is {value}, its band 0.5 ± 0.001 ("
    )
    assert line.endswith('; if this is meant: python tools/bands.py --renew FedAvg --why "..."')
    assert unknown.startswith("FedAvg.lr: a hyper-parameter that is not in b.json")
    assert gone.startswith("FedAvg.gone: in b.json, but")
    assert bands.check("FedProx", file)[0].startswith("FedProx: not in b.json")


def test_what_is_missing_or_no_number_is_outside():
    kept = {"a": [[1.0, 0.1], [2.0, 0.1]], "b": [[3, 0.0], [None, 0.0]]}

    def off(found):
        return [(q, t) for _, q, t, *_ in bands.outside(found, kept)]

    assert off({"a": [1.05, 1.95], "b": [3, None]}) == []
    assert off({"a": [1.2, 1.95], "b": [4, None]}) == [("a", 1), ("b", 1)]
    assert off({"a": [float("nan"), float("inf")], "b": [3, 5.0]}) == [("a", 1), ("a", 2), ("b", 2)]
    assert off({"a": [1.0], "c": [0.0]}) == [("a", 2), ("b", 1), ("c", 1)]


# --- the file


def test_the_file_is_small_sorted_and_of_these_methods():
    text = bands.BANDS.read_text()
    assert len(text.encode()) < 150_000
    assert text == bands.written(KEPT)
    assert sorted(KEPT) == list(KEPT) == sorted(METHODS)
    for name, entry in KEPT.items():
        assert entry["cell"] == golden.cell_of(name).text
        for said in entry["history"]:
            assert {*said} == {"date", "why", "fedrepro", "torch", "processor"}
            assert said["why"]


def test_bands_are_as_wide_as_was_decided():
    "Nothing widened by hand: each band is at least the least width, and in float64 never more than a millionth of the value or so"
    for name, entry in KEPT.items():
        for type, quantities in (("float32", entry["float32"]), ("float64", entry["float64"])):
            for q, rounds in quantities.items():
                for value, half in rounds:
                    if value is None or q.startswith("bytes"):
                        assert half == 0
                    else:
                        assert half >= bands.LEAST[type] * max(abs(value), 1e-3) * 0.95 and (
                            type == "float32" or half <= 1e-6 * max(abs(value), 1.0)
                        ), (name, q)


def test_unseen_must_be_true(monkeypatch):
    "A hyper-parameter that does not show needs a reason; one that does may not have one"
    monkeypatch.setattr(bands, "caught", lambda name, f, kept: 0.0 if f.name == "lr" else 5.0)
    with pytest.raises(bands.InputError, match="lr 0 bands off, UNSEEN says None"):
        bands.sensitivity("FedAvg", {})
    monkeypatch.setitem(bands.UNSEEN, ("FedAvg", "lr"), "no reason")
    assert bands.sensitivity("FedAvg", {})["lr"] == "no reason"
    monkeypatch.setitem(bands.UNSEEN, ("FedAvg", "epochs"), "no reason")
    with pytest.raises(bands.InputError, match="epochs 5 bands off, UNSEEN says 'no reason'"):
        bands.sensitivity("FedAvg", {})


# --- the commands


@pytest.mark.parametrize(
    "words, error",
    [
        (["--renew", "FedAvg"], '--renew without a reason: expected --why "TEXT"\n'),
        (["--renew", "--why", " "], "--renew without a reason"),
        (["--check", "FedAvgg"], "method 'FedAvgg' is unknown; did you mean 'FedAvg'? accepted: "),
        ([], "expected one of --check, "),
        (["--check", "--renew", "--why", "x"], "expected one of --check, "),
        (["--check", "FedAvg", "--file", "FOLDER"], "cannot be read"),
    ],
)
def test_wrong_input_is_refused_in_a_line(words, error, tmp_path, capsys):
    before = bands.BANDS.read_bytes()
    assert bands.main([str(tmp_path) if word == "FOLDER" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert error in err
    assert err.count("\n") == 1
    assert bands.BANDS.read_bytes() == before


def test_the_command_checks(tmp_path, capsys):
    assert (bands.main(["--check", "Union"]), *capsys.readouterr()) == (
        0,
        "1 method, every number in its band\n",
        "",
    )
    (file := tmp_path / "none.json").write_text("{}")
    assert bands.main(["--check", "Union", "--file", str(file)]) == 1
    assert (
        capsys.readouterr().out
        == 'Union: not in none.json; if this is meant: python tools/bands.py --renew Union --why "..."\n'
    )


def test_the_command_renews(tmp_path, monkeypatch, capsys):
    "One method, without the other processes: the rest of the file stays, and the reason joins those that were there"
    monkeypatch.setattr(bands, "compute_elsewhere", lambda names: {})
    monkeypatch.setattr(bands, "sensitivity", lambda name, found: KEPT[name]["fields"])
    (file := tmp_path / "b.json").write_text(
        json.dumps({n: KEPT[n] for n in ("FedAvg", "Union")} | {"Gone": {}})
    )
    assert bands.main(["--renew", "Union", "--why", "a\n test", "--file", str(file)]) == 0
    assert "Union: renewed" in capsys.readouterr().err
    found = json.loads(file.read_text())
    assert sorted(found) == ["FedAvg", "Union"]
    assert found["FedAvg"] == KEPT["FedAvg"]
    assert file.read_text() == bands.written(found)
    assert [h["why"] for h in found["Union"]["history"]] == [
        *(h["why"] for h in KEPT["Union"]["history"]),
        "a test",
    ]
    assert not bands.check("Union", file)
    assert found["Union"]["fields"].keys() == KEPT["Union"]["fields"].keys()
