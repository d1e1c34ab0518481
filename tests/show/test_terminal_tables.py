"""Tables for the terminal: aligned, as wide as it is, in its characters."""

import os
import sys

from reportpages import LONG_WORD
from rich.cells import cell_len

from distgpt.show.tables import terminal_table


def test_a_table_for_the_terminal_is_aligned():
    rows = [["serial", "41.2 s"], ["mpi, 2 ranks", "9.3 s"], ["名前", "\x1b[31m"], ["[b]short"]]
    assert terminal_table(["stage", "time"], rows).splitlines() == [
        "stage             time",
        "────────────  ────────",
        "serial          41.2 s",
        "mpi, 2 ranks     9.3 s",
        "名前          \\x1b[31m",
        "[b]short",
    ]


def test_a_table_for_the_terminal_wraps_sentences_and_keeps_numbers_whole(monkeypatch):
    why = "no NVIDIA driver was found on this machine: install one that knows the card, then CuPy for it"
    for columns, widest in (("100", 100), ("200", 100), ("60", 60), ("40", 40)):
        monkeypatch.setenv("COLUMNS", columns)
        rows = [["cuda", "1,234,567.8", f"{why} {LONG_WORD}"]]
        text = terminal_table(["stage", "memory", "why it did not run"], rows)
        assert max(map(len, text.splitlines())) <= widest
        first, *others = text.splitlines()
        in_lists = first == "cuda"  # as a list, there is one value a line
        assert in_lists is (columns == "40"), text
        cells = (line[22:] if in_lists else line.rpartition("  ")[2] for line in others)
        told = "".join(cells).replace(" ", "")
        assert why.replace(" ", "") in told and LONG_WORD in told and "1,234,567.8" in text, text
    assert terminal_table([], []) == ""


COLUMNS = ("run", "steps", "state", "when")
RUNS = (
    ["sweep/with/a/long/name", "1,000/1,000", "interrupted", "Nov 22 03:10"],
    ["名前", "", "", "Nov 22 03:10"],
)


def test_nothing_of_a_table_is_cut_however_narrow_the_terminal(monkeypatch):
    for columns in range(20, 110):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = terminal_table(COLUMNS, RUNS).splitlines()
        assert max(map(cell_len, lines)) <= columns, (columns, lines)
        told = "".join(lines).replace(" ", "")
        for cell in (cell for row in RUNS for cell in row if len(cell.split()) == 1 and columns >= 24):
            assert cell in told or lines[0].startswith("run"), (columns, cell, lines)
        if lines[0].startswith("run"):
            assert all(cell in "\n".join(lines) for cell in RUNS[0][1:])


def test_a_narrow_terminal_gets_lists(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert terminal_table(COLUMNS, RUNS).splitlines() == [
        "sweep/with/a/long/name",
        "  steps  1,000/1,000",
        "  state  interrupted",
        "  when   Nov 22 03:10",
        "名前",
        "  when   Nov 22 03:10",
    ]


def test_what_is_no_terminal_gets_tables_of_any_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("distgpt.show.tables.get_terminal_size", os.terminal_size)  # as of a pipe
    row = [f"{number:,}" for number in range(10**6, 10**6 + 20)]
    (line,) = terminal_table(["c"] * 20, [row]).splitlines()[2:]
    assert line.split() == row


def test_a_terminal_without_unicode_gets_plain_characters(monkeypatch):
    class Latin:
        encoding = "latin-1"

    monkeypatch.setattr(sys, "stdout", Latin())
    terminal_table(["a", "b"], [["x", "1"]]).encode("latin-1")
