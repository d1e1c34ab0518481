"""Claims of jobs on the cores that they bind themselves to, which other jobs of the host can read.

A claim is an abstract socket for each window of cores, whose name tells which of these. It needs no folder
that all users may write to, ends with its process however that ends, and is seen in all containers that share
the host's network.
"""

from __future__ import annotations

import socket
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PREFIX = "distgpt-cores"
WINDOW = 256  # cores that the name of one socket tells of: it may have 107 bytes
SOCKETS = Path("/proc/net/unix")


class Claim:
    """A rank's claim on cores. Jobs claim before they read what others have claimed: of two, one notices."""

    def __init__(self, job: str, rank: int, cores: Iterable[int]) -> None:
        masks: dict[int, int] = {}
        for core in cores:
            masks[core // WINDOW] = masks.get(core // WINDOW, 0) | 1 << core % WINDOW
        self._sockets: list[socket.socket] = []
        try:
            for window, mask in masks.items():
                packed = urlsafe_b64encode(mask.to_bytes(WINDOW // 8, "little")).decode()
                self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                self._sockets[-1].bind(f"\0{PREFIX}/{job}/{rank}/{window}/{packed}")
        except OSError:
            self.give_up()
            raise

    def give_up(self) -> None:
        """End the claim."""
        for each in self._sockets:
            each.close()


def claimed(job: str) -> frozenset[int]:
    """Return the cores that other jobs of this host have claimed."""
    found = 0
    for line in SOCKETS.read_text(errors="replace").splitlines():
        name = line.rpartition(" ")[2].lstrip("@").split("/")
        if name[0] == PREFIX and len(name) == 5 and name[1] != job and len(name[3]) < 3:
            with suppress(ValueError):
                found |= int.from_bytes(urlsafe_b64decode(name[4]), "little") << WINDOW * int(name[3])
    return frozenset(i for i in range(found.bit_length()) if found >> i & 1)
