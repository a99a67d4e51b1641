"""One storm a seed: a sweep on two workers while processes are killed, the disk fills and files are damaged.

    python tools/chaos.py --seeds 1..20      for each seed the faults as they happen, and a verdict
    python tools/chaos.py --runs 4000        a rehearsal: so many short runs by three drivers and a Dask cluster at once
    python tools/chaos.py --terms 50         SIGTERM alone, at any moment of a driver's life, which may leave nothing

A driver is `fedrepro run` on a table of short runs, of which some share rounds and some diverge; it keeps a checkpoint
after every round. When it ends early the same command is started again, as a user would. In the end there must be
what an undisturbed sweep leaves, bit for bit, and nothing else: or exit code 1."""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import psutil

from fedrepro.experiments import store
from fedrepro.experiments.leases import fingerprint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from toy import TOY, written  # noqa: E402

# what may differ in a header
COST = "wall_seconds peak_memory_mb resumed executor together git_commit dirty".split()
PATIENCE = 240  # seconds without anything new, after which a sweep is stuck
SMALL = {"source": "guess: seconds a run"}
BASE = SMALL | {
    "rounds": 6,
    "drift": "sudden",
    "drift_round": 3,
    "seeds": [0, 1, 2],
    "partition": "dirichlet-class-5",
    "alpha_dirichlet": 0.5,
    "per_class": 2,
    "per_class_test": 1,
    "recipe": "FedCCFA",
    "dataset": "digits",
    "network": "digits_cnn",
    "clients": 5,
    "participation": 0.6,
    "lr": 0.05,
    "epochs": 1,
    "batch_size": 32,
}
ROWS = {
    "FedAvg": {},
    "FedAvg calm": {"drift": "none"},
    "FedAvg wild": {"lr": 1e9},
    "SCAFFOLD": {},
    "FedCCFA": {},
    "FedDrift": {},
    "FedBSS": {},
    "FedProx": {},
}
METHODS = {row: {"class": row.split()[0]} | SMALL | more for row, more in ROWS.items()}


