"""`distgpt bench node`: what a site wants to know of a node, within minutes, on one page.

Parts follow one another in the order of their weight for a decision. Each takes its share of the time that is
left, and what there is no time for is named. benchmarks/node_table.py makes tables of longer measurements
beside PyTorch, from files of several programs: the two have the model and no code in common.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DisagreementError, DistgptError, UsageError, print_lines
from distgpt.core.base.files import atomic_file, read_small
from distgpt.core.base.formatting import count, duration
from distgpt.core.base.formatting import size as in_bytes
from distgpt.core.comm.layout import layout
from distgpt.core.comm.resources import usable_cores
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import RunConfig
from distgpt.core.cpu.stages import expected_dtype
from distgpt.core.model.model import Architecture
from distgpt.core.saved.checkpoint import State, beyond, load_group, save_checkpoint
from distgpt.doctor.facts import memory
from distgpt.energy.counters import opened_zones
from distgpt.jobs import hostfile as hostfiles
from distgpt.jobs.launchers import Launcher, find_launcher, mpirun
from distgpt.jobs.processes import TIMED_OUT
from distgpt.layout.machine import SYS, Machine, read_machine
from distgpt.layout.plan import COPIES, recommended
from distgpt.measure import jobs
from distgpt.measure.bench import allreduce, infer
from distgpt.measure.bench.node_jobs import ENOUGH, PARTS, run_of
from distgpt.measure.bench.node_page import NO_BITS, NO_TIME, blocks, figures, judged, page
from distgpt.measure.bench.results import BenchOptions, Row, say, write_result

MODEL = "gpt2"  # the one that cores, ranks and hosts are compared with
PRESETS = (MODEL, "fast", "tiny")
DTYPES = ("bfloat16", "float32")
STARTING = 6.0  # seconds of a process, until one was seen to start
PATIENCE = 1.5  # times its share, after which a part is ended
FOR_THE_PAGE = 4.0  # seconds that are kept for it
SEQUENCES, SEQ_LEN = 2, 256  # of the model for each core, so that a step takes about as long on any number
CHECKPOINT = 512 << 20  # bytes
PROMPT, NEW, REQUESTS = 64, 32, (1, 32)


@dataclass(frozen=True, slots=True)
class NodeOptions(BenchOptions):
    """The command line. What follows `minutes` is for tests."""

    minutes: float = 10.0
    presets: Sequence[str] = PRESETS
    settings: Mapping[str, Any] = field(default_factory=dict)  # of every model that is trained
    checkpoint: int = CHECKPOINT
    generator: str = MODEL
    largest_sum: str = "64M"


def bench(options: NodeOptions) -> None:
    """Measure, write JSON and page, and fail if bits are wrong or were not compared."""
    options.prepare()
    launcher, why = None, ""
    try:
        find_launcher(options.launcher, options.hostfile)  # refuses a file that it would not read
        launcher = find_launcher(options.launcher, None)
    except UsageError as error:
        if options.launcher or options.hostfile:  # which somebody wants
            raise
        why = str(error)
    node = Node(options, launcher, why)
    node.measure()
    found = node.result()
    path = write_result(options.out / "node.json", "node", "node", found)
    with atomic_file(path.with_suffix(".html")) as file:
        file.write(page(json.loads(path.read_text())).encode())
    if options.as_json:
        print(json.dumps(found), flush=True)
    else:
        from distgpt.show.page import terminal

        print_lines(terminal(blocks(found)))
    say(f"written to {path} and {path.with_suffix('.html')}, after {duration(node.seconds())}")
    if not found["bits"]:  # nobody is to take silence for right bits
        raise DisagreementError(f"{NO_BITS}: {_why_no_bits(found['left_out'])}")
    if not found["bits"]["right"]:
        raise DisagreementError(f"bits are wrong here: {found['bits']['verdict']}")


def _why_no_bits(left_out: Sequence[Row]) -> str:
    return next((row["why"] for row in left_out if row["what"].startswith("bits")), NO_TIME)


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement: its part of the page, what it is, and how to make it in about some seconds."""

    name: str
    what: str
    weight: float
    least: Callable[[], float]  # seconds, below which it is not begun
    run: Callable[[float], None]


