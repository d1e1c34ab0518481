"""What a section is given to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gpubench.machine import Machine
from gpubench.peer import Peer, PeerError
from gpubench.report import Report


@dataclass
class Section:
    """Its report, our device and the means to start opponents. `quick` asks for toy sizes."""

    report: Report
    host: bool
    quick: bool
    python: str | None  # of the environment with PyTorch
    peers: dict[str, Peer] = field(default_factory=dict)

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.host, self.report.note)

    def start_peers(self, requests: dict[str, dict[str, Any]], timeout: float = 150) -> dict[str, Any]:
        """Start or reuse an opponent per name and send each its request; the answers of those that are ready.

        All of them prepare at the same time, which is mostly compiling.
        """
        if self.python is None:
            self.report.note("no PyTorch: nothing to compare with")
            return {}
        ready: dict[str, Any] = {}
        for name, request in requests.items():
            with self.report.attempt(f"start {name}"):
                if name not in self.peers:
                    self.peers[name] = Peer(self.python, "cpu" if self.host else "cuda")
                self.peers[name].send(**request)
        for name in [name for name in requests if name in self.peers]:
            with self.report.attempt(f"prepare {name}"):
                try:
                    ready[name] = self.peers[name].answer(min(timeout, max(5.0, 0.6 * self.report.left)))
                except PeerError:
                    self.close(name)
                    raise
        return ready

    def free(self) -> None:
        """Give back the device's memory that nobody holds any more, where there is a device."""
        if "machine" in self.__dict__:
            with self.report.attempt("memory"):
                self.machine.free()

    def close(self, *names: str) -> None:
        """End these opponents, or all."""
        for name in names or list(self.peers):
            if name in self.peers:
                self.peers.pop(name).close()


Run = Callable[[Section], None]
