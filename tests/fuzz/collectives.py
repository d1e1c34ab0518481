"""Fail one rank of a real job at each of its collective calls: python tests/fuzz/collectives.py

Each call site, named by the line of training, fails at its first and its last call: before the call, inside the call
after a part was sent, or after the call. The job must end in time and first report that rank's error.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

SECONDS = 10.0  # limit for all ranks to end after the failure
WHEN = ("before", "in", "behind")
MODEL = "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --batch-size 4 --data story --tokenizer byte --threads 1"
RUN = f"train --stage mpi {MODEL} --steps 6 --save-every 3 --eval-every 3 --val-fraction 0.1 --val-tokens 100"
WAYS = {
    **{name: ("--grad-sync", name) for name in ("allreduce", "overlapped", "sharded")},
    "overlapped, bfloat16": ("--grad-sync", "overlapped", "--gradient-dtype", "bfloat16"),
    "sharded, bfloat16": ("--grad-sync", "sharded", "--dtype", "bfloat16"),
    "local steps": ("--outer-every", "2"),
    "parts": ("--reproducible-parts", "2"),
    "muon": ("--optimizer", "muon"),
}
CALLS = ("sum", "all_to_all", "all_gather", "send", "allreduce_max", "broadcast", "broadcast_bytes", "barrier")
SAID = re.compile(r"^distgpt: (.*)", re.MULTILINE)


class Planted:
    """Wraps the communicator's calls, counts them, records their call sites, and fails at one."""

    def __init__(self, fails_at, when, log):
        self.fails_at, self.when, self.log, self.places, self.count = fails_at, when, log, [], 0
        self.armed = False

    def install(self):
        from distgpt.core.comm import mpi

        mpi.LARGEST_MESSAGE = 1 << 12  # splits messages into parts
        pieces = mpi._pieces
        mpi._pieces = lambda array: self.parts(pieces(array))
        for name in CALLS:
            setattr(mpi.MpiComm, name, self.wrapped(getattr(mpi.MpiComm, name), name))

    def parts(self, pieces):
        for part in pieces:
            yield part
            if self.armed:
                self.fail()

    def wrapped(self, call, name):
        def counted(comm, *args, **more):
            number, self.count = self.count, self.count + 1
            self.places.append(f"{name} in {site()}")
            hit = number == self.fails_at
            if hit and self.when == "before":
                self.fail()
            self.armed = hit and self.when == "in"
            try:
                result = call(comm, *args, **more)
            finally:
                self.armed = False
            if hit and self.when != "before":
                self.fail()
            return result

        return counted

    def fail(self):
        self.log.write_text(f"{time.time()}")
        raise RuntimeError("planted")


def site():
    """Return the callers in distgpt, except the communicator and agree.py."""
    frames = [frame for frame in traceback.extract_stack() if "/distgpt/" in frame.filename]
    lines = [f"{Path(frame.filename).stem}:{frame.name}" for frame in frames]
    return " < ".join([line for line in lines[::-1] if not line.startswith(("mpi:", "agree:"))][:2])


def rank_main(rank, fails_at, when, log, *words):
    """Run the command on this rank; one rank fails."""
    from distgpt.cluster.launch.environment import launched_rank
    from distgpt.commands.cli import main

    mine = launched_rank() == int(rank)
    planted = Planted(int(fails_at) if mine else -1, when, Path(log))
    planted.install()
    sys.argv = ["distgpt", *words]
    try:
        main()
    finally:
        if mine and int(fails_at) < 0:
            Path(log).write_text(json.dumps(planted.places))


def job(scratch, rank, fails_at, when, way):
    """Run one job; return its exit code, its errors and its log."""
    from conftest import MPIRUN, clean_environment

    shutil.rmtree(scratch / "run", ignore_errors=True)
    (log := scratch / "log").unlink(missing_ok=True)
    words = [*RUN.split(), "--out", str(scratch / "run"), *WAYS[way]]
    own = [sys.executable, __file__, "--rank-main", str(rank), str(fails_at), when, str(log), *words]
    process = subprocess.Popen(
        [MPIRUN, "-n", "2", *own], env=clean_environment(), text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said = process.communicate()[1]
        return None, said, log
    return process.returncode, said, log


def judge(scratch, rank, fails_at, when, way):
    """Return the problem, or ""."""
    code, said, log = job(scratch, rank, fails_at, when, way)
    ended = time.time()
    if not log.exists():
        return f"it did not come to that: {code} {said[-300:]}"
    late = ended - float(log.read_text())
    first = (SAID.findall(said) or [""])[0]
    if code is None or late > SECONDS:
        return f"it took {late:.0f} s to end: {said[-300:]}"
    if code != 70 or not first.startswith(f"rank {rank}: internal error") or "planted" not in said:
        return f"it left with {code}: {first or said[-300:]}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rank", type=int, choices=(0, 1), default=1)
    parser.add_argument("--every", type=int, default=1, help="run every N-th case")
    parser.add_argument("--first", type=int, default=0, help="skip N cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after N seconds")
    options = parser.parse_args()
    begun, count, failures = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for way in options.only:
            code, said, log = job(Path(scratch), options.rank, -1, "never", way)
            assert code == 0, said
            places = json.loads(log.read_text())
            ends = {name: (places.index(name), len(places) - 1 - places[::-1].index(name)) for name in places}
            cases = [(at, when, name) for name in ends for at in sorted({*ends[name]}) for when in WHEN]
            print(f"{way}: {len(places)} calls in {len(ends)} places, {len(cases)} cases", flush=True)
            for at, when, name in cases[options.first :: options.every]:
                if time.monotonic() - begun > options.seconds:
                    break
                count += 1
                if wrong := judge(Path(scratch), options.rank, at, when, way):
                    failures += 1
                    print(f"{way}, {when} call {at}, {name}: {wrong}", flush=True)
    print(f"{count} cases, {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-main"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
