import json
import sys
from pathlib import Path

import pytest
from devices import SAME, needs_the_processor

from conftest import ROOT, distgpt, needs_mpi

pytestmark = [needs_the_processor, pytest.mark.ranks, needs_mpi]

HERE, BENCHMARKS = Path(__file__).parent, ROOT / "benchmarks"
ON_GPUS = [sys.executable, str(HERE / "hostgpu.py")]
TINY = ["train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8"]


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
import sys, time
sys.path.insert(0, {here!r})
import hostgpu
hostgpu.install(2)
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
def test_nccl_failure_ends_the_job_with_one_message(ranks, tmp_path):
    (driver := tmp_path / "driver.py").write_text(FAILING.format(here=str(HERE), ranks=ranks))
    how = {"ranks": 2, "program": [sys.executable, str(driver)], "cold": False, "env": {"WHOLE_NCCL": "1"}}
    result = distgpt(*TINY, "--steps", "9", "--out", tmp_path / "run", timeout=50, **how)
    assert result.returncode == 70, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")]
    assert any(f"rank {rank}: NCCL failed" in line for rank in ranks) and "remote process exited" in line
    assert "Traceback" not in result.stderr
