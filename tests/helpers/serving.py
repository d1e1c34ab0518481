"""A server in a thread with the bundled model and real sockets, and a client."""

import functools
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from distgpt.core.base.errors import DistgptError
from distgpt.core.base.files import bundled
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm.api import SerialComm
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.tokenizers import ChatTemplate
from distgpt.core.generate.engine_setup import LoadedModel, ModelSpec, slots_for
from distgpt.core.saved.modelfile import load_model
from distgpt.inference.serving.limits import Limits, ListenOn
from distgpt.inference.serving.server import Server as Serving
from distgpt.inference.serving.server import bound

from conftest import wait_for

JSON = {"Content-Type": "application/json"}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@functools.cache
def sample():
    model, about = load_model(bundled("weights", "sample.safetensors"), CpuKernels("float32", 2), SerialComm())
    return model, about.tokenizer


class Paced:
    """Slots with a delay per step, NaN on demand, and the maximum of running slots in `most`."""

    def __init__(self, slots, seconds=0.0):
        self._lanes, self.seconds, self.spoil, self.most = slots, seconds, 0, 0

    def __getattr__(self, name):
        return getattr(self._lanes, name)

    def feed(self, work):
        time.sleep(self.seconds)
        self.most = max(self.most, len(work))
        scores = self._lanes.feed(work)
        if self.spoil:
            self.spoil -= 1
            scores[:] = float("nan")
        return scores


class Server:
    def __init__(self, slots, seconds, limits, place, template, tokenizer):
        model, own = sample()
        tokenizer = tokenizer or own
        if template:
            tokenizer = tokenizer.with_chat(ChatTemplate(template, {}, ()))
        loaded = LoadedModel(model, tokenizer, SerialComm(), ModelSpec(None, "auto"), None, "float32")
        self.slots = Paced(slots_for(loaded.model, slots), seconds)
        where = ListenOn(**{"port": 0, "log": "quiet", **place}, limits=Limits(**(limits or {})))
        listener = bound(where.host, where.port)
        self.serving, self.ended = Serving(loaded, self.slots, "sample", where, listener), None
        self.runner = self.serving.runner
        self.host, self.port = self.serving.listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(lambda: self.serving.started, 20)

    def _run(self):
        try:
            self.serving.serve_model()
        except (DistgptError, Interrupted) as error:
            self.ended = error

    def counted(self, name):
        return self.runner.metrics.registry.get_sample_value(f"distgpt_{name}_total")

    def gauge(self, name):
        return self.runner.metrics.registry.get_sample_value(f"distgpt_{name}")

    def close(self):
        self.serving.should_exit = True
        self.join()

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server does not end"

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=20)

    def line(self, head=b"", body=b""):
        line = socket.create_connection((self.host, self.port), 10)
        line.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body) if body else head)
        return line

    def refused(self, path="/v1/completions", **body):
        status, headers, found = self.ask(path, body)
        assert status >= 400, found
        return status, found["error"], headers

    def ask(self, path, body=None, method=None, headers=None):
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        given = {} if body is None else JSON
        connection.request(method, path, data, {**given, **(headers or {})})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text.decode()

    def complete(self, prompt, **settings):
        status, _, found = self.ask("/v1/completions", {"prompt": prompt, **settings})
        assert status == 200, found
        return found

    def begin(self, prompt, **settings):
        connection = self.connect()
        body = json.dumps({"prompt": prompt, "stream": True, **settings})
        connection.request("POST", "/v1/completions", body, JSON)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: ")
        return connection, response

    @property
    def is_free(self):
        return not any(map(self.gauge, ("running_sequences", "queue_length", "open_requests")))


def pieces(text):
    found = text.split("\n\n")
    assert found[-2:] == ["data: [DONE]", ""], found[-3:]
    return [json.loads(piece.removeprefix("data: ")) for piece in found[:-2]]


@contextmanager
def server(slots=4, seconds=0.0, limits=None, template="", tokenizer=None, **place):
    found = Server(slots, seconds, limits, place, template, tokenizer)
    try:
        yield found
    finally:
        found.close()
