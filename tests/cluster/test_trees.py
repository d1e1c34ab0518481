"""The recorded trees are read as what they stand for by lscpu, which is not ours."""

import shutil
import subprocess

import pytest
from trees import TREES, Seen, listed, mask, sys_of

CPUINFO = "processor: {}\nvendor_id: GenuineIntel\ncpu family: 6\nmodel: 143\nmodel name: X\nstepping: 8\n\n"


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="there is no lscpu here")
@pytest.mark.parametrize("name", TREES)
def test_lscpu_counts_what_a_person_counts(name, tmp_path):
    tree = TREES[name]
    (tmp_path / "sys").symlink_to(sys_of(name))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("".join(map(CPUINFO.format, sorted(tree.online))))
    words = ["lscpu", "--sysroot", str(tmp_path), "-p=CPU,CORE,SOCKET,NODE,CACHE"]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",") for line in out.splitlines() if not line.startswith("#")]
    assert {int(row[0]) for row in rows} == tree.online
    cores, sockets, regions = (len({row[i] for row in rows} - {""}) for i in (1, 2, 3))
    l3 = len({row[-1] for row in rows}) if len(rows[0]) > 8 else 0
    assert Seen(len(rows), cores, sockets, regions, l3) == tree.seen


def test_sets_of_cpus_are_written_as_the_kernel_writes_them():
    assert listed([7, 0, 2, 1, 9, 10]) == "0-2,7,9-10" and listed([]) == ""
    assert mask([0, 1, 33]) == "00000002,00000003" and mask([]) == "00000000"
