"""Downloads, archives and locks in a hostile world: cut connections, evil archives, full disks, killed processes."""
import errno
import gzip
import hashlib
import io
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrepro import fetch, files
from fedrepro.fetch import Archive, bring, download_file, unpack
from fedrepro.files import checksum, locked
from fedrepro.trees import InputError

torch.set_num_threads(1)
BYTES = random.Random(0).randbytes(300_000)
FILES = {"one": BYTES[:70_000], "two": BYTES[70_000:150_000], "three": BYTES[150_000:]}


def md5(content): return hashlib.md5(content).hexdigest()


class Server(ThreadingHTTPServer):
    "Serves `files` (path -> bytes); `asked` lists (path, Range, bytes answered); the other fields are its bad habits"
    daemon_threads, ranges, length, cut, status, hold, shift = True, True, True, None, {}, None, 0

    def __init__(self, files, **habits):
        self.files, self.asked = {f"/{name}": content for name, content in files.items()}, []
        self.__dict__ |= habits
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, name): return f"http://127.0.0.1:{self.server_port}/{name}"
    def handle_error(self, *_): pass  # a client that was killed


class Answer(BaseHTTPRequestHandler):
    "`hold`: wait after `cut` bytes; `status`: path -> codes or addresses to redirect to, one a request; `shift`: lie"
    def log_message(self, *_): pass

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append((self.path, asked, 0))
        entry, codes = len(server.asked) - 1, server.status.get(self.path, [])
        if codes: return self.other(codes.pop(0))
        if self.path not in server.files: return self.send_error(404)
        whole, start = server.files[self.path], int(asked[6:-1]) if asked and server.ranges else 0
        if start and start >= len(whole): return self.send_error(416)
        self.send_response(206 if start else 200)
        if start: start += server.shift
        if start: self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        if server.length: self.send_header("Content-Length", str(len(whole) - start))
        self.end_headers()
        body = whole[start:]
        sent = body[:server.cut]
        server.asked[entry] = (self.path, asked, len(sent))  # before the client has the last byte and looks here
        self.wfile.write(sent)
        if server.hold is None: return
        server.hold.wait(60)
        self.wfile.write(body[len(sent):])

    def other(self, answer):
        if isinstance(answer, int): return self.send_error(answer)
        self.send_response(302)
        self.send_header("Location", answer)
        self.end_headers()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    "No proxy, and no pause between tries"
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch, "WAITS", (0, 0))


@pytest.fixture
def served():
    "Makes servers and stops them"
    servers = []
    def make(files, **habits):
        servers.append(Server(files, **habits))
        return servers[-1]
    yield make
    for server in servers:
        if server.hold: server.hold.set()
        server.shutdown()
        server.server_close()


def get(server, path, name="x", content=BYTES, **more):
    return download_file([server.url(name)], path, md5(content), **more)


def names(folder): return sorted(p.name for p in Path(folder).iterdir())


# --- downloads

def test_a_cut_connection_is_resumed(served, tmp_path):
    "As many connections as it takes, and not a byte is sent twice"
    server = served({"x": BYTES}, cut=60_000)
    assert get(server, tmp_path / "x").read_bytes() == BYTES and names(tmp_path) == ["x"]
    begins = [None, *(f"bytes={i}-" for i in range(60_000, len(BYTES), 60_000))]
    assert server.asked == [("/x", begin, 60_000) for begin in begins] and len(begins) > len(fetch.WAITS) + 1


def test_a_later_call_resumes(served, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "WAITS", ())
    server = served({"x": BYTES}, cut=120_000)
    with pytest.raises(InputError, match="the connection ended after 120000 of 300000 bytes"):
        get(server, tmp_path / "x")
    assert names(tmp_path) == ["x.part"]
    server.cut = None
    assert get(server, tmp_path / "x").read_bytes() == BYTES
    assert server.asked[1:] == [("/x", "bytes=120000-", 180_000)]


def test_a_whole_part_needs_no_server(tmp_path):
    "Killed between the last byte and the name"
    (tmp_path / "x.part").write_bytes(BYTES)
    assert download_file([], tmp_path / "x", md5(BYTES)).read_bytes() == BYTES and names(tmp_path) == ["x"]


def test_a_server_without_ranges(served, tmp_path):
    server = served({"x": BYTES}, ranges=False)
    (tmp_path / "x.part").write_bytes(BYTES[:1000])
    assert get(server, tmp_path / "x").read_bytes() == BYTES
    assert server.asked == [("/x", "bytes=1000-", len(BYTES))]


