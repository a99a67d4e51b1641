"""What can happen to a sweep while it runs (kills, a full disk, damaged files, ...), and what becomes of its results"""
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swept import Driver, Sweep, said

from fedrepro import data, store


# --- what becomes of the results

def damage(path: Path, rng: random.Random) -> str:
    "Change a file in place; returns how"
    content = path.read_bytes()
    at, kinds = rng.randrange(len(content) or 1), ["a bit flipped", "cut off", "bytes changed", "emptied"]
    how = rng.choice(["bytes added", *(kinds if content else ())])
    before, here, after = content[:at], content[at:at + 1], content[at + 1:]
    changed = {"a bit flipped": before + bytes(b ^ 1 << rng.randrange(8) for b in here) + after, "cut off": before,
               "bytes changed": before + rng.randbytes(9) + after[8:], "emptied": b"",
               "bytes added": content + rng.randbytes(9)}[how]
    with open(path, "r+b") as file:
        file.write(changed)
        file.truncate()
    return f"{how} in {path.name}"


def stamp(path: Path) -> tuple[int, int]:
    "Changes whenever a file is written anew: (inode, ns)"
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


class Ledger:
    "Every result must appear whole, as in the undisturbed sweep, once, and stay, unless a fault damages it"
    def __init__(self, folder: Path, reference: dict):
        self.folder, self.reference = folder, reference
        self.stamps, self.hurt, self.damages = {}, {}, Counter()  # of whole ones; of damaged ones; how often
        self.resumed = set()  # results that went on from a checkpoint
        self.lost, self.twice, self.wrong = set(), [], {}
        self.together, self.beside = [], 0  # spans in which two drivers were at work; results that both computed

    def look(self, two: bool):
        "Take in what is there now; `two` drivers are at work"
        now = time.time_ns()
        if two and self.together and now - self.together[-1][1] < 10**9: self.together[-1][1] = now
        elif two: self.together.append([now, now])
        for name in self.reference:
            try: found = stamp(self.folder / name)
            except FileNotFoundError: self.gone(name)
            else:
                if found not in (self.stamps.get(name), self.hurt.get(name)): self.enter(name, found)

    def gone(self, name: str):
        if self.stamps.pop(name, None): self.lost.add(f"{name} was whole, and vanished")

    def enter(self, name: str, found: tuple[int, int]):
        "A result that is new, or written anew"
        try: head, rows = store.decode((self.folder / name).read_bytes())
        except OSError: return  # a folder in its place, or a result that is just being set aside
        except store.Damaged as error: self.wrong[name] = f"not whole, and no fault did it: {error}"
        else:
            if head["resumed"]: self.resumed.add(name)
            now, then = said(head, rows), self.reference[name]
            if now != then: self.wrong[name] = difference(now, then)
        before = self.stamps.get(name)
        if before and any(a - 10**8 <= before[1] <= b + 10**8 for a, b in self.together): self.beside += 1
        elif before: self.twice.append(name)
        self.hurt.pop(name, None)
        self.stamps[name] = found

    def damage(self, name: str, rng: random.Random) -> str:
        "Damage a whole result; returns how, or nothing when it has just been replaced"
        how = damage(self.folder / name, rng)
        try: store.decode((self.folder / name).read_bytes())
        except store.Damaged:
            self.damages[name] += 1
            self.hurt[name] = stamp(self.folder / name)
            self.stamps.pop(name, None)
            return how

    @property
    def missing(self) -> list[str]: return sorted(self.reference.keys() - self.stamps.keys())


def difference(now: tuple, then: tuple) -> str:
    "Where two results differ first"
    keys = [k for k in now[0].keys() | then[0].keys() if now[0].get(k) != then[0].get(k)]
    rows = [i for i, (a, b) in enumerate(zip(now[1], then[1])) if a != b]
    return f"header {keys}, rows {rows}, {len(now[1])} rows of {len(then[1])}"


# --- what happens

def read_only(folder: Path, yes: bool):
    "Let nothing be made, renamed or removed in a folder, not even by root; or let it again"
    if not folder.is_dir(): return
    if os.geteuid(): folder.chmod(0o555 if yes else 0o755)
    elif shutil.which("chattr"): subprocess.run(["chattr", "+i" if yes else "-i", folder], stderr=subprocess.DEVNULL)


