"""distgpt bundle"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH
from distgpt.core.base.errors import UsageError, print_lines

MACHINES = ("x86_64", "aarch64")  # as in bundling/wheels.py, which takes long to import
HERE = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())


@command(example="distgpt bundle --out bundle --python 3.12 --platform linux_aarch64 --extras mpich,serve")
@click.option("--out", type=PATH, required=True, help="The folder to write.")
@click.option(
    "--python",
    default=f"{sys.version_info[0]}.{sys.version_info[1]}",
    show_default=True,
    metavar="VERSION",
    help="The Python of the machines that install it.",
)
@click.option(
    "--platform",
    type=click.Choice([f"linux_{machine}" for machine in MACHINES]),
    default=f"linux_{HERE if HERE in MACHINES else MACHINES[0]}",
    show_default=True,
    help="Their system and processor.",
)
@click.option("--extras", default="", help="Extras of distgpt to include, with commas: mpich,serve")
@click.option("--tokenizers", default="", help="Those that it must hold, with commas: gpt2,hub:ORG/NAME")
@click.option("--slim", is_flag=True, help="Leave out plots and downloads from the Hugging Face Hub.")
def bundle(out: Path, python: str, platform: str, extras: str, tokenizers: str, slim: bool) -> None:
    """Write a folder from which machines without a network install distgpt.

    It holds wheels of distgpt and all that it needs, a lock file with their hashes, tokenizers, and
    install.sh. Python and processor may be others than here.
    """
    from distgpt.bundling.bundle import write
    from distgpt.bundling.wheels import Target

    if not re.fullmatch(r"3\.\d+", python):
        raise UsageError(f"--python {python}: a version such as 3.12 is meant")
    wanted, names = (re.findall(r"[^, ]+", words) for words in (extras, tokenizers))
    for name in names:
        if name != "gpt2" and not re.fullmatch(r"hub:[\w.-]+/[\w.-]+", name):
            raise UsageError(f"--tokenizers {name}: gpt2 or hub:ORG/NAME is meant; others need no download")
    target = Target(python, platform.removeprefix("linux_"))
    write(out, target, wanted, names, slim, print_lines)
