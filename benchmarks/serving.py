"""Time the clients of a running `distgpt serve`: python benchmarks/serving.py PORT [PROMPT_TOKENS].

Waits until the server answers. Measures the time to the first token of a prompt, without and with eight other
streams, then requests per second of clients with one connection each. Start the server with --log quiet.
"""

import contextlib
import http.client
import json
import random
import socket
import statistics
import sys
import threading
import time

STREAMS, TRIES, SECONDS = 8, 15, 5.0
CROWDS = ((1, 1), (1, 32), (32, 1), (32, 32))  # clients, tokens per answer


class Clients:
    """Clients of a server on a port of this machine."""

    def __init__(self, port):
        self.port, self.random = port, random.Random(1)

    def ask(self, connection, prompt, tokens, stream):
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.8,
            "stream": stream,
            "overflow": "shift",
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def wait(self):
        """Wait until the server answers. Raise OSError after a minute."""
        until = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def begin(self, size, tokens):
        """Start a stream; return it after its first token, and the seconds."""
        prompt = [self.random.randrange(256) for _ in range(size)]
        connection, begun = self.connect(), time.perf_counter()
        response = self.ask(connection, prompt, tokens, True)
        assert response.readline()
        return connection, response, time.perf_counter() - begun

    def first_tokens(self, size):
        found = []
        for _ in range(TRIES):
            connection, response, seconds = self.begin(size, 1)
            response.read()
            connection.close()
            found.append(seconds)
            time.sleep(self.random.uniform(0, 0.3))
        return found

    def beside_streams(self, size):
        others = [self.begin(32, 700) for _ in range(STREAMS)]
        for _, response, _ in others:
            threading.Thread(target=_drink, args=(response,), daemon=True).start()
        time.sleep(1)
        try:
            return self.first_tokens(size)
        finally:
            for connection, _, _ in others:
                connection.close()

    def per_second(self, clients, tokens):
        until, answered = time.perf_counter() + SECONDS, [0] * clients

        def keep_asking(number):
            connection = self.connect()
            while time.perf_counter() < until:
                self.ask(connection, "The harbour", tokens, False).read()
                answered[number] += 1

        threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(answered) / SECONDS


def _drink(response):
    with contextlib.suppress(Exception):  # the stream is being closed
        while response.readline():
            pass


def main():
    clients, size = Clients(int(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else 64
    clients.wait()
    clients.first_tokens(size)  # warm-up
    for who, found in (("alone", clients.first_tokens(size)), ("beside 8", clients.beside_streams(size))):
        print(f"first token, {size} tokens, {who}: {statistics.median(found):.3f} s, best {min(found):.3f}")
    for crowd, tokens in CROWDS:
        rate = clients.per_second(crowd, tokens)
        print(f"{crowd} clients, {tokens} tokens: {rate:.0f} requests/s, {rate * tokens:.0f} tokens/s")


main()
