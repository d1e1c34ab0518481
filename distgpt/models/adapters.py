"""LoRA: low-rank adapters of a frozen model's matrices, trained and merged.

An adapted matrix is w + scale · B A. Each layer merges its matrices just before it runs, in memory that all
layers share. So passes are as fast as without adapters, and the weights exist once, in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import prod
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
from distgpt.core.train.interfaces import ModelKind

EVALUATED_ABOVE_SMALL = 1 << 9  # tokens per pass, equal on ranks with different numbers of threads


class Adapter(Part):
    """B (rows, rank) and A (rank, inputs) for some rows of a matrix. Rank 0 leaves these rows unchanged."""

    def __init__(self, linear: Linear, piece: str, rows: slice, rank: int, scale: float) -> None:
        """`piece`: the matrix that these rows belong to, one of LORA_MATRICES."""
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

    def place(self, whole: Floats2d, frozen: Any) -> None:
        """Set the memory of the merged matrix and of the frozen one, which may be quantized."""
        self._whole, self._frozen = whole[self.rows], frozen[self.rows]

    def merge(self) -> None:
        """Compute these rows of the merged matrix."""
        self.k.add_low_rank(self._whole, self._frozen, self.b, self.a, self.scale)

    def backward(self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d) -> None:
        """inner ← x Aᵀ, and dinner ← its gradient, both (N, rank), for `weight_gradients`."""
        assert self.a is not None and self.b is not None  # Adapters of rank 0 have no backward pass.
        self.k.linear(inner, x, Affine(self.a, None))
        self.k.linear_backward(dinner, dy[:, self.rows], self.b)

    def weight_gradients(
        self, inner: Floats2d, dinner: Floats2d, dy: Floats2d, x: Floats2d, accumulate: bool
    ) -> None:
        """Compute the gradients, except the factor `scale`, which dy includes (`Model.gradient_scale`)."""
        assert self.da is not None and self.db is not None  # Adapters of rank 0 have no gradients.
        self.k.linear_backward_weights(Affine(self.db, None), dy[:, self.rows], inner, accumulate)
        self.k.linear_backward_weights(Affine(self.da, None), dinner, x, accumulate)


def adapters_of(block: Block, t: TrainConfig) -> list[Adapter]:
    """Return a layer's adapters, in the order in which the backward pass finishes their gradients.

    If some rows of a matrix have an adapter, the other rows get one of rank 0, which copies them. With a
    quantized base, all matrices have adapters.
    """
    up = ["gate", "up"][-len(block.fc.heights) :]
    result = []
    for linear, names in (
        (block.proj, ["down"]),
        (block.fc, up),
        (block.out, ["o"]),
        (block.qkv, ["q", "k", "v"]),
    ):
        ranks = [t.lora_rank if name in t.adapted else 0 for name in names]
        end = 0
        for name, height, rank in zip(names, linear.heights or linear.shape[:1], ranks, strict=True):
            if any(ranks) or t.is_base_small:
                result.append(Adapter(linear, name, slice(end, end + height), rank, t.lora_scale))
            end += height
    return result


@dataclass(slots=True)
class AdaptedScratch(Scratch):
    inner: tuple[tuple[Floats2d, Floats2d], ...] = ()  # of each adapter: x Aᵀ and its gradient, (N, rank)


class AdaptedBlock(Block):
    """A layer that trains only its adapters."""

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
        """Yield each adapter with a rank, its memory, and dy and x of its matrix."""
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
    """Return the architecture with adapters. Raises a UsageError if the model lacks an adapted matrix."""
    if not run.model.gated and run.train.lora_matrices != "all" and "gate" in run.train.adapted:
        raise UsageError(f"--lora-matrices {run.train.lora_matrices}: {run.model.mlp} has no gate; omit it")
    return Architecture(run.model, partial(AdaptedBlock, run.train))


def adapters_in(architecture: Architecture) -> list[Adapter]:
    """Return all adapters, in the order in which the backward pass finishes their gradients."""
    return [part for part in architecture.parts() if isinstance(part, Adapter)]


def adapters_by_matrix(run: RunConfig) -> dict[str, list[Adapter]]:
    """Return the adapters that a run trains, by the name of their matrix."""
    result: dict[str, list[Adapter]] = {}
    for adapter in adapters_in(adapted_architecture(run)):
        if adapter.rank:
            result.setdefault(f"{adapter.linear.name}.w", []).append(adapter)
    return result


def adapter_layout(run: RunConfig) -> Layout:
    return Layout(spec for each in adapters_in(adapted_architecture(run)) for spec in each.specs)


class AdaptedModel(Model):
    """A model that trains only its adapters: `params`, `weights`, `grads` and `layout` cover only them.

    `frozen` has the model's own weights, which never change after loading.
    """

    _logits: Array | None = None

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        architecture, trained = adapted_architecture(run), adapter_layout(run)
        own = [spec for spec in architecture.layout.specs if spec.name not in trained.offsets]
        self.held: dict[str, Any] = {}  # matrices in int8 or int4
        if run.train.is_base_small:
            from distgpt.models.quantized.bits import bits_of
            from distgpt.models.quantized.held import held_matrices, with_held

            kernels = with_held(kernels)
            matrices = [spec for spec in own if bits_of(spec, run.train.lora_base)]
            self.held.update(held_matrices(matrices, run.train.lora_base, kernels))
        self.frozen = FlatBuffer(Layout(spec for spec in own if spec.name not in self.held), kernels.zeros)
        made = _placed(adapters_in(architecture), {**self.frozen, **self.held}, kernels)
        super().__init__(architecture, kernels, trained, {**self.frozen, **self.held, **made})
        # One layer at a time, because each layer's merged matrices overwrite the previous layer's.
        self.groups = [range(i, i + 1) for i in range(self.config.n_layer)]
        self.gradient_scale = run.train.lora_scale
        if self.held:
            self.most_evaluated = EVALUATED_ABOVE_SMALL

    def logits(self, shape: tuple[int, int]) -> Array:
        """Share the memory between passes, which run one at a time."""
        if self._logits is None or self._logits.size < prod(shape):
            self._logits = self.kernels.zeros(*shape)
        return self._logits.reshape(-1)[: prod(shape)].reshape(shape)

    def prepare(self, layers: range) -> None:
        for i in layers:
            block = self.blocks[i]
            assert isinstance(block, AdaptedBlock)
            self.kernels.run_together(block.merge)

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        """Draw A as usual (rows of length about 1/√3). B is 0, so the model is initially unchanged."""
        for spec, random in self.generators(seed):
            bound = spec.shape[1] ** -0.5
            values = random.uniform(-bound, bound, spec.shape).astype(np.float32)
            yield spec.name, values * spec.name.endswith("lora_a")


def _placed(adapters: Iterable[Adapter], frozen: Mapping[str, Any], kernels: Kernels) -> dict[str, Array]:
    """Return each adapted matrix by name; all layers share the memory of one layer."""
    made: dict[str, Array] = {}
    result = {}
    for adapter in adapters:
        name = f"{adapter.linear.name}.w"
        kind = name.split(".", 2)[2]
        if kind not in made:
            made[kind] = kernels.zeros(*adapter.linear.shape)
        result[name] = made[kind]
        adapter.place(made[kind], frozen[name])
    return result


ADAPTER = "distgpt-adapter"  # the format of a file with only adapters


def base_of(path: Path) -> Base:
    """Return the path and checksum of the weights file that an adapter belongs to."""
    metadata = read_header(path).metadata
    known = metadata.get(SOURCE_SUM) or metadata.get(DATA_SUM)
    if known is None:
        raise DataError(f"{path} has no checksum, because an old version wrote it; write it again first")
    return Base(str(path.absolute()), known)


def refuse_other_base(adapter: Path, about: Description, weights: Path) -> None:
    """Raise a DataError if the adapter was trained for another model."""
    assert about.base
    if about.base.sha256 != base_of(weights).sha256:
        raise DataError(f"{adapter} was trained for {about.base.file}, not for {weights}")


def with_adapter(weights: Path, adapter: Path | None, comm: Comm) -> tuple[Path, Folding | None]:
    """Return the whole model's weights file, and the merge of the adapter if any. Collective.

    If `weights` is an adapter, or the directory of a run that trained one, the adapter names its model.
    """

    def decide() -> tuple[Path, Path | None]:
        result = weights_of(weights)
        own = read_description(result).base
        if adapter is None and own is None:
            return result, None
        if own and adapter:
            raise UsageError(f"{result} is an adapter; pass its base model as --weights")
        whole, chosen = (Path(own.file), result) if own else (result, find_weights(adapter or result))
        about = read_description(chosen)
        if about.base is None:
            raise UsageError(f"{chosen} is a complete model, not an adapter; pass it as --weights")
        if about.part != ADAPTER:
            raise UsageError(f"{chosen} is a part of kind {about.part!r}; only adapters can be merged")
        if not whole.is_file():
            raise DataError(
                f"{chosen} is an adapter, but {whole} is missing; pass --weights MODEL --adapter {chosen}"
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
    """Read an adapter's tensors. Raises a DataError if any value is not finite."""
    tensors = {spec.name: np.empty(spec.shape, np.float32) for spec in adapter_layout(about.run).specs}
    read_into(path, tensors)
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name} has values that are not finite")
    return tensors


