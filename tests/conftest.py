"""How tests start distgpt: as a process of its own, and under a real mpirun where ranks are asked for."""

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

# Processes in the background of a script ignore SIGINT, those of nohup SIGHUP; children inherit that.
# A handler ends at exec, so children get the default, while this process and its workers survive SIGHUP.
with contextlib.suppress(ValueError):  # not in the main thread
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "DISTGPT_TEST_NOHUP" in os.environ:
        os.environ["DISTGPT_TEST_NOHUP"] = "1"
        signal.signal(signal.SIGHUP, lambda *_: None)

os.environ["COLUMNS"] = "100"  # whatever the width of this terminal

# What a run computes in by default must not depend on the processor that the tests run on.
os.environ.setdefault(AUTO_DTYPE, "float32")
# Tests run beside each other on the same cores, and some inside this process.
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

# Files of tests that take 10 seconds or more, or compile much where nothing is compiled yet.
LONG = (
    *("test_kernels", "test_cuda_kernels", "test_attention", "test_cuda_model", "test_cli_on_gpu"),
    *("test_model", "test_core", "test_sweep", "test_serve_limits", "test_clock", "test_compiling"),
)

# The same examples in every run, and none kept: a failure is printed as an @example to add.
hypothesis.settings.register_profile("distgpt", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("distgpt")

# A model that trains in about a millisecond a step, with everything that matters in it.
_MODEL = "--preset tiny-adamw --n-layer 2 --n-head 2 --n-embd 16 --seq-len 16 --data story"
_MODEL += " --tokenizer word --threads 1 --norm layernorm --mlp gelu --positions learned --bias"
SMALL = f"{_MODEL} --batch-size 8 --lr 1e-2 --warmup 2".split()


def command(*args, ranks=0, program=SCRIPT):
    launcher = [MPIRUN, *OTHER_MPI[1:], "-n", str(ranks)] if ranks else []
    return [*launcher, *program, *map(os.fsdecode, args)]


def clean_environment(**more):
    """Without what a surrounding launcher or an earlier test may have left."""
    unwanted = ("PMI", "PMIX", "OMPI_", "SLURM_", "FLUX_", "MPI_", "PYTHONUNBUFFERED")
    own = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    return {**own, "COLUMNS": "100", **more}


@functools.cache
def _server():
    """The server that forks commands, started when the first is asked for."""
    with tiers.uncounted():
        server = forkserver.Server(clean_environment())
    atexit.register(server.close)
    return server


def popen(*args, cold=None, ranks=0, program=SCRIPT, env=None, **how):
    """A running command: subprocess.Popen, or the like of it from the fork server (helpers/forkserver.py).

    `cold` starts an interpreter of its own, where the start itself is looked at; so do variables that are
    read while importing and, unless `cold` is False, programs that are not in FORKED. Ranks are forked, too.
    """
    env = clean_environment(**(env or {}))
    if cold is None:
        cold = not (program is SCRIPT or (ranks and program[1] in FORKED))
    cold = cold or bool(OTHER_MPI)  # with Open MPI loaded, what the fork server starts does not answer
    if not cold and sys.platform == "linux" and _server().suits(env):
        if not ranks:
            return forkserver.Forked(_server(), command(*args, program=program), env=env, **how)
        program = [*RANK, _server().address, *program[1:]]
    return subprocess.Popen(command(*args, ranks=ranks, program=program), env=env, **how)


def for_shells():
    """Give the words that a shell script may call for `python -m distgpt`, with arguments behind them."""
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
    """The same in this very process, for what computes and does not depend on being a process of its own."""
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


@contextlib.contextmanager
def same_signals():
    """Put back what becomes of signals: an interrupted command ignores further ones until its end."""
    former = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield former
    finally:
        for number, action in former.items():
            signal.signal(number, action)


@pytest.fixture(autouse=True)
def signals_are_left_alone():
    """No test may leave a signal ignored: later ones would start commands that cannot be interrupted."""
    with same_signals() as before:
        yield
        assert {number: signal.getsignal(number) for number in ENDING} == before


def train(out, *args, ranks=0, **how):
    """A training run of the small model that must succeed; gives its directory."""
    stage = ["--stage", "mpi"] if ranks else []
    result = distgpt("train", *SMALL, "--out", out, *stage, *args, ranks=ranks, **how)
    assert result.returncode == 0, result.stderr
    return Path(out)


def in_one_job(commands, ranks, cwd=None):
    """Run commands one by one in one mpirun; of each, what was written to standard error, and exit codes."""
    words = json.dumps([[os.fsdecode(word) for word in words] for words in commands])
    result = distgpt(words, ranks=ranks, cwd=cwd, program=[sys.executable, FORKED[0]], timeout=300)
    assert result.returncode == 0, result.stderr
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
    """What `what()` gives, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def metrics(directory):
    """What the run logged of its training steps, by step."""
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if "loss" in line]
    by_step = {line["step"]: line for line in trained}
    assert [line["step"] for line in trained] == sorted(by_step), "a step was logged twice, or out of order"
    return by_step


def losses(directory):
    return [line["loss"] for line in metrics(directory).values()]


def refused(result, code, *words, late=False):
    """A failure that was expected: this exit code, these words, one line, no traceback; `late`: in a run."""
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    said = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith(COMPILING)]
    assert len(said) == 1 and said[0].startswith("distgpt: "), result.stderr
    for word in words:
        assert str(word) in said[0], (word, said[0])
    assert bool(re.search("step +1/", result.stdout)) == late


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of a few steps: its directory."""
    return train(tmp_path_factory.mktemp("trained") / "run", "--steps", "30", "--save-every", "10")


@pytest.hookimpl(trylast=True)  # once there is a reporter; workers of pytest-xdist have none
def pytest_configure(config):
    """Check the tiers. Make lines of dots short: at the end of each stands how far the tests are."""
    config.pluginmanager.register(tiers)
    if config.pluginmanager.has_plugin("terminalreporter"):
        config.get_terminal_writer().fullwidth = 48


def pytest_unconfigure(config):
    """Say at the very end what went wrong, in which part of a test: often only the end of a log is kept."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for word in ("failed", "error") if reporter else ():
        for report in reporter.stats.get(word, ()):
            lines = str(report.longrepr).splitlines()
            reporter.write_line(f"{word} in {report.when or 'collecting'} of {report.nodeid}:")
            for line in [line for line in lines if line.startswith("E ")][:3] or lines[-3:]:
                reporter.write_line(f"  {line[:200]}")


def copy_compiled(to, but=(), only=None, folder=""):
    """Copy what this session has compiled to a cache below `to`, but for loops of these names, or only those.

    To compile all of it again takes a minute of a core. `folder`: its name where it is another package's.
    Return the names of the files.
    """
    from distgpt.core.base.caches import cache_folder
    from distgpt.core.cpu.compiling import disk_cache

    kept = cache_folder(disk_cache.folder_name(), disk_cache.beside())  # folder() may be another one's now
    (own := Path(to, folder or disk_cache.folder_name())).mkdir(mode=0o700, parents=True)
    for path in kept.iterdir() if kept else ():
        loop = path.name.split("-")[0]
        if path.suffix in {".loop", ".o"} and loop not in but and (only is None or loop in only):
            shutil.copy2(path, own)
    return {path.name for path in own.iterdir()}


# What the workers of a session compile first, each in a format of its own: most tests need these loops, and
# whoever finds one missing compiles it, though another is at it.
FORMATS = {"gw0": "float32", "gw1": "bfloat16"}
FEW = 30  # files of loops that a session finds where nothing is compiled yet
_TINY = "--preset tiny --n-layer 2 --n-head 2 --n-embd 32 --seq-len 16 --batch-size 2 --threads 1"


def pytest_sessionstart(session):
    from distgpt.core.cpu.compiling.disk_cache import folder  # where Numba is imported anyway

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
    """Group the tests for pytest-xdist: a file stays in one worker, for its fixtures, but what starts ranks
    or measures time goes to one group of all files, so that no two such tests run at once. That group takes
    longest and begins first, since a long one at the end would leave the other worker without work.
    """
    for item in items:
        alone = any(item.get_closest_marker(name) for name in ("xdist_group", "timing", "ranks"))
        group = "ranks" if alone else item.module.__name__
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _turn(item.get_closest_marker("xdist_group").args[0]))


def pytest_collection_finish():
    gc.freeze()  # what was imported stays: no later collection need look through it


def _turn(group):
    return ["ranks", *LONG].index(group) if group in ("ranks", *LONG) else 1 + len(LONG)


@pytest.fixture
def extended(monkeypatch):
    """Install components with other methods or attributes than those of the program."""

    def extend(**members):
        monkeypatch.setattr(core_components, "_installed", type("Extended", (AllComponents,), members)())

    return extend
