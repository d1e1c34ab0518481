"""Counters of energy on trees of /sys that users of such machines have published; a run that has some."""

import ctypes
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from threadranks import on_all_ranks

from distgpt import api
from distgpt.components import TABLES
from distgpt.core.base import tables
from distgpt.core.comm.serial import SerialComm
from distgpt.energy import guard
from distgpt.energy.counters import GPUS, MEMORY, NODES, PROCESSORS, Gpus, Meter, SlurmStep, zones

# What powercap shows: by folder, the name, the largest value and the current one, in microjoules.
SERVER = {  # two packages of an Intel server, whose memory has a zone of its own
    "intel-rapl:0": ("package-0", 262143328850, 262143328000),
    "intel-rapl:0:0": ("dram", 65712999613, 1000),
    "intel-rapl:1": ("package-1", 262143328850, 5_000_000),
    "intel-rapl:1:0": ("dram", 65712999613, 65712999000),
}
LAPTOP = {  # cores and graphics lie within the package, which psys and the other interface count again
    "intel-rapl": (None, None, None),
    "intel-rapl:0": ("package-0", 262143328850, 100),
    "intel-rapl:0:0": ("core", 262143328850, 100),
    "intel-rapl:0:1": ("uncore", 262143328850, 100),
    "intel-rapl:1": ("psys", 262143328850, 100),
    "intel-rapl-mmio:0": ("package-0", 262143328850, 100),
}
EPYC = {  # AMD's processors are under Intel's name; a package of several dies
    "intel-rapl:0": ("package-0-die-0", 65532610987, 100),
    "intel-rapl:0:0": ("core", 65532610987, 100),
    "intel-rapl:1": ("package-0-die-1", 65532610987, 100),
}
SMALL = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SMALL |= {"data": "story", "steps": 4, "threads": 1}


def powercap(root, tree):
    for name, (label, largest, now) in tree.items():
        folder = root / "class/powercap" / name
        folder.mkdir(parents=True)
        if label:
            (folder / "name").write_text(f"{label}\n")
            (folder / "max_energy_range_uj").write_text(f"{largest}\n")
            (folder / "energy_uj").write_text(f"{now}\n")
    return root


