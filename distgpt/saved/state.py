"""state.json: what a checkpoint says of its run beside weights and moments. No other file knows its keys.

What is missing, as in checkpoints of former versions, has the default here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_RECENT = 100  # good steps whose losses and gradient norms a state may hold


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss, over this many tokens. Former versions did not save its step."""

    loss: float
    tokens: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A run after `step` steps."""

    step: int = 0
    seed: int | None = None
    ranks: int | None = None
    corpus: str | None = None  # the fingerprint of the training text
    micro_batches: int = 0  # 0: unknown
    shares: list[int] | None = None  # sequences of each rank in a micro-batch, if they differ
    hosts: int | None = None  # a checksum of the ranks' hosts and threads, if shares depend on them
    best: Best | None = None
    evaluation_pending: bool = False  # one was due after this step, and a signal came first
    skipped: int = 0  # batches that are not seen again, since a bad step was undone
    bad_steps: int = 0
    recent: tuple[tuple[float, float], ...] = ()  # loss and gradient norm of the last good steps

    def to_json(self) -> dict[str, Any]:
        best = self.best and {"loss": self.best.loss, "tokens": self.best.tokens}
        if self.best and best and self.best.step is not None:
            best["step"] = self.best.step
        return {
            "seed": self.seed,
            "world_size": self.ranks,
            "corpus": self.corpus,
            "rounds": self.micro_batches,
            "shares": self.shares,
            "places": self.hosts,
            "best": best,
            "owes_evaluation": self.evaluation_pending,
            "skipped": self.skipped,
            "bad_steps": self.bad_steps,
            "recent": [list(pair) for pair in self.recent],
            "step": self.step,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> State:
        """Read a document in which `damage` finds none."""
        known = {key: value for key, value in document.items() if value is not None}
        best = known.get("best")
        return State(
            step=known["step"],
            seed=known.get("seed"),
            ranks=known.get("world_size"),
            corpus=known.get("corpus"),
            micro_batches=known.get("rounds", 0),
            shares=known.get("shares"),
            hosts=known.get("places"),
            best=best and Best(best["loss"], best["tokens"], best.get("step")),
            evaluation_pending=known.get("owes_evaluation", False),
            skipped=known.get("skipped", 0),
            bad_steps=known.get("bad_steps", 0),
            recent=tuple((loss, norm) for loss, norm in known.get("recent", ())),
        )


def damage(document: Mapping[str, Any]) -> str:
    """Return the first key whose value cannot be right; "" if there is none."""
    return next((key for key, is_right in _KEYS.items() if not is_right(document.get(key))), "")


def is_count(value: Any, low: int = 0) -> bool:
    """Return whether this may be a number of things in a file that is not trusted."""
    return type(value) is int and low <= value < 1 << 53


def _is_loss(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_best(value: Any) -> bool:
    if not isinstance(value, dict) or not is_count(value.get("step", 0)):
        return False
    return _is_loss(value.get("loss")) and is_count(value.get("tokens"), low=1)


def _are_shares(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_count(share, low=1) for share in value)


def _are_steps(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > MOST_RECENT:
        return False
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_loss, pair)) for pair in value)


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


_KEYS: dict[str, Callable[[Any], bool]] = {
    "step": is_count,
    "world_size": _or_none(lambda value: is_count(value, low=1)),
    "rounds": _or_none(is_count),
    "shares": _or_none(_are_shares),
    "places": _or_none(is_count),
    "owes_evaluation": _or_none(lambda value: isinstance(value, bool)),
    "corpus": _or_none(lambda value: isinstance(value, str)),
    "best": _or_none(_is_best),
    "skipped": _or_none(is_count),
    "bad_steps": _or_none(is_count),
    "recent": _or_none(_are_steps),
}