def writable(folder: Path) -> bool:
    "Whether a file can be made in it"
    try: tempfile.TemporaryFile(dir=folder).close()
    except OSError: return False
    return True


class Faults:
    "What can go wrong. A fault returns what it did, or nothing when it cannot happen now"
    def __init__(self, sweep: Sweep, ledger, rng: random.Random, disk: Path):
        self.sweep, self.ledger, self.rng, self.disk = sweep, ledger, rng, disk
        self.tier, self.kept = ledger.folder, ledger.folder / "checkpoints"
        self.all, self.drivers, self.undo = [], [], []  # started; at work; what is taken back: (when, kind, how)
        self.sick, self.obstacle = None, None  # the damaged file of the data set; a folder in the place of a result
        self.foreign, self.halves = set(), set()  # names that are not ours; names of damaged checkpoints

    def start(self) -> Driver:
        "The command, once more; it suffers what is still amiss"
        driver = Driver(self.sweep, self.disk / "results")
        self.all.append(driver)
        self.drivers.append(driver)
        still = [("damage the data", self.sick), ("obstacle", self.obstacle), ("foreign", self.foreign),
                 ("damaged before", self.ledger.hurt)]
        driver.suffered |= {kind for _, kind, _ in self.undo} | {kind for kind, there in still if there}
        return driver

    def later(self, kind: str, action: Callable):
        "Take something back after a random time"
        self.undo.append((time.monotonic() + self.rng.uniform(.3, 3), kind, action))

    def victim(self) -> Driver | None:
        "One of the drivers whose command has begun"
        up = [d for d in self.drivers if d.up]
        return self.rng.choice(up) if up else None

    def hit_worker(self, number: int) -> str:
        driver = self.victim()
        workers = driver.workers() if driver else []
        if not workers: return ""
        pid = self.rng.choice(workers)
        driver.send(number, pid)
        if number == signal.SIGSTOP: self.later("pause", lambda: driver.send(signal.SIGCONT, everybody=True))
        return f"{signal.Signals(number).name} to a worker"

    def hit_driver(self, number: int, everybody: bool = False) -> str:
        driver = self.victim()
        if not driver: return ""
        driver.send(number, everybody=everybody)
        if number == signal.SIGSTOP: self.later("pause", lambda: driver.send(signal.SIGCONT, everybody=True))
        return f"{signal.Signals(number).name} to {'the driver and its workers' if everybody else 'the driver'}"

    def kill_all(self) -> str: return self.hit_driver(signal.SIGKILL, True)
    def terminate(self) -> str: return self.rng.choice([self.hit_driver, self.hit_worker])(signal.SIGTERM)
    def interrupt(self) -> str: return self.hit_driver(signal.SIGINT, self.rng.random() < .5)
    def pause(self) -> str: return self.rng.choice([self.hit_driver, self.hit_worker])(signal.SIGSTOP)

    def fill_disk(self) -> str:
        "Leave no byte, or a few, on the file system of the results; without one of their own: let no file grow"
        spare = self.rng.choice([0, 0, 4096, 20480])
        if not self.disk.is_mount(): return self.limit_files(spare)
        filler = self.disk / "filler"
        if filler.exists(): return ""
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True: file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - spare)
        self.later("fill the disk", filler.unlink)
        return f"the disk is full, {spare} bytes are left"

    def limit_files(self, size: int) -> str:
        "Let no process of a driver write a file longer than `size` bytes"
        driver = self.victim()
        if not driver: return ""
        def limit(size):
            for pid in [driver.pid, *driver.workers()]:
                with suppress(OSError): resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        limit(size)
        self.later("fill the disk", lambda: limit(resource.RLIM_INFINITY))
        return f"no file may be longer than {size} bytes"

    def lock_folders(self) -> str:
        "Let nothing be made, renamed or removed among the results or among the checkpoints"
        folders = [f for f in (self.tier, self.kept) if f.is_dir() and self.rng.random() < .7]
        for folder in folders: read_only(folder, True)
        if folders: self.later("read-only", lambda: [read_only(folder, False) for folder in folders])
        return " and ".join(f"{f.name}/ is read-only" for f in folders)

    def damage_data(self) -> str:
        "A file of the data set; mostly with a kill, so that the next driver has to read it"
        if self.sick: return ""
        self.sick = self.rng.choice(sorted((self.sweep.data / data.SOURCES["MNIST"].folder).iterdir()))
        what = damage(self.sick, self.rng) if self.rng.random() < .8 else f"{self.sick.name} deleted"
        if what.endswith("deleted"): self.sick.unlink()
        return ", ".join(filter(None, [what, self.rng.random() < .7 and self.kill_all()]))

    def damage_result(self) -> str:
        "A whole one; often with a kill, so that the next driver has to find it"
        if not self.ledger.stamps: return ""
        name = self.rng.choice(sorted(self.ledger.stamps))
        what = self.ledger.damage(name, self.rng)
        for driver in [d for d in self.all if not d.gone]: driver.suffered.add(name)  # it may have seen it whole
        return what and ", ".join(filter(None, [what, self.rng.random() < .5 and self.kill_all()]))

    def damage_checkpoint(self) -> str:
        "One of the newest; mostly with a kill, so that the next driver wants to go on from it"
        if not list(self.kept.glob("*-*.json")): return ""
        driver, killed = self.victim(), ""
        if driver and self.rng.random() < .7:
            driver.send(signal.SIGKILL, everybody=True)
            driver.process.wait()
            killed = "SIGKILL to the driver and its workers"
        there = [p for p in sorted(self.kept.glob("*-*.json")) if p.stem not in self.foreign]
        if not there: return ""
        newest = {p.name.rpartition("-")[0]: p for p in there}
        suffix = self.rng.choice([".json", ".safetensors", ".safetensors"])
        path = self.rng.choice(sorted(newest.values())).with_suffix(suffix)
        self.halves.add(path.stem)
        try: what = damage(path, self.rng) if self.rng.random() < .8 else path.unlink() or f"{path.name} deleted"
        except OSError: what = ""  # it has just been removed, or its folder is locked
        return ", ".join(filter(None, [what, killed]))

    def leave_foreign(self) -> str:
        "Something that is not ours, under an odd name"
        place = self.rng.choice([f for f in (self.tier, self.kept) if f.is_dir() and writable(f)] or [None])
        names = ["notes (old)\n2.txt", "FedAvg (2).jsonl", os.fsdecode(b"\xff\xfe.json"), ".jsonl", "-f.safetensors"]
        if place is None or (path := place / self.rng.choice(names)).exists(): return ""
        content = self.rng.choice([None, b"", self.rng.randbytes(300)])
        try: path.mkdir() if content is None else path.write_bytes(content)
        except OSError: return ""
        self.foreign |= {path.name, path.stem}
        return f"a foreign {'folder' if path.is_dir() else 'file'} {ascii(path.name)} in {place.name}/"

    def leave_obstacle(self) -> str:
        "A folder where a result belongs"
        missing = sorted(self.sweep.reference.keys() - self.ledger.stamps.keys() - self.ledger.hurt.keys())
        if self.obstacle or not missing: return ""
        path = self.tier / self.rng.choice(missing)
        try: path.mkdir()
        except OSError: return ""
        self.obstacle = path
        return f"a folder in the place of {path.name}"

    def second_driver(self) -> str:
        "A driver started beside the first"
        if len(self.drivers) != 1 or not self.victim(): return ""
        self.start()
        return "a second driver on the same folder"


FAULTS = {  # the first four are in every storm
    "kill a worker": lambda at: at.hit_worker(signal.SIGKILL),
    "kill the driver": lambda at: at.hit_driver(signal.SIGKILL),
    "fill the disk": Faults.fill_disk, "damage the data": Faults.damage_data,
    "damage a checkpoint": Faults.damage_checkpoint, "damage a result": Faults.damage_result,
    "kill all": Faults.kill_all, "terminate": Faults.terminate, "interrupt": Faults.interrupt, "pause": Faults.pause,
    "read-only": Faults.lock_folders, "second driver": Faults.second_driver, "foreign": Faults.leave_foreign,
    "obstacle": Faults.leave_obstacle}
