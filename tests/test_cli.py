"""The command line: inference, its output, and one clear line for everything that is wrong with the input."""

import json
import os
import pickle
import subprocess

import numpy as np
import pytest
from conftest import SMALL, clean_environment, command, distgpt, refused, train

import distgpt as package
from distgpt.data.text import bundled
from distgpt.errors import DataError
from distgpt.saved import tensors as weightsfile

PROMPT = "the lamp"


@pytest.fixture(scope="module")
def file(trained):
    return trained / "weights.safetensors"


def infer(*args, **how):
    return distgpt("infer", "--threads", "1", *args, **how)


def answer(*args):
    result = infer("--json", *args)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# Inference


def test_greedy_text_is_the_likeliest_token_each_time_past_the_context(file):
    model = package.load(file)
    ids = model.tokenizer.encode(PROMPT).tolist()
    found = answer("--weights", file, "--prompt", PROMPT, "--max-new-tokens", "40")
    seen = list(ids)
    for token in found["tokens"]:
        assert token == model.logits([seen[-16:]])[0, -1].argmax()
        seen.append(token)
    assert len(seen) == len(ids) + 40 > model.config.seq_len
    assert found["prompt"] == PROMPT
    assert found["prompt"] + found["text"] == model.tokenizer.decode(seen)


def test_the_stream_is_the_text(file):
    args = [
        "--weights",
        file,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "40",
        "--temperature",
        "1",
        "--seed",
        "5",
    ]
    found, streamed = answer(*args), infer(*args)
    assert streamed.stdout == found["prompt"] + found["text"] + "\n"
    assert "40 tokens in" in streamed.stderr and "tokens/s" in streamed.stderr


def test_a_prompt_from_a_file_and_none_at_all(file, tmp_path):
    (tmp_path / "prompt").write_bytes(b"\xef\xbb\xbfthe\r\nlamp")
    assert answer("--weights", file, "--prompt-file", tmp_path / "prompt")["prompt"] == "the\nlamp"
    assert len(answer("--weights", file, "--max-new-tokens", "3")["tokens"]) == 3


def test_no_new_tokens(file):
    found = answer("--weights", file, "--prompt", PROMPT, "--max-new-tokens", "0")
    assert found["text"] == "" and found["tokens"] == []
    assert infer("--weights", file, "--prompt", PROMPT, "--max-new-tokens", "0").stdout == f"{PROMPT}\n"


