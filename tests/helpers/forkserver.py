"""A server that has imported the package once and forks every command of the tests from there.

A command forked here is a process of its own like one started cold: it has its own pid, working directory,
environment, standard streams, signals, exit code and interpreter exit. It saves the 1 to 2 seconds that
importing takes. What the start decides (import times, `sys.modules`, variables read while importing) needs a
cold one.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading

_START = "import sys; sys.path.insert(0, {!r}); from forkserver import serve, end; del sys.path[0]; "
_START += "serve({}); from distgpt.cli import main; end(main)"  # serve() returns in the forked children alone
_NOT_IMPORTED = ("mpi4py", "cupy", "torch", "transformers", "matplotlib", "pyarrow", "tensorboardX", "cudnn")
_SKIPPED = ("distgpt.__main__", "distgpt.core.comm.mpi")
# Variables that are read when a command runs, not while importing. Any other that differs means a cold start.
_READ_LATE = ("PMI", "OMPI_", "SLURM_", "MPI_", "PYTEST_", "HF_", "COLUMNS", "LINES", "TERM", "NO_COLOR")


class Server:
    """The server process of this pytest process, as its tests see it."""

    def __init__(self, environ):
        self.environ, self.cores = dict(environ), os.sched_getaffinity(0)
        self._socket, theirs = socket.socketpair()
        code = _START.format(os.path.dirname(os.path.abspath(__file__)), theirs.fileno())  # noqa: PTH100, PTH120
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        words = [sys.executable, "-c", code]
        self.process = subprocess.Popen(words, env=environ, pass_fds=[theirs.fileno()], **quiet)
        theirs.close()

    def suits(self, environ):
        """Whether a fork equals a cold start with these variables."""
        changed = {key for key, value in {*self.environ.items()} ^ {*environ.items()}}
        return all(key.startswith(_READ_LATE) for key in changed) and os.sched_getaffinity(0) == self.cores

    def fork(self, request, streams):
        """The pid of a forked child, and the pipe that its wait status will come through."""
        told, tell = os.pipe()
        body = json.dumps(request).encode()
        files = array.array("i", [tell, *streams])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        try:
            self._socket.sendmsg([len(body).to_bytes(8, "little")], rights)
            self._socket.sendall(body)
        finally:
            os.close(tell)
        pid = os.read(told, 8)
        if not pid:
            raise RuntimeError("the fork server has ended")
        return int.from_bytes(pid, "little"), told

    def close(self):
        self._socket.close()
        self.process.wait()


class Forked(subprocess.Popen):
    """subprocess.Popen of `distgpt ARGS`, forked by a server: the same arguments, methods and results."""

    def __init__(self, server, args, **how):
        self._server, self._told = server, -1
        self._request = {"args": [os.fsdecode(arg) for arg in args]}
        super().__init__(["distgpt", *self._request["args"]], **how)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        assert executable is None and preexec_fn is None and not pass_fds
        pipes, (session, group) = others[3:9], others[-2:]
        given = (pipes[0], pipes[3], pipes[5])  # -1 where the child has the stream of the tests
        streams = [number if stream == -1 else stream for number, stream in enumerate(given)]
        self._request |= {
            "cwd": os.fspath(cwd or os.getcwd()),  # noqa: PTH109
            "env": dict(os.environ if env is None else env),
            "session": bool(session),
            "group": group,
        }
        self.pid, self._told = self._server.fork(self._request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags):
        """What waitpid gives; the status comes when the child has ended, and is read once."""
        if wait_flags & os.WNOHANG and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._told, 8)
        os.close(self._told)
        assert status, "the fork server has ended before its child"
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, _deadstate=None, **_):
        if self.returncode is None:
            with self._waitpid_lock:
                if self.returncode is None and self._told >= 0:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
        return self.returncode


def serve(number):
    """Fork a child for each request that comes through the socket; return in the children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests and the children
    control = socket.socket(fileno=number)
    _import_all()
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()  # or the children's first collection would copy every page
    running = {}
    while True:
        ready, _, _ = select.select([control, wakes], [], [])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakes, 4096)
            _reap(running)
        if control in ready:
            request, files = _receive(control)
            if request is None:
                os._exit(0)
            tell, *streams = files
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                _become(request, tell, streams)
                return
            running[pid] = tell
            for stream in streams:
                os.close(stream)


def _import_all():
    """Import every module of the package, and nothing that a plain start leaves out."""

    class Refuse:
        @staticmethod
        def find_spec(name, *_):
            if name.partition(".")[0] in _NOT_IMPORTED:
                raise ImportError(name)

    sys.meta_path.insert(0, Refuse)
    package = importlib.import_module("distgpt")
    for module in pkgutil.walk_packages(package.__path__, "distgpt."):
        if not module.name.startswith(_SKIPPED):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    sys.meta_path.remove(Refuse)
    _load_compiled()
    if os.fork() == 0:  # at a first fork OpenBLAS ends its threads, until they are needed
        os._exit(0)
    os.wait()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    assert threads == 1, f"{threads} threads cannot be forked"


def _load_compiled():
    """Have Numba load what it loads at a first call: its registries, and the loops that lie on the disk."""
    from numba.core.caching import IndexDataCacheFile
    from numba.core.dispatcher import Dispatcher
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    here = cpu_target.target_context.codegen().magic_tuple()
    modules = [module for name, module in sys.modules.items() if name.startswith("distgpt.")]
    loops = {id(loop): loop for m in modules for loop in vars(m).values() if isinstance(loop, Dispatcher)}
    for loop in loops.values():
        if isinstance(files := getattr(loop._cache, "_cache_file", None), IndexDataCacheFile):
            for signature, target, *_ in files._load_index():
                if target == here:
                    loop.compile(signature)


def _receive(control):
    head, ancillary, _, _ = control.recvmsg(8, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    if not head:
        return None, []
    files = array.array("i")
    for *_, data in ancillary:
        files.frombytes(data)
    wanted, body = int.from_bytes(head, "little"), b""
    while len(body) < wanted:
        body += control.recv(wanted - len(body))
    return json.loads(body), list(files)


def _reap(running):
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            tell = running.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(tell, status.to_bytes(8, "little"))
            os.close(tell)


def end(main):
    """Run the command and leave as Python does, but without taking apart all that was imported."""
    try:
        main()
    except SystemExit as done:
        if not isinstance(done.code, int):
            raise
        code = done.code
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return  # Python says it, and its exit code
    os._exit(code)


def _become(request, tell, streams):
    """Make this forked process what a fresh `python -c` would be, and tell its pid."""
    if request["session"]:
        os.setsid()
    elif request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["args"]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        kind = getattr(sys, f"__{name}__")  # of the same locale
        how = {"encoding": kind.encoding, "errors": kind.errors, "newline": "\n", "closefd": False}
        stream = open(number, "w" if number else "r", **how)  # noqa: PTH123, SIM115
        if name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.write(tell, os.getpid().to_bytes(8, "little"))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
