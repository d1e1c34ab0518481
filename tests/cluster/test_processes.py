"""Child processes: launch lines, results, and their end with distgpt."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from distgpt.cluster.jobs.launchers import distant_mpi, find_launcher, own_mpirun
from distgpt.cluster.jobs.processes import TIMED_OUT, Ended, distgpt_command, run, unlaunched
from distgpt.core.base.errors import StorageError, UsageError
from distgpt.core.base.system import PACKAGE, python, python_code
from hosts import program
from launching import RANKS, SIZES

from conftest import MPIRUN, ROOT, ci_ranks, needs_mpi, wait_for

PYTHON = sys.executable


def script(text):
    return [PYTHON, "-u", "-c", textwrap.dedent(text)]


@pytest.mark.ci
def test_run_returns_output_and_exit_code():
    child = """
        import sys
        print("one"); print("two"); print("sorry", file=sys.stderr)
        sys.exit(3)
    """
    ended = run(script(child))
    assert (ended.code, ended.output, ended.errors) == (3, "one\ntwo\n", "sorry\n")
    assert ended.complaint() == "sorry" and ended.seconds > 0


@pytest.mark.ci
def test_run_handles_large_slow_killed_and_missing_children():
    child = "import sys\nfor f in (sys.stderr, sys.stdout): f.write('x' * (1 << 20))"
    ended = run(script(child), timeout=30)
    assert ended.code == 0 and len(ended.output) == len(ended.errors) == 1 << 20
    ended = run(script("import time; time.sleep(60)"), timeout=0.5)
    assert ended.code == TIMED_OUT and ended.seconds < 50
    assert run(script("import os; os.kill(os.getpid(), 9)")).code == -signal.SIGKILL
    with pytest.raises(StorageError, match="cannot start /no/such/program: No such file"):
        run(["/no/such/program"])


@pytest.fixture
def strange_folder(tmp_path, monkeypatch):
    for name in ("click", "numpy", "mpi4py", "runpy", "distgpt"):
        (tmp_path / f"{name}.py").write_text("print('from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.ci
@pytest.mark.usefixtures("strange_folder")
def test_children_ignore_modules_in_working_directory(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # like python -c
    ended = run(distgpt_command("--version"))
    assert (ended.code, ended.output.split(",")[0]) == (0, "distgpt"), ended
    assert run(python_code("import click, distgpt; print(distgpt.__name__)")).output == "distgpt\n"
    assert "working directory" not in distant_mpi().get("problem", "")


@pytest.mark.ci
@pytest.mark.usefixtures("strange_folder")
def test_children_use_the_same_package(tmp_path):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "distgpt").symlink_to(PACKAGE)
    site = os.pathsep.join(path for path in sys.path if Path(path).name == "site-packages")
    start = [sys.executable, "-S", *python()[1:], tmp_path / "checkout" / "distgpt"]  # -S: without installed ones
    ended = run([*start, "--version"], env={**os.environ, "PYTHONPATH": site})
    assert (ended.code, ended.output.split(",")[0]) == (0, "distgpt"), ended


def test_one_function_starts_python():
    """Other command lines would import modules from the working directory."""
    found = [path for path in PACKAGE.rglob("*.py") if re.search(r"[\[(*]\s*sys\.executable,", path.read_text())]
    assert found == [PACKAGE / "core" / "base" / "system.py"]


def gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.ci
@pytest.mark.parametrize("numbers, nohup", [
    ([signal.SIGTERM], False),
    ([signal.SIGINT, signal.SIGINT], False),
    ([signal.SIGHUP, signal.SIGTERM], True),
])  # fmt: skip
def test_signals_also_end_grandchildren(tmp_path, numbers, nohup):
    """Also end children that ignore SIGTERM. Under nohup, SIGHUP ends no process."""
    told, asked = tmp_path / "pid", tmp_path / "asked"
    grandchild = f"""
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(asked)!r}).touch())
        pathlib.Path({str(told)!r}).write_text(str(os.getpid()))
        for _ in range(600): time.sleep(0.1)
    """
    child = textwrap.dedent(f"""
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.4), os._exit(1)))
        subprocess.run([sys.executable, "-c", {textwrap.dedent(grandchild)!r}])
    """)
    program = f"""
        import sys
        from distgpt.cluster.jobs.processes import run
        from distgpt.core.base.interrupts import install_handlers
        install_handlers()
        run([sys.executable, '-c', {child!r}])"""
    ignored = f"import signal; signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'})\n"
    parent = subprocess.Popen(script(ignored + textwrap.dedent(program)), stderr=subprocess.DEVNULL)
    pid = int(wait_for(lambda: told.exists() and told.read_text()))
    for number in numbers:
        parent.send_signal(number)
        if nohup and number == signal.SIGHUP:
            time.sleep(0.2)
            assert parent.poll() is None and not asked.exists()
        elif len(numbers) > 1:
            wait_for(asked.exists)
    assert parent.wait(timeout=20) != 0
    wait_for(lambda: gone(pid))


@pytest.mark.ci
def test_signal_during_start_ends_the_child(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(script("import time; time.sleep(60)"))
        assert started[0].returncode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.ci
def test_run_keeps_output_of_killed_child():
    child = "import sys, time\nprint('one')\nprint('two', file=sys.stderr)\ntime.sleep(60)"
    with TemporaryFile("w+") as output:
        ended = run(script(child), timeout=2, output=output)
        output.seek(0)
        assert (output.read(), ended.output, ended.errors) == ("one\n", "one\n", "two\n")
    orphan = "subprocess.Popen(['sleep', '20'], start_new_session=True)"
    begun = time.monotonic()
    assert run(script(f"import subprocess\n{orphan}\nprint('gone')")).output == "gone\n"
    assert time.monotonic() - begun < 15


@ci_ranks
def test_killed_rank_complaint_has_no_advice():
    killed = "import os, time; os.environ.get('PMI_RANK', '1') == '1' and os.kill(os.getpid(), 9); time.sleep(9)"
    ended = run([MPIRUN, "-n", "2", PYTHON, "-c", killed])
    assert ended.code != 0 and "FAQ" not in ended.complaint()
    if "EXIT STRING" in ended.output + ended.errors:
        assert ended.complaint() == "a rank ended: Killed (signal 9)"


def test_complaint_ignores_launcher_lines():
    tail = "====\n=   EXIT CODE: 7\n====\nPlease see the FAQ page for debugging suggestions\n"
    assert Ended(7, tail, "cannot open it\n", 1.0).complaint() == "cannot open it"
    assert Ended(7, tail, "distgpt: no such text\nand more\n", 1.0).complaint() == "no such text"


def test_unlaunched_drops_launcher_variables():
    own = {"OMPI_MCA_btl": "tcp", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PMIX_MCA_gds": "hash", "HOME": "/"}
    told = dict.fromkeys([*SIZES, *RANKS, "PMI_FD", "PMIX_SERVER_URI2", "HYDI_CONTROL_FD"], "1")
    assert unlaunched(own | told) == own


@pytest.fixture
def programs(tmp_path, monkeypatch):
    for name in ("mpirun", "srun", "mpiexec.hydra"):
        says = {"mpirun": "mpirun (Open MPI) 5.0.1", "mpiexec.hydra": "HYDRA build details:"}.get(name, "")
        program(tmp_path / name, f"echo '{says}'")
    (tmp_path / "hosts").write_text("a\nb\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.ci
@pytest.mark.ranks
def test_launchers_build_commands(programs):
    for chosen, hosts, words in (
        ("mpirun", False, ["mpirun", "-n", "3"]),
        ("mpirun", True, ["mpirun", "-n", "3", "--hostfile", "hosts"]),
        ("mpiexec.hydra -iface eth0", True, ["mpiexec.hydra", "-n", "3", "-iface", "eth0", "-f", "hosts"]),
        ("srun --mpi=pmix", False, ["srun", "-n", "3", "--mpi=pmix"]),
    ):
        launcher = find_launcher(chosen, programs / "hosts" if hosts else None)
        command = launcher.command(3, ["distgpt", "train", 7])
        assert command[0] == str(programs / words[0])
        named = [Path(word).name if word.startswith("/") else word for word in command]
        assert named == [*words, "distgpt", "train", "7"]


def test_invalid_launchers_are_rejected(programs):
    for chosen, hosts, words in (
        ("nosuchrun", None, "nosuchrun not found in PATH"),
        ("mpirun", "nosuchfile", "nosuchfile does not exist"),
        ("srun", "hosts", "srun takes its hosts from the allocation"),
        ("", None, "--launcher is empty"),
        ('"srun', None, '--launcher "srun: no closing quotation'),
    ):
        with pytest.raises(UsageError, match=words):
            find_launcher(chosen, hosts and programs / hosts)


@needs_mpi
def test_mpirun_of_this_python_is_preferred(programs):
    assert find_launcher(None, None).words == (own_mpirun() or str(programs / "mpirun"),) and MPIRUN


NODE = "pack:2 numa:4 core:16 pu:2"  # hwloc notation: eight regions of 16 cores with two CPUs each


@ci_ranks
@pytest.mark.parametrize("ranks", [8, 16])
def test_documented_command_binds_ranks_to_regions(ranks):
    page = (ROOT / "docs" / "how-to" / "ranks.md").read_text()
    (words,) = re.findall(rf"`(mpirun -n {ranks} -bind-to [^`]+)`", page)
    if "HYDRA" not in run([MPIRUN, "--version"]).output:
        pytest.skip("this mpirun is not MPICH's")
    node = {"HWLOC_SYNTHETIC": NODE, "HWLOC_THISSYSTEM": "0", "HYDRA_TOPO_DEBUG": "1"}
    done = run([MPIRUN, *shlex.split(words)[1:], "true"], env={**os.environ, **node}, timeout=60)
    masks = re.findall(r"^process (\d+) binding: ([01]+)$", done.output, re.MULTILINE)
    each = 256 // ranks
    expected = {str(rank): "".join("01"[rank == cpu // each] for cpu in range(256)) for rank in range(ranks)}
    assert dict(masks) == expected, done
