"""Settings: what the model is, how it is trained, how a GPU computes, and where the values come from.

Frozen dataclasses whose fields carry their own help, choices and range; presets and TOML.
Not here: the options made of them (commands/options.py), and anything that computes.
"""

from distgpt.core.base.errors import nearest
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
    ROUNDED_DTYPES,
    SEVERAL,
    STAGES,
    WITH_MPI,
    GpuConfig,
    ModelConfig,
    TrainConfig,
)
