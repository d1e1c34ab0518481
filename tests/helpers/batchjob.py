"""The run that tests of batch systems submit, and its ranks as Linux knows them."""

import re
import shutil
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from standstill import standing_still

from conftest import distgpt, losses

# Debian's Open MPI, where its launcher is the machine's. It is built without PBS's library.
_IS_OPEN_MPIS = Path(shutil.which("mpiexec") or "none").resolve().name == "orterun"
OPEN_MPI = next(Path("/usr/lib").glob("*/libmpi.so.40"), None) if _IS_OPEN_MPIS else None
STEPS = 80
_ASKED = 1 << signal.SIGUSR1 - 1  # in a mask of signals
_MODEL = "--n-layer 2 --n-head 2 --n-embd 64 --seq-len 64 --data story --tokenizer word --batch-size 16"
WORDS = ["train", *_MODEL.split(), *f"--dtype float64 --lr 1e-3 --steps {STEPS} --val-fraction 0.1".split()]
WORDS += ["--save-every", "20"]


def marks(lacking):
    """The marks of tests that need a batch system; `lacking`: why there is none here, "" if there is one."""
    own = (pytest.mark.cluster, pytest.mark.slow, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(500))
    return [*own, pytest.mark.skipif(bool(lacking), reason=lacking)]


@contextmanager
def held(cluster, folder, run="my run's", sign="PMI_RANK"):
    """Its two ranks stand still after a checkpoint and before the last step; a signal to end wakes them."""
    cluster.wait_for(lambda: [*(folder / run / "checkpoints").glob("step-*")])
    ranks = cluster.wait_for(lambda: ranks_in(folder, sign))
    assert len(ranks) == 2
    with standing_still(ranks):
        yield ranks


def uninterrupted(run):
    """Train it on two ranks without a batch system, which nobody stops."""
    result = distgpt(*WORDS, "--stage", "mpi", "--threads", "1", "--out", run, ranks=2, timeout=300)
    assert result.returncode == 0, result.stderr
    return run


def same(run, finished):
    """Tell whether two runs have the same weights and losses, to the bit."""
    saved = [(path / "weights.safetensors").read_bytes() for path in (run, finished)]
    return saved[0] == saved[1] and losses(run) == losses(finished)


def ranks_in(folder, sign="PMI_RANK"):
    """The processes that train below a folder, by a variable that their launcher sets for each."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_train = b"train" in (process / "cmdline").read_bytes().split(b"\0")
            is_rank = sign.encode() in (process / "environ").read_bytes()
            if is_train and is_rank and (process / "cwd").readlink() == folder:
                found.append(process)
    return found


def variable(process, name):
    rows = (process / "environ").read_bytes().split(b"\0")
    return next(row.partition(b"=")[2].decode() for row in rows if row.startswith(f"{name}=".encode()))


def is_asked(rank):
    """Whether one that stands still has been asked to save."""
    masks = re.findall(r"^(?:Sig|Shd)Pnd:\s+(\w+)", (rank / "status").read_text(), re.M)
    return any(int(mask, 16) & _ASKED for mask in masks)
