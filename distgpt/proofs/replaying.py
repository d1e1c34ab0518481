"""`distgpt replay`: recompute steps of a run, and compare losses, norms and weights with its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import on_root
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.textfile import resolve_data
from distgpt.core.saved.checkpoint import State, load_state, newest_intact, verify
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import HostArray, fingerprint, read_header, read_rows
from distgpt.core.train.plan import Plan, refuse_unsuited
from distgpt.core.train.progress import Finished
from distgpt.core.train.resume import Change
from distgpt.core.train.run import Run
from distgpt.core.train.seams import kind_of
from distgpt.core.train.sharing import WEIGHTS
from distgpt.proofs.kept import Facts, facts_of
from distgpt.proofs.numbers import (
    HERE,
    IN_RUN,
    Apart,
    Tolerance,
    apart,
    are_same,
    distance,
    numbers_apart,
    tolerance_of,
)
from distgpt.proofs.promise import Side, why_rounding
from distgpt.proofs.records import NEUTRAL, Record, Start
from distgpt.proofs.steps import Task, elapsed_at, taken

SAME, ROUNDING, DIFFERENT, UNJUDGED = "same", "rounding", "different", "unjudged"
# What is compared of a step, by its name in metrics.jsonl.
COMPARED = {"loss": "losses", "grad_norm": "gradient norms", "lr": "learning rates"}
ONE_OF = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}
# How far weights may end from the run's, as a part of the way that the steps have moved them.
OFF_COURSE = 0.1
WHOLE_NATS = 0.5  # rounding takes no loss further apart, in whatever step


@dataclass(slots=True)
class Kind:
    """One kind of numbers, step by step. Only steps that were asked for are counted."""

    compared: int = 0
    same: int = 0
    largest: float = 0.0  # relative difference, in the steps that are judged
    first: int | None = None  # the first step that differs
    words: str = ""  # about it
    beyond: int | None = None  # the first step whose difference is more than rounding


@dataclass(slots=True)
class Weights:
    """A checkpoint, tensor by tensor: weights, moments and what else it holds."""

    step: int
    tensors: int = 0
    same: int = 0
    first: Apart | None = None
    off_course: float | None = None  # a part of the way that the weights were moved; None: not measured


@dataclass(slots=True)
class Found:
    """Findings of a replay. Lists are in the order of steps."""

    run: str
    steps: tuple[int, int]  # that were asked for
    begun: int  # the step of the checkpoint, 0 for the first weights
    ranks: int = 1
    ranks_of_run: int | None = None
    why: list[str] = field(default_factory=list)  # why bits may differ; none: they must not
    judged: int = 0  # steps in which differences are held to be rounding or more
    kinds: dict[str, Kind] = field(default_factory=lambda: {name: Kind() for name in COMPARED})
    weights: list[Weights] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        numbers_are_same = all(kind.first is None for kind in self.kinds.values())
        if numbers_are_same and all(each.same == each.tensors for each in self.weights):
            return SAME
        if not self.why or any(kind.beyond is not None for kind in self.kinds.values()):
            return DIFFERENT
        is_off = any(each.off_course is not None and each.off_course > OFF_COURSE for each in self.weights)
        if is_off:
            return DIFFERENT
        return UNJUDGED if self.unjudged == _steps(*self.steps) else ROUNDING

    @property
    def unjudged(self) -> str:
        """Return the steps asked for in which rounding may have grown too far to be told from more."""
        first, last = self.steps
        first = max(first, self.begun + self.judged + 1)
        return _steps(first, last) if self.why and first <= last else ""

    @property
    def is_different(self) -> bool:
        return self.verdict == DIFFERENT

    def to_json(self) -> dict[str, object]:
        return {"verdict": self.verdict, "promised": not self.why, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Request:
    """A request to replay steps `first` to `last`, with these settings in the place of the run's."""

    path: Path
    first: int
    last: int
    values: Mapping[str, bool | int | float | str]  # dtype, data, init
    keeps_threads: bool = True  # takes as many threads as the run had


