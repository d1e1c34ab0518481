"""An example report with everything a page can hold, ordinary and awkward, for the tests of reports."""

import math

from distgpt.show.charts import Bar, BarChart, LineChart, Series, StackedBars
from distgpt.show.page import Facts, Paragraph, Section, Table, Texts, Verdict, page

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
    return [
        LineChart(
            "Loss by step",
            "Falling curves of four stages, from about 5 to 1.3, which differ by at most 0.6.",
            "step",
            "training loss",
            [Series(name, steps, [wave(s, i) for s in steps]) for i, name in enumerate(STAGES)],
        ),
        LineChart(
            "Loss by epoch",
            "Three epochs of two stages that print the same losses.",
            "epoch",
            "mean loss",
            [Series("serial", [1, 2, 3], [2.91, 2.13, 1.87]), Series("mpi", [1, 2, 3], [2.91, 2.13, 1.87])],
        ),
        LineChart(
            "Strong scaling",
            "Measured up to 4 ranks, 3.6 times as fast as one; predicted to rise to 410 at 1,024.",
            "ranks",
            "speed over one rank",
            [
                Series("measured", [1, 2, 4], [1, 1.93, 3.6]),
                Series("predicted", [1, 2, 4, 8, 64, 1024], [1, 1.95, 3.7, 7.2, 48, 410], dashed=True),
                Series("perfect", [1, 1024], [1, 1024], dashed=True),
            ],
            log_x=True,
            log_y=True,
        ),
        LineChart(
            "Bandwidth of Allreduce by size of the message",
            "Each way of summing grows with the size up to a plateau between 1 and 9 GB/s.",
            "bytes",
            "bytes per second",
            [
                Series(name, sizes, [k * 1e9 * s / (s + 2e5 / k) for s in sizes])
                for k, name in enumerate(["host-staged", "one call", "packed", "chunked", "NCCL"], start=1)
            ],
            log_x=True,
            log_y=True,
        ),
        LineChart(
            "Twenty thousand steps",
            "A curve that falls from 5 to 1.3, with one peak of 9.5 at step 7,000.",
            "step",
            "loss",
            [Series("loss", range(20_000), spike)],
        ),
    ]


def bar_charts() -> list[BarChart | StackedBars]:
    return [
        BarChart(
            "Speed-up over serial",
            "Two ranks are 1.9 times as fast as one process, PyTorch reaches 0.45 of its speed.",
            "times as fast as serial",
            [
                Bar("serial", 1.0, "1.00 ×"),
                Bar("mpi, 2 ranks with one thread each", 1.93, "1.93 ×"),
                Bar("PyTorch 2.13, eager, the same number of cores", 0.45, "0.45 × (218 tokens/s)"),
            ],
        ),
        BarChart(
            "Very different numbers",
            "From a hundredth to forty thousand.",
            "tokens/s",
            [
                Bar("python", 0.0123),
                Bar("serial", 41.5),
                Bar("batched", 40_321.0),
                Bar("cuda", NAN, "no GPU here"),
            ],
        ),
        StackedBars(
            "Time of a step by phase",
            "Forward and backward take four fifths of a step, the Allreduce 6 % with two ranks.",
            "milliseconds per step",
            ["data", "forward", "backward", "Allreduce: wait", "Allreduce: transfer", "optimizer"],
            [
                ("serial", [0.4, 31.0, 64.5, 0.0, 0.0, 7.1]),
                ("mpi, rank 0", [0.5, 16.2, 33.0, 1.4, 2.1, 7.3]),
                ("mpi, rank 1", [0.1, 16.4, 33.2, 0.9, 2.1, 7.2]),
            ],
        ),
    ]


