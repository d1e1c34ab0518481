"""LoRA: adapters of low rank beside a model's matrices, trained while the model stays as it is; merged.

A matrix is w + scale · B A. A layer makes its own when its turn comes, in memory that all layers share: so
the passes cost what they did, and of the model's weights there is one copy, in the type they compute in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError, command_line
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.layers import (
    Block,
    LayerActivations,
    Linear,
    Part,
    Positions,
    Scratch,
    Tensors,
    gradient_of_pre,
)
from distgpt.core.model.memory import MATRIX, FlatBuffer, Layout, Spec
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Affine, Array, Floats2d, SortedTokens, Wide2d
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Base, Description, load_description, read_description
from distgpt.core.saved.tensors import (
    DATA_SUM,
    LazyTensors,
    read_header,
    read_into,
    write_tensors,
)
from distgpt.core.saved.weights import SOURCE_SUM, find_weights, read_float, verified, weights_of
from distgpt.core.train.seams import ModelKind


class Adapter(Part):
    """B (rows, rank) and A (rank, inputs) beside some rows of a matrix; of rank 0 it is those rows alone."""

    def __init__(self, linear: Linear, piece: str, rows: slice, rank: int, scale: float) -> None:
        """`piece`: the matrix whose rows these are, one of LORA_MATRICES."""
        block = linear.name.rsplit(".", 1)[0]
        name = f"{block}.{piece}"
        height, inputs = rows.stop - rows.start, linear.shape[1]
        shapes = {"b": (height, rank), "a": (rank, inputs)} if rank else {}
        super().__init__(name, [Spec(f"{name}.lora_{kind}", shape, MATRIX) for kind, shape in shapes.items()])
        self.linear = linear
        self.piece = piece
        self.rows = rows
        self.rank = rank
        self.scale = scale

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        self.k = kernels
        self.b, self.a = (params.get(f"{self.name}.lora_{kind}") for kind in "ba")
        self.db, self.da = (grads.get(f"{self.name}.lora_{kind}") for kind in "ba")

    def place(self, whole: Floats2d, frozen: Floats2d) -> None:
        """Say where the layer's matrix is to be made, and what it is made of."""
        self._whole, self._frozen = whole[self.rows], frozen[self.rows]

    def merge(self) -> None:
        """Make these rows of the matrix that the layer computes with."""
        self.k.add_low_rank(self._whole, self._frozen, self.b, self.a, self.scale)

    def backward(self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d) -> None:
        """inner ← x Aᵀ, and the gradient of that: what `weight_gradients` reads. Both (N, rank)."""
        assert self.a is not None and self.b is not None  # it has a rank
        self.k.linear(inner, x, Affine(self.a, None))
        self.k.linear_backward(dinner, dy[:, self.rows], self.b)

    def weight_gradients(
        self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d, accumulate: bool
    ) -> None:
        """Compute the gradients, but for the factor `scale`, which dy has (`Model.gradient_scale`)."""
        assert self.da is not None and self.db is not None  # it has a rank
        self.k.linear_backward_weights(Affine(self.db, None), dy[:, self.rows], inner, accumulate)
        self.k.linear_backward_weights(Affine(self.da, None), dinner, x, accumulate)


def adapters_of(block: Block, t: TrainConfig) -> list[Adapter]:
    """Return a layer's adapters, in the order in which the backward pass finishes their gradients.

    Where some rows of a matrix have an adapter, the others have one of rank 0, which copies them.
    """
    up = ["gate", "up"][-len(block.fc.heights) :]
    found = []
    for linear, names in (
        (block.proj, ["down"]),
        (block.fc, up),
        (block.out, ["o"]),
        (block.qkv, ["q", "k", "v"]),
    ):
        ranks = [t.lora_rank if name in t.adapted else 0 for name in names]
        end = 0
        for name, height, rank in zip(names, linear.heights or linear.shape[:1], ranks, strict=True):
            if any(ranks):
                found.append(Adapter(linear, name, slice(end, end + height), rank, t.lora_scale))
            end += height
    return found


@dataclass(slots=True)
class AdaptedScratch(Scratch):
    inner: tuple[tuple[Floats2d, Floats2d], ...] = ()  # of each adapter: x Aᵀ and its gradient, (N, rank)


