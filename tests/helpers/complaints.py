"""Commands that must succeed, and errors that a user reads: one short line that names what is wrong."""

import contextlib

import pytest
from distgpt.core.base.errors import DataError

from conftest import inside


@contextlib.contextmanager
def complains(*words, kind=DataError):
    """The body fails with this error, whose one line has all these words."""
    with pytest.raises(kind) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said and len(said.encode()) < 700, said
    for word in words:
        assert str(word) in said, (word, said)


def done(*words, **how):
    """Run a command in this process that must succeed; return what it printed."""
    result = inside(*words, **how)
    assert result.returncode == 0, result.stderr
    return result.stdout