def test_the_bundled_sample_writes(tmp_path):
    try:
        bundled("weights", "sample.safetensors")
    except DataError:
        pytest.skip("no bundled sample in this checkout yet")
    result = infer("--max-new-tokens", "5", "--prompt", "The", cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.startswith("The")


# Output that goes nowhere


@pytest.mark.parametrize("args", [["infer"], ["infer", "--json"], ["train"], ["train", "--progress", "live"]])
def test_a_reader_that_leaves_early(file, tmp_path, args):
    if args[0] == "infer":
        args = [*args, "--weights", file, "--prompt", PROMPT, "--max-new-tokens", "3000", "--threads", "1"]
    else:
        args = [*args, *SMALL, "--steps", "5000", "--sample-every", "10", "--out", tmp_path / "run"]
    reading, writing = os.pipe()
    job = subprocess.Popen(
        command(*args), stdout=writing, stderr=subprocess.PIPE, text=True, env=clean_environment()
    )
    os.close(writing)
    os.close(reading)
    _, errors = job.communicate(timeout=60)
    assert job.returncode in (0, 74)
    assert "Traceback" not in errors and "Exception ignored" not in errors and "distgpt:" not in errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_that_cannot_be_written(file, more):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        result = subprocess.run(
            command("infer", "--weights", file, "--prompt", PROMPT, "--max-new-tokens", "3", *more),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
    assert result.returncode == 74
    assert "No space left" in result.stderr and "Traceback" not in result.stderr


def test_output_that_was_closed(file):
    line = " ".join(map(str, command("infer", "--weights", file, "--max-new-tokens", "3")[3:]))
    shell = ["sh", "-c", f'exec "$0" -c "$1" {line} >&-', *command()[::2]]
    result = subprocess.run(shell, env=clean_environment(), capture_output=True, text=True)
    assert result.returncode == 0 and "Traceback" not in result.stderr


def test_a_terminal_without_the_characters(tmp_path):
    run = train(tmp_path / "run", "--steps", "1", env={"PYTHONIOENCODING": "ascii"})
    args = ["--weights", run / "weights.safetensors", "--temperature", "1", "--max-new-tokens", "50"]
    assert infer(*args, env={"PYTHONIOENCODING": "ascii"}).returncode == 0


# Prompts


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["--prompt", "the zeppelin"], 65, ["'zeppelin'", "not in the vocabulary"]),
        (["--prompt", b"the \xff lamp"], 65, ["not valid UTF-8"]),
        (["--prompt", ""], 2, ["empty"]),
        (["--prompt", "   "], 2, ["empty"]),
        (["--prompt-file", "nowhere"], 65, ["nowhere", "No such file"]),
        (["--prompt-file", "binary"], 65, ["binary", "not UTF-8"]),
        (["--prompt-file", "blank"], 65, ["blank is empty"]),
        (["--prompt-file", "."], 65, ["directory"]),
        (["--temperature", "-1"], 2, ["temperature"]),
        (["--temperature", "nan"], 2, ["temperature"]),
        (["--top-k", "-1"], 2, ["top_k"]),
        (["--top-p", "0"], 2, ["top_p"]),
        (["--threads", "0"], 2, ["--threads", "at least 1"]),
        (["--threads", "9999999999"], 2, ["--threads", "at most"]),
        (["--stage", "cuda"], 2, ["'cuda'", "GPU"]),
    ],
)
def test_requests_that_make_no_sense(file, tmp_path, args, code, words):
    (tmp_path / "binary").write_bytes(b"ab\x80")
    (tmp_path / "blank").write_bytes(b"")
    result = infer("--weights", file, *args, cwd=tmp_path)
    refused(result, code, *words)
    assert result.stdout == ""


def test_a_character_that_was_never_seen(tmp_path):
    run = train(tmp_path / "run", "--steps", "1", "--tokenizer", "char")
    refused(
        infer("--weights", run / "weights.safetensors", "--prompt", "é"), 65, "character 'é'", "position 0"
    )


@pytest.mark.parametrize(
    "args, word",
    [
        (["infer", "--prompt", "a", "--prompt-file", "b"], "exclude"),
        (["infer", "--max-new-tokens", "-1"], "max-new-tokens"),
        (["infer", "--seed", "-1"], "seed"),
        (["infer", "--promt", "a"], "--prompt"),
        (["train", "--stage", "seriel"], "serial"),
        (["train", "--steps", "many"], "many"),
        (["train", "--norm", "layer"], "layernorm"),
        (["trian"], "train"),
    ],
)
def test_wrong_command_lines_say_what_is_allowed(args, word):
    result = distgpt(*args)
    assert result.returncode == 2 and word in result.stderr and "Traceback" not in result.stderr


# Weights


def with_config(path, header, tensors, **changes):
    """A weights file like another whose configuration claims something else."""
    config = header.metadata["config"].splitlines()
    config = [
        f"{line.split(' = ')[0]} = {changes[line.split(' = ')[0]]}"
        if line.split(" = ")[0] in changes
        else line
        for line in config
    ]
    weightsfile.write_tensors(path, tensors, {**header.metadata, "config": "\n".join(config)})


