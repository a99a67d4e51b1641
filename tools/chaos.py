"""Faults under load: a sweep on two workers while processes are killed, the disk fills and files are damaged.

    python tools/chaos.py --seeds 1..20           for each seed a storm of random faults, printed, and a verdict
    python tools/chaos.py --seeds 7 --faults 40   more of them
    python tools/chaos.py --seeds 7 --minutes 30  the seeds from 7 on, for so long
    python tools/chaos.py --seeds 7 --short       a small sweep and few faults: about a minute of one core

A driver is `fedrepro run` on a table of short runs, of which some share rounds and some diverge; it keeps a checkpoint
after every round, and half of its runs read files. When it ends early the same command is started again, as a user
would. In the end there must be what an undisturbed sweep leaves, bit for bit, and nothing else: or exit code 1."""
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
from itertools import count
from pathlib import Path

from faults import FAULTS, Faults, Ledger, read_only, writable
from swept import Driver, Sweep, repair

from fedrepro import data
from fedrepro.trees import InputError, one_of

MUST = list(FAULTS)[:4]  # are in every storm
PATIENCE = 240  # seconds without anything new, after which a sweep is stuck


# --- a storm

HURT = {"damage a result", "damaged before"}
DAMAGED = r"damaged: its MD5 is|\(missing: |cannot be read"
REASONS = [  # what a driver may say about a run, a checkpoint or itself, and which faults explain it
    (r"cannot be written \((No space left on device|File too large)\)", {"fill the disk"}),
    (r"cannot be written \((Operation not permitted|Permission denied)\)", {"read-only"}),
    (r"cannot be written \(Is a directory\)|move it away", {"obstacle"}), (DAMAGED, {"damage the data"}),
    (r"damaged after it was written|move it away", HURT), (r"it is not used$", HURT | {"foreign", "obstacle"}),
    (r"its worker process died 3 times|no worker process could be started", {"kill a worker", "terminate"})]
USUAL = re.compile(r"up$|fedrepro: \d+ of \d+ runs(?!.*failed: )|fedrepro: \d+ computed, \d+ were there|"
                   r"fedrepro: .*set aside( as .*\.damaged)?$|.*resource_tracker: There appear to be|  warnings.warn\(")


class Stuck(Exception): pass


