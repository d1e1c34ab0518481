"""Settings: what the model is, how it is trained, how a stage works, and where values come from.

Frozen dataclasses, presets, TOML, and the order in which defaults, files and flags count.
Not here: what the command line makes of them (commands/), and anything that computes.
"""

from distgpt.config.run import (
    ALLREDUCES,
    BATCH_TOKENS,
    DTYPES,
    GRAD_SYNCS,
    LARGEST,
    MLPS,
    NORMS,
    POSITIONS,
    RECOMPUTE,
    SCHEDULES,
    GpuConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    nearest,
    parse_toml,
)

__all__ = [
    "ALLREDUCES",
    "BATCH_TOKENS",
    "DTYPES",
    "GRAD_SYNCS",
    "LARGEST",
    "MLPS",
    "NORMS",
    "POSITIONS",
    "RECOMPUTE",
    "SCHEDULES",
    "GpuConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "nearest",
    "parse_toml",
]
