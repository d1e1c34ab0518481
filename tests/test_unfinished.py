"""The folder of unfinished shards: whose it is, what may be in it, and what is said when work stops."""

import json
import re

import pytest

from distgpt.data.prepare.encoding import Encoder
from distgpt.data.prepare.progress import Progress, reserved
from distgpt.errors import DataError, DistgptError, UsageError
from tests.conftest import distgpt, refused
from tests.test_prepare import Quiet, contents, inputs, prepare, request, small_pieces  # noqa: F401


def test_the_loser_of_two_leaves_the_empty_folder_to_the_winner(tmp_path, monkeypatch):
    """Both find no folder, one makes it first."""
    out = tmp_path / "out"
    with reserved(out):
        monkeypatch.setattr(type(out), "exists", lambda self: False)
        with pytest.raises(UsageError, match="another process"), reserved(out):
            raise AssertionError("it was reserved twice")
        monkeypatch.undo()
        assert out.is_dir()
    assert not out.exists()


def test_an_empty_folder_that_was_there_before_stays(tmp_path):
    with reserved(tmp_path):
        pass
    assert tmp_path.is_dir()


@pytest.fixture
def unfinished(inputs, tmp_path, small_pieces):
    """A request that was interrupted, and its progress.json."""
    interrupted = request(inputs, tmp_path / "out", shard_tokens=700)
    with pytest.raises(KeyboardInterrupt):
        prepare(interrupted, Quiet(interrupt_after=9))
    return interrupted, tmp_path / "out" / "progress.json"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inputs", None),
        ("settings", None),
        ("held_out", "x"),
        ("skip", 3),
        ("skip", -1),
        ("place", {"input": 2, "offset": 0, "line": 0}),
        ("counts", {}),
        ("shards", []),
        ("more", 1),
        ("sha256", None),
    ],
)
def test_whatever_is_changed_in_the_progress_is_noticed(name, value, unfinished):
    interrupted, path = unfinished
    path.write_text(json.dumps({**json.loads(path.read_bytes()), name: value}))
    before = contents(path.parent)
    with pytest.raises(DataError, match=r"progress\.json is damaged; remove .*out and begin again"):
        prepare(interrupted, Quiet())
    assert contents(path.parent) == before


def test_another_version_is_not_gone_on_with(unfinished):
    interrupted, path = unfinished
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": 2}))
    with pytest.raises(UsageError, match="of another version of distgpt"):
        prepare(interrupted, Quiet())


@pytest.mark.parametrize("text", ["{}", "[]", "", "no", "[" * 100_000, '{"format": "mine"}'])
def test_a_progress_of_something_else_is_left_alone(text, inputs, tmp_path):
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(UsageError, match=r"is not of distgpt data prepare; give a new folder"):
        prepare(request(inputs, tmp_path), Quiet())
    assert (tmp_path / "progress.json").read_text() == text


def test_what_is_saved_is_found_again(unfinished, monkeypatch):
    interrupted, _ = unfinished
    saved = []
    monkeypatch.setattr(Progress, "save", lambda self, folder: saved.append(self))
    with pytest.raises(KeyboardInterrupt):
        prepare(interrupted, Quiet(interrupt_after=0))
    assert saved[0].shards and saved[0].skip + saved[0].place.offset > 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("line 7: not JSON"), r"finished shards in .*out: remove it once an input has changed"),
        (DistgptError("a worker was killed"), r"finished shards in .*out: the same command resumes"),
    ],
)
def test_a_failure_halfway_says_what_becomes_of_finished_shards(error, words, unfinished, monkeypatch):
    interrupted, _ = unfinished

    def failing(self, piece):
        raise error

    monkeypatch.setattr(Encoder, "__call__", failing)
    watcher = Quiet()
    with pytest.raises(type(error)):
        prepare(interrupted, watcher)
    assert re.search(words, watcher.notes[-1])


def test_a_failure_at_once_says_nothing_of_shards(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "__call__", lambda self, piece: (_ for _ in ()).throw(DataError("bad")))
    watcher = Quiet()
    with pytest.raises(DataError):
        prepare(request(inputs, tmp_path / "out"), watcher)
    assert not watcher.notes and not (tmp_path / "out").exists()


def test_paths_can_be_pasted_and_escapes_are_understood(tmp_path):
    (tmp_path / "a b").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "a b" / name).write_text("text " * 9)
    out = tmp_path / "my shards"
    flags = ["--tokenizer", "byte", "--out", out, "--separator", r"\n\t\n", "--workers", "1"]
    result = distgpt("data", "prepare", tmp_path / "a b", *map(str, flags))
    assert f"next: distgpt train --data '{out}'" in result.stdout
    assert json.loads((out / "manifest.json").read_bytes())["separator"] == list(b"\n\t\n")


def test_the_page_shows_what_the_tokenizer_is_and_not_what_the_manifest_says(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 9)
    out = tmp_path / "out"
    made = distgpt("data", "prepare", tmp_path / "a.txt", "--tokenizer", "byte", "--out", out)
    assert made.returncode == 0
    manifest = json.loads((out / "manifest.json").read_bytes())
    (out / "manifest.json").write_text(json.dumps({**manifest, "description": "\x1b[31mred"}))
    page = distgpt("data", "info", out)
    assert "byte, 256 entries" in page.stdout and "red" not in page.stdout + page.stderr
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": []}))
    refused(distgpt("data", "info", out), 65, "it has no list of shards")
