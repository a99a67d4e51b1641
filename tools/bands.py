"""Golden numbers: one small run of every method (tests/golden.py), each number inside a band (tests/bands.json).

    python tools/bands.py --check [METHOD ...]                what left its band, as the test asks; exit code 1
    python tools/bands.py --renew [METHOD ...] --why "TEXT"   measures bands and what they catch anew, and says why
    python tools/bands.py --rounding [METHOD ...]             csv: how far other threads and kernels move the numbers

A band is as wide as other processors round, with a margin. That it is narrow enough is measured too: each default of
a hyper-parameter is changed (a tenth less, 1 more, another word), and the numbers must then leave their bands."""

import argparse
import dataclasses
import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch

import fedrepro
from fedrepro.core.errors import InputError, choice
from fedrepro.core.files import write_atomic
from fedrepro.executors.executors import Stacked
from fedrepro.experiments.store import processor

BANDS = Path(__file__).resolve().parents[1] / "tests" / "bands.json"
sys.path.insert(0, str(BANDS.parent))
from golden import METHODS, TYPES, cell_of, numbers  # noqa: E402


# --- how far rounding moves the numbers

SWITCH = "FEDREPRO_BANDS"  # environment variable for what no library reads from the environment
ELSEWHERE = {  # what stands for other processors: the environment of a fresh process
    "ATen without AVX": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no oneDNN": {SWITCH: "no oneDNN"},
    "MKL's common path": {"MKL_CBWR": "COMPATIBLE"},
    "two threads": {SWITCH: "two threads", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
}
NUDGES = range(1, 5)  # seeds


def set_up():
    "One thread and the usual kernels, unless the environment asks for others"
    asked = os.environ.get(SWITCH, "")
    torch.set_num_threads(2 if asked == "two threads" else 1)
    torch.backends.mkldnn.enabled = asked != "no oneDNN"


def compute_elsewhere(names: list[str]) -> dict:
    "Where -> type -> method -> numbers"

    def compute(env):
        command = [sys.executable, __file__, "--numbers", *names]
        done = subprocess.run(command, env=os.environ | env, text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"{env}: {done.stderr}")
        return json.loads(done.stdout)

    return {where: compute(env) for where, env in ELSEWHERE.items()}


def gaps(a: dict, b: dict) -> dict:
    "Quantity -> by how much two runs differ after each round; infinite where only one has a number"

    def gap(x, y):
        if x == y:
            return 0.0
        return abs(x - y) if None not in (x, y) and math.isfinite(x - y) else math.inf

    return {
        q: [gap(x, y) for x, y in zip_longest(a.get(q, []), b.get(q, []))]
        for q in sorted(a.keys() | b.keys())
    }


def rounding(name: str, type: str, usual: dict, elsewhere: dict) -> Iterator[tuple[str, dict]]:
    "How else the run was computed, and how far its numbers then are from the `usual` ones"
    yield "stacked", gaps(numbers(name, type, executor=Stacked()), usual)
    for seed in NUDGES:
        yield f"nudged {seed}", gaps(numbers(name, type, seed), usual)
    for where, found in elsewhere.items():
        yield where, gaps(found[type][name], usual)


# --- the bands

MARGIN = {"float32": 10, "float64": 100}  # times the largest deviation that was measured
# of the value; in float32 a near tie in a max-pooling falls either way
LEAST = {"float32": 1e-2, "float64": 1e-9}
DIGITS = {"float32": 6, "float64": 12}  # that are kept


def half_band(quantity: str, type: str, value: float | None, deviation: float) -> float:
    "Half of a band's width: 0 for bytes, which nothing rounds; in float32 accuracies may be two points off"
    if quantity.startswith("bytes") or value is None:
        return 0.0
    least = LEAST[type] * max(abs(value), 1e-3)
    if type == "float32" and "accuracy" in quantity:
        least = 2.0
    return float(f"{max(MARGIN[type] * deviation, least):.2g}")


def measured(name: str, type: str, elsewhere: dict) -> dict:
    "Quantity -> [value, half a band] after each round"

    def short(x):
        return float(f"{x:.{DIGITS[type]}g}") if isinstance(x, float) else x

    usual = numbers(name, type)
    found = [gap for _, gap in rounding(name, type, usual, elsewhere)]
    return {
        q: [
            [short(x), half_band(q, type, x, max(gap[q][t] for gap in found))]
            for t, x in enumerate(xs)
        ]
        for q, xs in usual.items()
    }


def outside(found: dict, bands: dict) -> Iterator[tuple[float, str, int, object, list]]:
    "What is not in its band: (how many bands off, quantity, round from 1, value, [middle, half a band])"
    for q in sorted(found.keys() | bands.keys()):
        for t, (x, band) in enumerate(zip_longest(found.get(q, []), bands.get(q, [])), 1):
            middle, half = band or (None, 0.0)
            far = gaps({q: [x]}, {q: [middle]})[q][0]
            if far > half:
                yield (far / half if half else math.inf), q, t, x, [middle, half]


# --- what the bands catch

SHOWS = 2  # bands off, at least
UNSEEN = {
    where: why
    for why, places in {  # (method, hyper-parameter) -> why its change cannot show in the run
        "only the variant double_momentum has it": [("FedADC", "phi"), ("FedADCPlus", "phi")],
        "there is no calibration by default": [
            ("FedADCPlus", f"calibration_{part}") for part in ("epochs", "lr", "mu")
        ],
        "there is no fine-tuning by default": [("FedCCFA", "finetune_lr")],
        "the same where everybody takes part in every round": [("FedDrift", "previous")],
        "the same until models merge": [("FedDrift", "variant")],
        "the same until a head's weight falls below 1e-3": [("FedPAC", "variant")],
        "the method has none": [("pFedMe", "momentum"), ("pFedMe", "weight_decay")],
    }.items()
    for where in places
}
ROUGH = {  # (method, hyper-parameter) -> the value tried, where a tenth less changes nothing
    # it decides who stops: no client of 40 partitions came as near to the limit as a tenth
    ("Flash", "gamma"): 0.04,
}


def others(name: str, f: dataclasses.Field) -> list:
    "Other values of a hyper-parameter: a tenth less (0: 0.01), 1 more, every other word, 0.5 in place of None"
    if (name, f.name) in ROUGH:
        return [ROUGH[name, f.name]]
    value = f.default
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [float(f"{0.9 * value:.6g}") or 0.01]
    if value is None:
        return [0.5]
    try:
        METHODS[name](**{f.name: "?"})
    except InputError as e:
        return [word for word in str(e).split("accepted: ")[1].split(", ") if word != value]
    raise InputError(f"{name}.{f.name}: any text is accepted, so other words are not known")


def caught(name: str, f: dataclasses.Field, bands: dict) -> float:
    "How many bands off, at least, the float64 numbers are with another default; infinite if all others are refused"
    least = math.inf
    for value in others(name, f):
        try:
            found = numbers(name, **{f.name: value})
        except InputError:
            continue
        least = min(least, max((far for far, *_ in outside(found, bands)), default=0.0))
    return least


def sensitivity(name: str, bands: dict) -> dict:
    "Hyper-parameter -> [values tried, bands off], or why it cannot show. Raises InputError where that is not so"
    table = {}
    wrong = []
    for f in dataclasses.fields(METHODS[name]):
        far = caught(name, f, bands)
        why = UNSEEN.get((name, f.name))
        if (far < SHOWS) != (why is not None):
            wrong.append(f"{f.name} {far:.2g} bands off, UNSEEN says {why!r}")
        table[f.name] = why or [others(name, f), float(f"{min(far, 1e9):.2g}")]
    if wrong:
        raise InputError(f"{name}: change its run, or UNSEEN: {'; '.join(wrong)}")
    return table


# --- the file


def stored(path: Path) -> dict:
    "Method -> its entry; empty if there is no file. Raises InputError"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: cannot be read ({e})") from None


def written(entries: dict) -> str:
    "The file's text: sorted, a line for each quantity, hyper-parameter and reason"

    def text(value, depth=0):
        pad = "\n" + " " * depth
        if isinstance(value, dict) and depth < 3:
            inner = (
                f"{pad} {json.dumps(k)}: {text(v, depth + 1)}" for k, v in sorted(value.items())
            )
            return "{" + ",".join(inner) + pad + "}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return (
                "[" + ",".join(f"{pad} {json.dumps(v, sort_keys=True)}" for v in value) + pad + "]"
            )
        return json.dumps(value, sort_keys=True)

    return text(entries) + "\n"


