"""Tables for the terminal: aligned, as wide as it is, and with nothing cut."""

import os
import subprocess
import sys

import pytest
from distgpt.show.page import Table, terminal, terminal_table
from rich.cells import cell_len


def test_a_table_for_the_terminal_is_aligned():
    rows = [["serial", "41.2 s"], ["mpi, 2 ranks", "9.3 s"], ["名前", "\x1b[31m"], ["[b]short"]]
    assert terminal_table(["stage", "time"], rows).splitlines() == [
        "stage             time",
        "───────────── ────────",
        "serial          41.2 s",
        "mpi, 2 ranks     9.3 s",
        "名前          \\x1b[31m",
        "[b]short",
    ]
    assert terminal_table([], []) == ""


def test_nothing_of_a_table_is_cut_however_narrow_the_terminal(monkeypatch):
    head = ["stage", "memory", "why"]
    row = ["cuda", "1,234", "no NVIDIA driver was found: install one that knows the card, then CuPy for it"]
    for columns in (20, 40, 60, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = terminal_table(head, [row]).splitlines()
        assert max(map(cell_len, lines)) <= min(columns, 100), (columns, lines)
        letters = "".join("".join(lines).split()).replace("─", "")
        assert sorted(letters) == sorted("".join([*head, *row]).replace(" ", "")), columns


def test_what_is_no_terminal_gets_tables_of_any_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("distgpt.show.page.get_terminal_size", os.terminal_size)  # as of a pipe
    row = [f"{number:,}" for number in range(10**6, 10**6 + 20)]
    (line,) = terminal_table(["c"] * 20, [row]).splitlines()[2:]
    assert line.split() == row


def test_blocks_on_a_terminal():
    table = Table(["a", "b <x>"], [["1 & 2", "</td>"]], 'the "caption"', "the note")
    shown = terminal([table, Table(["none"], []), "equal"])
    assert shown.startswith('the "caption"\na') and shown.endswith("\n\nthe note\n\nequal")
    assert "none" not in shown


@pytest.mark.ci
def test_nothing_is_loaded_that_draws_before_something_is_drawn():
    script = """
import sys
import distgpt.show.page, distgpt.show.display, distgpt.commands.train, distgpt.commands.runs
import distgpt.core.generate.single, distgpt.inference.generation.batch
assert not {"matplotlib", "jinja2"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
