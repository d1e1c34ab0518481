"""Many chats at once with running servers that speak OpenAI's API, in turn: tokens a second of each.

    python benchmarks/chats_at_once.py --servers distgpt=8000 llama.cpp=8080 --chats 32

Each client holds one conversation: it asks, waits for the answer, and asks again with all that was said.
All servers get the same questions. Start them first, with the same model, and give each all cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from typing import Any

from record import arguments, save

THINGS = (
    "harbour",
    "lantern",
    "winter",
    "ledger",
    "violin",
    "copper",
    "orchard",
    "signal",
    "engine",
    "glacier",
)


def main() -> None:
    args = arguments(
        __doc__,
        rounds=5,
        servers={"nargs": "+", "metavar": "NAME=PORT"},
        chats={"type": int, "default": 32},
        turns={"type": int, "default": 3},
        answer={"type": int, "default": 64, "help": "tokens of an answer, at most"},
    )
    ports = {name: int(port) for name, port in (word.split("=") for word in args.servers)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
    for number in range(args.rounds + 1):
        for name, port in ports.items():
            result = all_chats(port, args, seed=number)
            if number:  # the first warms up
                found[name].append(result)
    first = next(iter(ports))
    for name, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        pairs = zip(found[first], rounds, strict=True)
        ratio = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
        beside = "" if name == first else f"; {first} is {ratio:.2f} x"
        print(
            f"{name}: {middle['tokens_per_s']:.0f} tokens/s, {middle['tokens']:.0f} tokens written, "
            f"an answer after {middle['answer_s']:.1f} s{beside}"
        )
    sizes = {key: getattr(args, key) for key in ("chats", "turns", "answer")}
    save("chats", {**sizes, "servers": found}, args.out)


def all_chats(port: int, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Hold all conversations at once; tokens written, by how many a second, and how long an answer takes."""
    answers: list[tuple[int, float]] = []
    clients = [
        threading.Thread(target=chat, args=(port, args, random.Random(1000 * seed + number), answers))
        for number in range(args.chats)
    ]
    begun = time.perf_counter()
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    seconds = time.perf_counter() - begun
    if len(answers) < args.chats * args.turns:
        raise SystemExit(f"port {port}: {len(answers)} of {args.chats * args.turns} answers")
    tokens = sum(count for count, _ in answers)
    waited = statistics.median(waited for _, waited in answers)
    return {"tokens": tokens, "tokens_per_s": tokens / seconds, "answer_s": waited}


def chat(port: int, args: argparse.Namespace, words: random.Random, answers: list[tuple[int, float]]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    messages: list[dict[str, str]] = []
    for _ in range(args.turns):
        things = " and a ".join(words.sample(THINGS, 5))
        messages.append({"role": "user", "content": f"Tell me a long story about a {things}."})
        begun = time.perf_counter()
        answer = ask(connection, messages, args.answer)
        answers.append((answer["usage"]["completion_tokens"], time.perf_counter() - begun))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def ask(connection: http.client.HTTPConnection, messages: list[dict[str, str]], answer: int) -> Any:
    request = {"messages": messages, "max_tokens": answer, "temperature": 0}
    body = json.dumps(request)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {text.decode()[:500]}")
    return json.loads(text)


if __name__ == "__main__":
    main()
