"""One sample of a request: its tokens, which of them its lane holds, and what to feed next."""

from __future__ import annotations

from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.inference.lanes import Array, Feed
from distgpt.inference.lookup import Lookup
from distgpt.inference.request import Event, Request
from distgpt.inference.sampling import Likelihood, PromptLikelihoods, choose, likelihood, uniform
from distgpt.inference.text import Transcript

MOST_SCORED = 256  # tokens of a prompt at once whose scores are wanted: each has one for the whole vocabulary


class Shared:
    """What the samples of a request share: once its prompt is in a lane, the scores in it and behind it."""

    def __init__(self, ticket: int, request: Request) -> None:
        self.ticket, self.request = ticket, request
        self.scores: Array | None = None  # behind it
        self.likelihoods: PromptLikelihoods = [None]  # in it, as far as they are known
        self.under_way = False  # one of them is computing the prompt
        self.to_come = request.n  # samples that have no lane yet

    @property
    def is_scored(self) -> bool:
        """Whether all is known that is wanted of the prompt itself."""
        return not self.request.prompt_logprobs or len(self.likelihoods) == len(self.request.prompt)

    def empty_event(self, choice: int) -> Event:
        """Of a sample without tokens."""
        return Event(self.ticket, choice, None, None, "", "length", self.wanted_of_prompt)

    @property
    def wanted_of_prompt(self) -> PromptLikelihoods | None:
        return self.likelihoods if self.request.prompt_logprobs else None


class Sample:
    """`tokens[begin : begin + cached]` are in the lane, at positions 0 … cached."""

    def __init__(self, shared: Shared, choice: int, tokenizer: Tokenizer | None, length: int) -> None:
        self.shared, self.choice, self.request = shared, choice, shared.request
        self.lane = -1
        self.tokens = list(self.request.prompt)
        self.begin, self.cached, self.new = max(0, len(self.tokens) - length), 0, 0
        self.ended = False
        self.guessed, self.chooses = 0, False  # of what is fed now: guesses in it; whether it gives a token
        self._length, self._trust = length, self.request.lookup
        self._lookup = Lookup() if self.request.lookup else None
        self._transcript = None
        if tokenizer is not None:
            self._transcript = Transcript(tokenizer, self.tokens, self.request.stop)

    @property
    def is_at_prompt(self) -> bool:
        """Whether the prompt is being computed: nothing is chosen yet."""
        return self.new == 0

    def feed(self, chunk: int) -> Feed:
        """The next tokens: up to `chunk` of what is not in the lane yet; guesses behind a single one."""
        most = min(chunk, MOST_SCORED) if self._scores_prompt else chunk
        pending = self.tokens[self.begin + self.cached :][: most + 1]
        self.chooses = len(pending) <= most
        guesses = self._guesses() if len(pending) == 1 and self._lookup else []
        self.guessed = len(guesses)
        tokens = [*pending[:most], *guesses]
        return Feed(self.lane, self.cached, tokens, len(tokens) if self._scores_prompt else self._scored)

    def take(self, fed: Feed, scores: Array) -> list[Event]:
        """Note that `fed` is in the lane; choose by the scores, as far as guesses turn out right."""
        self.cached += len(fed.tokens) - self.guessed
        guesses = list(fed.tokens[len(fed.tokens) - self.guessed :])
        if self._scores_prompt:
            self._score_prompt(scores)
        events: list[Event] = []
        if not self.chooses:
            return events
        if self.request.max_new_tokens == 0:
            self.ended = True
            return [self.shared.empty_event(self.choice)]
        for row, guess in zip(scores[-self._scored :], [*guesses, None], strict=True):
            events.append(self.choose(row))
            if self.ended or events[-1].token != guess:
                break
            self.cached += 1
        if guesses:  # wrong ones cost time: next time about as many as were right, and one to try
            self._trust = 2 * len(events) - 1
        return events

    @property
    def _scored(self) -> int:
        """Rows of scores that choose tokens."""
        return self.guessed + self.chooses

    @property
    def _scores_prompt(self) -> bool:
        """Also where another sample has done so: with fewer rows some lanes round otherwise."""
        return self.is_at_prompt and self.request.prompt_logprobs

    def _score_prompt(self, scores: Array) -> None:
        """Note how likely the prompt's next tokens are; the last of its scores belong to what follows it."""
        known, prompt, asked = self.shared.likelihoods, self.request.prompt, self.request.logprobs
        assert asked is not None
        for row in scores[: len(prompt) - len(known)]:
            known.append(likelihood(row, prompt[len(known)], asked))

    def choose(self, scores: Array) -> Event:
        """Append the token that these scores (V,) give."""
        how, asked = self.request.sampling, self.request.logprobs
        draw = 0.0 if how.is_greedy else uniform(how.seed, self.choice, self.new)
        token = choose(scores, how, draw, self.tokens)
        found = None if asked is None else likelihood(scores, token, asked)
        self.tokens.append(token)
        self.new += 1
        return self._event(token, found)

    def _event(self, token: int, found: Likelihood | None) -> Event:
        out, request, reason = self._transcript, self.request, None
        text = "" if out is None else out.feed(token)
        if out is not None and out.stopped:
            reason = "stop"
        elif self.new == request.max_new_tokens:
            reason = "length"
        elif request.overflow == "stop" and len(self.tokens) - self.begin > self._length:
            reason = "context"
        if reason and out is not None and not out.stopped:
            text += out.flush()
            reason = "stop" if out.stopped else reason
        self.ended = reason is not None
        of_prompt = self.shared.wanted_of_prompt if self.new == 1 else None
        return Event(self.shared.ticket, self.choice, token, found, text, reason, of_prompt)

    def make_room(self, can_drop: bool) -> int:
        """Past the context the window moves on. Return how many positions its lane has to drop, if it can.

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