@pytest.mark.parametrize("part", [b"another version" * 100, BYTES + b"longer", BYTES[:-1] + b"?"])
def test_a_changed_file_starts_anew_once(served, tmp_path, part):
    server = served({"x": BYTES})
    (tmp_path / "x.part").write_bytes(part)
    assert get(server, tmp_path / "x").read_bytes() == BYTES
    assert [asked for _, asked, _ in server.asked] == [f"bytes={len(part)}-", None]
    server.asked.clear()
    (tmp_path / "y.part").write_bytes(part)
    with pytest.raises(InputError, match="checksum"): get(server, tmp_path / "y", content=b"never published")
    assert [asked for _, asked, _ in server.asked] == [f"bytes={len(part)}-", None] and names(tmp_path) == ["x"]


def test_a_range_that_was_not_asked_for(served, tmp_path):
    server = served({"x": BYTES}, shift=5)
    (tmp_path / "x.part").write_bytes(BYTES[:1000])
    assert get(server, tmp_path / "x").read_bytes() == BYTES
    assert server.asked == [("/x", "bytes=1000-", len(BYTES) - 1005), ("/x", None, len(BYTES))]


def test_wrong_checksum(served, tmp_path):
    "Both sums are said, nothing gets the name, and the server is not asked again"
    server = served({"x": BYTES[::-1]})
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(InputError) as e: get(server, tmp_path / "x")
    for said in (md5(BYTES), md5(BYTES[::-1]), server.url("x")): assert said in str(e.value)
    assert "\n" not in str(e.value) and len(server.asked) == 1
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"old"


def test_sha256(served, tmp_path):
    server = served({"x": BYTES})
    download_file([server.url("x")], tmp_path / "x", hashlib.sha256(BYTES).hexdigest())
    with pytest.raises(InputError, match="0" * 64): download_file([server.url("x")], tmp_path / "y", "0" * 64)


def test_mirrors_in_order(served, tmp_path):
    "Absent, wrong, right; the one after it is not asked"
    server = served({"wrong": b"wrong", "right": BYTES, "spare": BYTES})
    path = download_file(map(server.url, ("absent", "wrong", "right", "spare")), tmp_path / "x", md5(BYTES))
    assert path.read_bytes() == BYTES and [p for p, _, _ in server.asked] == ["/absent", "/wrong", "/right"]


def test_another_mirror_goes_on(served, tmp_path):
    "What the first mirror sent before it broke down for good is not sent again"
    first = served({"x": BYTES}, cut=100_000, status={"/x": []})
    first.status["/x"] = []
    other = served({"x": BYTES})
    def then_fails(*_): first.status["/x"] = [404]
    original = fetch.time.sleep
    fetch.time.sleep = then_fails
    try: download_file([first.url("x"), other.url("x")], tmp_path / "x", md5(BYTES))
    finally: fetch.time.sleep = original
    assert (tmp_path / "x").read_bytes() == BYTES and other.asked == [("/x", "bytes=100000-", 200_000)]


@pytest.mark.parametrize("codes, tries", [([500, 503], 3), ([429], 2), ([404], 1), ([403], 1), ([500] * 9, 3)])
def test_which_answers_are_tried_again(served, tmp_path, codes, tries):
    server = served({"x": BYTES}, status={"/x": list(codes)})
    try: get(server, tmp_path / "x")
    except InputError as e: assert f"HTTP {codes[0]}" in str(e)
    assert len(server.asked) == tries and (tmp_path / "x").exists() == (tries > len(codes))


@pytest.mark.parametrize("habits", [dict(ranges=False), dict(length=False), dict(ranges=False, length=False)])
def test_a_truncated_body_gets_no_name(served, tmp_path, habits):
    server = served({"x": BYTES}, cut=50_000, **habits)
    with pytest.raises(InputError, match="50000 of 300000|checksum"): get(server, tmp_path / "x")
    assert not (tmp_path / "x").exists() and len(server.asked) <= 3


@pytest.mark.parametrize("length, left", [(True, []), (False, [("x.part", 0)])])
def test_more_than_the_limit(served, tmp_path, length, left):
    "Said beforehand, or noticed on the way: it stops, and the disk is not filled"
    server = served({"x": BYTES}, length=length)
    with pytest.raises(InputError, match="more than the 100000"): get(server, tmp_path / "x", limit=100_000)
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == left and len(server.asked) == 1


