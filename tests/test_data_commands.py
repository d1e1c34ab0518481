"""distgpt data on the command line: several processes, signals, full disks, and what is said."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from distgpt.show import datapages
from distgpt.units import count
from tests.conftest import clean_environment, command, distgpt, refused

SHARDS = 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Six megabytes: enough for several pieces and for signals to arrive in between."""
    path = tmp_path_factory.mktemp("inputs") / "text.txt"
    path.write_text("".join(f"line {i} with ééé – 中文\n" for i in range(200_000)))
    return path


def arguments(text, out, *more):
    size = text.stat().st_size // SHARDS + 1
    return ["data", "prepare", text, "--tokenizer", "byte", "--shard-tokens", size, "--out", out, *more]


def prepare(*how):
    result = distgpt(*map(str, arguments(*how)))
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(text, out, "--workers", "1")
    return out


@contextlib.contextmanager
def preparing(text, out, *more):
    """The running command, which is ended in any case."""
    process = subprocess.Popen(
        command(*map(str, arguments(text, out, *more))),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition, process):
    until = time.monotonic() + 60
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.002)
    return found


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def last_line(stderr):
    assert "Traceback" not in stderr, stderr
    return stderr.splitlines()[-1]


def test_the_number_of_workers_changes_nothing(text, prepared, tmp_path):
    result = prepare(text, tmp_path / "out", "--workers", "3")
    assert contents(tmp_path / "out") == contents(prepared)
    assert f"next: distgpt train --data {tmp_path / 'out'}" in result.stdout
    assert re.search(r"train +[\d,]+ tokens in \d+ shards", result.stdout)
    assert "1 document" in result.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_at_any_time_the_same_command_goes_on(workers, text, prepared, tmp_path):
    out = tmp_path / "out"
    for shards in (3, 20):
        with preparing(text, out, "--workers", workers) as process:
            wait_for(lambda n=shards: len(list(out.glob("*.npy"))) >= n, process)
            process.kill()
            process.wait()
        assert not (out / "manifest.json").exists()
    result = prepare(text, out, "--workers", workers)
    assert re.search(r"resuming after \d\d finished shards", result.stderr)
    assert contents(out) == contents(prepared)


def test_workers_do_not_outlive_a_killed_parent(text, tmp_path):
    with preparing(text, tmp_path / "out", "--workers", "2") as process:
        workers = wait_for(lambda: workers_of(process), process)
        wait_for(lambda: list((tmp_path / "out").glob("*.npy")), process)
        process.kill()
        process.wait()
        until = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_leaves_what_is_finished(workers, text, prepared, tmp_path):
    out = tmp_path / "out"
    with preparing(text, out, "--workers", workers) as process:
        wait_for(lambda: len(list(out.glob("*.npy"))) >= 3, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in stderr and "the same command resumes" in stderr
    assert not list(out.glob(".*.tmp"))
    prepare(text, out, "--workers", workers)
    assert contents(out) == contents(prepared)


@pytest.mark.parametrize("shards", [0, 1])
def test_a_killed_worker_ends_the_command(shards, text, tmp_path):
    with preparing(text, tmp_path / "out", "--workers", "2") as process:
        worker = wait_for(lambda: workers_of(process), process)[0]
        wait_for(lambda: len(list((tmp_path / "out").glob("*.npy"))) >= shards, process)
        os.kill(worker, signal.SIGKILL)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 70
    assert "a worker process was killed" in last_line(stderr)


def test_a_second_command_in_the_same_folder_is_refused(text, tmp_path):
    with preparing(text, tmp_path / "out") as process:
        wait_for(lambda: (tmp_path / "out" / "progress.json").exists(), process)
        os.kill(process.pid, signal.SIGSTOP)
        result = distgpt(*map(str, arguments(text, tmp_path / "out")))
        os.kill(process.pid, signal.SIGCONT)
    refused(result, 2, "another process")


def test_a_full_disk_is_said_in_one_line(text, prepared, tmp_path):
    out = tmp_path / "out"
    limit = text.stat().st_size // SHARDS
    result = subprocess.run(
        command(*map(str, arguments(text, out, "--workers", "1"))),
        env=clean_environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 74
    assert re.match(r"distgpt: cannot write .*\.npy: File too large", last_line(result.stderr))
    assert not out.exists()  # not one shard was finished


def test_what_is_finished_is_not_made_again(text, prepared):
    refused(distgpt(*map(str, arguments(text, prepared))), 2, "holds shards already")


def test_flags_that_make_no_sense_are_refused(text, tmp_path):
    for flags, words in (
        (["--val-fraction", "0.1", "--val-shards", "1"], "exclude each other"),
        (["--workers", "0"], "--workers"),
        (["--val-fraction", "1"], "--val-fraction"),
    ):
        result = distgpt(*map(str, arguments(text, tmp_path / "out", *flags)))
        assert result.returncode == 2 and words in result.stderr
    refused(distgpt("data", "prepare", "none.txt", "--tokenizer", "byte", "--out", "x"), 65, "none.txt")
    refused(distgpt("data", "prepare", text, "--tokenizer", "bite", "--out", "x"), 2, "bite")
    refused(distgpt("data", "prepare", text, "--tokenizer", "byte", "--out", text), 74, "text.txt")
    assert not (tmp_path / "out").exists()


def test_what_is_no_utf8_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"some words \xff\xfe and more\n" * 9)
    result = distgpt("data", "prepare", tmp_path, "--tokenizer", "byte", "--out", tmp_path / "out")
    assert result.returncode == 0 and "18 × U+FFFD" in result.stdout


def test_a_bad_line_of_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"body": "what"}\n')
    for workers in ("1", "2"):
        flags = ["--tokenizer", "byte", "--out", tmp_path / "out", "--workers", workers]
        result = distgpt("data", "prepare", tmp_path / "a.jsonl", *map(str, flags))
        assert result.returncode == 65
        assert "a.jsonl, line 2: not an object with a text under 'text'" in last_line(result.stderr)
        assert not (tmp_path / "out").exists()


