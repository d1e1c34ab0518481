import json
import os
import runpy
import subprocess
import sys
import zipfile
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
    logs = {name: (tmp_path / "out" / f"{name}.txt") for name in wrong}
    assert not wrong, {name: log.read_text()[-3000:] for name, log in logs.items() if log.exists()} or wrong
    assert found["block"] == block and found["rehearsal"] and found["commit"]
    for file in (tmp_path / "out").glob("*.txt"):
        text = file.read_text()
        # Exit code 2 is a wrong option, possibly of a command that does not set the part's exit code.
        for word in ("[no time left", "Traceback", "[exit code 2 "):
            assert word not in text, (file.name, text[-2000:])
    skipped = [name for name, part in found["parts"].items() if "skipped" in part]
    assert not skipped or block in "BNC", done.stdout
    if block == "N":  # its tables on the page
        page = "\n".join(node_table.page([tmp_path / "out"]))
        for heading in ("The node", "tokens/s by cores", "Small presets", "Text", "Sums over ranks", "Served"):
            assert heading in page, page


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
def test_missing_program_skips_its_part(tmp_path):
    done, found = session(tmp_path, "A", 60, parts="sanitize collect", tools={})
    for part in ("sanitize", "collect"):
        assert found["parts"][part]["exit_code"] is None
        assert f"{part}: skipped: {found['parts'][part]['skipped']}" in done.stdout
    assert "compute-sanitizer" in found["parts"]["sanitize"]["skipped"]


# A Python that, instead of the command line, prints the cache directory.
CALLED = f"""#!/bin/sh
case "$1 $2" in
*hostgpu.py*) echo "caches in $XDG_CACHE_HOME" ;;
*"import starlette") exit 1 ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.ci
@needs_mpi
def test_server_that_cannot_start_is_skipped(tmp_path):
    python = program(tmp_path / "tools" / "python", CALLED)
    done, found = session(tmp_path, "A", 60, parts="commands", PY=str(python))
    part = found["parts"]["commands"]
    assert part["exit_code"] == 0 and part["skipped"] == "serve: no starlette" and part["skipped"] in done.stdout


@pytest.mark.ci
def test_cold_start_uses_a_separate_empty_cache(tmp_path):
    python = program(tmp_path / "tools" / "python", CALLED)
    session(tmp_path, "B", 60, parts="startup counters", PY=str(python), XDG_CACHE_HOME="/its/own")
    lines = {name: (tmp_path / "out" / f"{name}.txt").read_text().splitlines() for name in ("startup", "counters")}
    caches = {name: [line for line in found if "caches" in line] for name, found in lines.items()}
    assert caches["startup"][:2] == caches["counters"] * 2 == ["caches in /its/own"] * 2
    assert caches["startup"][2].endswith("/empty")


@pytest.mark.ci
def test_sanitizers_are_always_collected(tmp_path):
    slow = f"#!/bin/sh\nsleep 1\necho ended >>{tmp_path}/ended\nexit 9\n"
    _, found = session(tmp_path, "A", 60, parts="sanitize", tools={"compute-sanitizer": slow})
    assert (tmp_path / "ended").read_text().split() == ["ended"] * 5
    assert found["parts"]["collect"]["exit_code"] == 9  # the sanitizer's exit code


@pytest.mark.ci
def test_failed_setup_is_reported(tmp_path):
    for number, (python, parts) in enumerate((("", "collect"), ("/no/such/python", "sanitize"))):
        folder = tmp_path / str(number)
        program(folder / "carry" / "wheels.tar.xz", "no archive")
        done, found = session(folder, "A", 60, parts=parts, PY=python)
        code = found["parts"]["prepare"]["exit_code"]
        assert code and f"prepare: exit code {code}" in done.stdout and found["commit"]


def test_commit_identifies_the_tree(tmp_path, monkeypatch):
    def known():
        return gpu_carry.commit_of_this_tree(tmp_path)

    monkeypatch.setattr(gpu_carry, "HERE", tmp_path / "benchmarks")
    source = program(tmp_path / "distgpt" / "model.py", "one = 1\n")
    assert known()[0] == "unknown" and known()[1]
    (tmp_path / "commit.txt").write_text(f"abc 2026-11-27 Its message\n{gpu_carry.digest()}\n")
    assert known() == ("abc 2026-11-27 Its message", "")
    program(tmp_path / "distgpt" / "__pycache__" / "model.pyc", "made by running")
    assert known() == ("abc 2026-11-27 Its message", "")
    source.write_text("one = 2\n")
    assert known()[0] == "unknown" and "abc" in known()[1]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "distgpt/model.py"], ["commit", "-q", "-m", "Two"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    found, warning = known()
    assert found.endswith(" Two") and "dirty" not in found and "abc" in warning
    source.write_text("one = 3\n")
    assert known()[0].split()[0].endswith("-dirty")


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


@pytest.mark.ci
def test_only_rebuilt_files_are_removed(tmp_path):
    text, folder = tmp_path / "text.jsonl", tmp_path / "C"
    text.write_text(json.dumps({"text": "a text"}))
    for name in ("wheels.tar.xz", "texts/old.jsonl", "nanochat/old.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("from before")
    words = ("C", "--only", "texts", "--train", text, "--val", text, "--into", tmp_path)
    assert carry(*words).returncode == 0
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left == {"commit.txt", "wheels.tar.xz", "texts/train.jsonl", "texts/val.jsonl"}
    # Cubins from another tree keep its commit.
    (folder / "commit.txt").write_text("another\n")
    (folder / "cache.tar.xz").write_text("from before")
    assert carry(*words).returncode == 0 and (folder / "commit.txt").read_text() == "another\n"


@pytest.mark.slow
def test_missing_wheels_are_installed_separately(tmp_path):
    """One wheel is on no machine, and the other one is installed."""
    for name in ("nobody_has_this", "pytest"):
        about = f"{name}-1.0.dist-info"
        files = {f"{name}.py": "FOUND = 5\n", f"{about}/RECORD": ""}
        files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)
    gpu_carry.pack(sorted(tmp_path.glob("*.whl")), tmp_path / "wheels.tar.xz")
    stored, venv = tmp_path / "stored", tmp_path / "venv"
    stored.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "wheels.tar.xz", "-C", stored], check=True)
    (wheel,) = gpu_carry.lacking(stored)
    assert Path(wheel).name.startswith("nobody_has_this")
    python = venv / "bin" / "python"
    for words in (
        ["venv", "--system-site-packages", "--without-pip", venv],
        ["pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel],
    ):
        subprocess.run([sys.executable, "-m", *map(str, words)], check=True)
    assert subprocess.check_output([python, "-c", "import nobody_has_this as n; print(n.FOUND)"], text=True) == "5\n"


def test_carried_shards_need_no_pyarrow(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    shard, groups = tmp_path / "shard_00000.parquet", [["a text", "naïve\ncafé"], ["the last"]]
    parquet.write_table(pyarrow.table({"text": [*groups[0], *groups[1]]}), shard, row_group_size=2)
    gpu_carry.rewrite(shard)
    path = ROOT / "benchmarks" / "peers" / "for_nanochat" / "pyarrow" / "parquet.py"
    own = runpy.run_path(str(path))["ParquetFile"](shard)
    found = [own.read_row_group(i).column("text").to_pylist() for i in range(own.num_row_groups)]
    assert found == groups