def test_only_http(served, tmp_path):
    "Neither an address nor a redirection reads a local file; a redirection to http is followed, with its range"
    (tmp_path / "secret").write_bytes(BYTES)
    local = (tmp_path / "secret").as_uri()
    server = served({"x": BYTES})
    server.status = {"/there": [server.url("x")], "/local": [local], "/ftp": ["ftp://127.0.0.1/x"]}
    for url in (local, server.url("local"), server.url("ftp"), "x", "http://", "http://127.0.0.1:99999/x"):
        with pytest.raises(InputError, match="could not be downloaded"):
            download_file([url], tmp_path / "x", md5(BYTES))
    (tmp_path / "x.part").write_bytes(BYTES[:1000])
    assert get(server, tmp_path / "x", "there").read_bytes() == BYTES
    assert server.asked[-1] == ("/x", "bytes=1000-", len(BYTES) - 1000)


def test_nobody_answers(tmp_path, served, monkeypatch):
    "A closed port, no such host, and a server that says nothing"
    server = served({}, cut=0)
    server.shutdown()
    server.server_close()
    with pytest.raises(InputError, match="refused"): get(server, tmp_path / "x")
    with pytest.raises(InputError, match="no.such.host.invalid"):
        download_file(["http://no.such.host.invalid/x"], tmp_path / "x", md5(BYTES))
    monkeypatch.setattr(fetch, "TIMEOUT", 0.2)
    silent = served({"x": BYTES}, cut=0, hold=threading.Event())
    with pytest.raises(InputError, match="timed out"): get(silent, tmp_path / "x")
    assert names(tmp_path) == ["x.part"]


