"""The script of a batch job: `distgpt train` on its nodes, begun again until it is done.

It is the same for all batch systems except for the parts in their rows (systems.py). A shell runs its traps
only while it waits for a process in the background, which has a process group of its own: what a system sends
to the script's group must not end the launcher before the ranks have saved.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

from distgpt.cluster.jobs.batch import array
from distgpt.cluster.jobs.batch.job import Job
from distgpt.cluster.jobs.batch.systems import SECONDS_TO_SUBMIT, System
from distgpt.core.base.errors import UsageError

WIDTH = 100  # of a line of the command

# mkdir makes a folder once, also if two ends of one job race, or the system has started the job again.
_SUCCESSOR = """\
  marker={marker}"{number}"
  if mkdir "$marker" 2>/dev/null; then
    {submit} && exit 0
    echo "the successor could not be submitted: submit the script again"
  elif [ -d "$marker" ]; then
    echo "$marker is there: this job has submitted its successor already"
  else
    echo "$marker cannot be made, so no successor follows: submit the script again"
  fi"""

_APART = "set -m  # {} in a process group of its own: on a TERM that is meant for this shell it would kill"
_SCRIPT = """\
#!/bin/bash
# Train, and begin again where it stopped until all steps are done. {advice}
# {made_by}
{options}

{enters}{deadline}# What this site needs before a program starts goes here: module load …, export …
{setup}
{begin}log={name}-{number}.$attempt.log
newest() {{ ls {checkpoints} 2>/dev/null | tail -n 1; }}
{functions}before=$(newest)

{apart} the ranks
{launch}{command} \\
  >>"$log" 2>&1 &
ranks=$!

{signals}
trap 'came=USR1; {passed_on}' {announces}
trap 'came=TERM; ending=yes; {passed_on}' {ends}
# wait comes back for a signal, after two at once perhaps twice, and always while the ranks are stopped: of a
# TSTP the shell would leave the loop, too, were it not for the function.
ended() {{ wait $ranks; }}
while came=; ended; code=$?; [ "$came" ] || kill -0 $ranks 2>/dev/null; do
  [ "$came" ] || sleep 0.2
done
echo "attempt $attempt left with $code; newest checkpoint: $(newest)"

# {rule}
again=
if [ $code = 75 ] && [ "$(newest)" = "$before" ]; then
  echo "no step was finished in this attempt: not queued again, as that might never end"
elif {condition}; then
  again=yes
fi
if [ "$again" ] && [ -z "$ending" ]; then
{again}
fi
exit $code
"""


def script(system: System, job: Job) -> str:
    """Return the whole script."""
    quote = array.quoting(system.element) if job.is_array else shlex.quote
    launch = system.launch(job)
    number = system.numbers[job.is_array]
    values = {
        "number": number,
        "name": job.name,
        "seconds": int(job.seconds),
        "submitting": min(SECONDS_TO_SUBMIT, int(job.seconds / 4)),
    }
    again = f"  {system.requeue.format(**values)}"
    if job.resubmits or not system.requeue:
        again = _SUCCESSOR.format(
            marker=quote(str(job.out / "followed-")), number=number, submit=_successor(system, job)
        )
    begin = system.begin_element * job.is_array + system.begin + system.attempt
    before = system.before + system.before_openmpi * (job.mpi == "openmpi")
    return _SCRIPT.format(
        advice=system.advice,
        made_by=job.made_by,
        options="\n".join(f"{system.sentinel} {option}" for option in _directives(system, job)),
        enters=system.enters,
        # Before the lines of the site, which take time from the limit.
        deadline=system.deadline.format(**values),
        setup="".join(f"{line}\n" for line in job.setup),
        begin=begin.format(**values),
        name=job.name,
        number=number,
        checkpoints=quote(str(job.out / "checkpoints")),
        functions=before.format(**values),
        apart=_APART.format(launch.partition(" ")[0].rpartition("/")[2] or "the run"),
        launch=f"{launch} \\\n  " if launch else "",
        command=" \\\n  ".join(_wrapped(job.command, quote)),
        signals=system.signals,
        announces=system.announces,
        ends=system.ends,
        passed_on=system.passed_on,
        rule=system.rule,
        condition=system.begins_again.format(),
        again=again,
    )


def _directives(system: System, job: Job) -> list[str]:
    """Return the script's options, the user's in place of ours that set the same."""
    for line in job.lines:
        if system.limit_option and re.match(system.limit_option, line):
            raise UsageError(f"--directive {line}: give the limit by --time, which also says when to save")
        if system.array_option and re.match(system.array_option, line):
            raise UsageError(
                f"--directive {line}: give the numbers of an array by --array, as in --array 1-4, and a"
                " name by --name"
            )
    theirs = set(map(_key, job.lines))
    return [*(line for line in system.options(job) if _key(line) not in theirs), *job.lines]


def _key(option: str) -> str:
    """Return what an option sets: "--time=4h" → "--time", "-l h_rt=60" → "-lh_rt", "-N 2" → "-N"."""
    found = re.match(r'-[lR]\s*"?\w+|--?\w[\w-]*', option)
    name = re.sub(r'[\s"]', "", found.group()) if found else option
    return "--gpus-per-node" if option.startswith("--gres=gpu") else name  # of Slurm


def _successor(system: System, job: Job) -> str:
    """Return the command that submits this script as another job.

    A successor waits for no job as this one did: systems refuse or delete what waits for one that they have
    forgotten.
    """
    command = system.successor
    if job.is_array:
        command += " " + system.successor_element.format(name=job.name)
    left_out = [system.left_out_of_element] * (job.is_array and system.left_out_of_element != "")
    left_out += [system.waits] * any(system.waits and re.match(system.waits, line) for line in job.lines)
    if left_out:
        return f"grep -Ev '^{system.sentinel} *({'|'.join(left_out)})' \"$0\" | {command}"
    return f"{command} {system.reads}"


def _wrapped(words: Sequence[str], quote: Callable[[str], str]) -> list[str]:
    """Quote the words and break them into lines; an option stays with its value."""
    lines = [""]
    previous = ""
    for word in words:
        quoted = quote(word)
        is_value = previous.startswith("--") and "=" not in previous and not word.startswith("-")
        if lines[-1] and not is_value and len(lines[-1]) + len(quoted) >= WIDTH - 20:
            lines.append("")
        lines[-1] = f"{lines[-1]} {quoted}".lstrip()
        previous = word
    return lines
