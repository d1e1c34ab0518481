"""A model that is opened to be used: from its weights file, with a part merged into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import AUTO_DTYPE, ROUNDED_DTYPES, ModelConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description, load_description, load_model, read_description
from distgpt.core.saved.weights import Merge, weights_of


def exact(about: Description) -> str:
    """Return the dtype in which a model is looked at and judged, unless another one is asked for."""
    return "float32"


def dtype_of(
    path: Path, asked: str, comm: Comm, on_gpu: bool = False, usual: Callable[[Description], str] = exact
) -> str:
    """Return the dtype that was asked for; of auto, on CPUs, that of a rounded file, else `usual`.

    Collective; so may `usual` be.
    """
    if asked != AUTO_DTYPE:
        return asked
    about = load_description(path, comm)
    return (about.rounded if not on_gpu else "") or usual(about)


def whole_model(weights: Path, part: Path | None, comm: Comm) -> tuple[Path, Merge | None]:
    """Return the weights file of the whole model, and the part that is merged into it, if any. Collective."""

    def find() -> list[str]:
        found = weights_of(part or weights)
        kind = read_description(found).part
        if part and not kind:
            raise UsageError(f"{found} is a whole model: give it as --weights")
        return [str(found), kind]

    path, kind = on_root(comm, find)
    found = Path(path)
    if part:
        return components().part(kind).whole(weights, comm, found)
    return components().part(kind).whole(found, comm) if kind else (found, None)


def open_model(
    stage: Stage,
    weights: Path,
    dtype: str,
    context: int | None = None,
    matmul: str = "auto",
    usual: Callable[[Description], str] = exact,
    part: Path | None = None,
) -> tuple[Model, Description, Path, str]:
    """Load a model, with a part merged into it. `usual` says what the dtype auto is. Collective.

    Return also the weights file of the whole model, and the type that it computes in.
    """
    whole, merge = whole_model(weights, part, stage.comm)
    chosen = dtype_of(whole, dtype, stage.comm, stage.on_gpu, usual)
    model, about = load_model(whole, stage.kernels(chosen, matmul), stage.comm, context, merge)
    return model, about, whole, chosen


def random_model(config: ModelConfig, dtype: str, kernels_for: Callable[[str], Kernels], seed: int) -> Model:
    """Return a model with random weights that computes in any dtype, also in one that is rounded to."""
    is_rounded = dtype in ROUNDED_DTYPES
    model = Model(Architecture(config), kernels_for("float32" if is_rounded else dtype))
    model.initialise(seed)
    return components().quantized(dtype).of(model) if is_rounded else model
