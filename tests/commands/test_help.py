import os
import re
import shutil
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete
from distgpt.commands.cli import COMMANDS, cli
from distgpt.commands.help import OPTIONS, section, topics
from distgpt.core.base.files import bundled
from distgpt.core.config import BATCH_IN_TOKENS, GROUPS, SETTINGS
from distgpt.core.data.textfile import BUNDLED_TEXTS

from conftest import ROOT, inside

PACKAGE = ROOT / "distgpt"
NEEDED = ("stage", "preset", "config", "set", "data", "tokenizer", "val-fraction", "init", "depth", "within", "steps")
NEEDED += ("family", "batch-size", "lr", "dtype", "out", "resume")


def commands(group=cli, words=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        yield from (commands(found, (*words, name)) if isinstance(found, click.Group) else [((*words, name), found)])


def shown(*words):
    return inside(*words).stdout


def flags(text):
    return set(re.findall(r"^  (?:-h, )?--([a-z0-9-]+)", text, re.MULTILINE))


def test_help_lists_needed_options_first():
    short, full = shown("train", "--help"), shown("train", "--help-all")
    assert "[default: tiny]" in short and flags(short) == {*NEEDED, "help", "help-all"}
    assert re.findall(r"^([A-Z][a-z ]+):$", full, re.MULTILINE) == ["Options", *map(str.capitalize, GROUPS)]
    train = dict(commands())["train",]
    assert flags(full) == {p.opts[0].strip("-") for p in train.params if not p.hidden} | {"help", "help-all"}


def test_every_option_has_a_group():
    known = {**SETTINGS, "batch_tokens": BATCH_IN_TOKENS}
    assert not [name for name in OPTIONS if known[name].group not in GROUPS]


def test_defaults_come_from_the_preset():
    tiny, gpt2 = shown("train", "--help-all"), shown("train", "--preset", "gpt2", "--help-all")
    for text, rows in ((tiny, ("600", "0.05", "no-bias")), (gpt2, ("cosine", "0.0006", "bias"))):
        for row in rows:
            assert f"[default: {row}]" in re.sub(r"\s+", " ", text), row
    assert "preset 'nope'" in inside("train", "--preset", "nope", "--help").stderr


def test_examples_of_commands_parse():
    for words, command in commands():
        [example] = re.findall(r"^  Example: (.*)$", shown(*words, "--help"), re.MULTILINE)
        said = example.partition(" > ")[0].partition("distgpt ")[2].replace('"', "").split()
        assert tuple(said[: len(words)]) == words, example
        known = {flag for p in command.get_params(click.Context(command)) for flag in p.opts}
        assert {w for w in said[: said.index("--") if "--" in said else None] if w[:2] == "--"} <= known, words


def test_commands_are_listed_in_order_of_use():
    assert re.findall(r"^  (\w+) ", inside().stderr.partition("Commands:")[2], re.MULTILINE) == [*COMMANDS]


def test_help_prints_pages_offline():
    listed = dict(re.findall(r"^  ([\w-]+) +(.*)$", shown("help"), re.MULTILINE))
    assert {"learning", "files", "settings", "your-texts", "first-model"} <= listed.keys()
    assert "distgpt help out-of-memory" in shown("help") and len(listed) > 10
    assert shown("help", "out-of-memory").startswith("## Out of memory\n")
    assert "\n## " not in shown("help", "out-of-memory")
    for topic, title in listed.items():
        text = shown("help", topic)
        assert text.startswith(f"# {title}\n") and "](" not in text and "<!--" not in text, topic
        assert set(re.findall(r"`distgpt help ([\w-]+)`", text)) <= set(listed), topic
    assert "(`distgpt help choose-a-size`)" in shown("help", "training")
    argument = dict(commands())["help",].params[0]
    assert [found.value for found in argument.shell_complete(None, "eval")] == ["evaluation"]
    refused = inside("help", "trainin")
    assert refused.returncode == 2 and "did you mean 'training'?" in refused.stderr


def test_help_on_a_command_names_its_page():
    assert not topics().keys() & set(COMMANDS)  # the names would collide
    for name, page in {"chat": "", "train": "training", "tune": "tuning", "plot": ""}.items():
        text = shown("help", name)
        assert text.startswith(f"Usage: distgpt {name} ")
        assert text.partition("\nHow-to page: ")[2] == (page and f"distgpt help {page}\n")


def test_errors_name_existing_pages():
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"\(distgpt help ([\w-]+)\)", sources))
    assert {"out-of-memory", "install", "tuning"} <= named
    assert not [name for name in named - topics().keys() if not section(name)]
    words = ("--preset", "llama3.2-1b", "--tokenizer", "byte", "--batch-size", "64", "--grad-accum", "1")
    assert "(distgpt help out-of-memory)" in inside("train", *words, "--dtype", "float64").stderr


# Command lines, and the completions of the last word.
FILE = "a file"
COMPLETED = {
    "train --data my": [FILE],
    "train --data st": ["story"],
    "train --val na": ["names"],
    "train --tokenizer by": ["byte"],
    "train --resume au": ["auto"],
    "tune --data st": [FILE],
    "estimate --data co": ["corpus"],
    "bench infer --preset gpt2-m": ["gpt2-medium", "gpt2-modern"],
    "bench stages --preset ti": ["tiny", "tiny-adamw"],
}


def test_files_and_names_are_completed():
    def offered(line):
        *words, begun = line.split()
        found = ShellComplete(cli, {}, "distgpt", "").get_completions(words, begun)
        return [item.value if item.type == "plain" else f"a {item.type}" for item in found]

    for line, wanted in COMPLETED.items():
        assert offered(line) == wanted, line
    assert offered("train --config x") == offered("infer --weights x") == offered("sweep x") == [FILE]
    assert set(BUNDLED_TEXTS) == {path.stem for path in bundled("data", "").glob("*.txt")}


# Options and arguments that name files, in any command.
NAMING = "data val init hellaswag tokenizer resume decay-from config weights adapter out prompts prompt-file"
NAMING += " calibrate hostfile inputs source grid run runs folder path name_or_path directory a b"


def test_file_options_complete_to_files():
    seen = set()
    for words, command in commands():
        context = click.Context(command)
        for param in command.get_params(context):
            name = param.opts[0].lstrip("-")
            if name in NAMING.split() and not getattr(param, "is_flag", False):
                seen.add(name)
                [offered] = param.shell_complete(context, "zz")
                assert offered.type == "file", (*words, name)
    assert seen == {*NAMING.split()}


def asked(shell, script, tmp_path):
    """Run a shell script in which `distgpt` is this program."""
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    program = tmp_path / "distgpt"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m distgpt \"$@\"\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    here = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    result = subprocess.run([shell, "-c", script], capture_output=True, text=True, env=here, timeout=60)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout.split()


BASH = """eval "$(_DISTGPT_COMPLETE=bash_source distgpt)"
for words in "tr" "train --depth 6 --sta" "train --stage m" "train --preset gpt2-m" "nowhere --x"; do
    COMPREPLY=(); COMP_WORDS=(distgpt $words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _distgpt_completion distgpt; echo "${COMPREPLY[@]}"
done"""


@pytest.mark.ci
def test_bash_completes_commands_options_and_values(tmp_path):
    found = asked("bash", BASH, tmp_path)
    options, presets = ["--stage", "--stall-timeout", "--stall-abort"], ["gpt2-medium", "gpt2-modern"]
    assert found == ["train", *options, "mpi", "mpi-cuda", *presets]
