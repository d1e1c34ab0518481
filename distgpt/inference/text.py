"""Text in and out of the engine: the prompt where none is given, text token by token, stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DistgptError


class Transcript:
    """The text after a prompt. Holds back what may turn out to be the beginning of a stop string.

    The texts returned, concatenated, equal the decoded tokens up to the first stop string, without it: the
    one that ends first, and of those that end together the longest. So it does not matter how tokens cut
    the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._streamer, self._stop = tokenizer.streamer(), stop
        for token in prompt:
            self._streamer.feed(token)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain once this token is known; `stopped`: a stop string ended it."""
        return self._add(self._streamer.feed(token))

    def flush(self) -> str:
        """What was held back, as no more tokens come."""
        text = self._add(self._streamer.flush())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _add(self, piece: str) -> str:
        if not self._stop:
            return piece
        text, self._held = self._held + piece, ""
        begin, end = self._found(text)
        if end:
            self.stopped = True
            return text[:begin]
        sure = len(text) - self._undecided(text)
        self._held = text[sure:]
        return text[:sure]

    def _found(self, text: str) -> tuple[int, int]:
        """Where the first stop string begins and ends; (0, 0) without one."""
        places = [(text.find(stop), len(stop)) for stop in self._stop]
        found = [(begin + size, begin) for begin, size in places if begin >= 0]
        end, begin = min(found, default=(0, 0))
        return begin, end

    def _undecided(self, text: str) -> int:
        """How long the longest beginning of a stop string is with which the text ends."""
        most = min(len(text), max(map(len, self._stop)) - 1)
        tails = (text[len(text) - size :] for size in range(most, 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stop)), 0)


def opening(tokenizer: Tokenizer) -> list[int]:
    """A prompt for text from nothing: a full stop and a line break, a line break, or the first token.

    A line break alone comes second, since a model with rotary positions cannot count equal tokens, and may
    repeat the one it was given for ever.
    """
    for text in (".\n", "\n"):
        try:
            if tokens := tokenizer.encode(text).tolist():
                return list(tokens)
        except DistgptError:
            continue
    return [0]
