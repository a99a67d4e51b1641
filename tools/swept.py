"""A sweep of short runs to be disturbed: its table, its small data set, and the process that computes it.

    python tools/swept.py ARCHIVES run TABLE ...     `fedrepro run TABLE ...`, in which MNIST is what ARCHIVES hold"""
import gzip
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np

import fedrepro
from fedrepro import checkpoints, data, store
from fedrepro.experiments import load_spec
from fedrepro.laws import SETTINGS

COST = ("wall_seconds", "peak_memory_mb", "resumed", "executor", "together")  # what a fault may change in a header
ROWS = ["FedAvg", "FedAvg calm", "FedAvg wild", "FedCCFA", "FedCCFA calm", "SCAFFOLD", "FedBSS", "FedDrift"]


# --- what is swept

SPEC = """
title = "Faults under load"
paper = "none"
table = "0"
kind = "table"
metric = "generalised_accuracy"
statistic = "last"

[base]
source = "guess: seconds a run"
rounds = 6
drift = "sudden"
drift_round = 3
seeds = [{seeds}]
partition = "dirichlet-class-5"
alpha_dirichlet = 0.5
per_class = 2
per_class_test = 1
recipe = "FedCCFA"
network = "digits_cnn"
clients = 5
participation = 0.6
lr = 0.05
epochs = 1
batch_size = 32

[[columns]]
source = "guess: comes with scikit-learn"
dataset = "digits"

[[columns]]
source = "guess: small, and in files"
dataset = "MNIST"

[tiers.smoke]
"""


def spec_text(rows: list[str], seeds: int) -> str:
    "The table: a row for each method; a calm one differs in its drift alone, a wild one diverges"
    text = SPEC.format(seeds=", ".join(map(str, range(seeds))))
    for row in rows:
        name, _, kind = row.partition(" ")
        values = SETTINGS.get(name, {}) | {"calm": {"drift": '"none"'}, "wild": {"lr": 1e9}}.get(kind, {})
        lines = [f"{key} = {value}" for key, value in values.items()]
        text += "\n".join(["", f'[methods."{row}"]', f'class = "{name}"', 'source = "guess: small"', *lines, ""])
    return text


def idx(array: np.ndarray) -> bytes:
    "uint8 `array` as an IDX file"
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def make_archives(folder: Path) -> Path:
    "The packed files of a small MNIST: digits of 8x8"
    from sklearn.datasets import load_digits
    raw, folder = load_digits(), folder / "archives"
    folder.mkdir()
    for name, rows in (("train", slice(600)), ("t10k", slice(600, 900))):
        for kind, array in (("images-idx3", raw.images[rows] * 15), ("labels-idx1", raw.target[rows])):
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array), mtime=0))
    return folder


def md5(content: bytes) -> str: return hashlib.md5(content, usedforsecurity=False).hexdigest()


def disguise(archives: Path):
    "From here on MNIST is the small one, and a checkpoint is due after every round: in drivers, workers, and here"
    source = data.SOURCES["MNIST"]
    packed = {a.name: (archives / a.name).read_bytes() for a in source.archives}
    sums = {name.removesuffix(".gz"): md5(gzip.decompress(content)) for name, content in packed.items()}
    train, test = ({file: sums[file] for file in part} for part in (source.train, source.test))
    ours = tuple(replace(a, digest=md5(packed[a.name])) for a in source.archives)
    data.SOURCES["MNIST"] = replace(source, train=train, test=test, archives=ours)
    checkpoints.MINUTE = checkpoints.SHARE = 0


def repair(archives: Path, folder: Path):
    "What `fedrepro data MNIST` does offline, once the archives have been copied to their place"
    place = folder / data.SOURCES["MNIST"].folder
    place.mkdir(parents=True, exist_ok=True)
    for archive in archives.iterdir(): shutil.copy(archive, place)
    data.download("MNIST", folder)


# --- who sweeps

class Driver:
    "A `fedrepro run` in a session of its own, and what it says"
    def __init__(self, sweep: "Sweep", results: Path, workers: int = 2):
        path = [str(Path(fedrepro.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"OMP_NUM_THREADS": "1", "FEDREPRO_DATA": str(sweep.data), "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, __file__, sweep.archives, "run", sweep.spec, "--workers", str(workers),
                   "--device", "cpu", "--results", results]
        self.process = subprocess.Popen(command, env={k: v for k, v in os.environ.items() if k != "CI"} | ours,
                                        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True, errors="replace")
        self.lines, self.suffered = [], set()  # what it said; the kinds of faults in its life, and signals sent to it
        self.reader = Thread(target=lambda: self.lines.extend(map(str.rstrip, self.process.stderr)), daemon=True)
        self.reader.start()

    @property
    def pid(self) -> int: return self.process.pid
    @property
    def up(self) -> bool:
        "Whether its command has begun, and not ended"
        return "up" in self.lines and self.process.poll() is None
    @property
    def gone(self) -> bool:
        "Whether it has ended, and with it every process that it started: all of them hold its stderr"
        return self.process.poll() is not None and not self.reader.is_alive()

    def workers(self) -> list[int]:
        "Its living worker processes"
        found = subprocess.run(["ps", "-ww", "-eo", "pid=,sid=,stat=,args="], capture_output=True, text=True)
        rows = [row.split(None, 3) for row in found.stdout.splitlines()]
        return [int(r[0]) for r in rows if r[1] == str(self.pid) and r[2][0] != "Z" and "spawn_main" in r[3]]

    def send(self, number: int, pid: int | None = None, everybody: bool = False):
        "A signal to the driver, to process `pid` of it, or to its whole session"
        if self.gone: return  # its numbers may belong to others
        if pid is None: self.suffered.add(signal.Signals(number).name)
        with suppress(ProcessLookupError):
            if everybody: os.killpg(self.pid, number)
            else: os.kill(pid or self.pid, number)


class Sweep:
    "The command that is started again and again, and what it leaves undisturbed"
    def __init__(self, folder: Path, short: bool):
        self.folder, self.archives = folder, make_archives(folder)
        self.data, self.spec = folder / "data", folder / "faults" / "table.toml"
        self.spec.parent.mkdir()
        self.spec.write_text(spec_text(ROWS[:5] if short else ROWS, 1 if short else 2))
        disguise(self.archives)
        repair(self.archives, self.data)
        names = {store.file_name(c.settings) for c in load_spec(self.spec).cells("smoke")}
        driver = Driver(self, folder / "reference", workers=1 if short else 2)
        if driver.process.wait() != 0: raise SystemExit("\n".join(["the undisturbed sweep failed:", *driver.lines]))
        self.reference = {path.name: said(*store.read(path)) for path in (folder / "reference" / "smoke").iterdir()}
        assert self.reference.keys() == names


def said(head: dict, rows: list[dict]) -> tuple[dict, list[dict]]:
    "What a result says, but for what it has cost"
    return {k: v for k, v in head.items() if k not in COST}, rows


if __name__ in ("__main__", "__mp_main__"):  # a driver and its workers
    disguise(Path(sys.argv[1]))

if __name__ == "__main__":
    from fedrepro.cli import main
    print("up", file=sys.stderr, flush=True)
    sys.exit(main(sys.argv[2:]))