def bad_weights(kind, source, path):
    content = source.read_bytes()
    header = weightsfile.read_header(source)
    tensors = {name: np.empty(entry.shape, np.float32) for name, entry in header.tensors.items()}
    weightsfile.read_into(source, tensors)
    if kind == "truncated":
        path.write_bytes(content[:-100])
    elif kind == "flipped":
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pickled":
        path.write_bytes(pickle.dumps(tensors))
    elif kind == "foreign":
        weightsfile.write_tensors(path, tensors, {"format": "pt"})
    elif kind == "wrong shape":
        weightsfile.write_tensors(path, {**tensors, "wte": tensors["wte"][:, :8]}, header.metadata)
    elif kind == "missing tensor":
        weightsfile.write_tensors(path, {k: v for k, v in tensors.items() if k != "wpe"}, header.metadata)
    elif kind == "not finite":
        tensors["wte"][3, 3] = np.nan
        weightsfile.write_tensors(path, tensors, header.metadata)
    elif kind == "no tokenizer":
        weightsfile.write_tensors(path, tensors, {**header.metadata, "tokenizer": ""})
    elif kind == "bad tokenizer":
        weightsfile.write_tensors(path, tensors, {**header.metadata, "tokenizer": "{}"})
    elif kind == "bad config":
        weightsfile.write_tensors(path, tensors, {**header.metadata, "config": "[model"})
    elif kind == "directory":
        path.mkdir()
    elif kind != "missing":
        with_config(path, header, tensors, **{kind.split("=")[0]: kind.split("=")[1]})


@pytest.mark.parametrize(
    "kind, code, words",
    [
        ("missing", 74, ["No such file"]),
        ("directory", 74, ["directory"]),
        ("truncated", 65, ["bytes"]),
        ("flipped", 65, ["checksum"]),
        ("empty", 65, ["not an intact"]),
        ("pickled", 65, ["pickled"]),
        ("foreign", 65, ["not written by distgpt"]),
        ("wrong shape", 65, ["wte is (192, 8), not (192, 16)"]),
        ("missing tensor", 65, ["missing: wpe"]),
        ("not finite", 65, ["not finite"]),
        ("no tokenizer", 65, ["no tokenizer"]),
        ("bad tokenizer", 65, ["tokenizer"]),
        ("bad config", 65, ["TOML"]),
        ("n_layer=3", 65, ["missing: blocks.2"]),
        ("n_layer=900", 65, ["900 layers"]),
        ("n_layer=1000000000", 65, ["at most"]),
        ("n_embd=32", 65, ["wrong shape"]),
        ("n_head=3", 65, ["n_embd 16"]),
        ("vocab_size=300", 65, ["shape"]),
        ("vocab_size=150", 65, ["its tokenizer has", "vocabulary of 150"]),
        ("seq_len=1000000", 65, ["wrong shape"]),
        ("seq_len=1000000000000000", 65, ["at most"]),
        ('mlp="relo"', 65, ["relu"]),
    ],
)
def test_weights_that_cannot_be_used(file, tmp_path, kind, code, words):
    bad_weights(kind, file, tmp_path / "bad")
    result = infer("--weights", tmp_path / "bad", "--prompt", PROMPT)
    refused(result, code, tmp_path / "bad", *words)
    assert result.stdout == ""


# Training: data, settings, places


def textfile(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is empty"]),
        (b"x", ["1 token(s)"]),
        (b"abc\x80def", ["byte 3"]),
        (b"\xff\xfea\x00", ["byte 0"]),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, content, words):
    path = textfile(tmp_path / "text", content)
    args = ["--data", path, "--tokenizer", "char", "--out", tmp_path / "run"]
    refused(distgpt("train", *SMALL, *args), 65, path, *words)
    assert not (tmp_path / "run").exists()


