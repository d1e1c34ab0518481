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


def passes(tests, mutation=None):
    """Whether these tests pass in a copy, where a mutation may change the package."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:  # compiled loops too, with the times of their sources
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        if mutation:
            file = folder / "distgpt" / mutation.file
            text = file.read_text()
            assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} is not there once"
            file.write_text(text.replace(mutation.old, mutation.new))
        words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests.split(maxsplit=2)]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(words, cwd=folder / "tests", env=environment, capture_output=True, text=True)
    assert done.returncode <= 1, f"{tests} cannot run:\n{done.stdout[-3000:]}"
    return done.returncode == 0


def main():
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.fault for word in words)]
    for tests in dict.fromkeys(mutation.tests for mutation in chosen):
        if not passes(tests):
            sys.exit(f"{tests} fails already, without any mutation")
    survivors = 0
    for mutation in chosen:
        begun = time.monotonic()
        survived = passes(mutation.tests, mutation)
        survivors += survived
        verdict = "SURVIVED" if survived else "killed"
        print(f"{verdict:8}  {mutation.fault}  ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    sys.exit(bool(survivors))


main()