def test_a_terminal_sees_how_much_is_there(served, tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(fetch.sys, "stderr", screen)
    get(served({"x": BYTES}), tmp_path / "x")
    assert screen.getvalue() == ""
    screen.isatty = lambda: True
    get(served({"x": BYTES * 10}), tmp_path / "y", content=BYTES * 10)
    assert screen.getvalue().endswith("\rfedrepro: y: 3 of 3 MB\n")


# --- archives

def packed(path, *members):
    "A .zip or .tar.gz of `members`: (name, bytes), or (name, tarfile's type, where it leads)"
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
            for name, *rest in members:
                info = zipfile.ZipInfo(name)
                if len(rest) == 2: info.external_attr = ZIP_MODES[rest[0]] << 16
                z.writestr(info, rest[-1])
        return path
    with tarfile.open(path, "w:gz") as t:
        for name, *rest in members:
            info = tarfile.TarInfo(name)
            if len(rest) == 2: info.type, info.linkname = rest
            else: info.size = len(rest[0])
            t.addfile(info, io.BytesIO(rest[0]) if len(rest) == 1 else None)
    return path


ZIP_MODES = {tarfile.SYMTYPE: stat.S_IFLNK, tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK,
             tarfile.FIFOTYPE: stat.S_IFIFO}
EVIL = {
    "up": [("../stolen", b"!")], "far up": [("a/../../../stolen", b"!")], "absolute": [("/stolen", b"!")],
    "double slash": [("//stolen", b"!")], "hidden up": [("a/b/../..", b"!")], "windows up": [("..\\stolen", b"!")],
    "drive": [("C:/stolen", b"!")], "stream": [("a:b", b"!")], "control": [("a\nb", b"!")], "nothing": [(".", b"!")],
    "twice": [("a", b"1"), ("a", b"2")], "twice in disguise": [("a/b", b"1"), ("./a//b", b"2")],
    "link": [("door", tarfile.SYMTYPE, "..")],
    "link and through it": [("door", tarfile.SYMTYPE, ".."), ("door/stolen", b"!")],
    "link, then a file of its name": [("door", tarfile.SYMTYPE, "../stolen"), ("door", b"!")],
    "device": [("d", tarfile.CHRTYPE, "")], "disk": [("d", tarfile.BLKTYPE, "")], "pipe": [("d", tarfile.FIFOTYPE, "")],
    "file as folder": [("a", b"1"), ("a/b", b"2")], "folder as file": [("a/b", b"1"), ("a", b"2")]}
HARD = {"hard link": [("a", tarfile.LNKTYPE, "../precious")],
        "hard link inside": [("a", b"1"), ("b", tarfile.LNKTYPE, "a")],
        "sparse": [("a", tarfile.GNUTYPE_SPARSE, "")], "contiguous link": [("a", b"1"), ("a", tarfile.SYMTYPE, "a")]}
CASES = [(k, ending) for k in EVIL for ending in (".zip", ".tgz")] + [(k, ".tgz") for k in HARD]


@pytest.fixture
def home(tmp_path):
    "A folder with a precious file beside the folder `target`, in which something is already"
    (tmp_path / "target").mkdir()
    (tmp_path / "target/kept").write_bytes(b"kept")
    (tmp_path / "precious").write_bytes(b"precious")
    return tmp_path


def unchanged(home):
    tree = {p.relative_to(home).as_posix(): p.read_bytes() if p.is_file() else None for p in home.rglob("*")}
    return {k: v for k, v in tree.items() if not k.startswith("e.")} == {
        "target": None, "target/kept": b"kept", "precious": b"precious"}


@pytest.mark.parametrize("case, ending", CASES)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_evil_archives(home, case, ending):
    "Refused as a whole, though a good member came first and no bad one is wanted; one line that names the archive"
    archive = packed(home / f"e{ending}", ("good", b"good"), *(EVIL | HARD)[case])
    for members in (None, {"good": "good"}):
        if case in ("file as folder", "folder as file") and members: continue  # harmless where they are not wanted
        with pytest.raises(InputError) as e: unpack(archive, home / "target", members)
        assert str(home) in str(e.value) and "\n" not in str(e.value)
        assert unchanged(home)


@pytest.mark.parametrize("ending", [".zip", ".tgz"])
@pytest.mark.parametrize("case", ["up", "absolute", "far up"])
def test_each_layer_holds_alone(home, monkeypatch, case, ending):
    "With the check of names gone, the others still refuse"
    monkeypatch.setattr(fetch, "_safe", lambda name, ordinary, archive: name)
    archive = packed(home / f"e{ending}", *EVIL[case])
    by_tarfile = ending == ".tgz" and "up" in case and hasattr(tarfile, "data_filter")
    with pytest.raises(InputError, match="outside the destination" if by_tarfile else "not inside"):
        unpack(archive, home / "target")
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(InputError, match="not inside"): unpack(archive, home / "target")
    assert unchanged(home)


def zeros(path, size=1 << 30):
    "An archive of a few hundred kilobytes (zip: a few megabytes) that unpacks to `size` zeros"
    block = bytes(1 << 24)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z:
            with z.open("zeros", "w", force_zip64=True) as f:
                for _ in range(size >> 24): f.write(block)
        return path
    info = tarfile.TarInfo("zeros")
    info.size = size
    head = b"" if path.name == "e.gz" else gzip.compress(info.tobuf())
    path.write_bytes(head + gzip.compress(block) * (size >> 24))  # gzip streams can be put together
    return path


@pytest.mark.parametrize("name", ["e.zip", "e.tar.gz", "e.tgz", "e.gz"])
def test_bombs(home, monkeypatch, name):
    "A gigabyte of zeros stops at the limit, and no more than that was written"
    written = []
    original = fetch._copy
    monkeypatch.setattr(fetch, "_copy", lambda blocks, *a: original((written.append(len(b)) or b for b in blocks), *a))
    with pytest.raises(InputError, match="unpacks to more bytes"):
        unpack(zeros(home / name), home / "target", limit=5_000_000)
    assert sum(written) <= 5_000_000 + (1 << 20) and unchanged(home)


def test_what_is_skipped_counts_too(home):
    "A tar must be read through to its wanted member; bytes before it count"
    archive = packed(home / "e.tgz", ("first", bytes(2_000_000)), ("wanted", b"!"))
    with pytest.raises(InputError, match="unpacks to more bytes"):
        unpack(archive, home / "target", {"wanted": "w"}, limit=1_000_000)
    assert unpack(archive, home / "target", {"wanted": "w"}, limit=3_000_000) == ["w"]


def test_too_many_members(home):
    for archive in (packed(home / f"e{ending}", *((f"{i}", b"") for i in range(20))) for ending in (".zip", ".tgz")):
        with pytest.raises(InputError, match="more than 19 members"):
            unpack(archive, home / "target", {"0": "0"}, count=19)
    assert unchanged(home)
    assert len(unpack(home / "e.zip", home / "target", count=20)) == 20


@pytest.mark.parametrize("claim", [0, 10, 69_999, 70_001, 2 ** 31])
@pytest.mark.parametrize("ending", [".zip", ".tar"])
def test_lying_sizes(home, claim, ending):
    "A header's size that is not the real one: refused, or what is written is the real content. A tar needs a checksum"
    archive, sums = home / f"e{ending}", {}
    if ending == ".zip":
        raw = bytearray(packed(archive, ("a", FILES["one"])).read_bytes())
        for mark, at in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
            where = raw.index(mark) + at
            raw[where:where + 4] = claim.to_bytes(4, "little")
    else:
        info = tarfile.TarInfo("a")
        info.size = claim
        raw, sums = info.tobuf() + FILES["one"], {"a": md5(FILES["one"])}
    archive.write_bytes(raw)
    try: unpack(archive, home / "target", digests=sums, limit=1_000_000)
    except InputError: assert unchanged(home)
    else: assert claim > 70_000 and ending == ".zip" and (home / "target/a").read_bytes() == FILES["one"]


@pytest.mark.parametrize("name", ["e.zip", "e.tgz", "one.gz"])
def test_damaged_archives(home, name):
    "Cut anywhere or with any byte flipped: InputError, or the right content; nothing else"
    good = gzip.compress(FILES["one"], mtime=0) if name == "one.gz" else packed(
        home / name, ("one", FILES["one"]), ("two", FILES["two"])).read_bytes()
    wanted = {k: md5(FILES[k]) for k in (["one"] if name == "one.gz" else ["one", "two"])}
    r, refused = random.Random(1), 0
    for i in range(60):
        raw, at = bytearray(good), r.choice([r.randrange(len(good)), r.randrange(200), -1 - r.randrange(100)])
        if i % 3: raw[at] ^= 1 << r.randrange(8)
        else: del raw[at:]
        (home / name).write_bytes(raw)
        try: unpack(home / name, home / "out", {k: k for k in wanted}, wanted)
        except InputError as e: refused += name in str(e)
        else: assert {k: md5((home / "out" / k).read_bytes()) for k in wanted} == wanted
        shutil.rmtree(home / "out", ignore_errors=True)
    assert refused > 30


def test_only_what_is_wanted(home):
    for ending in (".zip", ".tgz", ".tar.gz", ".tar"):
        archive = home / f"e{ending}"
        if ending == ".tar": archive.write_bytes(gzip.decompress((home / "e.tgz").read_bytes()))
        else: packed(archive, ("set/one", b"1"), ("set/two", b"2"))
        assert unpack(archive, home / "target", {"set/two": "sub/second"}) == ["sub/second"]
        assert sorted(p.name for p in (home / "target").rglob("*")) == ["kept", "second", "sub"]
        assert (home / "target/sub/second").read_bytes() == b"2"
        with pytest.raises(InputError, match="missing: set/three"): unpack(archive, home / "target", {"set/three": "x"})
        with pytest.raises(InputError, match="checksum of kept"):
            unpack(archive, home / "target", {"set/one": "kept"}, {"kept": "0" * 32})
        with pytest.raises(InputError, match="File exists"):
            unpack(archive, home / "target", {"set/one": "x", "set/two": "x"})
        shutil.rmtree(home / "target/sub")
        assert unchanged(home)


def test_an_older_file_is_replaced_not_written_into(home):
    "A link in the folder is replaced; what it leads to stays"
    (home / "target/one").symlink_to(home / "precious")
    unpack(packed(home / "e.zip", ("one", b"1")), home / "target")
    assert (home / "target/one").read_bytes() == b"1" and (home / "precious").read_bytes() == b"precious"


def test_no_archive(home):
    (home / "e.rar").write_bytes(b"Rar!")
    for name, said in (("e.rar", "none of .zip"), ("gone.zip", "No such file"), ("target", "ends in none")):
        with pytest.raises(InputError, match=said): unpack(home / name, home / "target")
    for name in ("e.zip", "e.tgz", "e.gz", "e.tar"):
        (home / name).write_bytes(b"<html>moved</html>")
        with pytest.raises(InputError, match=f"{name}: cannot be unpacked"): unpack(home / name, home / "target")
    assert unchanged(home)


PIECES = st.sampled_from([
    "..", ".", "/", "//", "\\", "a", "b", "C:", "~", "\0", "é", "\u202e", "\udc80", " ", "-", "con", "x" * 300])
NAMES = st.lists(PIECES, min_size=1, max_size=6).map("".join)
KINDS = st.sampled_from([tarfile.REGTYPE] * 4 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(NAMES, KINDS), min_size=1, max_size=4), st.sampled_from([".zip", ".tgz"]))
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_name_leaves_the_folder(members, ending):
    with tempfile.TemporaryDirectory() as top:
        home = Path(top)
        (home / "target").mkdir()
        (home / "precious").write_bytes(b"precious")
        real = [(n, b"!") if k == tarfile.REGTYPE else (n, k, "../precious") for n, k in members]
        if ending == ".zip": real = [(n, *rest) for n, *rest in real if len(rest) == 1 or rest[0] in ZIP_MODES]
        try: archive = packed(home / f"e{ending}", *real)
        except (UnicodeError, ValueError): return  # no such archive can be made
        try: unpack(archive, home / "target")
        except InputError: assert names(home / "target") == []
        assert set(names(home)) <= {"e.zip", "e.tgz", "precious", "target"}
        assert (home / "precious").read_bytes() == b"precious"
        for path in (home / "target").rglob("*"):
            assert not path.is_symlink() and path.stat().st_nlink == 1 or path.is_dir()


