"""Start distgpt in tests in this process, in a forked or new one, or under mpirun."""

import atexit
import contextlib
import functools
import gc
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forkserver
import hypothesis
import pytest
import tiers
from distgpt.assembly import AllComponents
from distgpt.cluster.affinity.bind import VARIABLE as BIND
from distgpt.commands.cli import main
from distgpt.core import components as core_components
from distgpt.core.base.interrupts import ENDING
from distgpt.core.cpu.first_use import COMPILING
from distgpt.core.cpu.stages import VARIABLE as AUTO_DTYPE

# Background processes of a script ignore SIGINT, processes of nohup SIGHUP, and children inherit that. A
# handler ends at exec, so children get the default, while this process and its workers survive SIGHUP.
with contextlib.suppress(ValueError):  # not in the main thread
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "DISTGPT_TEST_NOHUP" in os.environ:
        os.environ["DISTGPT_TEST_NOHUP"] = "1"
        signal.signal(signal.SIGHUP, lambda *_: None)

os.environ["COLUMNS"] = "100"  # independent of this terminal

# The default dtype must not depend on this processor.
os.environ.setdefault(AUTO_DTYPE, "float32")
# Tests share cores, and some run in this process.
os.environ.setdefault(BIND, "off")

BIN = Path(sys.executable).parent
SCRIPT = [sys.executable, "-c", "from distgpt.commands.cli import main; main()"]
# Another MPI's, with options, where MPI4PY_LIBMPI names its library: make tests-openmpi.
OTHER_MPI = shlex.split(os.environ.get("DISTGPT_TEST_MPIRUN", ""))
MPIRUN = OTHER_MPI[0] if OTHER_MPI else shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
RANK = [sys.executable, "-I", "-S", str(HELPERS / "forkedrank.py")]
# Programs whose ranks need no fresh interpreter.
FORKED = [str(HELPERS / "ranks.py"), str(HELPERS.parent / "gpu" / "hostgpu.py")]
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpirun"
)


def _on_ranks(tier):
    """Return a decorator for tests of this tier that start ranks."""
    return lambda test: tier(pytest.mark.ranks(needs_mpi(test)))


ci_ranks, slow_ranks = map(_on_ranks, (pytest.mark.ci, pytest.mark.slow))

# Test files that take 10 seconds or more, or compile many loops.
LONG = (
    *("test_kernels", "test_cuda_kernels", "test_attention", "test_cuda_model", "test_cli_on_gpu"),
    *("test_model", "test_floors", "test_sweep", "test_serve_limits", "test_clock", "test_compiling"),
)

# The same examples in every run, and none kept: a failure is printed as an @example to add.
hypothesis.settings.register_profile("distgpt", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("distgpt")

# A complete model that trains in about a millisecond per step.
_MODEL = "--preset tiny-adamw --n-layer 2 --n-head 2 --n-embd 16 --seq-len 16 --data story"
_MODEL += " --tokenizer word --threads 1 --norm layernorm --mlp gelu --positions learned --bias"
SMALL = f"{_MODEL} --batch-size 8 --lr 1e-2 --warmup 2".split()


def command(*args, ranks=0, program=SCRIPT):
    launcher = [MPIRUN, *OTHER_MPI[1:], "-n", str(ranks)] if ranks else []
    return [*launcher, *program, *map(os.fsdecode, args)]


def clean_environment(**more):
    """Return the environment without variables of launchers or earlier tests."""
    unwanted = ("PMI", "PMIX", "OMPI_", "SLURM_", "FLUX_", "MPI_", "PYTHONUNBUFFERED")
    own = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    return {**own, "COLUMNS": "100", **more}


@functools.cache
def _server():
    """Return the server that forks commands, started on first use."""
    with tiers.uncounted():
        server = forkserver.Server(clean_environment())
    atexit.register(server.close)
    return server


def popen(*args, cold=None, ranks=0, program=SCRIPT, env=None, **how):
    """Start a command by subprocess.Popen or the fork server (helpers/forkserver.py).

    `cold` starts a new interpreter; so do variables that are read while importing and, unless `cold` is
    False, programs that are not in FORKED. Ranks are also forked.
    """
    env = clean_environment(**(env or {}))
    if cold is None:
        cold = not (program is SCRIPT or (ranks and program[1] in FORKED))
    cold = cold or bool(OTHER_MPI)  # forked processes hang with Open MPI
    if not cold and sys.platform == "linux" and _server().suits(env):
        if not ranks:
            return forkserver.Forked(_server(), command(*args, program=program), env=env, **how)
        program = [*RANK, _server().address, *program[1:]]
    return subprocess.Popen(command(*args, ranks=ranks, program=program), env=env, **how)


def for_shells():
    """Return a command for shell scripts that acts as `python -m distgpt`."""
    if OTHER_MPI or sys.platform != "linux":
        return [sys.executable, "-m", "distgpt"]
    return [*RANK, _server().address, "alone", *SCRIPT[1:]]


def distgpt(*args, ranks=0, cwd=None, env=None, program=SCRIPT, timeout=100, cold=None):
    """Run a command to its end. Under mpirun with `ranks`; output is text."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    with popen(*args, ranks=ranks, cwd=cwd, env=env, program=program, cold=cold, **how) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def inside(*args, cwd=None, env=None):
    """Run a command in this process, if it needs no separate one."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdout", "stderr")}
    code = 0
    with pytest.MonkeyPatch.context() as patched, contextlib.chdir(cwd or "."), same_signals():
        for key, value in clean_environment(**(env or {})).items():
            patched.setenv(key, value)
        patched.setattr(sys, "argv", ["distgpt", *map(os.fsdecode, args)])
        patched.setattr(sys, "unraisablehook", sys.unraisablehook)  # a command has its own
        for name, stream in streams.items():
            patched.setattr(sys, name, stream)
        try:
            main()
        except SystemExit as done:
            code = done.code
    told = [stream.detach().getvalue().decode() for stream in streams.values() if stream.flush() is None]
    return subprocess.CompletedProcess(sys.argv, code, *told)


