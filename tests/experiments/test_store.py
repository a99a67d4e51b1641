"Result files: whole or not there; what is damaged is never half used"

import contextlib
import copy
import hashlib
import io
import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fedrepro.core.errors import InputError
from fedrepro.experiments import store
from fedrepro.experiments.runs import run_id
from fedrepro.experiments.specs import load_spec
from fedrepro.verdicts.tables import table

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_spec("fedccfa/table2", ROOT / "papers")
RUNS = SPEC.runs("smoke")
RUN = RUNS[0]
SMALL = replace(SPEC, rows={"FedAvg": SPEC.rows["FedAvg"]})  # quickly resolved


def head(run, **more):
    return dict(settings=run.settings, run_id=run.run_id, status="complete") | more


HEAD = head(RUN)
ROWS = [
    dict(
        round=t,
        generalised_accuracy=10.5 * t,
        personalised_accuracy=11.0 * t,
        train_loss=1 / t,
        bytes_up=10 * t,
        bytes_down=20 * t,
    )
    for t in (1, 2, RUN.rounds)
]
OPEN = HEAD | dict(status="diverged")  # may end after any row


@pytest.fixture
def path(tmp_path):
    return store.write(store.run_path(tmp_path, RUN), HEAD, ROWS)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**63), 2**63)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), numbers), max_size=5))
def test_numbers_come_back_bit_for_bit(values):
    rows = [{"round": t} | v for t, v in enumerate(values, 1)]
    _, again = store.decode(store.encode(OPEN, rows))
    for row, back in zip(rows, again, strict=True):
        for key, value in row.items():
            assert (
                back[key] is None
                if isinstance(value, float) and not math.isfinite(value)
                else repr(back[key]) == repr(value)
            )


@pytest.mark.parametrize(
    "change",
    [
        dict(status="ok"),
        dict(run_id="0" * 16),
        dict(settings=RUNS[1].settings),
        dict(threads="1"),
        dict(dirty=1),
        dict(wall_seconds=True),
        dict(versions=[]),
        dict(settings=None),
        dict(bytes_up=1.5),
        dict(cpu="red\x1b[31m"),
        dict(executor="two\nlines"),
    ],
)
def test_a_wrong_header_is_not_written(tmp_path, change):
    with pytest.raises(store.Damaged):
        store.write(store.run_path(tmp_path, RUN), HEAD | change, ROWS)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "rows",
    [
        [dict(round=0)],
        [dict(round=2), dict(round=2)],
        [dict(a=1)],
        [dict(round=True)],
        [dict(round=1, a="x")],
        [dict(round=1, a=True)],
        [dict(round=1, a=[1])],
        [dict(round=1.0)],
        [dict(round=RUN.rounds + 1)],
        [dict(round=1, a=10**400)],
        [dict(round=1, a=2**64)],
        [dict(round=1, seed=7)],
        [dict(round=1, status=1)],
    ],
)
def test_wrong_rows_are_not_written(tmp_path, rows):
    with pytest.raises(store.Damaged):
        store.write(store.run_path(tmp_path, RUN), OPEN, rows)
    assert not list(tmp_path.rglob("*"))


# --- set aside


def test_load_results_uses_only_whole_files(path, tmp_path, capsys):
    folder = path.parent
    other = store.write(store.run_path(tmp_path, RUNS[1]), head(RUNS[1]), ROWS)
    (folder / "foreign.jsonl").write_text("{}\n")
    (folder / f".{path.name}.x.partial").write_bytes(path.read_bytes()[:100])
    other.write_bytes(other.read_bytes()[:-1])
    (folder / "notes.txt").write_text("mine")
    frame = store.load_results(folder)
    assert set(frame.run_id) == {RUN.run_id}
    assert len(frame) == 3
    assert list(frame["round"]) == [1, 2, 12]
    assert frame.generalised_accuracy.tolist() == [10.5, 21.0, 126.0]
    assert set(store.COLUMNS) <= set(frame.columns)
    assert capsys.readouterr().err.count("set aside") == 2
    assert (folder / "notes.txt").exists()
    assert [h["file"] for h in store.load_headers(folder)] == [path.name]


def test_a_renamed_copy_is_not_counted_twice(path):
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert len(store.load_results(path.parent)) == 3


def test_the_committed_results_are_all_read():
    files = list((ROOT / "papers").glob("*/results/*/*.jsonl"))
    assert len(files) >= 24
    for file in files:
        assert store.read(file)[1]  # nothing is renamed here, whatever happens


# --- the schema: files with a right signature and odd content


def signed(header, rows):
    "A file's content with the run id and the sha256 of whatever `header` and `rows` hold"
    with contextlib.suppress(KeyError, TypeError, ValueError):
        header = header | {"run_id": run_id(header["settings"])}
    body = b"".join((json.dumps(x) + "\n").encode() for x in [header, *rows])
    return (
        body
        + (
            json.dumps({"end": True, "rows": len(rows), "sha256": hashlib.sha256(body).hexdigest()})
            + "\n"
        ).encode()
    )


