import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import preparing as steps
import pytest
from complaints import complains, done
from disks import file_size_limit
from distgpt.core.base.errors import DataError, DistgptError, StorageError, UsageError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.prepare import preparing
from distgpt.corpora.prepare.preparing import Progress, prepare, reserved
from distgpt.corpora.shards import read_manifest, shards_tokenizer, verify_shards
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from preparing import Quiet, contents, everything, in_steps, interrupt, json_lines, refuse, request, text_of
from tokenizing import small as small_bpe

from conftest import inside, popen, refused, wait_for

inputs, small = steps.inputs, steps.small  # fixtures


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return a directory of two files of JSON lines, and their documents."""
    folder, texts = tmp_path_factory.mktemp("mixed") / "mixed", []
    folder.mkdir()
    for kind in "ab":
        own = [f"{kind}{number} " * (1 + number * 37 % 19) for number in range(40)]
        (folder / f"{kind}.jsonl").write_text(json_lines(own))
        texts += own
    return folder, texts


HELD_OUT = st.one_of(
    st.builds(lambda fraction: {"val_fraction": fraction}, st.sampled_from([0.0, 0.1, 0.2, 0.9])),
    st.builds(lambda shards: {"val_shards": shards}, st.integers(0, 1)),
)


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.sampled_from([None, 0, 1]),
    shard_tokens=st.integers(300, 1500),
    held_out=HELD_OUT,
    separator=st.sampled_from(["auto", "none", " % "]),
    workers=st.integers(1, 3),
    steps=st.tuples(st.integers(300, 900), st.integers(3, 50), st.integers(40, 2000), st.integers(300, 2000)),
)
@example(0, 1000, {"val_fraction": 0.1}, "auto", 1, (400, 7, 40, 900))
def test_every_document_is_written_once(mixed, seed, shard_tokens, held_out, separator, workers, steps):
    texts, between = mixed[1], {"auto": "\n", "none": ""}.get(separator, separator)
    asked = {"seed": seed, "shard_tokens": shard_tokens, "separator": separator, **held_out}
    with tempfile.TemporaryDirectory() as name:
        prepare(request(mixed, Path(name, "whole"), **asked), Quiet())
        with in_steps(*steps):
            manifest = prepare(request(mixed, out := Path(name, "out"), workers=workers, **asked), Quiet())
        assert contents(out) == contents(Path(name, "whole"))
        verify_shards(out, manifest, manifest.shards)
        val, train = (text_of(out, split) for split in ("val", "train"))
    total = len(between.join(texts))
    expected = min(int(held_out.get("val_fraction", 0) * total), shard_tokens)
    assert len(val) == held_out.get("val_shards", 0) * shard_tokens + expected
    sizes = [shard.tokens for shard in manifest.of("train")]
    assert set(sizes[:-1]) <= {shard_tokens} and sizes[-1] == (len(train) - 1) % shard_tokens + 1
    assert (manifest.documents, manifest.replaced, manifest.settings["seed"]) == (80, 0, seed)
    assert manifest.sources == tuple((40, sum(len(text) for text in texts if text[0] == kind)) for kind in "ab")
    if seed is None:
        assert val + train == between.join(texts)
    elif separator != "none":  # a separator at the border is dropped
        assert total - len(val) - len(train) in (0, len(between))
        *whole, cut = val.split(between)
        rest, *others = train.split(between)
        assert Counter([*whole, *others]) <= Counter(texts) and len(whole) + len(others) >= 78
        assert sorted("".join([*whole, cut + rest, *others])) == sorted("".join(texts))
        assert whole + others != texts[: len(whole + others)]
        kinds = Counter(text[0] for text in whole)
        assert abs(kinds["a"] - kinds["b"]) < 3 + 0.5 * len(whole), kinds  # some of each kind validate


def test_order_depends_only_on_seed(mixed, tmp_path):
    for number, seed in enumerate((0, 0, 1)):
        prepare(request(mixed, tmp_path / str(number), seed=seed, val_fraction=0.1), Quiet())
    first, second, other = (everything(tmp_path / str(number)).tolist() for number in range(3))
    assert first == second != other
    assert {text[0] for text in text_of(tmp_path / "0", "val").split("\n")} == {"a", "b"}


def test_tokenizers_have_separate_separators(inputs, tmp_path, small):
    """A BPE's separator precedes each document; a line break, if known, is between documents."""
    (tmp_path / "bpe").write_text(small_bpe().to_json())
    for kind in (str(tmp_path / "bpe"), "char", "word"):
        out = tmp_path / f"{Path(kind).name}-shards"
        manifest = prepare(request(inputs, out, tokenizer=kind), Quiet())
        assert [name for name, _ in manifest.inputs] == ["a.txt", "b.jsonl.gz", "c.md"]
        assert manifest.text_bytes == sum(len(text) for text in inputs[1])
        tokenizer = shards_tokenizer(out, read_manifest(out))
        breaks = tokenizer.encode("\n" if "\n" in tokenizer.vocabulary else "").tolist()
        joint = breaks if tokenizer.separator is None else [tokenizer.separator]
        expected = [i for text in inputs[1] for i in (*joint, *tokenizer.encode(text).tolist())]
        assert everything(out).tolist() == expected[0 if tokenizer.separator else len(joint) :], kind
        assert tokenizer.kind != "bpe" or tokenizer.to_json() == small_bpe().to_json()


