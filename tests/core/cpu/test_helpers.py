"""Processes that help to compile: all that a run needs is found, and nothing of it runs meanwhile."""

import sys

import pytest

from conftest import distgpt

# A process of its own, as one that has compiled a loop does not note it.
PROGRAM = """
import sys
from dataclasses import replace
from functools import partial
from distgpt.core.config.presets import preset
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.stages import open_stage
from distgpt.core.model.model import miniature
from distgpt.core.train.setup import warmup_pass
from distgpt.core.components import components
from distgpt.core.cpu import compile_workers

run = preset(sys.argv[1], {"vocab_size": 256, "dtype": sys.argv[2], "matmul": sys.argv[3]})
small = replace(run, model=miniature(run.model))
work = partial(warmup_pass, config=small, strategy=components().strategy(run.train, 1))
stage = open_stage("serial", 2)
kernels = stage.kernels(run.train.dtype, run.train.matmul_backend)
missing = compile_workers.missing_loops(stage, run.train.dtype, run.train.matmul_backend, work)
print(len(missing), len(list(disk_cache.folder().glob("*.loop"))))
helper = compile_workers.started([compile_workers.loop_name(each) for each in missing])
assert helper.wait(300) == 0
before = len(list(disk_cache.folder().iterdir()))
work(kernels)
print(before, len(list(disk_cache.folder().iterdir())), first_use.has_compiled())
print(len(compile_workers.missing_loops(stage, run.train.dtype, run.train.matmul_backend, work)))
"""


@pytest.mark.ci
def test_what_a_run_needs_is_found_without_compiling_and_compiled_by_a_helper(tmp_path):
    """A run with these loops has the bits of one with those that the session has compiled.

    Attention's take longest. The copy in core/test_core.py is given these, and compiles by itself what our
    own matmul needs, which blas does not.
    """
    program, settings = [sys.executable, "-c", PROGRAM], ("tiny-adamw", "float32", "blas")
    env = {"DISTGPT_CACHE": str(tmp_path / "cache")}
    result = distgpt(*settings, program=program, env=env, timeout=300)
    assert result.returncode == 0, result.stderr
    noted, again, missing = map(str.split, result.stdout.splitlines())
    assert int(noted[0]) > 15 and noted[1] == "0"
    assert again[0] == again[1] and again[2] == "False"  # no file more, nothing reported
    assert missing == ["0"]
    small = "--n-layer 2 --seq-len 32 --batch-size 2 --data story --tokenizer byte --threads 2 --steps 3"
    weights = []
    for name, where in (("by a helper", env), ("by others", {})):
        out = tmp_path / name
        words = ("--preset", "tiny-adamw", "--set", "matmul=blas", *small.split(), "--out", out)
        done = distgpt("train", *words, env=where, timeout=300)
        assert done.returncode == 0, done.stderr
        weights.append((out / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]
