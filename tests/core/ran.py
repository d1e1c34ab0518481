"""Run commands, and note of which files functions ran: python ran.py ASKED FOLDER.

ASKED is JSON: of each name the words of a command. The files of rank 0 are left in FOLDER under that name.
Commands run one after the other in this process, so what is done once in a process is the first one's.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from numba.core.dispatcher import Dispatcher

_compile = Dispatcher.compile


def _compile_unseen(self: Any, signature: Any) -> Any:
    """Compile or load a loop: with an empty cache that calls functions which have no part in a run."""
    seeing = sys.getprofile()
    sys.setprofile(None)
    try:
        return _compile(self, signature)
    finally:
        sys.setprofile(seeing)


Dispatcher.compile = _compile_unseen  # before loops are made, which hold on to it

from distgpt.cluster.launch.environment import launched_rank
from distgpt.commands.cli import main
from distgpt.core.train.step import Step

PACKAGE = f"{Path(__file__).resolve().parents[2] / 'distgpt'}{os.sep}"


@contextmanager
def recorded(ran: set[str]) -> Iterator[None]:
    """Note the files of functions that are called inside, in new threads too."""

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        name = code.co_filename
        is_function = code.co_flags & CO_OPTIMIZED and code.co_name[0] != "<"  # no class, lambda, module
        if event == "call" and is_function and name.startswith(PACKAGE):
            ran.add(name[len(PACKAGE) :])

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def one_bad_step() -> Iterator[None]:
    """Ruin the weights before step 3, once."""
    launch, ruined = Step.launch, []

    def launched(self: Any, number: int, *others: Any) -> Any:
        if number == 3 and not ruined:
            ruined.append(number)
            self.model.weights.flat.fill(float("nan"))
            self.model.refresh()
        return launch(self, number, *others)

    with mock.patch.object(Step, "launch", launched):
        yield


def run(name: str, words: list[str]) -> set[str]:
    """Run a command, a GPU stage on the stand-in. Return the files of the package that ran."""
    ran: set[str] = set()
    sys.argv = ["distgpt", *words]
    with ExitStack() as around:
        if "cuda" in words:
            sys.path.append(str(Path(__file__).parents[1] / "gpu"))
            import hostgpu

            around.enter_context(hostgpu.install())
        if name == "rollback":
            around.enter_context(one_bad_step())
        around.enter_context(recorded(ran))
        try:
            main()
        except SystemExit as done:
            if done.code:
                raise
    return ran


if __name__ == "__main__":
    asked, folder = sys.argv[1:]
    for name, words in json.loads(asked).items():
        ran = run(name, words)
        if launched_rank() == 0:
            Path(folder, name).write_text("\n".join(sorted(ran)))
