"""The entry point: the list of commands, and the exit of every command."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

import click
from click.shell_completion import shell_complete

from distgpt.assembly import COMPONENTS, load_components
from distgpt.commands.help import Group, NoCommand
from distgpt.core.base import __version__, interrupts
from distgpt.core.base.errors import UsageError, one_line
from distgpt.core.comm.job import described, exit_code, this_job
from distgpt.core.components import install
from distgpt.core.cpu.stages import connected

# Commands in the order of use.
COMMANDS = (
    *("train", "infer", "chat", "tune", "serve", "eval", "data", "tokenizer", "weights", "estimate"),
    *("submit", "supervise", "runs", "watch", "plot", "compare", "replay", "sweep"),
    *("profile", "bench", "doctor", "compile", "help"),
)
# Modules of the commands that have no module with their name.
FILES = {
    "tune": "train",
    **dict.fromkeys(("infer", "chat", "serve", "eval"), "generate"),
    **dict.fromkeys(("data", "tokenizer", "weights"), "files"),
    **dict.fromkeys(("submit", "supervise"), "jobs"),
    **dict.fromkeys(("watch", "plot", "compare", "replay"), "runs"),
    **dict.fromkeys(("estimate", "profile", "sweep", "doctor", "compile"), "measure"),
}
# Commands that a launcher may start as multiple processes.
TOGETHER = ("train", "tune", "infer", "eval", "sweep", "profile", "bench", "doctor", "replay")

# Libraries that a slim installation (packaging/slim.txt) may lack; no run needs them.
LIBRARIES = ("jinja2", "matplotlib", "rich", "tokenizers")

COMPLETE = "_DISTGPT_COMPLETE"  # set by shell completion


class Commands(Group):
    """Imports a command only when it is used, so that most starts are fast."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            self.add_command(getattr(import_module(f"distgpt.commands.{FILES.get(name, name)}"), name))
        return super().get_command(context, name)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="distgpt")
@click.pass_context
def cli(context: click.Context) -> None:
    """Pretrain and run GPT-2-style models, from one core to many nodes.

    \b
      distgpt train                                   train a small model on a bundled text
      mpirun -n 2 distgpt train --stage mpi           the same on two processes
      distgpt infer --prompt "The harbour"            generate text
    """
    name = context.invoked_subcommand
    if name not in TOGETHER and (size := this_job().size) > 1:
        raise UsageError(f"distgpt {name} runs as one process, but was launched as {size}")


def _show(error: click.ClickException) -> None:
    """Print the same as click, but escape user input."""
    if isinstance(error, NoCommand):
        print(error.format_message(), file=sys.stderr, flush=True)
        return
    if isinstance(error, click.UsageError) and (context := error.ctx):
        asking = f"{context.command_path} {context.help_option_names[0]}"
        print(f"{context.get_usage()}\nTry '{asking}' for help.\n", file=sys.stderr)
    print(f"Error: {one_line(error.format_message())}", file=sys.stderr, flush=True)


def main() -> None:
    """Run a command and exit, with one exit code for the whole job."""
    try:
        interrupts.install_handlers()
        atexit.register(gc.freeze)  # exiting without garbage collection takes 0.04 s instead of 0.34
        # Python sets a stream to None if its descriptor is closed.
        sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
        sys.stdin = sys.stdin or Path(os.devnull).open()  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        if instruction := os.environ.get(COMPLETE):
            raise click.exceptions.Exit(shell_complete(cli, {}, "distgpt", COMPLETE, instruction))
        if name := os.environ.get(COMPONENTS):
            install(load_components(name))
        # cli.main() would handle interrupts and closed pipes itself.
        with cli.make_context("distgpt", sys.argv[1:]) as context:
            cli.invoke(context)
        print(end="", flush=True)
        code = 0
        if connected and connected[-1].rank:
            interrupts.ignore_further()  # only rank 0 has more to do, and an interrupt there ends all ranks
    except click.exceptions.Exit as done:  # --help, --version, completion
        code = done.exit_code
    except BaseException as error:
        try:
            code = _leave(interrupts.as_interrupt(error))
        except KeyboardInterrupt as signaled:  # after a rank fails, a launcher ends the others
            interrupts.ignore_further()
            code = exit_code(signaled)
    sys.exit(code)


def _leave(error: BaseException) -> int:
    """Report the error, also to ranks that wait for this one to join. Return the exit code."""
    comm = connected[-1] if connected else None
    job = this_job()
    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if library in LIBRARIES:
        error = UsageError(f"this command requires {library}, which is not installed: pip install {library}")
    if isinstance(error, click.ClickException):
        code, text = UsageError.exit_code, error.format_message()
        if job.rank == 0:
            _show(error)
    else:
        code, text = job.leave(error, comm), described(error)
    # Other commands have no ranks to join: a shell started by srun may run one on its own.
    is_met = sys.argv[1:2] != [] and sys.argv[1] in TOGETHER
    if comm is None and is_met and not isinstance(error, KeyboardInterrupt):
        return job.complain(text, code)
    return code
