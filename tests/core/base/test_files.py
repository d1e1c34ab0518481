"""Files are written completely or not at all."""

import errno
import io
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from disks import file_size_limit, names, raising, small_disk, unprivileged
from distgpt.core.base.checked import LARGEST_JSON, Count, Must, Positive, checked, parse_json, parse_object, read_as
from distgpt.core.base.errors import SCREEN, DataError, StorageError, one_line
from distgpt.core.base.files import append, atomic_file, open_regular, read_small
from distgpt.core.saved.tensors import read_header, read_into, write_tensors

from conftest import inside, refused

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


def test_ordinary_json_is_parsed():
    text = '{"a": [1, -2, 1.5e3, true, null, "ü \\u00e9 \\ud83d\\ude00"], "b": {"c": 18446744073709551615}}'
    expected = {"a": [1, -2, 1500.0, True, None, "ü é 😀"], "b": {"c": 2**64 - 1}}
    assert parse_json(text) == parse_json(text.encode()) == expected


@pytest.mark.parametrize("text, reason", [
    ("NaN", "number NaN"),
    ("[-Infinity]", "number -Infinity"),
    ("1e400", "number 1e400"),
    ("9" * 5000, "number 99999"),
    (str(2**64), "number 18446744073709551616"),
    ('{"a": 1, "a": 2}', "duplicate"),
    ('"\\ud800"', "UTF-8"),
    ('{"\\udfff": 1}', "UTF-8"),
    (b'"\xff"', "UTF-8"),
    ("[" * 65 + "]" * 65, "deeply"),
    ("[" * 100_000 + "]" * 100_000, "deeply"),
    ('{"a":' * 65 + "1" + "}" * 65, "deeply"),
    ("{", "Expecting"),
    ("", "Expecting"),
])  # fmt: skip
def test_unusual_json_is_rejected(text, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    with pytest.raises(DataError, match=f"f is corrupt: .*{reason}"):
        parse_object(text if isinstance(text, bytes) else text.encode(), tmp_path / "f")


def test_json_size_limit_fits_largest_tokenizers(tmp_path):
    """Parsed JSON can take 28 times its size in memory."""
    assert 35_000_000 < LARGEST_JSON < 64 << 20
    with pytest.raises(ValueError, match="larger than 48 MiB"):
        parse_json(b" " * (LARGEST_JSON + 1))
    with pytest.raises(ValueError, match="larger than 9 B"):
        parse_json("[" + " " * 9 + "]", 9)
    assert parse_json("[" + " " * 7 + "]", 9) == []
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(LARGEST_JSON + 1)
    refused(inside("tokenizer", "info", tmp_path), 65, "is larger than 48 MiB", "known tokenizers have 35 MB")


@dataclass
class Part:
    name: Annotated[str, Must("be short", lambda name: len(name) < 9)]
    size: Positive
    split: Literal["train", "val"] = "train"


@dataclass
class Whole:
    parts: tuple[Part, ...]
    pairs: list[tuple[int, float]]
    known: dict[str, Count | None]
    is_done: bool
    more: object = None
    other: Any = None


GOOD = {
    "parts": [{"name": "a", "size": 1}, {"name": "b", "size": 2, "split": "val"}],
    "pairs": [[1, 2]],
    "known": {"x": 3, "y": None},
    "is_done": True,
    "more": [{}],
    "other": {"x": [1]},
}


def test_read_as_builds_declared_objects(tmp_path):
    expected = Whole((Part("a", 1), Part("b", 2, "val")), [(1, 2.0)], {"x": 3, "y": None}, True, [{}], {"x": [1]})
    assert read_as(Whole, json.dumps(GOOD).encode(), tmp_path / "f") == expected
    assert type(checked(Whole, GOOD).pairs[0][1]) is float


@pytest.mark.parametrize("changes, reason", [
    ({"parts": {}}, r"parts must be a list, not {}"),
    ({"parts": [3]}, r"parts\[0\] must be an object, not 3"),
    ({"parts": [{"name": "a"}]}, r"parts\[0\] has missing or unknown entries: size"),
    ({"parts": [{"name": "a", "size": 1, "x\n": 1}]}, r"parts\[0\] has missing or unknown entries: x\\n"),
    ({"parts": [{"name": "a", "size": True}]}, r"parts\[0\]\.size must be a whole number, not True"),
    ({"parts": [{"name": "a", "size": 1.0}]}, r"size must be a whole number, not 1\.0"),
    ({"parts": [{"name": "a", "size": 0}]}, r"size must be at least 1, not 0"),
    ({"parts": [{"name": "a" * 999, "size": 1}]}, r"name must be short, not 'a+"),
    ({"parts": [{"name": "a", "size": 1, "split": ["train"]}]}, r"split must be 'train' or 'val'"),
    ({"pairs": [[1]]}, r"pairs\[0\] must have 2 entries, not \[1\]"),
    ({"pairs": [[1, "2"]]}, r"pairs\[0\]\[1\] must be a number, not '2'"),
    ({"known": {"x\x1b": -1}}, r"known\.x\\x1b must be a count, not -1"),
    ({"known": []}, "known must be an object"),
    ({"is_done": 1}, "is_done must be true or false, not 1"),
    ({"is_done": None}, "is_done must be true or false"),
])  # fmt: skip
def test_read_as_rejects_wrong_values_by_key(tmp_path, changes, reason):
    with pytest.raises(DataError, match=f"f is corrupt: .*{reason}") as refusal:
        read_as(Whole, json.dumps(GOOD | changes).encode(), tmp_path / "f")
    assert len(str(refusal.value)) < 200 + len(str(tmp_path))


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "lines").write_bytes(b"x\nhalf a li")  # left by a killed process
    append(tmp_path / "lines", b"x\n")
    assert (tmp_path / "lines").read_bytes() == b"x\nx\n"
    os.mkfifo(tmp_path / "pipe")
    refusals = {tmp_path / "pipe": "a pipe or a device", "/dev/zero": "device", tmp_path: "a directory"}
    for path, words in (refusals | {Path("a\0b"): "NUL byte"}).items():
        with pytest.raises(DataError, match=words):
            open_regular(path)
        with pytest.raises(DataError, match=words):
            read_small(path)
    with pytest.raises(StorageError, match="nowhere"):
        read_small(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_small(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(DataError, match="larger than 7 B"):
        read_small(tmp_path / "file", 7)


def test_writers_do_not_follow_planted_links(tmp_path, monkeypatch):
    (tmp_path / "victim").write_text("precious")
    names = iter("aab")
    monkeypatch.setattr("secrets.token_hex", lambda n: next(names))
    (tmp_path / ".out.a.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match="File exists"), atomic_file(tmp_path / "out") as file:
        file.write(b"evil")
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "out").exists()


def test_new_files_respect_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "out") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_messages_are_one_short_printable_line():
    assert one_line("no \x1b[2J\x00 thing\nat all \u202e") == "no \\x1b[2J\\x00 thing\\nat all \\u202e"
    long = one_line("cannot read " + "x" * 100_000 + ": the end")
    assert len(long) <= SCREEN and long.startswith("cannot read xx") and long.endswith("xx: the end")
