"""The Python interface under MPI: an error of one rank ends the whole job, as in commands."""

import sys
import textwrap

import pytest

from conftest import distgpt, needs_mpi

pytestmark = pytest.mark.ranks

BEGIN = """
    import sys
    import distgpt, distgpt.api, distgpt.core.generate.python_api as python_api
    from distgpt.cluster.launch.environment import launched_rank

    def refuse(*args, **more):
        if launched_rank() == RANK:
            raise ValueError("no more of this")
        return former(*args, **more)

    settings = dict(stage="mpi", data="story", tokenizer="word", n_layer=1, n_head=2, n_embd=16)
    settings |= dict(seq_len=16, batch_size=4, steps=400, threads=1, out=sys.argv[1])
"""
# The rank that raises or leaves, what all do, the exit code, and words of the rank's line.
CASES = {
    "a function of the caller in training raises": (0, "distgpt.train(**settings, on_step=refuse)", 70),
    "generating raises, and the caller catches it": (
        1,
        """
        former, python_api.complete = python_api.complete, refuse
        try:
            distgpt.init("microgpt", stage="mpi").generate([[1], [2]], 2000)
        except ValueError:
            pass
        """,
        70,
    ),
    "the caller's own code raises": (
        1,
        """
        try:
            distgpt.load(sys.argv[1], stage="mpi")
        except distgpt.core.base.errors.StorageError:
            print("an error of all ranks is the caller's", flush=True)
        model = distgpt.init("microgpt", stage="mpi")
        former = print
        refuse(model.generate([1], 2))
        model.generate([[1], [2]], 2)
        """,
        70,
    ),
    "a function of the caller in training leaves": (0, "distgpt.train(**settings, on_step=lambda _: sys.exit(3))", 3),
}


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("case", CASES)
def test_one_rank_that_raises_or_leaves_ends_the_job(case, tmp_path):
    rank, act, code = CASES[case]
    script = (textwrap.dedent(BEGIN) + textwrap.dedent(act)).replace("RANK", str(rank))
    ended = distgpt(tmp_path / "out", ranks=2, program=[sys.executable, "-c", script], timeout=40)
    assert ended.returncode == code, ended.stderr
    words = (f"rank {rank}: exited with code 3",) if code == 3 else (f"rank {rank}: internal error", "no more of this")
    assert all(word in ended.stderr for word in words)
    assert ended.stdout.count("caller's") == 2 * (case == "the caller's own code raises")
