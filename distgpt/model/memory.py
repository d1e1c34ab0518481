"""Memory for tensors by name: parameters in one flat buffer, activations over the rows of a batch.

Specs (names and shapes) are laid out (offsets) in a flat buffer, whose tensors are views. A batch is cut into
slabs, stretches of whole sequences that workers compute side by side; so are all arrays with a row per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, cast

from distgpt.kernels.api import Array

ALIGNED = 16  # elements: 64 bytes of float32, and what the widest loads and matmuls on GPUs ask for


LEARNED = "wpe"  # the name of learned positions, (context, width)


@dataclass(frozen=True, slots=True)
class Spec:
    """One named tensor. `decay` says whether weight decay applies to it (matrices only)."""

    name: str
    shape: tuple[int, ...]
    decay: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)


def is_rounded(spec: Spec) -> bool:
    """Whether int8 models have it in int8: matrices, but for learned positions, which multiply nothing."""
    return spec.decay and spec.name != LEARNED


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
            end += -(-spec.size // ALIGNED) * ALIGNED
        self.size = end
        self.elements = sum(spec.size for spec in self.specs)

    def end_of(self, names: Iterable[str]) -> int:
        """Where the last of these tensors ends."""
        sizes = {spec.name: spec.size for spec in self.specs}
        return max(self.offsets[name] + sizes[name] for name in names)

    def views(self, flat: Array) -> dict[str, Array]:
        """Every tensor of this layout as a zero-copy view of `flat`."""
        return {
            spec.name: flat[start : start + spec.size].reshape(spec.shape)
            for spec, start in zip(self.specs, self.offsets.values(), strict=True)
        }

    def stretches(self, own: slice | None = None) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) of the longest stretches that share one decay setting.

        Of the elements `own` only, if that is given, and counted from its start.
        """
        if own is None:
            return list(self._stretches())
        cut = ((max(a, own.start), min(b, own.stop), decay) for a, b, decay in self._stretches())
        return [(a - own.start, b - own.start, decay) for a, b, decay in cut if a < b]

    def _stretches(self) -> Iterator[tuple[int, int, bool]]:
        start, decay = 0, None
        for spec in self.specs:
            begin = self.offsets[spec.name]
            if spec.decay is not decay and decay is not None:
                yield start, begin, decay
                start = begin
            decay = spec.decay
        if decay is not None:
            yield start, self.size, decay


class FlatBuffer(Mapping[str, Array]):
    """One contiguous array holding every tensor of a layout; indexing by name gives the view.

    `whole` is the array with `extra` elements behind the tensors, `flat` without them.
    """

    def __init__(self, layout: Layout, allocate: Callable[[int], Array], extra: int = 0) -> None:
        self.layout = layout
        self.whole = allocate(layout.size + extra)
        self.flat, self.extra = self.whole[: layout.size], self.whole[layout.size :]
        self._views = layout.views(self.flat)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class FlatPart:
    """Some of the elements of a flat buffer, which begin and end anywhere: `flat` holds `own` of them."""

    def __init__(self, layout: Layout, own: slice, allocate: Callable[[int], Array]) -> None:
        self.layout, self.own, self.flat = layout, own, allocate(own.stop - own.start)


class Names(SimpleNamespace):
    """Arrays as attributes. Absent names read as None, as kernels expect it."""

    def __getattr__(self, name: str) -> Any:
        return None


class Rows:
    """Named arrays over the rows of a batch: `all` of them, and `slabs`, views of the rows of each slab.

    An array may be a named tuple of arrays, which are then cut one by one.
    """

    def __init__(self, slabs: Sequence[slice], arrays: Mapping[str, Any]) -> None:
        self.all = Names(**arrays)
        self.slabs = [Names(**{name: _part(x, rows) for name, x in arrays.items()}) for rows in slabs]

    def cut(self, slabs: Sequence[slice]) -> Rows:
        """The first rows of the same arrays, in other slabs."""
        rows = slice(slabs[-1].stop)
        return Rows(slabs, {name: _part(x, rows) for name, x in vars(self.all).items()})

    def add(self, name: str, array: Array) -> None:
        """Add an array that is not cut into slabs."""
        for names in (self.all, *self.slabs):
            setattr(names, name, array)

    def rotate(self, ring: Sequence[str], steps: int = 1) -> None:
        """Each of these names gets the array of the next one, the last that of the first, everywhere."""
        for names in (self.all, *self.slabs):
            arrays = [getattr(names, name) for name in ring]
            for i, name in enumerate(ring):
                setattr(names, name, arrays[(i + steps) % len(ring)])


def _part(x: Any, rows: slice) -> Any:
    if isinstance(x, tuple):
        parts = (None if each is None else each[rows] for each in x)
        return cast(Any, type(x))(*parts)
    return x[rows]