def machine() -> str:
    "The processor's name and the instructions that ATen uses"
    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"


def renewed(entry: dict, name: str, bands: dict, fields: dict, why: str) -> dict:
    "A method's entry with new numbers and one more reason"
    now = {
        "date": datetime.date.today().isoformat(),
        "why": why,
        "fedrepro": fedrepro.__version__,
        "torch": torch.__version__,
        "processor": machine(),
    }
    return {
        "cell": cell_of(name).text,
        "fields": fields,
        **bands,
        "history": [*entry.get("history", []), now],
    }


# --- the commands


def check(name: str, path: Path = BANDS) -> list[str]:
    "A line for everything about a method that is not as the file says. Raises InputError for an unreadable file"
    entry = stored(path).get(name)
    lines = []
    if entry is None:
        lines.append(f"{name}: not in {path.name}")
    else:
        own = {f.name for f in dataclasses.fields(METHODS[name])}
        known = entry["fields"].keys()
        lines += [
            f"{name}.{f}: a hyper-parameter that is not in {path.name}" for f in sorted(own - known)
        ]
        lines += [
            f"{name}.{f}: in {path.name}, but no hyper-parameter" for f in sorted(known - own)
        ]
        for type in TYPES:
            for far, q, t, x, (middle, half) in outside(numbers(name, type), entry[type]):
                where = f"{name}: {q} after round {t} in {type}"
                lines.append(
                    f"{where} is {x!r}, its band {middle!r} ± {half:g} ({far:.3g} bands off)"
                )
    return [
        f'{line}; if this is meant: python tools/bands.py --renew {name} --why "..."'
        for line in lines
    ]


