"""Do something in a child of this process, as `multiprocessing` does."""

import json
import os
import select
import signal


def forked(act):
    """What `act` gives in a child of this process, which must not take long."""
    heard, tell = os.pipe()
    if not (child := os.fork()):
        os.write(tell, json.dumps(act()).encode())
        os._exit(0)
    os.close(tell)
    answered = select.select([heard], [], [], 20)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(heard) as told:
        return json.loads(told.read()) if answered else None
