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
# What raises on one rank, which; what the other rank waits in.
CASES = {
    "a function of the caller, in training": (0, "distgpt.train(**settings, on_step=refuse)"),
    "generating, and the caller catches it": (
        1,
        """
        former, python_api.complete = python_api.complete, refuse
        try:
            distgpt.init("microgpt", stage="mpi").generate([[1], [2]], 2000)
        except ValueError:
            pass
        """,
    ),
    "the caller's own code": (
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
    ),
}

# What leaves on one rank, which; exit code 3.
LEAVING = {
    "a function of the caller, in training": (0, "distgpt.train(**settings, on_step=lambda _: sys.exit(3))"),
    "the caller's own code": (
        1,
        """
        model = distgpt.init("microgpt", stage="mpi")
        launched_rank() == RANK and sys.exit(3)
        model.generate([[1], [2]], 2)
        """,
    ),
}


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("case", LEAVING)
def test_a_rank_that_leaves_ends_the_job(case, tmp_path):
    rank, act = LEAVING[case]
    script = textwrap.dedent(BEGIN) + textwrap.dedent(act.replace("RANK", str(rank)))
    ended = distgpt(tmp_path / "out", ranks=2, program=[sys.executable, "-c", script], timeout=40)
    assert ended.returncode == 3, ended.stderr
    assert f"rank {rank}: left with exit code 3" in ended.stderr


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("case", CASES)
def test_an_error_of_one_rank_ends_the_job(case, tmp_path):
    rank, act = CASES[case]
    script = textwrap.dedent(BEGIN.replace("RANK", str(rank))) + textwrap.dedent(act)
    ended = distgpt(tmp_path / "out", ranks=2, program=[sys.executable, "-c", script], timeout=40)
    assert ended.returncode == 70, ended.stderr
    assert f"rank {rank}: internal error" in ended.stderr and "no more of this" in ended.stderr
    if case == "the caller's own code":
        assert ended.stdout.count("caller's") == 2
