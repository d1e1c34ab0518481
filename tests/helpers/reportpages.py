"""An example report with everything a page can hold, ordinary and awkward, for the tests of reports."""

import math

from distgpt.show.charts import Bar, BarChart, LineChart, Series
from distgpt.show.page import KeyValues, Paragraph, Section, Table, Texts, Verdict, html

HOSTILE = "</title></style><script>alert('x & y')</script> \"quoted\" \x00\x1b[31m\u202e \ud800 ]]>"
LONG_WORD = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2
NAN, INF = math.nan, math.inf
STAGES = ["serial", "mpi, 2 ranks", "cuda", "mpi-cuda, 2 ranks"]


def wave(step: int, i: int) -> float:
    """A made-up curve that falls like a loss, with a different ripple for every i."""
    return 1.2 + 4.0 * math.exp(-step / (150 + 90 * i)) + 0.12 * math.sin(step * (0.31 + 0.07 * i)) + 0.2 * i


def line_charts() -> list[LineChart]:
    steps = list(range(1, 401))
    sizes = [4.0**k for k in range(2, 14)]
    spike = [wave(s, 0) if s != 7_000 else 9.5 for s in range(20_000)]
    stages = [Series(name, steps, [wave(s, i) for s in steps]) for i, name in enumerate(STAGES)]
    epochs = [Series(name, [1, 2, 3], [2.91, 2.13, 1.87]) for name in ("serial", "mpi")]
    ranks = [
        Series("measured", [1, 2, 4], [1, 1.93, 3.6]),
        Series("predicted", [1, 2, 4, 8, 64, 1024], [1, 1.95, 3.7, 7.2, 48, 410], dashed=True),
        Series("perfect", [1, 1024], [1, 1024], dashed=True),
    ]
    ways = [
        Series(name, sizes, [k * 1e9 * s / (s + 2e5 / k) for s in sizes])
        for k, name in enumerate(["host-staged", "one call", "packed", "chunked", "NCCL"], start=1)
    ]
    fall = "Falling curves of four stages, from about 5 to 1.3, which differ by at most 0.6."
    same = "Three epochs of two stages that print the same losses."
    rise = "Measured up to 4 ranks, 3.6 times as fast as one; predicted to rise to 410 at 1,024."
    grow = "Each way of summing grows with the size up to a plateau between 1 and 9 GB/s."
    curve = "A curve that falls from 5 to 1.3, with one peak of 9.5 at step 7,000."
    return [
        LineChart("Loss by step", fall, "step", "training loss", stages),
        LineChart("Loss by epoch", same, "epoch", "mean loss", epochs),
        LineChart("Strong scaling", rise, "ranks", "speed over one rank", ranks, True, True),
        LineChart("Bandwidth of Allreduce by size", grow, "bytes", "bytes per second", ways, True, True),
        LineChart("Twenty thousand steps", curve, "step", "loss", [Series("loss", range(20_000), spike)]),
    ]


def bar_charts() -> list[BarChart]:
    speeds = [
        Bar("serial", 1.0, "1.00 ×"),
        Bar("mpi, 2 ranks with one thread each", 1.93, "1.93 ×"),
        Bar("PyTorch 2.13, eager, the same number of cores", 0.45, "0.45 × (218 tokens/s)"),
    ]
    numbers = [
        *(Bar("python", 0.0123, "0.0123"), Bar("serial", 41.5, "41.5"), Bar("batched", 40_321.0, "40,321")),
        Bar("cuda", NAN, "no GPU here"),
    ]
    phases = [
        Bar("serial", [0.4, 31.0, 64.5, 0.0, 0.0, 7.1], "103"),
        Bar("mpi, rank 0", [0.5, 16.2, 33.0, 1.4, 2.1, 7.3], "60.5"),
        Bar("mpi, rank 1", [0.1, 16.4, 33.2, 0.9, 2.1, 7.2], "59.9"),
    ]
    parts = ["data", "forward", "backward", "Allreduce: wait", "Allreduce: transfer", "optimizer"]
    twice = "Two ranks are 1.9 times as fast as one process, PyTorch reaches 0.45 of its speed."
    shares = "Forward and backward take four fifths of a step, the Allreduce 6 % with two ranks."
    return [
        BarChart("Speed-up over serial", twice, "times as fast as serial", speeds),
        BarChart("Very different numbers", "From a hundredth to forty thousand.", "tokens/s", numbers),
        BarChart("Time of a step by phase", shares, "milliseconds per step", phases, parts),
    ]


