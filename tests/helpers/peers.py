"""Tests against other programs, in a Python that has them."""

import os
import subprocess
import sys

import pytest


def peer_with(variable, *packages):
    look = f"from importlib.util import find_spec as f; raise SystemExit(not all(map(f, {packages})))"
    pythons = filter(None, [sys.executable, os.environ.get(variable)])
    found = next((p for p in pythons if not subprocess.run([p, "-c", look]).returncode), None)
    reason = f"needs {' and '.join(packages)}, here or in the Python that {variable} names"
    return found, [pytest.mark.peer, pytest.mark.skipif(not found, reason=reason)]
