"""Of each component: the files that run with it, less those that run without, lie in its own folders.

What does not is listed in `delta.txt`, which only becomes shorter.
"""

import json
import sys
from pathlib import Path

import pytest
from conftest import distgpt, needs_mpi
from devices import SAME, needs_the_processor

KEPT = Path(__file__).with_name("delta.txt")
RAN = [sys.executable, str(Path(__file__).with_name("ran.py"))]
# Of each component: its folders, what it is compared with, and the words of the command beside that one's.
ALONE = {
    "within": (["guards", "recipes"], "train", "--config minutes.toml"),
    "rollback": (["guards"], "train", "--on-bad-step rollback"),
    "reproducible": (["parallel"], "train", "--reproducible-parts 2"),
    "lora": (["adapters"], "init", "--lora-rank 2 --lora-matrices v,o"),
    "chats": (["texts"], "init", "--config chats.toml --data chats.jsonl"),
    "int8": (["rounded"], "infer", "--dtype int8"),
    "int4": (["rounded"], "infer", "--dtype int4"),
}
ON_GPU = {"gpu": (["gpu"], "train", "--stage cuda")}
TOGETHER = {
    "local steps": (["parallel"], "ranks", "--outer-every 2 --schedule constant"),
    "sharded": (["parallel"], "ranks", "--grad-sync sharded"),
    "overlapped": (["parallel"], "ranks", "--grad-sync overlapped"),
    "reproducible on two": (["parallel"], "ranks", "--reproducible-parts 2"),
}
# Machine code comes to a plain run by these too, as loops are compiled or loaded, where ran.py does not look.
COMPILING = ("core/cpu/compiling/", "core/cpu/matmul/", "core/base/caches.py", "core/cpu/compile_workers.py")
TRAIN = [
    "train",
    *SAME,
    "--tokenizer",
    "byte",
    "--seq-len",
    "32",
    "--progress",
    "plain",
    "--save-every",
    "2",
    "--steps",
    "4",
]
INFER = ["infer", "--weights", "train/weights.safetensors", "--prompt", "a", "--max-new-tokens", "4"]
PLAIN = {
    "train": TRAIN,
    "init": [*TRAIN, "--init", "train/weights.safetensors", "--tokenizer", "auto"],
    "infer": INFER,
    "ranks": [*TRAIN, "--stage", "mpi"],
}
# Of the core, too: what a component uses of it is not its own.
RESUMED = [*TRAIN[:-1], "5", "--resume", "auto", "--out", "train"]
CHATS = [{"prompt": "a", "completion": "b"}, {"prompt": "cd", "completion": "e"}]


def ran(folder, table, ranks=0):
    """Run what components are compared with, and each of them; give the files of each by name."""
    others = dict.fromkeys(other for _, other, _ in table.values())
    asked = {name: PLAIN[name] for name in PLAIN if name in others}
    asked |= {name: [*PLAIN[other], *more.split()] for name, (_, other, more) in table.items()}
    asked = {name: [*words, "--out", name] if words[0] == "train" else words for name, words in asked.items()}
    asked |= {"resumed": RESUMED} if "train" in asked else {}
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    (folder / "minutes.toml").write_text("train_minutes = 0.01")
    (folder / "chats.toml").write_text("chats = true")  # as `distgpt tune` has it
    (folder / "ran").mkdir()
    result = distgpt(json.dumps(asked), "ran", program=RAN, ranks=ranks, cwd=folder, timeout=600)
    assert result.returncode == 0, result.stderr
    return {name: set((folder / "ran" / name).read_text().split()) for name in asked}


def outside(table, files):
    """Give what runs with each component alone, and lies in no folder of it."""
    for name, (folders, other, _) in table.items():
        more = {
            file
            for file in files[name] - files[other] - files.get("resumed", set())
            if not file.startswith(COMPILING)
        }
        own = {file for file in more if file.split("/")[0] in folders}
        assert own, f"{name}: nothing of {folders} ran"
        yield from (f"{name}: {file}" for file in sorted(more - own))


@pytest.mark.timeout(900)  # where no loop is compiled yet
@pytest.mark.parametrize(
    ("table", "ranks"),
    [
        pytest.param(ALONE, 0, id="alone"),
        pytest.param(ON_GPU, 0, id="gpu", marks=needs_the_processor),
        pytest.param(TOGETHER, 2, id="ranks", marks=needs_mpi),
    ],
)
def test_files_that_run_with_a_component_alone_lie_in_its_folders(table, ranks, tmp_path):
    kept = [line for line in KEPT.read_text().splitlines() if line.split(":")[0] in table]
    found = list(outside(table, ran(tmp_path, table, ranks)))
    assert not set(found) - set(kept), "what only a component runs is to lie in its folders"
    assert found == kept, f"it has become less: strike from {KEPT.name} {set(kept) - set(found)}"
