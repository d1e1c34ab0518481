"""Files: written whole or not at all, JSON objects read with mistrust, and an OSError as one line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from distgpt.errors import DataError, StorageError


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn any OSError inside into one line that says which action failed on which path, and why."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action} {path}: {error.strerror or error}") from error


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory, and say so
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` only once it is complete and on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors("write", path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that a small file holds, in which no name occurs twice."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it is not a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in it")
    return found
