"""Numbers as people read and write them."""

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import (
    clock,
    count,
    duration,
    long_duration,
    parse_count,
    parse_duration,
    parse_size,
    size,
    size_in_column,
    three_digits,
)


def test_numbers_are_written_for_people():
    assert [count(1, "token"), count(2048, "token")] == ["1 token", "2,048 tokens"]
    assert [count(2, "process"), count(3, "micro-batch")] == ["2 processes", "3 micro-batches"]
    assert [three_digits(x) for x in (0.5, 1.25, 99.96, 12345.0)] == ["0.500", "1.25", "100", "12,345"]
    assert [size(x) for x in (12, 1536, 5 << 20, 3 << 29)] == ["12 B", "1.5 KiB", "5 MiB", "1.5 GiB"]
    columns = {20.5: "20.5 MiB", 30: "30.0 MiB", 99.94: "99.9 MiB", 99.96: "100 MiB", 1023: "1,023 MiB"}
    assert {x: size_in_column(x * 2**20) for x in columns} == columns and size_in_column(512) == "512 B"
    assert [duration(x) for x in (0, 2e-7, 0.0125, 3.0)] == ["0 s", "0.200 µs", "12.5 ms", "3.00 s"]
    assert [long_duration(x) for x in (3, 150, 7200)] == ["3.00 seconds", "2.50 minutes", "2.00 hours"]
    assert [clock(x) for x in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]


def test_sizes_are_read_as_they_are_written():
    assert [parse_size(x) for x in ("4096", "4k", "64MiB", "1.5 G")] == [4096, 4096, 64 << 20, 3 << 29]
    for wrong in ("", "many", "-1", "4T", "4 k k"):
        with pytest.raises(UsageError, match="is no size"):
            parse_size(wrong)


def test_times_are_read_as_people_write_them():
    times = {"3h50m": 13800, "90s": 90, "1.5 h": 5400, "2d": 172800, "1 d 2 h 3 m 4 s": 93784, "0h5m": 300}
    assert {text: parse_duration(text) for text in times} == times
    for wrong in ("", "90", "m", "-3m", "3m2h", "0s", "1e3s", "9999999999d", "3:50:00"):
        with pytest.raises(UsageError, match="is no time"):
            parse_duration(wrong)


def test_counts_are_read_as_they_are_written():
    counts = {"5": 5, "2k": 2000, "1.5M": 1_500_000, "10B": 10**10, "1e9": 10**9}
    assert {text: parse_count(text, "--tokens") for text in counts} == counts
    for wrong in ("", "B", "0", "-3M", "ten", "1e999", "nan", "10Q"):
        with pytest.raises(UsageError, match="--tokens is"):
            parse_count(wrong, "--tokens")
