"""Memory for tensors by name: parameters in one flat buffer, activations over the rows of a batch.

Specs (names and shapes) are laid out (offsets) in a flat buffer, whose tensors are views. A batch is cut into
slices, ranges of whole sequences that workers compute side by side; so are all arrays with a row per token.
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

ALIGNED = 16  # elements: 64 bytes of float32, and what the widest loads and matmuls on GPUs ask for
LEARNED = "wpe"  # the name of learned positions, (context, width)
# Groups of parameters, which may have learning rates of their own.
GROUPS = ("matrix", "embedding", "values", "head", "vector")
MATRIX, EMBEDDING, VALUES, HEAD, VECTOR = GROUPS


@dataclass(frozen=True, slots=True)
class Spec:
    """One named tensor, of one of GROUPS.

    `heights`: the rows of its matrices, where it holds several, one below the other, as q, k and v. Muon,
    for one, takes each by itself, and makes rows of them orthogonal by themselves: where `pieces` has theirs.
    """

    name: str
    shape: tuple[int, ...]
    group: str = VECTOR
    heights: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """True of matrices and embeddings, which are drawn at random, and may decay."""
        return self.group != VECTOR

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Return the shapes of the matrices, one below the other."""
        rows, columns = self.shape
        return [(height, columns) for height in self.heights or (rows,)]

    @property
    def orthogonal(self) -> list[tuple[int, int]]:
        """Return the shapes of what Muon makes orthogonal by itself, one below the other."""
        return [(rows, self.shape[1]) for rows in self.pieces] or self.matrices


class Layout:
    """Specs laid out one after the other, in the order given. Arithmetic only: allocates nothing.

    Every tensor begins at a multiple of ALIGNED elements, so that one of odd size slows down no other; what
    lies in between stays 0.
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
        """Return the offset in `other` of the element at offset `position` of this layout.

        `other` has the same tensors, of which some are shorter, as Muon's second moments are. The element is
        in a tensor that both have alike, or the first of its tensor; `position` may also be the end.
        """
        if position == self.size:
            return other.size
        *_, name = (name for name, start in self.offsets.items() if start <= position)  # of its tensor
        return other.offsets[name] + position - self.offsets[name]

    def end_of(self, names: Iterable[str]) -> int:
        """Return where the last of these tensors ends; 0 if there is none."""
        sizes = {spec.name: spec.size for spec in self.specs}
        return max((self.offsets[name] + sizes[name] for name in names), default=0)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return every tensor of this layout as a zero-copy view of `flat`."""
        return {
            spec.name: flat[start : start + spec.size].reshape(spec.shape)
            for spec, start in zip(self.specs, self.offsets.values(), strict=True)
        }

    def ranges(self, kind: Callable[[Spec], Value], own: slice | None = None) -> list[tuple[int, int, Value]]:
        """Return (start, stop, value) of the longest ranges of tensors with one value of `kind`.

        Tensors of 32, 16 and 16 elements, of kinds a, a and b, give [(0, 48, a), (48, 64, b)]. With `own`,
        of these elements only, counted from its start: of slice(40, 64) they give [(0, 8, a), (8, 24, b)].
        """
        own = own or slice(0, self.size)
        begins = [(self.offsets[next(specs).name], value) for value, specs in groupby(self.specs, key=kind)]
        stops = [*(start for start, _ in begins[1:]), self.size]
        found = []
        for (start, value), stop in zip(begins, stops, strict=True):
            first = max(start, own.start)
            last = min(stop, own.stop)
            if first < last:
                found.append((first - own.start, last - own.start, value))
        return found


class FlatBuffer(Mapping[str, Array]):
    """One contiguous array holding every tensor of a layout; indexing by name gives the view.

    `flat` has the tensors alone, `flags` the values appended to them, `with_flags` both.
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
    """A part of a flat buffer, which begins and ends anywhere: `flat` holds its elements `own`."""

    def __init__(self, layout: Layout, own: slice, allocate: Callable[[int], Array]) -> None:
        self.layout = layout
        self.own = own
        self.flat = allocate(own.stop - own.start)


class Rows(Generic[Record]):
    """A record of arrays over the rows of a batch: `all` rows, and `slices`, the rows of each slice.

    A field is an array, a tuple of arrays, each of which is cut, or None; fields `uncut` stay whole.
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
    if isinstance(x, tuple):  # a named one keeps its type, whose own constructor takes each by itself
        return tuple.__new__(type(x), (_cut_rows(each, rows) for each in x))
    return None if x is None else x[rows]