def replay(request: Request, stage: Stage, say: Say) -> Found | None:
    """Return what was found, on rank 0; None on the others. Collective."""
    again = Again(request, stage, say)
    kept = request.path.resolve().parent / "tokenized"
    taken(again.make, kept, stage, say, again.begun, again.each)
    return again.found if stage.comm.rank == 0 else None


class Again:
    """A replay. Rank 0 alone knows the run's record; the others compute."""

    def __init__(self, request: Request, stage: Stage, say: Say) -> None:
        self._request, self._stage, self._say = request, stage, say
        self._with_weights: dict[int, str] = {}  # the checkpoints to compare, by their steps
        self._first: dict[str, HostArray] = {}  # weights before the first step, where they are needed

    def make(self, folder: Path) -> Task:
        """Return the task, on rank 0."""
        request = self._request
        self.record = record = Record(request.path)
        last = max((*record.steps, *(step for step, _ in record.checkpoints())), default=0)
        if request.last > last:
            raise UsageError(f"{request.path} has {count(last, 'step')}: there is no step {request.last}")
        checkpoint, damaged = _before(record, request.first)
        state = load_state(checkpoint) if checkpoint else State()
        self.starts = _starts(record, state.step, request.first, request.last)
        config = self._settings(record.settings_of(request.last), self.starts[0] if self.starts else None)
        _refuse_other_ranks(config, self.starts, self._stage.comm.size)
        refuse_unsuited(config.train, self._stage.comm.size, self._stage.on_gpu)
        kind_of(config.train).refuse_moved(config.train)
        _refuse_moved_text(config.train)
        steps = range(state.step, request.last)
        self.found = Found(str(request.path), (request.first, request.last), state.step)
        self._refuse_nothing_to_compare(steps)
        self._opening = "\n".join([*damaged, self._from(checkpoint, state.step)])
        facts = self.starts[0].facts if self.starts else None
        plan = _plan(config, RunDirectory(folder), checkpoint, state, request.last)
        if not checkpoint and facts and facts.init and fingerprint(Path(config.train.init)) != facts.init:
            raise DataError(f"{config.train.init} has changed since the run: --init names the old file")
        data = facts.data if facts else state.corpus or ""
        threads = 0
        if facts and self._request.keeps_threads:
            threads = _threads(facts, config.train.reproducible_parts, self._stage.comm.size)
        return Task(plan, data, _elapsed(record, config, steps), record.skipped, threads)

    def _settings(self, config: RunConfig, start: Start | None) -> RunConfig:
        """Return the run's settings, those that memory chose, and none of what is beside the steps."""
        t, values = config.train, dict[str, bool | int | float | str]()
        values |= {"val": "", "hellaswag": "", "eval_every": 0, "sample_every": 0, "save": "sync"}
        values |= {"verify_every": 0}
        facts, size = start.facts if start else None, self._stage.comm.size
        if facts and facts.ranks == size and bool(facts.gpu) == self._stage.on_gpu:
            values["recompute"] = facts.recompute
            if not t.reproducible_parts:
                values["grad_accum"] = facts.micro_batches
        if t.grad_sync == "auto" and size > 1:
            values["grad_sync"] = "allreduce"
        return config.with_values({**values, **self._request.values})

    def _refuse_nothing_to_compare(self, steps: range) -> None:
        known = any(step in self.record.steps for step in range(self._request.first, steps.stop + 1))
        if not known and not self._in_range(self._request.first - 1, steps.stop):
            raise UsageError(
                f"nothing is known of these steps: {self.record.directory.metrics} has none of them, and no"
                " checkpoint is kept after one"
            )

    def _in_range(self, first: int, last: int) -> dict[int, str]:
        return {step: str(path) for step, path in self.record.checkpoints() if first < step <= last}

    def _from(self, checkpoint: Path | None, begun: int) -> str:
        """Describe where the steps begin, and how many come before the first one."""
        first, last = self._request.first, self._request.last
        opening = f"{_steps(first, last)} of {self._request.path}, from {checkpoint or 'its first weights'}"
        before = first - 1 - begun
        if not before:
            return opening
        kept = [step for step, _ in self.record.checkpoints() if step >= first]
        nearest = (
            f"; the next checkpoint that is kept is of step {kept[0]}" if kept and not checkpoint else ""
        )
        more = count(before, "step")
        first_of_all = f"no intact checkpoint is kept of step {first - 1}, so this takes {more} more"
        return f"{opening}\n{first_of_all}{nearest}"

    # Called by all ranks while steps are taken.

    def begun(self, run: Run) -> None:
        """Say what is promised. Collective."""
        facts = facts_of(run)

        def promise() -> list[object]:
            t = self.record.settings_of(self._request.last).train
            found = self.found
            found.ranks = run.comm.size
            found.ranks_of_run = self.starts[0].ranks if self.starts else None
            here = Side(facts, run.settings, HERE)
            reasons = [
                reason
                for then in [start.facts for start in self.starts] or [None]
                for reason in why_rounding(Side(then, t, IN_RUN), here)
            ]
            found.why = list(dict.fromkeys(reasons))
            self._tolerance = tolerance_of(t, run.settings)
            found.judged = self._tolerance.steps
            self._say(f"{self._opening}\n{_promised(found)}")
            # None between the first checkpoint and the first step is intact, or it had begun there.
            return [[*self._in_range(self._request.first - 1, self._request.last).items()], bool(found.why)]

        pairs, is_rounded = on_root(run.comm, promise)
        self._with_weights = dict(pairs)
        if is_rounded and pairs:
            run.checkpoints.on_root(partial(self._keep_first, run))

    def _keep_first(self, run: Run) -> None:
        groups = run.checkpoints.groups()
        self._first = {name: np.array(groups[WEIGHTS][name]) for name in groups[WEIGHTS]}

    def each(self, run: Run, done: Finished) -> None:
        """Compare a step, and its weights where a checkpoint has them. Collective."""
        step = run.progress.step
        if run.comm.rank == 0:
            self._compare_step(step, done)
        if path := self._with_weights.get(step):
            run.checkpoints.on_root(partial(self._compare_weights, run, step, Path(path)))

    def _compare_step(self, step: int, done: Finished) -> None:
        known = self.record.steps.get(step)
        here = {"loss": done.loss, "grad_norm": done.norm, "lr": done.lr}
        for name, kind in self.found.kinds.items():
            if known is None or name not in known:
                continue
            before, now = known[name], here[name]
            is_asked = step >= self._request.first
            kind.compared += is_asked
            if are_same(before, now):
                kind.same += is_asked
                continue
            if kind.first is None:
                kind.first, kind.words = step, numbers_apart(before, now)
            is_far = name == "loss" and before is not None and abs(before - now) > WHOLE_NATS
            self._judge(name, kind, step, distance(before, now), is_far)

    def _judge(self, name: str, kind: Kind, step: int, apart: float, is_far: bool) -> None:
        """Judge a difference in the first steps. Rounding grows: later ones are judged only if far."""
        limit: Tolerance = self._tolerance
        if step - self.found.begun > limit.steps and math.isfinite(apart) and not is_far:
            return
        kind.largest = max(kind.largest, apart) if math.isfinite(apart) else kind.largest
        # A norm is a sum over gradients that rounding moves further than their loss.
        allowed = {"loss": limit.apart, "grad_norm": 100 * limit.apart, "lr": 1e-12}[name]
        if apart > allowed and kind.beyond is None:
            kind.beyond = step

    def _compare_weights(self, run: Run, step: int, path: Path) -> None:
        """Compare all tensors of a checkpoint, in the order of a forward pass, weights first. For rank 0."""
        verify(path)
        found = Weights(step)
        way = {"gone": 0.0, "apart": 0.0}
        for stem, tensors in run.checkpoints.groups().items():
            file = path / f"{stem}.safetensors"
            header = read_header(file) if file.exists() else None
            for name in reversed(list(tensors)):
                if header is None or name not in header.tensors:
                    continue  # of ranks that are not here
                here = tensors[name]
                before = np.empty(header.tensors[name].shape, here.dtype)
                read_rows(file, header, name, before)
                found.tensors += 1
                different = apart(name if stem == WEIGHTS else f"{stem} {name}", before, here)
                found.same += different is None
                found.first = found.first or different
                if stem == WEIGHTS and name in self._first:
                    way["gone"] += float(np.sum(np.square(before - self._first[name], dtype=np.float64)))
                    way["apart"] += float(np.sum(np.square(before - here, dtype=np.float64)))
        if self._first and step - self.found.begun <= self.found.judged:
            found.off_course = math.sqrt(way["apart"] / way["gone"]) if way["gone"] else None
        self.found.weights.append(found)