class Folding:
    """A `Merge` that adds an adapter to the model's matrices as they are read."""

    def __init__(self, about: Description, path: Path) -> None:
        self.tokenizer, self._about, self._path = about.tokenizer, about, path
        self._adapters = adapters_by_matrix(about.run)

    def read(self) -> None:
        """Read the adapter. Call it on the rank that reads the model."""
        self._tensors = read_adapter(self._path, self._about)

    def __call__(self, name: str, array: Array) -> None:
        for adapter in self._adapters.get(name, []):
            b, a = (self._tensors[f"{adapter.name}.lora_{kind}"] for kind in "ba")
            with np.errstate(all="ignore"):
                change = np.float32(adapter.scale) * (b @ a)
            if not np.isfinite(change).all():  # Otherwise a later error would name the model's file.
                raise DataError(f"{self._path}: the weights that {adapter.name} adds are not finite")
            array[adapter.rows] += change


def merge(weights: Path | None, adapter: Path, out: Path, comm: Comm) -> str:
    """Write a weights file with the adapter merged into the model. Return a summary."""
    whole, folding = with_adapter(weights or adapter, adapter if weights else None, comm)
    if folding is None:
        raise UsageError(f"{adapter} is a complete model, not an adapter; nothing to merge")
    about, header = read_description(whole), verified(whole)
    if about.rounded:
        raise UsageError(f"{whole} is in {about.rounded}; merge into the original file, then quantize")
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
    return f"{out}: {whole} merged with {adapter}, {size(out.stat().st_size)}"


