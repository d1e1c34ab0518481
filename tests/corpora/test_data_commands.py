"""distgpt data on the command line: several workers, signals, full disks, and what is printed."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from disks import file_size_limit
from preparing import contents

from conftest import inside, popen, refused

SHARDS = 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Three megabytes: enough for several pieces and for signals to arrive in between."""
    path = tmp_path_factory.mktemp("inputs") / "text.txt"
    path.write_text("".join(f"line {i} with ééé – 中文\n" for i in range(100_000)))
    return path


def arguments(text, out, *more):
    size = text.stat().st_size // SHARDS + 1
    words = ("data", "prepare", text, "--tokenizer", "byte", "--shard-tokens", size, "--out", out, *more)
    return tuple(map(str, words))


def prepare(*how):
    result = inside(*arguments(*how))
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(text, out, "--workers", "1")
    return out


@contextlib.contextmanager
def preparing(text, out, *more):
    """The running command once there is some progress; it is ended in any case."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen(*arguments(text, out, *more), start_new_session=True, **pipes) as process:
        try:
            wait_for(lambda: (out / "progress.json").exists(), process)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition, process):
    until = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.002)


def last_line(stderr):
    assert "Traceback" not in stderr, stderr
    return stderr.splitlines()[-1]


def test_the_number_of_workers_changes_nothing(text, prepared, tmp_path):
    result = prepare(text, tmp_path / "out", "--workers", "3")
    assert contents(tmp_path / "out") == contents(prepared)
    assert f"distgpt train --data {tmp_path / 'out'}\n" in result.stdout
    assert re.search(r"train +[\d,]+ tokens in \d+ shards", result.stdout)
    assert "1 document" in result.stdout


@pytest.mark.ci
def test_killed_and_interrupted_the_same_command_resumes(text, prepared, tmp_path):
    out = tmp_path / "out"
    for shards, ending, code in ((3, signal.SIGKILL, -9), (12, signal.SIGINT, 130)):
        with preparing(text, out, "--workers", "2") as process:
            wait_for(lambda n=shards: len(list(out.glob("*.npy"))) >= n, process)
            os.killpg(process.pid, ending)  # as a terminal does: to all of them
            stderr = process.communicate(timeout=60)[1]
        assert process.returncode == code and "Traceback" not in stderr
        assert not (out / "manifest.json").exists()
    assert "the same command resumes" in stderr and not list(out.glob(".*.tmp"))
    result = prepare(text, out, "--workers", "2")
    assert re.search(r"resuming after [\d,]+ tokens", result.stderr)
    assert contents(out) == contents(prepared)


@pytest.mark.ci
def test_what_is_being_prepared_or_finished_or_senseless_is_refused(text, prepared, tmp_path):
    out = tmp_path / "out"
    with preparing(text, out) as process:
        os.kill(process.pid, signal.SIGSTOP)
        refused(inside(*arguments(text, out)), 2, "another process")
        os.kill(process.pid, signal.SIGCONT)
    refused(inside(*arguments(text, prepared)), 2, "holds shards already")
    for flags, words in (
        (["--val-fraction", "0.1", "--val-shards", "1"], "exclude each other"),
        (["--workers", "0"], "--workers"),
        (["--val-fraction", "1"], "--val-fraction"),
    ):
        result = inside(*arguments(text, tmp_path / "x", *flags))
        assert result.returncode == 2 and words in result.stderr
    for source, tokenizer, out, code, words in (
        ("none.txt", "byte", "x", 65, "none.txt"),
        (text, "bite", "x", 2, "bite"),
        (text, "byte", text, 74, "text.txt"),
    ):
        refused(inside("data", "prepare", source, "--tokenizer", tokenizer, "--out", out), code, words)
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_reported_in_one_line(text, tmp_path):
    with file_size_limit(text.stat().st_size // SHARDS):
        result = inside(*arguments(text, tmp_path / "out", "--workers", "1"))
    assert result.returncode == 74 and not (tmp_path / "out").exists()  # not one shard was finished
    assert re.match(r"distgpt: cannot write .*\.ids: File too large", last_line(result.stderr))


def test_paths_can_be_pasted_and_escapes_are_understood(tmp_path):
    (path := tmp_path / "a b.txt").write_text("text " * 9)
    args = ["--tokenizer", "byte", "--val-fraction", "0", "--separator", r"\n\t\n"]
    result = inside("data", "prepare", path, *args, "--out", out := tmp_path / "my shards")
    assert f"distgpt train --data '{out}'\n" in result.stdout
    assert json.loads((out / "manifest.json").read_bytes())["separator"] == list(b"\n\t\n")


# What is shown of shards


def test_the_page_about_shards_and_the_same_as_json(prepared):
    page = inside("data", "info", prepared)
    assert page.returncode == 0
    for words in ("byte, 256", "val-000000.npy", "train-000056.npy", "| line ", "matches the manifest"):
        assert words in page.stdout, words
    quick = inside("data", "info", prepared, "--no-verify")
    assert quick.returncode == 0 and "not verified" in quick.stdout and not quick.stderr
    facts = json.loads(inside("data", "info", prepared, "--json").stdout)
    assert facts["verified"] is True and facts["documents"] == 1
    assert "line" in facts["beginning"] and len(facts["shards"]) == len(list(prepared.glob("*.npy")))


def test_everything_that_is_wrong_is_reported_in_one_line(prepared, tmp_path):
    out = shutil.copytree(prepared, tmp_path / "out")
    path = out / "train-000003.npy"
    data = path.read_bytes()
    path.write_bytes(data[:500] + b"x" + data[501:])
    (out / "train-000099.npy").write_bytes(data)
    for flags in ([], ["--json"]):
        result = inside("data", "info", out, *flags)
        assert result.returncode == 65 and not result.stdout
        printed = last_line(result.stderr)
        assert "train-000003.npy is damaged" in printed
        assert "train-000099.npy is not in the manifest" in printed


def test_a_folder_without_shards_is_refused(text, tmp_path):
    refused(inside("data", "info", text), 65, "is not a folder of shards")
    for progress, words in (
        (None, "is not a folder of shards"),
        ("{}", "is not a folder of shards"),
        ('{"format": "distgpt-unfinished-shards"}', "not finished"),
    ):
        if progress:
            (tmp_path / "progress.json").write_text(progress)
        refused(inside("data", "info", tmp_path), 65, words)
