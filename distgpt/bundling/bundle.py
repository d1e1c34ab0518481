"""Write a bundle: wheels with a lock file, tokenizers, and a script that installs them without a network."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distgpt.bundling.wheels import GLIBC, Target, collect, locked, own_wheel
from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count, size
from distgpt.core.base.version import __version__
from distgpt.texts.tokenizers import hub
from distgpt.texts.tokenizers.foreign import CHAT_FILES, repository_of

TEMPLATES = Path(__file__).parent


def write(
    out: Path, target: Target, extras: Sequence[str], tokenizers: Sequence[str], slim: bool, say: Say
) -> None:
    """Write the bundle, whole or not at all."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: choose another --out")
    with storage_errors("write", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            made = Path(scratch, "made")
            (wheels := made / "wheels").mkdir(parents=True)
            names = _copy_tokenizers(tokenizers, made / "tokenizers", say)
            say(f"collecting wheels for {target}")
            (downloads := Path(scratch, "downloads")).mkdir()
            chosen = collect(own_wheel(Path(scratch)), extras, target, downloads, slim)
            for path in chosen:
                path.rename(wheels / path.name)
            chosen = sorted(wheels.iterdir())
            (made / "requirements.txt").write_text(locked(chosen))
            total = sum(path.stat().st_size for path in chosen)
            words = {
                "COMMAND": shlex.join(["distgpt", *sys.argv[1:]]),
                "COUNT": str(len(chosen)),
                "GLIBC": str(GLIBC),
                "PLATFORM": f"linux_{target.machine}",
                "PYTHON": target.python,
                "SIZE": size(total),
                "SLIM": "yes" if slim else "no",
                "TOKENIZERS": _about(names),
                "VERSION": __version__,
            }
            for name in ("install.sh", "README.md"):
                (made / name).write_text(_filled((TEMPLATES / name).read_text(), words))
            made.chmod(0o755)
            if out.is_dir():
                out.rmdir()
            made.rename(out)
    say(f"{count(len(chosen), 'wheel')}, {size(total)}: sh {shlex.quote(f'{out}/install.sh')} /path/to/venv")


def _about(tokenizers: Sequence[str]) -> str:
    """Say which tokenizers a bundle holds, for its README."""
    if not tokenizers:
        return "It holds no tokenizer: the presets gpt2… need a `--tokenizer` there."
    held = ", ".join(tokenizers)
    return f"`tokenizers/` holds {held}. The installation finds them by the names they have on the hub."


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _copy_tokenizers(names: Sequence[str], folder: Path, say: Say) -> list[str]:
    """Copy tokenizers from the hub's cache or, where it has them not, from the hub. Return which are there.

    GPT-2's, which its presets need, is taken if it can be had. One that was asked for must be there.
    """
    copied = []
    for name in names or ("gpt2",):
        repository = repository_of(name)
        try:
            path = hub.download_tokenizer(repository)
        except (DataError, UsageError) as error:
            if names:
                raise
            say(f"{error}; this bundle goes without: its presets gpt2… need a --tokenizer there")
            continue
        (to := hub.installed(repository, folder)).mkdir(parents=True)
        for each in (*hub.TOKENIZER_FILES, *CHAT_FILES):
            if (source := path.with_name(each)).is_file():
                shutil.copyfile(source, to / each)
        copied.append(repository)
    return copied
