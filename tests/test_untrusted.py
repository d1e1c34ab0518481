"""Files and texts that are not trusted: what is refused, and how it looks in a message."""

import os

import pytest

from distgpt.errors import SCREEN, DataError, StorageError, message
from distgpt.files import append, atomic_file, open_regular, parse_json, parse_object, read_small


def test_ordinary_json_is_what_it_says():
    text = '{"a": [1, -2, 1.5e3, true, null, "ü \\u00e9 \\ud83d\\ude00"], "b": {"c": 18446744073709551615}}'
    expected = {"a": [1, -2, 1500.0, True, None, "ü é 😀"], "b": {"c": 2**64 - 1}}
    assert parse_json(text) == parse_json(text.encode()) == expected


@pytest.mark.parametrize("text, reason", [
    ("NaN", "number NaN"),
    ("[-Infinity]", "number -Infinity"),
    ("1e400", "number 1e400"),
    ("9" * 5000, "number 99999"),
    (str(2**64), "number 18446744073709551616"),
    ('{"a": 1, "a": 2}', "twice"),
    ('"\\ud800"', "UTF-8"),
    ('{"\\udfff": 1}', "UTF-8"),
    (b'"\xff"', "UTF-8"),
    ("[" * 65 + "]" * 65, "deeply"),
    ("[" * 100_000 + "]" * 100_000, "deeply"),
    ('{"a":' * 65 + "1" + "}" * 65, "deeply"),
    ("{", "Expecting"),
    ("", "Expecting"),
])  # fmt: skip
def test_json_that_no_program_of_ours_writes_is_refused(text, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    with pytest.raises(DataError, match=f"f is damaged: .*{reason}"):
        parse_object(text if isinstance(text, bytes) else text.encode(), tmp_path / "f")


def test_only_regular_files_are_read_and_nobody_waits_for_a_pipe(tmp_path):
    (tmp_path / "lines").write_bytes(b"x\nhalf a li")  # as a killed process leaves it
    append(tmp_path / "lines", b"x\n")
    assert (tmp_path / "lines").read_bytes() == b"x\nx\n"
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "pipe", "a pipe or a device"),
        ("/dev/zero", "device"),
        (tmp_path, "a folder"),
    ):
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


def test_lines_are_added_to_regular_files_alone(tmp_path):
    for _ in range(2):
        append(tmp_path / "lines", b"x\n")
    assert (tmp_path / "lines").read_bytes() == b"x\nx\n"
    os.mkfifo(tmp_path / "pipe")  # without a reader: opening it would wait, or fail
    with pytest.raises((DataError, OSError)):
        append(tmp_path / "pipe", b"x")
    keep = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(DataError, match="a pipe or a device"):
        append(tmp_path / "pipe", b"x")
    os.close(keep)
    (tmp_path / "link").symlink_to(tmp_path / "lines")
    with pytest.raises(OSError, match="link"):
        append(tmp_path / "link", b"x")


def test_a_planted_link_is_not_written_through(tmp_path, monkeypatch):
    """Whatever name a writer uses on the way: one that is taken is not opened."""
    (tmp_path / "victim").write_text("precious")
    names = iter("aab")
    monkeypatch.setattr("secrets.token_hex", lambda n: next(names))
    (tmp_path / ".out.a.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match="File exists"), atomic_file(tmp_path / "out") as file:
        file.write(b"evil")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "out").exists()


def test_new_files_have_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "out") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_messages_are_one_line_without_control_and_no_longer_than_a_screen():
    assert message("no \x1b[2J\x00 thing\nat all \u202e") == "no \\x1b[2J\\x00 thing\\nat all \\u202e"
    long = message("cannot read " + "x" * 100_000 + ": the end")
    assert len(long) <= SCREEN and long.startswith("cannot read xx") and long.endswith("xx: the end")
