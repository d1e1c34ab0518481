"""One sample of a request, with its tokens, its slot's content, the next feed, and its text."""

from __future__ import annotations

from collections.abc import Sequence

from distgpt.core.base.errors import DistgptError
from distgpt.core.data.tokenizers import Streamer, Tokenizer
from distgpt.core.generate.request import Event, Likelihood, PromptLikelihoods, Request
from distgpt.core.generate.sampling import choose, likelihood, uniform
from distgpt.core.generate.slots import Choice, Feed, Logits, Rows
from distgpt.core.ops.api import Array

MOST_SCORED = 256  # maximum prompt tokens per step with logits, each of the vocabulary's size
MOST_EQUAL, LEAST_EQUAL = 3, 2  # context lengths of prompt lookup, in tokens


class SharedPrompt:
    """The prompt shared by the samples of a request, and its logits once a slot contains it."""

    def __init__(self, ticket: int, request: Request) -> None:
        self.ticket, self.request = ticket, request
        self.logits: Array | None = None  # after the prompt
        self.likelihoods: PromptLikelihoods = [None]  # one per prompt token computed already
        self.under_way = False  # whether a sample is computing the prompt
        self.to_come = request.n  # samples without a slot yet
        self._streamer: Streamer | None = None

    @property
    def is_scored(self) -> bool:
        """Whether all requested log-probabilities of the prompt are computed."""
        return not self.request.prompt_logprobs or len(self.likelihoods) == len(self.request.prompt)

    def common(self, held: Sequence[int]) -> int:
        """Return the length of the common prefix of the prompt and `held`, excluding the prompt's end.

        The last prompt token is always computed, because its logits are needed.
        """
        prompt = self.request.prompt
        most = min(len(held), len(prompt) - 1)
        return next((i for i in range(most) if held[i] != prompt[i]), most)

    def empty_event(self, choice: int) -> Event:
        """Return the only event of a sample without tokens."""
        return Event(self.ticket, choice, None, None, "", "length", self.wanted_of_prompt)

    def streamer(self, tokenizer: Tokenizer) -> Streamer:
        """Return a decoder for the continuation. The prompt is decoded once for all samples."""
        if self._streamer is None:
            self._streamer = tokenizer.streamer_behind(self.request.prompt)
        return self._streamer.copy()

    @property
    def wanted_of_prompt(self) -> PromptLikelihoods | None:
        return self.likelihoods if self.request.prompt_logprobs else None


class Sample:
    """A sample, whose slot contains `tokens[begin : begin + cached]` at positions 0, 1, …."""

    def __init__(self, shared: SharedPrompt, choice: int, tokenizer: Tokenizer | None, length: int) -> None:
        self.shared, self.choice, self.request = shared, choice, shared.request
        self.slot = -1
        self.tokens = list(self.request.prompt)
        self.begin = max(0, len(self.tokens) - length)
        self.cached = 0
        self.new = 0  # tokens after the prompt
        self.ended = False
        self.guessed = 0  # drafted tokens in the current feed
        self.chooses = False  # whether the current feed chooses a token
        self._length = length
        self._trust = self.request.lookup  # tokens to draft next
        self._lookup = Lookup() if self.request.lookup else None
        self._transcript = None
        if tokenizer is not None:
            self._transcript = Transcript(shared.streamer(tokenizer), self.request.stop)

    @property
    def is_at_prompt(self) -> bool:
        """Whether the prompt is still being computed."""
        return self.new == 0

    @property
    def held(self) -> list[int]:
        """The reusable tokens in the slot; none once the window has moved."""
        return self.tokens[: self.cached] if self.begin == 0 else []

    def feed(self, chunk: int) -> Feed:
        """Return the next feed: up to `chunk` pending tokens, or a single one with drafts."""
        most = min(chunk, MOST_SCORED) if self._scores_prompt else chunk
        pending = self.tokens[self.begin + self.cached :][: most + 1]
        self.chooses = len(pending) <= most
        guesses = self._guesses() if len(pending) == 1 and self._lookup else []
        self.guessed = len(guesses)
        tokens = [*pending[:most], *guesses]
        wanted = len(tokens) if self._scores_prompt else self._choosing
        choice = None
        if not self.is_at_prompt:  # all samples of the request share the prompt's logits
            choice = Choice(self.request, self._uniform, self.request.logprobs or 0)
        return Feed(self.slot, self.cached, tokens, wanted, choice)

    def take(self, fed: Feed, logits: Rows) -> list[Event]:
        """Record a feed and choose tokens from its logits, as long as drafted tokens are correct."""
        self.cached += len(fed.tokens) - self.guessed
        guesses = list(fed.tokens[len(fed.tokens) - self.guessed :])
        if self._scores_prompt:
            self._score_prompt(logits)
        events: list[Event] = []
        if not self.chooses:
            return events
        if self.request.max_new_tokens == 0:
            self.ended = True
            return [self.shared.empty_event(self.choice)]
        for row, guess in zip(logits[-self._choosing :], [*guesses, None], strict=True):
            events.append(self.choose(row))
            if self.ended or events[-1].token != guess:
                break
            self.cached += 1
        if guesses:  # Wrong drafts cost time, so draft twice the number of correct ones, plus one.
            self._trust = 2 * len(events) - 1
        return events

    @property
    def _uniform(self) -> float:
        """The random number that draws the next token."""
        how = self.request
        return 0.0 if how.is_greedy else uniform(how.seed, self.choice, self.new)

    @property
    def _choosing(self) -> int:
        """The number of logit rows that choose tokens."""
        return self.guessed + self.chooses

    @property
    def _scores_prompt(self) -> bool:
        """Whether to score the prompt, even if another sample did; fewer rows change some slots' rounding."""
        return self.is_at_prompt and self.request.prompt_logprobs

    def _score_prompt(self, logits: Rows) -> None:
        """Record likelihoods of prompt tokens. The last row predicts the first new token."""
        known, prompt, count = self.shared.likelihoods, self.request.prompt, self.request.logprobs
        assert count is not None
        for row in logits[: len(prompt) - len(known)]:
            known.append(likelihood(row, prompt[len(known)], count))

    def choose(self, logits: Logits) -> Event:
        """Choose a token from logits (V,) and append it."""
        how, count = self.request, self.request.logprobs
        token = choose(logits, how, self._uniform, self.tokens)
        result = None if count is None else likelihood(logits, token, count)
        self.tokens.append(token)
        self.new += 1
        return self._event(token, result)

    def _event(self, token: int, found: Likelihood | None) -> Event:
        out, request = self._transcript, self.request
        ended = token in request.ends
        text = ""
        if out is not None and not ended:
            text = out.feed(token)
        reason = None
        if ended or (out is not None and out.stopped):
            reason = "stop"
        elif self.new == request.max_new_tokens:
            reason = "length"
        elif request.overflow == "stop" and len(self.tokens) - self.begin > self._length:
            reason = "context"
        if reason and out is not None and not out.stopped:
            text += out.flush()
            if out.stopped:
                reason = "stop"
        self.ended = reason is not None
        of_prompt = self.shared.wanted_of_prompt if self.new == 1 else None
        return Event(self.shared.ticket, self.choice, token, found, text, reason, of_prompt)

    def make_room(self, can_drop: bool) -> int:
        """Move the window past the context. Return the number of positions to drop from the slot.

        If the slot cannot drop, or the window slides, all cached tokens become invalid.
        """
        if len(self.tokens) - self.begin <= self._length:
            return 0
        slides = self.request.overflow == "slide"
        kept = self._length if slides else self._length - self._length // 2
        gone = len(self.tokens) - kept - self.begin
        self.begin += gone
        self.cached = self.cached - gone if can_drop and not slides else 0
        return gone if self.cached else 0

    def _guesses(self) -> list[int]:
        assert self._lookup is not None
        room = self._length - self.cached - 1
        most = min(self.request.lookup, self._trust, room, self.request.max_new_tokens - self.new - 1)
        return self._lookup.draft(self.tokens, most)


