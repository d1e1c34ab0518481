import json
import sys
from pathlib import Path

import pytest
from devices import SAME, needs_the_processor

from conftest import HELPERS, ROOT, distgpt, losses, needs_mpi

pytestmark = [needs_the_processor, pytest.mark.ranks, needs_mpi]

HERE, BENCHMARKS = Path(__file__).parent, ROOT / "benchmarks"
ON_GPUS = [sys.executable, str(HERE / "hostgpu.py")]
TINY = ["train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8"]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs these lines, then the command line, on two ranks with two GPUs."""

    def started(lines, *args, nccl=True, **how):
        driver = tmp_path / "driver.py"
        driver.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport hostgpu\nhostgpu.install(2)\n{lines}")
        env = {"WHOLE_NCCL": str(int(nccl))}
        return distgpt(*args, ranks=2, program=[sys.executable, str(driver)], cold=False, env=env, **how)

    return started


SEVERAL = f'import runpy\nrunpy.run_path({str(HELPERS / "ranks.py")!r}, run_name="__main__")\n'


@pytest.mark.slow
def test_nccl_runs_save_and_change_modes(run, tmp_path):
    words = [*TINY, "--schedule", "constant", "--val-fraction", "0.2", "--val-tokens", "64", "--eval-every", "2"]
    words += ["--dtype", "bfloat16", "--recompute", "mlp", "--deterministic", "--out"]
    whole, moving = (tmp_path / name for name in ("whole", "moving"))
    parts = [(whole, "allreduce", "4"), *((moving, *each) for each in (("overlapped", "1"), ("sharded", "3")))]
    parts.append((moving, "overlapped", "4"))
    commands = [[*words, str(out), "--steps", steps, "--grad-sync", mode] for out, mode, steps in parts]
    for later in commands[2:]:
        later += ["--resume", "auto"]
    result = run(SEVERAL, json.dumps(commands))
    assert result.stderr.count("exit code 0") == len(commands), result.stderr
    assert "with nccl" in result.stdout and losses(whole) == losses(moving)
    assert (whole / "weights.safetensors").read_bytes()[-2000:] == (moving / "weights.safetensors").read_bytes()[-2000:]


# Each exchange, optimizer and gradient type at least once. test_session.py runs all modes.
MODES = ("overlapped", "sharded", "muon-sharded", "narrow-overlapped", "accumulating", "local")


@pytest.mark.ci
def test_gradient_exchanges_match_host_bitwise(tmp_path):
    words = (BENCHMARKS / "nccl_modes.py", tmp_path, "--quick", "--only", *MODES)
    result = distgpt(*words, ranks=2, program=ON_GPUS, env={"WHOLE_GPU": "1", "WHOLE_NCCL": "1"}, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["mode"]: row for row in json.loads((tmp_path / "modes.json").read_text())}
    by_nccl = {name: row for name, row in rows.items() if not name.startswith("host")}
    assert by_nccl.keys() == set(MODES) and {row["verdict"] for row in by_nccl.values()} == {"same bits"}
    assert len({row["losses"][-1] for row in by_nccl.values()}) > 3, "the modes are not one and the same"
    assert "with nccl" in result.stdout


FAILING = """
import time
from distgpt.commands.cli import main
from distgpt.gpu import transport
from distgpt.core.train.step import Step
from fakenccl import NcclError
launch = Step.launch

def launched(self, step, batches, *flags):
    if step == 2:
        if self.comm.rank in {ranks}:
            transport.nccl_module().trouble = NcclError("remote process exited")
        time.sleep(60)  # as for a sum that never comes
    return launch(self, step, batches, *flags)

Step.launch = launched
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_nccl_failure_ends_the_job_with_one_message(ranks, run, tmp_path):
    result = run(FAILING.format(ranks=ranks), *TINY, "--steps", "9", "--out", tmp_path / "run", timeout=50)
    assert result.returncode == 70, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")]
    assert any(f"rank {rank}: NCCL failed" in line for rank in ranks) and "remote process exited" in line
    assert "Traceback" not in result.stderr
