"""The variables of all supported launchers."""

from distgpt.cluster.launch.environment import MPICH, OPEN_MPI, PMI, PMIX, SRUN

KNOWN = (OPEN_MPI, MPICH, SRUN, PMI, PMIX)
SIZES = [launcher.size for launcher in KNOWN]
RANKS = [launcher.rank for launcher in KNOWN if launcher.rank]
