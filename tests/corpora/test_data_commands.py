import contextlib
import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from disks import file_size_limit
from preparing import contents

from conftest import inside, popen, wait_for

SHARDS = 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write 3 MB: enough for several pieces and for signals to arrive between them."""
    path = tmp_path_factory.mktemp("inputs") / "text.txt"
    path.write_text("".join(f"line {i} with ééé – 中文\n" for i in range(100_000)))
    return path


def arguments(text, out, *more):
    size = text.stat().st_size // SHARDS + 1
    words = ("data", "prepare", text, "--tokenizer", "byte", "--shard-tokens", size, "--out", out, *more)
    return tuple(map(str, words))


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    result = inside(*arguments(text, out, "--workers", "3"))
    assert f"distgpt train --data {out}\n" in result.stdout and "1 document" in result.stdout
    assert re.search(r"train +[\d,]+ tokens in \d+ shards", result.stdout)
    return out


@contextlib.contextmanager
def preparing(text, out, *more):
    """Start the command, wait for progress, and kill it at the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen(*arguments(text, out, *more), start_new_session=True, **pipes) as process:
        try:
            wait_for(lambda: (out / "progress.json").exists() or process.poll() is not None, 60)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.ci
def test_killed_command_resumes(text, prepared, tmp_path):
    out = tmp_path / "out"
    for ending, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        left = len(list(out.glob("*.npy")))  # a worker without files may not have started
        with preparing(text, out, "--workers", "2") as process:
            wait_for(lambda least=left + 3: len(list(out.glob("*.npy"))) >= least, 60)
            os.killpg(process.pid, ending)  # a terminal signals all processes
            stderr = process.communicate(timeout=60)[1]
        assert process.returncode == code and "Traceback" not in stderr and not (out / "manifest.json").exists()
    assert "repeat the command" in stderr and not list(out.glob(".*.tmp"))
    result = inside(*arguments(text, out, "--workers", "1"))
    assert re.search(r"resuming after [\d,]+ tokens", result.stderr) and contents(out) == contents(prepared)


REFUSED = (
    ("data prepare TEXT --val-fraction 0.1 --val-shards 1 --tokenizer byte --out x", 2, "--val-shards"),
    ("data prepare TEXT --workers 0 --tokenizer byte --out x", 2, "--workers"),
    ("data prepare none.txt --tokenizer byte --out x", 65, "none.txt"),
    ("data prepare TEXT --tokenizer bite --out x", 2, "bite"),
    ("data prepare TEXT --tokenizer byte --out TEXT", 74, "text.txt"),
    ("data prepare TEXT --tokenizer byte --out SHARDS", 2, "already contains shards"),
    ("data info TEXT", 65, "is not a directory of shards"),
    ("data info other", 65, "is not a directory of shards"),
    ("data info unfinished", 65, "unfinished"),
)


def test_invalid_data_commands_are_rejected(text, prepared, tmp_path):
    for name, progress in {"other": "{}", "unfinished": '{"format": "distgpt-unfinished-shards"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_text(progress)
    for line, code, words in REFUSED:
        given = [{"TEXT": text, "SHARDS": prepared}.get(word, word) for word in line.split()]
        result = inside(*given, cwd=tmp_path)
        assert result.returncode == code and words in result.stderr, (line, result.stderr)
    assert not (tmp_path / "x").exists()


def test_full_disk_is_reported(text, tmp_path):
    with file_size_limit(text.stat().st_size // SHARDS):
        result = inside(*arguments(text, tmp_path / "out", "--workers", "1"))
    assert result.returncode == 74 and not (tmp_path / "out").exists()  # not one shard was finished
    assert re.match(r"distgpt: cannot write .*\.ids: File too large", result.stderr.splitlines()[-1])


def test_paths_are_quoted_and_escapes_decoded(tmp_path):
    (path := tmp_path / "a b.txt").write_text("text " * 9)
    args = ["--tokenizer", "byte", "--val-fraction", "0", "--separator", r"\n\t\n"]
    result = inside("data", "prepare", path, *args, "--out", out := tmp_path / "my shards")
    assert f"distgpt train --data '{out}'\n" in result.stdout
    assert json.loads((out / "manifest.json").read_bytes())["separator"] == list(b"\n\t\n")


def test_info_shows_shards_or_all_damage(prepared, tmp_path):
    page = inside("data", "info", prepared)
    assert page.returncode == 0
    for words in ("byte, 256", "val-000000.npy", "train-000056.npy", "| line ", "matches the manifest"):
        assert words in page.stdout, words
    quick = inside("data", "info", prepared, "--no-verify")
    assert quick.returncode == 0 and "not verified" in quick.stdout and not quick.stderr
    facts = json.loads(inside("data", "info", prepared, "--json").stdout)
    assert facts["verified"] is True and facts["documents"] == 1
    assert "line" in facts["beginning"] and len(facts["shards"]) == len(list(prepared.glob("*.npy")))
    out = shutil.copytree(prepared, tmp_path / "out")
    data = (path := out / "train-000003.npy").read_bytes()
    path.write_bytes(data[:500] + b"x" + data[501:])
    (out / "train-000099.npy").write_bytes(data)
    for flags in ([], ["--json"]):
        result = inside("data", "info", out, *flags)
        assert result.returncode == 65 and not result.stdout and "Traceback" not in result.stderr
        printed = result.stderr.splitlines()[-1]
        assert "train-000003.npy is corrupt" in printed and "train-000099.npy is not in the manifest" in printed