# --- several processes, killed processes, disks that refuse

START = """
import os, sys, signal
from pathlib import Path
from fedrepro import fetch, files
from fedrepro.trees import InputError
folder, url = Path(sys.argv[1]), sys.argv[2]
FILES = dict(item.split("=") for item in sys.argv[4].split(","))
archives = [fetch.Archive((url,), sys.argv[3], {f"set/{f}": f for f in FILES})]
def bring(): fetch.bring(archives, folder, FILES)
"""


@pytest.fixture
def offer(served, tmp_path):
    "A server with the archive of FILES, and a way to start processes that know it"
    content = packed(tmp_path / "set.tgz", *((f"set/{n}", c) for n, c in FILES.items())).read_bytes()
    server = served({"set.tgz": content})
    def process(code, folder, **more):
        argv = [folder, server.url("set.tgz"), md5(content), ",".join(f"{n}={md5(c)}" for n, c in FILES.items())]
        return subprocess.Popen([*more.pop("before", []), sys.executable, "-c", START + code, *map(str, argv)],
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=os.environ | {"no_proxy": "*", "OMP_NUM_THREADS": "1"}, **more)
    server.content, server.process = content, process
    server.archives = [Archive((server.url("set.tgz"),), md5(content), {f"set/{n}": n for n in FILES})]
    return server