def awkward_charts() -> list[LineChart | BarChart]:
    """Charts that have nothing to show, too much, or what was meant to hurt."""
    h, w = HOSTILE, LONG_WORD
    tens = [Series(f"{i} {w}", [1, 2], [i, i * i]) for i in range(10)]
    strange = ([1, 2, 3, 4, 5], [1, NAN, 10**400, 5e-324, -INF])
    return [
        LineChart("No series", "Nothing.", "x", "y", []),
        LineChart("Holes", "As it says.", "x", "y", [Series("s", *strange), Series("t", [], [])]),
        LineChart(
            "One point on log axes", "As it says.", "x", "y", [Series("s", [-1, 3], [1, 4])], True, True
        ),
        LineChart(h, h, h, h, [Series(h, [1, 2], [1, 2]), Series(h, [1, 2], [2, 1], True)]),
        LineChart(w, w, w, w, tens),
        BarChart("No bars", "As it says.", "s", []),
        BarChart(h, h, h, [Bar(h, 1.0, h), Bar(w, INF, w), Bar(f"{w} {w} {w} {w}", 1000.0, "")]),
        BarChart(h, h, h, [Bar(h, [1.0, NAN, 1.0], "a"), Bar(w, [0.0, INF, 2.0], "b")], [h, w, "c"]),
    ]


def tables() -> list[Table]:
    head = ["stage", "training", "inference", "speed-up", "tokens/s", "memory", "loss, first", "loss, last"]
    serial = "serial|41.2 s|0.91 s|1.00 ×|5,271|412 MB|4.1743|1.8702|0"
    mpi = "mpi, 2 ranks|21.3 s|0.93 s|1.93 ×|10,190|640 MB|4.1743|1.8702|3.1e-07"
    note = "Medians of three runs; the memory is that of all ranks together."
    why = "no NVIDIA driver was found: install one, then CuPy"
    return [
        Table([*head, "difference"], [serial.split("|"), mpi.split("|")], "Runtime", note),
        Table(["stage", "why it did not run"], [["cuda", why]]),
        Table([HOSTILE, LONG_WORD], [[HOSTILE, LONG_WORD], ["short row"]], HOSTILE, LONG_WORD),
        Table([], []),
    ]


def sections() -> list[Section]:
    runtime, missing, hostile, empty = tables()
    loss, epochs, scaling, bandwidth, many = line_charts()
    good = Verdict(True, "The largest relative difference from serial is 3.1e-07, below 1e-04.")
    bad = Verdict(False, "Stage mpi differs from serial at step 17 by 2.0e-02, above 1e-04.")
    dashed = Paragraph("Dashed lines are predictions.")
    wrote = Texts([("serial", "The harbour\n  was\tquiet."), (HOSTILE, f"{HOSTILE}\n{LONG_WORD}")])
    strange = Paragraph(f"{HOSTILE} {LONG_WORD}")
    machine = KeyValues([("processor", "2 cores of a Zen 5"), ("memory", "8 GB"), (HOSTILE, LONG_WORD)])
    return [
        Section("Do they agree?", [good, bad, loss, epochs]),
        Section("How fast?", [runtime, missing, *bar_charts()]),
        Section("What would more ranks do?", [dashed, scaling, bandwidth]),
        Section("A long run", [many]),
        Section("What they write", [wrote]),
        Section("Awkward things", [hostile, empty, strange, *awkward_charts()]),
        Section("Measured on", [machine]),
    ]


def example() -> str:
    """The page of all the above."""
    lead = "The same 400 steps through every stage that this machine can run, and what they cost."
    return html("Four stages, one model", lead, sections(), "Made by distgpt compare-stages.")
