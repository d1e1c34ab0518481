"""The results in a page of text: ours, theirs, their ratio, and the bar that was set."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

TRAINING = 1.05
MINI = 2.0
STUDY_XL = 2.0
MEMORY_BOUND = 0.8
LONGEST = 60

Rows = dict[str, dict[str, Any]]


def table(results: dict[str, Any]) -> list[str]:
    sections = results["sections"]
    rows = {name: section.get("rows", {}) for name, section in sections.items()}
    lines = [
        f"GPU benchmark, {results['date']}, {results['seconds']:.0f} s{', toy sizes' * results['quick']}"
    ]
    lines += _environment(rows.get("environment", {}))
    lines += _training("GPT-2 bf16", rows.get("train-gpt2", {}), TRAINING)
    lines += _training("gpt-mini", rows.get("train-mini", {}), MINI)
    lines += _study(rows.get("study", {}))
    lines += _decode(rows.get("decode", {}))
    lines += _training("GPT-2 float32", rows.get("train-float32", {}), None)
    lines += _kernels(rows.get("kernels", {}))
    lines += _products(rows.get("products", {}))
    lines += _ablation(rows.get("ablation", {}))
    return [line[:150] for line in _with_failures(lines, sections)]


def _with_failures(lines: list[str], sections: dict[str, Any]) -> list[str]:
    failures = []
    for name, section in sections.items():
        if "ended" in section:
            failures.append(f"! {name}: {section['ended']}")
        failures += [f"- {name}: {note}" for note in section.get("notes", []) if "attention runs" in note]
        places: dict[str, list[str]] = {}
        for each in section.get("errors", []):
            places.setdefault(each["error"], []).append(each["where"])
        for error, where in places.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            failures.append(f"! {name}, {where[0]}{more}: {error}")
    room = max(5, LONGEST - len(lines) - 1)
    hidden = len(failures) - room
    return lines + failures[:room] + ([f"! and {hidden} more, in the file"] if hidden > 0 else [])


def _environment(rows: Rows) -> Iterator[str]:
    device, best = rows.get("device", {}), rows.get("best", {})
    words = [str(device.get("name", "no device"))]
    if "copy_bytes_per_s" in best:
        words.append(f"copies at {best['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    if "bfloat16_tflops" in best:
        words.append(f"bf16 products at {best['bfloat16_tflops']:.0f} of {best['datasheet_tflops']} TFLOP/s")
    if "torch" in rows.get("peer", {}):
        words.append(f"PyTorch {rows['peer']['torch']}")
    yield ", ".join(words)


def _groups(rows: Rows, value: str) -> dict[str, Rows]:
    """By the part of the name before the last stroke: who, and what is known."""
    found: dict[str, Rows] = {}
    for name, row in rows.items():
        if value in row:
            group, _, who = name.rpartition("/")
            found.setdefault(group, {})[who] = row
    return found


def _against(ours: float, theirs: list[float], bar: float | None) -> str:
    """How many times the best of them."""
    if not theirs or not ours:
        return "nothing to compare with"
    ratio = ours / max(theirs)
    verdict = "" if bar is None else f" (bar {bar}: {'met' if ratio >= bar else 'NOT met'})"
    return f"{ratio:.2f} x{verdict}"


def _training(title: str, rows: Rows, bar: float | None) -> Iterator[str]:
    for group, contestants in _groups(rows, "tokens_per_s").items():
        ours = [row["tokens_per_s"] for who, row in contestants.items() if who.startswith("ours")]
        theirs = [row["tokens_per_s"] for who, row in contestants.items() if not who.startswith("ours")]
        yield f"{title} {group}, tokens/s: {_against(max(ours, default=0), theirs, bar)}"
        for who, row in contestants.items():
            memory = f"{row['peak_bytes'] / 2**30:6.1f} GiB" if row.get("peak_bytes") else ""
            mfu = (
                f"  MFU {row['mfu']:.1%}, of the datasheet {row['mfu_datasheet']:.1%}" if "mfu" in row else ""
            )
            yield f"    {who:26} {row['tokens_per_s']:12,.0f} {memory}{mfu}"


def _study(rows: Rows) -> Iterator[str]:
    for name, contestants in _groups(rows, "seconds").items():
        ms = {who: row["seconds"] * 1000 for who, row in contestants.items()}
        words = [f"{who} {value:.1f}" for who, value in ms.items()]
        ours, theirs = ms.get("ours, float32"), ms.get("PyTorch, float32")
        bar = STUDY_XL if name == "XL" else None
        ratio = _against(1 / ours, [1 / theirs], bar) if ours and theirs else "nothing to compare with"
        yield f"forward {name}, ms: {'; '.join(words)}: float32 {ratio}"


def _decode(rows: Rows) -> Iterator[str]:
    for dtype, contestants in _groups(rows, "tokens_per_s").items():
        speed = {who: row["tokens_per_s"] for who, row in contestants.items()}
        theirs = [value for who, value in speed.items() if not who.startswith("ours")]
        words = "; ".join(f"{who} {value:,.0f}" for who, value in speed.items())
        yield f"decoding {dtype}, tokens/s: {words}: {_against(speed.get('ours', 0), theirs, None)}"


def _kernels(rows: Rows) -> Iterator[str]:
    bound = {name: row for name, row in rows.items() if "of_copy" in row}
    if bound:
        yield f"own kernels, share of the copy bandwidth (bar {MEMORY_BOUND:.0%})"
    cells = [
        f"{name:34} {row['seconds'] * 1e6:8,.0f} us {row['of_copy']:5.0%}"
        f"{' ' if row['of_copy'] >= MEMORY_BOUND else '!'}"
        for name, row in bound.items()
    ]
    for i in range(0, len(cells), 2):
        yield "    " + "   ".join(cells[i : i + 2])
    speeds = [f"{name} {row['tflops']:.0f}" for name, row in rows.items() if "tflops" in row]
    if speeds:
        yield f"TFLOP/s: {'; '.join(speeds)}"


def _products(rows: Rows) -> Iterator[str]:
    speed = {name: row["tflops"] for name, row in rows.items() if "tflops" in row}
    if speed:
        slowest = min(speed, key=lambda name: speed[name])
        chosen = [row["chosen"] for row in rows.values() if "chosen" in row]
        yield (
            f"{len(speed)} kinds of products, TFLOP/s: median {statistics.median(speed.values()):.0f}, "
            f"slowest {speed[slowest]:.0f} ({slowest}); {chosen.count('fused')} of {len(chosen)} better fused"
        )


def _ablation(rows: Rows) -> Iterator[str]:
    """The last layer's alone; the others are in the file."""
    last = list(rows)[-1].partition("/")[0] if rows else ""
    for group, ways in _groups(rows, "us_per_name").items():
        if group.startswith(f"{last}/"):
            words = [
                f"{way} {row['us_per_name']:.3g} us ({row['tflops']:.3g} TFLOP/s)"
                for way, row in ways.items()
            ]
            yield f"{group}, a name: {'; '.join(words)}"
