"""The GPU benchmark at toy sizes on the stand-in for a GPU, against one for PyTorch."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import gpu_kernels
import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.gpu.device import CupyDevice
from fakecupy import FakeCupy

import gpu as program
from conftest import clean_environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Answers as the real peer does, and refuses cuDNN's attention.
PEER = """
import json, sys
request = json.loads(sys.argv[2])
if request.get("attention") == "cudnn":
    sys.exit("RuntimeError: no kernel")
print("compiling …")
print(json.dumps({"tokens_per_s": 2.0} if request["do"] != "forward" else {"seconds": 0.5, "loss": 1.0}))
"""


def start(tmp_path, *words, **streams):
    out = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", "--quick", "--seconds", "280", "--host", "--out", out, *words]
    env = clean_environment(WHOLE_GPU="1", PYTHONPATH=str(BENCHMARKS.parent))
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=env, **streams), out


@pytest.mark.rehearsal
@needs_the_processor
def test_every_measurement_finds_what_it_is_for(tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    groups = ("machine", "GPT-2 bfloat16", "kernels", "forward S", "decoding", "ablation")
    process, out = start(tmp_path, "--peer", f"{sys.executable} {peer}", "--only", *groups)
    printed, _ = process.communicate(timeout=290)
    assert process.returncode == 0, printed
    found = json.loads(out.read_text())["found"]
    refused = found.pop("GPT-2 bfloat16/PyTorch, compiled, cuDNN attention")
    assert refused["error"] == "exit code 1: RuntimeError: no kernel"
    assert {name: each["error"] for name, each in found.items() if "error" in each} == {}
    assert {name.split("/")[0] for name in found} == set(groups)
    assert found["GPT-2 bfloat16/ours"]["rows"][0]["tokens_per_s"] > 0
    rows = found["kernels/own"]["measured"]
    assert {"kernel adamw", "kernel cross_entropy_packed", "matmul 16x96x24 NT gelu + bias"} <= set(rows)
    ablation = found["ablation/own"]["measured"]
    assert len(ablation) == 3 * 2 * 3 and all(row["distance"] < 0.02 for row in ablation.values())
    for text in ("GPT-2 bfloat16: ", "1.05: met)", "forward S: ", "kernel adamw", "! GPT-2 bfloat16/PyTorch, comp"):
        assert text in printed, text


@pytest.mark.ci
@needs_the_processor
def test_what_was_found_is_written_when_the_benchmark_is_stopped(tmp_path):
    process, out = start(tmp_path, "--only", "kernels", "ablation", stderr=subprocess.PIPE)
    while not process.stderr.readline().startswith("ablation"):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 130, printed
    results = json.loads(out.read_text())
    assert results["interrupted"] and results["found"]["kernels/own"]["measured"]
    assert "ablation/own" in results["found"] and "kernel adamw" in printed
    fused_or_not = results["found"]["kernels/own"]["measured"]["matmul 16x96x24 NT gelu + bias"]
    assert fused_or_not["chosen"] == "fused"  # the first, where all take the same time


def test_the_table_compares_ours_with_the_best_of_pytorchs_and_names_what_failed():
    found = {}
    for name, output in {
        "GPT-2 bfloat16/ours": '{"rows": [{"tokens_per_s": 5.0, "mfu": 0.5}]}',
        "GPT-2 bfloat16/ours again": '{\n "rows": [{"tokens_per_s": 6.0}]}',
        "GPT-2 bfloat16/PyTorch, compiled": 'compiling …\n{"tokens_per_s": 4.0}',
        "forward XL/ours": '{"rows": [{"seconds": 0.25, "loss": 2.0}]}',
        "forward XL/PyTorch": '{"seconds": 0.5, "loss": 2.0}',
        "forward S/ours": '{"rows": [{"seconds": 0.25, "loss": 2.0}]}',
        "kernels/own": '{"row": "kernel adamw", "seconds": 1e-3, "of_copy": 0.7}\n'
        '{"row": "matmul 2x2x2 NN", "seconds": 1e-3, "tflops": 9.0, "chosen": "fused"}\n{"row": "cut o',
        "ablation/own": '{"row": "S, tiled", "us_per_name": 2.0, "tflops": 1.0, "error": "differs"}',
        "profile/GPT-2": "a table",
    }.items():
        program.read(output, found.setdefault(name, {}))
    found["profile/GPT-2"]["error"] = "exit code 1: no"
    lines = list(program.table({"date": "today", "seconds": 1.0, "quick": False, "found": found}))
    assert "GPT-2 bfloat16: 1.50 x (bar 1.05: met)" in lines
    assert "forward XL: 2.00 x (bar 2.0: met)" in lines and "forward S: nothing to compare with" in lines
    assert any("kernel adamw" in line and line.endswith("70% of a copy's bandwidth !") for line in lines)
    assert any("matmul 2x2x2 NN" in line and line.endswith("9.0 TFLOP/s fused") for line in lines)
    assert lines[-2:] == ["! ablation/own: differs", "! profile/GPT-2: exit code 1: no"]
    assert found["profile/GPT-2"]["stdout"] == "a table"


def test_times_are_the_devices_and_long_work_is_repeated_less_often():
    device, calls = CupyDevice(0, xp=FakeCupy()), []
    milliseconds = [5.0, 10.0, 60.0, 20.0]
    device.xp.cuda.get_elapsed_time = lambda start, end: milliseconds.pop(0)
    assert gpu_kernels.seconds(device, lambda: calls.append(1)) == pytest.approx(0.020 / 5)
    assert len(calls) == 1 + 1 + 3 * 5
    milliseconds += [400.0, 401.0, 405.0, 403.0]
    assert gpu_kernels.seconds(device, lambda: None) == pytest.approx(0.403)
    milliseconds += [0.1, 1.0, 1.0, 1.0]
    assert gpu_kernels.copy_bandwidth(device, 1000) == pytest.approx(2 * 1000 / 0.0001)
    zeros = device.zeros
    read, table, indices = zeros((8,), np.float32), zeros((99,), np.float32), zeros((4,), np.int32)
    assert gpu_kernels.traffic("embed_packed", (read, indices, table, None, 3)) == 32 + 16
    assert gpu_kernels.traffic("adamw", (read, read, read, read, 3)) == 32 * (2 + 1 + 2 + 2)