def _before(record: Record, first: int) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint before a step, and lines about newer ones that are damaged.

    None: the run's first weights come before it.
    """
    damaged = []
    try:
        if newest := newest_intact(record.directory.checkpoints, first - 1):
            return newest
    except DataError as error:
        which = str(error).partition(" is intact: ")[2]  # newer ones may be intact, and are of no use here
        damaged.append(f"no checkpoint before step {first} is intact: {which}")
    origin = record.directory.branched_from()
    if origin is None:
        return None, damaged
    begun = record.starts[0].step if record.starts else 0
    if first <= begun:
        raise UsageError(f"{record.path} begins after step {begun}, of another run: {origin}")
    verify(origin)
    return origin, damaged


def _starts(record: Record, begun: int, first: int, last: int) -> list[Start]:
    """Return the starts that have taken the steps; refuse those that have changed what the steps compute."""
    starts = record.starts_of(begun + 1, last)
    for before, start in pairwise(starts):
        changed = [name for name in start.changes if name not in NEUTRAL]
        if before.facts and start.facts and before.facts.data != start.facts.data:
            changed.append("data")
        if changed:
            kept = any(step == start.step for step, _ in record.checkpoints())
            ways = [f"--steps {first}:{start.step}"] * (first <= start.step)
            ways += [f"--steps {start.step + 1}:{last}"] * kept
            instead = f"replay {' and '.join(ways)}" if ways else "no checkpoint is kept to begin there"
            raise UsageError(
                f"{record.path} resumed after step {start.step} with other settings ({', '.join(changed)}),"
                f" and a replay takes those of one start: {instead}"
            )
    return starts


def _threads(facts: Facts, reproducible_parts: int, size: int) -> int:
    """Return the run's threads if this many ranks need them for the same bits; 0: as the stage has them."""
    return 0 if reproducible_parts or facts.ranks != size else facts.threads[0]


