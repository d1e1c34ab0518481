"""Apply each mutation to a copy of the repository and see that its tests fail; exit code 1 if some do not.

python tests/mutations/run.py [WORDS]: only those mutations whose description has one of the words.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("distgpt", "tests", "data", "weights", "benchmarks", "pyproject.toml")


def survives(mutation, folder):
    """Whether the tests pass all the same."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)  # compiled loops too, with the times of their sources
    file = folder / "distgpt" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, (
        f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times"
    )
    file.write_text(text.replace(mutation.old, mutation.new))
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        *mutation.tests.split(maxsplit=2),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, cwd=folder / "tests", env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"the tests of {mutation.fault!r} cannot run:\n{done.stdout[-3000:]}"
    return done.returncode == 0


def main():
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.fault for word in words)]
    survivors = 0
    for mutation in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            survived = survives(mutation, Path(folder))
        survivors += survived
        verdict = "SURVIVED" if survived else "killed"
        print(f"{verdict:8}  {mutation.fault}  ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    sys.exit(bool(survivors))


main()
