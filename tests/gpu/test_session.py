"""The blocks of a session on a GPU, rehearsed on the stand-in: a typo must not cost a device."""

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import gpu_carry
import pytest
from conftest import clean_environment, needs_mpi
from devices import needs_the_processor

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_session.sh"
# NVIDIA's tools: they do no more than start what they are given.
TOOL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in --*|-k) shift 2 ;; *) shift ;; esac; done
[ $# -eq 0 ] || exec "$@"
"""


def session(folder, block, *args, parts="", carry=None, **more):
    """A rehearsal; what became of each part, and what it printed."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("compute-sanitizer", "ncu", "nvidia-smi"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    path = os.pathsep.join((str(tools), str(Path(sys.executable).parent), os.environ["PATH"]))
    env = clean_environment(PATH=path, PY=sys.executable, REHEARSAL="1", WORKERS="1", **more)
    env |= {"CARRY": str(carry or folder / "carry")} | ({"PARTS": parts} if parts else {})
    command = ["bash", SCRIPT, block, folder / "out", *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    found = folder / "out" / "block.json"
    return done, json.loads(found.read_text()) if found.exists() else {}


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """What is carried, at toy sizes: the losses of three presets, and two short texts."""
    folder = tmp_path_factory.mktemp("carried")
    texts = [folder / f"{name}.jsonl" for name in ("train", "val")]
    for number, text in enumerate(texts):
        lines = (
            json.dumps({"text": f"{word} is number {i + number}. " * 9}) for i, word in enumerate("abcdefgh")
        )
        text.write_text("\n".join(lines))
    words = ["A", "N", "C", "--into", folder, "--only", "losses", "texts", "--quick"]
    words += ["--train", texts[0], "--val", texts[1]]
    program = [sys.executable, ROOT / "benchmarks" / "gpu_carry.py", *words]
    done = subprocess.run([*map(str, program)], env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@needs_the_processor
@needs_mpi
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("block", "ANBC")
def test_every_command_of_a_block_runs(block, carried, tmp_path):
    done, found = session(tmp_path, block, 1400, carry=carried / block)
    assert done.returncode == 0, done.stderr
    wrong = {name: part for name, part in found["parts"].items() if part["exit_code"]}
    logs = {name: (tmp_path / "out" / f"{name}.txt") for name in wrong}
    assert not wrong, {name: log.read_text()[-3000:] for name, log in logs.items() if log.exists()} or wrong
    assert found["block"] == block and found["rehearsal"] and (found["commit"] or block == "B")
    for file in (tmp_path / "out").glob("*.txt"):
        text = file.read_text()
        # The last: a wrong option, also of a command whose exit code is not the part's.
        for word in ("[no time left", "Traceback", "[exit code 2 "):
            assert word not in text, (file.name, text[-2000:])
    assert "skipped" not in done.stdout or block in "BNC", done.stdout


@needs_the_processor
def test_parts_are_chosen_by_name_and_unknown_ones_refused_before_anything_is_done(tmp_path):
    done, found = session(tmp_path, "A", 60, parts="facts")
    assert (
        done.returncode == 0
        and list(found["parts"]) == ["facts"]
        and not found["parts"]["facts"]["exit_code"]
    )
    for block, parts in (("A", "facts threads"), ("Z", "facts")):
        folder = tmp_path / block
        folder.mkdir()
        done, found = session(folder, block, parts=parts)
        assert (done.returncode, found) == (2, {}) and not (folder / "out").exists()


@needs_the_processor
def test_what_has_no_time_left_is_said_and_what_was_found_stays(tmp_path):
    done, found = session(tmp_path, "A", 14, parts="facts tests commands")
    assert done.returncode == 0 and "no time left" in done.stdout
    assert found["parts"]["commands"]["exit_code"] == 75 and (tmp_path / "out" / "facts.txt").exists()


@pytest.mark.slow
def test_what_is_carried_is_installed_into_a_folder_of_its_own_unless_it_is_there(tmp_path):
    """A wheel that no machine has, and one that every machine has, packed and found lacking or not."""
    for name in ("nobody_has_this", "pytest"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(f"{name}.py", "FOUND = 5\n")
            wheel.writestr(
                f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    gpu_carry.pack(sorted(tmp_path.glob("*.whl")), tmp_path / "wheels.tar.xz")
    stored = tmp_path / "stored"
    stored.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "wheels.tar.xz", "-C", stored], check=True)
    (wheel,) = gpu_carry.lacking(stored)
    assert Path(wheel).name.startswith("nobody_has_this")
    words = ("-m", "venv", "--system-site-packages", "--without-pip", tmp_path / "venv")
    subprocess.run([sys.executable, *map(str, words)], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = ["-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel]
    subprocess.run([sys.executable, *map(str, pip)], check=True)
    program = "import nobody_has_this as n; print(n.FOUND)"
    shown = subprocess.run([python, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "5\n", shown.stderr


def test_shards_are_carried_as_what_is_read_without_pyarrow(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    shard, groups = tmp_path / "shard_00000.parquet", [["a text", "naïve\ncafé"], ["the last"]]
    parquet.write_table(pyarrow.table({"text": [*groups[0], *groups[1]]}), shard, row_group_size=2)
    gpu_carry.rewrite(shard)
    path = ROOT / "benchmarks" / "peers" / "for_nanochat" / "pyarrow" / "parquet.py"
    own = runpy.run_path(str(path))["ParquetFile"](shard)
    found = [own.read_row_group(i).column("text").to_pylist() for i in range(own.num_row_groups)]
    assert found == groups


def test_the_table_of_answers_names_the_commit_of_each_block_s_last_result():
    page = (ROOT / "docs" / "explanation" / "gpu-runs.md").read_text()
    files = sorted((ROOT / "benchmarks" / "results").glob("gpu-*-block-?.json"))
    results = [json.loads(file.read_text()) for file in files]
    last = {found["block"]: found["commit"].split()[0] for found in results}
    rows = {line[2]: line for line in page.splitlines() if line[:2] == "| " and line[3:5] == " |"}
    assert rows.keys() == set("ANBC")
    for block, line in rows.items():
        assert f"| {last.get(block, 'not yet')} |" in line, line