class Driver:
    "A `fedrepro run` in a session of its own, and what it says"

    def __init__(self, spec: Path, results: Path, *more: str):
        command = [
            sys.executable,
            "-m",
            "fedrepro",
            "run",
            spec,
            "--workers",
            "2",
            "--device",
            "cpu",
            "--checkpoint",
            "1",
            "--results",
            results,
            *more,
        ]
        path = os.pathsep.join(
            [str(Path(store.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        )
        ours = {k: v for k, v in os.environ.items() if k != "CI"} | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        self.process = subprocess.Popen(
            command,
            env=ours,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self.reader = Thread(
            target=lambda: self.lines.extend(map(str.rstrip, self.process.stderr)), daemon=True
        )
        self.reader.start()

    @property
    def gone(self) -> bool:
        "Whether it has ended, and with it every process that it started: all of them hold its stderr"
        return self.process.poll() is not None and not self.reader.is_alive()

    def workers(self) -> list[int]:
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children()
            return [p.pid for p in children if "spawn_main" in " ".join(p.cmdline())]
        return []

    def send(self, number: int, everybody: bool = False):
        if self.gone:
            return  # its numbers may belong to others
        with suppress(ProcessLookupError):
            (os.killpg if everybody else os.kill)(self.process.pid, number)


def said(head: dict, rows: list[dict]) -> tuple[dict, list[dict]]:
    "What a result says, but for what it has cost"
    return {k: v for k, v in head.items() if k not in COST}, rows


def damage(path: Path, rng: random.Random) -> str:
    "Flip a bit of a file in place, cut it off, or add to it; returns how"
    content = bytearray(path.read_bytes())
    how = rng.choice(["a bit flipped", "cut off", "bytes added"])
    at = rng.randrange(len(content))
    if how == "a bit flipped":
        content[at] ^= 1 << rng.randrange(8)
    with open(path, "r+b") as file:
        file.write(content + b"?" * (how == "bytes added"))
        if how == "cut off":
            file.truncate(at)
    return f"{how} in {path.name}"


class Storm:
    "One sweep with its faults; every result must appear whole, as in the undisturbed sweep, once, and stay"

    def __init__(
        self,
        spec: Path,
        reference: dict,
        disk: Path,
        seed: int,
        faults: int,
        drivers: int = 1,
        only: str = "",
    ):
        self.spec = spec
        self.reference = reference
        self.disk = disk
        self.rng = random.Random(seed)
        # drivers; until when the disk is full
        self.tier = disk / "results/smoke"
        self.all = []
        self.full = 0.0
        # at once, of several every fourth has a Dask cluster; the only fault
        self.drivers = drivers
        self.only = only
        # file -> stamp, whole or damaged; from a checkpoint
        self.stamps = {}
        self.hurt = {}
        self.resumed = set()
        self.lost = []
        self.twice = []
        self.wrong = []
        self.odd = []
        self.done = Counter()
        kinds = (
            [only]
            if only
            else [kind for kind in FAULTS if disk.is_mount() or kind != "fill the disk"]
        )
        drawn = [*kinds, *self.rng.choices(kinds, k=faults)][:faults]
        self.rng.shuffle(drawn)
        self.schedule = [
            (i * len(reference) * 4 // (5 * faults), kind) for i, kind in enumerate(drawn)
        ]
        # the last result or fault; the earliest next fault
        self.began = self.news = self.next = time.monotonic()

    def run(self) -> bool:
        "Faults until none is left, drivers until all is complete; then a look at what remains. Whether all is well"
        try:
            while not self.complete():
                self.turn()
            self.account()
        except TimeoutError as error:
            self.odd.append(str(error))
        finally:
            for driver in self.all:
                driver.send(signal.SIGKILL, everybody=True)
        found = {
            "lost": self.lost,
            "duplicated": self.twice,
            "wrong": self.wrong,
            "left behind": self.left(),
            "unexplained": self.odd,
        }
        print(
            f"{self.done.total()} faults ({', '.join(f'{n} {kind}' for kind, n in sorted(self.done.items()))}), "
            f"{len(self.schedule)} could not happen, {len(self.all)} starts, {len(self.reference)} runs, "
            f"{len(self.resumed)} from a checkpoint: {', '.join(f'{len(x)} {name}' for name, x in found.items())}; "
            f"{time.monotonic() - self.began:.0f} s",
            flush=True,
        )
        for name, lines in found.items():
            print(*(f"  {name}: {line}\n" for line in lines), sep="", end="")
        if not any(found.values()):
            return True
        for driver in self.all:
            print(f"  -- {driver.process.poll()}:", *driver.lines, sep="\n  ")
        return False

    def complete(self) -> bool:
        "Whether a user would say so: every driver has ended, the last one well, and all results are whole"
        over = (
            bool(self.all)
            and all(d.gone for d in self.all)
            and self.all[-1].process.returncode == 0
        )
        return over and not self.full and self.stamps.keys() == self.reference.keys()

    def turn(self):
        "A hundredth of a second: look, empty the disk, start what has ended, and let the next fault happen"
        time.sleep(0.01 + len(self.reference) / 10_000)
        before = len(self.stamps)
        now = time.monotonic()
        self.look()
        if self.full and now > self.full:
            self.full = (self.disk / "filler").unlink() or 0.0
        want = (
            0
            if self.complete()
            else self.drivers
            if self.stamps.keys() != self.reference.keys()
            else 1
        )
        for _ in range(want - len(self.alive())):
            cluster = (
                ["--scheduler", "local"] if self.drivers > 1 and len(self.all) % 4 == 3 else []
            )
            self.all.append(Driver(self.spec, self.disk / "results", *cluster))
        if len(self.stamps) > before:
            self.news = now
        if now - self.news > PATIENCE:
            raise TimeoutError(f"nothing new for {PATIENCE} s: {self.all[-1].lines[-1:]}")
        after, kind = self.schedule[0] if self.schedule else (10**9, "")
        if len(self.stamps) < after or now < self.next or not (what := FAULTS[kind](self)):
            return
        self.done[self.schedule.pop(0)[1]] += 1
        self.news = now
        self.next = now + self.rng.uniform(0, 2)
        print(
            f"  {now - self.began:5.1f} s, {len(self.stamps):2} results: {kind}: {what}", flush=True
        )

    def alive(self) -> list[Driver]:
        return [d for d in self.all if d.process.poll() is None]

    def one(self) -> Driver:
        return self.rng.choice(self.alive() or self.all)

    def look(self):
        "Take in which results are there now"
        for name in self.reference:
            now = fingerprint(self.tier / name)  # changes whenever a file is written anew
            if now is None and self.stamps.pop(name, None):
                self.lost.append(f"{name} was whole, and vanished")
            if now in (None, self.stamps.get(name), self.hurt.get(name)):
                continue
            try:
                head, rows = store.decode((self.tier / name).read_bytes())
            except OSError:
                continue  # it is just being set aside
            except store.Damaged as error:
                self.wrong.append(f"{name} is not whole, and no fault did it: {error}")
            else:
                if head["resumed"]:
                    self.resumed.add(name)
                if said(head, rows) != self.reference[name]:
                    self.wrong.append(f"{name} is not as undisturbed")
            if name in self.stamps:
                self.twice.append(name)
            self.stamps[name] = now

    def left(self) -> list[str]:
        "What may not be there in the end"

        def belongs(p):
            return p == self.tier or p.suffix == ".damaged" or p.name in self.reference

        return [
            str(p.relative_to(self.disk))
            for p in (self.disk / "results").rglob("*")
            if not belongs(p) and not (p.name == "checkpoints" and any(p.iterdir()))
        ]

    def account(self):
        "An hour later, the same command: nothing to compute, what was half written goes; what the drivers have said"
        for part in [*self.tier.glob(".*"), *(self.tier / "checkpoints").glob("*")]:
            os.utime(part, (0, 0))
        self.all.append(Driver(self.spec, self.disk / "results"))
        self.all[-1].process.wait(PATIENCE)
        self.all[-1].reader.join(30)
        self.look()
        if f"fedrepro: 0 computed, {len(self.reference)} were there" not in self.all[-1].lines:
            self.odd.append(f"started again, a complete sweep ends with {self.all[-1].lines[-1:]}")
        codes = {0, 1, 2, 130, 143, -signal.SIGINT, -signal.SIGKILL, -signal.SIGTERM}
        self.odd += [
            f"a driver ended with {code}"
            for d in self.all
            if (code := d.process.returncode) not in codes
        ]
        # what a worker says whose driver is killed while it starts is Python's
        for driver in self.all:
            killed = driver.process.returncode < 0 and not self.only
            ours = [line for line in driver.lines if not killed or line.startswith("fedrepro: ")]
            self.odd += [
                f"a driver said: {line[:300]}"
                for line in ours
                if not USUAL.match(line) or (self.only and "leaked" in line)
            ]

    # what happens: each returns what it did, or nothing when it cannot happen now

    def end(self, number: int, everybody: bool = False) -> str:
        driver = self.one()
        if not driver.workers():
            return ""  # it has not begun, or has ended
        driver.send(number, everybody)
        return f"{signal.Signals(number).name} to the driver" + " and its workers" * everybody

    def terminate(self) -> str:
        "At any moment, while it starts too; where nothing else happens, nothing may be left then"
        driver = self.one()
        moment = self.rng.uniform(0, 8 if self.only else 2)
        with suppress(subprocess.TimeoutExpired):
            driver.process.wait(moment)
        driver.send(signal.SIGTERM)
        if self.only:
            driver.process.wait(PATIENCE)
            driver.reader.join(30)
            self.odd += ["a worker outlives its driver"] * (not driver.gone)
            self.odd += [
                f"left by SIGTERM: {p}"
                for p in self.tier.rglob("*")
                if p.suffix in (".lease", ".partial")
            ]
        return f"SIGTERM to the driver after another {moment:.1f} s"

    def kill_all(self) -> str:
        hit = [d for d in self.alive() if d.workers()]
        for driver in self.alive() if hit else []:
            driver.send(signal.SIGKILL, everybody=True)
        for driver in self.all if hit else []:
            driver.reader.join(30)
        self.look()
        return f"SIGKILL to {len(hit)} drivers and their workers" if hit else ""

    def kill_worker(self) -> str:
        workers = self.one().workers()
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.rng.choice(workers), signal.SIGKILL)
        return "SIGKILL to a worker" if workers else ""

    def fill_disk(self) -> str:
        "Leave no byte, or a few, for a while"
        filler = self.disk / "filler"
        spare = self.rng.choice([0, 0, 4096, 20480])
        if self.full or not self.one().workers():
            return ""
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - spare)
        self.full = time.monotonic() + self.rng.uniform(0.3, 3)
        return f"the disk is full, {spare} bytes are left"

    def damage_result(self) -> str:
        "With a kill, so that the next driver has to find it"
        if not self.stamps or not (killed := self.kill_all()):
            return ""
        path = self.tier / self.rng.choice(sorted(self.stamps))
        what = damage(path, self.rng)
        self.hurt[path.name] = fingerprint(path)
        del self.stamps[path.name]
        return f"{what}, {killed}"

    def damage_checkpoint(self) -> str:
        "With a kill, so that the next driver wants to go on from it"

        def there():
            return sorted(self.tier.glob("checkpoints/*-*.json"))

        if not there() or not (killed := self.kill_all()) or not there():
            return ""
        path = self.rng.choice(there()).with_suffix(self.rng.choice([".json", ".safetensors"]))
        return f"{damage(path, self.rng)}, {killed}"


FAULTS = {  # the first six are in every storm
    "kill a worker": Storm.kill_worker,
    "kill the driver": lambda at: at.end(signal.SIGKILL),
    "fill the disk": Storm.fill_disk,
    "damage a result": Storm.damage_result,
    "kill all": Storm.kill_all,
    "damage a checkpoint": Storm.damage_checkpoint,
    "terminate": Storm.terminate,
    "interrupt": lambda at: at.end(signal.SIGINT, at.rng.random() < 0.5),
}
USUAL = re.compile(  # what a driver may say
    r"$|fedrepro: \d+ of \d+ runs(?!.*failed: )|fedrepro: \d+ computed, \d+ were there|  warnings.warn\("
    r"|fedrepro: .*set aside( as .*\.damaged)?$|.*resource_tracker: There appear|.*cannot be written \(No space left"
    r"|fedrepro: (waiting for|ended by SIG|\d+ workers; dashboard)|fedrepro: 0 computed"
    r"|.*(damaged after it was written|it is not used$)|.*(worker process died|no worker process could be|scheduler has gone|driver has gone)"
)


@contextmanager
def small_disk(folder: Path, size: int = 32):
    "A file system of its own, of `size` MB, where one may be mounted; else a plain folder, that is never full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", folder]
    mounted = (
        shutil.which("mount") and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    )
    if not mounted:
        print("no file system can be mounted here: a full disk is LEFT OUT", flush=True)
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder])


