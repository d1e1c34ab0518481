"""The process that helps: it compiles the loops that it reads the names of, and keeps them on disk."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

from distgpt.core.cpu import first_use


def main() -> None:
    first_use.announce(lambda text: None)  # whoever started it has said it
    parent = os.getppid()
    for module, name, types in pickle.load(sys.stdin.buffer):
        if os.getppid() != parent:  # it was killed, and nobody waits
            return
        with suppress(Exception):  # whoever needs it compiles it, and reports why that fails
            loop: Any = attrgetter(name)(import_module(module))
            loop.compile(types)
