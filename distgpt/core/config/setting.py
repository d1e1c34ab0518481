"""A setting: a dataclass field with its default, help, choices and range."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from distgpt.core.base.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = bool | int | float | str
Values = dict[str, Value]  # setting names → values

LONGEST_TEXT = 4096  # bytes: the maximum path length
LARGEST_INT = (1 << 53) - 1  # the largest integer that floats represent exactly

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting. Bounds `low` and `most` are inclusive, `above` and `below` exclusive."""

    kind: type
    help: str
    choices: Collection[str] = ()
    low: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    group: str = ""  # the section in --help-all
    first: bool = False  # also shown by --help
    flag: str = ""  # the option's spelling; default: "--" and the name
    changeable: bool = False  # may change on resume; earlier steps are not affected
    former_choices: tuple[tuple[str, str], ...] = ()  # old values in existing files, with their new names
    undecided: str = ""  # the option's default, replaced when the run opens; not valid in a configuration

    def parse(self, name: str, text: str) -> Value:
        """Parse a value from text. `check` checks its range."""
        try:
            return {"true": True, "false": False}[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            what = "true or false" if self.kind is bool else f"of type {self.kind.__name__}"
            raise UsageError(f"{name} must be {what}, not {brief(text)}") from None

    def check(self, name: str, value: object) -> None:
        """Raise a UsageError if a value has the wrong type or is out of range."""
        accepted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            raise UsageError(f"{name} must be of type {self.kind.__name__}, not {brief(value)}")
        if isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise UsageError(f"{name} is {value!r:.200}, which is not valid UTF-8")
            if "\0" in value or len(value.encode()) > LONGEST_TEXT:
                raise UsageError(
                    f"{name} must have at most {LONGEST_TEXT} bytes, without NUL: {brief(value)}"
                )
            if self.undecided and value == self.undecided:
                raise UsageError(f"{name} must be one of {', '.join(self.choices)} here, not {value!r}")
            if self.choices and value not in self.choices:
                raise UsageError(f"{name} is {value!r}{did_you_mean(value, self.choices)}")
        elif isinstance(value, int | float) and (wrong := self._out_of_range(value)):
            raise UsageError(f"{name} must be {wrong}, not {brief(value)}")

    def _out_of_range(self, value: float) -> str:
        """Return the violated bound of a number, or ""."""
        if self.kind is float and not abs(value) <= sys.float_info.max:
            return "a finite number"
        if self.low is not None and value < self.low:
            return f"at least {self.low}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        most = LARGEST_INT if self.kind is int and self.most is None else self.most
        if most is not None and value > most:
            return f"at most {most}"
        if self.below is not None and value >= self.below:
            return f"below {self.below}"
        return ""


def brief(value: object) -> str:
    """Return a short representation of any value for a message."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python cannot print 4,300 digits
        return f"a number of about {value.bit_length() * math.log10(2):,.0f} digits"
    return str(value) if isinstance(value, int | float) else reprlib.repr(value)


def setting(default: T, help: str, group: str = "", **known: Any) -> T:
    """Return a dataclass field of this default and type. `known`: other fields of Setting."""
    return field(default=default, metadata={"setting": Setting(type(default), help, group=group, **known)})


def settings_of(config: DataclassInstance | type[DataclassInstance]) -> dict[str, Setting]:
    """Return the settings of a dataclass, or of an instance, by name."""
    return {f.name: f.metadata["setting"] for f in fields(config) if "setting" in f.metadata}


def check(config: DataclassInstance) -> None:
    """Check every setting of a dataclass."""
    for name, about in settings_of(config).items():
        about.check(name, getattr(config, name))
