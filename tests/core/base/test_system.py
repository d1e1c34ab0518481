"""Cores, memory and names of a Mac, simulated: no /proc, no affinity, answers of sysctl."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from distgpt.core.base.system import boot_id, sysctl, sysctl_number, sysctl_text
from distgpt.core.comm import resources
from distgpt.measure.doctor import facts

MAC = {
    "hw.memsize": 16 << 30,
    "hw.perflevel0.logicalcpu": 4,
    "kern.bootsessionuuid": "2F5C-1",
    "machdep.cpu.brand_string": "Apple M1",
}


@pytest.fixture
def no_proc(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    read = Path.read_text

    def read_text(path, *given, **more):
        if path.is_relative_to("/proc") or path.is_relative_to("/sys"):
            raise FileNotFoundError(path)
        return read(path, *given, **more)

    monkeypatch.setattr(Path, "read_text", read_text)


def pretend_macos(monkeypatch, known):
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


def test_macos_reports_fast_cores_and_memory(no_proc, monkeypatch):
    pretend_macos(monkeypatch, MAC)
    assert resources.usable_cores() == {0, 1, 2, 3} and resources.available_memory() == 16 << 30
    assert boot_id() == "2F5C-1" and resources.granted_cores().number == 4 and resources.peak_memory() > 1 << 10
    assert facts.memory()["available"] == min(16 << 30, facts.memory()["total"])


def test_missing_system_facts_have_fallbacks(no_proc, monkeypatch):
    assert sysctl("hw.memsize") == b"" and not sysctl_number("hw.memsize") and not sysctl_text("kern.x")
    for known in (None, {}):
        if known is not None:
            pretend_macos(monkeypatch, known)
        assert resources.usable_cores() == set(range(os.cpu_count()))
        assert resources.available_memory() == 1 << 62 and boot_id() == ""


@pytest.mark.ci
def test_windows_is_rejected_with_wsl_hint():
    for name, code in (("distgpt.exe", 1), ("-m", 1), ("notebook", 3)):
        text = f"""
import sys
sys.platform, sys.argv[0] = "win32", {name!r}
try:
    import distgpt
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
"""
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr.count("\n")) == (code, 1) and "wsl --install" in ended.stderr, ended
