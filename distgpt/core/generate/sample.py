"""One sample of a request: its tokens, which of them its slot holds, what to feed next, and its text."""

from __future__ import annotations

from collections.abc import Sequence

from distgpt.core.base.errors import DistgptError
from distgpt.core.data.tokenizers import Streamer, Tokenizer
from distgpt.core.generate.request import Event, Likelihood, PromptLikelihoods, Request
from distgpt.core.generate.sampling import choose, likelihood, uniform
from distgpt.core.generate.slots import Choice, Feed, Logits, Rows
from distgpt.core.ops.api import Array

MOST_SCORED = 256  # tokens of a prompt at once whose logits are wanted: each has one for the whole vocabulary
MOST_EQUAL, LEAST_EQUAL = 3, 2  # tokens by which prompt lookup finds where its guesses begin


class SharedPrompt:
    """The prompt that the samples of a request share; once it is in a slot, the logits in and behind it."""

    def __init__(self, ticket: int, request: Request) -> None:
        self.ticket, self.request = ticket, request
        self.logits: Array | None = None  # behind it
        self.likelihoods: PromptLikelihoods = [None]  # in it, as far as they are known
        self.under_way = False  # one of them is computing the prompt
        self.to_come = request.n  # samples that have no slot yet
        self._streamer: Streamer | None = None

    @property
    def is_scored(self) -> bool:
        """Tell whether all log-probabilities that are wanted of the prompt are known."""
        return not self.request.prompt_logprobs or len(self.likelihoods) == len(self.request.prompt)

    def common(self, held: Sequence[int]) -> int:
        """Return how many tokens of the prompt these begin with, but never its last."""
        prompt = self.request.prompt
        most = min(len(held), len(prompt) - 1)
        return next((i for i in range(most) if held[i] != prompt[i]), most)

    def empty_event(self, choice: int) -> Event:
        """Return the only event of a sample without tokens."""
        return Event(self.ticket, choice, None, None, "", "length", self.wanted_of_prompt)

    def streamer(self, tokenizer: Tokenizer) -> Streamer:
        """Return a decoder for what follows the prompt, which is decoded once for all samples."""
        if self._streamer is None:
            self._streamer = tokenizer.streamer_behind(self.request.prompt)
        return self._streamer.copy()

    @property
    def wanted_of_prompt(self) -> PromptLikelihoods | None:
        return self.likelihoods if self.request.prompt_logprobs else None


class Sample:
    """`tokens[begin : begin + cached]` are in the slot, at positions 0 … cached."""

    def __init__(self, shared: SharedPrompt, choice: int, tokenizer: Tokenizer | None, length: int) -> None:
        self.shared, self.choice, self.request = shared, choice, shared.request
        self.slot = -1
        self.tokens = list(self.request.prompt)
        self.begin = max(0, len(self.tokens) - length)
        self.cached = 0
        self.new = 0  # tokens behind the prompt
        self.ended = False
        self.guessed = 0  # guesses in what is fed now
        self.chooses = False  # whether that gives a token
        self._length = length
        self._trust = self.request.lookup  # guesses to try next
        self._lookup = Lookup() if self.request.lookup else None
        self._transcript = None
        if tokenizer is not None:
            self._transcript = Transcript(shared.streamer(tokenizer), self.request.stop)

    @property
    def is_at_prompt(self) -> bool:
        """Tell whether the prompt is being computed: nothing is chosen yet."""
        return self.new == 0

    @property
    def held(self) -> list[int]:
        """Return what its slot holds as if computed anew; nothing once some was dropped."""
        return self.tokens[: self.cached] if self.begin == 0 else []

    def feed(self, chunk: int) -> Feed:
        """The next tokens: up to `chunk` of what is not in the slot yet; guesses behind a single one."""
        most = min(chunk, MOST_SCORED) if self._scores_prompt else chunk
        pending = self.tokens[self.begin + self.cached :][: most + 1]
        self.chooses = len(pending) <= most
        guesses = self._guesses() if len(pending) == 1 and self._lookup else []
        self.guessed = len(guesses)
        tokens = [*pending[:most], *guesses]
        wanted = len(tokens) if self._scores_prompt else self._choosing
        choice = None
        if not self.is_at_prompt:  # whose logits all samples of the request share
            choice = Choice(self.request, self._uniform, self.request.logprobs or 0)
        return Feed(self.slot, self.cached, tokens, wanted, choice)

    def take(self, fed: Feed, logits: Rows) -> list[Event]:
        """Note that `fed` is in the slot; choose by the logits, as far as guesses turn out right."""
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
        if guesses:  # wrong ones cost time: next time about as many as were right, and one to try
            self._trust = 2 * len(events) - 1
        return events

    @property
    def _uniform(self) -> float:
        """The number that draws the next token."""
        how = self.request
        return 0.0 if how.is_greedy else uniform(how.seed, self.choice, self.new)

    @property
    def _choosing(self) -> int:
        """Rows of logits that choose tokens."""
        return self.guessed + self.chooses

    @property
    def _scores_prompt(self) -> bool:
        """True also if another sample has scored it: with fewer rows some slots round otherwise."""
        return self.is_at_prompt and self.request.prompt_logprobs

    def _score_prompt(self, logits: Rows) -> None:
        """Note how likely the prompt's next tokens are; the last of its logits belong to what follows it."""
        known, prompt, count = self.shared.likelihoods, self.request.prompt, self.request.logprobs
        assert count is not None
        for row in logits[: len(prompt) - len(known)]:
            known.append(likelihood(row, prompt[len(known)], count))

    def choose(self, logits: Logits) -> Event:
        """Append the token that these logits (V,) give."""
        how, count = self.request, self.request.logprobs
        token = choose(logits, how, self._uniform, self.tokens)
        found = None if count is None else likelihood(logits, token, count)
        self.tokens.append(token)
        self.new += 1
        return self._event(token, found)

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
        """Move the window on past the context. Return how many positions its slot has to drop, if it can.

        Where it cannot, or all that is seen has to be computed anew, nothing in it is valid any more.
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
    """The text after a prompt. Holds back what may turn out to be the beginning of a stop string.

    The texts returned, concatenated, equal the decoded tokens up to the first stop string, without it: the
    one that ends first, and of those that end together the longest. So it does not matter how tokens cut
    the text.
    """

    def __init__(self, streamer: Streamer, stop: Sequence[str]) -> None:
        """`streamer` knows the prompt."""
        self._streamer, self._stop = streamer, stop
        self._pending = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain once this token is known; `stopped`: a stop string ended it."""
        return self._add(self._streamer.feed(token))

    def flush(self) -> str:
        """Return what was held back, as no more tokens come."""
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
        """Return where the first stop string begins and ends; (0, 0) without one."""
        places = [(text.find(stop), len(stop)) for stop in self._stop]
        found = [(begin + size, begin) for begin, size in places if begin >= 0]
        end, begin = min(found, default=(0, 0))
        return begin, end

    def _undecided(self, text: str) -> int:
        """Return the length of the longest beginning of a stop string with which the text ends."""
        most = min(len(text), max(map(len, self._stop)) - 1)
        tails = (text[len(text) - size :] for size in range(most, 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stop)), 0)


class Lookup:
    """Remembers where each few tokens of a growing sequence came last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose endings are remembered

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the last ones, where these came before. Tokens only grow."""
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
    """Tokens to start a text from nothing: what every prompt begins with, or else a full stop and a line
    break, a line break, or the first token.

    A line break alone comes second, since a model with rotary positions cannot count equal tokens, and may
    repeat the one it was given for ever.
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