class AdaptedBlock(Block):
    """A layer whose adapters alone are trained."""

    def __init__(self, t: TrainConfig, config: ModelConfig, index: int, positions: Positions) -> None:
        super().__init__(config, index, positions)
        self.adapters = adapters_of(self, t)
        self.parts = [*self.parts, *self.adapters]

    def scratch(self, kernels: Kernels, n: int, added: Floats2d | None, again: bool) -> AdaptedScratch:
        plain = super().scratch(kernels, n, added, again)
        ranks = [adapter.rank for adapter in self.adapters if adapter.rank]
        inner = tuple((kernels.zeros(n, rank), kernels.zeros(n, rank)) for rank in ranks)
        return AdaptedScratch(**{each.name: getattr(plain, each.name) for each in fields(plain)}, inner=inner)

    def merge(self) -> None:
        """Make the matrices that this layer computes with, in memory that it shares with the others."""
        for adapter in self.adapters:
            adapter.merge()

    def backward(self, acts: LayerActivations, tmp: Scratch, *others: Any, **named: Any) -> None:
        super().backward(acts, tmp, *others, **named)
        for adapter, inner, dy, x in self._trained(acts, tmp):
            adapter.backward(*inner, dy, x)

    def weight_gradients(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        out_sums: Wide2d | None,
        tokens: SortedTokens,
        accumulate: bool,
    ) -> None:
        super().weight_gradients(acts, tmp, out_sums, tokens, accumulate)
        for adapter, inner, dy, x in self._trained(acts, tmp):
            adapter.weight_gradients(*inner, dy, x, accumulate)

    def _trained(
        self, acts: LayerActivations, tmp: Scratch
    ) -> Iterator[tuple[Adapter, tuple[Floats2d, Floats2d], Floats2d, Floats2d]]:
        """Give each adapter that has a rank, its memory, and dy and x of its matrix."""
        assert isinstance(tmp, AdaptedScratch)
        of = {
            self.proj: (tmp.dout, acts.act),
            self.fc: (gradient_of_pre(acts, tmp), acts.h2),
            self.out: (tmp.dmid, acts.att),
            self.qkv: (tmp.dqkv, acts.h1),
        }
        trained = (adapter for adapter in self.adapters if adapter.rank)
        for adapter, inner in zip(trained, tmp.inner, strict=True):
            yield adapter, inner, *of[adapter.linear]


def adapted_architecture(run: RunConfig) -> Architecture:
    """Return the architecture of a run's model with its adapters. Each must have its matrix in the model."""
    if not run.model.gated and run.train.lora_matrices != "all" and "gate" in run.train.adapted:
        raise UsageError(
            f"--lora-matrices {run.train.lora_matrices}: {run.model.mlp} has no gate: leave it out"
        )
    return Architecture(run.model, partial(AdaptedBlock, run.train))


def adapters_in(architecture: Architecture) -> list[Adapter]:
    """Return all adapters, in the order in which the backward pass finishes their gradients."""
    return [part for part in architecture.parts() if isinstance(part, Adapter)]


def adapters_by_matrix(run: RunConfig) -> dict[str, list[Adapter]]:
    """Return the adapters that a run trains, by the name of the matrix beside which they stand."""
    found: dict[str, list[Adapter]] = {}
    for adapter in adapters_in(adapted_architecture(run)):
        if adapter.rank:
            found.setdefault(f"{adapter.linear.name}.w", []).append(adapter)
    return found


def adapter_layout(run: RunConfig) -> Layout:
    """Return the layout of the adapters that a run trains."""
    return Layout(spec for each in adapters_in(adapted_architecture(run)) for spec in each.specs)


class AdaptedModel(Model):
    """A model whose adapters are what is trained: `params`, `weights`, `grads` and `layout` are theirs.

    `frozen` are the model's own weights, which the passes read and nobody writes once they are loaded.
    """

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        architecture, trained = adapted_architecture(run), adapter_layout(run)
        own = (spec for spec in architecture.layout.specs if spec.name not in trained.offsets)
        self.frozen = FlatBuffer(Layout(own), kernels.zeros)
        made = _placed(adapters_in(architecture), self.frozen, kernels)
        super().__init__(architecture, kernels, trained, {**self.frozen, **made})
        # One layer at a time: its matrices are made where those of the layer before were.
        self.groups = [range(i, i + 1) for i in range(self.config.n_layer)]
        self.gradient_scale = run.train.lora_scale

    def prepare(self, layers: range) -> None:
        for i in layers:
            block = self.blocks[i]
            assert isinstance(block, AdaptedBlock)
            self.kernels.run_together(block.merge)

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        """Draw A as usual, so that its rows are about 1/√3 long; B is 0, and the model what it was."""
        for spec, random in self.generators(seed):
            bound = spec.shape[1] ** -0.5
            values = random.uniform(-bound, bound, spec.shape).astype(np.float32)
            yield spec.name, values * spec.name.endswith("lora_a")


