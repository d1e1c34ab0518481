"""The table of components: by the name of each optional part, the import path of the code that it needs.

Nothing registers itself, and only what is asked for is imported.
"""

from __future__ import annotations

# Tables of which the core has the plain rows (core/base/tables.py). Whoever adds a tokenizer, a kind of
# text, a benchmark or first weights writes one file, and one line here.
TABLES: dict[str, dict[str, str]] = {
    # What a setting needs that is not as by default, by the names of components (core/config/settings.py).
    "components": {
        "balance": "distgpt.parallel.balance:make",
        "bigrams": "distgpt.recipes.bigrams:PAIRS",
        "chats": "distgpt.corpora.chats.examples:CHATS",
        "exchange": "distgpt.parallel.choose:Chosen",
        "guards": "distgpt.callbacks.attach:guarded",
        "hellaswag": "distgpt.inference.evaluation.benchmark:HellaSwag",
        "in parts": "distgpt.parallel.reductions:make",
        "local steps": "distgpt.parallel.replicas:make",
        "lora": "distgpt.models.adapters.adapter_kind:ADAPTERS",
        "overlapped": "distgpt.parallel.overlapped:make",
        "packing": "distgpt.corpora.packing:PACKED",
        "reproducible": "distgpt.parallel.reproducible:make",
        "retention": "distgpt.callbacks.retention:Retention",
        "rollback": "distgpt.callbacks.bad_steps:BadSteps",
        "sharded": "distgpt.parallel.sharded:make",
        "structured log": "distgpt.callbacks.monitoring.structured:as_json",
        "within": "distgpt.callbacks.timed:timed_clock",
    },
    # Parts of a run that the core has plain ones of (core/base/tables.py).
    "parts": {
        "grants": "distgpt.cluster.launch.environment:GRANTS",
        "helpers": "distgpt.helpers.start:start",
        "job": "distgpt.cluster.launch.job:LAUNCHED",
        "kept": "distgpt.measure.verification.kept:note",
        "record": "distgpt.recorded.record:record",
        "layout": "distgpt.cluster.affinity.bind:PLACED",
        "one prompt": "distgpt.inference.generation.averaged:averaged",
        "seams": "distgpt.callbacks.attach:guarded",
        "slots": "distgpt.inference.decoding.choose:fastest",
    },
    # By their words (core/train/plan.py). All have one row, which says in which order they follow.
    "recipes": dict.fromkeys(
        ("decay_from", "within", "depth", "deterministic", "chats"), "distgpt.recipes.recipes:followed"
    ),
    # By a component's name, which settings give: how ranks share a step (core/train/sharing.py).
    "strategies": dict.fromkeys(
        (
            *("balance", "exchange", "in parts", "local steps"),
            *("overlapped", "reproducible", "several ranks", "sharded"),
        ),
        "distgpt.parallel.choose:Chosen",
    ),
    # By name (core/cpu/stages.py).
    "stages": {"cuda": "distgpt.gpu.stage:GPU", "mpi-cuda": "distgpt.gpu.stage:GPU"},
    # By dtype: kernels of the stages on CPUs (core/cpu/stages.py).
    "kernels": dict.fromkeys(("int8", "int4"), "distgpt.inference.quantized.kernels:make"),
    # By a feature in LLVM's words (core/cpu/compiling/processor.py).
    "processors": {
        "amx-bf16": "distgpt.processors.permission:AMX",
    },
    # By `Shape.tiles` (core/cpu/matmul/assembled.py).
    "tiles": {
        "amx": "distgpt.processors.amx:module",
        "widened": "distgpt.processors.widening:module",
    },
    "packed rows": {"amx": "distgpt.processors.amx:ROWS"},
    # By what shows or records a run (core/train/lines.py).
    "listeners": {
        "json": "distgpt.callbacks.monitoring.structured:JsonLines",
        "live": "distgpt.show.display:Live",
        "port": "distgpt.callbacks.monitoring.port:Port",
        "tensorboard": "distgpt.show.display:TensorBoard",
        "textfile": "distgpt.callbacks.monitoring.exporter:Textfile",
    },
    # By their name in summary.json (core/train/summary.py).
    "summary": {
        "environment": "distgpt.measure.doctor.facts:of_run",
    },
    # By what a name of weights begins with, before a colon (core/saved/weights.py).
    "weights": {"hub": "distgpt.models.formats.huggingface:fetched_weights"},
    # By the setting init_weights (core/train/setup.py).
    "first weights": {"bigrams": "distgpt.recipes.bigrams:PAIRS"},
    # By a component's name, which settings give (core/train/plan.py).
    "checks": {
        "balance": "distgpt.parallel.balance:check",
        "chats": "distgpt.corpora.chats.examples:check",
        "local steps": "distgpt.parallel.local_steps:check",
        "lora": "distgpt.models.adapters.adapter_kind:check",
        "reproducible": "distgpt.parallel.reproducible:check",
    },
    # Name, the value of --grad-sync → a function of the type MakeExchange (parallel/choose.py).
    "exchanges": {
        "overlapped": "distgpt.parallel.overlapped:make",
        "sharded": "distgpt.parallel.sharded:make",
    },
    # Guards of every run, by any name, beside those that settings ask for (callbacks/attach.py).
    "guards": {},
    # Folders of compiled loops: a change there makes them anew (core/cpu/compiling/disk_cache.py).
    "loops": {
        "decoding": "inference/decoding/loops",
        "parallel": "parallel/loops",
        "recorded": "recorded/loops",
        "rounded": "inference/quantized",
        "processors": "processors",
    },
    # By the kind that settings give (core/train/seams.py).
    "models": {"lora": "distgpt.models.adapters.adapter_kind:ADAPTERS"},
    # By the dtype that weights are rounded to (core/saved/weights.py).
    "rounded": {
        "int8": "distgpt.models.quantized.rounded:INT8",
        "int4": "distgpt.models.quantized.rounded:INT4",
    },
    # By the format of weights files that hold a part of a model (core/saved/weights.py).
    "part files": {"distgpt-adapter": "distgpt.models.adapters.adapter:FILES"},
    # By the kind in its saved form, and by what --tokenizer begins with (core/data/tokenizers.py).
    "tokenizers": {
        "char": "distgpt.corpora.tokenizers.collected:CHARACTERS",
        "word": "distgpt.corpora.tokenizers.collected:WORDS",
        "bpe": "distgpt.corpora.tokenizers.learn:BPE",
        "gpt2": "distgpt.corpora.tokenizers.foreign:GPT2",
        "hub": "distgpt.corpora.tokenizers.foreign:HUB",
        "library": "distgpt.corpora.tokenizers.foreign:LIBRARY",
    },
    # By the setting that names its file (core/train/assessment.py).
    "metrics": {"hellaswag": "distgpt.inference.evaluation.benchmark:HellaSwag"},
    # By what a setting calls it, how a file's name ends, or "/" and a file that lies in such folders; "/"
    # alone is any other folder (core/data/loading.py).
    "texts": {
        "chats": "distgpt.corpora.chats.examples:CHATS",
        "packing": "distgpt.corpora.packing:PACKED",
        "/manifest.json": "distgpt.corpora.shards:SHARDS",
        **dict.fromkeys((".jsonl", ".parquet", ".gz", "/"), "distgpt.corpora.prepare.tokenized:DOCUMENTS"),
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
