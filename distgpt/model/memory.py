"""Where every number lives: specs (names and shapes), layouts (offsets), buffers (one array, named views)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from distgpt.kernels.api import Array


@dataclass(frozen=True, slots=True)
class Spec:
    """One named tensor. `decay` says whether weight decay applies to it (matrices only)."""

    name: str
    shape: tuple[int, ...]
    decay: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)


class Layout:
    """Specs laid out one after the other, in the order given. Arithmetic only: allocates nothing."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self.specs = tuple(specs)
        self.offsets: dict[str, int] = {}
        end = 0
        for spec in self.specs:
            if spec.name in self.offsets:
                raise ValueError(f"two tensors are named {spec.name!r}")
            self.offsets[spec.name] = end
            end += spec.size
        self.size = end

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

    def runs(self) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, decay) of the longest stretches that share one decay setting."""
        start, end, decay = 0, 0, None
        for spec in self.specs:
            if spec.decay is not decay and decay is not None:
                yield start, end, decay
                start = end
            decay = spec.decay
            end += spec.size
        if decay is not None:
            yield start, end, decay


class FlatBuffer(Mapping[str, Array]):
    """One contiguous array holding every tensor of a layout; indexing by name gives the view.

    `whole` is the array with `extra` numbers behind the tensors, `flat` without them.
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
