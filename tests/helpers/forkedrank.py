"""Started by mpirun or a shell: lets forkserver.py fork a command, and ends like the command.

python forkedrank.py ADDRESS PROGRAM ARGUMENTS…
python forkedrank.py ADDRESS alone PROGRAM ARGUMENTS…     a rank only under mpirun
"""

import array
import json
import os
import signal
import socket
import sys

address, *words = sys.argv[1:]
is_rank, may_be_alone = "PMI_FD" in os.environ, words[0] == "alone"
words = words[1:] if may_be_alone else words
if not is_rank and not may_be_alone:  # not MPICH
    os.execv(sys.executable, [sys.executable, *words])
with socket.socket(socket.AF_UNIX) as server:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: server.send(bytes([number])))  # forwarded to the rank
    server.connect(f"\0{address}")
    body = json.dumps({"program": words, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()  # noqa: PTH109
    files = array.array("i", [0, 1, 2, *map(int, [os.environ["PMI_FD"]] if is_rank else [])])
    server.sendmsg([len(body).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    server.sendall(body)
    awaited = 8 if is_rank else 16  # a rank has no pid message
    told = server.recv(awaited, socket.MSG_WAITALL)
if len(told) < awaited:
    sys.exit("the fork server has ended before its child")
code = os.waitstatus_to_exitcode(int.from_bytes(told[-8:], "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
