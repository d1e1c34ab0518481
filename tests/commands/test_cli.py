import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from functools import partial
from pathlib import Path

import distgpt as package
import numpy as np
import pytest
from disks import small_disk
from distgpt.commands.bench import infer as infer_bench
from distgpt.commands.generate import serve
from distgpt.core.saved import tensors as weightsfile
from distgpt.core.saved.checkpoint import newest_step

from conftest import SMALL, clean_environment, command, distgpt, inside, metrics, popen, refused

PROMPT = "the lamp"


@pytest.fixture(scope="module")
def file(trained):
    return trained / "weights.safetensors"


@pytest.fixture
def here(tmp_path):
    return partial(inside, cwd=tmp_path)


@pytest.fixture
def infer(here, file):
    """Generate text, by default with the weights of the small run; JSON output as a dict."""

    def run(*args, weights=file):
        result = here("infer", "--threads", "1", "--weights", weights, *args)
        return json.loads(result.stdout) if "--json" in args and not result.returncode else result

    return run


@pytest.mark.ci
@pytest.mark.smoke
def test_exit_codes(tmp_path):
    small = ["train", *SMALL, "--out", tmp_path / "run"]
    assert distgpt("--version").returncode == 0
    refused(distgpt("train", "--steps", "0"), 2, "steps must")
    refused(distgpt(*small, "--data", "stori"), 65, "did you mean 'story'")
    refused(distgpt(*small, "--init", "nowhere"), 74, "nowhere")
    diverging = distgpt(*small, "--lr", "1e30", "--clip", "0", "--steps", "40")
    assert diverging.returncode == 76 and "Traceback" not in diverging.stderr
    assert [line[:9] for line in diverging.stderr.splitlines()] == ["distgpt: "]