class Transcript:
    """The text after a prompt, which withholds a possible start of a stop string.

    The concatenated results equal the decoded text up to the first stop string. That is the stop string that
    ends first, and the longest if several end together, so it does not depend on token boundaries.
    """

    def __init__(self, streamer: Streamer, stop: Sequence[str]) -> None:
        """`streamer` has consumed the prompt."""
        self._streamer, self._stop = streamer, stop
        self._pending = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Return the text that later tokens cannot change. Sets `stopped` if a stop string ended it."""
        return self._add(self._streamer.feed(token))

    def flush(self) -> str:
        """Return the withheld text after the last token."""
        text = self._add(self._streamer.flush())
        if not self.stopped:
            text += self._pending
            self._pending = ""
        return text

    def _add(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._pending + piece
        self._pending = ""
        begin, end = self._found(text)
        if end:
            self.stopped = True
            return text[:begin]
        sure = len(text) - self._undecided(text)
        self._pending = text[sure:]
        return text[:sure]

    def _found(self, text: str) -> tuple[int, int]:
        """Return start and end of the first stop string; (0, 0) if there is none."""
        places = [(text.find(stop), len(stop)) for stop in self._stop]
        result = [(begin + size, begin) for begin, size in places if begin >= 0]
        end, begin = min(result, default=(0, 0))
        return begin, end

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix that is a prefix of a stop string."""
        most = min(len(text), max(map(len, self._stop)) - 1)
        tails = (text[len(text) - size :] for size in range(most, 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stop)), 0)


class Lookup:
    """Memory of the last position of each short token sequence, in a growing sequence."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens processed already

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Draft up to `most` tokens that followed an earlier occurrence of the last ones.

        `tokens` may only grow between calls.
        """
        for end in range(max(LEAST_EQUAL, self._known), len(tokens)):
            for size in range(LEAST_EQUAL, MOST_EQUAL + 1):
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, len(tokens))
        for size in range(MOST_EQUAL, LEAST_EQUAL - 1, -1):
            place = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None and most > 0:
                return list(tokens[place : place + most])
        return []


def default_prompt(tokenizer: Tokenizer) -> list[int]:
    """Return tokens that start a document: the tokenizer's first tokens, or if it has none, a line break.

    A full stop before the line break is better. With rotary positions, a model cannot count equal tokens and
    may repeat a single line break forever. The fallback is token 0.
    """
    if tokenizer.first:
        return list(tokenizer.first)
    for text in (".\n", "\n"):
        try:
            if tokens := tokenizer.encode(text).tolist():
                return list(tokens)
        except DistgptError:
            continue
    return [0]
