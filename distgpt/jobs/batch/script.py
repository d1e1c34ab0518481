"""The script of a batch job: `distgpt train` on its nodes, begun again until it is done.

It is the same for all batch systems but for the parts that a `System` gives. A shell runs its traps only
while it waits for a process in the background, which has a process group of its own: what a system sends to
the script's group must not end the launcher before the ranks have saved.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

from distgpt.core.base.errors import UsageError
from distgpt.core.base.tables import Table
from distgpt.jobs.batch import array
from distgpt.jobs.batch.job import Job

WIDTH = 100  # of a line of the command
# For a system that sends no signal before its limit: the run saves in time by itself (launch/environment.py).
END = "export DISTGPT_JOB_END=$(($(date +%s) + {}))  # the limit above, in seconds since 1970\n"


class System:
    """A batch system's part of the script, in the words of the plain shell. Each derives from this."""

    name: str  # what people call it
    sentinel: str  # what a line with a directive begins with
    submits: tuple[str, ...]  # the command that reads a script from its standard input
    programs: tuple[str, ...]  # commands that are there where it is
    element: str  # the number of an array's element, as in "$SGE_TASK_ID"
    elements: tuple[str, ...]  # variables with that number that commands may have
    example: str  # an option that a site may want
    advice: str  # how the script is submitted, the header's sentences
    signals: str  # the comment at the traps
    refused_names = ""  # of jobs, as a regular expression
    launches_by_mpi = True  # by an mpiexec, which knows nothing of other jobs' cores
    least_element = 0  # of an array: systems refuse lower numbers
    # Options of its own, as regular expressions, that a script has by options of distgpt.
    array_option = ""  # for the numbers of an array
    limit_option = ""  # for the time limit, if the script says a second time when to save
    waits = ""  # for a job to wait for others, which a successor must not do
    enters = ""  # the line that goes to where the script was submitted, if the system does not
    passed_on = "kill -USR1 $ranks"  # the command that asks the ranks to save
    announces = "USR1"  # signals before a limit, after which the job begins again
    ends = "TERM"  # signals of a job's end to which the script only saves
    rule = '75 is "saved, start me again".'  # the comment before the decision

    def options(self, job: Job) -> list[str]:
        """Return what the job asks for, as the system's options."""
        raise NotImplementedError

    def named(self, given: str | None, directory: str) -> str:
        """Return a job's name: the given one, or one by the run's directory that the system takes."""
        if given and re.fullmatch(self.refused_names, given):
            raise UsageError(f"--name {given}: {self.name} takes no such name; run-{given} would do")
        return given or f"{'run-' * bool(re.fullmatch(self.refused_names, directory))}{directory}"

    def number(self, job: Job) -> str:
        """Return the shell's words for the number of the job, or of an array's element."""
        raise NotImplementedError

    def deadline(self, job: Job) -> str:
        """Return the line that tells the run the time limit; "" where the system announces it."""
        return ""

    def begin(self, job: Job) -> str:
        """Return lines that set what the script needs, `attempt` among them."""
        log = f"{job.name}-{self.number(job)}"
        return f'attempt=0\nwhile [ -e "{log}.$attempt.log" ]; do attempt=$((attempt + 1)); done\n'

    def functions(self, job: Job) -> str:
        """Return lines that stand before the launch, among them functions of the shell for `begins_again`."""
        return ""

    def launch(self, job: Job) -> str:
        """Return the words before the command that start it as the job's ranks."""
        from distgpt.jobs.batch.launch import launched

        return launched(job)

    def begins_again(self, job: Job) -> str:
        """Return the shell's condition for another attempt, where a step was finished."""
        return "[ $code = 75 ]"

    def requeue(self, job: Job) -> str:
        """Return the lines that queue this job again; "" where the system has no way."""
        return ""

    def successor(self, job: Job) -> str:
        """Return the command that submits this script as another job."""
        raise NotImplementedError

    def shortened(self, job: Job, command: str, array: str = "") -> str:
        """Return the words that give a command this script, shortened for a successor; "" if it stays whole.

        A successor waits for no job as this one did: systems refuse or delete what waits for one that they
        have forgotten. `array` begins the option for all elements, where a successor is of one.
        """
        left_out = [array] * (job.is_array and array != "")
        left_out += [self.waits] * any(re.match(self.waits, line) for line in job.lines)
        if not left_out:
            return ""
        return f"grep -Ev '^{self.sentinel} *({'|'.join(left_out)})' \"$0\" | {command}"

    def mpi(self, vendor: str) -> str | None:
        """Return the value of --mpi that suits an MPI; None if that is not known."""
        from distgpt.jobs.batch.launch import LAUNCHERS

        return next((name for name, row in LAUNCHERS.items() if vendor in row.vendors), None)

    def submissions(self, job: Job) -> list[list[str]]:
        """Return the commands that submit a script from their standard input."""
        return [list(self.submits)]

    def shown_number(self, is_array: bool) -> str:
        """Return what stands for a job's number where users are told of its logs."""
        return "JOB.ELEMENT" if is_array else "JOB"

    def log(self, name: str, number: str) -> str:
        """Return the file with what the script itself prints."""
        return f"{name}-{number}.log"

    def directives(self, job: Job) -> list[str]:
        """Return the script's options, the user's in place of ours that set the same."""
        for line in job.lines:
            if self.limit_option and re.match(self.limit_option, line):
                raise UsageError(
                    f"--directive {line}: give the limit by --time, which also says when to save"
                )
            if self.array_option and re.match(self.array_option, line):
                raise UsageError(
                    f"--directive {line}: give the numbers of an array by --array, as in --array 1-4, and a"
                    " name by --name"
                )
        theirs = set(map(key, job.lines))
        return [*(line for line in self.options(job) if key(line) not in theirs), *job.lines]