def count(root, zone, microjoules):
    """Let a zone count on, as the kernel does: from its largest value it begins anew."""
    folder = root / "class/powercap" / zone
    now, largest = (int((folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
    now += microjoules
    (folder / "next").write_text(f"{now - largest if now > largest else now}\n")
    (folder / "next").rename(folder / "energy_uj")  # a reader sees one or the other


def kinds(root):
    return [zone.counted for zone in zones(root)]


def test_packages_and_their_memory_are_counted_once(tmp_path):
    assert kinds(powercap(tmp_path / "server", SERVER)) == [PROCESSORS, MEMORY] * 2
    assert kinds(powercap(tmp_path / "laptop", LAPTOP)) == [PROCESSORS]
    assert kinds(powercap(tmp_path / "epyc", EPYC)) == [PROCESSORS] * 2
    assert kinds(tmp_path) == []


def test_counters_that_begin_anew_go_on_in_the_sum(tmp_path):
    root = powercap(tmp_path, SERVER)
    meter = Meter(zones(root))
    assert meter.read() == 0 and meter.counted == [PROCESSORS, MEMORY]
    for done in range(1, 4):  # the first time beyond the largest of package 0 and of memory 1
        for zone in SERVER:
            count(root, zone, 40_000_000)
        assert meter.read() == pytest.approx(160 * done)
    (root / "class/powercap/intel-rapl:1/energy_uj").unlink()  # the module is unloaded
    assert meter.read() is None and meter.read() is None


def test_sockets_of_the_driver_of_amd(tmp_path):
    for number, (name, labels) in enumerate(
        {"k10temp": {}, "amd_energy": {1: "Ecore000", 2: "Ecore001", 3: "Esocket0", 4: "Esocket1"}}.items()
    ):
        folder = tmp_path / f"class/hwmon/hwmon{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        for place, label in labels.items():
            (folder / f"energy{place}_label").write_text(f"{label}\n")
            (folder / f"energy{place}_input").write_text(f"{place}000000\n")
    meter = Meter(zones(tmp_path))
    for place in (1, 2, 3, 4):
        (folder / f"energy{place}_input").write_text(f"{place + 10 * place}000000\n")
    assert meter.read() == 30 + 40 and meter.counted == [PROCESSORS]


@pytest.fixture
def closed():
    """A tree whose counters others than root may not read, as Linux has it since 2020."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    powercap(root, SERVER)
    for path in root.rglob("energy_uj"):
        path.chmod(stat.S_IRUSR if os.geteuid() == 0 else 0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield root
    os.seteuid(before)
    shutil.rmtree(root)


def test_counters_of_root_alone_are_named_in_a_batch_job_alone(closed, monkeypatch):
    notes = []
    stage, report = SimpleNamespace(on_gpu=False), SimpleNamespace(note=notes.append)
    run = SimpleNamespace(comm=SerialComm(), stage=stage, report=report)
    assert guard.guard(run, closed) is None and not notes
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "")  # no sstat
    assert guard.guard(run, closed) is None
    (note,) = notes
    assert note.startswith(f"{closed}/class/powercap/intel-rapl:0/energy_uj on {platform.node()} is for root")


def test_one_rank_of_each_host_reads_and_rank_0_knows_the_sum(tmp_path, monkeypatch):
    """Four ranks on two hosts; that of rank 2 has other counters."""
    roots = [powercap(tmp_path / "a", SERVER), powercap(tmp_path / "b", EPYC)]
    monkeypatch.setattr(guard, "boot_id", lambda: "")
    name = threading.local()
    monkeypatch.setattr(guard, "platform", SimpleNamespace(node=lambda: name.here))
    monkeypatch.setattr(guard, "SECONDS", 0.01)

    def rank(comm):
        host = comm.rank // 2
        name.here = f"node{host}"
        run = SimpleNamespace(comm=comm, stage=SimpleNamespace(on_gpu=False), report=None)
        own = guard.guard(run, roots[host])
        with own:
            comm.barrier()
            if comm.rank == 0:
                count(roots[0], "intel-rapl:0", 7_000_000)
                count(roots[1], "intel-rapl:1", 2_000_000)
                end = time.monotonic() + 20
                while own.known()[0] != 9 and time.monotonic() < end:
                    time.sleep(0.005)
            comm.barrier()
        comm.barrier()
        return own._open is not None, own.after_step(None), own.result()

    found = on_all_ranks(4, rank)
    assert [reads for reads, *_ in found] == [True, False, True, False]
    assert found[0][1:] == ({"joules": 9.0}, (9.0, [PROCESSORS, MEMORY]))
    assert all(metrics == {} and joules is None for _, metrics, (joules, _) in found[1:])


class Advancing:
    """A guard after Energy: with each step a counter takes five joules, which it waits for."""

    def __init__(self, root, made):
        self.root, self.made, self.steps = root, made, 0

    def __enter__(self): ...

    def __exit__(self, *ended): ...

    def after_step(self, done):
        count(self.root, "intel-rapl:0", 5_000_000)
        self.steps += 1
        end = time.monotonic() + 20
        while self.made[0].known()[0] != 5 * self.steps and time.monotonic() < end:
            time.sleep(0.002)
        return {}


def test_a_run_has_its_joules_in_metrics_and_summary(tmp_path, monkeypatch):
    root, made = powercap(tmp_path / "sys", EPYC), []
    monkeypatch.setattr(guard, "SECONDS", 0.002)

    def counting(run):
        made.append(guard.guard(run, root))
        return made[0]

    rows = {"energy": "energyrows:counting", "advancing": "energyrows:advancing"}
    monkeypatch.setitem(tables._paths, "guards", rows)
    module = SimpleNamespace(counting=counting, advancing=lambda run: Advancing(root, made))
    monkeypatch.setitem(sys.modules, "energyrows", module)
    trained = api.train(out=tmp_path / "run", **SMALL)
    lines = map(json.loads, (trained.directory / "metrics.jsonl").read_text().splitlines())
    assert [line.get("joules", 0) for line in lines if "loss" in line] == [0, 5, 10, 15]
    energy = json.loads((trained.directory / "summary.json").read_text())["energy"]
    assert energy == {"joules": 20, "joules_per_token": 20 / (4 * 4 * 16), "counted": [PROCESSORS]}


def test_a_run_without_counters_says_nothing_of_energy(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "SYS", tmp_path)
    trained = api.train(out=tmp_path / "run", **SMALL)
    assert "joules" not in (trained.directory / "metrics.jsonl").read_text()
    assert "energy" not in json.loads((trained.directory / "summary.json").read_text())


# NVIDIA's library with two GPUs, by the signatures of nvml.h.
LIBRARY = """
#include <string.h>
static unsigned long long joules[2] = {5000, 9000};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    const char *known[2] = {
        "GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-ff112233-4455-6677-8899-aabbccddeeff"
    };
    for (int i = 0; i < 2; i++)
        if (!strcmp(uuid, known[i])) { *device = &joules[i]; return 0; }
    return 6;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = *(unsigned long long *)device;
    *(unsigned long long *)device += 2500;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_gpus_are_found_by_their_ids(tmp_path):
    (tmp_path / "nvml.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "nvml.so", tmp_path / "nvml.c"], check=True)

    def load(name):
        assert name == "libnvidia-ml.so.1"
        return ctypes.CDLL(tmp_path / "nvml.so")

    ids = ["00112233445566778899aabbccddeeff", "ff112233445566778899aabbccddeeff"]
    gpus = Gpus(ids, load)
    assert gpus.counted == GPUS and gpus.read() == 5.0 and gpus.read() == 10.0
    with pytest.raises(OSError, match="error 6"):
        Gpus(["0" * 32], load)


@pytest.mark.parametrize(
    ("answers", "joules"),
    [(["1000", "1250"], 250), (["0"], None), ([str((1 << 64) - 2)], None), ([""], None)],
)
def test_a_step_of_slurm(tmp_path, monkeypatch, answers, joules):
    """sstat as its manual says: a number without a heading, of the step that the variables name."""
    (tmp_path / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    program = tmp_path / "sstat"
    program.write_text(
        f"#!/bin/sh\necho $* > {tmp_path}/asked\nhead -n 1 {tmp_path}/answers\nsed -i 1d {tmp_path}/answers\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
    assert guard.slurm_may_count(environ) and not guard.slurm_may_count({})
    if joules is None:
        with pytest.raises(OSError, match="no energy"):
            SlurmStep(environ)
        return
    step = SlurmStep(environ)
    assert step.read() == joules and step.counted == NODES
    assert (tmp_path / "asked").read_text() == "-nPj 12.0 -o ConsumedEnergyRaw\n"
    with pytest.raises(OSError, match="does not answer"):
        step.read()


def test_it_is_attached_in_two_lines():
    rows = [(name, path) for name in TABLES for path in TABLES[name].values() if "distgpt.energy" in path]
    assert rows == [("summary", "distgpt.energy.guard:of_run"), ("guards", "distgpt.energy.guard:guard")]
