"""AMX on any x86 processor: a library that carries out its instructions, tests/amx/emulated.cpp.

As a program it runs Python with AMX emulated: `python tests/helpers/emulatedamx.py -m pytest tests/core/cpu`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from distgpt.core.cpu.compiling import processor

SOURCE = Path(__file__).parents[1] / "amx" / "emulated.cpp"
COMPILER = shutil.which("g++")
FLAGS = "-std=c++17 -O2 -Wall -Wextra -Werror -mfma -fno-math-errno -ffp-contract=off -fPIC -shared"
FEATURES = ("amx-tile", "amx-bf16")


def library(folder: Path) -> Path:
    """Compile the emulation into a folder."""
    made = folder / "emulated-amx.so"
    subprocess.run([COMPILER, *FLAGS.split(), "-o", made, SOURCE, "-ldl"], check=True)
    return made


def features() -> str:
    """Return this processor's features and those of AMX, as LLVM takes them."""
    others = (name for name in processor.processor()[1].split(",") if name[1:] not in FEATURES)
    return ",".join([*others, *(f"+{name}" for name in FEATURES)])


def environment(made: Path | None, counts: Path) -> dict[str, str]:
    """Return what makes a process, and its children, take this processor for one with AMX; None: it is one.

    Each of them appends to the file `counts` how often it ran which instruction.
    """
    if made is None:
        return {**os.environ, processor.AMX_VARIABLE: "1"}
    return {
        **os.environ,
        "LD_PRELOAD": str(made),
        "AMX_COUNTS": str(counts),
        "NUMBA_CPU_NAME": processor.processor()[0],
        "NUMBA_CPU_FEATURES": features(),
        processor.AMX_VARIABLE: "1",
    }


def products(counts: Path) -> int:
    """Return how many products of tile registers were counted."""
    lines = counts.read_text().splitlines() if counts.exists() else []
    return sum(int(line.split("tdpbf16ps ")[1]) for line in lines)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        environ = environment(library(Path(folder)), counts)
        done = subprocess.run([sys.executable, *sys.argv[1:]], env=environ, check=False)
        print(f"products of tile registers: {products(counts):,}")
        return done.returncode or (0 if products(counts) else 1)


if __name__ == "__main__":
    sys.exit(main())