SUMS = {n: md5(c) for n, c in FILES.items()}


def ended(process):
    "(exit code, stdout, stderr)"
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_two_processes_at_once(offer, tmp_path):
    "One downloads, the other says that it waits, and then finds everything there"
    offer.hold, offer.cut = threading.Event(), 1000
    first = offer.process("bring()", tmp_path / "set")
    while not offer.asked: assert first.poll() is None
    second = offer.process("bring()", tmp_path / "set")
    assert "waiting for another process" in second.stderr.readline()
    offer.hold.set()
    assert ended(first) == (0, "", "") and ended(second) == (0, "", "")
    assert len(offer.asked) == 1
    assert {n: (tmp_path / "set" / n).read_bytes() for n in names(tmp_path / "set")} == FILES


def test_the_lock_of_a_killed_process_is_free(offer, tmp_path):
    holder = offer.process("with files.locked(folder): print('held', flush=True); signal.pause()", tmp_path / "set")
    assert holder.stdout.readline() == "held\n"
    got = threading.Event()
    def wait():
        with locked(tmp_path / "set"): got.set()
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    assert not got.wait(0.3)
    holder.send_signal(signal.SIGKILL)
    waiter.join(60)
    assert got.is_set() and ended(holder)[0] == -signal.SIGKILL and names(tmp_path / "set") == []


def test_killed_in_the_middle_of_a_download(offer, tmp_path):
    "The next call asks for the rest only"
    offer.hold, offer.cut = threading.Event(), 120_000
    child, part = offer.process("bring()", tmp_path / "set"), tmp_path / "set/set.tgz.part"
    while not (part.is_file() and part.stat().st_size == 120_000): assert child.poll() is None
    child.kill()
    child.wait()
    assert names(tmp_path / "set") == [".lock", "set.tgz.part"]
    offer.hold, offer.cut = None, None
    bring(offer.archives, tmp_path / "set", SUMS)
    assert offer.asked[1:] == [("/set.tgz", "bytes=120000-", len(offer.content) - 120_000)]
    assert {n: (tmp_path / "set" / n).read_bytes() for n in names(tmp_path / "set")} == FILES


