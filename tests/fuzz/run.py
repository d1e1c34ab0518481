"""Fuzz the loaders: `python tests/fuzz/run.py --cases 1000`. Equal seeds give equal cases.

A case corrupts a copy of a target's directory and runs a command that reads it, in a process with 1 GB more memory
than at the start and 5 s of CPU time. A result or a distgpt error is correct: a known exit code, a message of at
most a screen, no traceback, no control characters, valid JSON.
"""

import argparse
import gc
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "fuzz"), str(TESTS), str(TESTS / "helpers")]

import mutate
from targets import TARGETS

from conftest import inside

SECONDS, MEMORY = 5, 1 << 30  # CPU seconds, and bytes
WAITING = 40  # seconds of wall time
GENERATING = ("infer", "train", "tune")  # print generated text unescaped
CODES = (0, 1, 2, 65, 74, 76)
SCREEN = 2000  # characters
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="per target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop N seconds after the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--keep", type=Path, help="copy folders of failing cases to here")
    options = parser.parse_args()
    count, failures = fuzz(options)
    print(f"{count} cases, {len(failures)} failures")
    return bool(failures)


def fuzz(options):
    """Run the cases of each target; return the number of cases, and the failures."""
    done, failures = 0, []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as scratch:
        good, folder = {}, Path(scratch, "case")
        for name in options.only:
            good[name] = Path(scratch, "good", name.replace(" ", "-"))
            good[name].mkdir(parents=True)
            TARGETS[name].make(good[name])
            _all_is_well(TARGETS[name], good[name], folder)
        gc.freeze()
        numbers = range(options.cases)
        deadline = time.monotonic() + options.seconds  # excludes setup
        for number, name in itertools.product(numbers, options.only):
            if time.monotonic() > deadline:
                break
            trouble = case(TARGETS[name], good[name], folder, f"{options.seed}/{name}/{number}")
            done += 1
            if trouble:
                failures.append((name, number))
                print(f"{name}, case {number}: {trouble}")
                if options.keep:
                    shutil.copytree(folder, options.keep / f"{good[name].name}-{number}", dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    return done, failures


def _all_is_well(target, good, folder):
    """Check that every command succeeds on good files."""
    for command in target.commands:
        shutil.copytree(good, folder)
        words = command.replace("{}", str(folder)).split()
        result = inside(*words)
        assert result.returncode == 0, (command, result.stderr)
        shutil.rmtree(folder)


def case(target, good, folder, seed):
    """Return the problem of a case, or None."""
    chosen = random.Random(seed)
    shutil.copytree(good, folder)
    name = chosen.choice(list(target.damage))
    path = folder / name
    path.write_bytes(mutate.damaged(path.read_bytes(), target.damage[name], chosen))
    command = chosen.choice(target.commands).replace("{}", str(folder))
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        _child(command.split(), write)
    os.close(write)
    said = b""
    deadline = time.monotonic() + WAITING
    while (left := deadline - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        if not (part := os.read(read, 1 << 16)):
            break
        said += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        what = "took too long" if number in (signal.SIGKILL, signal.SIGXCPU) else f"killed by signal {number}"
        return f"{what}: {name}: {command}"
    return f"{said.decode(errors='replace')}: {name}: {command}" if said else None


def _child(words, write):
    """Run one command and write its problem."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        trouble = verdict(inside(*words), words)
    except BaseException as error:
        trouble = f"the case itself failed: {error!r}"
    os.write(write, trouble.encode(errors="replace"))
    os._exit(0)


def verdict(result, words):
    """Return the problem of a command's result in a few words, or ""."""
    errors, as_json = result.stderr, "--json" in words
    page = "" if as_json or words[0] in GENERATING else result.stdout
    if result.returncode not in CODES or "Traceback" in errors or "internal error" in errors:
        return f"exit code {result.returncode}: {' | '.join(errors.splitlines()[-3:])[-300:]!r}"
    if result.returncode and not errors.strip():
        return "failed without a word"
    if result.returncode and len(errors) > SCREEN:
        return f"a message of {len(errors)} characters: {errors[:200]!r}"
    if found := _CONTROL.search(errors + page):
        return f"a control character is printed: {found.group()!r} in {(errors + page)[:300]!r}"
    if as_json and not result.returncode:
        try:
            json.loads(result.stdout, parse_constant=_refuse)
        except ValueError as error:
            return f"no JSON: {error}: {result.stdout[:200]!r}"
    return ""


def _refuse(constant):
    raise ValueError(constant)


if __name__ == "__main__":
    sys.exit(main())
