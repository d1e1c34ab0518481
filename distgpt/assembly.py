"""The installed program: the code that runs for each setting, in one place.

Each method overrides one of `core/components.py`. Imports are inside the methods, so that a run loads only
the code that it uses. An extension derives its class from `AllComponents`.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING

from distgpt.core.base.errors import UsageError, did_you_mean, first_line, reject_combination
from distgpt.core.components import Components

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from distgpt.core.base.errors import Say
    from distgpt.core.comm.affinity import Affinity
    from distgpt.core.comm.api import Comm
    from distgpt.core.comm.job import Job
    from distgpt.core.comm.resources import Grants
    from distgpt.core.config import TrainConfig
    from distgpt.core.cpu.stages import MakeKernels, StageKind
    from distgpt.core.data.batches import Batches
    from distgpt.core.data.loading import TextKind
    from distgpt.core.data.tokenizers import TokenizerKind
    from distgpt.core.generate.slots import SlotKind
    from distgpt.core.model.model import Model
    from distgpt.core.saved.checkpoint import RetentionPolicy
    from distgpt.core.saved.modelfile import Description
    from distgpt.core.saved.rundir import RunDirectory
    from distgpt.core.saved.weights import PartKind, QuantizedFormat
    from distgpt.core.train.assessment import MetricKind, Validation
    from distgpt.core.train.interfaces import Budget, Callback, Disk, ModelKind, StepPolicy, Times
    from distgpt.core.train.parallel_strategy import GradientSync, OptimizerState, Strategy
    from distgpt.core.train.progress import Pace, Progress
    from distgpt.core.train.run import Limits, Run
    from distgpt.core.train.setup import FirstWeights

DOCUMENT_ENDINGS = (".jsonl", ".parquet", ".gz")
COMPONENTS = "DISTGPT_COMPONENTS"  # environment variable that names a class for every command
FACTORIES = [name for name in vars(Components) if not name.startswith("_")]


class AllComponents(Components):
    """All installed components."""

    # Process

    def job(self) -> Job:
        from distgpt.cluster.launch.job import LAUNCHED

        return LAUNCHED

    def affinity(self) -> Affinity:
        from distgpt.cluster.affinity.bind import PLACED

        return PLACED

    def grants(self) -> Grants:
        from distgpt.cluster.launch.environment import GRANTS

        return GRANTS

    def stage(self, name: str) -> StageKind:
        if name in ("cuda", "mpi-cuda"):
            from distgpt.gpu.stage import GPU

            return GPU
        return super().stage(name)

    def kernels(self, dtype: str) -> MakeKernels:
        if dtype in self.quantized_dtypes:
            from distgpt.inference.quantized.kernels import Int8Kernels

            return lambda stage, dtype, matmul: Int8Kernels(stage.threads, dtype)
        return super().kernels(dtype)

    def slots(self, model: Model) -> SlotKind:
        from distgpt.core.cpu.kernels import CpuKernels

        kernels = model.kernels
        if kernels.capabilities.is_async:
            from distgpt.inference.decoding.batched import BATCHED

            return BATCHED
        # A token takes one compiled call, except in float64, which no tile supports, and while a model is
        # trained: packing its weights again takes longer than a few tokens.
        is_fast = isinstance(kernels, CpuKernels) and kernels.dtype.name != "float64"
        if is_fast and not model.is_trained and model.config.mlp not in self.activations:
            from distgpt.inference.decoding.compiled import COMPILED

            return COMPILED
        return super().slots(model)

    # Text and files

    def text_kind(self, data: str) -> str:
        from distgpt.core.data.textfile import resolve_data

        if ":" in data:
            from distgpt.corpora.mixture import sources_of

            if sources := sources_of(data):
                for name in sources:
                    resolve_data(name)
                return "mixture"
        path = resolve_data(data)
        if path.is_dir():
            return "shards" if (path / "manifest.json").is_file() else "documents"
        return "documents" if path.name.lower().endswith(DOCUMENT_ENDINGS) else super().text_kind(data)

    def text(self, kind: str) -> TextKind:
        if kind == "documents":
            from distgpt.corpora.prepare.tokenized import DOCUMENTS

            return DOCUMENTS
        if kind == "shards":
            from distgpt.corpora.shards import SHARDS

            return SHARDS
        if kind == "mixture":
            from distgpt.corpora.mixture import MIXTURE

            return MIXTURE
        if kind == "packing":
            from distgpt.corpora.packing import PACKED

            return PACKED
        if kind == "chats":
            from distgpt.corpora.chats.examples import CHATS

            return CHATS
        return super().text(kind)

    def batches(self, t: TrainConfig) -> type[Batches]:
        if t.input_noise:
            from distgpt.corpora.noise import NoisyBatches

            return NoisyBatches
        return super().batches(t)

    tokenizers = (*Components.tokenizers, "char", "word", "bpe", "gpt2", "hub", "library")

    def tokenizer(self, name: str) -> TokenizerKind | None:
        if name in ("char", "word"):
            from distgpt.corpora.tokenizers.collected import CHARACTERS, WORDS

            return CHARACTERS if name == "char" else WORDS
        if name == "bpe":
            from distgpt.corpora.tokenizers.bpe import BPE

            return BPE
        if name in ("gpt2", "hub", "library"):
            from distgpt.corpora.tokenizers.third_party import GPT2, HUB, LIBRARY

            return {"gpt2": GPT2, "hub": HUB, "library": LIBRARY}[name]
        return super().tokenizer(name)

    def weights(self, scheme: str, name: str, fetches: bool) -> Path | None:
        if scheme == "hub":
            from distgpt.models.formats.huggingface import fetched_weights

            return fetched_weights(name, fetches)
        return super().weights(scheme, name, fetches)

    def imported(self, path: Path) -> Path | None:
        if path.suffix == ".gguf" or (path / "config.json").is_file():
            from distgpt.models.formats.gguf.transfer import imported_weights

            return imported_weights(path)
        return super().imported(path)

    quantized_dtypes = ("int8", "int4")

    def quantized(self, dtype: str) -> QuantizedFormat:
        if dtype in self.quantized_dtypes:
            from distgpt.models.quantized.rounded import INT4, INT8

            return INT8 if dtype == "int8" else INT4
        return super().quantized(dtype)

    parts = ("distgpt-adapter",)

    def part(self, format: str) -> PartKind:
        if format == "distgpt-adapter":
            from distgpt.models.adapters import FILES

            return FILES
        return super().part(format)

    # Run

    def reject_unsuited(self, t: TrainConfig, ranks: int, on_gpu: bool) -> None:
        if t.input_noise:
            others = {"pack": t.pack, "chats": t.chats}
            reject_combination("input_noise", others, "packed documents are read as they are")
        if t.chats:
            from distgpt.corpora.chats.examples import check as check_chats

            check_chats(t, ranks, on_gpu)
        if t.patience:
            ends = {"outer-every": bool(t.outer_every), "set train_minutes": bool(t.train_minutes)}
            reject_combination("--patience", ends, "it ends the run after any step")
        if t.lora_rank or t.is_base_small:
            from distgpt.models.adapters import check as check_lora

            check_lora(t, ranks, on_gpu)
        if ranks > 1 or t.reproducible_parts:
            from distgpt.parallel.choose import check as check_sharing

            check_sharing(t, ranks, on_gpu)

    def model(self, t: TrainConfig) -> ModelKind:
        if t.lora_rank:
            from distgpt.models.adapters import ADAPTERS

            return ADAPTERS
        return super().model(t)

    def first_weights(self, name: str) -> FirstWeights | None:
        if name == "bigrams":
            from distgpt.recipes.bigrams import PAIRS

            return PAIRS
        return super().first_weights(name)

    def strategy(self, t: TrainConfig, ranks: int) -> Strategy:
        if ranks > 1 or t.reproducible_parts:
            from distgpt.parallel.choose import Chosen

            return Chosen(t, ranks)
        return super().strategy(t, ranks)

    def gradient_sync(self, comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> GradientSync:
        if comm.size > 1:
            from distgpt.parallel.choose import gradient_sync

            return gradient_sync(comm, state, t, say)
        return super().gradient_sync(comm, state, t, say)

    def metric(self, name: str) -> MetricKind:
        if name == "hellaswag":
            from distgpt.inference.evaluation.benchmark import HellaSwag

            return HellaSwag
        return super().metric(name)

    def step_policy(self, t: TrainConfig, progress: Progress) -> StepPolicy:
        if t.on_bad_step != "stop" or t.spike_zscore:
            from distgpt.callbacks.bad_steps import BadSteps

            return BadSteps(t, progress)
        return super().step_policy(t, progress)

    def budget(
        self, t: TrainConfig, last: int, times: Times, pace: Pace, model: Model, validation: Validation | None
    ) -> Budget:
        if t.train_minutes:
            from distgpt.callbacks.attach import timed_budget

            return timed_budget(t, last, times, pace, model, validation)
        if t.patience:
            from distgpt.callbacks.attach import PatientBudget

            return PatientBudget(last, t.patience)
        return super().budget(t, last, times, pace, model, validation)

    def disk(
        self, directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say
    ) -> Disk:
        from distgpt.callbacks.full_disk import disk_handler

        return disk_handler(directory, t, model, description, say)

    def retention(self, t: TrainConfig) -> RetentionPolicy:
        if t.keep_every or t.keep_every_minutes:
            from distgpt.callbacks.full_disk import Retention

            return Retention(t)
        return super().retention(t)

    def callbacks(self, run: Run, limits: Limits) -> Sequence[Callback]:
        from distgpt.callbacks.attach import callbacks_of
        from distgpt.measure.verification.kept import note

        note(run)  # first: record the facts that results depend on
        return callbacks_of(run, limits)

    def environment(self) -> dict[str, object] | None:
        from distgpt.measure.doctor.facts import environment

        return environment()


def load_components(name: str) -> AllComponents:
    """Import MODULE:CLASS, a class derived from AllComponents, and check the methods it overrides."""
    module, _, attribute = name.partition(":")
    what = f"--components {name}"
    try:
        result = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name == module:
            hint = "; add its directory to PYTHONPATH"
            raise UsageError(f"{what}: no module named {module!r}{hint}") from None
        raise UsageError(f"{what} requires {error.name}, which is not installed") from None
    except AttributeError:
        raise UsageError(f"{what}: {module} has no class {attribute!r}") from None
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"{what}: {first_line(error)}") from None
    if not (isinstance(result, type) and issubclass(result, AllComponents)):
        raise UsageError(f"{what} must be a subclass of distgpt.assembly.AllComponents")
    for method, own in vars(result).items():
        seam = getattr(AllComponents, method, None)
        if isinstance(own, FunctionType) and isinstance(seam, FunctionType) and not method.startswith("__"):
            wanted, given = (list(signature(each).parameters) for each in (seam, own))
            if wanted != given:
                code = own.__code__
                raise UsageError(
                    f"{code.co_filename}:{code.co_firstlineno}: {attribute}.{method} must take"
                    f" ({', '.join(wanted)}), not ({', '.join(given)})"
                )
        elif seam is None and isinstance(own, FunctionType) and not method.startswith("_"):
            raise UsageError(f"{what}: {method} overrides no method{did_you_mean(method, FACTORIES)}")
    return result()