GOOD, _ = store.decode(
    store.encode(HEAD | dict(wall_seconds=1.5, versions={"torch": "2"}, diverged=None), ROWS)
)


def places(tree, path=()):
    "The path to every key"
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def changed(tree, path, value):
    "A copy of `tree` with another value at `path`; without that key for `...`"
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return tree


def put(folder, content):
    "The content under the name that it claims, in a fresh folder; under another where it claims none"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    try:
        name = store.file_name(json.loads(content.split(b"\n")[0])["settings"])
    except Exception:
        name = "odd.jsonl"
    name = (
        "odd.jsonl"
        if "/" in name or "\0" in name or len(name.encode(errors="replace")) > 200
        else name
    )
    path = folder / name.encode(errors="replace").decode()
    path.write_bytes(content)
    return path


def whole_or_set_aside(folder, path):
    "What every reader does with the one file in `folder`: it is used entirely, or set aside with a line"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        frame = store.load_results(folder)
    if "written by another version" in said.getvalue():
        assert frame.empty
        assert path.exists()
        assert said.getvalue().count("\n") == 1
    elif path.exists():
        head, rows = store.read(path)
        again = frame.drop(columns=[c for c in frame if c in store.ABOUT_RUN]).to_dict("records")
        assert len(frame) == max(1, len(rows))
        assert head["run_id"] == run_id(head["settings"])
        assert not said.getvalue()
        for row, back in zip(rows, again):
            assert all(v is None and back[k] != back[k] or back[k] == v for k, v in row.items())
    else:
        assert frame.empty
        assert list(folder.glob("*.damaged"))
        assert said.getvalue().count("\n") == 1
        assert "set aside" in said.getvalue()
    if path.exists():
        assert len(table(SMALL, "smoke", folder.parent)) > 1


ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just([])
    | st.just({})
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from(
        [
            -1,
            0,
            1,
            2**31,
            2**63,
            2**64,
            10**30,
            10**400,
            1e400,
            "a/b",
            "\ud800",
            "\n",
            "../x",
            "a" * 300,
            {"class": 3},
            [[[]]],
        ]
    )
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_any_key_is_used_whole_or_set_aside(tmp_path_factory, data):
    path = data.draw(st.sampled_from(sorted(places(GOOD), key=repr)))
    header = changed(GOOD, path, data.draw(st.just(...) | ODD))
    if data.draw(st.booleans()) and isinstance(header.get("settings"), dict):
        header["settings"][data.draw(st.sampled_from(["new", "noise"]))] = data.draw(ODD)
    rows = data.draw(st.just(ROWS) | st.just([]) | st.just(ROWS[:2]))
    folder = tmp_path_factory.getbasetemp() / "mutated" / "smoke"
    folder.parent.mkdir(exist_ok=True)
    whole_or_set_aside(folder, put(folder, signed(header, rows)))


@pytest.mark.parametrize(
    "change",
    [
        dict(noise=0.5),
        dict(
            method=GOOD["settings"]["method"]
            | dict(**{"class": "MethodOfTomorrow"}, fields={"x": [1]})
        ),
        dict(data=GOOD["settings"]["data"] | dict(noise=0.2, new={"a": None})),
        dict(network="a net of my own"),
    ],
    ids=str,
)
def test_methods_and_keys_of_others_are_read(tmp_path, change):
    file = put(
        tmp_path / "smoke",
        signed(GOOD | dict(settings=GOOD["settings"] | change, added_later=[1]), ROWS),
    )
    assert store.is_complete(file)
    assert len(store.load_results(file.parent)) == 3


@pytest.mark.parametrize(
    "change",
    [
        dict(status="complete", diverged=dict(round=1, client=0, norm="inf"), rows=3),
        dict(status="complete", rows=2),
        dict(status="complete", rows=0),
    ]
    + [
        dict(status="diverged", rows=2, diverged=dict(dict(round=3, client=0, norm="inf"), **odd))
        for odd in [
            dict(round=2),
            dict(round=13),
            dict(round="3"),
            dict(client=20),
            dict(client=-1),
            dict(client="0"),
            dict(norm=1.5),
            dict(norm=None),
            dict(round=None),
        ]
    ],
    ids=str,
)
def test_status_record_and_rows_belong_together(tmp_path, change):
    rows = ROWS[: change["rows"]]
    change = {k: v for k, v in change.items() if k != "rows"}
    file = put(tmp_path / "smoke", signed(GOOD | change, rows))
    assert not store.is_complete(file)
    assert not file.exists()
    file = put(
        tmp_path / "smoke",
        signed(
            GOOD | dict(status="diverged", diverged=dict(round=3, client=None, norm="nan")),
            ROWS[:2],
        ),
    )
    assert store.is_complete(file)
    assert set(store.load_results(file.parent).diverged) == {"round 3, server, norm nan"}