def test_long_documents_are_split_for_validation(tmp_path, small):
    texts = {kind: "".join(f"{kind}{i} " for i in range(1000)) for kind in "xyz"}
    for kind, text in texts.items():
        (tmp_path / f"{kind}.txt").write_text(text)
    files = tuple(tmp_path / f"{kind}.txt" for kind in "xyz")
    how = {"shard_tokens": 10**6, "val_fraction": 0.1, "seed": 0}
    prepare(request(files, tmp_path / "one", **how), Quiet())
    assert text_of(tmp_path / "one", "val") == texts["x"][: len(texts["x"]) // 10]
    assert text_of(tmp_path / "one", "val") + text_of(tmp_path / "one", "train") == texts["x"]
    prepare(request(files, tmp_path / "all", inputs=files, **how), Quiet())
    val, train = (text_of(tmp_path / "all", split).split("\n") for split in ("val", "train"))
    val = {part[0]: part for part in val}
    train = {part.lstrip("0123456789 ")[0]: part for part in train}
    for kind, text in texts.items():
        assert val[kind] + train[kind] == text and len(val[kind]) == pytest.approx(len(text) / 10, abs=2)


@pytest.mark.parametrize("how", [{"val_fraction": 0.2}, {"val_shards": 2, "shard_tokens": 1000}, {"separator": "none"}])
def test_mixed_lengths_are_counted_exactly(tmp_path, small, how):
    lines = [f"short {number}" * 5 for number in range(300)]
    (tmp_path / "a.jsonl").write_text(json_lines(lines))
    (tmp_path / "b.txt").write_text("long text " * 300)
    files, out = (tmp_path / "a.jsonl", tmp_path / "b.txt"), tmp_path / "out"
    given = {"shard_tokens": 10**5, "val_fraction": 0.1, "seed": 0, **how}
    manifest = prepare(request(files, out, inputs=files, **given), Quiet())
    total = sum(map(len, lines)) + 3_000 + (300 if "separator" not in how else 0)
    expected = {"val_fraction": int(0.2 * total), "val_shards": 2000, "separator": int(0.1 * total)}
    assert manifest.tokens("val") == expected[next(iter(how))]
    val = text_of(out, "val")
    assert "long text" in val and "short" in val
    assert manifest.tokens("train") + manifest.tokens("val") - total in (-1, 0, 1)  # separators at cuts


def test_changed_input_is_detected(tmp_path):
    (path := tmp_path / "a.txt").write_text("some text")
    watcher = Quiet()
    watcher.advanced = lambda *facts: path.write_text("changed")
    with complains("changed while being read"):
        prepare(request([path], tmp_path / "out"), watcher)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_invalid_inputs_and_settings_are_rejected(tmp_path):
    path, saved = tmp_path / "a.txt", tmp_path / "t.json"
    saved.write_text(load_tokenizer("char", "abc").to_json())
    for text, changes, words in (
        ("", {}, "no text"),
        ("x", {}, "0 of 1 token are for validation"),
        ("x" * 5000, {"val_shards": 2}, "5,000 of 5,000 tokens"),
        ("x" * 3000, {"val_fraction": 0.9999}, "2,999 of 3,000 tokens"),
        ("abcd", {"tokenizer": str(saved)}, "a.txt: the character 'd'"),
    ):
        path.write_text(text)
        refuse(DataError, words, request([path], tmp_path / "out", **changes))
    for name, value in (("shard_tokens", 1), ("val_fraction", 1.0), ("val_fraction", -0.1)):
        with complains(f"--{name.replace('_', '-')} ", f" {value}", kind=UsageError):
            request([path], tmp_path / "out", **{name: value})


def test_foreign_directory_is_rejected(inputs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refuse(UsageError, "'notes.txt'", request(inputs, tmp_path))
    for text in ("{}", "[]", "", "no", "[" * 100_000, '{"format": "mine"}'):
        (tmp_path / "progress.json").write_text(text)
        refuse(UsageError, "is not from distgpt data prepare; choose a new directory", request(inputs, tmp_path))


def test_losing_process_leaves_the_directory(tmp_path, monkeypatch):
    """Both processes find no directory and one creates it. An existing directory stays."""
    out = tmp_path / "out"
    with reserved(out, print):
        monkeypatch.setattr(type(out), "exists", lambda self: False)
        with pytest.raises(UsageError, match="another process"), reserved(out, print):
            raise AssertionError("it was reserved twice")
        monkeypatch.undo()
        assert out.is_dir()
    assert not out.exists()
    with reserved(tmp_path, print):
        pass
    assert tmp_path.is_dir()


def test_interruption_anywhere_changes_nothing(mixed, tmp_path, small):
    watcher, out, resumed = Quiet(), tmp_path / "out", set()
    how = {"tokenizer": "char", "shard_tokens": 700, "workers": 2, "seed": 0, "val_fraction": 0.1}
    prepare(request(mixed, tmp_path / "whole", **how), watcher)
    for after in range(0, len(watcher.heard) - 3, 3):
        shutil.rmtree(out, ignore_errors=True)
        again, quiet = interrupt(request(mixed, out, **how), after), Quiet()
        prepare(again, quiet)
        assert contents(out) == contents(tmp_path / "whole")
        resumed |= {note for note in quiet.notes if note.startswith("resuming")}
    assert len(resumed) > 2


def test_spool_is_truncated_and_loss_is_detected(mixed, tmp_path, small):
    out = tmp_path / "out"
    prepare(request(mixed, tmp_path / "whole", seed=0), Quiet())
    again = interrupt(request(mixed, out, seed=0), 9)
    kept = sorted(out.glob("spool.*"))
    assert kept and "spooled" in (out / "progress.json").read_text()
    for path in kept:
        path.write_bytes(path.read_bytes() + b"unnoted")
    prepare(again, Quiet())
    assert contents(out) == contents(tmp_path / "whole")
    shutil.rmtree(out)
    interrupt(again, 9)
    kept[0].write_bytes(kept[0].read_bytes()[:10])
    with complains(kept[0].name, "has lost data"):
        prepare(again, Quiet())


def test_missing_manifest_rebuilds_all_shards(inputs, tmp_path, monkeypatch):
    out, other, again = tmp_path / "out", tmp_path / "other", tmp_path / "again"
    monkeypatch.setattr(preparing, "MANIFEST", "missing/manifest.json")
    with pytest.raises(StorageError):
        prepare(request(inputs, out), Quiet())
    monkeypatch.undo()
    again.mkdir()
    Progress({}, []).save(again)
    for name in ("val-000000.npy", ".train-000000.npy.tmp", ".manifest.json.77.tmp"):
        (again / name).touch()
    for folder in (out, other, again):
        prepare(request(inputs, folder), Quiet())
    assert contents(out) == contents(other) == contents(again)


@pytest.fixture
def interrupted(inputs, tmp_path, small):
    shutil.copytree(inputs[0], tmp_path / "inputs")
    asked = (tmp_path / "inputs",)
    prepare(request(asked, tmp_path / "whole", shard_tokens=700), whole := Quiet())
    return interrupt(request(asked, tmp_path / "out", shard_tokens=700), len(whole.heard) - 5)


def test_changed_settings_or_inputs_are_rejected(interrupted):
    (folder,), given = interrupted.inputs, {"shard_tokens": 700}
    for changes, names in (
        ({"tokenizer": "char"}, "tokenizer"),
        ({"shard_tokens": 701}, "shard_tokens"),
        ({"val_shards": 1}, "val_fraction, val_shards"),
        ({"separator": "none"}, "separator"),
        ({"field": "body"}, "field"),
        ({"inputs": (folder, folder / "a.txt")}, "inputs"),
    ):
        other = request([folder], interrupted.out, **given | changes)
        refuse(UsageError, f"of another command ({names} changed)", other)
    path = folder / "c.md"
    before, text = path.stat(), path.read_text()
    path.write_text("something else")
    refuse(UsageError, "inputs changed", interrupted)
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(interrupted, Quiet())


def test_changed_progress_is_detected(interrupted):
    path = interrupted.out / "progress.json"
    good = json.loads(path.read_bytes())
    for name, value in (
        *(("inputs", None), ("settings", None), ("text_bytes", "x"), ("replaced", -1), ("sources", [])),
        *(("place", {"input": 2, "offset": 0, "line": 0}), ("more", 1), ("sha256", None), ("version", 1)),
    ):
        path.write_text(json.dumps({**good, name: value}))
        refuse(DataError, "progress.json (", interrupted)


def test_failure_reports_whether_it_can_resume(interrupted, tmp_path, monkeypatch):
    def failing(*given, **more):
        raise DistgptError("something else")

    monkeypatch.setattr(preparing, "encode", failing)
    monkeypatch.setattr(preparing, "write_shard", failing)
    at_once, later = Quiet(), Quiet()
    refuse(DistgptError, "something else", interrupted, later)
    assert "repeat the command" in later.notes[-1]
    refuse(DistgptError, "something else", request(interrupted.inputs, tmp_path / "new"), at_once)
    assert not at_once.notes and not (tmp_path / "new").exists()


def test_command_and_info_list_sources(mixed, tmp_path):
    folder = shutil.copytree(mixed[0], tmp_path / "mixed")
    (folder / "c.txt").write_text("c" * 500)
    words = ("--tokenizer", "byte", "--progress", "plain", "--out")
    shown = done("data", "prepare", folder, *words, tmp_path / "out")
    tokens = sum(len(text) for text in mixed[1] if text[0] == "a")
    for page in (shown, done("data", "info", tmp_path / "out")):
        rows = [line.split() for line in page.splitlines()]
        assert ["source", "documents", "tokens", "share"] in rows
        assert any(row[:3] == ["a.jsonl", "40", f"{tokens:,}"] for row in rows)
        assert any(row[:3] == ["c.txt", "1", "500"] and row[3].endswith("%") for row in rows)
    assert json.loads(done("data", "info", tmp_path / "out", "--json"))["sources"][2] == [1, 500]
    done("data", "prepare", folder, "--no-shuffle", *words, tmp_path / "kept")
    assert text_of(tmp_path / "kept", "val").startswith("a0 ")
    assert everything(tmp_path / "kept").size == everything(tmp_path / "out").size
    clash = inside("data", "prepare", folder, "--no-shuffle", "--seed", "1", *words, tmp_path / "no")
    assert clash.returncode == 2 and "cannot be combined" in clash.stderr


def test_standard_input_is_text_or_json_lines(tmp_path, monkeypatch):
    def piping(data, name, *more):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return inside("data", "prepare", "-", "--tokenizer", "byte", "--out", tmp_path / name, *more)

    lines = json_lines(f"line {number}" for number in range(50))
    for name, data, documents in (("a", lines.encode(), 50), ("b", b"plain text " * 50, 1)):
        result = piping(data, name)
        assert result.returncode == 0, result.stderr
        manifest = read_manifest(tmp_path / name)
        assert manifest.documents == documents and manifest.inputs[0][0].startswith("stdin.")
    refused(piping(b"a\0b", "c"), 65, "zero bytes")
    result = piping(b'{"text": "' + b"x" * 5000, "c", "--max-document", "1KB")
    assert result.returncode == 65 and "stdin.jsonl, line 1 is longer than 1 KiB" in result.stderr
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    refused(piping(b"text", "c"), 74, "standard input", "none", "No such file")


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
def preparing_command(text, out, *more):
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
        with preparing_command(text, out, "--workers", "2") as process:
            wait_for(lambda least=left + 3: len(list(out.glob("*.npy"))) >= least, 60)
            os.killpg(process.pid, ending)  # a terminal signals all processes
            stderr = process.communicate(timeout=60)[1]
        assert process.returncode == code and "Traceback" not in stderr and not (out / "manifest.json").exists()
    assert "repeat the command" in stderr and not list(out.glob(".*.tmp"))
    result = inside(*arguments(text, out, "--workers", "1"))
    assert re.search(r"resuming after [\d,]+ tokens", result.stderr) and contents(out) == contents(prepared)


REFUSED_COMMANDS = (
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
    for line, code, words in REFUSED_COMMANDS:
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