def undisturbed(folder: Path, **base) -> tuple[Path, dict]:
    "Make the table, with what `base` says, and sweep once: the spec, and file name -> what the result says"
    spec = written(
        folder,
        TOY | {"title": "Faults", "base": BASE | base, "methods": METHODS, "tiers": {"smoke": {}}},
        "faults/table",
    )
    driver = Driver(spec, folder / "reference")
    began = time.monotonic()
    if driver.process.wait():
        raise SystemExit("\n".join(["the undisturbed sweep failed:", *driver.lines]))
    took = time.monotonic() - began
    found = {p.name: store.read(p) for p in (folder / "reference/smoke").iterdir()}
    spent = sum(head["wall_seconds"] for head, _ in found.values())
    print(
        f"{len(found)} runs in {took:.0f} s by 2 workers: {(2 * took - spent) / len(found) * 1000:.0f} ms a run beside "
        f"{spent / len(found) * 1000:.0f} ms of its own",
        flush=True,
    )
    return spec, {name: said(*run) for name, run in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0", metavar="1..20")
    parser.add_argument("--runs", type=int, default=0, help="a rehearsal with so many")
    parser.add_argument("--terms", type=int, default=0, help="end so many drivers")
    asked = parser.parse_args()
    good = []
    first, _, last = asked.seeds.partition("..")
    base = (
        {"seeds": list(range(-(-asked.runs // len(ROWS)))), "rounds": 2, "drift_round": 1}
        if asked.runs
        else {}
    )
    if asked.terms:
        base = {"rounds": 24, "drift_round": 12}
    faults = asked.terms or max(14, asked.runs // 40)
    # so that nothing is left running or mounted
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as top:
        spec, reference = undisturbed(Path(top), **base)
        for seed in range(int(first), int(last or first) + 1):
            with small_disk(Path(top, f"seed {seed}"), 32 + asked.runs // 40) as disk:
                print(f"seed {seed}:", flush=True)
                good.append(
                    Storm(
                        spec,
                        reference,
                        disk,
                        seed,
                        faults,
                        4 if asked.runs else 1,
                        "terminate" if asked.terms else "",
                    ).run()
                )
    print(f"{len(good)} seeds, {good.count(False)} with trouble")
    return 0 if all(good) else 1


if __name__ == "__main__":
    # where one who is not root may mount
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        os.geteuid()
        and shutil.which("unshare")
        and not subprocess.run([*inside, "true"], stderr=-3).returncode
    ):
        sys.exit(subprocess.run([*inside, sys.executable, *sys.argv]).returncode)
    sys.exit(main())
