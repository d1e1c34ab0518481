"""Strict parsing and validation of untrusted JSON.

A dataclass names the keys of an object. Its annotations are the types, with bounds in `Annotated`:

    @dataclass
    class Shard:
        name: Annotated[str, Must("be shorter than 100 characters", lambda name: len(name) < 100)]
        tokens: Count

    shard = read_as(Shard, content, path)  # DataError: PATH is corrupt: tokens is -1: it must be a count

A rule that uses other names of its module must be an alias, because annotations are evaluated elsewhere. The
supported types are int, float, bool, str, object or Any, Literal, `X | None`, list, dict (str keys), tuple
and dataclasses.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from distgpt.core.base.errors import DataError, escape
from distgpt.core.base.formatting import size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DEEPEST_JSON = 64  # nesting levels
# Bytes of JSON, which may take 28 times as much memory. The largest known tokenizer.json files have 35 MB.
LARGEST_JSON = 48 << 20
_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "an object",
    list: "a list",
}

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
Keys = tuple[str | int, ...]  # the path from the root to a value: ("shards", 3, "tokens")
T = TypeVar("T")


class Must(NamedTuple, Generic[T]):
    """A rule for a value of the right type. In messages its text follows "it must"."""

    text: str
    test: Callable[[T], object]


# Most programs read JSON numbers as floats, which are exact below 2⁵³.
Count = Annotated[int, Must("be a count", lambda number: 0 <= number < 1 << 53)]
Positive = Annotated[int, Must("be at least 1", lambda number: 1 <= number < 1 << 53)]


def read_as(kind: type[T], content: bytes, path: Path) -> T:
    """Parse a file's JSON object as a `kind`. A DataError names the file and the key."""
    try:
        return checked(kind, parse_object(content, path))
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {error}") from None


def checked(kind: type[T], value: object, keys: Keys = ()) -> T:
    """Convert a parsed value to a `kind`. A ValueError names the invalid key.

    `keys` is the path to the value in its document.
    """
    return cast(T, _checked(kind, value, keys))


def _checked(kind: object, value: object, keys: Keys) -> object:
    """Check a value against an annotation, which may not be a class."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _checked(parts[0], value, keys)
        for rule in parts[1:]:
            if not rule.test(value):
                raise _wrong(keys, value, rule.text)
        return value
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else _checked(parts[0], value, keys)
    if origin is dict:
        result = _plain(dict, value, keys)
        return {name: _checked(parts[1], each, (*keys, name)) for name, each in result.items()}
    if origin is list:
        return _sequence(parts[0], _plain(list, value, keys), keys)
    if origin is tuple:
        values = _plain(list, value, keys)
        if parts[-1] is ...:
            return tuple(_sequence(parts[0], values, keys))
        if len(values) != len(parts):
            raise _wrong(keys, values, f"have {len(parts)} entries")
        return tuple(_checked(*pair, (*keys, i)) for i, pair in enumerate(zip(parts, values, strict=True)))
    if origin is Literal:
        if not isinstance(value, str) or value not in parts:
            raise _wrong(keys, value, f"be {' or '.join(map(repr, parts))}")
        return value
    if kind in (object, Any):
        return value
    if not isinstance(kind, type):
        raise TypeError(f"{kind} cannot be checked in JSON")
    if is_dataclass(kind):
        return _object(kind, value, keys)
    if kind is float and type(value) is int:
        return float(value)
    return _plain(kind, value, keys)


def _plain(kind: type[T], value: object, keys: Keys) -> T:
    """Return the value if it has exactly this type. In Python, JSON's true is also an int."""
    if isinstance(value, kind) and type(value) is kind:
        return value
    raise _wrong(keys, value, f"be {_TYPE_NAMES[kind]}")


def _sequence(kind: object, values: list[object], keys: Keys) -> list[object]:
    return [_checked(kind, value, (*keys, i)) for i, value in enumerate(values)]


def _object(kind: type[DataclassInstance], value: object, keys: Keys) -> object:
    """Create a dataclass from an object with all required keys and no unknown ones."""
    result, kinds = _plain(dict, value, keys), _kinds(kind)
    missing = {name for name, (_, is_needed) in kinds.items() if is_needed} - result.keys()
    if wrong := missing | (result.keys() - kinds.keys()):
        names = escape(", ".join(sorted(wrong)))
        raise ValueError(f"{_name(keys)} has missing or unknown entries: {names:.80}")
    make: Callable[..., object] = kind
    return make(**{name: _checked(kinds[name][0], each, (*keys, name)) for name, each in result.items()})


@functools.cache
def _kinds(kind: type[DataclassInstance]) -> dict[str, tuple[object, bool]]:
    """Return the annotation of each field and whether it is required."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _wrong(keys: Keys, value: object, rule: str) -> ValueError:
    return ValueError(f"{_name(keys)} must {rule}, not {value!r:.40}")


def _name(keys: Keys) -> str:
    """("shards", 3, "tokens") → "shards[3].tokens"."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return escape(text.removeprefix("."))[:80] or "it"


def parse_object(content: bytes, path: Path) -> JsonObject:
    """Parse a file's JSON object as `parse_json` does. A DataError names the file."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is corrupt: not a JSON object")
    return value


def parse_json(content: bytes | str, largest: int = LARGEST_JSON) -> Json:
    """Parse JSON strictly; raise a ValueError if it exceeds what distgpt writes.

    Reject more than `largest` bytes, duplicate names, numbers that are not finite or exceed 64 bits, unpaired
    surrogates, and deep nesting.
    """
    if len(content) > largest:
        raise ValueError(f"larger than {size(largest)}, the limit for JSON")
    try:
        text = content if isinstance(content, str) else content.decode()
        value: Json = json.loads(
            text,
            object_pairs_hook=_distinct,
            parse_constant=_refuse_number,
            parse_float=_finite,
            parse_int=_integer,
        )
        _refuse_depth(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeError:
        raise ValueError("not valid UTF-8") from None
    return value


def _distinct(pairs: list[tuple[str, Json]]) -> JsonObject:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("duplicate names")
    return result


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"invalid number {text:.20}{'…' if len(text) > 20 else ''}")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _integer(text: str) -> int:
    return number if len(text) <= 20 and abs(number := int(text)) < 1 << 64 else _refuse_number(text)


def _refuse_depth(value: Json) -> None:
    """Reject deep nesting and strings that cannot be encoded."""
    level = [value]
    for _ in range(DEEPEST_JSON):
        inside: list[Json] = []
        for part in level:
            if isinstance(part, dict):
                "".join(part).encode()
                inside += part.values()
            elif isinstance(part, list):
                inside += part
            elif isinstance(part, str) and not part.isascii():
                part.encode()
        if not inside:
            return
        level = inside
    raise ValueError("nested too deeply")
