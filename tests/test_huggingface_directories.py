"""Where imports and exports write: never over anything, never half, and found out before the work."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from conftest import clean_environment, command, distgpt, refused
from foreignmodels import (
    SMALL,
    exported,  # noqa: F401
    random_model,
)

from distgpt.errors import StorageError, UsageError
from distgpt.saved.huggingface.convert import _partial, export_model, import_model


def test_an_export_never_writes_into_a_directory_with_files(exported):
    before = {path: path.read_bytes() for path in exported.iterdir()}
    result = distgpt("weights", "export", exported.parent / "ours.safetensors", "--out", exported)
    refused(result, 2, exported, "no empty directory")
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    (exported.parent / "empty").mkdir()
    export_model(exported.parent / "ours.safetensors", exported.parent / "empty", "float32")
    assert (exported.parent / "empty" / "config.json").exists()


def test_an_export_needs_a_name(exported):
    result = distgpt("weights", "export", exported.parent / "ours.safetensors", "--out", ".", cwd=exported)
    refused(result, 2, "no name for a new directory")


def test_an_import_never_writes_over_a_file(exported):
    out = exported.parent / "back.safetensors"
    import_model(str(exported), out, None)
    with pytest.raises(UsageError, match="exists already"):
        import_model(str(exported), out, None)


def test_where_an_import_cannot_be_written_is_found_out_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    nothing = str(tmp_path / "no model")
    for out, kind, words in (
        (tmp_path, UsageError, "is a directory"),
        (tmp_path / "no" / "w", StorageError, "cannot write .*there is no directory .*no"),
        (tmp_path / "file" / "w", StorageError, "cannot write .*Not a directory|there is no directory"),
    ):
        with pytest.raises(kind, match=words):
            import_model(nothing, out, None)


def test_a_killed_export_leaves_no_directory(tmp_path):
    random_model(tmp_path / "ours.safetensors", {**SMALL, "vocab_size": 150_000, "n_embd": 90})
    arguments = ("weights", "export", tmp_path / "ours.safetensors", "--out", tmp_path / "theirs")
    process = subprocess.Popen(command(*arguments), env=clean_environment())
    while not (found := list(tmp_path.glob(".theirs.*.partial"))) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "theirs").exists()
    partial = found[0]
    assert partial.exists() and not (partial / "config.json").exists()
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
    assert not partial.exists()


def test_exports_to_one_place_leave_each_others_files_alone(exported):
    """Those of a living process; of a former one with this one's number nothing is left."""
    out = exported.parent / "new"
    living, former = _partial(out, os.getppid()), _partial(out, os.getpid())
    for path in (living, former):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
    export_model(exported.parent / "ours.safetensors", out, "float32")
    assert (living / "model.safetensors").read_text() == "half" and not former.exists()
    assert (out / "config.json").exists()


def test_a_damaged_model_is_not_exported(exported):
    path = exported.parent / "ours.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    refused(distgpt("weights", "export", path, "--out", exported.parent / "new"), 65, "damaged", path)
    assert not (exported.parent / "new").exists()


def test_commands_say_what_they_did_and_what_is_next(exported):
    out = exported.parent / "back.safetensors"
    result = distgpt("weights", "import", exported, "--out", out)
    assert result.returncode == 0 and str(out) in result.stdout and "GPT-2 with 2 layers" in result.stderr
    shutil.rmtree(exported)
    result = distgpt("weights", "export", out, "--out", exported)
    assert result.returncode == 0 and "GPT2LMHeadModel.from_pretrained" in result.stdout
