"""Which files are taken: all of a folder or a refusal, and none that certainly is no text."""

import gzip
import os

import pytest

from distgpt.data.prepare.documents import documents
from distgpt.data.prepare.encoding import AHEAD, in_order
from distgpt.data.prepare.inputs import NO_INPUTS, find_inputs
from distgpt.errors import DataError, StorageError


def names(folder):
    return [source.name for source in find_inputs([folder])]


def written(path, data=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_an_unreadable_subfolder_is_not_left_out_silently(tmp_path, monkeypatch):
    written(tmp_path / "a.txt")
    written(tmp_path / "locked" / "b.txt")
    scandir = os.scandir

    def refusing(path):  # as the rights would, if tests did not run as root now and then
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(StorageError, match=r"cannot read .*locked: Permission denied"):
        find_inputs([tmp_path])


def test_linked_folders_are_entered_once_and_circles_end(tmp_path):
    written(tmp_path / "inputs" / "a.txt")
    written(tmp_path / "elsewhere" / "b.txt")
    (tmp_path / "inputs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "inputs" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "inputs")
    assert names(tmp_path / "inputs") == ["a.txt", "linked/b.txt"]


def test_a_link_to_nothing_is_not_left_out_silently(tmp_path):
    written(tmp_path / "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "none")
    with pytest.raises(StorageError, match=r"b\.txt: No such file"):
        find_inputs([tmp_path])


@pytest.mark.parametrize("ending", sorted(NO_INPUTS))
def test_a_name_that_tells_of_no_text_is_refused_with_advice(ending, tmp_path):
    path = written(tmp_path / f"a{ending}")
    with pytest.raises(DataError, match=f"is not read, by the ending of its name: {NO_INPUTS[ending]}"):
        find_inputs([path])
    written(tmp_path / "b.txt")
    assert names(tmp_path) == ["b.txt"]


@pytest.mark.parametrize("name", ["a.txt", "a.log", "a", "a.txt.gz"])
def test_zero_bytes_at_the_beginning_are_no_text(name, tmp_path):
    utf16 = "text".encode("utf-16")
    path = written(tmp_path / name, gzip.compress(utf16) if name.endswith("gz") else utf16)
    with pytest.raises(DataError, match="is no text in UTF-8: there are zero bytes in it"):
        find_inputs([path])


def table(path, names, columns):
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.Table.from_arrays([arrow.array(column) for column in columns], names), path)
    return path


def test_a_table_with_the_column_twice_is_refused(tmp_path):
    path = table(tmp_path / "a.parquet", ["text", "text"], [["a"], ["b"]])
    with pytest.raises(DataError, match="2 columns that are called 'text'"):
        list(documents([path], "text"))


def test_names_of_columns_cannot_command_a_terminal(tmp_path):
    path = table(tmp_path / "a.parquet", ["\x1b[31mred"], [["a"]])
    with pytest.raises(DataError, match=r"chooses among \\x1b\[31mred$"):
        list(documents([path], "text"))


def test_no_more_is_read_ahead_than_fits_into_memory(monkeypatch):
    monkeypatch.setattr("distgpt.data.prepare.encoding.LARGEST_QUEUE", 300)
    read = []

    def items():
        for number in range(12):
            read.append(number)
            yield b"x" * 200

    results = in_order(len, items(), len, 2)
    assert next(results) == 200
    assert len(read) == 2 < AHEAD * 2  # one more than fits, so that a single large one passes
    assert list(results) == [200] * 11
