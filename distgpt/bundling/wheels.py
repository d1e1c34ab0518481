"""Collect the wheels that an installation needs, for this Python and processor or for others."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename

from distgpt.core.base.errors import DistgptError, UsageError

Wheels = Mapping[NormalizedName, Path]

MACHINES = ("x86_64", "aarch64")
GLIBC = 28  # the nodes' may be older than this machine's: 2.28 is that of RHEL 8, and Numba needs it on arm64
OLDEST = {
    "x86_64": 5,
    "aarch64": 17,
}  # the first glibc for which there are such wheels: manylinux1, manylinux2014
ALIASES = {"x86_64": ("manylinux2014", "manylinux2010", "manylinux1"), "aarch64": ("manylinux2014",)}
# What a slim installation lacks: plots, and what `tokenizers` needs for its own downloads alone.
LEFT_OUT = frozenset(map(canonicalize_name, ("matplotlib", "huggingface-hub")))
# What pip writes into an installation beside the files of the wheel.
ADDED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


@dataclass(frozen=True)
class Target:
    """The Python, as in "3.12", and the processor of the machines that install a bundle."""

    python: str
    machine: str

    def __str__(self) -> str:
        return f"Python {self.python} on linux_{self.machine}"

    def platforms(self) -> list[str]:
        """Return the tags of wheels that run there, the newest glibc first: pip derives none of them."""
        minors = range(GLIBC, OLDEST[self.machine] - 1, -1)
        names = (*(f"manylinux_2_{minor}" for minor in minors), *ALIASES[self.machine])
        return [f"{name}_{self.machine}" for name in names]

    def environment(self) -> dict[str, str]:
        """Return what the markers of requirements read there."""
        here = {name: str(value) for name, value in default_environment().items()}
        there = {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }
        return {**here, **there}


def metadata(wheel: Path, field: str) -> list[str]:
    """Return the values of a field of a wheel's metadata."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all(field, [])


def wheels_in(folder: Path) -> dict[NormalizedName, Path]:
    return {parse_wheel_filename(path.name)[0]: path for path in sorted(folder.glob("*.whl"))}


def reached(
    found: Wheels, root: Requirement, environment: Mapping[str, str], left_out: Collection[str]
) -> tuple[set[NormalizedName], list[str]]:
    """Follow the requirements of these wheels from the root on. Return which are needed, and what is missing.

    The environment is that of the target: pip reads markers, such as `python_version < "3.13"`, by the
    Python that runs it, and so it leaves out what another one needs.
    """
    todo, seen = [root], set()
    missing: dict[str, None] = {}
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if (item := (name, frozenset(needed.extras))) in seen or name in left_out:
            continue
        if name not in found:
            missing[str(needed).partition(";")[0]] = None
            continue
        seen.add(item)
        for text in metadata(found[name], "Requires-Dist"):
            marker = (each := Requirement(text)).marker
            extras = ("", *needed.extras)
            if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras):
                todo.append(each)
    return {name for name, _ in seen}, list(missing)


def collect(own: Path, extras: Sequence[str], target: Target, folder: Path, slim: bool) -> list[Path]:
    """Download what distgpt's own wheel needs for the target. Return the wheels to install, no others."""
    root = Requirement(f"distgpt[{','.join(extras)}]")
    if unknown := root.extras - set(metadata(own, "Provides-Extra")):
        raise UsageError(f"distgpt has no extra {', '.join(sorted(unknown))}")
    for needed_python in metadata(own, "Requires-Python"):
        if target.python not in SpecifierSet(needed_python):
            raise UsageError(f"distgpt needs Python {needed_python}: --python {target.python} will not do")
    environment, left_out = target.environment(), LEFT_OUT if slim else frozenset[str]()
    while True:
        there = wheels_in(folder)
        found = {**there, canonicalize_name(root.name): own}
        needed, missing = reached(found, root, environment, left_out)
        if not missing:
            return [found[name] for name in sorted(needed)]
        # With what is there already, in its versions: all have to go together.
        pinned = (f"{name}=={parse_wheel_filename(path.name)[1]}" for name, path in there.items())
        _download(target, folder, [*missing, *pinned])
        if wheels_in(folder).keys() == there.keys():
            raise DistgptError(f"pip brought nothing for {', '.join(missing)}")


def _download(target: Target, folder: Path, requirements: Sequence[str]) -> None:
    platforms = [word for tag in target.platforms() for word in ("--platform", tag)]
    python = ("--implementation", "cp", "--python-version", target.python)
    pip("download", "--only-binary=:all:", *python, *platforms, "--dest", str(folder), *requirements)


def pip(*words: str) -> None:
    """Run this Python's pip; what it complains of last becomes our error."""
    if find_spec("pip") is None:
        raise UsageError(f"this needs pip: {sys.executable} -m ensurepip")
    words = (sys.executable, "-m", "pip", "--disable-pip-version-check", *words)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line[7:] for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise DistgptError(f"pip: {'; '.join(errors) or done.stderr.strip()[-500:]}")


def own_wheel(folder: Path) -> Path:
    """Build distgpt's wheel from this checkout, or pack it anew from this installation."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        isolated = ["--no-build-isolation"] if find_spec("hatchling") else []
        pip("wheel", "--no-deps", *isolated, "--wheel-dir", str(folder), str(checkout))
        return next(folder.glob("distgpt-*.whl"))
    return repacked(Distribution.from_name("distgpt"), folder)


def repacked(installed: Distribution, folder: Path) -> Path:
    """Pack a wheel from the files that an installation says it has, without what was added there."""
    tag = HeaderParser().parsestr(installed.read_text("WHEEL") or "")["Tag"]
    path, record = folder / f"{installed.name}-{installed.version}-{tag}.whl", []
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for file in installed.files or []:
            if ".." in file.parts or "__pycache__" in file.parts or file.name in ADDED:
                continue  # commands, which pip makes, and compiled files
            content = Path(str(file.locate())).read_bytes()
            archive.writestr(str(file), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(content)}")
        name = f"{installed.name}-{installed.version}.dist-info/RECORD"
        archive.writestr(name, "\n".join([*record, f"{name},,", ""]))
    return path


def locked(wheels: Sequence[Path]) -> str:
    """Return a requirements file that lets pip install exactly these wheels."""
    lines = []
    for path in wheels:
        name, version, _, _ = parse_wheel_filename(path.name)
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    return "".join(sorted(lines))
