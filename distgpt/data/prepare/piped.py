"""Texts from standard input, kept in a file meanwhile: shards take more than one look at their inputs."""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from distgpt.data.prepare.documents import LINES, TEXT, Input
from distgpt.errors import DataError
from distgpt.files import storage_errors

_FIRST = 1 << 12  # bytes that show what it is
_PIECE, _WAIT = 1 << 20, 0.5  # bytes, seconds
_FOLDER = next(filter(Path.is_dir, map(Path, ("/proc/self/fd", "/dev/fd"))), Path("/dev/fd"))  # of open files


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """What comes, as it comes. No read waits: Python would miss a signal between its last look and that."""
    try:
        descriptor = stream.fileno()
    except OSError:
        yield from iter(lambda: stream.read(_PIECE), b"")
        return
    while True:
        if select.select([descriptor], [], [], _WAIT)[0]:
            if not (piece := os.read(descriptor, _PIECE)):
                return
            yield piece


@contextmanager
def piped(stream: BinaryIO) -> Iterator[Input]:
    """Everything that comes from there: lines of JSON if the first one begins so, else a text.

    The file has no name, so that nothing is left however the process ends. The input's time is always the
    same: the same text from another pipe resumes what was interrupted.
    """
    pieces, first = _pieces(stream), b""
    while len(first) < _FIRST and (piece := next(pieces, b"")):
        first += piece
    if b"\0" in first[:_FIRST]:
        raise DataError("standard input is no text in UTF-8: there are zero bytes in it")
    is_json = first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    name, kind = ("stdin.jsonl", LINES) if is_json else ("stdin.txt", TEXT)
    with ExitStack() as stack:
        with storage_errors("keep standard input in", Path(tempfile.gettempdir())):
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(first)
            file.writelines(pieces)
            file.flush()
            size = os.fstat(file.fileno()).st_size
        yield Input(_FOLDER / str(file.fileno()), name, kind, size, mtime_ns=0)
