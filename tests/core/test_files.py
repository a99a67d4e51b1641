"""Locks of folders, and files that are written whole."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from fedrepro.core import files
from fedrepro.core.errors import InputError
from fedrepro.core.files import locked


def test_a_lock_whose_name_is_gone(tmp_path, monkeypatch):
    "Who opened the lock of the last holder just before it was removed takes the lock that others see"
    original = fcntl.flock
    first = []

    def take(*args):
        if not first:
            first.append((tmp_path / ".lock").unlink())
        return original(*args)

    monkeypatch.setattr(fcntl, "flock", take)
    with locked(tmp_path):
        assert first
        assert (tmp_path / ".lock").exists()
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    "Then there is none, and everything else still holds"

    def unknown(*_):
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked(tmp_path):
        pass


def test_a_file_is_as_open_as_the_umask_says(tmp_path):
    for mask, mode in ((0o077, 0o600), (0o027, 0o640), (0o022, 0o644)):
        before = os.umask(mask)
        try:
            files.write_atomic(tmp_path / "x", b"1")
        finally:
            os.umask(before)
        assert (tmp_path / "x").stat().st_mode & 0o777 == mode
        assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("path", [".", "..", "/", ""])
def test_a_folder_is_no_file_to_write(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        files.write_atomic(Path(path), b"1")
    assert not list(tmp_path.iterdir())


def test_a_home_that_nobody_knows(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        Path,
        "expanduser",
        lambda _: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")),
    )
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        files.cache_folder()
    files.write_cache("sums", "1 + 1", 2)  # a cache is no reason to stop
    assert files.read_cache("sums", "1 + 1") is None
