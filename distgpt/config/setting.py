"""What is known about one setting, carried by its dataclass field: help, choices, range, flag."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from distgpt.errors import UsageError, nearest

T = TypeVar("T", int, float, bool, str)
ACCEPTED: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}


@dataclass(frozen=True, slots=True)
class Setting:
    """`low` and `most` are allowed values, `above` and `below` are not."""

    kind: type
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    flag: str = ""  # the option's spelling, where it is not "--" and the name
    changeable: bool = False  # on resume: it alters nothing that the steps so far computed

    def check(self, name: str, value: Any) -> None:
        """Refuse a value of the wrong type or out of range with a UsageError."""
        if not isinstance(value, ACCEPTED[self.kind]) or (isinstance(value, bool) and self.kind is not bool):
            raise UsageError(f"{name} is {value!r}: it must be of type {self.kind.__name__}")
        if isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise UsageError(f"{name} is {value!r}, which is not valid UTF-8")
            if self.choices and value not in self.choices:
                raise UsageError(f"{name} is {value!r}{nearest(value, self.choices)}")
        elif wrong := self._out_of_range(value):
            raise UsageError(f"{name} is {value}: it must be {wrong}")

    def _out_of_range(self, value: Any) -> str:
        if not -math.inf < value < math.inf:
            return "a finite number"
        if self.low is not None and value < self.low:
            return f"at least {self.low}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        if self.most is not None and value > self.most:
            return f"at most {self.most}"
        if self.below is not None and value >= self.below:
            return f"below {self.below}"
        return ""


def setting(default: T, help: str, **known: Any) -> T:
    """A dataclass field with this default, of the default's type; `known` are fields of Setting."""
    return field(default=default, metadata={"setting": Setting(type(default), help, **known)})


def settings_of(config: Any) -> dict[str, Setting]:
    """The settings of a dataclass, or of an instance, by name."""
    return {f.name: f.metadata["setting"] for f in fields(config)}


def check(config: Any) -> None:
    """Check every field of a dataclass of settings."""
    for name, about in settings_of(config).items():
        about.check(name, getattr(config, name))
