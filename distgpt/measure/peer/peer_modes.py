"""The ways in which PyTorch can train, by name; loads nothing.

A mode names its switches, as in compile+keep-freed; without any it is eager.
"""

from __future__ import annotations

# keep_freed: glibc keeps what is freed, which is faster and larger. compile: by torch.compile; autotune: with
# every matmul that it knows tried. autocast: float32 weights are rounded where they are used, not copied to
# bfloat16 after each update. chunked_head: less memory for a large vocabulary. onednn: linear layers by an
# operator that PyTorch does not offer.
SWITCHES = ("keep_freed", "compile", "autotune", "autocast", "chunked_head", "onednn")
EAGER, BEST = "eager", "best"


def switches(mode: str) -> dict[str, bool]:
    """Every switch of a mode; a ValueError names one that there is not."""
    names = [] if mode == EAGER else mode.replace("-", "_").split("+")
    for name in names:
        if name not in SWITCHES:
            known = ", ".join(each.replace("_", "-") for each in SWITCHES)
            raise ValueError(f"{name!r:.40}: modes are {EAGER}, {BEST}, or some of {known}, joined by +")
    return {name: name in names for name in SWITCHES}


def candidates(dtype: str) -> list[str]:
    """The modes of which one is PyTorch's fastest, wherever it was tried."""
    modes = ["keep-freed", "compile+keep-freed", "autotune+keep-freed"]
    return modes + [f"{mode}+autocast" for mode in modes] if dtype == "bfloat16" else modes