SYSTEMS: Table[System] = Table("batch systems", "--system", {})


def key(option: str) -> str:
    """Return what an option sets: "--time=4h" → "--time", "-l h_rt=60" → "-lh_rt", "-N 2" → "-N"."""
    found = re.match(r'-[lR]\s*"?\w+|--?\w[\w-]*', option)
    name = re.sub(r'[\s"]', "", found.group()) if found else option
    return "--gpus-per-node" if option.startswith("--gres=gpu") else name  # of Slurm


def script(system: System, job: Job) -> str:
    """Return the whole script."""
    quote = array.quoting(system.element) if job.is_array else shlex.quote
    launch = system.launch(job)
    return _SCRIPT.format(
        advice=system.advice,
        made_by=job.made_by,
        options="\n".join(f"{system.sentinel} {option}" for option in system.directives(job)),
        enters=system.enters,
        deadline=system.deadline(job),  # before the lines of the site, which take time from the limit
        setup="".join(f"{line}\n" for line in job.setup),
        begin=system.begin(job),
        name=job.name,
        number=system.number(job),
        checkpoints=quote(str(job.out / "checkpoints")),
        functions=system.functions(job),
        apart=_APART.format(launch.partition(" ")[0].rpartition("/")[2] or "the run"),
        launch=f"{launch} \\\n  " if launch else "",
        command=" \\\n  ".join(_wrapped(job.command, quote)),
        signals=system.signals,
        announces=system.announces,
        ends=system.ends,
        passed_on=system.passed_on,
        rule=system.rule,
        condition=system.begins_again(job),
        again=_again(system, job, quote),
    )


def _again(system: System, job: Job, quote: Callable[[str], str]) -> str:
    """Return the lines that bring another attempt about."""
    if not job.resubmits and (lines := system.requeue(job)):
        return lines
    return _SUCCESSOR.format(
        marker=quote(str(job.out / "followed-")), number=system.number(job), submit=system.successor(job)
    )


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


def found_systems(which: Callable[[str], object]) -> list[str]:
    """Return the words of the systems whose commands are all here, in the table's order."""
    here = [name for name, row in SYSTEMS.rows() if all(map(which, row.programs))]
    if not here:
        raise UsageError(
            "no batch system was found here (sbatch, qsub, bsub or flux): name it, as in --system pbs"
        )
    return here
