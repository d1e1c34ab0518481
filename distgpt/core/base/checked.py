"""JSON that is not trusted: parsed strictly, and made into the types that declare it.

A dataclass names the keys of an object; its annotations are the types, with bounds in `Annotated`:

    @dataclass
    class Shard:
        name: Annotated[str, Must("be shorter than 100 characters", lambda name: len(name) < 100)]
        tokens: Count

    shard = read_as(Shard, content, path)  # DataError: PATH is damaged: tokens is -1: it must be a count

A rule that needs other names of its module stands in an alias, since annotations are evaluated elsewhere.
Known types are int, float, bool, str, Any, Literal, `X | None`, list, dict by name, tuple and dataclasses.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from distgpt.core.base.errors import DataError, escape
from distgpt.core.base.formatting import size

DEEPEST = 64  # levels of lists and objects in JSON
# Bytes of JSON, which may take 28 times as many in memory. The largest tokenizer.json known have 35 MB.
LARGEST = 48 << 20
_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "an object",
    list: "a list",
}


class Must(NamedTuple):
    """A rule for a value of the right type, in words that follow "it must"."""

    words: str
    test: Callable[[Any], bool]


Count = Annotated[int, Must("be a count", lambda number: 0 <= number < 1 << 53)]
Positive = Annotated[int, Must("be at least 1", lambda number: 1 <= number < 1 << 53)]


def read_as(kind: Any, content: bytes, path: Path) -> Any:
    """Return a file's JSON object as what `kind` declares; a DataError names the file and the key."""
    try:
        return checked(kind, parse_object(content, path))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None


def checked(kind: Any, value: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Return a parsed value as what `kind` declares; a ValueError names the key, which lies at `path`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = checked(parts[0], value, path)
        for rule in parts[1:]:
            if not rule.test(value):
                raise _wrong(path, value, rule.words)
        return value
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else checked(parts[0], value, path)
    if is_dataclass(kind):
        return _object(kind, value, path)
    if origin is dict:
        found = _plain(dict, value, path)
        return {name: checked(parts[1], each, (*path, name)) for name, each in found.items()}
    if origin in (list, tuple):
        return _sequence(origin, parts, _plain(list, value, path), path)
    if origin is Literal:
        if not isinstance(value, str) or value not in parts:
            raise _wrong(path, value, f"be {' or '.join(map(repr, parts))}")
        return value
    if kind is Any:
        return value
    if kind is float and type(value) is int:
        return float(value)
    return _plain(kind, value, path)


def _plain(kind: type, value: Any, path: tuple[str | int, ...]) -> Any:
    """Return the value if it has this type; type(), because JSON's true is an int to Python."""
    if type(value) is not kind:
        raise _wrong(path, value, f"be {_WORDS[kind]}")
    return value


def _sequence(origin: Any, parts: Any, values: list[Any], path: tuple[str | int, ...]) -> Any:
    """A list or tuple of any length, or a tuple of as many as are declared."""
    if origin is list or parts[-1] is ...:
        return origin(checked(parts[0], value, (*path, i)) for i, value in enumerate(values))
    if len(values) != len(parts):
        raise _wrong(path, values, f"have {len(parts)} entries")
    return tuple(checked(*pair, (*path, i)) for i, pair in enumerate(zip(parts, values, strict=True)))


def _object(kind: Any, value: Any, path: tuple[str | int, ...]) -> Any:
    """A dataclass of all keys that it declares, but for those with a default, and no others."""
    found, kinds = _plain(dict, value, path), _kinds(kind)
    missing = {name for name, (_, is_needed) in kinds.items() if is_needed} - found.keys()
    if wrong := missing | (found.keys() - kinds.keys()):
        names = escape(", ".join(sorted(wrong)))
        raise ValueError(f"{_name(path)} lacks, or should not have, {names:.80}")
    return kind(**{name: checked(kinds[name][0], each, (*path, name)) for name, each in found.items()})


@functools.cache
def _kinds(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field, and if it has no default."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _wrong(path: tuple[str | int, ...], value: Any, words: str) -> ValueError:
    return ValueError(f"{_name(path)} is {value!r:.40}: it must {words}")


def _name(path: tuple[str | int, ...]) -> str:
    """("shards", 3, "tokens") → "shards[3].tokens"."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return escape(text.removeprefix("."))[:80] or "it"


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, read as `parse_json` does; a DataError names the file."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it is not a JSON object")
    return value


def parse_json(content: bytes | str, largest: int = LARGEST) -> Any:
    """Return the value of a JSON text; a ValueError if it holds more than a program of ours writes.

    Refused are more than `largest` bytes, names that occur twice, numbers that are not finite or of more than
    64 bits, halves of surrogate pairs, and depth.
    """
    if len(content) > largest:
        raise ValueError(f"it is larger than {size(largest)}, the most that is read of JSON")
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(
            text,
            object_pairs_hook=_distinct,
            parse_constant=_refuse_number,
            parse_float=_finite,
            parse_int=_integer,
        )
        _refuse_depth(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError:
        raise ValueError("it is not valid UTF-8") from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in it")
    return found


def _refuse_number(text: str) -> Any:
    raise ValueError(f"it holds the number {text:.20}{'…' if len(text) > 20 else ''}")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _integer(text: str) -> int:
    return number if len(text) <= 20 and abs(number := int(text)) < 1 << 64 else _refuse_number(text)


def _refuse_depth(value: Any) -> None:
    """Refuse deep nesting, and texts that cannot be encoded."""
    level = [value]
    for _ in range(DEEPEST):
        inside: list[Any] = []
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
    raise ValueError("it is nested too deeply")
