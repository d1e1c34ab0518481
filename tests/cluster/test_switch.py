"""The switch between hosts (helpers/link.cpp): each cable has its rate in both directions, and its delay."""

import json
import subprocess
import sys
import time

import pytest
from hosts import NET, Unavailable, lacking, switched_hosts

pytestmark = [pytest.mark.skipif(bool(lacking()), reason=lacking()), pytest.mark.timing]

SLOW, FAST = 20e6, 50e6  # bits a second
CABLES = [(FAST, 500), (FAST, 500), (SLOW, 500)]
ON_THE_WIRE = 1538 / 1448  # of a full frame, and what TCP carries in it
SIZE = 500_000
# Who sends to whom at once, and the seconds until the last byte is there.
AT_ONCE = {
    ((0, 1),): 8 * SIZE / FAST,
    ((0, 2),): 8 * SIZE / SLOW,  # as fast as the slower cable
    ((2, 0),): 8 * SIZE / SLOW,
    ((0, 2), (1, 2)): 2 * 8 * SIZE / SLOW,  # they share it
    ((0, 1), (1, 0)): 8 * SIZE / FAST,  # each direction has the whole rate
    ((0, 1), (1, 2)): 8 * SIZE / SLOW,  # different ways do not meet
}
EACH = 0.7  # seconds from one to the next: a host begins by the clock, which all share

HOST = """
import json, os, socket, sys, threading, time
begin, each, size, net, at_once = json.loads(sys.argv[1])
own = int(os.environ["PMI_RANK"])
server = socket.create_server((f"{net}.{own + 1}", 5000))

def receive(number, begun):
    with server.accept()[0] as connection:
        while connection.recv(1 << 16):
            pass
    sys.stdout.write(f"{number} {time.monotonic() - begun}\\n")

def send(target):
    with socket.create_connection((f"{net}.{target + 1}", 5000)) as connection:
        connection.sendall(bytes(size))

for number, pairs in enumerate(at_once):
    begun = begin + number * each
    threads = [threading.Thread(target=receive, args=(number, begun)) for _, to in pairs if to == own]
    threads += [threading.Thread(target=send, args=(to,)) for source, to in pairs if source == own]
    time.sleep(begun - time.monotonic())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.fixture(scope="module")
def seconds(tmp_path_factory):
    """How long each took that is sent at once."""
    folder = tmp_path_factory.mktemp("switch")
    try:
        with switched_hosts(folder, CABLES) as (mpirun, hosts):
            plan = json.dumps([time.monotonic() + 2, EACH, SIZE, NET, list(AT_ONCE)])
            words = [mpirun, "-n", str(len(CABLES)), "-f", hosts, sys.executable, "-c", HOST, plan]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    return [max(float(s) for n, s in told if int(n) == number) for number in range(len(AT_ONCE))]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(AT_ONCE)))
def test_what_is_sent_at_once_takes_as_long_as_its_cables_say(seconds, number):
    expected = ON_THE_WIRE * list(AT_ONCE.values())[number]
    assert 0.97 * expected < seconds[number] < 1.3 * expected + 0.05  # beside other work it is late