class Storm:
    "One sweep with its faults, and what they have done"
    def __init__(self, sweep: Sweep, seed: int, faults: int, disk: Path, kinds: list[str]):
        self.sweep, self.disk, self.rng = sweep, disk, random.Random(seed)
        self.ledger = Ledger(disk / "results" / "smoke", sweep.reference)
        self.at = Faults(sweep, self.ledger, self.rng, disk)
        self.schedule, self.done = self.draw(faults, kinds), Counter()
        self.most, self.next = 0, 0.  # results so far; the earliest moment of the next fault
        self.left, self.odd = [], []  # what nobody needs any more; what no fault explains
        self.began = self.news = time.monotonic()

    def draw(self, faults: int, kinds: list[str]) -> list[tuple[int, bool, str]]:
        """The faults in random order, those of MUST, then the others, then any: (after how many results,
        whether in the very moment in which a result appears, which fault)"""
        first, others = ([kind for kind in kinds if (kind in MUST) == must] for must in (True, False))
        drawn = [*first, *self.rng.sample(others, len(others)), *self.rng.choices(kinds, k=faults)][:faults]
        self.rng.shuffle(drawn)
        after = [i * len(self.sweep.reference) * 4 // (5 * faults) for i in range(faults)]
        return [(n, n > 0 and self.rng.random() < .5, kind) for n, kind in zip(after, drawn)]

    @property
    def seconds(self) -> float: return time.monotonic() - self.began
    def tell(self, text: str): print(f"  {self.seconds:5.1f} s, {self.most:2} results: {text}", flush=True)

    def run(self):
        "Faults until none is left, drivers until all is complete; then a look at what remains"
        self.at.start()
        try:
            while not (self.complete() and not self.at.undo): self.turn()
            self.last_start()
            self.account()
        except Stuck as error: self.odd.append(str(error))
        finally: self.end()

    def complete(self) -> bool:
        "Whether a user would say so: the last driver has said so, and nothing was damaged since"
        over = not self.at.drivers and self.at.all[-1].process.returncode == 0
        return over and not self.ledger.missing and not self.at.obstacle

    def turn(self):
        "A hundredth of a second"
        time.sleep(.01)
        before, now = len(self.ledger.stamps), time.monotonic()
        self.ledger.look(sum(not d.gone for d in self.at.all) > 1)
        self.most = max(self.most, len(self.ledger.stamps))
        for entry in [e for e in self.at.undo if e[0] <= now]:
            self.at.undo.remove(entry)
            entry[2]()
        self.reap()
        fresh = len(self.ledger.stamps) > before
        if fresh or now >= self.next: self.fault(fresh)
        if fresh: self.news = now
        if now - self.news > PATIENCE: raise Stuck(f"nothing new for {PATIENCE} s: {self.at.all[-1].lines[-1:]}")

    def reap(self):
        "Look after drivers that have ended; start the next one when there is none"
        for driver in [d for d in self.at.drivers if d.process.poll() is not None]:
            if driver.process.returncode >= 0: driver.reader.join(30)  # after such an end no process stays behind
            self.at.drivers.remove(driver)
            self.answer(driver)
            self.ledger.look(False)
            missing = sorted(set(self.ledger.missing) - driver.suffered)
            if driver.process.returncode == 0 and missing: self.odd.append(f"a driver was content without {missing}")
            self.news = time.monotonic()
        refused = self.at.all[-1].process.returncode == 2 and self.at.undo  # a user waits until the disk is back
        if not self.at.drivers and not self.complete() and not refused: self.at.start()

    def answer(self, driver: Driver):
        "What a user does about what a driver has refused by name"
        text, at = "\n".join(driver.lines), self.at
        if at.sick and at.sick.name in text and re.search(DAMAGED, text): self.mend()
        if at.obstacle and at.obstacle.name in text and "move it away" in text:
            with suppress(OSError):  # in a locked folder: later
                at.obstacle.rmdir()
                at.obstacle = None

    def mend(self):
        "Get the damaged file of the data set again"
        repair(self.sweep.archives, self.sweep.data)
        data.load("MNIST", self.sweep.data)
        self.tell(f"(refused by name, and got again: {self.at.sick.name})")
        self.at.sick = None

    def fault(self, fresh: bool):
        "The first fault whose time has come and that can happen now; a result is `fresh`"
        for entry in [e for e in self.schedule if e[0] <= self.most and (fresh or not e[1] or e[0] + 2 < self.most)]:
            alive, kind = [d for d in self.at.all if not d.gone], entry[2]
            if not (what := FAULTS[kind](self.at)): continue
            for driver in alive: driver.suffered.add(kind)
            self.schedule.remove(entry)
            self.done[kind] += 1
            self.tell(f"{kind}{' at once' if entry[1] else ''}: {what}")
            self.next = self.news = time.monotonic()
            self.next += self.rng.uniform(0, 2)
            return

    def last_start(self):
        "An hour later, the same command: it has nothing to compute, and removes what was half written"
        self.wait_for_all()
        if self.at.sick: self.refuse()
        halves = [p for kind in (".*.partial", ".*.lease") for p in self.ledger.folder.glob(kind)]
        for part in [*halves, *self.at.kept.glob("*")]: os.utime(part, (0, 0))
        driver = self.at.start()
        driver.process.wait(PATIENCE)
        driver.reader.join(30)
        self.ledger.look(False)
        if f"fedrepro: 0 computed, {len(self.sweep.reference)} were there" not in driver.lines:
            self.odd.append(f"started again, a complete sweep ends with {driver.process.poll()}: {driver.lines[-1:]}")

    def wait_for_all(self):
        "Every process ends soon after its driver"
        end = time.monotonic() + 30
        for driver in self.at.all: driver.reader.join(max(0, end - time.monotonic()))
        self.left += [f"a process of a driver that ended with {d.process.poll()}" for d in self.at.all if not d.gone]

    def refuse(self):
        "Damaged data that no driver has read must be refused now"
        try: data.load("MNIST", self.sweep.data)
        except InputError as error:
            if self.at.sick.name in str(error): return self.mend()
        self.odd.append(f"{self.at.sick} is damaged, and not refused by name")

    def account(self):
        "Compare what the drivers have said, and what is there, with what was done to them"
        for driver in self.at.all: self.odd += surprises(driver)
        if not self.ledger.together: self.odd += self.damages("\n".join(line for d in self.at.all for line in d.lines))
        self.left += [str(p.relative_to(self.disk)) for p in (self.disk / "results").rglob("*") if not self.belongs(p)]

    def damages(self, text: str) -> list[str]:
        "Every damaged result is set aside once, and nothing else is, nor a checkpoint that is whole"
        aside = Counter(re.sub(r"(\.\d+)?\.damaged$", "", name) for name in re.findall("; set aside as (.+)", text))
        heads = set(re.findall(r"checkpoint (.+?): .*; it is set aside", text))
        ours, foreign = self.ledger.damages, {n.encode(errors="backslashreplace").decode() for n in self.at.foreign}
        found = [f"{name}: damaged {ours[name]} times, set aside {aside[name]} times"
                 for name in (ours | aside).keys() - foreign if ours[name] != aside[name]]
        whole = heads - self.at.halves - foreign
        return found + [f"checkpoint {name} is set aside, and no fault damaged it" for name in whole]

    def belongs(self, path: Path) -> bool:
        "Whether a path may be there in the end: a result, what was set aside, what a fault left, and their folders"
        if path == self.ledger.folder or path.name.endswith(".damaged"): return True
        if path.name == "checkpoints": return any(path.iterdir())
        return path.name in self.at.foreign or path.parent.name in self.at.foreign or path.name in self.sweep.reference

    def end(self):
        "Leave no process, and nothing locked or full"
        for driver in self.at.all:
            for number in (signal.SIGCONT, signal.SIGKILL): driver.send(number, everybody=True)
        for _, _, take_back in self.at.undo: take_back()

    @property
    def lost(self) -> list[str]: return sorted(self.ledger.lost) + self.ledger.missing
    @property
    def trouble(self) -> list[str]:
        "What is not as it must be, one line each"
        wrong = [f"{name}: {why}" for name, why in self.ledger.wrong.items()]
        found = [("lost", self.lost), ("computed again", self.ledger.twice), ("wrong", wrong),
                 ("left behind", self.left), ("unexplained", self.odd)]
        return [f"{what}: {line}" for what, lines in found for line in lines]

    def verdict(self) -> str:
        "One line"
        faults = ", ".join(f"{n} {kind}" for kind, n in sorted(self.done.items()))
        beside = f", {self.ledger.beside} by two drivers at once" if self.ledger.beside else ""
        missed = f", {len(self.schedule)} could not happen" if self.schedule else ""
        ledger, resumed = self.ledger, f"{len(self.ledger.resumed)} from a checkpoint"
        return (f"{sum(self.done.values())} faults ({faults}){missed}, {len(self.at.all)} starts, "
                f"{len(self.sweep.reference)} runs, {resumed}{beside}: {len(self.lost)} lost, "
                f"{len(ledger.twice)} duplicated, {len(ledger.wrong)} wrong, {len(self.left)} left behind, "
                f"{len(self.odd)} unexplained; {self.seconds:.0f} s")


def surprises(driver: Driver) -> list[str]:
    "What a driver said or did that its faults do not explain"
    def known(line): return any(re.search(pattern, line) and kinds & driver.suffered for pattern, kinds in REASONS)
    code, strange = driver.process.returncode, [x for x in driver.lines if x and not USUAL.match(x) and not known(x)]
    found = [f"a driver said: {line[:300]}" for line in strange[:20]]
    name = signal.Signals(-code).name if code < 0 else "SIGINT" if code == 130 else None
    failed = any("failed: " in line for line in driver.lines)
    fits = name in driver.suffered if name else code == 0 or code == 2 or (code == 1 and failed)
    return found + ([] if fits else [f"a driver ended with {code}: {driver.lines[-1:]}"])


# --- the command

@contextmanager
def small_disk(folder: Path):
    "A file system of its own, of 32 MB, where one may be mounted; else a plain folder"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder]
    mounted = shutil.which("mount") and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    try: yield folder
    finally:
        if mounted: subprocess.run(["umount", "-l", folder])


