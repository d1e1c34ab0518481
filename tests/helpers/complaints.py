"""Errors that a user reads: one short line that names what is wrong."""

import contextlib

import pytest
from distgpt.core.base.errors import DataError


@contextlib.contextmanager
def complains(*words, kind=DataError):
    """The body fails with this error, whose one line has all these words."""
    with pytest.raises(kind) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said and len(said.encode()) < 700, said
    for word in words:
        assert str(word) in said, (word, said)
