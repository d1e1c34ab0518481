"""Short messages of the ranks to rank 0 out of band: datagrams, which nobody waits for and which may be lost.

Each carries a secret that rank 0 shares at the start; others are dropped.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from distgpt.core.base.checked import parse_json
from distgpt.core.base.system import boot_id
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm

LARGEST = 8192  # bytes of a message
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
Address = tuple[str, int]


class Reports:
    """A rank's socket. Creating it is collective; afterwards any thread may use it."""

    def __init__(self, comm: Comm) -> None:
        self.rank = comm.rank
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(("", 0))
        known = on_root(comm, self._introduce)
        here = ["127.0.0.1"] if known["boot"] == boot_id() else []
        self._addresses: list[Address] = [(host, known["port"]) for host in (*here, *known["hosts"])]
        self._secret: str = known["secret"]
        self.root: Address | None = None  # the one that rank 0 has answered from

    def _introduce(self) -> dict[str, Any]:
        port = self.socket.getsockname()[1]
        hosts = list(_own_addresses())
        return {"port": port, "hosts": hosts, "secret": secrets.token_hex(16), "boot": boot_id()}

    def to_root(self, message: dict[str, Any]) -> None:
        """Send to the address that rank 0 answered from, or else to all that may lead there."""
        for address in [self.root] if self.root else self._addresses:
            self.send(message, address)

    def send(self, message: dict[str, Any], address: Address) -> None:
        text = json.dumps({**message, "rank": self.rank, "secret": self._secret}).encode()
        with suppress(OSError):
            self.socket.sendto(text[:LARGEST], address)

    def received(self) -> Iterator[tuple[dict[str, Any], Address]]:
        """Yield the messages that have come, each with its sender."""
        for _ in range(1000):  # a flood must not block the caller
            try:
                text, address = self.socket.recvfrom(LARGEST)
            except OSError:
                return
            with suppress(ValueError):
                message = parse_json(text)
                if isinstance(message, dict) and self._is_ours(message):
                    if message["rank"] == 0:
                        self.root = address
                    yield message, address

    def _is_ours(self, message: dict[str, Any]) -> bool:
        secret = message.get("secret")
        known = isinstance(secret, str) and secrets.compare_digest(secret.encode(), self._secret.encode())
        return known and type(message.get("rank")) is int

    def close(self) -> None:
        self.socket.close()


def _own_addresses() -> Iterator[str]:
    """Yield this host's addresses without the loopback; other hosts find out which they reach."""
    if sys.platform != "linux":
        with suppress(OSError):
            yield from socket.gethostbyname_ex(socket.gethostname())[2]
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if not (host := socket.inet_ntoa(found[20:24])).startswith("127."):
                    yield host
