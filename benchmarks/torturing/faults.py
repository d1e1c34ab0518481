"""The fault of a trial, chosen by the campaign's seed and the trial's number.

To test other options of `distgpt train`, add a row to MODES.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# Settings of a trial's run: steps, steps between saves, saves kept, steps between evaluations.
STEPS, EVERY, KEEP, EVALUATED = 16, 4, 2, 6


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to start a run.

    loses: the maximum number of steps that a killed run repeats.
    goes_on: continues if a file cannot be written.
    close: relative tolerance of losses on another number of ranks.
    rises: the lowest validation loss comes early, so the best weights are not written again.
    """

    name: str
    ranks: int = 1
    words: tuple[str, ...] = ()
    loses: int = EVERY
    goes_on: bool = True
    close: float = 1e-3
    rises: bool = False


RISING = ("--lr", "15", "--warmup", "10", "--schedule", "constant", "--clip", "0")
# A background save may end when the next one is due, and is lost if the process is killed before.
MODES = (
    Mode("serial", 1, (), 2 * EVERY),
    Mode("mpi", 2, (), 2 * EVERY),
    Mode("serial, sync", 1, ("--save", "sync")),
    Mode("mpi, sync", 2, ("--save", "sync")),
    Mode("mpi, sharded", 2, ("--grad-sync", "sharded")),
    Mode(
        "mpi, overlapped in bfloat16",
        2,
        ("--grad-sync", "overlapped", "--gradient-dtype", "bfloat16"),
        2 * EVERY,
    ),
    Mode("mpi, local steps", 2, ("--outer-every", "3"), 2 * EVERY, close=0.2),
    Mode("mpi, disk errors end it", 2, ("--set", "on_disk_error=stop"), 2 * EVERY, goes_on=False),
    Mode("serial, rising loss", 1, RISING, 2 * EVERY, rises=True),
    Mode("serial, sync, rising loss", 1, ("--save", "sync", *RISING), rises=True),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault during one attempt at a run.

    `what`: "signal", "error", "full" (a small disk), "twice" (a second process starts) or "nothing".
    `where`: at a call of the third "save", "elsewhere", at the "start" of an attempt (`turn`), at a call
    of the "run" or while "reading", at a "moment" or at a "step" (`part` of them all).
    """

    what: str
    name: str = ""  # SIGKILL …, ENOSPC …, short, torn
    to: str = "0"  # receiver of a signal: a rank, "all" or "launcher"
    where: str = "run"
    turn: int = 0
    part: float = 0.0
    times: int = 1  # number of failing calls; 0: all later calls
    pause: float = 0.0  # seconds until SIGCONT
    clock: str = ""  # time and size of the clock's jump, in the format of faulty.c


@dataclass(frozen=True, slots=True)
class Damage:
    """Corruption of a file after the first attempt; `which` and `place` are fractions."""

    how: str
    which: float
    place: float
    seed: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The last of `ranks` is for all further attempts, which have no fault."""

    number: int
    kind: str
    mode: str
    ranks: tuple[int, ...]
    faults: tuple[Fault, ...]
    damage: Damage | None = None


@dataclass(frozen=True, slots=True)
class Campaign:
    """Determines the trials. `calls` is the number of system calls to test in each place."""

    seed: int
    modes: tuple[str, ...]
    kinds: tuple[str, ...]
    calls: dict[str, int]

    def trial(self, number: int) -> Trial:
        cycle = [kind for kind in CYCLE if kind in self.kinds]
        rounds, place = divmod(number, len(cycle))
        kind = cycle[place]
        turn = rounds * cycle.count(kind) + cycle[:place].count(kind)
        draw = _Draw(random.Random(f"{self.seed}/{number}"), self, turn)
        return CHOICES[kind](draw, number, kind)


class _Draw:
    """The random choices of one trial. `turn` counts the trials of its kind."""

    def __init__(self, chance: random.Random, campaign: Campaign, turn: int) -> None:
        self.chance, self.turn = chance, turn
        self.modes = [mode for name in campaign.modes for mode in MODES if mode.name == name]
        self.calls = campaign.calls

    def mode(self) -> Mode:
        return self.chance.choice(self.modes)

    def in_turn(self, place: str, options: Sequence[tuple[Mode, str, str]]) -> tuple[Mode, str, str]:
        """Combine each option with each call once, with the call chosen by `turn`."""
        rounds, call = divmod(self.turn, self.calls[place])
        return options[(rounds + call) % len(options)]

    def whom(self, mode: Mode) -> str:
        if mode.ranks == 1:
            return "0"
        return self.chance.choice(["launcher", "all", *map(str, range(mode.ranks))])

    def anywhere(self) -> dict[str, object]:
        """Choose a moment by the clock, the run's progress or its system calls."""
        return {"where": self.chance.choice(("moment", "step", "run")), "part": self.chance.random()}


KILL, ASKING = "SIGKILL", ("SIGTERM", "SIGUSR1", "SIGINT")
ERRORS = ("ENOSPC", "EIO", "short", "EDQUOT", "torn")
DAMAGES = ("a bit", "bytes", "zeros", "cut", "emptied", "more", "gone")
YEAR = 365 * 86400
JUMPS = (-30 * YEAR, -YEAR, -86400, -3600, -61, -1, 1, 61, 3600, 86400, YEAR, 30 * YEAR)


def _one(fault: Fault, mode: Mode, number: int, kind: str) -> Trial:
    return Trial(number, kind, mode.name, (mode.ranks,), (fault,))


def _whom_in_turn(draw: _Draw, signals: Sequence[str]) -> list[tuple[Mode, str, str]]:
    found = []
    for to in ("0", "1", "launcher", "all"):
        found += [(mode, name, to) for name in signals for mode in draw.modes if mode.ranks > 1 or to == "0"]
    return found


def _signal_in_turn(place: str, signals: Sequence[str]) -> Callable[[_Draw, int, str], Trial]:
    def trial(draw: _Draw, number: int, kind: str) -> Trial:
        mode, name, to = draw.in_turn(place, _whom_in_turn(draw, signals))
        return _one(Fault("signal", name, to, place, draw.turn), mode, number, kind)

    return trial


def _error_in_turn(place: str) -> Callable[[_Draw, int, str], Trial]:
    def trial(draw: _Draw, number: int, kind: str) -> Trial:
        options = [(mode, name, often) for name in ERRORS for often in "10" for mode in draw.modes]
        mode, name, often = draw.in_turn(place, options)
        return _one(Fault("error", name, where=place, turn=draw.turn, times=int(often)), mode, number, kind)

    return trial


def _in_resuming(choose: Callable[[_Draw, int, str], Trial]) -> Callable[[_Draw, int, str], Trial]:
    """Kill a run and, when it resumes, cause a random fault."""

    def trial(draw: _Draw, number: int, kind: str) -> Trial:
        chosen = choose(draw, number, kind)
        killed = Fault("signal", KILL, where="step", part=draw.chance.uniform(0.3, 1))
        return replace(chosen, faults=(killed, *chosen.faults))

    return trial


def _killed(draw: _Draw, mode: Mode) -> Fault:
    return Fault("signal", KILL, draw.whom(mode), **draw.anywhere())  # type: ignore[arg-type]


def _asked(draw: _Draw, mode: Mode) -> Fault:
    name = draw.chance.choice(ASKING)
    return Fault("signal", name, draw.whom(mode), **draw.anywhere())  # type: ignore[arg-type]


def _failing(draw: _Draw, mode: Mode) -> Fault:
    name, times = draw.chance.choice(ERRORS), draw.chance.choice((0, 1, 1, 3))
    return Fault("error", name, where="run", part=draw.chance.random(), times=times)


def _stopped(draw: _Draw, mode: Mode) -> Fault:
    pause = draw.chance.choice((0.05, 0.3, 1.0, 2.5))
    return Fault("signal", "SIGSTOP", draw.whom(mode), pause=pause, **draw.anywhere())  # type: ignore[arg-type]


def _single(choose: Callable[[_Draw, Mode], Fault]) -> Callable[[_Draw, int, str], Trial]:
    def trial(draw: _Draw, number: int, kind: str) -> Trial:
        mode = draw.mode()
        return _one(choose(draw, mode), mode, number, kind)

    return trial


def _error_in_reading(draw: _Draw, number: int, kind: str) -> Trial:
    """Kill a run, and let reads fail when it resumes."""
    mode = draw.mode()
    name = draw.chance.choice(("EIO", "EIO", "EACCES"))
    times = draw.chance.choice((1, 1, 2, 0))
    reading = Fault("error", name, where="reading", part=draw.chance.random(), times=times)
    killed = Fault("signal", KILL, where="step", part=draw.chance.uniform(0.3, 1))
    return Trial(number, kind, mode.name, (mode.ranks,), (killed, reading))


def _several(draw: _Draw, number: int, kind: str) -> Trial:
    mode = draw.mode()
    kinds = draw.chance.choices((_killed, _asked, _failing), k=draw.chance.choice((2, 3, 4)))
    return Trial(number, kind, mode.name, (mode.ranks,), tuple(choose(draw, mode) for choose in kinds))


def _damage(draw: _Draw, number: int, kind: str) -> Trial:
    mode, chance = draw.mode(), draw.chance
    first = Fault("signal", chance.choice((KILL, "SIGTERM")), where="step", part=chance.uniform(0.2, 1))
    damage = Damage(chance.choice(DAMAGES), chance.random(), chance.random(), chance.randrange(1 << 30))
    return Trial(number, kind, mode.name, (mode.ranks,), (first,), damage)


def _ranks(draw: _Draw, number: int, kind: str) -> Trial:
    """Interrupt at most twice, and resume on another number of ranks each time."""
    mode, chance = draw.mode(), draw.chance
    numbers = chance.sample((1, 2, 3, 4), k=chance.choice((2, 3)))
    faults = tuple(
        Fault("signal", chance.choice((KILL, *ASKING)), where="step", part=chance.uniform(0.2, 0.9))
        for _ in numbers[1:]
    )
    return Trial(number, kind, mode.name, tuple(numbers), faults)


def _clock(draw: _Draw, number: int, kind: str) -> Trial:
    """Let all ranks' clocks jump, during the run and between a kill and the next attempt."""
    mode, chance = draw.mode(), draw.chance
    first, second = (f"{chance.uniform(0, 2):.3f}:{chance.choice(JUMPS)}" for _ in range(2))
    faults = [Fault("nothing", clock=f"{first},{second}")]
    if chance.random() < 0.6:
        killed = Fault("signal", KILL, "0", clock=first, where="step", part=chance.random())
        faults = [killed, Fault("nothing", clock=f"0:{chance.choice(JUMPS)}")]
    return Trial(number, kind, mode.name, (mode.ranks,), tuple(faults))


CHOICES: dict[str, Callable[[_Draw, int, str], Trial]] = {
    "kill in a save": _signal_in_turn("save", [KILL]),
    "signal in a save": _signal_in_turn("save", ASKING),
    "error in a save": _error_in_turn("save"),
    "kill elsewhere": _signal_in_turn("elsewhere", [KILL]),
    "error elsewhere": _error_in_turn("elsewhere"),
    "kill in resuming": _in_resuming(_signal_in_turn("start", [KILL])),
    "error in resuming": _in_resuming(_error_in_turn("start")),
    "kill": _single(_killed),
    "signal": _single(_asked),
    "stop and go": _single(_stopped),
    "error": _single(_failing),
    "error in reading": _error_in_reading,
    "full disk": _single(lambda draw, mode: Fault("full", part=draw.chance.random())),
    "several": _several,
    "damage": _damage,
    "ranks": _ranks,
    "clock": _clock,
    "twice": _single(lambda draw, mode: Fault("twice", part=draw.chance.random() ** 2)),
}
_OFTEN = {"kill in a save": 4, "error in a save": 5, "signal in a save": 3, "signal": 2, "damage": 3}
_OFTEN |= {"kill elsewhere": 3, "error elsewhere": 3, "kill in resuming": 2, "error in resuming": 3}
# The kinds in mixed order, as often as they occur in a round.
CYCLE = [kind for turn in range(5) for kind in CHOICES if turn < _OFTEN.get(kind, 1)]
# Kinds with only one variant.
WITH_LIBRARY: tuple[str, ...] = ("kill in a save", "signal in a save", "error in a save", "kill elsewhere")
WITH_LIBRARY += (
    "error elsewhere",
    "kill in resuming",
    "error in resuming",
    "error",
    "error in reading",
    "several",
    "clock",
)