def possible(kinds: list[str], disk: Path) -> list[str]:
    "Those of the faults that can happen here; says how the disk is filled and a folder locked"
    read_only(disk, True)
    locks = not writable(disk)
    read_only(disk, False)
    how = "chattr +i" if os.geteuid() == 0 else "chmod"
    full = "a file system of 32 MB" if disk.is_mount() else "a limit on the size of files (RLIMIT_FSIZE)"
    print(f"a full disk: {full}; a read-only folder: {how if locks else 'not possible here, LEFT OUT'}", flush=True)
    return [kind for kind in kinds if locks or kind != "read-only"]


def storm(sweep: Sweep, seed: int, faults: int, kinds: list[str]) -> bool:
    "One seed; whether all went well. What is left of a sweep that did not is kept"
    with small_disk(sweep.folder / f"seed {seed}") as disk:
        now = Storm(sweep, seed, faults, disk, possible(kinds, disk))
        print(f"seed {seed}: {', '.join(kind for _, _, kind in now.schedule)}", flush=True)
        now.run()
        print(f"seed {seed}: {now.verdict()}", flush=True)
        if not now.trouble: return True
        kept = Path(tempfile.mkdtemp(prefix=f"chaos-seed-{seed}-"))
        shutil.copytree(disk / "results", kept / "results", symlinks=True)
        said = [[f"exit code {d.process.returncode}, {sorted(d.suffered)}", *d.lines, ""] for d in now.at.all]
        (kept / "said.txt").write_text("\n".join(line for lines in said for line in lines))
        print("\n".join([*(f"  {line}" for line in now.trouble), f"  kept: {kept}"]), flush=True)