def _placed(adapters: Iterable[Adapter], frozen: FlatBuffer, kernels: Kernels) -> dict[str, Array]:
    """Return each adapted matrix by its name: those of one layer, as all layers share the memory."""
    made: dict[str, Array] = {}
    found = {}
    for adapter in adapters:
        name = f"{adapter.linear.name}.w"
        kind = name.split(".", 2)[2]
        if kind not in made:
            made[kind] = kernels.zeros(*adapter.linear.shape)
        found[name] = made[kind]
        adapter.place(made[kind], frozen[name])
    return found


ADAPTER = "distgpt-adapter"  # the format of a file of adapters alone


def base_of(path: Path) -> Base:
    """Return what an adapter says of the weights file that it stands beside."""
    metadata = read_header(path).metadata
    known = metadata.get(SOURCE_SUM) or metadata.get(DATA_SUM)
    if known is None:
        raise DataError(f"{path} carries no checksum, as files of a former version: write it anew first")
    return Base(str(path.absolute()), known)


def refuse_other_base(adapter: Path, about: Description, weights: Path) -> None:
    """Refuse an adapter that was trained beside another model."""
    assert about.base
    if about.base.sha256 != base_of(weights).sha256:
        raise DataError(
            f"{adapter} is of another model than {weights}: it was trained beside {about.base.file}"
        )


def with_adapter(weights: Path, adapter: Path | None, comm: Comm) -> tuple[Path, Folding | None]:
    """Return the weights file of a whole model, and what merges the adapter into it. Collective.

    Where `weights` is an adapter, or the directory of a run that trained one, it names its model itself.
    """

    def decide() -> tuple[Path, Path | None]:
        found = weights_of(weights)
        own = read_description(found).base
        if adapter is None and own is None:
            return found, None
        if own and adapter:
            raise UsageError(f"{found} is an adapter: as --weights give the model that it stands beside")
        whole, chosen = (Path(own.file), found) if own else (found, find_weights(adapter or found))
        about = read_description(chosen)
        if about.base is None:
            raise UsageError(f"{chosen} is no adapter but a whole model: give it as --weights")
        if about.part != ADAPTER:
            raise UsageError(f"{chosen} holds a part of kind {about.part!r}: only adapters can be merged")
        if not whole.is_file():
            raise DataError(
                f"{chosen} is an adapter, and {whole} is missing: give --weights MODEL --adapter {chosen}"
            )
        refuse_other_base(chosen, about, whole)
        return whole, chosen

    whole, chosen = on_root(comm, decide)
    if chosen is None:
        return whole, None
    folding = Folding(load_description(chosen, comm), chosen)
    on_root(comm, folding.read)
    return whole, folding


def read_adapter(path: Path, about: Description) -> dict[str, Array]:
    """Read an adapter's tensors, and refuse those that are not finite."""
    tensors = {spec.name: np.empty(spec.shape, np.float32) for spec in adapter_layout(about.run).specs}
    read_into(path, tensors)
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name} holds values that are not finite")
    return tensors


class Folding:
    """A `Merge`: adds an adapter to the matrices of its model, as they are read."""

    def __init__(self, about: Description, path: Path) -> None:
        self.tokenizer, self._about, self._path = about.tokenizer, about, path
        self._adapters = adapters_by_matrix(about.run)

    def read(self) -> None:
        """Read the adapter, where the model is read."""
        self._tensors = read_adapter(self._path, self._about)

    def __call__(self, name: str, array: Array) -> None:
        for adapter in self._adapters.get(name, []):
            b, a = (self._tensors[f"{adapter.name}.lora_{kind}"] for kind in "ba")
            with np.errstate(all="ignore"):
                change = np.float32(adapter.scale) * (b @ a)
            if not np.isfinite(change).all():  # else the model's file would be blamed for it later
                raise DataError(f"{self._path}: what {adapter.name} adds to the model is not finite")
            array[adapter.rows] += change


