"A small spec, stored results of its runs, as a person and a sweep would write them, and a federation of few samples"

import importlib.util
import json
import string
import time
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from fedrepro.core.errors import InputError
from fedrepro.data import datasets, partition
from fedrepro.engine.federation import Federation
from fedrepro.engine.method import load_methods
from fedrepro.experiments import store
from fedrepro.engine.rows import METRICS
from fedrepro.experiments.specs import STATISTICS
from fedrepro.models import networks
from pages import ROOT  # noqa: F401 (others take it from here)

# other tests have toys
OURS = {
    name: cls
    for name, cls in sorted(load_methods().items())
    if cls.__module__.startswith("fedrepro.")
}
PLAIN = set(string.ascii_letters + string.digits + " .,:;_-+/()[]{}~'=<>*%")
BASE = dict(
    rounds=2,
    seeds=[0],
    dataset="digits",
    recipe="plain",
    network="digits_cnn",
    partition="iid",
    clients=4,
    source="guess: toy",
)
TOY = dict(
    title="t",
    paper="p",
    table="1",
    kind="table",
    metric=next(iter(METRICS)),
    statistic=STATISTICS[0],
    base=BASE,
    columns=[{}],
    methods={"FedAvg": {}},
)
SMALL = TOY | dict(
    title="A small one",
    base=BASE | dict(seeds=[0, 1], clients=3, epochs=1, batch_size=64),
    methods={"FedAvg": {}, "FedProx": {"mu": 0.1, "source": "guess: toy"}},
    tiers={"smoke": {"base": {"rounds": 1, "source": "tier: reduced"}}},
)


# a table whose names and title are full of what LaTeX, html and csv read as commands
ODD_NAMES = TOY | dict(
    title="100% of a_b & <c> #1 {x} ~^ ± λ",
    paper="FedCCFA",
    table="2",
    published="t.published.csv",
    base=BASE | dict(rounds=12, seeds=[0, 1, 2]),
    columns=[
        {"clients": 3, "source": "guess: a test", "published": {"clients": 20}},
        {"clients": 4, "source": "guess: a test", "published": {"clients": 100}},
        {"clients": 5, "source": "guess: a test", "unpublished": "a test"},
    ],
    methods={
        "FedAvg": {},
        "prox_&_%": {"class": "FedProx", "published": {"method": "FedProx"}},
        "MOON": {},
    },
    tiers={"smoke": {"base": {"rounds": 3, "source": "tier: reduced"}}},
)


def installed(module: str, extra: str) -> bool:
    "Whether a module of an optional extra is there; it must be when the extra `dev` asks for it"
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "dev"
    ]
    asked = {name for need in map(Requirement, dev) for name in (need.name, *need.extras)}
    found = importlib.util.find_spec(module) is not None
    assert found or extra not in asked, f"{module} is missing, though the extra dev has it"
    return found


@contextmanager
def one_line(*words: str):
    "Expects an InputError of one line that has all the words"
    with pytest.raises(InputError) as error:
        yield error
    said = str(error.value)
    assert "\n" not in said and all(word in said for word in words), said


def until(true, seconds: float = 90, what: str = "it"):
    "What `true()` returns, as soon as it is true"
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, f"{what}: not in {seconds} seconds"
        time.sleep(0.02)
    return value


def few(sizes: tuple[int, ...], net: str = "digits_cnn", dtype=torch.float64) -> Federation:
    "A federation of digits whose clients have so many training samples, of unequal classes"
    digits = datasets.load("digits")
    whole = partition.partition(
        "dirichlet-class-5",
        digits.train_y.numpy(),
        digits.test_y.numpy(),
        clients=len(sizes),
        alpha=0.5,
        per_class=2,
    )
    cut = partition.Partition([rows[:n] for rows, n in zip(whole.train, sizes)], whole.test)
    assert tuple(cut.sizes) == sizes
    return Federation(digits, networks.network(net, 10, digits.shape), cut, dtype=dtype)


def toml(raw: dict) -> list[str]:
    "TOML lines of nested dicts; lists of dicts become arrays of inline tables"

    def quoted(v):
        return '"' + "".join(c if c in PLAIN else f"\\U{ord(c):08x}" for c in v) + '"'

    def text(v):
        if isinstance(v, dict):
            return "{" + ", ".join(f"{quoted(k)} = {text(x)}" for k, x in v.items()) + "}"
        if isinstance(v, (list, tuple)):
            return "[" + ", ".join(map(text, v)) + "]"
        if isinstance(v, str):
            return quoted(v)
        if isinstance(v, int) and abs(v) > 2**64:
            return hex(v)  # a long number; TOML has no negative one of these
        return (
            v.isoformat()
            if hasattr(v, "isoformat")
            else json.dumps(v)
            if isinstance(v, bool)
            else repr(v)
        )

    return [f"{quoted(k)} = {text(v)}" for k, v in raw.items()]


def written(folder: Path, raw: dict, name: str = "toy/x", csv: str | bytes = "") -> Path:
    "`raw` as the spec `name` under `folder`, beside its published numbers"
    path = folder / f"{name}.toml"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("\n".join(toml(raw)))
    if csv:
        path.with_name(raw["published"]).write_bytes(csv.encode() if isinstance(csv, str) else csv)
    return path


def stored(run, rows: list[dict], results: Path, **head) -> Path:
    "`rows` as the stored result of a run; `head`: what its header has otherwise"
    head = dict(settings=run.settings, run_id=run.run_id, status="complete") | head
    return store.write(store.run_path(results, run), head, rows)


def put(
    spec, tier: str, row: str, curves: list, column: str = "", results: Path | None = None, **more
) -> list[Path]:
    """Stored runs of `row`, one seed a curve: a list of accuracies, one a round; their files. `more`: of each round.

    None: diverged in round 2, a dict: diverged as it says"""
    files = []
    for c in spec.runs(tier, methods=[row], seeds=len(curves)):
        if column and c.column != column:
            continue
        curve = curves[c.seed]
        head = {}
        if curve is None:
            curve = dict(round=2, client=0, norm="inf")
        if isinstance(curve, dict):
            curve, head = [50.0] * (curve["round"] - 1), dict(status="diverged", diverged=curve)
        rows = [
            dict(round=t, generalised_accuracy=float(a), **more) for t, a in enumerate(curve, 1)
        ]
        files.append(stored(c, rows, results or spec.results, **head))
    return files


def from_files(monkeypatch, name, source):
    "Until the test ends, data set `name` has the files of `source`"
    card = replace(datasets.DATA_CARDS[name], read=source)
    monkeypatch.setitem(datasets.DATA_CARDS, name, card)
