"""The batch script of a job: run `distgpt train` on its nodes, and restart it until it is done.

The script is the same for all batch systems except for the parts in systems.py. A shell runs its traps only
while it waits for a background process. That process has its own process group, because a signal of the
system to the script's group must not end the launcher before the ranks have saved.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.jobs.systems import SECONDS_TO_SUBMIT, Job, System
from distgpt.core.base.errors import UsageError

ANY = "ELEMENT"  # may replace the system's own variable in a command
MOST_ELEMENTS = 100_000
WIDTH = 100  # columns of the command


def shape(text: str) -> tuple[int, int]:
    """Parse NUMA regions per node and cores per region from "8x16", or "here" for this machine."""
    if text == "here":
        machine = read_machine()
        if machine.doubts:
            raise UsageError(f"--node here: {machine.doubts[0]}; describe the node, such as --node 8x16")
        sizes = Counter(core[0].region for core in machine.cores)
        return len(sizes), min(sizes.values())
    result = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if not result:
        raise UsageError(f"--node {text} must be NUMA regions and cores per region, such as 8x16, or here")
    return int(result[1]), int(result[2])


# Arrays: a script for many runs, with each run's number in a shell variable


def elements(text: str) -> list[int]:
    """Return the numbers of an array's elements, such as "1-4", "0-8:2%3" or "0,3,7"; [] for ""."""
    rows, percent, most = text.partition("%")
    if percent and not re.fullmatch(r"[1-9]\d{0,8}", most):
        raise UsageError(
            f"--array={text}: % must precede a number of concurrent jobs, such as --array=1-40%8"
        )
    numbers: list[int] = []
    for part in rows.split(",") if text else ():
        if (result := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?", part)) is None:
            raise UsageError(f"--array={text} must be numbers, such as --array=1-4 or --array=0,3,7")
        several = range(int(result[1]), int(result[2] or result[1]) + 1, int(result[3] or 1))[:MOST_ELEMENTS]
        if not several:  # without elements, all runs of the array would share one directory
            raise UsageError(f"--array={text}: {part} ends before it starts")
        numbers += several
    return list(dict.fromkeys(numbers))  # Flux would start a duplicate twice in the same directory


def renamed(words: Iterable[str], system: System) -> list[str]:
    """Replace other names of the array variable by the system's own."""
    names = "|".join((*system.elements, ANY))
    pattern = re.compile(rf"\$(?:{{(?:{names})}}|(?:{names})(?!\w))")
    return [pattern.sub(lambda _: system.element, word) for word in words]


def with_own_directories(words: Sequence[str], element: str) -> tuple[list[str], str]:
    """Return the words with a separate --out for every element, and that directory.

    The directory is "" without --out.
    """
    out, changed = "", list(words)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=") if word.startswith("--out=") else ("", "", word)
        if equals or (place and words[place - 1] == "--out"):
            out = value if element in value else str(Path(value) / element)
            changed[place] = f"{name}{equals}{out}"
    return changed, out


# mkdir succeeds only once, even if two ends of one job race or the system has restarted the job.
_SUCCESSOR = """\
  marker={marker}"{number}"
  if mkdir "$marker" 2>/dev/null; then
    {submit} && exit 0
    echo "cannot submit the successor: submit the script again"
  elif [ -d "$marker" ]; then
    echo "$marker exists: this job has already submitted its successor"
  else
    echo "cannot create $marker, so no successor was submitted: submit the script again"
  fi"""

_SCRIPT = """\
#!/bin/bash
# Train, and resume after each stop until all steps are done. {system.advice}
# {job.made_by}
{options}

{first}# Add commands that this site requires before a program starts: module load …, export …
{setup}
{begin}log={job.name}-{number}.$attempt.log
newest() {{ ls {checkpoints} 2>/dev/null | tail -n 1; }}
{functions}before=$(newest)

set -m  # {starts} in its own process group: on a TERM meant for this shell it would kill the ranks
{launch}{command} \\
  >>"$log" 2>&1 &
ranks=$!

{system.signals}
trap 'came=USR1; {system.passed_on}' {system.announces}
trap 'came=TERM; ending=yes; {system.passed_on}' {system.ends}
# wait returns after a signal, perhaps twice after two signals, and always while the ranks are stopped. The
# function keeps the shell in the loop after a TSTP.
ended() {{ wait $ranks; }}
while came=; ended; code=$?; [ "$came" ] || kill -0 $ranks 2>/dev/null; do
  [ "$came" ] || sleep 0.2
done
echo "attempt $attempt exited with $code; newest checkpoint: $(newest)"

# {system.rule}
again=
if [ $code = 75 ] && [ "$(newest)" = "$before" ]; then
  echo "no step finished in this attempt: not requeued, to avoid an endless loop"
elif {system.begins_again}; then
  again=yes
fi
if [ "$again" ] && [ -z "$ending" ]; then
{again}
fi
exit $code
"""


def script(system: System, job: Job) -> str:
    quote = _quoting(system.element) if job.array else shlex.quote
    launch = system.launch(job)
    number = system.numbers[bool(job.array)]
    values = {
        "number": number,
        "name": job.name,
        "seconds": int(job.seconds),
        "submitting": min(SECONDS_TO_SUBMIT, int(job.seconds / 4)),
    }
    again = f"  {system.requeue.format(**values)}"
    if job.successor or not system.requeue:
        again = _SUCCESSOR.format(
            marker=quote(str(job.out / "followed-")), number=number, submit=_successor(system, job)
        )
    begin = system.begin_element * bool(job.array) + system.begin + system.attempt
    before = system.before + system.before_openmpi * (job.mpi == "openmpi")
    return _SCRIPT.format(
        system=system,
        job=job,
        options="\n".join(f"{system.sentinel} {option}" for option in _directives(system, job)),
        # Must precede the site's lines, which take some of the time limit.
        first=system.first.format(**values),
        setup="".join(f"{line}\n" for line in job.setup),
        begin=begin.format(**values),
        number=number,
        checkpoints=quote(str(job.out / "checkpoints")),
        functions=before.format(**values),
        starts=launch.partition(" ")[0].rpartition("/")[2] or "the run",
        launch=f"{launch} \\\n  " if launch else "",
        command=" \\\n  ".join(_wrapped(job.command, quote)),
        again=again,
    )


def _directives(system: System, job: Job) -> list[str]:
    """Return the script's directives. The user's replace default ones that set the same option."""
    for line in job.lines:
        if re.match(system.reserved, line):
            raise UsageError(f"--directive {line} is not allowed; use --time, --array or --name")
    theirs = set(map(_key, job.lines))
    return [*(line for line in system.options(job) if line and _key(line) not in theirs), *job.lines]


def _key(option: str) -> str:
    """Return the option in a directive: "--time=4h" → "--time", "-l h_rt=60" → "-lh_rt", "-N 2" → "-N"."""
    result = re.match(r'-[lR]\s*"?\w+|--?\w[\w-]*', option)
    name = re.sub(r'[\s"]', "", result.group()) if result else option
    return "--gpus-per-node" if option.startswith("--gres=gpu") else name  # Slurm


def _successor(system: System, job: Job) -> str:
    """Return the command that submits this script as another job.

    The successor does not inherit this job's dependencies: systems reject or delete jobs that depend on
    forgotten jobs.
    """
    command, left_out = system.successor, list[str]()
    if job.array:
        command += " " + system.successor_element.format(name=job.name)
        left_out += filter(None, [system.left_out_of_element])
    if system.waits and any(re.match(system.waits, line) for line in job.lines):
        left_out.append(system.waits)
    if left_out:
        return f"grep -Ev '^{system.sentinel} *({'|'.join(left_out)})' \"$0\" | {command}"
    return f"{command} {system.reads}"


def _quoting(element: str) -> Callable[[str], str]:
    """Return a function that quotes a word for a shell, except for the variable of an element's number."""

    def quoted(word: str) -> str:
        parts = [shlex.quote(part) if part else "" for part in word.split(element)]
        return f'"{element}"'.join(parts) or "''"

    return quoted


def _wrapped(words: Sequence[str], quote: Callable[[str], str]) -> list[str]:
    """Quote the words and break them into lines. An option stays with its value."""
    lines, previous = [""], ""
    for word in words:
        quoted = quote(word)
        is_value = previous.startswith("--") and "=" not in previous and not word.startswith("-")
        if lines[-1] and not is_value and len(lines[-1]) + len(quoted) >= WIDTH - 20:
            lines.append("")
        lines[-1] = f"{lines[-1]} {quoted}".lstrip()
        previous = word
    return lines
