"""Recipes for package managers and containers, made from pyproject.toml: python packaging/recipes.py

So that versions never differ: a test compares what is committed with what this makes. Names and versions that
only a package manager knows stand in the tables below. Of a release also its hash: --sdist FILE
"""

from __future__ import annotations

import argparse
import hashlib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
REQUIREMENT = re.compile(r"([\w-]+)(?:\[[\w,]+\])?(>=([\d.]+))?")

# Each as this package manager calls it, where that is not as on PyPI.
CONDA = {"matplotlib": "matplotlib-base"}
SPACK = {"tensorboardX": "tensorboardx"}
SPACK_EXTRAS = ("parquet", "prometheus", "serve", "tensorboard")  # beside mpi, which is on by default
# EasyBuild's generation 2025a: the newest that has all of them. By PyPI's name: the module, its version, and
# the version of the package in it, where the module is a collection.
TOOLCHAIN = ("foss", "2025a")
EASYBUILD = {
    "python": ("Python", "3.13.1", None),
    "numpy": ("SciPy-bundle", "2025.06", "2.3.0"),
    "numba": ("numba", "0.62.0", None),
    "click": ("Python-bundle-PyPI", "2025.04", "8.1.8"),
    "rich": ("Python-bundle-PyPI", "2025.04", "14.0.0"),
    "jinja2": ("Python-bundle-PyPI", "2025.04", "3.1.6"),
    "tokenizers": ("tokenizers", "0.22.2", None),
    "matplotlib": ("matplotlib", "3.10.3", None),
    "mpi4py": ("mpi4py", "4.1.0", None),
    "hatchling": ("hatchling", "1.27.0", None),
}
# Not in slim.txt; installed by its second command.
LEFT_OUT, ALONE = ("matplotlib",), ("tokenizers",)


def least(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest version of each requirement, "" where any will do."""
    found = (REQUIREMENT.match(each) for each in requirements)
    return {match[1]: match[3] or "" for match in found if match and match[1] != "distgpt"}


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def described(sdist: Path | None) -> dict[str, str]:
    """Return what the templates' words stand for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    about = project["project"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    version = re.search(r'__version__ = "(.+)"', source)
    assert version
    needs, extras = least(about["dependencies"]), about["optional-dependencies"]
    builds = least(project["build-system"]["requires"])
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest() if sdist else ""
    mpi, python = least(extras["mpi"]), about["requires-python"].removeprefix(">=")
    return {
        "VERSION": version[1],
        "DESCRIPTION": about["description"],
        "LICENSE": about["license"],
        "HOMEPAGE": about.get("urls", {}).get("Homepage", ""),  # where it will live is not known yet
        "PYTHON": python,
        "TOOLCHAIN_NAME": TOOLCHAIN[0],
        "TOOLCHAIN_VERSION": TOOLCHAIN[1],
        "EASYBUILD_BUILDS": easybuild(builds),
        "EASYBUILD_NEEDS": easybuild({"python": python, **needs, **mpi}),
        "EASYBUILD_CHECKSUMS": f"['{digest}']" if digest else "[]  # nothing has been released yet",
        "CONDA_BUILDS": conda(builds),
        "CONDA_NEEDS": conda(needs),
        "CONDA_MPI": conda(mpi),
        "SPACK_VERSION": f', sha256="{digest}"' if digest else "",
        "SPACK_VARIANTS": "\n".join(variant(name) for name in SPACK_EXTRAS),
        "SPACK_BUILDS": spack(builds, "build"),
        "SPACK_NEEDS": spack(needs),
        "SPACK_EXTRAS": "\n".join(
            spack(least(extras[name]), when=f"+{name}") for name in ("mpi", *SPACK_EXTRAS)
        ),
        "SLIM": "\n".join(
            f"{name}>={version}" for name, version in needs.items() if name not in (*LEFT_OUT, *ALONE)
        ),
        "ALONE": " ".join(f"'{name}>={needs[name]}'" for name in ALONE),
    }


def easybuild(needs: dict[str, str]) -> str:
    """Return the modules that hold these requirements, each once. Refuse one that is too old."""
    modules = {}
    for name, lowest in needs.items():
        module, version, holds = EASYBUILD[name]
        assert numbers(holds or version) >= numbers(lowest), (
            f"{module} {version} is too old: {name}>={lowest}"
        )
        modules[module] = version
    return "\n".join(f"    ('{module}', '{version}')," for module, version in modules.items())


def conda(needs: dict[str, str]) -> str:
    return "\n".join(
        f"    - {CONDA.get(name, name)}{f' >={lowest}' if lowest else ''}" for name, lowest in needs.items()
    )


def spack(needs: dict[str, str], kind: str = "", when: str = "") -> str:
    kinds = f'"{kind}"' if kind else '("build", "run")'
    more = f', when="{when}"' if when else ""
    return "\n".join(
        f'    depends_on("py-{SPACK.get(name, name)}{f"@{lowest}:" if lowest else ""}", type={kinds}{more})'
        for name, lowest in needs.items()
    )


def variant(extra: str) -> str:
    about = {
        "parquet": "Read Parquet files",
        "prometheus": "Export metrics of training runs for Prometheus",
        "serve": "Answer over HTTP",
        "tensorboard": "Log to TensorBoard",
    }
    return f'    variant("{extra}", default=False, description="{about[extra]}")'


def made(sdist: Path | None = None) -> dict[str, str]:
    """Return the content of every recipe, by its path in packaging/."""
    words, made = described(sdist), {}
    version, toolchain = words["VERSION"], "-".join(TOOLCHAIN)
    for template, path in {
        "distgpt.def": "apptainer/distgpt.def",
        "recipe.yaml": "conda/recipe.yaml",
        "distgpt.eb": f"easybuild/distgpt-{version}-{toolchain}.eb",
        "module.lua": f"modules/lmod/distgpt/{version}.lua",
        "module.tcl": f"modules/tcl/distgpt/{version}",
        "package.py.in": "spack/spack_repo/distgpt/packages/py_distgpt/package.py",
        "repo.yaml": "spack/spack_repo/distgpt/repo.yaml",
        "slim.txt": "slim.txt",
    }.items():
        text = (HERE / "templates" / template).read_text()
        made[path] = re.sub(r"@([A-Z_]+)@", lambda word: words[word[1]], text)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sdist", type=Path, help="the released source, whose hash the recipes then hold")
    for path, text in made(parser.parse_args().sdist).items():
        (HERE / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / path).write_text(text)
