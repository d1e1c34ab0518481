"""A program that opens a stage, and prints the CPUs of its threads and children.

python placed.py STAGE THREADS ROOT     THREADS 0: automatic; ROOT replaces /sys
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from distgpt.cluster.affinity import bind
from distgpt.core.comm.affinity import affinity
from distgpt.core.comm.api import SerialComm
from distgpt.core.cpu.pool import pool_of
from distgpt.core.cpu.stages import open_stage

stage_name, threads, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
bind.PLACED = bind.Placed(root)


def mask(who=0):
    return sorted(os.sched_getaffinity(who))


stage = open_stage(stage_name, threads or None)
found = {"rank": stage.comm.rank, "threads": stage.threads, "lines": [], "workers": {}}
stage.notes.report_to(found["lines"].append)


found["reading"] = mask()  # ranks read data on all their CPUs
stage.kernels("float32")


def work(part):
    meeting.wait()  # so that each thread takes one
    found["workers"][part] = mask()


meeting = threading.Barrier(stage.threads)
pool_of(stage.threads).run_parts(work, stage.threads)
later = threading.Thread(target=lambda: found.update(later=mask()))
later.start()
later.join()
child = "import os; print(*sorted(os.sched_getaffinity(0)))"
told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
found["child"] = [int(cpu) for cpu in told.split()]
reader, writer = os.pipe()
if os.fork() == 0:
    found["workers"] = {}
    pool_of(stage.threads).run_parts(work, stage.threads)
    os.write(writer, json.dumps(found["workers"]).encode())
    os._exit(0)
os.wait()
found["forked"] = json.loads(os.read(reader, 1 << 16))
found["tasks"] = sorted({*map(tuple, (mask(int(task.name)) for task in Path("/proc/self/task").iterdir()))})
with affinity().unbound():
    waiting = threading.Thread(target=lambda: found.update(unbound=mask()))
    waiting.start()
    waiting.join()
again = open_stage(stage_name, threads or None)
again.kernels("float32")
found["again"] = []
again.notes.report_to(found["again"].append)
found["beside"] = affinity().place(SerialComm(stage.comm), stage.threads, threads_given=False)
found["after"] = mask()
stage.comm.barrier()  # a rank that ends gives up its claim
print(json.dumps(found), flush=True)