KILLED_ANYWHERE = """
import builtins, io, shutil
old = b"damaged"
def started():
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "two").write_bytes(old)
def forked(work):
    child = os.fork()
    if not child:
        try: os._exit(work())
        except BaseException as e: print(repr(e), flush=True); os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def killed_at(k):  # at the k-th time that something is brought to the disk, named or removed, or was opened
    calls = [0]
    def step():
        calls[0] += 1
        if calls[0] == k: os.kill(os.getpid(), signal.SIGKILL)
    for name in ("replace", "fsync", "unlink", "rmdir", "mkdir"):
        def counted(*a, original=getattr(os, name), **kw):
            step()
            return original(*a, **kw)
        setattr(os, name, counted)
    def opened(path, mode="r", *a, original=open, **kw):
        file = original(path, mode, *a, **kw)
        if mode[0] in "wax": step()
        return file
    builtins.open = io.open = opened
    bring()
    return calls[0]
started()
points = forked(lambda: killed_at(0))
for k in range(1, points + 1):
    started()
    assert forked(lambda: killed_at(k)) == -signal.SIGKILL, k
    for f, digest in FILES.items():  # whole, or not there, or as it was
        path = folder / f
        if not path.exists() or f == "two" and path.read_bytes() == old: continue
        assert files.checksum(path, digest) == digest, (k, f)
    assert files.checksum(folder / "set.tgz", sys.argv[3]) in (None, sys.argv[3]), k
    assert forked(lambda: bring() or 0) == 0, k
    assert sorted(os.listdir(folder)) == sorted(FILES), (k, os.listdir(folder))
    for f, digest in FILES.items(): assert files.checksum(folder / f, digest) == digest, (k, f)
print(points)
"""


def test_killed_anywhere(offer, tmp_path):
    "At each of its steps on the disk: no file is ever half there, and the next call finishes"
    code, out, err = ended(offer.process(KILLED_ANYWHERE, tmp_path / "set"))
    assert code == 0 and 15 <= int(out) <= 40, (out, err)


REFUSED = """
try: bring(); print("done")
except InputError as e: print(e)
"""


