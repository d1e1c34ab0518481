"""Launch lines: those that fit the MPI which mpi4py took, and what is in the way of each here.

A further trap is a function, and a row of TRAPS.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from distgpt.doctor.facts import Facts
from distgpt.jobs.launchers import is_of_family, mpirun, mpirun_beside, srun_ways
from distgpt.launch.mpis import HELP, MPIS

TRAIN = "distgpt train --stage mpi"
AS_ROOT, OVERSUBSCRIBE = "--allow-run-as-root ", "  # more ranks than cores: --oversubscribe"
# Set by modules for the folder in which an MPI is installed.
SITE = (
    *("CRAY_MPICH_DIR", "I_MPI_ROOT", "MPI_HOME", "MPI_ROOT", "MPI_DIR", "OPENMPI_DIR", "OPENMPI_ROOT"),
    *("MPICH_DIR", "MPICH_HOME", "EBROOTOPENMPI", "EBROOTMPICH", "EBROOTIMPI"),
)
NOT_FOUND = ("cannot open shared object", "cannot load MPI library")  # the loader says it, and mpi4py
LIBS = (*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/local/lib"))
# By each of these pairs Open MPI may be asked to start as root; the latter since 5.0.
ROOT = tuple((f"{name}_ALLOW_RUN_AS_ROOT", f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM") for name in ("OMPI", "PRTE"))


def around(mpi: Facts, environ: Mapping[str, str] = os.environ) -> Facts:
    """Return what could launch a job here, for a process that nothing has launched."""
    library, vendor = mpi.get("library", ""), mpi.get("vendor", "")
    return {
        "mpirun": mpirun() | {"beside": mpirun_beside(library, vendor)},
        "srun": srun_ways(),
        "flux": "FLUX_URI" in environ and shutil.which("flux") is not None,
        "as_root": is_refused_as_root(environ),
        "site": _site(library, environ) if library else {},
        "renamed": next((str(path) for lib in LIBS for path in lib.glob("libmpich.so.12")), ""),
        "abi": environ.get("MPI4PY_MPIABI", ""),
    }


def is_refused_as_root(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's mpirun would not start for this user."""
    return os.geteuid() == 0 and not any(all(map(environ.get, pair)) for pair in ROOT)


def _site(library: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables of modules whose folder has an MPI library of its own, and that library."""
    found = {}
    for name in SITE:
        folder = environ.get(name, "")
        if not folder or Path(library).is_relative_to(os.path.realpath(folder)):
            continue
        there = (Path(folder) / lib / f"libmpi.so{end}" for lib in ("lib", "lib64") for end in (".12", ".40"))
        if own := next(filter(Path.exists, there), None):
            found[f"{name}={folder}"] = str(own)
    return found


def lines(launched: Facts, mpi: Facts) -> list[str]:
    """Return lines that start several ranks with this MPI, the likeliest first."""
    known = MPIS.get(mpi.get("vendor", ""))
    if launched["launcher"] or known is None:
        return []
    command = launched["mpirun"]
    found = command["path"] if is_of_family(command["vendor"], mpi["vendor"]) else command["beside"]
    name = Path(found or "").name
    name = name if shutil.which(name) == found else found
    is_open = mpi["vendor"] == "Open MPI"
    options, note = AS_ROOT * (is_open and launched["as_root"]), OVERSUBSCRIBE * is_open
    by_mpirun = [f"{name} {options}-n 2 {TRAIN}{note}"] if found else []
    can_srun = set(known.srun) & set(launched["srun"])
    by_srun = [f"{known.srun_line(launched['srun'])} -n 2 {TRAIN}"] if can_srun else []
    by_flux = [f"{known.line('flux run')} -n 2 {TRAIN}"] if launched.get("flux") else []
    return [*by_srun, *by_flux, *by_mpirun]


def foreign_mpirun(launched: Facts, mpi: Facts) -> Iterable[str]:
    command = launched.get("mpirun", {})
    if not command.get("vendor") or "vendor" not in mpi or is_of_family(command["vendor"], mpi["vendor"]):
        return
    own = command.get("beside")
    yield (
        f"{command['path']} belongs to {command['vendor']}, but mpi4py to {mpi['vendor']}: "
        f"jobs need the mpirun of {mpi['vendor']}" + (f", {own}" if own else "")
    )


def refused_root(launched: Facts, mpi: Facts) -> Iterable[str]:
    if launched.get("as_root") and launched["mpirun"]["vendor"] == "Open MPI":
        yield f"Open MPI's mpirun does not start for root: be another user, or add {AS_ROOT.strip()}"


def absent_mpirun(launched: Facts, mpi: Facts) -> Iterable[str]:
    command = launched.get("mpirun", {"path": ""})
    if command["path"] is None and "vendor" in mpi:
        library = mpi["library"] or f"mpi4py's {mpi['vendor']}"
        own = command["beside"] or f"none beside {library} either ({HELP})"
        yield f"there is no mpirun in PATH: {own}"


def mpirun_of_elsewhere(launched: Facts, mpi: Facts) -> Iterable[str]:
    command = launched.get("mpirun", {})
    own, path = command.get("beside"), command.get("path")
    if own and path and is_of_family(command["vendor"], mpi["vendor"]) and not Path(own).samefile(path):
        yield f"{path} is the mpirun in PATH, but mpi4py took {mpi['library']}: {own} is sure to fit it"


def library_of_elsewhere(launched: Facts, mpi: Facts) -> Iterable[str]:
    for variable, own in launched.get("site", {}).items():
        yield f"{variable}, but mpi4py took {mpi['library']}: export MPI4PY_LIBMPI={own}"


def unfound_library(launched: Facts, mpi: Facts) -> Iterable[str]:
    if not any(words in mpi["problem"] for words in NOT_FOUND):
        return
    if abi := launched.get("abi"):
        yield (
            f"MPI4PY_MPIABI={abi} leaves the search to the loader: unset it, or put the library's folder "
            "into LD_LIBRARY_PATH"
        )
    if launched.get("renamed"):
        yield (
            f"{launched['renamed']} is an MPICH by Debian's name: in a folder of LD_LIBRARY_PATH, "
            f"ln -s {launched['renamed']} libmpi.so.12"
        )


def unsuited_srun(launched: Facts, mpi: Facts) -> Iterable[str]:
    known, offered = MPIS.get(mpi.get("vendor", "")), launched.get("srun")
    if known and offered and not set(known.srun) & set(offered):
        yield (
            f"srun --mpi=list has {', '.join(offered)}, but {mpi['vendor']} needs {' or '.join(known.srun)}: "
            "start ranks by its mpirun inside the job"
        )


# Of the launch and the MPI: sentences, each with what to type.
TRAPS: tuple[Callable[[Facts, Facts], Iterable[str]], ...] = (
    *(
        unfound_library,
        foreign_mpirun,
        absent_mpirun,
        mpirun_of_elsewhere,
        library_of_elsewhere,
        refused_root,
        unsuited_srun,
    ),
)


def traps(launched: Facts, mpi: Facts) -> Iterable[str]:
    """Yield what is in the way of a launch, or may be."""
    for trap in TRAPS:
        yield from trap(launched, mpi)
