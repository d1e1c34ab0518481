"""Remove ranks, links and hosts from supervised runs, and check that they still end correctly.

Hosts are network and process namespaces of this machine, each with an sshd (tests/helpers/hosts.py): a head
that runs `distgpt supervise`, two hosts with a rank each, and a spare host. The seed and the trial's number
determine the fault.

  python benchmarks/torturing/lost_hosts.py --trials 100 --seconds 280 --out FILE   a line of FILE per trial
  python benchmarks/torturing/lost_hosts.py table FILE                              the tables

Requires root, iproute2, openssh-server and the mpich wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

from hosts import NET, bridge, inhabitants, inside, joined_hosts, start_sshd

BIN = Path(sys.executable).parent
STEPS, EVERY = 400, 40
LIMIT = 150.0  # seconds of a trial
WITHIN = 30.0  # seconds from the loss to the first step after the restart
MODEL = "--stage mpi --threads 1 --n-layer 1 --n-head 2 --n-embd 32 --seq-len 32 --batch-size 12 --data story"
HOW = f"--tokenizer byte --steps {STEPS} --save-every {EVERY} --val-fraction 0 --set matmul=own"
HOW += " --dtype float32 --progress plain --log-lines 1h"
LISTENER = "[listener]"  # part of the command line of sshd's listening process
RANK = "/distgpt\0train"  # part of the command line of a rank
MPIRUN, PROXY = "mpiexec.hydra", "hydra_pmi_proxy"  # names of mpirun and of its process on each host
SICK_AT = 90  # the step at which a broken program exits
# A program whose rank 0 exits during a step.
SICK = f"""#!{sys.executable}
import os, signal
from distgpt.core.train.progress import Progress
count = Progress.count_step
def dying(self, *args, **more):
    if self.step == {SICK_AT} and "0" in map(os.environ.get, ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        os.kill(os.getpid(), signal.SIGKILL)
    return count(self, *args, **more)
Progress.count_step = dying
from distgpt.commands.cli import main
main()
"""


@dataclass(slots=True)
class Trial:
    """A supervised run and its outcome."""

    kind: str
    number: int
    step: int  # earliest step of the fault
    victim: int  # a host with a rank, 1 or 2 in the order of the hostfile
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    back: list[float] = field(default_factory=list)  # seconds from each loss to the next step
    starts: int = 0
    code: int | None = None


class Hosts:
    def __init__(self, folder: Path, spaces: list[str]) -> None:
        self.folder, self.spaces = folder, spaces
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._cut: set[int] = set()

    def address(self, number: int) -> str:
        return f"{NET}.{number + 1}"

    def processes(self, number: int, word: str) -> list[int]:
        found = []
        for process in inhabitants(self.spaces[number]):
            with suppress(OSError):
                if word.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                    found.append(process)
        return found

    def kill(self, number: int, word: str) -> int:
        found = self.processes(number, word)
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return len(found)

    def cut(self, number: int) -> None:
        self._cut.add(number)
        subprocess.run(["ip", "link", "set", f"{self.spaces[number]}c", "down"], check=True)

    def join(self, number: int) -> None:
        self._cut.discard(number)
        subprocess.run(["ip", "link", "set", f"{self.spaces[number]}c", "up"], check=True)

    def mend(self) -> None:
        """Reconnect cut hosts, kill remaining processes, and restart killed daemons."""
        for number in list(self._cut):
            self.join(number)
        for number, space in enumerate(self.spaces):
            if number:
                self.kill(number, PROXY)
                self.kill(number, RANK)
            if not self.processes(number, LISTENER):
                for process in inhabitants(space):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                self._daemons.append(start_sshd(self.folder, space, f"node{number + 1}", True))
        for number in range(1, len(self.spaces)):
            self.reaches(number, 20.0)

    def reaches(self, number: int, seconds: float) -> None:
        ssh = [str(self.folder / "ssh"), self.address(number), "true"]
        words = ["ip", "netns", "exec", self.spaces[0], *ssh]
        end = time.monotonic() + seconds
        while subprocess.run(words, capture_output=True).returncode:
            if time.monotonic() > end:
                raise RuntimeError(f"host {number} does not answer")
            time.sleep(0.2)


class Supervised:
    def __init__(
        self, hosts: Hosts, folder: Path, mpirun: Path, spares: int, *, distgpt: Path, disk: Path
    ) -> None:
        self.hosts, self.folder, self.out = hosts, folder, disk / "run"
        (folder / "hosts").write_text("".join(f"{hosts.address(n)}:1\n" for n in range(1, 3 + spares)))
        self.line = [str(distgpt), "train", *MODEL.split(), *HOW.split(), "--out", str(self.out)]
        launch = [str(mpirun), "-iface", "eth0", "-f", str(folder / "hosts"), "-n", "2", *self.line]
        words = [str(BIN / "distgpt"), "supervise", "--", *launch]
        start = ["sh", "-c", 'hostname node1; exec "$0" "$@"']
        env = {**os.environ, "PATH": f"{hosts.folder}:{BIN}:{os.environ['PATH']}", "DISTGPT_BIND": "off"}
        self.errors = (folder / "errors").open("wb")
        self.process = subprocess.Popen(
            [*inside(hosts.spaces[0], alone=True), *start, *words],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
        )

    @property
    def said(self) -> str:
        return (self.folder / "errors").read_text(errors="replace")

    @property
    def starts(self) -> int:
        path = self.out / "history.jsonl"
        return path.read_text().count('"ranks"') if path.exists() else 0

    def step(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.out / "metrics.jsonl").read_bytes().split(b"\n")[-2])["step"])
        return 0

    def wait_for_step(self, step: int, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while self.step() < step and self.process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"step {step} was not reached, but {self.step()}")
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        for process in self.hosts.processes(0, "supervise"):
            if b"unshare" not in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, number)
                return

    def has_started(self, starts: int, seconds: float = 60.0) -> float:
        """Wait until the run was started `times` times and is working; return the time."""
        end = time.monotonic() + seconds
        while self.starts < starts:
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError(f"it was started {self.starts} times, not {starts}")
            time.sleep(0.02)
        modified = (self.out / "metrics.jsonl").stat().st_mtime_ns if self.step() else 0
        while (self.out / "metrics.jsonl").stat().st_mtime_ns == modified and self.process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError("no step follows")
            time.sleep(0.02)
        return time.monotonic()


class Campaign:
    """Sequential trials on the same hosts, and reference runs."""

    def __init__(self, folder: Path, mpirun: Path, hosts: Hosts) -> None:
        self.folder, self.mpirun, self.hosts = folder, mpirun, hosts
        self.disk = folder / "disk"
        self.sick = program_file(folder / "sick" / "distgpt", SICK)
        self._whole = self.train(folder / "whole", 2, [])
        self._alone: dict[int, bytes] = {}

    def train(self, out: Path, ranks: int, more: list[str]) -> Path:
        (self.folder / "keep.toml").write_text("keep = 1000\n")
        words = [*MODEL.split(), *HOW.split(), "--out", out, "--config", self.folder / "keep.toml", *more]
        launch = [str(BIN / "mpirun"), "-n", str(ranks), str(BIN / "distgpt"), "train"]
        env = {**os.environ, "DISTGPT_BIND": "off"}
        subprocess.run([*launch, *map(str, words)], check=True, capture_output=True, env=env, timeout=300)
        return out

    def expected(self, alone_from: int | None) -> bytes:
        """Return the weights of a run on two ranks, or of a run resumed on one rank at this step."""
        if alone_from is None:
            return weights(self._whole)
        if alone_from not in self._alone:
            out, name = self.folder / f"alone-{alone_from}", f"step-{alone_from:08}"
            words = ["--resume", str(self._whole / "checkpoints" / name)] if alone_from else []
            self._alone[alone_from] = weights(self.train(out, 1, words))
        return self._alone[alone_from]

    def try_one(self, trial: Trial) -> None:
        begun, folder = time.monotonic(), self.folder / f"trial-{trial.number}"
        folder.mkdir()
        kind = KINDS[trial.kind]
        disk = self.disk if kind.on_disk else folder
        distgpt = self.sick if kind.is_sick else BIN / "distgpt"
        self.hosts.mend()
        how = {"distgpt": distgpt, "disk": disk}
        run = Supervised(self.hosts, folder, self.mpirun, kind.spares, **how)
        try:
            kind.happens(self, run, trial)
            trial.code = run.process.wait(max(1.0, begun + LIMIT - time.monotonic()))
            kind.judge(self, run, trial)
        except (TimeoutError, subprocess.TimeoutExpired, OSError) as error:
            trial.wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            run.process.kill()
            for process in inhabitants(self.hosts.spaces[0]):
                with suppress(OSError):  # the process has ended
                    if b"sshd" not in Path(f"/proc/{process}/cmdline").read_bytes():
                        os.kill(process, signal.SIGKILL)
            run.process.wait()
            run.errors.close()
        trial.starts, trial.seconds = run.starts, time.monotonic() - begun
        if trial.wrong or max(trial.back, default=0.0) > WITHIN / 2:
            print(run.said[-3000:], file=sys.stderr)
        for left in (folder, disk / "run"):
            shutil.rmtree(left, ignore_errors=True)


def weights(run: Path) -> bytes:
    """Return the tensors of a run's weights, without the header."""
    content = (run / "weights.safetensors").read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def program_file(path: Path, text: str) -> Path:
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)
    return path