class AdapterFile:
    """The `PartKind` of adapters."""

    def layout(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def refuse_damaged(self, run: RunConfig, path: Path) -> None:
        if not run.train.lora_rank:
            raise DataError(f"{path} is corrupt: an adapter without a rank in its configuration")

    def describe(self, run: RunConfig) -> str:
        return f"an adapter of rank {run.train.lora_rank} for {run.train.lora_matrices} of"

    def refuse_alone(self, path: Path | str) -> None:
        merge = command_line("weights", "merge", "--adapter", path, "--out", "merged.safetensors")
        raise UsageError(f"{path} is an adapter without its base model; merge them first: {merge}")

    def whole(self, weights: Path, comm: Comm, part: Path | None = None) -> tuple[Path, Folding]:
        whole, folding = with_adapter(weights, part, comm)
        assert folding is not None  # one of the two is an adapter
        return whole, folding


FILES = AdapterFile()


# -- training adapters


class AdapterKind(ModelKind):
    """The model kind of `AdaptedModel`."""

    may_move = frozenset({"init"})  # `reject_origin` compares its content

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        return AdaptedModel(run, kernels)

    def trained(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Include the base model in the description."""
        result = on_root(comm, lambda: base_of(Path(run.train.init)))
        return Description(run, tokenizer, part=ADAPTER, base=result)

    def begins_with(self, t: TrainConfig) -> str:
        """Return "", because --init names the base model and adapters start at random."""
        return ""

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Load the frozen weights tensor by tensor, to avoid a second copy of the model."""
        assert isinstance(model, AdaptedModel)
        path = Path(t.init)
        header = on_root(comm, lambda: verified(path))
        for spec in model.frozen.layout.specs:
            host = np.empty(spec.shape, np.promote_types(model.kernels.accum_dtype, np.float32))
            on_root(comm, lambda: read_float(path, header, spec, host))  # noqa: B023
            if comm.rank == 0:
                model.kernels.put(model.frozen[spec.name], host)
        comm.broadcast(model.frozen.flat)
        # The largest first, while little else is in memory.
        for spec in sorted(model.architecture.layout.specs, key=lambda spec: -spec.size):
            if spec.name in model.held:
                from distgpt.models.quantized.held import load_held

                load_held(comm, path, header, spec, model.held[spec.name], model.kernels.threads)

    def use_of_init(self, t: TrainConfig) -> str:
        return f"gets adapters of rank {t.lora_rank}"

    def reject_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Accept a quantized model, because its adapters can be trained."""
        if not resumed:
            origin.reject_incomplete(weights)
        elif origin.base:
            refuse_other_base(weights, origin, Path(t.init))

    def reject_moved(self, t: TrainConfig) -> None:
        if not Path(t.init).is_file():
            raise DataError(
                f"{t.init} does not exist; pass the new path of this run's base model with --init"
            )


ADAPTERS = AdapterKind()


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError for settings that adapters do not support."""
    if not t.lora_rank:
        raise UsageError(f"--base {t.lora_base} requires adapters, --lora-rank N")
    if not t.init:
        raise UsageError("--lora-rank requires the base model's weights, --init FILE")
    if t.is_base_small and on_gpu:
        raise UsageError(f"--base {t.lora_base} requires a CPU stage; omit it, or use --stage serial or mpi")
    if t.optimizer != "adamw":
        raise UsageError(f"--lora-rank requires --optimizer adamw, not {t.optimizer}")
