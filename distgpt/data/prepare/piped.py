"""Texts from standard input, kept in a file meanwhile: shards take more than one look at their inputs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from distgpt.errors import DataError
from distgpt.files import new_file, storage_errors

_FIRST = 1 << 12  # bytes that show what it is


@contextmanager
def piped(stream: BinaryIO) -> Iterator[Path]:
    """A file with everything that comes from there: lines of JSON if the first one begins so, else a text.

    Its time is always the same, so that the same text from another pipe resumes what was interrupted.
    """
    first = stream.read(_FIRST)
    if b"\0" in first:
        raise DataError("standard input is no text in UTF-8: there are zero bytes in it")
    kind = "jsonl" if first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else "txt"
    with tempfile.TemporaryDirectory(prefix="distgpt-") as folder:
        path = Path(folder, f"stdin.{kind}")
        with storage_errors("write", path):
            with new_file(path) as file:
                file.write(first)
                shutil.copyfileobj(stream, file, 1 << 20)
            os.utime(path, (0, 0))
        yield path
