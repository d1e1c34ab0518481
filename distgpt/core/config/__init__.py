"""Settings of the model, training and GPU, and the sources of their values.

Frozen dataclasses whose fields have help, choices and a range; presets; TOML files.

Not here: command options (commands/options.py), and computation.
"""

from distgpt.core.base.errors import did_you_mean
from distgpt.core.config.run_config import (
    CHANGEABLE,
    SETTINGS,
    RunConfig,
    differences,
    former_choices,
    parse_toml,
)
from distgpt.core.config.setting import Setting, settings_of
from distgpt.core.config.settings import (
    AUTO_DTYPE,
    BATCH_IN_TOKENS,
    BATCH_TOKENS,
    DEEPEST,
    DEFAULT_TEMPERATURE,
    DTYPES,
    GRAD_SYNCS,
    GROUPS,
    INFERENCE_DTYPES,
    LORA_MATRICES,
    METRICS,
    MLPS,
    NORMS,
    ON_GPU,
    PARAMETERS_PER_TOKEN,
    POSITIONS,
    QUANTIZED_DTYPES,
    SEVERAL,
    STAGES,
    WITH_MPI,
    GpuConfig,
    ModelConfig,
    TrainConfig,
)