def succeeded(*args, by=inside, **how):
    """Run a command that must succeed; return its result."""
    result = by(*args, **how)
    assert result.returncode == 0, result.stderr
    return result


@contextlib.contextmanager
def same_signals():
    """Restore signal handlers, because an interrupted command ignores further signals."""
    former = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield former
    finally:
        for number, action in former.items():
            signal.signal(number, action)


@pytest.fixture(autouse=True)
def signals_are_left_alone():
    """Check that no test leaves a signal ignored; later commands could not be interrupted."""
    with same_signals() as before:
        yield
        assert {number: signal.getsignal(number) for number in ENDING} == before


def train(out, *args, ranks=0, **how):
    """Train the small model successfully; return the directory."""
    stage = ["--stage", "mpi"] if ranks else []
    succeeded("train", *SMALL, "--out", out, *stage, *args, by=distgpt, ranks=ranks, **how)
    return Path(out)


def in_one_job(commands, ranks, cwd=None):
    """Run commands in sequence in one mpirun; return standard error and exit codes of each."""
    words = json.dumps([[os.fsdecode(word) for word in words] for words in commands])
    result = succeeded(words, by=distgpt, ranks=ranks, cwd=cwd, program=[sys.executable, FORKED[0]], timeout=300)
    others = [json.loads(codes) for codes in re.findall(r"^exit codes (.*)\n", result.stderr, re.MULTILINE)]
    errors = re.sub(r"^exit codes .*\n", "", result.stderr, flags=re.MULTILINE)
    ended = re.findall(r"((?:(?!exit code).*\n)*)exit code (\d+)\n", errors)
    assert len(ended) == len(commands) and len(others) == ranks - 1, result.stderr
    codes = ({int(code), *(of_rank[i] for of_rank in others)} for i, (_, code) in enumerate(ended))
    return [(said, code) for (said, _), code in zip(ended, codes, strict=True)]


def trained_together(ranks, runs):
    """Train the small model with each of the arguments, by directory, in one job."""
    commands = [["train", *SMALL, "--stage", "mpi", "--out", out, *args] for out, args in runs]
    found = in_one_job(commands, ranks)
    assert all(ended == ("", {0}) for ended in found), found


def wait_for(what, seconds=20):
    """Return `what()` when it becomes true."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def summary(run):
    return json.loads((Path(run) / "summary.json").read_text())


def logged(run, name="metrics"):
    """Return the objects in a run's metrics or history."""
    return [json.loads(line) for line in (Path(run) / f"{name}.jsonl").read_text().splitlines()]