def test_a_short_text_is_repeated(tmp_path):
    path = textfile(tmp_path / "text", b"ab")
    train(tmp_path / "run", "--data", path, "--tokenizer", "char", "--steps", "2")


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["--data", "stori"], 65, ["stori", "did you mean 'story'"]),
        (["--data", b"bad\xff"], 2, ["data", "not valid UTF-8"]),
        (["--data", "."], 65, ["directory"]),
        (["--tokenizer", "letters"], 2, ["letters", "allowed"]),
        (["--tokenizer", "text"], 65, ["not a saved tokenizer"]),
        (["--vocab-size", "20"], 2, ["vocab_size is 20", "tokens"]),
        (["--preset", "gtp2"], 2, ["did you mean 'gpt2'"]),
        (["--config", "nowhere"], 2, ["nowhere"]),
        (["--config", "text"], 2, ["not valid TOML"]),
        (["--config", "typo.toml"], 2, ["btach_size", "did you mean 'batch_size'"]),
        (["--config", "type.toml"], 2, ["steps is 'ten'", "int"]),
        (["--config", "table.toml"], 2, ["[optimizer]"]),
        (["--n-head", "3"], 2, ["n_embd 16", "3"]),
        (["--steps", "0"], 2, ["steps is 0", "at least 1"]),
        (["--lr", "nan"], 2, ["lr is nan"]),
        (["--min-lr", "1"], 2, ["min_lr"]),
        (["--batch-size", "6", "--grad-accum", "4"], 2, ["batch_size 6"]),
        (["--seed", str(2**64)], 2, ["seed"]),
        (["--seed", "-1"], 2, ["seed"]),
        (["--vocab-size", str(10**14)], 2, ["at most"]),
        (["--n-layer", "1000", "--n-embd", str(2**17)], 2, ["GiB on this machine", "smaller model"]),
        (["--stage", "mpi-cuda"], 2, ["GPU"]),
    ],
)
def test_settings_that_make_no_sense(tmp_path, args, code, words):
    textfile(tmp_path / "text", b"no tokenizer and no TOML")
    textfile(tmp_path / "typo.toml", b"[train]\nbtach_size = 3\n")
    textfile(tmp_path / "type.toml", b"steps = 'ten'\n")
    textfile(tmp_path / "table.toml", b"[optimizer]\nlr = 1\n")
    refused(distgpt("train", *SMALL, *args, "--out", "run", cwd=tmp_path), code, *words)
    assert not (tmp_path / "run").exists()


def test_an_out_that_is_taken(tmp_path):
    taken = textfile(tmp_path / "file", b"mine")
    refused(distgpt("train", *SMALL, "--out", taken), 2, taken, "no directory")
    refused(distgpt("train", *SMALL, "--out", taken / "run"), 74, taken)
    refused(distgpt("train", *SMALL, "--out", tmp_path), 2, "not empty")
    assert taken.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [taken]


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a small file system with these options, where we may."""
    places = []

    def mount(options):
        place = tmp_path / f"mount-{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True)
        if done.returncode:
            pytest.skip("needs the right to mount a small file system")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


def test_a_place_that_is_read_only(mounted):
    place = mounted("ro,size=1m")
    refused(distgpt("train", *SMALL, "--out", place / "run"), 74, place, "Read-only")


def test_a_disk_that_is_full_from_the_start(mounted):
    place = mounted("size=64k")
    (place / "filler").write_bytes(bytes(60 << 10))
    with (place / "filler").open("ab") as filler, pytest.raises(OSError):
        while True:
            os.write(filler.fileno(), bytes(4096))
    refused(distgpt("train", *SMALL, "--out", place / "run"), 74, place, "No space left")
    assert [path.name for path in place.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(mounted):
    place = mounted("size=400k")
    args = ["--steps", "100", "--save-every", "1", "--out", place / "run"]
    result = distgpt("train", *SMALL, *args)
    assert result.returncode == 74
    assert "No space left" in result.stderr and len(result.stderr.splitlines()) == 1
    kept = sorted(path.name for path in (place / "run" / "checkpoints").iterdir())
    assert kept and all(name.startswith("step-") for name in kept)