def awkward_charts() -> list[LineChart | BarChart | StackedBars]:
    """Charts with something that a drawing could trip over; each still has to say what it can."""
    h, w = HOSTILE, LONG_WORD
    return [
        LineChart("No series", "Nothing.", "x", "y", []),
        LineChart("Empty series", "Nothing.", "x", "y", [Series("empty", [], [])]),
        LineChart("Not numbers", "Nothing.", "x", "y", [Series("n", [1, NAN, 2], [NAN, 1, INF])]),
        LineChart("Holes", "Two parts.", "x", "y", [Series("h", [1, 2, 3, 4, 5], [1, NAN, 2, 3, -INF])]),
        LineChart("One point", "At 3, 4.", "x", "y", [Series("one", [3], [4])]),
        LineChart("One point on log axes", "At 3, 4.", "x", "y", [Series("one", [3], [4])], True, True),
        LineChart("All equal", "All 7.", "x", "y", [Series("same", [1, 2, 3], [7, 7, 7])]),
        LineChart("All zero", "All 0.", "x", "y", [Series("zero", [0, 0], [0, 0])]),
        LineChart(
            "Not positive", "Two left.", "x", "y", [Series("n", [-1, 0, 1, 10], [1, 1, 0.1, 1])], True, True
        ),
        LineChart("All negative on log axes", "None left.", "x", "y", [Series("n", [-1], [-1])], True, True),
        LineChart("Huge", "Beyond floats.", "x", "y", [Series("h", [1, 2, 3], [1e308, -1e299, 10**400])]),
        LineChart("Tiny", "Below floats.", "x", "y", [Series("t", [1, 2, 3], [5e-324, 1e-310, 2e-5])]),
        LineChart(
            "Tiny on log axes", "As above.", "x", "y", [Series("t", [1, 2], [5e-324, 1e-290])], True, True
        ),
        LineChart("Close", "Close.", "x", "y", [Series("c", [1e6, 1e6 + 0.1], [1e6 + 0.1, 1e6 + 0.3])]),
        LineChart("Wide", "Wide.", "x", "y", [Series("c", [1e-12, 1e15], [1e-290, 1e290])], True, True),
        LineChart(h, h, h, h, [Series(h, [1, 2], [1, 2]), Series(h, [1, 2], [2, 1], True)]),
        LineChart(w, w, w, w, [Series(f"{i} {w}", [1, 2], [i, i * i]) for i in range(10)]),
        BarChart("No bars", "Nothing.", "s", []),
        BarChart("Zeros", "Zeros.", "s", [Bar("zero", 0.0), Bar("nothing", NAN), Bar("without end", INF)]),
        BarChart("Below zero", "Both.", "s", [Bar("loss", -2.5), Bar("gain", 1.25), Bar("nil", 0)]),
        BarChart("Huge", "Huge.", "s", [Bar("huge", 1e308), Bar("less", 1e299), Bar("small", 1e-9)]),
        BarChart(h, h, h, [Bar(h, 1.0, h), Bar("", 2.0)]),
        BarChart(w, w, w, [Bar(w, 1.0, w), Bar(f"{w} {w} {w} {w}", 1000.0)]),
        StackedBars("No parts", "Nothing.", "s", [], [("a", []), ("b", [])]),
        StackedBars("No bars", "Nothing.", "s", ["a", "b"], []),
        StackedBars(h, h, h, [h, w, "c"], [(h, [1.0, NAN, -1.0]), (w, [0.0, INF, 2.0])]),
    ]


def tables() -> list[Table]:
    wide = ["stage", "training", "inference", "speed-up", "tokens/s", "memory", "loss, first", "loss, last"]
    return [
        Table(
            [*wide, "difference"],
            [
                ["serial", "41.2 s", "0.91 s", "1.00 ×", "5,271", "412 MB", "4.1743", "1.8702", "0"],
                [
                    "mpi, 2 ranks",
                    "21.3 s",
                    "0.93 s",
                    "1.93 ×",
                    "10,190",
                    "640 MB",
                    "4.1743",
                    "1.8702",
                    "3.1e-07",
                ],
            ],
            "Runtime",
            "Medians of three runs; the memory is that of all ranks together.",
        ),
        Table(
            ["stage", "why it did not run"], [["cuda", "no NVIDIA driver was found: install one, then CuPy"]]
        ),
        Table([HOSTILE, LONG_WORD], [[HOSTILE, LONG_WORD], ["short row"]], HOSTILE, LONG_WORD),
        Table([], []),
    ]


def sections() -> list[Section]:
    runtime, missing, hostile, empty = tables()
    loss, epochs, scaling, bandwidth, many = line_charts()
    speed, different, phases = bar_charts()
    return [
        Section(
            "Do they agree?",
            [
                Verdict(True, "The largest relative difference from serial is 3.1e-07, below 1e-04."),
                Verdict(False, "Stage mpi differs from serial at step 17 by 2.0e-02, above 1e-04."),
                loss,
                epochs,
            ],
        ),
        Section("How fast?", [runtime, missing, speed, different, phases]),
        Section(
            "What would more ranks do?", [Paragraph("Dashed lines are predictions."), scaling, bandwidth]
        ),
        Section("A long run", [many]),
        Section(
            "What they write",
            [Texts([("serial", "The harbour\n  was\tquiet."), (HOSTILE, f"{HOSTILE}\n{LONG_WORD}")])],
        ),
        Section("Awkward things", [hostile, empty, Paragraph(f"{HOSTILE} {LONG_WORD}"), *awkward_charts()]),
        Section(
            "Measured on",
            [Facts([("processor", "2 cores of a Zen 5"), ("memory", "8 GB"), (HOSTILE, LONG_WORD)])],
        ),
    ]


def example() -> str:
    """The page of all the above."""
    return page(
        "Four stages, one model",
        "The same 400 steps through every stage that this machine can run, and what they cost.",
        sections(),
        "Made by distgpt compare-stages.",
    )
