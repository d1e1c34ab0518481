"""Launch lines: those that fit the MPI which mpi4py took, and what is in the way of each here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from distgpt.cluster.jobs.launchers import is_of_family, mpirun, mpirun_beside, srun_ways
from distgpt.cluster.launch.environment import HELP, MPIS
from distgpt.measure.doctor.facts import Facts

TRAIN = "distgpt train --stage mpi"
AS_ROOT, OVERSUBSCRIBE = "--allow-run-as-root ", "  # more ranks than cores: --oversubscribe"
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
    }


def is_refused_as_root(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's mpirun would not start for this user."""
    return os.geteuid() == 0 and not any(all(map(environ.get, pair)) for pair in ROOT)


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


def foreign_mpirun(launched: Facts, mpi: Facts) -> list[str]:
    """Report an mpirun of another MPI than mpi4py's."""
    command = launched.get("mpirun", {})
    if not command.get("vendor") or "vendor" not in mpi or is_of_family(command["vendor"], mpi["vendor"]):
        return []
    own = command.get("beside")
    return [
        f"{command['path']} belongs to {command['vendor']}, but mpi4py to {mpi['vendor']}: "
        f"jobs need the mpirun of {mpi['vendor']}" + (f", {own}" if own else "")
    ]


def traps(launched: Facts, mpi: Facts) -> Iterator[str]:
    """Yield what is in the way of a launch, or may be: sentences, each with what to type."""
    if launched["launcher"] or "vendor" not in mpi:
        return
    yield from foreign_mpirun(launched, mpi)
    command, vendor = launched["mpirun"], mpi["vendor"]
    own, path = command["beside"], command["path"]
    if path is None:
        library = mpi["library"] or f"mpi4py's {vendor}"
        yield f"there is no mpirun in PATH: {own or f'none beside {library} either ({HELP})'}"
    elif own and is_of_family(command["vendor"], vendor) and not Path(own).samefile(path):
        yield f"{path} is the mpirun in PATH, but mpi4py took {mpi['library']}: {own} is sure to fit it"
    if launched["as_root"] and command["vendor"] == "Open MPI":
        yield f"Open MPI's mpirun does not start for root: be another user, or add {AS_ROOT.strip()}"
    known, offered = MPIS.get(vendor), launched["srun"]
    if known and offered and not set(known.srun) & set(offered):
        yield (
            f"srun --mpi=list has {', '.join(offered)}, but {vendor} needs {' or '.join(known.srun)}: "
            "start ranks by its mpirun inside the job"
        )
