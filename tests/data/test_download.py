"""Downloads and archives in a hostile world: cut connections, evil archives, full disks, killed processes."""

import builtins
import hashlib
import io
import os
import random
import shutil
import signal
import sys
import tarfile
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest

from fedrepro.core.errors import InputError
from fedrepro.data import download
from fedrepro.data.download import Archive, bring, download_file, unpack

BYTES = random.Random(0).randbytes(300_000)
FILES = {"one": BYTES[:70_000], "two": BYTES[70_000:150_000], "three": BYTES[150_000:]}


def md5(content):
    return hashlib.md5(content).hexdigest()


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


class Server(ThreadingHTTPServer):
    "Serves `files` (path -> bytes); `asked` lists paths; `cuts` ends an answer early (one entry a request), `status`: path -> codes or addresses"

    daemon_threads, length, hold = True, True, None

    def __init__(self, files, cuts=(), status=None, **habits):
        self.files = {f"/{n}": c for n, c in files.items()}
        self.asked = []
        self.cuts = list(cuts)
        self.status = status or {}
        self.__dict__ |= habits
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, *_):
        pass  # a client that was killed


class Answer(BaseHTTPRequestHandler):
    "`hold`: an event that is waited for after the cut; `length` False: the size is not announced"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        codes = self.server.status.get(self.path, [])
        server.asked.append(self.path)
        if codes and isinstance(codes[0], int):
            return self.send_error(codes.pop(0))
        if not codes and self.path not in server.files:
            return self.send_error(404)
        self.send_response(302 if codes else 200)
        if codes:
            self.send_header("Location", codes.pop(0))
        whole = server.files.get(self.path, b"")
        if server.length:
            self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        cut = server.cuts.pop(0) if server.cuts else len(whole)
        self.wfile.write(whole[:cut])
        if server.hold is None:
            return
        while not server.hold.wait(0.05):
            self.wfile.write(whole[cut : (cut := cut + 1)])  # it drips
        self.wfile.write(whole[cut:])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    "No proxy, and no pause between tries"
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(
        pooch.core.time, "sleep", lambda s, sleep=pooch.core.time.sleep: sleep(min(s, 0.1))
    )


@pytest.fixture
def served():
    "Makes servers and stops them"
    servers = []

    def make(files, **habits):
        return servers.append(Server(files, **habits)) or servers[-1]

    yield make
    for server in servers:
        if server.hold:
            server.hold.set()
        server.shutdown()
        server.server_close()


def get(server, path, name="x", content=BYTES, **more):
    return download_file([server.url(name)], path, md5(content), **more)


# --- downloads


@pytest.mark.parametrize("length", [True, False])
def test_more_than_the_limit(served, tmp_path, length):
    "Announced, or noticed on the way: it stops, and the disk is not filled"
    server = served({"x": BYTES}, length=length)
    with pytest.raises(InputError, match="more than the 100000"):
        get(server, tmp_path / "x", max_bytes=100_000)
    assert names(tmp_path) == []
    assert len(server.asked) == 1


def test_only_http(served, tmp_path):
    "Neither an address nor a redirection reads a local file; a redirection to http is followed"
    (tmp_path / "secret").write_bytes(BYTES)
    server = served({"x": BYTES})
    local = (tmp_path / "secret").as_uri()
    server.status = {
        "/there": [server.url("x")],
        "/local": [local] * 3,
        "/ftp": ["ftp://127.0.0.1/x"] * 3,
    }
    for url in (
        local,
        server.url("local"),
        server.url("ftp"),
        "x",
        "http://",
        "http://127.0.0.1:99999/x",
        "http://no.such.host.invalid/x",
    ):
        with pytest.raises(InputError, match="could not be downloaded"):
            download_file([url], tmp_path / "x", md5(BYTES))
    got = get(server, tmp_path / "x", "there")
    assert got.read_bytes() == BYTES
    assert got.stat().st_mode & 0o777 == 0o644