def renew(names: list[str], why: str, path: Path = BANDS):
    "Measure and write one method after the other. Raises InputError for those that do not show what they should"
    stored(path)
    print(f"computing {len(names)} methods in {len(ELSEWHERE)} other ways", file=sys.stderr)
    elsewhere = compute_elsewhere(names)
    wrong = []
    for name in names:
        bands = {type: measured(name, type, elsewhere) for type in TYPES}
        try:
            fields = sensitivity(name, bands["float64"])
        except InputError as e:
            wrong.append(str(e))
        else:
            entries = {n: entry for n, entry in stored(path).items() if n in METHODS}
            entries[name] = renewed(entries.get(name, {}), name, bands, fields, why)
            write_atomic(path, written(entries).encode())
        print(
            f"{name}: {'not ' if wrong and wrong[-1].startswith(f'{name}:') else ''}renewed",
            file=sys.stderr,
        )
    if wrong:
        raise InputError("\n".join(wrong))


def print_rounding(names: list[str]):
    "A csv of how far the numbers are from the usual ones (relative; accuracies in points), by how they are computed"
    print(
        f"# {machine()}; torch {torch.__version__}; fedrepro {fedrepro.__version__}; {datetime.date.today()}"
    )
    print("method,type,computed,quantity,largest difference")
    elsewhere = compute_elsewhere(names)
    for name, type in ((name, type) for name in names for type in TYPES):
        usual = numbers(name, type)
        for where, found in rounding(name, type, usual, elsewhere):
            for q in ("moved", "test_loss", "train_loss", "generalised_accuracy"):
                far = max(
                    gap / (1 if "accuracy" in q else abs(x)) for gap, x in zip(found[q], usual[q])
                )
                print(f"{name},{type},{where},{q},{far:.1e}")


def main(words: list[str] | None = None) -> int:
    "0; 1 where something left its band; 2 for wrong input"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = {
        "check": "compare",
        "renew": "measure and write",
        "rounding": "deviations as csv",
        "numbers": "json",
    }
    for option, what in does.items():
        parser.add_argument(
            f"--{option}", nargs="*", metavar="METHOD", help=f"{what}; without METHOD: all"
        )
    parser.add_argument("--why", default="", help="why numbers change, for --renew")
    parser.add_argument("--file", type=Path, default=BANDS, help="another file of bands")
    given = vars(parser.parse_args(words))
    chosen = [option for option in does if given[option] is not None]
    set_up()
    try:
        if len(chosen) != 1:
            raise InputError(f"expected one of --{', --'.join(does)}")
        names = [choice(n, METHODS, "method") for n in given[chosen[0]]] or list(METHODS)
        why = given["why"].split()
        if chosen == ["renew"] and not why:
            raise InputError('--renew without a reason: expected --why "TEXT"')
        if chosen == ["check"]:
            lines = [line for name in names for line in check(name, given["file"])]
            print(
                "\n".join(lines)
                or f"{len(names)} method{'s' * (len(names) > 1)}, every number in its band"
            )
            return int(bool(lines))
        if chosen == ["renew"]:
            renew(names, " ".join(why), given["file"])
        if chosen == ["rounding"]:
            print_rounding(names)
        if chosen == ["numbers"]:
            print(json.dumps({type: {n: numbers(n, type) for n in names} for type in TYPES}))
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