def test_prompt_is_read_from_a_pipe(infer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\r\nlamp")))
    assert infer("--json", "--prompt-file", "-", "--max-new-tokens", "1")["prompt"] == "the\nlamp"


def test_stream_prints_prompt_and_text(infer, tmp_path):
    args = ["--prompt", PROMPT, "--max-new-tokens", "40", "--temperature", "1", "--seed", "5"]
    found, streamed = infer("--json", *args), infer(*args)
    assert streamed.stdout == found["prompt"] + found["text"] + "\n" and found["prompt"] == PROMPT
    assert "40 tokens in" in streamed.stderr and "tokens/s" in streamed.stderr
    (tmp_path / "prompt").write_bytes(b"\xef\xbb\xbfthe\r\nlamp")
    assert infer("--json", "--prompt-file", "prompt")["prompt"] == "the\nlamp"
    assert len(infer("--json", "--max-new-tokens", "3")["tokens"]) == 3
    assert infer("--prompt", PROMPT, "--max-new-tokens", "0").stdout == f"{PROMPT}\n"


def test_bundled_sample_is_announced(here):
    result = here("infer", "--max-new-tokens", "5", "--prompt", "The boat")
    assert result.returncode == 0 and result.stdout.startswith("The boat")
    assert result.stderr.splitlines()[0] == "no --weights: using the bundled sample"


def test_auto_is_the_default_of_threads(infer):
    auto, left_out = (infer(*words, "--seed", "1", "--max-new-tokens", "8") for words in (["--threads", "auto"], []))
    assert auto.returncode == 0 and auto.stdout == left_out.stdout and infer("--threads", "many").returncode == 2


def test_samples_stops_and_logprobs_on_command_line(infer, file):
    hot = ["--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "1", "--seed", "5"]
    one, three = infer("--json", *hot), infer("--json", *hot, "--n", "3", "--logprobs", "2")
    assert one["tokens"] == three["tokens"] == three["choices"][0]["tokens"] and "choices" not in one
    texts = [choice["text"] for choice in three["choices"]]
    assert len(set(texts)) == 3 and [len(each["logprobs"]) for each in three["choices"]] == [12] * 3
    shown = infer(*hot, "--n", "3").stdout
    assert shown == "".join(f"--- {i} of 3\n{PROMPT}{text}\n" for i, text in enumerate(texts, 1))
    stop = one["text"].split()[3]
    stopped = infer("--json", *hot, "--stop", "zeppelin", "--stop", stop)
    assert stopped["reason"] == "stop" and stopped["text"] == one["text"][: one["text"].index(stop)]
    scored = infer("--json", "--prompt", PROMPT, "--max-new-tokens", "0", "--logprobs", "0", "--prompt-logprobs")
    own = scored["prompt_logprobs"]
    assert own[0] is None and len(own) > 1 and max(own[1:]) < 0
    cold = ["--prompt", PROMPT, "--temperature", "0"]
    greedy = infer(*cold, "--max-new-tokens", "2", "--logprobs", "1").stdout.splitlines()
    likely = np.exp((scores := package.load(file).logits(package.load(file).tokenizer.encode(PROMPT)))[-1])
    word = package.load(file).tokenizer.decode([scores[-1].argmax()])
    chance = f"'{word}' {likely.max() / likely.sum():.1%}"
    assert len(greedy) == 3 and greedy[1] == f"{chance}   of {chance}"
    full = infer("--json", *cold, "--overflow", "stop", "--max-new-tokens", "99")
    assert full["reason"] == "context"
    for words in ((), ("--lookup", "4"), ("--cache-memory", "1K")):
        found = infer("--json", *cold, "--overflow", "shift", "--max-new-tokens", "60", *words)
        assert found["reason"] == "length" and found["tokens"][: len(full["tokens"])] == full["tokens"]


def on_terminal(*args, **how):
    reading, writing = pty.openpty()
    with popen(*args, stdout=writing, stderr=subprocess.DEVNULL, **how) as process:
        os.close(writing)
        shown = b""
        with contextlib.suppress(OSError):  # at the end
            while part := os.read(reading, 1 << 16):
                shown += part
        os.close(reading)
    assert process.returncode == 0
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.ci
def test_terminal_gets_no_control_characters(here, infer, tmp_path):
    train_bytes = ["train", *SMALL, "--tokenizer", "byte", "--steps", "2", "--sample-every", "1"]
    shown = on_terminal(*train_bytes, "--progress", "plain", "--out", "run", cwd=tmp_path)
    assert "--- sample after step 2" in shown and "\ufffd" in shown
    assert not [c for c in shown if not c.isprintable() and c not in "\n\t"]
    weights = tmp_path / "run" / "weights.safetensors"
    args = ["--prompt", "a\x1b[2J\u202e\u2069", "--max-new-tokens", "200", "--temperature", "2"]
    found = infer("--json", *args, weights=weights)
    exact = found["prompt"] + found["text"] + "\n"
    assert {"\x1b", "\x00"} & set(found["text"]) and infer(*args, weights=weights).stdout == exact
    unassigned = {c for c in exact if unicodedata.category(c) == "Cn"}  # ignored by terminals
    kept = [c if c in "\n\t" or c.isprintable() or c in unassigned else "\ufffd" for c in exact]
    assert on_terminal("infer", "--weights", weights, *args) == "".join(kept)


@pytest.mark.ci
@pytest.mark.smoke
def test_infer_exits_if_its_reader_leaves(file):
    reading, writing = os.pipe()
    words = ["infer", "--weights", file, "--prompt", PROMPT, "--max-new-tokens", "3000", "--threads", "1"]
    job = popen(*words, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    os.close(reading)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 74 and "Traceback" not in errors and "Exception ignored" not in errors


@pytest.mark.ci
def test_train_saves_if_its_reader_leaves(tmp_path):
    words = ["train", *SMALL, "--steps", "1000000", "--save-every", "1000000", "--out", tmp_path / "run"]
    with popen(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        while not job.stdout.readline().startswith("step"):
            pass
        job.stdout.close()
        errors = job.stderr.read()
    saved = newest_step(tmp_path / "run" / "checkpoints")
    assert job.returncode == 74 and saved == max(metrics(tmp_path / "run")) > 1
    assert errors.startswith(f"distgpt: standard output was closed; step {saved} is saved; ")
    assert len(errors.splitlines()) == 1


@pytest.mark.ci
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_train_continues_if_output_fails(tmp_path):
    with Path("/dev/full").open("w") as full:
        words = ["train", *SMALL, "--steps", "3", "--out", tmp_path / "run"]
        job = popen(*words, stdout=full, stderr=subprocess.PIPE, text=True)
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and len(metrics(tmp_path / "run")) == 3
    assert "cannot write to standard output (No space left on device)" in errors


def test_group_without_command_prints_help(here):
    for words in ((), ("data",), ("weights",), ("tokenizer",), ("bench",)):
        shown = here(*words)
        usage = " ".join(["Usage: distgpt", *words, "[OPTIONS] COMMAND"])
        assert shown.returncode == 2 and shown.stdout == "" and shown.stderr.startswith(usage)
        assert "\n\nCommands:\n" in shown.stderr and "Error" not in shown.stderr


@pytest.mark.ci
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_infer_handles_full_and_closed_output(file):
    args = ["infer", "--weights", file, "--prompt", PROMPT, "--max-new-tokens", "3"]
    with Path("/dev/full").open("w") as full:
        job = popen(*args, stdout=full, stderr=subprocess.PIPE, text=True)
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 74 and "No space left" in errors and "Traceback" not in errors
    shell = ["sh", "-c", 'exec "$@" >&-', "-", *command(*args)]
    result = subprocess.run(shell, env=clean_environment(), capture_output=True, text=True)
    assert result.returncode == 0 and "Traceback" not in result.stderr


# Command, exit code, words of the message. For settings, see tests/core/config/test_config.py.
REFUSED = (
    (["infer", "--prompt", "the zeppelin"], 65, ["'zeppelin'", "not in the vocabulary"]),
    (["infer", "--prompt", b"the \xff lamp"], 65, ["not valid UTF-8"]),
    (["infer", "--prompt", ""], 2, ["empty"]),
    (["infer", "--prompt-file", "nowhere"], 65, ["nowhere", "No such file"]),
    (["infer", "--prompt-file", "cut"], 65, ["cut", "not UTF-8"]),
    (["infer", "--prompt-file", "blank"], 65, ["blank"]),
    (["infer", "--prompt-file", "."], 65, ["directory"]),
    (["infer", "--temperature", "-1"], 2, ["temperature"]),
    (["infer", "--stop", ""], 2, ["stop strings must not be empty"]),
    (["infer", "--cache-memory", "much"], 2, ["'much'"]),
    (["infer", "--threads", "0"], 2, ["--threads", "at least 1"]),
    (["infer", "--threads", "9999999999"], 2, ["--threads", "at most"]),
    (["infer", "--stage", "cuda"], 2, ["'cuda'", "GPU"]),
    (["train", "--data", b"bad\xff"], 2, ["data", "not valid UTF-8"]),
    (["train", "--tokenizer", "text"], 65, ["not a saved tokenizer"]),
    (["train", "--vocab-size", "20"], 2, ["vocab_size", "20", "tokenizer"]),
    (["train", "--config", "nowhere"], 2, ["nowhere"]),
    (["train", "--n-layer", "8", "--n-embd", str(2**17)], 2, ["GiB on this machine", "smaller model"]),
    (["train", "--optimizer", "muon", "--n-embd", str(2**17)], 2, ["GiB on this machine", "Muon's updates"]),
    (["train", "--stage", "cuda"], 2, ["GPU"]),
    (["train", "--out", "text"], 2, ["text", "not a directory"]),
    (["train", "--out", "text/run"], 74, ["text"]),
    (["train", "--out", "."], 2, ["not empty"]),
)
FILES = {"cut": b"ab\x80", "blank": b"", "text": b"no tokenizer"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_invalid_command_is_rejected_without_traces(words, code, said, files, file):
    usual = ["--weights", file, "--threads", "1"] if words[0] == "infer" else [*SMALL, "--out", "run"]
    before = {path: path.is_dir() or path.read_bytes() for path in files.iterdir()}
    # A later option replaces an earlier one.
    result = inside(words[0], *usual, *words[1:], cwd=files)
    refused(result, code, *said)
    assert result.stdout == "" and {path: path.is_dir() or path.read_bytes() for path in files.iterdir()} == before


MISTYPED = {"infer --prompt a --prompt-file b": "cannot be combined", "infer --promt a": "--prompt", "trian": "'train'"}
MISTYPED |= {"train --stage seriel": "serial", "train --save-evry 3": "--save-every"}


@pytest.mark.parametrize(("command", "words", "name", "value"), [
    (serve, "--max-body 2M", "body", 2 << 20), (serve, "", "body", 1 << 20), (serve, "--slots 3", "slots", 3),
    (infer_bench, "--dtype float32 --dtype int8", "dtypes", ("float32", "int8")),
    (infer_bench, "--requests 2 --requests 4", "requests", (2, 4)),
])  # fmt: skip
def test_options_have_their_values(command, words, name, value):
    assert command.make_context("distgpt", words.split()).params[name] == value


@pytest.mark.parametrize(("line", "named"), MISTYPED.items())
def test_mistyped_command_suggests_correction(line, named):
    result = inside(*line.split())
    assert result.returncode == 2 and named in result.stderr and "Traceback" not in result.stderr


def test_depth_allows_other_head_counts(here):
    size = ["--n-head", "3", "--steps", "1", "--seq-len", "16", "--batch-size", "2", "--threads", "1"]
    assert here("train", "--depth", "3", *size, "--data", "story", "--out", "run").returncode == 0


# Valid files with contradictory contents. For corrupt files, see tests/core/saved/test_weightsfile.py.
WEIGHTS = (
    ("missing tensor", ["missing: wpe"]),
    ("not finite", ["not finite"]),
    ("no tokenizer", ["no tokenizer"]),
    ("n_layer = 1000000000", ["at most"]),
    ("n_embd = 32", ["wrong shape"]),
    ("vocab_size = 150", ["its tokenizer has", "more than the 150"]),
)


@pytest.mark.parametrize(("kind", "words"), WEIGHTS)
def test_unusable_weights_are_rejected(kind, words, infer, file, tmp_path):
    header = weightsfile.read_header(file)
    tensors = {name: np.empty(entry.shape, np.float32) for name, entry in header.tensors.items()}
    weightsfile.read_into(file, tensors)
    changes = {
        "missing tensor": {"wpe": None},
        "not finite": {"wte": np.where(np.arange(16) == 3, np.nan, tensors["wte"])},
        "no tokenizer": {"tokenizer": ""},
    }
    config = re.sub(f"^{kind.split()[0]} = .*", kind, header.metadata["config"], flags=re.MULTILINE)
    change = changes.get(kind, {"config": config})
    tensors = {k: change.get(k, v) for k, v in tensors.items() if change.get(k, v) is not None}
    weightsfile.write_tensors(tmp_path / kind, tensors, {k: change.get(k, v) for k, v in header.metadata.items()})
    result = infer("--prompt", PROMPT, weights=tmp_path / kind)
    refused(result, 65, tmp_path / kind, *words)
    assert result.stdout == ""


@pytest.mark.ci
def test_memory_error_names_its_page():
    """16 slots of a million positions need 30 GB; the limit is 4 GiB."""
    words = command("infer", "--n", "16", "--context", str(1 << 20), "--cache-memory", "900G")
    limited = ["sh", "-c", 'ulimit -v 4194304 && exec "$@"', "-", *words]
    result = subprocess.run(limited, env=clean_environment(), capture_output=True, text=True)
    said = result.stderr.splitlines()[-1]
    assert result.returncode == 70 and said.startswith("distgpt: not enough memory: "), result.stderr
    assert said.endswith("(distgpt help out-of-memory)")


@pytest.mark.ci
def test_read_only_or_full_disk_is_reported(here, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place, "ro,size=1m"):
        refused(here("train", *SMALL, "--out", place / "run"), 74, place, "Read-only")
    with small_disk(place, "size=64k"):
        (place / "filler").write_bytes(bytes(60 << 10))
        with (place / "filler").open("ab") as filler, pytest.raises(OSError):
            while True:
                os.write(filler.fileno(), bytes(4096))
        refused(here("train", *SMALL, "--out", place / "run"), 74, place, "No space left")
        assert [path.name for path in place.iterdir()] == ["filler"]


def test_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "distgpt.show.plot", raising=False)
    refused(inside("plot", "run", cwd=tmp_path), 2, "requires matplotlib, which is not installed: pip install")