def test_a_server_that_is_silent_or_drips_is_given_up(served, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    monkeypatch.setattr(download, "RETRIES", 0)
    server = served({"x": BYTES}, cuts=[0, 0], hold=threading.Event())
    with pytest.raises(InputError, match="timed out, only .* bytes came in 0 s"):
        get(server, tmp_path / "x")
    monkeypatch.setattr(download, "TIMEOUT", 0.02)
    with pytest.raises(InputError, match="timed out"):
        get(server, tmp_path / "x")
    assert names(tmp_path) == []


# --- archives


def tar_gz(*members):
    "The bytes of a .tar.gz of `members`: (name, bytes)"
    with tarfile.open(fileobj=(raw := io.BytesIO()), mode="w:gz") as t:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            t.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def test_no_archive(tmp_path):
    for name, content, said in (
        ("gone.gz", None, "No such file"),
        ("e.tar.gz", b"<html>", "cannot be unpacked"),
        ("e.gz", b"<html>", "e.gz: cannot be unpacked .Not a gzipped file"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=said):
            unpack(tmp_path / name, tmp_path / "to", {"e": "e"})
    (tmp_path / "e.tar.gz").write_bytes(tar_gz(("one", b"1")))
    with pytest.raises(InputError, match="missing: three"):
        unpack(tmp_path / "e.tar.gz", tmp_path / "to", {"one": "one", "three": "x"})


# --- several processes, killed processes, disks that refuse

SUMS = {n: md5(c) for n, c in FILES.items()}


@pytest.fixture
def offer(served):
    "A server with the archive of FILES; `into` brings them into a folder"
    content = tar_gz(*((f"set/{n}", c) for n, c in FILES.items()))
    server = served({"set.tar.gz": content})
    server.archives = [
        Archive((server.url("set.tar.gz"),), md5(content), {f"set/{n}": n for n in FILES})
    ]
    server.into = lambda folder: bring(server.archives, folder, SUMS)
    return server


def forked(work, said) -> int:
    "A process of its own that does `work` and ends with what it returns, 0 for None; its stderr is the file `said`"
    if child := os.fork():
        return child
    code = 99
    try:
        sys.stderr = open(said, "w", buffering=1)
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(folder, *more):
    return {n: (folder / n).read_bytes() for n in {*names(folder)} - {*more}} == FILES


def test_two_processes_at_once(offer, tmp_path):
    "One downloads, the other says that it waits, and then finds everything there"
    offer.hold = threading.Event()
    offer.cuts = [1000]
    first = forked(lambda: offer.into(tmp_path / "set"), tmp_path / "first")
    while not offer.asked:
        time.sleep(0.01)
    second = forked(lambda: offer.into(tmp_path / "set"), tmp_path / "second")
    while not (
        (tmp_path / "second").exists()
        and "waiting for another process" in (tmp_path / "second").read_text()
    ):
        time.sleep(0.01)
    offer.hold.set()
    assert ended(first) == ended(second) == 0
    assert len(offer.asked) == 1
    assert whole(tmp_path / "set")


def killed_at(k: int, work) -> int:
    "Do `work` and be killed at the k-th time that something is brought to the disk, named, removed or opened to be written; how often there was"
    calls = [0]

    def step():
        calls[0] += 1
        if calls[0] == k:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir"):
        setattr(os, name, lambda *a, original=getattr(os, name), **kw: step() or original(*a, **kw))

    def opened(path, mode="r", *a, original=open, **kw):
        file = original(path, mode, *a, **kw)
        if mode[0] in "wax":
            step()
        return file

    builtins.open = io.open = opened
    work()
    return calls[0]


def test_killed_anywhere(offer, tmp_path):
    "At each of its steps on the disk: no file is ever half there, and the next call finishes and tidies up"
    folder = tmp_path / "set"

    def started():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "two").write_bytes(b"damaged")

    def attempt(k):
        started()
        return ended(forked(lambda: killed_at(k, lambda: offer.into(folder)), tmp_path / "said"))

    points = attempt(0)
    assert 15 <= points <= 60, (tmp_path / "said").read_text()
    for k in range(1, points + 1):
        assert attempt(k) == -signal.SIGKILL, k
        for f in FILES:  # whole, or not there, or as it was
            assert not (folder / f).exists() or (folder / f).read_bytes() in (
                FILES[f],
                b"damaged" * (f == "two"),
            ), (k, f)
        offer.into(folder)
        assert whole(folder), k


def test_an_archive_that_is_there_is_not_downloaded(offer, tmp_path):
    "Put there by hand; and one that is itself a file of the set"
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.tar.gz").write_bytes(offer.files["/set.tar.gz"])
    offer.into(folder)
    assert offer.asked == []
    assert whole(folder, "set.tar.gz")
    bring(
        [Archive((offer.url("set.tar.gz"),), offer.archives[0].digest)],
        tmp_path / "own",
        {"set.tar.gz": offer.archives[0].digest},
    )
    assert offer.asked == ["/set.tar.gz"]
    assert names(tmp_path / "own") == ["set.tar.gz"]
