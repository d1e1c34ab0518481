"""Files are written completely or not at all."""

import errno
import io
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from disks import file_size_limit, names, raising, small_disk, unprivileged
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.base.files import append
from distgpt.core.saved.tensors import read_header, read_into, write_tensors

SOME = {"x": np.arange(9.0)}


def test_missing_files_and_permissions_are_errors(tmp_path):
    for act, words in (
        (lambda: read_header(tmp_path / "nowhere"), r"cannot read .*nowhere: No such file"),
        (lambda: write_tensors(tmp_path / "nowhere" / "file", SOME, {}), "cannot write .*file: No such file"),
    ):
        with pytest.raises(StorageError, match=words):
            act()
    with pytest.raises(DataError, match="is a directory"):
        read_into(tmp_path, {})
    with tempfile.TemporaryDirectory() as name:  # accessible to other users
        place = Path(name)
        (place / "secret").touch(0o000)
        place.chmod(0o555)
        with unprivileged():
            with pytest.raises(StorageError, match=r"cannot write .*: Permission denied"):
                write_tensors(place / "weights", SOME, {})
            with pytest.raises(StorageError, match=r"cannot read .*secret: Permission denied"):
                read_header(place / "secret")
        assert names(place) == ["secret"]
        place.chmod(0o755)


def check_failed_write(path, reason):
    before = path.read_bytes()
    with pytest.raises(StorageError, match=f"cannot write {path}: {reason}"):
        write_tensors(path, {"big": np.zeros(1 << 20, np.float32)}, {})
    assert path.read_bytes() == before and names(path.parent) == [path.name]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


@pytest.mark.ci
def test_failed_writes_keep_the_old_file(tmp_path, path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", raising(KeyboardInterrupt))
        write_tensors(path, SOME, {})
    assert names(path.parent) == []
    write_tensors(path, SOME, {})
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, raising(OSError(errno.ENOSPC, "No space left on device")))
            check_failed_write(path, "No space left on device")
    with file_size_limit(1 << 16):
        check_failed_write(path, "File too large")
    with small_disk(tmp_path):
        write_tensors(path, SOME, {})
        check_failed_write(path, "No space left on device")


def test_file_is_synced_on_the_disk_before_rename(path, monkeypatch):
    """Some network file systems cannot sync a directory."""
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        if calls[-1].is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    def renamed(source, target):
        calls.append((Path(source), Path(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_tensors(path, SOME, {})
    partial, (source, target), directory = calls
    assert partial == source and directory == target.parent == path.parent, target
    assert partial.name.startswith(f".{target.name}.") and target.exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_failed_append_keeps_the_file(tmp_path, monkeypatch, replaced):
    path, other = tmp_path / "lines", tmp_path / "other"
    other.write_bytes(b"of another process, and longer\n")

    class Full(io.FileIO):
        def write(self, content):
            if replaced:
                other.rename(path)
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return super().write(content)

        def close(self):
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    append(path, b"one\n")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdopen", lambda descriptor, *args, **how: Full(descriptor, "ab+"))
        with pytest.raises(OSError, match="quota"):
            append(path, b"two\n")
    append(path, b"two\n")
    assert path.read_bytes() == (b"of another process, and longer\n" if replaced else b"one\n") + b"two\n"