def numbers(text: str) -> list[int]:
    "`7`, `1..20` or `1,4,9`"
    first, dots, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]


def kinds(text: str) -> list[str]:
    "Names of faults"
    return [one_of(name, list(FAULTS), "fault") for name in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", "--seed", type=numbers, default=[0], metavar="1..20")
    parser.add_argument("--faults", type=int, metavar="N", help="a seed; default: 14, short: 6")
    parser.add_argument("--minutes", type=float, metavar="M", help="go on with the next seeds for so long")
    parser.add_argument("--only", type=kinds, default=list(FAULTS), metavar="A,B", help=f"of: {', '.join(FAULTS)}")
    parser.add_argument("--short", action="store_true", help="fewer runs and faults")
    asked, began = parser.parse_args(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left running or mounted
    try:
        sweep = Sweep(folder, asked.short)
        print(f"the undisturbed sweep: {len(sweep.reference)} runs, {time.monotonic() - began:.0f} s", flush=True)
        seeds, good = (count(asked.seeds[0]) if asked.minutes else asked.seeds), []
        for seed in seeds:
            good.append(bool(storm(sweep, seed, asked.faults or (6 if asked.short else 14), asked.only)))
            if asked.minutes and time.monotonic() - began > 60 * asked.minutes: break
        print(f"{len(good)} seeds, {good.count(False)} with trouble; {time.monotonic() - began:.0f} s")
        return 0 if all(good) else 1
    except KeyboardInterrupt: return 130
    finally: shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__": sys.exit(main())
