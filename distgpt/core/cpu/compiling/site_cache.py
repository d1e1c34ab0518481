"""The site's compiled loops, in a file beside the package for each kind of processor; users only read it.

Whoever may change the package fills it, by `distgpt compile`. One file, since a node of a cluster reads it in
one go, and it is replaced whole.
"""

from __future__ import annotations

import os
import pickle
import re
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.caches import read_trusted
from distgpt.core.base.errors import StorageError
from distgpt.core.base.files import atomic_file, storage_errors

PACKAGE = Path(__file__).parents[3]
PLACE = PACKAGE / "compiled"
ENDING = ".loops"


class Site:
    """The loops for one kind of processor, made of these sources by these versions (`key`)."""

    def __init__(self, kind: str, key: str) -> None:
        self._kind = re.sub(r"[^\w.]+", "-", kind)
        self.path = PLACE / f"{self._kind}-{key}{ENDING}"

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files by their names; none if there is no cache, or one that is damaged or not to be trusted.

        Loops are run. So their file must be of root, of this user, or of whoever owns the package, whose code
        is run anyway, and nobody else may write to it. The hash is of its name, too: it may be another's.
        """
        content = read_trusted(self.path, {0, os.geteuid(), PACKAGE.stat().st_uid})
        if content is None or self._hash(content[32:]) != content[:32]:
            return {}
        files: dict[str, bytes] = pickle.loads(content[32:])
        return files

    def _hash(self, content: bytes) -> bytes:
        return sha256(self.path.name.encode() + b"\0" + content).digest()

    def require_writable(self) -> None:
        """Make the folder, for all to read. Refuse one that this user may not write to."""
        try:
            if os.geteuid() not in {0, PACKAGE.stat().st_uid}:  # others would not trust its files
                raise StorageError(f"cannot write {PLACE}: {PACKAGE} belongs to another user")
            with storage_errors("write", PLACE):
                PLACE.mkdir(exist_ok=True)
                PLACE.chmod(0o755)
        except StorageError as error:
            raise StorageError(f"{error}: whoever owns {PACKAGE} fills the cache of its users") from None

    def write(self, files: dict[str, bytes]) -> Path:
        """Write the file, for all to read, and remove those of other versions for this kind of processor."""
        content = pickle.dumps(files)
        with atomic_file(self.path) as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(self._hash(content) + content)
        for other in self._of_this_kind():
            if other != self.path:
                other.unlink(missing_ok=True)
        self.__dict__.pop("files", None)  # what they were before
        return self.path

    def unused(self) -> list[Path]:
        """List the files for this kind of processor if none is used: old, damaged, or not to be trusted."""
        return [] if self.files else self._of_this_kind()

    def _of_this_kind(self) -> list[Path]:
        name = re.compile(rf"{re.escape(self._kind)}-[0-9a-f]{{16}}{re.escape(ENDING)}")
        return [path for path in PLACE.glob(f"*{ENDING}") if name.fullmatch(path.name)]
