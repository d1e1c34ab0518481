"""The template for chats that a tokenizer may have: kept beside it, checked, and saved with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from distgpt.core.base.checked import checked
from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import Tokenizer

LONGEST_TEMPLATE = 1 << 18  # characters
NAME = "chat"  # in the saved form of a tokenizer

T = TypeVar("T", bound=Tokenizer)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that makes a text of a chat, as models of transformers bring one.

    `tokens` are the texts of tokens by the names that the template has for them, as in bos_token; `ends` the
    ids that end an answer. A template is a program of whoever wrote it: texts/chats/ runs it.
    """

    source: str
    tokens: dict[str, str]
    ends: tuple[int, ...]

    def saved(self) -> dict[str, Any]:
        """Return what a tokenizer's file keeps of it."""
        return asdict(self)


def chat_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return how the model of a tokenizer was taught to chat."""
    chat = tokenizer.extras.get(NAME)
    return chat if isinstance(chat, ChatTemplate) else None


def with_chat(tokenizer: T, chat: ChatTemplate | None) -> T:
    """Return the same tokenizer with another template for chats."""
    others = {name: extra for name, extra in tokenizer.extras.items() if name != NAME}
    return tokenizer.with_extras({**others, NAME: chat} if chat else others)


def checked_chat(value: Any, size: int, source: str) -> ChatTemplate:
    """Return the template in the file of a tokenizer with `size` entries, or raise a DataError."""
    try:
        chat: ChatTemplate = checked(ChatTemplate, value, (NAME,))
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    if len(chat.source) > LONGEST_TEMPLATE:
        raise DataError(f"{source}: the chat template is longer than {LONGEST_TEMPLATE:,} characters")
    if not all(0 <= token < size for token in chat.ends):
        raise DataError(f"{source}: the chat's end {max(chat.ends)} is no id of the vocabulary")
    return chat