def _refuse_moved_text(t: TrainConfig) -> None:
    """Refuse a text that is not there any more, with what is to be done."""
    if not t.chats:
        try:
            resolve_data(t.data)
        except DataError as error:
            raise DataError(f"{error}; --data says where the run's text lies now") from None


def _refuse_other_ranks(config: RunConfig, starts: list[Start], size: int) -> None:
    """Refuse ranks that would take other steps of their own."""
    t = config.train
    others = {start.ranks for start in starts if start.ranks is not None} - {size}
    if t.outer_every and others:
        ranks = count(min(others), "rank")
        raise UsageError(
            f"--outer-every {t.outer_every} lets each rank take steps of its own, which other numbers of"
            f" ranks cannot: replay on {ranks}"
        )


def _plan(
    config: RunConfig, directory: RunDirectory, checkpoint: Path | None, state: State, last: int
) -> Plan:
    t, origin = config.train, None
    if weights := checkpoint / "weights.safetensors" if checkpoint else t.init:
        origin = read_description(Path(weights))
        kind_of(t).refuse_origin(origin, Path(weights), t, resumed=checkpoint is not None)
    # The text is compared once it is read (`taken`), with a message that suits.
    changes: dict[str, Change] = {"data": (t.data, t.data)}
    return Plan(config, directory, checkpoint, replace(state, best=None), origin, changes, until=last)


