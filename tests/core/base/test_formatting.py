"""Numbers, sizes and durations as text."""

import pytest
from distgpt.core.base import formatting as f
from distgpt.core.base.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st


def test_numbers_are_formatted():
    assert [f.count(1, "token"), f.count(2048, "token")] == ["1 token", "2,048 tokens"]
    assert [f.count(2, "process"), f.count(3, "micro-batch")] == ["2 processes", "3 micro-batches"]
    assert [f.three_digits(x) for x in (0.5, 1.25, 99.96, 12345.0)] == ["0.500", "1.25", "100", "12,345"]
    assert [f.size(x) for x in (12, 1536, 5 << 20, 3 << 29)] == ["12 B", "1.5 KiB", "5 MiB", "1.5 GiB"]
    columns = {20.5: "20.5 MiB", 30: "30.0 MiB", 99.94: "99.9 MiB", 99.96: "100 MiB", 1023: "1,023 MiB"}
    assert {x: f.size_in_column(x * 2**20) for x in columns} == columns and f.size_in_column(512) == "512 B"
    assert [f.duration(x) for x in (0, 2e-7, 0.0125, 3.0)] == ["0 s", "0.200 µs", "12.5 ms", "3.00 s"]
    assert [f.long_duration(x) for x in (3, 150, 7200)] == ["3.00 seconds", "2.50 minutes", "2.00 hours"]
    assert [f.clock(x) for x in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]


@given(st.integers(0, 1 << 50), st.sampled_from(["", "B", "iB", "ib"]), st.sampled_from(["", " ", "  "]))
def test_parse_size_inverts_size(n, unit, space):
    assert f.parse_size(f.size(n).replace(",", "")) == pytest.approx(n, rel=1e-3)
    for power, prefix in enumerate(["", "k", "M", "g"]):
        assert f.parse_size(f" {n % 10**6}{space}{prefix}{unit} ") == n % 10**6 << 10 * power
    assert f.parse_size("1.5 G") == 3 << 29


@given(st.integers(0, 10**9))
def test_parse_duration_inverts_typed_duration(seconds):
    assert f.parse_duration(f.typed_duration(seconds)) == max(1, seconds)
    times = {"3h50m": 13800, "90s": 90, "1.5 h": 5400, "2d": 172800, "1 d 2 h 3 m 4 s": 93784, "0h5m": 300}
    assert {text: f.parse_duration(text) for text in times} == times


def test_parse_count_reads_suffixes():
    counts = {"5": 5, "2k": 2000, "1.5M": 1_500_000, "10B": 10**10, "1e9": 10**9}
    assert {text: f.parse_count(text, "--tokens") for text in counts} == counts


def of_tokens(text):
    return f.parse_count(text, "--tokens")


@pytest.mark.parametrize("parse, wrong", [
    *((f.parse_size, text) for text in ("", "many", "-1", "4T", "4 k k")),
    *((f.parse_duration, text) for text in ("", "90", "m", "-3m", "3m2h", "0s", "1e3s", "9999999999d", "3:50:00")),
    *((of_tokens, text) for text in ("", "B", "0", "-3M", "ten", "1e999", "nan", "10Q")),
])  # fmt: skip
def test_invalid_numbers_are_rejected_by_name(parse, wrong):
    with pytest.raises(UsageError, match="--tokens" if parse is of_tokens else repr(wrong)):
        parse(wrong)