def test_the_page_about_shards(prepared):
    result = distgpt("data", "info", prepared)
    assert result.returncode == 0
    for words in (
        "byte, 256 entries",
        "val-000000.npy",
        "train-000056.npy",
        "| line ",
        "as the manifest says",
    ):
        assert words in result.stdout
    quick = distgpt("data", "info", prepared, "--no-verify")
    assert quick.returncode == 0 and "not verified" in quick.stdout and not quick.stderr


def test_the_same_as_json(prepared):
    result = distgpt("data", "info", prepared, "--json")
    facts = json.loads(result.stdout)
    assert facts["verified"] is True and facts["documents"] == 1
    assert "line" in facts["beginning"] and len(facts["shards"]) == len(list(prepared.glob("*.npy")))


def test_everything_that_is_wrong_is_said_in_one_line(text, tmp_path):
    out = tmp_path / "out"
    prepare(text, out)
    path = out / "train-000003.npy"
    data = path.read_bytes()
    path.write_bytes(data[:500] + b"x" + data[501:])
    (out / "train-000099.npy").write_bytes(data)
    for flags in ([], ["--json"]):
        result = distgpt("data", "info", out, *flags)
        assert result.returncode == 65 and not result.stdout
        said = last_line(result.stderr)
        assert "train-000003.npy is damaged" in said and "train-000099.npy is not in the manifest" in said


def test_a_folder_without_shards_is_refused(text, tmp_path):
    refused(distgpt("data", "info", tmp_path), 65, "no folder of shards")
    refused(distgpt("data", "info", text), 65, "no folder of shards")
    (tmp_path / "progress.json").write_text("{}")
    refused(distgpt("data", "info", tmp_path), 65, "no folder of shards")
    (tmp_path / "progress.json").write_text('{"format": "distgpt-unfinished-shards"}')
    refused(distgpt("data", "info", tmp_path), 65, "not finished")


def test_text_in_the_page_cannot_command_a_terminal(tmp_path):
    (tmp_path / "a.txt").write_text("\x1b[31mred\x07 \x9b2J" * 99)
    flags = ["--tokenizer", "byte", "--out", tmp_path / "out", "--val-fraction", "0"]
    assert distgpt("data", "prepare", tmp_path / "a.txt", *map(str, flags)).returncode == 0
    page = distgpt("data", "info", tmp_path / "out").stdout
    assert "[31mred" in page
    assert not set(page) & {"\x1b", "\x07", "\x9b"}


@pytest.mark.parametrize("width", [80, 60])
def test_the_bar_stays_on_one_line_however_much_there_is(width):
    bar = datapages._Live("tokenizing")
    console = Console(width=width, file=io.StringIO())
    bar.began(999_900_000_000, "byte")
    bar.advanced(1, 1)
    bar._begun -= 7200
    bar.advanced(500_900_000_000, 99_456_789_012)
    console.print(bar.progress.get_renderable())
    (line,) = console.file.getvalue().splitlines()
    assert "500.9/999.9 GB" in line and len(line) <= width


@pytest.mark.parametrize(
    ("n", "words"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1500, "1.5 kB"), (2 * 10**15, "2,000,000.0 GB")],
)
def test_sizes_read_well(n, words):
    assert datapages.size(n) == words


def test_counts_read_well():
    assert [count(n, "shard") for n in (0, 1, 1234)] == ["0 shards", "1 shard", "1,234 shards"]