# --- what is no file


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")
def test_a_pipe_a_device_a_folder_are_left_alone(path, capsys):
    for n, make in enumerate(
        [
            os.mkfifo,
            lambda p: os.symlink("/dev/zero", p),
            os.mkdir,
            lambda p: os.symlink("/dev/tty", p),
        ]
    ):
        other = path.with_name(f"odd{n}.jsonl")
        make(other)
        assert store.read_or_set_aside(other) is None
        assert os.path.lexists(other)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert other.name in said
        assert "it is not used" in said
    assert len(store.load_results(path.parent)) == 3
    assert capsys.readouterr().err.count("\n") == 4


def test_links_are_followed_and_never_their_targets_renamed(path, tmp_path, capsys):
    real = tmp_path / "elsewhere" / path.name
    real.parent.mkdir()
    path.rename(real)
    path.symlink_to(real)
    assert store.is_complete(path)
    assert len(store.load_results(path.parent)) == 3
    assert capsys.readouterr().err == ""
    real.write_bytes(real.read_bytes()[:-9])
    assert not store.is_complete(path)
    assert real.exists()
    assert not os.path.lexists(path)
    assert "set aside" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["new\nline.jsonl", "right\u202eleft.jsonl"])
def test_odd_names_stay_on_one_line(tmp_path, capsys, name):
    (tmp_path / name).write_text("x")
    assert store.load_results(tmp_path).empty
    assert (tmp_path / (name + ".damaged")).exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.strip().isprintable()


def test_a_run_too_long_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "LONGEST", 1000)
    with pytest.raises(store.Damaged, match="more than 1000"):
        store.write(store.run_path(tmp_path, RUN), HEAD, ROWS)


# --- writing


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as m:
            m.setattr(os, name, full)
            with pytest.raises(InputError, match="No space left"):
                store.write(path, OPEN, ROWS[:1])
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]


# --- what an adversary found


def test_another_repository_is_not_taken_for_ours(tmp_path, monkeypatch):
    here = store.git("rev-parse", "--show-toplevel")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert store.git("rev-parse", "--show-toplevel") == here


def test_what_differs_between_runs_that_are_averaged_is_said():
    one = HEAD | dict(
        code="a",
        git_commit="1",
        versions={"torch": "2"},
        device="cpu",
        executor="sequential",
        data_fingerprint="x",
        file="one.jsonl",
    )
    assert (
        store.mixed([])
        == store.mixed([one, one | dict(executor="processes", git_commit="2")])
        == []
    )
    assert store.mixed([one, one | dict(code="b"), one | dict(executor="stacked")]) == [
        "code",
        "executor",
    ]
    assert store.mixed(
        [
            one | dict(code=None),
            one | dict(code=None, git_commit="2", versions={"torch": "3"}, device="H100"),
        ]
    ) == ["code", "versions", "device"]
    with pytest.raises(InputError, match="one.jsonl and two.jsonl were computed on different data"):
        store.mixed([one, one | dict(data_fingerprint="y", file="two.jsonl")])


def test_runs_of_one_cell_are_compared(tmp_path):
    "As a table does, from the files"
    from fedrepro.verdicts.summaries import mixed_cells, seed_values

    first, second = [r for r in SPEC.runs("smoke", ["FedAvg"], 2) if r.column == RUN.column]
    for run, code in ((first, "a"), (second, "b")):
        store.write(store.run_path(tmp_path, run), head(run, code=code, data_fingerprint="x"), ROWS)
    values = seed_values(SPEC, "smoke", tmp_path)
    cells = len(values) // 2  # two columns share these runs
    assert mixed_cells(SPEC, "smoke", tmp_path, values) == {"code": (cells, cells)}
    store.write(store.run_path(tmp_path, second), head(second, data_fingerprint="y"), ROWS)
    with pytest.raises(InputError, match="different data"):
        mixed_cells(SPEC, "smoke", tmp_path, values)


def test_hours_of_the_machine_are_those_with_a_run():
    "Runs after one another, side by side, within another's time, and in one job; unknown where one was interrupted"

    def run(begin, minutes, together=1, **more):
        return (
            dict(
                started=f"2026-01-31T{begin}:00+00:00",
                wall_seconds=60.0 * minutes / together,
                together=together,
                resumed=[],
            )
            | more
        )

    assert store.machine_hours([]) == 0
    apart = [run("10:00", 30), run("12:00", 30)]
    assert store.machine_hours(apart) == 1
    assert store.machine_hours([*apart, run("10:10", 5), run("12:15", 30)]) == 1.25
    assert store.machine_hours([run("10:00", 60, 3)] * 3) == 1
    assert store.machine_hours([run("23:30", 60), run("00:10", 10)]) == pytest.approx(70 / 60)
    for odd in (dict(started=None), dict(resumed=[{"round": 3}]), dict(wall_seconds=None)):
        assert store.machine_hours([*apart, run("12:00", 30, **odd)]) is None
