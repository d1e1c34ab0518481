import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from devices import needs_the_processor

from conftest import clean_environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Answers like the real peer, and fails for cuDNN's attention.
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
def test_every_measurement_has_a_result(tmp_path):
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
    assert {"kernel adamw", "kernel cross_entropy_packed"} <= set(found["kernels/own"]["measured"])
    assert all(row["distance"] < 0.02 for row in found["ablation/own"]["measured"].values())
    assert "GPT-2 bfloat16: " in printed and "! GPT-2 bfloat16/PyTorch, comp" in printed


@pytest.mark.ci
@needs_the_processor
def test_stopped_benchmark_saves_its_results(tmp_path):
    process, out = start(tmp_path, "--only", "kernels", "ablation", stderr=subprocess.PIPE)
    while not process.stderr.readline().startswith("ablation"):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 130, printed
    results = json.loads(out.read_text())
    assert results["interrupted"] and results["found"]["kernels/own"]["measured"]
