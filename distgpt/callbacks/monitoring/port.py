"""A port at which a training run answers Prometheus."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

from distgpt.callbacks.monitoring.exporter import Exporter
from distgpt.core.base.errors import UsageError, print_lines
from distgpt.core.comm.job import this_job

LOCAL = "127.0.0.1"
PATIENCE = 5.0  # seconds for a whole request: one client at a time, and others wait for it


def parsed_address(text: str) -> tuple[str, int]:
    """Return host and port of "9200", "node:9200" or "[::]:9200"; a UsageError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOCAL
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--metrics-port {text!r:.80} is neither a port, as 9200, nor ADDRESS:PORT")
    return host, int(port)


class Port(Exporter):
    """Answers at /metrics, in a thread, as long as the process lives."""

    def __init__(self, where: str) -> None:
        super().__init__()
        host, port = parsed_address(where)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self.server = _Server((host, port), family, self)
        except (OSError, UnicodeError) as error:  # a name with an empty or too long part is the latter
            why = getattr(error, "strerror", None) or error
            # A job that has waited in a queue, perhaps to resume, is worth more than its metrics.
            if getattr(error, "errno", None) == errno.EADDRINUSE and this_job().batch:
                print_lines(f"--metrics-port {where:.80}: {why}; the run goes on without it", err=True)
                return
            raise UsageError(f"--metrics-port {where:.80}: {why}") from None
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        print_lines(f"metrics for Prometheus: http://{shown}:{self.server.server_address[1]}/metrics")
        threading.Thread(target=self.server.serve_forever, name="metrics", daemon=True).start()


class _Server(TCPServer):
    allow_reuse_address = True  # a run that is started again takes the port of the one before

    def __init__(self, where: tuple[str, int], family: int, exporter: Exporter) -> None:
        self.address_family, self.exporter = family, exporter
        super().__init__(where, _Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing where a client leaves too early."""


def _disconnect(client: socket.socket) -> None:
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


class _Answer(BaseHTTPRequestHandler):
    server: _Server

    def handle(self) -> None:
        timer = threading.Timer(PATIENCE, _disconnect, [self.connection])
        timer.daemon = True
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def do_GET(self) -> None:
        is_known = self.path.partition("?")[0] == "/metrics"
        content, kind = b"see /metrics\n", "text/plain"
        if is_known:
            content, kind = self.server.exporter.page(self.headers.get("Accept", ""))
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Write nothing: requests come every few seconds."""
