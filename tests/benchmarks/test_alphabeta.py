"""The α–β model finds the numbers that a table was made of, and the words that describe a network."""

import pytest
from alphabeta import (
    AlphaBeta,
    OverNetwork,
    Regime,
    doublings,
    fit,
    messages,
    parse_network,
    volume,
)

from distgpt.core.base.errors import DataError, UsageError

FORMS = ("scatter-gather", "ring")
SIZES = [8 * 4**i for i in range(13)]


def made(ranks, *regimes):
    model = AlphaBeta(regimes, ranks)
    return [(size, model.seconds(ranks, size)) for size in SIZES]


def test_what_the_forms_cost():
    assert [doublings(n) for n in (1, 2, 3, 4, 5, 8, 1024)] == [0, 1, 2, 2, 3, 3, 10]
    assert [messages(form, 8) for form in ("doubling", "scatter-gather", "ring")] == [3, 6, 14]
    assert volume("doubling", 8) == 3 and volume("ring", 8) == volume("scatter-gather", 8) == 1.75
    assert [(messages(form, 6), volume(form, 6)) for form in ("doubling", "scatter-gather")] == [
        (4, 4),
        (6, 3.5),
    ]
    assert [(messages("memory", n), volume("memory", n)) for n in (2, 8)] == [(2, 2), (6, 2)]
    regime = Regime("scatter-gather", 1e-5, 1e-9)
    assert regime.seconds(4, 1e6) == pytest.approx(4e-5 + 1.5e-3)


def test_what_a_table_was_made_of_is_found_again():
    short, long = Regime("doubling", 2e-6, 1e-9, 3000), Regime("scatter-gather", 2e-5, 3e-10)
    lines = ((ranks, form, [Regime(form, 3e-6, 2e-10)]) for form in FORMS for ranks in (2, 3, 8))
    for ranks, form, there in (*lines, (4, "scatter-gather", [short, long])):
        table = made(ranks, *there)
        model = fit(table, ranks, form)
        assert [r.form for r in model.regimes] == [r.form for r in there], (ranks, form)
        for found, wanted in zip(model.regimes, there, strict=True):
            numbers = pytest.approx((wanted.alpha, wanted.beta), rel=1e-9)
            assert (found.alpha, found.beta) == numbers, (ranks, form)
        assert model.worst_error(table) < 1e-9, (ranks, form)
    assert 2048 <= model.regimes[0].most < 8192


def test_more_ranks_and_more_bytes_never_take_less():
    there = (Regime("doubling", 2e-6, 1e-9, 3000), Regime("scatter-gather", 1e-7, 3e-10))
    here = AlphaBeta(there, 4)
    for model in (here, OverNetwork(here, parse_network("10gbit,20us"), 4)):
        for sizes in (SIZES, range(2900, 3200, 7)):
            times = [model.seconds(8, size) for size in sizes]
            assert times == sorted(times)
        times = [model.seconds(ranks, 1e6) for ranks in (1, 2, 4, 8, 64, 1024)]
        assert times == sorted(times) and times[0] == 0 < times[1]


def test_over_a_network_its_latency_and_frames_are_added():
    """By Ethernet 1,538 bytes carry 1,448."""
    here, network = AlphaBeta((Regime("scatter-gather", 1e-5, 1e-9),), 2), parse_network("1gbit,100us")
    byte = 8e-9 * 1538 / 1448
    sums, parts = (getattr(OverNetwork(here, network, 2), name)(8, 1e6) for name in ("seconds", "in_parts"))
    inside = 2e-5 + 1e6 * 1e-9  # two ranks, then four hosts
    over = 1.5e6 * (1e-9 / 2 + byte)  # each of the two has half of the array then
    assert sums == pytest.approx(inside + 4 * 1.1e-4 + over)
    assert parts == pytest.approx(inside + 6e-5 + 2e-4 + over)


def test_ranks_of_a_host_share_its_memory_and_its_port():
    """Two hosts of four ranks; two were measured, of which each had half of the memory's bytes a second."""
    here = AlphaBeta((Regime("scatter-gather", 1e-5, 1e-9),), 2)
    network, size = parse_network("1gbit,100us"), 1e6
    wire = network.seconds_per_byte
    model = OverNetwork(here, network, 4)
    inside = 4 * 1e-5 + 1.5 * size * 2e-9
    assert model.seconds(8, size) == pytest.approx(inside + 2 * 1.1e-4 + size * (2e-9 / 4 + wire))
    # 14 messages; 8 × 4 of the 64 parts leave by the port, there and back; of a rank 7 of 8 are in memory.
    flat = 14 * 1e-5 + 2e-4 + size * (2 * 4 * 4 / 8 * wire + 2 * 7 / 8 * 2e-9)
    assert model.flat_in_parts(8, size) == pytest.approx(flat)
    one_host = 14 * 1e-5 + 2 * 7 / 8 * size * 4e-9
    assert OverNetwork(here, network, 8).flat_in_parts(8, size) == pytest.approx(one_host)
    alone = OverNetwork(here, network, 1)
    assert alone.flat_in_parts(4, size) == pytest.approx(alone.in_parts(4, size))


def test_ranks_sum_in_memory_within_a_host_and_by_mpi_between_hosts():
    here, network = AlphaBeta((Regime("memory", 1e-6, 1e-9),), 2), parse_network("1gbit,100us")
    inside, between = 4 * 1e-6 + 2e6 * 2e-9, 2 * 1.01e-4 + 1e6 * (2e-9 / 4 + network.seconds_per_byte)
    assert OverNetwork(here, network, 4).seconds(8, 1e6) == pytest.approx(inside + between)


def test_too_little_to_fit_is_refused():
    for points, ranks in (([(8, 1e-6), (32, 1e-6)], 2), (made(2, Regime("ring", 1, 1)), 1)):
        with pytest.raises(DataError, match="3 sizes"):
            fit(points, ranks)


def test_networks_in_words():
    for text, bits, latency in (
        ("1gbit,100us", 1e9, 1e-4),
        ("10gbit, 20 µs", 1e10, 2e-5),
        ("100 Mbps,200ms", 1e8, 0.2),
    ):
        network = parse_network(text)
        assert (network.bits_per_s, network.latency) == pytest.approx((bits, latency)), text
    assert str(parse_network("25Gbit/s,1.5us")) == "25 Gbit/s, 1.5 µs"


def test_other_words_are_refused_with_an_example():
    for word, texts in {
        "a rate and a latency": ("1gbit", ""),
        "no rate": ("100us,1gbit", "1GB,5us"),
        "no latency": ("1gbit,100",),
        "begin with a number": ("1gbit,-5us",),
        "above 0": ("0gbit,5us",),
    }.items():
        for text in texts:
            with pytest.raises(UsageError, match=word) as refusal:
                parse_network(text)
            assert word == "above 0" or "1gbit,100us" in str(refusal.value), text