# Faults


def lose(run: Supervised, trial: Trial, how: Callable[[int], object]) -> None:
    """Cause a fault at the trial's step, and wait until a restarted run continues."""
    run.wait_for_step(trial.step)
    starts, lost = run.starts, time.monotonic()
    how(trial.victim)
    trial.back.append(run.has_started(starts + 1) - lost)


def kill_rank(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    lose(run, trial, lambda victim: campaign.hosts.kill(victim, RANK))


def kill_proxy(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    run.wait_for_step(trial.step)
    campaign.hosts.kill(trial.victim, PROXY)


def kill_mpirun(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    lose(run, trial, lambda victim: campaign.hosts.kill(0, MPIRUN))


def cut(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    lose(run, trial, campaign.hosts.cut)


def power_off(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    def off(victim: int) -> None:
        campaign.hosts.cut(victim)
        campaign.hosts.kill(victim, "")

    lose(run, trial, off)


def come_back(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    """Cut one host and reconnect it; then cut the other, so that the first is used again."""
    cut(campaign, run, trial)
    campaign.hosts.join(trial.victim)
    trial.victim, trial.step = 3 - trial.victim, trial.step + EVERY
    cut(campaign, run, trial)


def no_sshd(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    run.wait_for_step(trial.step)
    campaign.hosts.kill(trial.victim, LISTENER)  # not MPI's own session
    campaign.hosts.kill(trial.victim, "cat\0")  # the process that the supervisor is connected to


def no_sshd_and_kill(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    no_sshd(campaign, run, trial)
    kill_rank(campaign, run, trial)


def ask_to_end(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    run.wait_for_step(trial.step)
    run.signal(signal.SIGTERM)


def fill_disk(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    """Fill the disk permanently, so that a second checkpoint and the final weights do not fit."""
    run.wait_for_step(trial.step)
    used = int(
        subprocess.run(["du", "-s", str(campaign.disk)], capture_output=True, text=True).stdout.split()[0]
    )
    with suppress(OSError):  # the run has filled the disk
        (campaign.disk / "other").write_bytes(bytes(max(0, (64 << 10) - used - 16) << 10))
    subprocess.run(["mount", "-o", f"remount,size={(64 << 20) >> 10}k", str(campaign.disk)], check=True)


def nothing(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    """Break the program itself."""


# Expected ends


def is_right(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    """Check that all steps ran once, with the weights of a run resumed manually on as many ranks."""
    if trial.code != 0:
        trial.wrong.append(f"it left with {trial.code}: {run.said[-300:]}")
        return
    events = [json.loads(line) for line in (run.out / "history.jsonl").read_text().splitlines()]
    alone = [event.get("step", 0) for event in events if event.get("ranks") == 1]
    steps = [json.loads(line)["step"] for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    if steps != [*range(1, STEPS + 1)]:
        trial.wrong.append("a step is missing or repeated in the metrics")
    if weights(run.out) != campaign.expected(alone[0] if alone else None):
        trial.wrong.append(f"other weights; ranks of each start: {[event.get('ranks') for event in events]}")
    if slow := [f"{seconds:.1f}" for seconds in trial.back if seconds > WITHIN]:
        trial.wrong.append(f"late: {', '.join(slow)} s from the loss to the next step")
    if (run.out / "running.json").exists():
        trial.wrong.append("running.json is left")


def is_alone(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    is_right(campaign, run, trial)
    if "1 rank on" not in run.said:
        trial.wrong.append("it did not run on one rank")


def has_not_restarted(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    is_right(campaign, run, trial)
    if run.starts != 1:
        trial.wrong.append(f"{run.starts} starts, but only the first was needed")


def has_saved(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    """Check the exit code of the signal, and that the same command then finishes with the right weights."""
    last = run.step()
    saved = max((int(path.name[5:]) for path in (run.out / "checkpoints").glob("step-*")), default=0)
    if trial.code != 143 or run.starts != 1 or saved != last:
        trial.wrong.append(
            f"it left with {trial.code} after {run.starts} starts, step {last}, and saved {saved}"
        )
    campaign.train(run.out, 2, ["--resume", "auto"])
    trial.code = 0
    is_right(campaign, run, trial)


def has_said_disk(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    if trial.code == 0:  # there was space at the end
        is_right(campaign, run, trial)
    elif trial.code != 74 or "No space left" not in run.said or "not restarted" not in run.said:
        trial.wrong.append(f"it left with {trial.code}: {run.said[-300:]}")
    (campaign.disk / "other").unlink(missing_ok=True)


def has_given_up(campaign: Campaign, run: Supervised, trial: Trial) -> None:
    said = f"it ended 3 times without a step beyond {SICK_AT}"
    if trial.code == 0 or said not in run.said or run.starts != 3:
        trial.wrong.append(f"it left with {trial.code} after {run.starts} starts: {run.said[-300:]}")


@dataclass(frozen=True, slots=True)
class Kind:
    """`often`: number of these trials in a hundred."""

    happens: Callable[[Campaign, Supervised, Trial], None]
    judge: Callable[[Campaign, Supervised, Trial], None] = is_right
    spares: int = 1
    often: int = 8
    on_disk: bool = False
    is_sick: bool = False


KINDS = {
    "a rank is killed": Kind(kill_rank, often=12),
    "a proxy is killed": Kind(kill_proxy),
    "mpirun is killed": Kind(kill_mpirun),
    "a cable is cut": Kind(cut, often=14),
    "a cable is cut, and there is no spare host": Kind(cut, is_alone, spares=0, often=10),
    "a host is cut and comes back": Kind(come_back, often=10),
    "a host is switched off": Kind(power_off, often=10),
    "sshd ends": Kind(no_sshd, has_not_restarted, often=6),
    "sshd ends, and a rank is killed": Kind(no_sshd_and_kill, often=6),
    "the supervisor gets SIGTERM": Kind(ask_to_end, has_saved),
    "the disk is full": Kind(fill_disk, has_said_disk, often=4, on_disk=True),
    "it always fails at a step": Kind(nothing, has_given_up, often=4, is_sick=True),
}


def choose(number: int, seed: int, kinds: list[str]) -> Trial:
    chance = random.Random(f"{seed} {number}")
    every = [kind for kind in kinds for _ in range(KINDS[kind].often)]
    random.Random(seed).shuffle(every)  # mixes the kinds, so that a short campaign has all of them
    return Trial(every[number % len(every)], number, chance.randrange(5, STEPS // 2), chance.choice((1, 2)))


@contextmanager
def campaign() -> Iterator[Campaign]:
    with tempfile.TemporaryDirectory(prefix="lost-hosts-") as scratch:
        folder = Path(scratch)
        (disk := folder / "disk").mkdir()  # before the hosts, which have separate mount namespaces
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "distgpt", str(disk)], check=True)
        with joined_hosts(folder, bridge, 4, alone=True) as (mpirun, _, spaces):
            found = Campaign(folder, mpirun, Hosts(folder, spaces))
            try:
                yield found
            finally:
                subprocess.run(["umount", "-l", str(disk)], check=False)
                for daemon in found.hosts._daemons:
                    daemon.kill()
                    daemon.wait()


def table(path: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        rows[(found := json.loads(line))["kind"]].append(found)
    print(
        "| what happens | trials | wrong | seconds to the next step: median | most |\n|---|---|---|---|---|"
    )
    for kind in [*filter(rows.get, KINDS)]:
        back = [seconds for row in rows[kind] for seconds in row["back"]]
        times = f"{statistics.median(back):.1f} | {max(back):.1f}" if back else " | "
        print(f"| {kind} | {len(rows[kind])} | {sum(bool(row['wrong']) for row in rows[kind])} | {times} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no trial after N seconds")
    parser.add_argument("--kinds", help=f"some of them, with semicolons: {'; '.join(KINDS)}")
    parser.add_argument("--out", type=Path, help="append to this file, and skip trials that it has")
    args = parser.parse_args()
    if args.what == "table":
        table(args.file)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the hosts
    kinds, begun = args.kinds.split(";") if args.kinds else list(KINDS), time.monotonic()
    there = args.out.read_text() if args.out and args.out.exists() else ""
    done = {int(number) for number in re.findall(r'"number": (\d+)', there)}
    with campaign() as running:
        for number in (n for n in range(args.trials) if n not in done):
            if time.monotonic() > begun + args.seconds:
                break
            trial = choose(number, args.seed, kinds)
            running.try_one(trial)
            about = {name: getattr(trial, name) for name in Trial.__slots__}
            print(json.dumps(about), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
