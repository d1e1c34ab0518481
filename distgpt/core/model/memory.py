"""Memory for tensors by name: parameters in one flat buffer, activations over the rows of a batch.

A layout maps specs (names and shapes) to offsets in a flat buffer, with tensors as views. A batch, and arrays
with a row per token, are split into slices, ranges of whole sequences that workers compute in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distgpt.core.ops.api import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
Value = TypeVar("Value")

ALIGNED = 16  # elements: 64 bytes of float32, as the widest loads and GPU matmuls require
LEARNED = "wpe"  # name of learned positions, (context, width)
PREVIOUS = "previous.w"  # name of the embedding of previous tokens, (padded V, width)
# Groups of parameters, which may have separate learning rates
GROUPS = ("matrix", "embedding", "values", "head", "vector")
MATRIX, EMBEDDING, VALUES, HEAD, VECTOR = GROUPS


@dataclass(frozen=True, slots=True)
class Spec:
    """A named tensor of one of GROUPS.

    `heights`: rows of its stacked matrices, such as q, k and v, if it has more than one. Muon updates each
    separately. `pieces`: rows of the parts that Muon orthogonalizes separately, if smaller.
    """

    name: str
    shape: tuple[int, ...]
    group: str = VECTOR
    heights: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """True for matrices and embeddings: initialized at random, and subject to weight decay."""
        return self.group != VECTOR

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Return the shapes of the stacked matrices."""
        rows, columns = self.shape
        return [(height, columns) for height in self.heights or (rows,)]

    @property
    def orthogonal(self) -> list[tuple[int, int]]:
        """Return the shapes of the stacked parts that Muon orthogonalizes separately."""
        return [(rows, self.shape[1]) for rows in self.pieces] or self.matrices


class Layout:
    """Consecutive specs in the given order, with their offsets. Allocates nothing.

    Every tensor starts at a multiple of ALIGNED elements, so that odd sizes do not slow down the next tensor.
    Gaps stay 0.
    """

    def __init__(self, specs: Iterable[Spec]) -> None:
        self.specs = tuple(specs)
        self.offsets: dict[str, int] = {}
        end = 0
        for spec in self.specs:
            if spec.name in self.offsets:
                raise ValueError(f"two tensors are named {spec.name!r}")
            self.offsets[spec.name] = end
            end += -(-spec.size // ALIGNED) * ALIGNED  # rounded up
        self.size = end
        self.elements = sum(spec.size for spec in self.specs)

    def position_in(self, other: Layout, position: int) -> int:
        """Map an offset in this layout to the same element of `other`.

        `other` has the same tensors, some of them shorter (such as Muon's second moments). The element must
        be in a tensor of equal shape in both, or be the first of its tensor. `position` may also be the end.
        """
        if position == self.size:
            return other.size
        # tensor of this element
        *_, name = (name for name, start in self.offsets.items() if start <= position)
        return other.offsets[name] + position - self.offsets[name]

    def end_of(self, names: Iterable[str]) -> int:
        """Return the end of the last of these tensors, or 0 if there are none."""
        sizes = {spec.name: spec.size for spec in self.specs}
        return max((self.offsets[name] + sizes[name] for name in names), default=0)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return every tensor of this layout as a zero-copy view of `flat`."""
        return {
            spec.name: flat[start : start + spec.size].reshape(spec.shape)
            for spec, start in zip(self.specs, self.offsets.values(), strict=True)
        }

    def ranges(self, kind: Callable[[Spec], Value], own: slice | None = None) -> list[tuple[int, int, Value]]:
        """Return (start, stop, value) of the longest ranges of tensors with equal values of `kind`.

        Tensors of 32, 16 and 16 elements, of kinds a, a and b, give [(0, 48, a), (48, 64, b)]. With `own`,
        only these elements, counted from its start: slice(40, 64) gives [(0, 8, a), (8, 24, b)].
        """
        own = own or slice(0, self.size)
        begins = [(self.offsets[next(specs).name], value) for value, specs in groupby(self.specs, key=kind)]
        stops = [*(start for start, _ in begins[1:]), self.size]
        result = []
        for (start, value), stop in zip(begins, stops, strict=True):
            first = max(start, own.start)
            last = min(stop, own.stop)
            if first < last:
                result.append((first - own.start, last - own.start, value))
        return result


class FlatBuffer(Mapping[str, Array]):
    """A contiguous array with every tensor of a layout. Indexing by name returns the view.

    `flat` has only the tensors, `flags` the values appended to them, `with_flags` both.
    """

    def __init__(self, layout: Layout, allocate: Callable[[int], Array], flags: int = 0) -> None:
        self.layout = layout
        self.with_flags = allocate(layout.size + flags)
        self.flat = self.with_flags[: layout.size]
        self.flags = self.with_flags[layout.size :]
        self._views = layout.views(self.flat)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class FlatPart:
    """Any range of a flat buffer: `flat` has the elements `own`."""

    def __init__(self, layout: Layout, own: slice, allocate: Callable[[int], Array]) -> None:
        self.layout = layout
        self.own = own
        self.flat = allocate(own.stop - own.start)


class Rows(Generic[Record]):
    """A record of arrays over the rows of a batch: `all` rows, and `slices`, the rows of each slice.

    A field is an array, a tuple of arrays that are each split, or None. Fields in `uncut` stay whole.
    """

    def __init__(self, slices: Sequence[slice], record: Record, uncut: Sequence[str] = ()) -> None:
        self.all = record
        self._uncut = uncut
        self.slices = [self._rows(rows) for rows in slices]

    def cut(self, slices: Sequence[slice]) -> Rows[Record]:
        """Return the first rows of the same arrays, in other slices."""
        return Rows(slices, self._rows(slice(slices[-1].stop)), self._uncut)

    def _rows(self, rows: slice) -> Record:
        cut = [field.name for field in fields(self.all) if field.name not in self._uncut]
        return replace(self.all, **{name: _cut_rows(getattr(self.all, name), rows) for name in cut})


def _cut_rows(x: Any, rows: slice) -> Any:
    if isinstance(x, tuple):  # a named tuple keeps its type, whose constructor takes separate arguments
        return tuple.__new__(type(x), (_cut_rows(each, rows) for each in x))
    return None if x is None else x[rows]