def merge(weights: Path | None, adapter: Path, out: Path, comm: Comm) -> str:
    """Write a weights file with the adapter added to the model's matrices. Return what was done."""
    whole, folding = with_adapter(weights or adapter, adapter if weights else None, comm)
    if folding is None:
        raise UsageError(f"{adapter} is no adapter but a whole model: there is nothing to merge")
    about, header = read_description(whole), verified(whole)
    if about.rounded:
        raise UsageError(f"{whole} is in {about.rounded}: merge into the file that it is from, then quantize")
    specs = {spec.name: spec for spec in Architecture(about.run.model).layout.specs}
    kinds = {name: (np.dtype(np.float32), spec.shape) for name, spec in specs.items()}

    def make(name: str) -> Any:
        array = np.empty(specs[name].shape, np.float32)
        read_float(whole, header, specs[name], array)
        folding(name, array)
        return array

    tokenizer = folding.tokenizer or about.tokenizer
    metadata = {**header.facts(), **Description(about.run, tokenizer).to_metadata()}
    write_tensors(out, LazyTensors(kinds, make), metadata)
    return f"{out}: {whole} with {adapter} merged into it, {size(out.stat().st_size)}"


class AdapterFile:
    """A `PartKind`: adapters beside a model's matrices."""

    def layout(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def refuse_damaged(self, run: RunConfig, path: Path) -> None:
        if not run.train.lora_rank:
            raise DataError(f"{path} is damaged: it is an adapter, and its configuration names no rank")

    def describe(self, run: RunConfig) -> str:
        return f"an adapter of rank {run.train.lora_rank} beside {run.train.lora_matrices} of"

    def refuse_alone(self, path: Path | str) -> None:
        merge = command_line("weights", "merge", "--adapter", path, "--out", "merged.safetensors")
        raise UsageError(f"{path} is an adapter, without the model that it stands beside: first {merge}")

    def whole(self, weights: Path, comm: Comm, part: Path | None = None) -> tuple[Path, Folding]:
        whole, folding = with_adapter(weights, part, comm)
        assert folding is not None  # as one of the two is an adapter
        return whole, folding


FILES = AdapterFile()


# -- a run that trains adapters


class AdapterKind(ModelKind):
    """The kind of an `AdaptedModel`."""

    may_move = frozenset({"init"})  # its content is compared: `refuse_origin`

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        return AdaptedModel(run, kernels)

    def trained(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Name the model that the adapters stand beside, too."""
        found = on_root(comm, lambda: base_of(Path(run.train.init)))
        return Description(run, tokenizer, part=ADAPTER, base=found)

    def begins_with(self, t: TrainConfig) -> str:
        """Adapters are drawn: --init names the model beside which they stand."""
        return ""

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Fill what the adapters stand beside, tensor by tensor, so that nothing is there twice."""
        assert isinstance(model, AdaptedModel)
        path = Path(t.init)
        header = on_root(comm, lambda: verified(path))
        for spec in model.frozen.layout.specs:
            host = np.empty(spec.shape, np.promote_types(model.kernels.wide, np.float32))
            on_root(comm, lambda: read_float(path, header, spec, host))  # noqa: B023
            if comm.rank == 0:
                model.kernels.put(model.frozen[spec.name], host)
        comm.broadcast(model.frozen.flat)

    def use_of_init(self, t: TrainConfig) -> str:
        return f"gets adapters of rank {t.lora_rank}"

    def refuse_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Accept a model that is rounded: adapters may stand beside it."""
        if not resumed:
            origin.refuse_incomplete(weights)
        elif origin.base:
            refuse_other_base(weights, origin, Path(t.init))

    def refuse_moved(self, t: TrainConfig) -> None:
        if not Path(t.init).is_file():
            raise DataError(
                f"{t.init} is not there: --init says where the model of this run's adapters is now"
            )


ADAPTERS = AdapterKind()


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError about what adapters do not go with."""
    if not t.init:
        raise UsageError("--lora-rank trains adapters beside a model's weights: name them with --init FILE")
    if t.optimizer != "adamw":
        raise UsageError(f"--lora-rank does not go with --optimizer {t.optimizer}: use adamw")