class Node:
    """The results so far, and the time that is left."""

    def __init__(self, options: NodeOptions, launcher: Launcher | None, why_none: str) -> None:
        self.options, self._launcher, self._why_none = options, launcher, why_none
        self._begun = time.monotonic()
        self._end = self._begun + 60 * options.minutes - FOR_THE_PAGE
        self._machine: Machine = read_machine(SYS, usable_cores())
        self._threads = layout().threads(SerialComm())
        self._dtype = expected_dtype("serial", RunConfig()).name
        self._starting = STARTING
        self._rows: list[Row] = []
        self._found: dict[str, Any] = {"exchange": [], "disk": None, "generation": []}
        self.left_out: list[Row] = []

    def seconds(self) -> float:
        return time.monotonic() - self._begun

    # -- the plan

    def measure(self) -> None:
        """Make all parts in turn, each in its share of what is left."""
        plan = list(self._plan())
        for number, part in enumerate(plan):
            left = self._end - time.monotonic()
            share = left * part.weight / sum(each.weight for each in plan[number:])
            if number and part.least() > left:
                self._leave_out(part, NO_TIME)
                continue
            seconds = min(left, max(share, part.least()))
            say(f"{part.name}: {part.what}, about {duration(max(seconds, 1.0))} at most")
            try:
                part.run(seconds)
            except DistgptError as error:
                self._leave_out(part, str(error))

    def _leave_out(self, part: Part, why: str) -> None:
        self.left_out.append({"part": part.name, "what": part.what, "why": why})

    def _plan(self) -> Iterator[Part]:
        every = self._threads

        def start() -> float:
            return self._starting + 2

        def a_place() -> float:
            return self._starting + 5 + 5 * self._step_s()

        peaks = [{"kind": "peak", "dtype": dtype} for dtype in DTYPES]
        trained = [self._training(name, self._dtype, every) for name in self.options.presets]
        yield Part(
            *("training", f"bits, peaks and {self._dtype} on {count(every, 'thread')}", 6, start),
            partial(self._place, 1, every, [{"kind": "bits"}, *peaks, *trained]),
        )
        if suits := self._ranks():
            of = every // suits[0]
            yield Part(
                *("ranks", f"{suits[0]} of {count(of, 'thread')}", 2, a_place),
                partial(self._place, suits[0], of, [{"kind": "bits"}, self._scaled(suits[0] * of)]),
            )
        ranks = suits[0] if suits else 2
        yield Part(
            "exchange", f"sums over {count(ranks, 'rank')}", 1.5, start, partial(self._exchange, ranks)
        )
        yield Part("disk", f"a checkpoint of {in_bytes(self.options.checkpoint)}", 1, lambda: 5.0, self._disk)
        for requests in REQUESTS:
            what = f"{count(requests, 'request')} at once"
            yield Part("generation", what, 1.5, start, partial(self._generate, requests))
        yield from self._hosts(a_place)
        for threads in self._fewer():
            more = [{"kind": "bits"}, {"kind": "peak", "dtype": self._dtype}, self._scaled(threads)]
            yield Part(
                *("threads", f"{threads} of {every}", 2, a_place), partial(self._place, 1, threads, more)
            )
        for ranks in suits[1:]:
            of = every // ranks
            yield Part(
                *("ranks", f"{ranks} of {count(of, 'thread')}", 2, a_place),
                partial(self._place, ranks, of, [{"kind": "bits"}, self._scaled(ranks * of)]),
            )
        for dtype in (dtype for dtype in DTYPES if dtype != self._dtype):
            others = [self._training(name, dtype, every) for name in self.options.presets]
            yield Part(
                *("training", f"{dtype} on {count(every, 'thread')}", 3, start),
                partial(self._place, 1, every, others),
            )

    def _hosts(self, a_place: Callable[[], float]) -> Iterator[Part]:
        """Yield parts for 1, 2, 4, … hosts of the hostfile, each with its ranks of a node."""
        if self.options.hostfile is None:
            return
        lines = hostfiles.parse(read_small(self.options.hostfile, hostfiles.LARGEST))
        names = list(dict.fromkeys(line.host for line in lines))
        each = recommended(self._machine).ranks
        of = self._threads // each
        for hosts in [*_doubling(len(names)), len(names)]:
            jobs_there = [{"kind": "bits"}, self._scaled(hosts * each * of)]
            run = partial(self._place, hosts * each, of, jobs_there, hosts=names[:hosts])
            yield Part("hosts", f"{count(hosts, 'host')} of {count(each, 'rank')}", 2, a_place, run)

    def _ranks(self) -> list[int]:
        """Return numbers of ranks that cut this node's cores equally: first that which suits it best."""
        if self._launcher is None or self._threads < 2:
            why = self._why_none or "there is one core"
            self.left_out.append({"part": "ranks", "what": "ranks of this node", "why": why})
            return []
        weights = Architecture(self._model().model).layout.elements * 4
        room = (memory()["available"] or 0) // (weights * COPIES)
        best = recommended(self._machine, weights, memory()["available"] or 0).ranks
        fit = [n for n in _doubling(self._threads) if n > 1 and self._threads % n == 0] + [self._threads]
        suits = list(dict.fromkeys([*([best] if best > 1 else []), *fit]))
        if over := [n for n in suits if n > room]:
            what = f"{', '.join(map(str, over))} ranks"
            self.left_out.append({"part": "ranks", "what": what, "why": "memory"})
        return [n for n in suits if n <= room]

    def _fewer(self) -> list[int]:
        return _doubling(self._threads)

    # -- training and bits

    def _model(self) -> RunConfig:
        return run_of(self.options.presets[0], self._settings(self.options.presets[0], 1))

    def _settings(self, name: str, threads: int) -> Row:
        sized = {"seq_len": SEQ_LEN, "batch_size": SEQUENCES * threads, "grad_accum": 1, "warmup": 0}
        return {**(sized if name == MODEL else {}), **self.options.settings}

    def _training(self, name: str, dtype: str, threads: int) -> Row:
        return {"kind": "train", "name": name, "dtype": dtype, "settings": self._settings(name, threads)}

    def _scaled(self, threads: int) -> Row:
        """Return the job that cores, ranks and hosts are compared by: as much for each core."""
        return self._training(self.options.presets[0], self._dtype, threads)

    def _step_s(self) -> float:
        """Return the seconds of the model's step, which are about the same on any number of cores."""
        known = [row["step_s"] for row in self._rows if row.get("preset") == self.options.presets[0]]
        return float(known[0]) if known else 0.0

    def _place(
        self, ranks: int, threads: int, wanted: Sequence[Row], seconds: float, hosts: Sequence[str] = ()
    ) -> None:
        """Let processes do these jobs, and keep what they have done, also where their time was too short."""
        now = time.time()
        # Parts of its batch are summed in the same order only on as many ranks as divide them.
        wanted = [job for job in wanted if job["kind"] != "bits" or PARTS % ranks == 0]
        stage = "mpi" if ranks > 1 or hosts else "serial"
        request = {"stage": stage, "threads": threads, "jobs": wanted, "begun": now, "until": now + seconds}
        words = ["bench", "node", "--measure", json.dumps(request)]
        with self._on(hosts) as hosted:
            launcher = hosted or (self._launcher if ranks > 1 else None)
            ended = jobs.start(words, launcher, ranks, self._patience(seconds))
        rows: list[Row] = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
        if rows:  # it has begun
            self._starting = max(rows[0]["starting_s"], 1.0) + 1.0
        for job, row in zip(wanted, chain(rows[1:], repeat(None)), strict=False):
            if row is not None and "failed" not in row:
                # The same ranks started by the hostfile are another measurement than those of this node.
                self._rows.append(row | ({"of_hostfile": len(hosts)} if hosts else {}))
                continue
            what = " ".join(str(job[key]) for key in ("kind", "name", "dtype") if key in job)
            why = NO_TIME if ended.code == TIMED_OUT else ended.complaint() or f"exit code {ended.code}"
            on = f"{count(ranks, 'rank')} of {count(threads, 'thread')}"
            why = row["failed"] if row else why
            self.left_out.append({"part": "training", "what": f"{what}, {on}", "why": why})

    @contextmanager
    def _on(self, hosts: Sequence[str]) -> Iterator[Launcher | None]:
        """Yield what starts ranks on some of the hosts; None for this node."""
        if not hosts:
            yield None
            return
        each = recommended(self._machine).ranks
        assert self._launcher is not None
        is_open = mpirun(self._launcher.words[0])["vendor"] == "Open MPI"
        lines = [f"{host} slots={each}" if is_open else f"{host}:{each}" for host in hosts]
        with tempfile.TemporaryDirectory(prefix=".hosts-", dir=self.options.out.resolve()) as folder:
            path = Path(folder, "hosts")
            path.write_text("".join(f"{line}\n" for line in lines))
            yield find_launcher(self.options.launcher, path)

    # -- the others

    def _exchange(self, ranks: int, seconds: float) -> None:
        if self._launcher is None:
            raise UsageError(self._why_none)
        options = allreduce.AllreduceOptions(
            ranks=ranks,
            launcher=self.options.launcher,
            out=self.options.out,
            max_bytes=self.options.largest_sum,
            seconds=min(ENOUGH, max(1.0, seconds - self._starting)),
        )
        with self._in_time(seconds):
            self._found["exchange"].append(allreduce.start(options, self._patience(seconds)))

    def _generate(self, requests: int, seconds: float) -> None:
        name = self.options.generator
        options = infer.InferOptions(
            preset=name, dtypes=(self._dtype,), requests=(requests,), prompt=PROMPT, new=NEW
        )
        job = infer.job_of(options) | {"repeats": 1}
        patience = self._patience(seconds)
        with self._in_time(seconds):
            found = infer.measure(
                *(options, [(infer.OURS, self._dtype)], job),
                lambda who, job: infer.own_seconds(job, patience),
            )
            self._found["generation"] += [{"preset": name, **row} for row in found["rows"]]

    @contextmanager
    def _in_time(self, seconds: float) -> Iterator[None]:
        """Say of a failure when the time was over that it was that."""
        end = time.monotonic() + self._patience(seconds)
        try:
            yield
        except DistgptError:
            if time.monotonic() < end:
                raise
            raise UsageError(NO_TIME) from None

    def _patience(self, seconds: float) -> float:
        """Return after how many seconds processes are ended that were to take this long: they may compile."""
        return max(1.0, min(self._end - time.monotonic(), PATIENCE * seconds + self._starting))

    def _disk(self, seconds: float) -> None:
        """Write a checkpoint as a run does, and read it from the disk."""
        free = shutil.disk_usage(self.options.out).free
        n_bytes = min(self.options.checkpoint, free // 4, (memory()["available"] or free) // 4)
        values = np.random.default_rng(1).standard_normal(n_bytes // 4 // 3, np.float32)
        parts = {"weights": {"w": values}, "optimizer": {"m": values, "v": values}}
        with tempfile.TemporaryDirectory(prefix=".disk-", dir=self.options.out.resolve()) as folder:
            begun = time.perf_counter()
            path = save_checkpoint(
                Path(folder),
                {name: (tensors, {}) for name, tensors in parts.items()},
                State(1),
                partial(beyond, 1),
            )
            written = time.perf_counter() - begun
            for file in path.iterdir():  # of what was written nothing is to be read from memory
                with file.open("rb") as opened, suppress(OSError, AttributeError):
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            for name, tensors in parts.items():
                load_group(path, name, {key: np.empty_like(value) for key, value in tensors.items()})
            read = time.perf_counter() - begun
        total = 3 * values.nbytes
        self._found["disk"] = {
            "bytes": total,
            "write_s": written,
            "read_s": read,
            "write_bytes_per_s": total / written,
            "read_bytes_per_s": total / read,
        }

    # -- what was found

    def result(self) -> Row:
        """Return all that goes into the file."""

        def of(kind: str) -> list[Row]:
            rows = (row for row in self._rows if row["kind"] == kind)
            return [{key: value for key, value in row.items() if key != "kind"} for row in rows]

        zones, refused = opened_zones()
        found: Row = {
            "minutes": self.options.minutes,
            "seconds": self.seconds(),
            "model": self.options.presets[0],
            "dtype": self._dtype,
            "node": self._node(),
            "bits": judged(of("bits")),
            "peaks": of("peak"),
            "training": of("train"),
            **self._found,
            "energy": sorted({zone.counted for zone in zones}) or refused or "this node shows no counter",
            "left_out": self.left_out,
        }
        return found | {"figures": figures(found)}

    def _node(self) -> Row:
        every = self._machine.usable
        return {
            "sockets": len({cpu.socket for cpu in every}),
            "regions": len({cpu.region for cpu in every}),
            "cores": len(self._machine.cores),
            "cpus": len(every),
            "threads": self._threads,
            "memory_bytes": memory()["total"],
        }


def _doubling(most: int) -> list[int]:
    """7 → [1, 2, 4]: powers of two below it."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most]
