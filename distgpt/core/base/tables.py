"""Tables of what there is of a kind, by name. Some rows are the core's own, others lie in components.

The program hands in where those lie, as import paths. A row is imported when it is first asked for, so a run
imports the components that it needs and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from distgpt.core.base.errors import UsageError

Row = TypeVar("Row")

_paths: dict[str, Mapping[str, str]] = {}  # of each table, where its rows lie: name → "module:object"


def hand_in(paths: Mapping[str, Mapping[str, str]]) -> None:
    """Say where the rows of tables lie that are not the core's own. Called once, by distgpt/__init__.py."""
    _paths.update(paths)


def paths_in(table: str) -> Mapping[str, str]:
    """Return what was handed in for a table, and import nothing of it."""
    return _paths.get(table, {})


class MissingComponent(UsageError):
    """A row that is in a table, and whose component is not installed."""


def lacks_component(error: ImportError) -> bool:
    """Tell whether a part of distgpt could not be imported, and not a library."""
    return (error.name or "").startswith("distgpt.")


def imported(path: str, what: str) -> Any:
    """Import what a path names, as in "package.module:name"; `what` is what errors call it."""
    module, _, attribute = path.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        is_missing = f"{module}.".startswith(f"{error.name}.")
        if not is_missing and not lacks_component(error):  # the module is there, and lacks a library
            raise
        missing = module if is_missing else error.name
        why = "which is not installed here" if lacks_component(error) else "and Python finds no such module"
        hint = "" if lacks_component(error) else ": is its folder in PYTHONPATH?"
        raise MissingComponent(f"{what} needs {missing}, {why}{hint}") from None
    if not hasattr(found, attribute):
        raise UsageError(f"{what} needs {attribute!r} of {module}, which has no such name")
    return getattr(found, attribute)


class Table(Generic[Row]):
    """The rows of one table. `what` is what errors call a row."""

    def __init__(self, name: str, what: str, own: Mapping[str, Row]) -> None:
        self.name, self._what, self._own = name, what, own

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all rows, the core's own first. Imports nothing."""
        yield from self._own
        yield from paths_in(self.name)

    def rows(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Import all rows or these, and yield them by name; leave out those of missing components."""
        for name in self if names is None else names:
            try:
                row = self[name]
            except MissingComponent:
                continue
            yield name, row

    def missing(self) -> MissingComponent | None:
        """Return the error of a row whose component is missing; None if all are here."""
        for name in self:
            try:
                self.get(name)
            except MissingComponent as error:
                return error
        return None

    def get(self, name: str) -> Row | None:
        """Return a row; None where the table has no such name."""
        if name in self._own:
            return self._own[name]
        path = paths_in(self.name).get(name)
        return imported(path, f"{self._what} {name!r}") if path else None

    def __getitem__(self, name: str) -> Row:
        row = self.get(name)
        if row is None:
            raise UsageError(f"{self._what} {name!r} is not known here; known: {', '.join(self)}")
        return row


# By the names that settings and options give: what a value other than the default needs.
COMPONENTS: Table[object] = Table("components", "component", {})


def part(name: str, plain: Row) -> Row:
    """Return a part of a run from its component; the core's plain one where that is not installed.

    What only the component can do is refused elsewhere, by `COMPONENTS`.
    """
    path = paths_in("parts").get(name)
    try:
        return imported(path, name) if path else plain
    except MissingComponent:
        return plain
