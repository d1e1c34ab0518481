"""Kill, stop and corrupt short runs, or fill their disk, and check that they still end correctly.

A trial is a run of a small model, with or without mpirun. It has a fault, often at a chosen system call, and
resumes until it is finished. After each attempt the invariants of torturing/invariants.py must hold. The seed
and the trial's number determine the fault. A campaign can be interrupted and resumed:

  python benchmarks/torture.py --trials 1000 --seconds 1800 --out FILE      one line of FILE per trial
  python benchmarks/torture.py --trials 1000 --resume --out FILE            the remaining trials
  python benchmarks/torture.py --show 17 --out FILE                         repeat trial 17 with output
  python benchmarks/torture.py table FILE                                   the tables of its page

Requires Linux. Without a C compiler, mpirun, or root for a small file system, some kinds are skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import end_with_errors
from torturing import attempts, preload, table, trials
from torturing.faults import CHOICES, MODES, WITH_LIBRARY, Campaign

from distgpt.cluster.jobs.launchers import own_mpirun
from distgpt.measure.doctor.facts import anonymised, environment

RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("file", nargs="?", type=Path, help="a result file, for `table`")
    parser.add_argument("--trials", type=int, default=1000, help="trials, including trials in the file")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help=f"some of them, with commas: {', '.join(CHOICES)}")
    parser.add_argument("--modes", help=f"some of them, with semicolons: {'; '.join(m.name for m in MODES)}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no trial after N seconds")
    parser.add_argument(
        "--out", type=Path, help="result file (default: benchmarks/results/torture-DATE.jsonl)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the campaign in --out")
    parser.add_argument(
        "--show", type=int, metavar="N", help="run only trial N, with output, and keep its directory"
    )
    parser.add_argument("--keep", type=Path, help="directory to keep failed trials in")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # removes the trial's directory
    if args.what == "table":
        print(table.tables(*table.read(args.file)))
        return
    with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        made = preload.compiled(folder)
        ground = trials.Ground(folder, made, lambda text: print(text, flush=True))
        out = args.out or RESULTS / f"torture-{datetime.date.today()}.jsonl"
        if args.resume or (args.show is not None and out.exists()):
            head, rows = table.read(out)
        else:
            head, rows = heading(args, ground), []
        campaign = Campaign(head["seed"], tuple(head["modes"]), tuple(head["kinds"]), head["calls"])
        if args.show is not None:
            trial = campaign.trial(args.show)
            keep = args.keep or Path(tempfile.mkdtemp(prefix="torture-kept-"))
            print(trial)
            print(json.dumps(trials.run(trial, ground, keep, ground.say), indent=1))
            print(f"kept in {keep / f'trial-{args.show}'}")
            return
        if args.resume:
            was, now = head["environment"].get("commit"), environment().get("commit")
            if was != now:
                sys.exit(f"{out} is of commit {was}, not {now}; choose another file")
        else:
            with out.open("x") as file:
                file.write(json.dumps(head) + "\n")
        carry_out(campaign, ground, out, head["first"], rows, args)
    print(table.tables(*table.read(out)))


def heading(args: argparse.Namespace, ground: trials.Ground) -> dict[str, Any]:
    kinds, modes = list(CHOICES), [mode.name for mode in MODES if mode.ranks == 1 or own_mpirun()]
    if ground.preload is None:
        kinds = [kind for kind in kinds if kind not in WITH_LIBRARY]
        print(f"no compiler: without {', '.join(WITH_LIBRARY)}")
    if not attempts.can_mount(ground.folder):
        kinds.remove("full disk")
        print("no file system can be mounted: without full disk")
    if not own_mpirun():
        kinds.remove("ranks")
        print("no mpirun: without ranks, and without modes of several")
    kinds = chosen(args.kinds and args.kinds.split(","), kinds)
    modes = chosen(args.modes and args.modes.split(";"), modes)
    serial = next(mode for mode in MODES if mode.name == "serial")
    seen = ground.survey(serial, 1)
    calls = {"save": len(seen.save) or 1, "elsewhere": len(seen.elsewhere) or 1, "start": preload.STARTING}
    told = environment() | {"command": anonymised(" ".join(["python", *sys.argv]))}
    return {
        "environment": told,
        "seed": args.seed,
        "first": args.first,
        "kinds": kinds,
        "modes": modes,
        "calls": calls,
    }


def chosen(wanted: list[str] | None, there: list[str]) -> list[str]:
    asked = [word.strip() for word in wanted] if wanted else there
    if missing := set(asked) - set(there):
        sys.exit(f"not possible here: {', '.join(missing)} (possible: {', '.join(there)})")
    return asked


def carry_out(
    campaign: Campaign,
    ground: trials.Ground,
    out: Path,
    first: int,
    rows: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    """Append one line per trial with a single write, so a campaign can be interrupted at any time."""
    done, begun = {row["trial"] for row in rows}, time.monotonic()
    with out.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, 2)
        for number in range(first, first + args.trials):
            if number in done:
                continue
            if time.monotonic() - begun > args.seconds:
                return
            found = trials.run(campaign.trial(number), ground, args.keep)
            file.write(json.dumps(found).encode() + b"\n")
            file.flush()
            what = "; ".join(found["wrong"]) or found.get("refused", "")
            print(
                f"{number} {found['kind']}, {found['mode']}, {found['seconds']:.1f} s {what[:400]}",
                flush=True,
            )


if __name__ == "__main__":
    end_with_errors(main)
