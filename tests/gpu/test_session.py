import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import gpu_carry
import node_table
import pytest
from devices import needs_the_processor

from conftest import clean_environment, needs_mpi

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_session.sh"
# Fakes of NVIDIA's tools that only start the given command.
TOOL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in --*|-k) shift 2 ;; *) shift ;; esac; done
[ $# -eq 0 ] || exec "$@"
"""
TOOLS = dict.fromkeys(("compute-sanitizer", "ncu", "nvidia-smi"), TOOL)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def session(folder, block, *args, parts="", carry=None, tools=TOOLS, **more):
    """Run a session with toy sizes; return the process and block.json."""
    for name, text in tools.items():
        program(folder / "tools" / name, text)
    path = os.pathsep.join((str(folder / "tools"), str(Path(sys.executable).parent), os.environ["PATH"]))
    env = clean_environment(PATH=path, REHEARSAL="1", WORKERS="1", **{"PY": sys.executable, **more})
    env |= {"CARRY": str(carry or folder / "carry")} | ({"PARTS": parts} if parts else {})
    command = ["bash", SCRIPT, block, folder / "out", *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    found = folder / "out" / "block.json"
    return done, json.loads(found.read_text()) if found.exists() else {}


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """Make the files to carry at toy sizes: the losses of three presets, and two short text files."""
    folder = tmp_path_factory.mktemp("carried")
    texts = [folder / f"{name}.jsonl" for name in ("train", "val")]
    for number, text in enumerate(texts):
        lines = (json.dumps({"text": f"{word} is number {i + number}. " * 9}) for i, word in enumerate("abcdefgh"))
        text.write_text("\n".join(lines))
    words = ["A", "N", "C", "--into", folder, "--only", "losses", "texts", "--quick"]
    words += ["--train", texts[0], "--val", texts[1]]
    done = carry(*words)
    assert done.returncode == 0, done.stderr
    return folder


def carry(*words):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_carry.py", *words]
    return subprocess.run([*map(str, command)], env=clean_environment(), capture_output=True, text=True)


@pytest.mark.ranks
@needs_the_processor
@needs_mpi
@pytest.mark.rehearsal
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("block", "ANBC")
def test_every_command_of_a_block_runs(block, carried, tmp_path):
    done, found = session(tmp_path, block, 1400, carry=carried / block)
    assert done.returncode == 0, done.stderr
    wrong = {name: part for name, part in found["parts"].items() if part["exit_code"]}
    assert not wrong and found["block"] == block and found["rehearsal"] and found["commit"], wrong
    for file in (tmp_path / "out").glob("*.txt"):
        text = file.read_text()
        # Exit code 2 is a wrong option, possibly of a command that does not set the part's exit code.
        assert not any(word in text for word in ("[no time left", "Traceback", "[exit code 2 ")), (file.name, text)
    assert block in "BNC" or not any("skipped" in part for part in found["parts"].values()), done.stdout
    if block == "N":  # its tables on the page
        page = "\n".join(node_table.page([tmp_path / "out"]))
        assert all(heading in page for heading in ("The node", "tokens/s by cores", "Sums over ranks")), page


@pytest.mark.ci
@needs_the_processor
def test_unknown_parts_are_rejected_and_late_ones_named(tmp_path):
    for block, parts in (("A", "facts threads"), ("Z", "facts")):
        done, found = session(tmp_path, block, parts=parts)
        assert (done.returncode, found) == (2, {}) and not (tmp_path / "out").exists()
    done, found = session(tmp_path, "A", 14, parts="facts tests commands")
    assert done.returncode == 0 and "no time left" in done.stdout
    assert list(found["parts"]) == ["prepare", "facts", "tests", "commands"]
    assert found["parts"]["commands"]["exit_code"] == 75 and (tmp_path / "out" / "facts.txt").exists()


@pytest.mark.ci
def test_failed_and_missing_programs_are_reported(tmp_path):
    done, found = session(tmp_path / "lacking", "A", 60, parts="sanitize collect", tools={})
    part = found["parts"]["sanitize"]
    assert part["exit_code"] is None and f"sanitize: skipped: {part['skipped']}" in done.stdout
    program(tmp_path / "carry" / "wheels.tar.xz", "no archive")
    done, found = session(tmp_path, "A", 60, parts="sanitize", PY="/no/such/python")
    code = found["parts"]["prepare"]["exit_code"]
    assert code and f"prepare: exit code {code}" in done.stdout and found["commit"]
    tools = {"compute-sanitizer": "#!/bin/sh\nexit 9\n"}
    _, found = session(tmp_path / "other", "A", 60, parts="sanitize", tools=tools)
    assert found["parts"]["collect"]["exit_code"] == 9  # the sanitizer's exit code


def test_commit_identifies_the_tree(tmp_path, monkeypatch):
    def known():
        return gpu_carry.commit_of_this_tree(tmp_path)

    monkeypatch.setattr(gpu_carry, "HERE", tmp_path / "benchmarks")
    source = program(tmp_path / "distgpt" / "model.py", "one = 1\n")
    assert known()[0] == "unknown" and known()[1]
    (tmp_path / "commit.txt").write_text(f"abc 2026-11-27 Its message\n{gpu_carry.digest()}\n")
    assert known() == ("abc 2026-11-27 Its message", "")
    source.write_text("one = 2\n")
    assert known()[0] == "unknown" and "abc" in known()[1]


@pytest.mark.ci
def test_missing_data_is_rejected_first(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "a text"}))
    both = ("--train", text, "--val", text)
    for words in (
        ("C",),
        ("C", "--train", text),
        ("C", "--nanochat", tmp_path, "--nanochat-base", tmp_path),
        ("C", *both, "--nanochat", tmp_path),
        ("A", *both),
    ):
        done = carry(*words, "--into", tmp_path / "carry")
        assert done.returncode == 2 and "error: " in done.stderr and not (tmp_path / "carry").exists(), words


def test_carried_shards_need_no_pyarrow(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    shard, groups = tmp_path / "shard_00000.parquet", [["a text", "naïve\ncafé"], ["the last"]]
    parquet.write_table(pyarrow.table({"text": [*groups[0], *groups[1]]}), shard, row_group_size=2)
    gpu_carry.rewrite(shard)
    path = ROOT / "benchmarks" / "peers" / "for_nanochat" / "pyarrow" / "parquet.py"
    own = runpy.run_path(str(path))["ParquetFile"](shard)
    found = [own.read_row_group(i).column("text").to_pylist() for i in range(own.num_row_groups)]
    assert found == groups


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