def validations(run):
    """Return the validation losses by step. No step may be logged twice."""
    found = [(line["step"], line["val_loss"]) for line in logged(run) if "val_loss" in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def metrics(directory):
    """Return the metrics of training steps by step."""
    trained = [line for line in logged(directory) if "loss" in line]
    by_step = {line["step"]: line for line in trained}
    assert [line["step"] for line in trained] == sorted(by_step), "a step was logged twice, or out of order"
    return by_step


def losses(directory):
    return [line["loss"] for line in metrics(directory).values()]


def refused(result, code, *words, late=False):
    """Check a one-line error with this exit code and words; `late` means after the first step."""
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    said = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith(COMPILING)]
    assert len(said) == 1 and said[0].startswith("distgpt: "), result.stderr
    for word in words:
        assert str(word) in said[0], (word, said[0])
    assert bool(re.search("step +1/", result.stdout)) == late


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained") / "run", "--steps", "30", "--save-every", "10")


@pytest.hookimpl(trylast=True)  # once there is a reporter; workers of pytest-xdist have none
def pytest_configure(config):
    """Check the tiers. Shorten lines of dots, which end with the progress."""
    config.pluginmanager.register(tiers)
    if config.pluginmanager.has_plugin("terminalreporter"):
        config.get_terminal_writer().fullwidth = 48


def pytest_unconfigure(config):
    """Repeat errors at the end, because often only the end of a log is kept."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for word in ("failed", "error") if reporter else ():
        for report in reporter.stats.get(word, ()):
            lines = str(report.longrepr).splitlines()
            reporter.write_line(f"{word} in {report.when or 'collecting'} of {report.nodeid}:")
            for line in [line for line in lines if line.startswith("E ")][:3] or lines[-3:]:
                reporter.write_line(f"  {line[:200]}")


def copy_compiled(to, but=(), only=None, folder=""):
    """Copy this session's compiled loops to a cache below `to`, except `but`, or only `only`; return file names.

    Compiling all loops takes a minute. `folder` is the name of another package's cache.
    """
    from distgpt.core.base.caches import cache_folder
    from distgpt.core.cpu.compiling import disk_cache

    kept = cache_folder(disk_cache.folder_name(), disk_cache.beside())  # folder() may be patched
    (own := Path(to, folder or disk_cache.folder_name())).mkdir(mode=0o700, parents=True)
    for path in kept.iterdir() if kept else ():
        loop = path.name.split("-")[0]
        if path.suffix in {".loop", ".o"} and loop not in but and (only is None or loop in only):
            shutil.copy2(path, own)
    return {path.name for path in own.iterdir()}


# Formats that workers compile first, because most tests need these loops, and a worker that misses a loop
# compiles it even if another worker does.
FORMATS = {"gw0": "float32", "gw1": "bfloat16"}
FEW = 30  # files of loops in an almost empty cache
_TINY = "--preset tiny --n-layer 2 --n-head 2 --n-embd 32 --seq-len 16 --batch-size 2 --threads 1"


def pytest_sessionstart(session):
    from distgpt.core.cpu.compiling.disk_cache import folder  # imports Numba

    kept, worker = folder(), getattr(session.config, "workerinput", {}).get("workerid")
    if worker not in FORMATS or kept is None or len(list(kept.iterdir())) > FEW:
        return
    dtype = ("--dtype", FORMATS[worker])
    with tempfile.TemporaryDirectory() as out:
        for words in (SMALL, _TINY.split()):
            inside("train", *words, *dtype, "--steps", "1", "--out", f"{out}/{words[1]}")
        inside("infer", "--weights", f"{out}/tiny", "--prompt", "a", *dtype, "--max-new-tokens", "2")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Group the tests for pytest-xdist by file. Tests of ranks and timing are one group, which starts first.

    No two of them run at the same time, and the longest group does not run last.
    """
    for item in items:
        alone = any(item.get_closest_marker(name) for name in ("xdist_group", "timing", "ranks"))
        group = "ranks" if alone else item.module.__name__
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _turn(item.get_closest_marker("xdist_group").args[0]))


def pytest_collection_finish():
    gc.freeze()  # imported modules need no later collection


def _turn(group):
    return ["ranks", *LONG].index(group) if group in ("ranks", *LONG) else 1 + len(LONG)


@pytest.fixture
def extended(monkeypatch):
    """Install components with other methods or attributes."""

    def extend(**members):
        monkeypatch.setattr(core_components, "_installed", type("Extended", (AllComponents,), members)())

    return extend
