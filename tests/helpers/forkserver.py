"""A server that imports the package once and forks commands and MPICH ranks of tests.

A forked command behaves like a cold start and saves the 1 to 2 seconds of importing. Tests of import times,
`sys.modules` and variables that are read while importing need a cold start.
"""

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading

_START = "import sys; sys.path.insert(0, {!r}); from forkserver import serve, end; del sys.path[0]; "
_START += "end(serve({}, {}))"  # serve() returns only in forked children
_NOT_IMPORTED = ("mpi4py", "cupy", "torch", "transformers", "matplotlib", "pyarrow", "tensorboardX", "cudnn")
_SKIPPED = ("distgpt.__main__", "distgpt.core.comm.mpi")
# Variables that are read after importing. Any other difference requires a cold start.
_READ_LATE = ("PMI", "OMPI_", "SLURM_", "MPI_", "PYTEST_", "HF_", "COLUMNS", "LINES", "TERM", "NO_COLOR")
_READ_LATE += ("DISTGPT_AUTO_DTYPE", "WHOLE_", "BREAK")  # also programs of tests


class Server:
    def __init__(self, environ):
        self.environ, self.cores = dict(environ), os.sched_getaffinity(0)
        self._socket, theirs = socket.socketpair()
        self.address = f"distgpt-tests-{os.getpid()}"  # the ranks' socket
        ranks = socket.socket(socket.AF_UNIX)
        ranks.bind(f"\0{self.address}")
        ranks.listen(100)  # ranks wait for the imports
        here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
        code = _START.format(here, theirs.fileno(), ranks.fileno())
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        words = [sys.executable, "-c", code]
        self.process = subprocess.Popen(words, env=environ, pass_fds=[theirs.fileno(), ranks.fileno()], **quiet)
        theirs.close()
        ranks.close()

    def suits(self, environ):
        changed = {key for key, value in {*self.environ.items()} ^ {*environ.items()}}
        return all(key.startswith(_READ_LATE) for key in changed) and os.sched_getaffinity(0) == self.cores

    def fork(self, request, streams):
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
    """subprocess.Popen of a Python that a server forks."""

    def __init__(self, server, words, **how):
        self._server, self._told = server, -1
        self._request = {"program": words[1:]}
        super().__init__(words, **how)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        assert executable is None and preexec_fn is None and not pass_fds
        sys.audit("subprocess.Popen", executable, args, cwd, env)  # like Popen
        pipes, (session, group) = others[3:9], others[-2:]
        given = (pipes[0], pipes[3], pipes[5])  # -1: inherited
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


def serve(number, of_ranks):
    """Fork a child for each request on the socket or from a rank; return the child's program there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for tests and children
    control, ranks = socket.socket(fileno=number), socket.socket(fileno=of_ranks)
    _import_all()
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()  # or the children's first collection would copy every page
    running, asking = {}, {}  # pid → status pipe; a rank's connection → its pid
    while True:
        ready, _, _ = select.select([control, wakes, ranks, *asking], [], [])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakes, 4096)
            _reap(running)
        for starter in asking.keys() & ready:
            _pass_on(starter, asking, running)
        for source in {control, ranks} & {*ready}:
            starter = ranks.accept()[0] if source is ranks else None
            request, files = _receive(starter or control)
            if request is None and starter is None:
                os._exit(0)
            if request is None:  # ended by mpirun
                continue
            tell, *streams = files if starter is None else (os.dup(starter.fileno()), *files)
            _load_compiled()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                return _become(request, tell, streams)
            running[pid] = tell
            if starter:
                asking[starter] = pid
            for stream in streams:
                os.close(stream)


def _pass_on(starter, asking, running):
    """Forward a signal to a rank; end the rank if its starter has ended."""
    number = b""
    with contextlib.suppress(ConnectionResetError):  # the starter was killed
        number = starter.recv(1)
    if asking[starter] in running:  # the pid is still valid
        os.kill(asking[starter], number[0] if number else signal.SIGKILL)
    if not number:
        del asking[starter]
        starter.close()


def _import_all():
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
    cpu_target = importlib.import_module("numba.core.registry").cpu_target
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    if os.fork() == 0:  # at a first fork OpenBLAS ends its threads, until they are needed
        os._exit(0)
    os.wait()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    assert threads == 1, f"{threads} threads cannot be forked"


@functools.cache
def _loops():
    from numba.core.dispatcher import Dispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("distgpt.")]
    found = {id(loop): loop for module in modules for loop in vars(module).values()}
    loops = [loop for loop in found.values() if isinstance(loop, Dispatcher) and hasattr(loop._cache, "_name")]
    return {f"{loop.py_func.__qualname__}-{loop.py_func.__code__.co_firstlineno}": loop for loop in loops}


def _load_compiled(loaded=set()):  # noqa: B006
    """Load newly compiled loops once; each would take a child 10 ms."""
    from distgpt.core.cpu.compiling.disk_cache import folder, read
    from numba.core.compiler import CompileResult
    from numba.core.registry import cpu_target

    context, kept = cpu_target.target_context, folder()
    for name in os.listdir(kept) if kept else ():  # noqa: PTH208
        if name in loaded or not name.endswith(".loop"):
            continue
        loaded.add(name)
        if (loop := _loops().get(name.rpartition("-")[0])) and (content := read(name)):
            made = CompileResult._rebuild(context, *pickle.loads(content))
            if loop._cache._name(made.signature.args, context.codegen()) == name:
                # Dispatcher.compile does this for loops that call this one.
                context.insert_user_function(made.entry_point, made.fndesc, [made.library])
                loop.add_overload(made)


def _receive(control):
    head, ancillary, _, _ = control.recvmsg(8, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    if not head:
        return None, []
    files = array.array("i")
    for *_, data in ancillary:
        files.frombytes(data)
    wanted, body = int.from_bytes(head, "little"), b""
    while len(body) < wanted:
        if not (part := control.recv(wanted - len(body))):
            return None, []
        body += part
    return json.loads(body), list(files)


def _reap(running):
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            tell = running.pop(pid)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                os.write(tell, status.to_bytes(8, "little"))
            os.close(tell)


def end(main):
    """Run main() and exit like Python, without deleting imported modules."""
    code = 0
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
        return  # Python reports the error
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized():
        mpi.Is_finalized() or mpi.Finalize()
        ctypes.CDLL(None).exit(code)  # MPICH disconnects in C's atexit
    os._exit(code)


def _become(request, tell, streams):
    is_rank = len(streams) > 3
    if request.get("session"):
        os.setsid()
    elif request.get("group") not in (None, -1):
        os.setpgid(0, request["group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["program"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        kind = getattr(sys, f"__{name}__")  # keeps the locale
        how = {"encoding": kind.encoding, "errors": kind.errors, "newline": "\n", "closefd": False}
        stream = open(number, "w" if number else "r", **how)  # noqa: PTH123, SIM115
        if name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if not is_rank:
        os.write(tell, os.getpid().to_bytes(8, "little"))
    os.closerange(len(streams), os.sysconf("SC_OPEN_MAX"))
    if is_rank:
        os.environ["PMI_FD"] = "3"  # the fourth file
    return _program()


def _program():
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        return lambda: exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    sys.path.insert(0, os.path.dirname(sys.argv[0]))  # noqa: PTH120
    return lambda: runpy.run_path(sys.argv[0], run_name="__main__")
