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
    made = folder / "emulated-amx.so"
    subprocess.run([COMPILER, *FLAGS.split(), "-o", made, SOURCE, "-ldl"], check=True)
    return made


def features() -> str:
    others = (name for name in processor.processor()[1].split(",") if name[1:] not in FEATURES)
    return ",".join([*others, *(f"+{name}" for name in FEATURES)])


def main() -> int:
    """Each process appends to the file `counts` how often it ran which instruction."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        environ = {
            "LD_PRELOAD": str(library(Path(folder))), "AMX_COUNTS": str(counts), processor.AMX_VARIABLE: "1",
            "NUMBA_CPU_NAME": processor.processor()[0], "NUMBA_CPU_FEATURES": features(),
        }  # fmt: skip
        done = subprocess.run([sys.executable, *sys.argv[1:]], env=os.environ | environ, check=False)
        lines = counts.read_text().splitlines() if counts.exists() else []
        products = sum(int(line.split("tdpbf16ps ")[1]) for line in lines)
        print(f"products of tile registers: {products:,}")
        return done.returncode or not products


if __name__ == "__main__":
    sys.exit(main())