def small_disk():
    "The command that gives a process its own mounts, or a skip"
    isolate = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = [*isolate, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try: subprocess.run(mount, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as e: pytest.skip(f"no file system can be mounted here: {e}")
    return isolate


@pytest.mark.parametrize("size, what", [(200, "set.tgz.part"), (400, ".set.tgz.partial/")])
def test_a_full_disk(offer, tmp_path, size, what):
    "A disk too small for the archive, or for what is in it; with more room the next call goes on where it stopped"
    (tmp_path / "disk").mkdir()
    mount = ["sh", "-c", f'mount -t tmpfs -o size={size}k tmpfs "{tmp_path}/disk" && exec "$0" "$@"']
    grow = f"""
import shutil, subprocess
print(sorted(p.name for p in folder.iterdir()))
subprocess.run(["mount", "-o", "remount,size=4m", {str(tmp_path / "disk")!r}], check=True)
bring()
print(sorted(p.name for p in folder.iterdir()), all(files.checksum(folder / f, d) == d for f, d in FILES.items()))
"""
    code, out, err = ended(offer.process(REFUSED + grow, tmp_path / "disk/set", before=small_disk() + mount))
    refused, left, after = out.splitlines()
    assert code == 0 and err == "" and "No space left on device" in refused and what in refused, (out, err)
    assert left == str([what] if size == 200 else ["set.tgz"])
    assert after == f"{sorted(FILES)} True"
    assert len(offer.asked) == (2 if size == 200 else 1) and (size == 400 or offer.asked[1][1])


def test_a_file_size_limit(offer, tmp_path):
    "The system's limit on the size of a file: refused in one line, what came is kept"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    ignore = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code, out, err = ended(offer.process(limit + ignore + REFUSED, tmp_path / "set"))
    assert (code, err) == (0, "") and "cannot be written (File too large)" in out and len(out.splitlines()) == 1
    assert names(tmp_path / "set") == ["set.tgz.part"]


@pytest.mark.parametrize("name", ["open", "os.replace", "os.fsync"])
def test_a_disk_that_refuses_at_any_step(offer, tmp_path, monkeypatch, name):
    "No space, when a file is opened or written, brought to the disk, named: always that one line, never half a file"
    def full(*a, **kw): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    where, _, function = name.rpartition(".")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/two").write_bytes(b"damaged")
    with monkeypatch.context() as m:
        m.setattr(getattr(fetch, where) if where else fetch, function, full, raising=False)
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
            bring(offer.archives, tmp_path / "set", SUMS)
    assert set(names(tmp_path / "set")) <= {"two", "set.tgz.part"} and (tmp_path / "set/two").read_bytes() == b"damaged"
    bring(offer.archives, tmp_path / "set", SUMS)
    assert {n: (tmp_path / "set" / n).read_bytes() for n in names(tmp_path / "set")} == FILES


def test_a_read_only_folder(offer):
    "Refused in one line, there and below, and nobody is asked"
    nobody = "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        folder = Path(top, "set")
        folder.mkdir()
        (folder / "two").write_bytes(b"damaged")
        folder.chmod(0o555)
        code, out, err = ended(offer.process(nobody + REFUSED + "folder /= 'new'" + REFUSED, folder))
        assert (code, err) == (0, "")
        assert out.splitlines() == [f"{f}: cannot be written (Permission denied)" for f in (folder, folder / "new")]
        folder.chmod(0o755)
        assert names(folder) == ["two"] and offer.asked == []


def test_only_one_holds_a_lock(tmp_path):
    "Twenty threads that add to a number as carelessly as possible"
    total = [0]
    def add():
        with locked(tmp_path / "x"):
            before = total[0]
            threading.Event().wait(0.002)
            total[0] = before + 1
    threads = [threading.Thread(target=add) for _ in range(20)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert total == [20] and names(tmp_path / "x") == []


def test_a_lock_whose_name_is_gone(tmp_path, monkeypatch):
    "Who opened the lock of the last holder just before it was removed takes the lock that others see"
    original, first = files._take, []
    def take(handle):
        if not first: first.append((tmp_path / ".lock").unlink())
        return original(handle)
    monkeypatch.setattr(files, "_take", take)
    handle = files._wait(tmp_path / ".lock")
    assert os.path.samestat(os.fstat(handle), os.stat(tmp_path / ".lock"))
    os.close(handle)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    "Then there is none, and everything else still holds"
    import fcntl
    def unknown(*_): raise OSError(errno.ENOSYS, "not here")
    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked(tmp_path): pass


# --- all together

def test_only_the_archives_that_are_needed(served, tmp_path):
    "Archives that hold nothing damaged are not asked for; a file that is its own archive is kept as it is"
    zipped = {n: gzip.compress(c, mtime=0) for n, c in FILES.items()}
    server = served({f"{n}.gz": c for n, c in zipped.items()} | {"whole.zip": BYTES})
    archives = [Archive((server.url(f"{n}.gz"),), md5(c), {n: n}) for n, c in zipped.items()]
    archives.append(Archive((server.url("whole.zip"),), md5(BYTES)))
    sums = SUMS | {"whole.zip": md5(BYTES)}
    bring(archives, tmp_path, sums)
    assert {n: (tmp_path / n).read_bytes() for n in names(tmp_path)} == FILES | {"whole.zip": BYTES}
    for victim, wanted in (("two", "/two.gz"), ("whole.zip", "/whole.zip")):
        server.asked.clear()
        (tmp_path / victim).write_bytes(b"damaged")
        bring(archives, tmp_path, sums)
        assert [p for p, _, _ in server.asked] == [wanted] and checksum(tmp_path / victim, sums[victim]) == sums[victim]
    assert names(tmp_path) == sorted(sums)


def test_an_archive_copied_there_needs_no_network(offer, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/set.tgz").write_bytes(offer.content)
    archive = Archive(("http://no.such.host.invalid/set.tgz",), md5(offer.content), offer.archives[0].members)
    bring([archive], tmp_path / "set", SUMS)
    assert {n: (tmp_path / "set" / n).read_bytes() for n in names(tmp_path / "set")} == FILES


def test_checksums():
    assert checksum(Path(__file__), "0" * 32) == md5(Path(__file__).read_bytes())
    assert checksum(Path("/nowhere"), "0" * 64) is None and files.checksum is fetch.checksum
