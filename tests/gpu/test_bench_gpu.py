"""The GPU benchmark runs through at toy sizes on the stand-in for a GPU, against one for PyTorch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakecupy import FakeCupy
from hostbuild import COMPILER

from distgpt.gpu.device import CupyDevice

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernels on the processor")

# Answers as the real peer does, and refuses one variant, as cuDNN may.
PEER = """#!{python}
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    what = request["do"]
    if request.get("attention") == "cudnn":
        answer = {{"error": "RuntimeError: no kernel"}}
    elif what == "steps":
        answer = {{"seconds": [0.5] * request["steps"], "loss": 1.0, "peak_bytes": 9}}
    else:
        answer = {{"seconds": [0.5], "loss": {loss}, "tokens_per_s": 2.0, "first_loss": 2.0, "torch": "none"}}
    print(json.dumps(answer), flush=True)
"""

ROWS = {
    "environment": {"python", "device", "best"},
    "train-gpt2": {"B=2/ours, recompute none", "B=4/ours, recompute mlp", "peak"},
    "train-mini": {"float32/ours", "bfloat16/ours"},
    "study": {"S/ours, float32", "XL/ours, float32", "XL/ours, bfloat16"},
    "decode": {"bfloat16/ours", "float32/ours, no graphs"},
    "kernels": {"AdamW", "swiglu backward, output again", "attention backward, chosen"},
    "products": {"16x96x24 NT gelu + bias"},
    "ablation": {"S 40x24/bfloat16, batched/tiled", "S 40x24/float64, unbatched/cuBLASLt"},
    "train-float32": {"B=2/ours", "B=2/ours, TF32"},
}


def benchmark(tmp_path, *words, **how):
    out = tmp_path / "found.json"
    command = [sys.executable, SCRIPT, "--host", "--quick", "--seconds", "280", "--out", out, *words]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, **how), out


def finished(tmp_path, *words):
    process, out = benchmark(tmp_path, *words)
    said, _ = process.communicate(timeout=290)
    assert process.returncode == 0, said
    return json.loads(out.read_text()), said


def peer(tmp_path, loss=1.0):
    program = tmp_path / "peer"
    program.write_text(PEER.format(python=sys.executable, loss=loss))
    program.chmod(0o755)
    return str(program)


@needs_compiler
def test_every_section_finds_what_it_is_for_and_the_table_fits_a_page(tmp_path):
    results, said = finished(tmp_path)
    assert results["sections"].keys() == ROWS.keys()
    for name, section in results["sections"].items():
        assert section["errors"] == [] and "ended" not in section, name
        assert ROWS[name] <= section["rows"].keys(), name
    measured = results["sections"]["train-gpt2"]["rows"]["B=2/ours, recompute none"]
    assert measured["tokens_per_s"] == pytest.approx(2 * 8 / measured["step_s"])
    assert len(said.splitlines()) <= 61


@needs_compiler
def test_a_peer_that_refuses_is_left_out_and_the_others_are_compared_with(tmp_path):
    words = ("--only", "environment", "train-gpt2", "--peer", peer(tmp_path))
    results, said = finished(tmp_path, *words)
    section = results["sections"]["train-gpt2"]
    assert {each["where"] for each in section["errors"]} == {"prepare compiled, cuDNN attention"}
    assert section["rows"]["B=2/compiled"]["tokens_per_s"] == pytest.approx(2 * 8 / 0.5)
    assert "PyTorch none" in said and "met)" in said


@needs_compiler
def test_losses_that_differ_are_an_error(tmp_path):
    results, said = finished(tmp_path, "--only", "study", "--peer", peer(tmp_path, loss=2.0))
    assert [each["where"] for each in results["sections"]["study"]["errors"]] == ["XL", "VL", "L", "M", "S"]
    assert "the losses differ" in said


def test_a_section_that_breaks_does_not_stop_the_others(tmp_path):
    """Without --host there is no GPU here: every section fails, and says so."""
    out = tmp_path / "found.json"
    words = ("--quick", "--only", "ablation", "kernels", "--out", str(out))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], stdout=subprocess.PIPE, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0
    sections = json.loads(out.read_text())["sections"]
    assert all(sections[name]["errors"] for name in ("ablation", "kernels"))
    assert "! ablation" in done.stdout and "! kernels" in done.stdout


@needs_compiler
def test_what_was_found_is_written_when_the_benchmark_is_stopped(tmp_path):
    process, out = benchmark(tmp_path, "--only", "ablation", "study")
    end = time.monotonic() + 100
    while not out.exists() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    results = json.loads(out.read_text())
    assert results["sections"]["ablation"]["rows"] and results["sections"]["study"]["ended"] == "interrupted"


@pytest.fixture
def gpu(monkeypatch):
    """The benchmark's view of a GPU, and the CuPy behind it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpubench import machine

    xp = FakeCupy()
    monkeypatch.setattr(machine, "open_device", lambda *_: CupyDevice(0, xp=xp))
    pool = SimpleNamespace(total_bytes=lambda: 77, free_all_blocks=lambda: xp.note("free_all_blocks"))
    monkeypatch.setattr(xp, "get_default_memory_pool", lambda: pool)
    return machine.Machine(False, print), xp


def test_time_on_a_gpu_is_that_of_its_events(gpu):
    machine, xp = gpu
    calls = []
    xp.milliseconds = [5.0, 10.0, 60.0, 20.0]
    assert machine.seconds(lambda: calls.append(1), repeats=5) == pytest.approx(0.020 / 5)
    assert len(calls) == 1 + 1 + 3 * 5
    xp.milliseconds = [400.0, 401.0, 405.0, 403.0]
    assert machine.seconds(lambda: calls.append(1), repeats=5) == pytest.approx(0.403)
    xp.milliseconds = [4.0]
    assert machine.between(machine.mark(), machine.mark()) == pytest.approx(0.004)
    xp.milliseconds = [0.1, 1.0, 1.0, 1.0]
    assert machine.copy_bandwidth(1000) == pytest.approx(2 * 1000 / 0.0001)


def test_arrays_on_a_gpu_are_full_of_different_numbers(gpu):
    machine, xp = gpu
    array = machine.array((3, 800_000), "float32", 0.5)
    machine.free()
    numbers = xp.now(array)
    assert numbers.std() == pytest.approx(0.5, rel=0.01) and not (numbers == 0).any()
    np.testing.assert_array_equal(numbers.reshape(-1)[:999], numbers.reshape(-1)[999_983:][:999])
    assert machine.used() == 77 and "free_all_blocks" in xp.names()
