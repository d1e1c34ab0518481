"""The tables of a whole node have what a session's files have, by arithmetic done here; gaps are left out."""

import json

import node_table

MODEL = node_table.MODEL


def row(tokens_per_s, threads, ranks=1, **more):
    found = {"row": MODEL, "threads": threads, "ranks": ranks, "tokens_per_s": tokens_per_s}
    return found | {"gflops": tokens_per_s / 2} | more


FILES = {
    "threads.json": [
        {"row": "peaks", "threads": 4, "ranks": 1, "bfloat16": 2000.0},
        row(3000, 4),
        {"row": "peaks", "threads": 1, "ranks": 1, "bfloat16": 800.0},
        row(1000, 1),
        row(1, 2, error="MemoryError: none left"),
    ],
    "ranks-4.json": [row(2500, 1, 4)],
    "both-2-4.json": [row(3200, 2, 2)],
    "torch.json": [row(1600, 4, mode="keep-freed"), row(2000, 4, mode="compile")],
    "ddp.json": [row(1700, 1, 4, mode="keep-freed")],
    "small.json": [row(70, 1) | {"row": "tiny"}, row(90, 2) | {"row": "tiny"}, row(50, 1) | {"row": "fast"}],
    "block.json": {
        "commit": "abc",
        "date": "2026-11-27",
        "rehearsal": False,
        "parts": {
            "amx": {"exit_code": 1},
            "python_cost": {"exit_code": None, "skipped": "no benchmarks/python_cost.py"},
            "threads": {"exit_code": 0},
        },
    },
}


def lines_of(folder, files):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return list(node_table.page([folder]))


def test_rows_of_cores_and_of_all_ways(tmp_path):
    lines = lines_of(tmp_path, FILES)
    assert "| 1 | 1,000 (1.0 ×) | 62% |  |  |  |" in lines
    assert "| 4 | 3,000 (3.0 ×) | 75% | 2,500 (2.5 ×) | 3,200 (2 × 2) | 2,000 (compile) |" in lines
    ways = [line for line in lines if line.startswith(("| both", "| threads", "| ranks", "| PyTorch"))]
    speeds = [line.split(" | ")[1].strip(" |") for line in ways]
    assert speeds == ["3,200", "3,000", "2,500", "2,000", "1,700", "1,600"]
    assert "| PyTorch (keep-freed, DDP of 4 × 1) | 1,700 |" in lines
    assert "\n1.60 × PyTorch's best on 4 cores." in lines
    assert "| tiny | 70 | 90 |" in lines and "| fast | 50 |  |" in lines
    assert not any(line.startswith("| 2 |") for line in lines)  # it failed
    (end,) = (line for line in lines if "abc" in line)
    assert "amx: exit code 1; python_cost: no benchmarks/python_cost.py." in end and "threads" not in end


def test_what_a_call_did_not_come_to_is_left_out(tmp_path):
    lines = lines_of(tmp_path, {"threads.json": [row(3000, 4)]})
    assert "| 4 | 3,000 |  |  |  |  |" in lines and "PyTorch's best" not in "".join(lines)
    (tmp_path / "threads.json").unlink()
    assert lines_of(tmp_path, {}) == []