def _elapsed(record: Record, config: RunConfig, steps: range) -> dict[int, float]:
    """Return the part of the run's time at each step, where the learning rate follows the clock."""
    found = dict[int, float]()
    for number in steps if config.train.train_minutes else ():
        rate = record.steps.get(number + 1, {}).get("lr")
        if rate is None:
            raise UsageError(
                f"the learning rate of this run follows the clock, and {record.directory.metrics} has none"
                f" of step {number + 1}"
            )
        found[number] = elapsed_at(config.train, number, rate)
    return found


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _promised(found: Found) -> str:
    if not found.why:
        return "the same bits are promised"
    return f"rounding is expected: {'; '.join(found.why)}"


def page(found: Found) -> str:
    """Describe what was found, in a few lines."""
    lines, is_rounding = [], found.verdict == ROUNDING
    for name, kind in found.kinds.items():
        if kind.compared:
            lines.append(f"{COMPARED[name]:<17} {_counted(kind.same, kind.compared)}{_differing(kind)}")
    for each in found.weights:
        about = f"weights, step {each.step}"
        lines.append(f"{about:<17} {_counted(each.same, each.tensors, 'tensors')}{_first(each, is_rounding)}")
    verdicts = {
        SAME: "the same to the bit" + (", which was not promised" if found.why else ""),
        ROUNDING: f"the same within rounding: {_sizes(found)}"
        + (f"; {found.unjudged} not judged" if found.unjudged else ""),
    }
    return "\n".join([*lines, *([verdicts[found.verdict]] if found.verdict in verdicts else [])])


def _counted(same: int, all_: int, what: str = "") -> str:
    return f"{same:,} of {all_:,}{what and ' ' + what} the same to the bit"


def _differing(kind: Kind) -> str:
    return f"; first step {kind.first}: {kind.words}" if kind.first is not None else ""


def _first(each: Weights, is_rounding: bool) -> str:
    if not each.first:
        return ""
    return f"; first {each.first.name if is_rounding else each.first.words()}"


def _sizes(found: Found) -> str:
    loss = f"losses at most {found.kinds['loss'].largest:.1g} of themselves apart"
    off = [each.off_course for each in found.weights if each.off_course is not None]
    return loss + (f", weights {max(off):.1g} of their way" if off else "")


def difference(found: Found) -> str:
    """Return the first step or checkpoint that is not as it must be."""
    places: list[tuple[int, str]] = []
    for name, kind in found.kinds.items():
        step = kind.beyond if found.why else kind.first
        if step is not None:
            places.append((step, f"the {ONE_OF[name]} of step {step}"))
    for each in found.weights:
        is_off = each.off_course is not None and each.off_course > OFF_COURSE
        if each.first and (is_off or not found.why):
            places.append((each.step, f"the weights of step {each.step}, {each.first.name}"))
    return f"{min(places)[1]} first" if places else ""


def undecided(found: Found) -> str:
    """Return why no step was judged, and what to do; "" if that is not the verdict."""
    if found.verdict != UNJUDGED:
        return ""
    judged = f"only the first {found.judged} steps after step {found.begun} are, as rounding grows"
    others = found.ranks_of_run and found.ranks_of_run != found.ranks
    where = f"on {count(found.ranks_of_run or 1, 'rank')}" if others else "where the same bits are promised"
    return f"{found.unjudged} not judged: {judged}; replay {where}"
