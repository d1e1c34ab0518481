"""A system library that answers as that of macOS does, to simulate it elsewhere."""

import ctypes
import sys
from types import SimpleNamespace


def pretend_macos(monkeypatch, known):
    """Let this process believe that it runs on macOS, where `known` are the answers of sysctl."""

    def sysctlbyname(name, value, size, new, new_size):
        assert not new and not new_size.value
        answer = known.get(name.decode())
        if answer is None:
            return -1
        raw = answer.encode() + b"\0" if isinstance(answer, str) else answer.to_bytes(8, "little")
        ctypes.memmove(value, raw, len(raw))
        size._obj.value = len(raw)
        return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
