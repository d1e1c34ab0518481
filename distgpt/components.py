"""The table of components: by the name of each optional part, the import path of the code that it needs.

Nothing registers itself, and only what is asked for is imported.
"""

from __future__ import annotations

# How the names of files end that are no texts; each of them is refused with advice.
NO_TEXTS = (
    ".tar .tgz .zip .7z .zst .xz .bz2 .docx .odt .epub .rtf .doc .pdf .json"
    " .npy .npz .safetensors .bin .pt .pth .gguf .png .jpg .jpeg"
)

# Tables of which the core has the plain rows (core/base/tables.py). Whoever adds a tokenizer, a kind of
# text, a benchmark or first weights writes one file, and one line here.
TABLES: dict[str, dict[str, str]] = {
    # What a setting needs that is not as by default, by the names of components (core/config/settings.py).
    "components": {
        "balance": "distgpt.parallel.balance:make",
        "bigrams": "distgpt.recipes.bigrams:PAIRS",
        "chats": "distgpt.texts.chats.examples:CHATS",
        "exchange": "distgpt.parallel.choose:Chosen",
        "guards": "distgpt.guards.attach:guarded",
        "hellaswag": "distgpt.evaluation.benchmark:HellaSwag",
        "hierarchical": "distgpt.parallel.reductions:make",
        "in parts": "distgpt.parallel.reductions:make",
        "local steps": "distgpt.parallel.replicas:make",
        "lora": "distgpt.adapters.adapter_kind:ADAPTERS",
        "overlapped": "distgpt.parallel.overlapped:make",
        "packing": "distgpt.texts.packing:PACKED",
        "reproducible": "distgpt.parallel.reproducible:make",
        "retention": "distgpt.guards.retention:Retention",
        "rollback": "distgpt.guards.bad_steps:BadSteps",
        "sharded": "distgpt.parallel.sharded:make",
        "structured log": "distgpt.fleet.structured:as_json",
        "trial": "distgpt.parallel.trial:make",
        "within": "distgpt.guards.timed:timed_clock",
    },
    # By the value of --system (jobs/batch/script.py).
    "batch systems": {
        "slurm": "distgpt.jobs.batch.slurm:SLURM",
        "pbs": "distgpt.jobs.batch.pbs:PBS",
        "sge": "distgpt.jobs.batch.gridengine:GRID_ENGINE",
        "lsf": "distgpt.jobs.batch.lsf:LSF",
        "flux": "distgpt.jobs.batch.flux:FLUX",
    },
    # Parts of a run that the core has plain ones of (core/base/tables.py).
    "parts": {
        "grants": "distgpt.launch.environment:GRANTS",
        "helpers": "distgpt.helpers.start:start",
        "job": "distgpt.launch.job:LAUNCHED",
        "kept": "distgpt.proofs.kept:note",
        "record": "distgpt.recorded.record:record",
        "layout": "distgpt.layout.bind:PLACED",
        "one prompt": "distgpt.generation.averaged:averaged",
        "remedy": "distgpt.texts.unreadable:remedy",
        "seams": "distgpt.guards.attach:guarded",
        "slots": "distgpt.decoding.choose:fastest",
    },
    # By a component's name, which settings give: how ranks share a step (core/train/sharing.py).
    "strategies": dict.fromkeys(
        (
            *("balance", "exchange", "hierarchical", "in parts", "local steps"),
            *("overlapped", "reproducible", "several ranks", "sharded", "trial"),
        ),
        "distgpt.parallel.choose:Chosen",
    ),
    # By name (core/cpu/stages.py).
    "stages": {"cuda": "distgpt.gpu.stage:GPU", "mpi-cuda": "distgpt.gpu.stage:GPU"},
    # By dtype: kernels of the stages on CPUs (core/cpu/stages.py).
    "kernels": dict.fromkeys(("int8", "int4"), "distgpt.rounded.loops.kernels:make"),
    # By a feature in LLVM's words; by the system's name of a machine (core/cpu/compiling/processor.py).
    "processors": {
        "neon": "distgpt.experimental.arm64.arm:ARM",
        "amx-bf16": "distgpt.processors.permission:AMX",
    },
    "features": dict.fromkeys(("arm64", "aarch64"), "distgpt.experimental.arm64.arm:features"),
    # By `Shape.tiles` (core/cpu/matmul/assembled.py).
    "tiles": {
        "amx": "distgpt.processors.amx:module",
        "bfmmla": "distgpt.experimental.arm64.mmla:module",
        "neon": "distgpt.experimental.arm64.neon:module",
        "widened": "distgpt.processors.widening:module",
    },
    # Tiles of rounded weights where processors want others (rounded/loops/int8.py).
    "rounded tiles": {
        "int8 on arm64": "distgpt.experimental.arm64.integers:NeonInt8Tile",
        "int4 on arm64": "distgpt.experimental.arm64.integers:NeonInt4Tile",
    },
    # By what a GPU's linear layers read (gpu/kernels.py); by a source's name, its path (gpu/compiling.py).
    "steps": {"bfmmla": "distgpt.experimental.arm64.mmla:STEPS"},
    "packed rows": {"amx": "distgpt.processors.amx:ROWS"},
    # By what shows or records a run (core/train/lines.py).
    "listeners": {
        "json": "distgpt.fleet.structured:JsonLines",
        "live": "distgpt.show.display:Live",
        "port": "distgpt.fleet.port:Port",
        "tensorboard": "distgpt.show.display:TensorBoard",
        "textfile": "distgpt.fleet.textfile:Textfile",
    },
    # By their name in summary.json (core/train/summary.py).
    "summary": {
        "environment": "distgpt.doctor.facts:of_run",
    },
    # By whose errors they are (launch/leaving.py).
    "libraries": {"nccl": "distgpt.gpu.failures:NCCL"},
    # By what a name of weights begins with, before a colon (core/saved/weights.py).
    "weights": {"hub": "distgpt.formats.fetched:fetched_weights"},
    # By the setting init_weights (core/train/setup.py).
    "first weights": {"bigrams": "distgpt.recipes.bigrams:PAIRS"},
    # By a component's name, which settings give (core/train/plan.py).
    "checks": {
        "balance": "distgpt.parallel.balance:check",
        "chats": "distgpt.texts.chats.examples:check",
        "hierarchical": "distgpt.parallel.choose:check_hierarchical",
        "local steps": "distgpt.parallel.local_steps:check",
        "lora": "distgpt.adapters.adapter_kind:check",
        "reproducible": "distgpt.parallel.reproducible:check",
    },
    # Name, the value of --grad-sync → a function of the type MakeExchange (parallel/choose.py).
    "exchanges": {
        "auto": "distgpt.parallel.trial:make",
        "hierarchical": "distgpt.parallel.reductions:make",
        "overlapped": "distgpt.parallel.overlapped:make",
        "sharded": "distgpt.parallel.sharded:make",
    },
    # Guards of every run, by any name, beside those that settings ask for (guards/attach.py).
    "guards": {},
    # Folders of compiled loops: a change there makes them anew (core/cpu/compiling/disk_cache.py).
    "loops": {
        "decoding": "decoding/loops",
        "parallel": "parallel/loops",
        "recorded": "recorded/loops",
        "rounded": "rounded/loops",
        "processors": "processors",
        "arm64": "experimental/arm64",
    },
    # By the kind that settings give (core/train/seams.py).
    "models": {"lora": "distgpt.adapters.adapter_kind:ADAPTERS"},
    # By the dtype that weights are rounded to (core/saved/weights.py).
    "rounded": {"int8": "distgpt.rounded.rounded:INT8", "int4": "distgpt.rounded.rounded:INT4"},
    # By the format of weights files that hold a part of a model (core/saved/weights.py).
    "part files": {"distgpt-adapter": "distgpt.adapters.adapter:FILES"},
    # By the kind in its saved form, and by what --tokenizer begins with (core/data/tokenizers.py).
    "tokenizers": {
        "char": "distgpt.texts.tokenizers.collected:CHARACTERS",
        "word": "distgpt.texts.tokenizers.collected:WORDS",
        "bpe": "distgpt.texts.tokenizers.learn:BPE",
        "gpt2": "distgpt.texts.tokenizers.foreign:GPT2",
        "hub": "distgpt.texts.tokenizers.foreign:HUB",
        "library": "distgpt.texts.tokenizers.foreign:LIBRARY",
    },
    # By what it is called in a tokenizer's saved form (core/data/tokenizers.py).
    "extras": {"chat": "distgpt.texts.tokenizers.chat_template:checked_chat"},
    # By the setting that names its file (core/train/assessment.py).
    "metrics": {"hellaswag": "distgpt.evaluation.benchmark:HellaSwag"},
    # By what a setting calls it, how a file's name ends, or "/" and a file that lies in such folders; "/"
    # alone is any other folder (core/data/loading.py).
    "texts": {
        "chats": "distgpt.texts.chats.examples:CHATS",
        "packing": "distgpt.texts.packing:PACKED",
        "/manifest.json": "distgpt.texts.shards:SHARDS",
        **dict.fromkeys((".jsonl", ".parquet", ".gz", "/"), "distgpt.texts.prepare.tokenized:DOCUMENTS"),
        **dict.fromkeys(NO_TEXTS.split(), "distgpt.texts.unreadable:NO_TEXT"),
    },
}

# Name → a class derived from Placement (core/train/sharing.py).
PLACEMENTS = {
    "sharded": "distgpt.parallel.sharded:ShardedPlacement",
    "local steps": "distgpt.parallel.replicas:LocalPlacement",
}

# Name → a function of the type MakeMicroBatches (parallel/choose.py).
MICRO_BATCHES = {
    "reproducible parts": "distgpt.parallel.reproducible:make",
    "balanced": "distgpt.parallel.balance:make",
}

# Exchanges that other settings than --grad-sync ask for, by what `choose.exchange_name` calls them.
UNNAMED_EXCHANGES = {
    "in parts": "distgpt.parallel.reductions:make",
    "local steps": "distgpt.parallel.replicas:make",
}
