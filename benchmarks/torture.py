"""Is a run never lost? Short real runs are killed, stopped, starved of disk and damaged, and end as if not.

A trial is a run of a small model under mpirun, or without it, to which something happens, often at a chosen
system call; it resumes until it is done. After each attempt the invariants of torturing/invariants.py must
hold. What happens follows from the seed and the trial's number. A campaign may be cut off and go on:

  python benchmarks/torture.py --trials 1000 --seconds 1800 --out FILE      one line of FILE per trial
  python benchmarks/torture.py --trials 1000 --resume --out FILE            the rest of them
  python benchmarks/torture.py --show 17 --out FILE                         trial 17 of it again, loudly
  python benchmarks/torture.py table FILE                                   what came out, for its page

Needs Linux, a C compiler, an mpirun and root for a small file system; without them it leaves out some kinds.
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
    parser.add_argument("--trials", type=int, default=1000, help="how many, with those a file has already")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help=f"some of them, with commas: {', '.join(CHOICES)}")
    parser.add_argument("--modes", help=f"some of them, with semicolons: {'; '.join(m.name for m in MODES)}")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further trial after these"
    )
    parser.add_argument(
        "--out", type=Path, help="the result file; benchmarks/results/torture-DATE.jsonl if left out"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the campaign in --out")
    parser.add_argument(
        "--show", type=int, metavar="N", help="one trial alone, loudly; its directory is kept"
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for the directories of trials that found something"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that the trial's folder goes
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
                sys.exit(f"{out} is of commit {was}, and this is {now}: begin another file")
        else:
            with out.open("x") as file:
                file.write(json.dumps(head) + "\n")
        carry_out(campaign, ground, out, head["first"], rows, args)
    print(table.tables(*table.read(out)))


def heading(args: argparse.Namespace, ground: trials.Ground) -> dict[str, Any]:
    """The first line of a result file: what the campaign consists of, and where it is run."""
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
    """Append a line per trial, each in one go, so that a campaign may be cut off at any moment."""
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
