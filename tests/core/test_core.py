"""The core trains and generates without other modules, like the whole program."""

import sys
from dataclasses import dataclass

import distgpt as package
import pytest
from distgpt.core import components
from distgpt.core.base.errors import UsageError
from distgpt.core.components import Components
from distgpt.core.config.setting import setting

from conftest import ci_ranks, distgpt, losses, succeeded
from core import alone as core_alone


@pytest.mark.parametrize("make", [
    lambda plain: plain.stage("cuda"), lambda plain: plain.kernels("int8"), lambda plain: plain.text("shards"),
    lambda plain: plain.quantized("int8"), lambda plain: plain.part("adapter"), lambda plain: plain.metric("bleu"),
])  # fmt: skip
def test_plain_components_reject_unknown_names(make):
    with pytest.raises(UsageError, match=r"unknown .*'(cuda|int8|shards|adapter|bleu)'"):
        make(Components())


def test_settings_of_an_extension_have_their_prefix(monkeypatch):
    @dataclass
    class Extra:
        share: float = setting(0.5, "A share.", low=0.0)

    assert components.extra_settings() == {}
    monkeypatch.setattr(components, "_installed", type("Extension", (Components,), {"extra": Extra})())
    assert [*components.extra_settings()] == ["extra.share"]


@ci_ranks
@pytest.mark.timeout(900)  # compiling may take minutes
@pytest.mark.parametrize("ranks", [1, 2])
def test_core_matches_whole_program(ranks, tmp_path):
    program, alone, whole = [sys.executable, core_alone.__file__], tmp_path / "alone", tmp_path / "whole"
    stage = "serial" if ranks == 1 else "mpi"
    for steps in (3, 6):
        result = succeeded(stage, alone, str(steps), program=program, ranks=ranks, timeout=600, by=distgpt)
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in core_alone.SIZE.items() if name != "matmul"]
    (tmp_path / "own.toml").write_text('matmul = "own"')
    words = [*settings, "--config", tmp_path / "own.toml", "--threads=1", f"--stage={stage}"]
    for more in (["--steps=3"], ["--steps=6", "--resume=auto"]):
        succeeded("train", *words, *more, "--out", whole, ranks=ranks, by=distgpt)
    assert losses(alone) == losses(whole) and len(losses(alone)) == 6
    assert len({(run / "weights.safetensors").read_bytes() for run in (alone, whole)}) == 1
    if ranks == 1:
        text = package.load(whole / "weights.safetensors").generate("The", max_new_tokens=8, temperature=0)
        assert result.stdout.rstrip("\n").endswith(text.rstrip("\n"))
