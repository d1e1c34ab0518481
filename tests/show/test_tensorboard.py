import struct
import sys

import pytest
from distgpt.core.base.errors import StorageError, UsageError
from distgpt.show.display import TAGS, TensorBoard

pytest.importorskip("tensorboardX")


def events(folder):
    """Yield all events, file by file in the order of names."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:  # a length, its checksum, the content, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + length])
            yield event
            data = data[16 + length :]


def shown(folder):
    """Return (tag, step, value) as TensorBoard shows them: a new start hides later steps."""
    from tensorboardX.proto.event_pb2 import SessionLog

    kept = []
    for event in events(folder):
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            kept = [point for point in kept if point[1] < event.step]
        kept += [(value.tag, event.step, value) for value in event.summary.value]
    return kept


def curve(folder, tag):
    points = [(step, value.simple_value) for name, step, value in shown(folder) if name == tag]
    assert len({step for step, _ in points}) == len(points), f"{tag} has a step twice"
    return dict(points)


def reported(folder, first, last, loss=2.0, sample=None):
    board = TensorBoard()
    board.started({"directory": str(folder), "first_step": first - 1, "steps": 100})
    for step in range(first, last + 1):
        usual = {"lr": 0.5, "grad_norm": 0.25, "tokens": step, "tokens_per_s": 8.0, "step_s": 1.0}
        board.stepped({"step": step, "loss": loss, "train_bits_per_byte": 1.25, **usual})
        if step % 4 == 0:
            val = {"val_loss": loss + 1, "bits_per_byte": 1.5, "val_tokens": 9, "val_s": 0.1}
            board.evaluated({"step": step, **val})
            board.evaluated({"step": step, "hellaswag": 0.25, "hellaswag_examples": 8})
    if sample:
        board.sampled(last, sample)
    board.close()


def test_every_measure_has_a_curve(tmp_path):
    reported(tmp_path, 1, 8)
    assert curve(tmp_path, "loss/train") == dict.fromkeys(range(1, 9), 2.0)
    assert curve(tmp_path, "loss/validation") == {4: 3.0, 8: 3.0}
    assert curve(tmp_path, "accuracy/hellaswag") == {4: 0.25, 8: 0.25}
    assert {tag for tag, _, _ in shown(tmp_path)} == set(TAGS.values())


def test_resumed_run_repeats_no_step(tmp_path):
    reported(tmp_path, 1, 8, loss=2.0)
    reported(tmp_path, 5, 6, loss=1.0)
    reported(tmp_path, 5, 12, loss=0.5)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3, "starts within a second share a file"
    assert curve(tmp_path, "loss/train") == dict.fromkeys(range(1, 5), 2.0) | dict.fromkeys(range(5, 13), 0.5)
    assert curve(tmp_path, "loss/validation") == {4: 3.0, 8: 1.5, 12: 1.5}


def test_samples_keep_line_breaks(tmp_path):
    reported(tmp_path, 1, 2, sample="one\n\n  <b>two</b> ü")
    texts = [(step, value) for tag, step, value in shown(tmp_path) if tag.startswith("sample")]
    assert [step for step, _ in texts] == [2]
    assert texts[0][1].tensor.string_val[0].decode() == "    one\n    \n      <b>two</b> ü"


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(StorageError, match="tensorboard"):
        TensorBoard().started({"directory": str(tmp_path), "first_step": 0})


def test_missing_tensorboard_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UsageError, match=r"distgpt\[tensorboard\]"):
        TensorBoard()
