"""state.json: what a checkpoint says of its run beside weights and moments. No other file knows its keys.

What is missing, as in checkpoints of former versions, has the default here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from distgpt.checked import Count, Must, Positive, checked

MOST_RECENT = 100  # good steps whose losses and gradient norms a state may hold


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss, over this many tokens. Former versions did not save its step."""

    loss: float
    tokens: Positive
    step: Count | None = None


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
    for key, kind in _KEYS.items():
        try:
            checked(kind, document.get(key))
        except ValueError:
            return key
    return ""


_Recent = Annotated[list[tuple[float, float]], Must("be short", lambda steps: len(steps) <= MOST_RECENT)]
_KEYS: dict[str, Any] = {
    "step": Count,
    "world_size": Positive | None,
    "rounds": Count | None,
    "shares": Annotated[list[Positive], Must("not be empty", bool)] | None,
    "places": Count | None,
    "owes_evaluation": bool | None,
    "corpus": str | None,
    "best": Best | None,
    "skipped": Count | None,
    "bad_steps": Count | None,
    "recent": _Recent | None,
}
