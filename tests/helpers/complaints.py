"""Commands that must succeed, and errors of one short line."""

import contextlib
import tempfile

import pytest
from distgpt.core.base.errors import DataError

from conftest import succeeded


@contextlib.contextmanager
def complains(*words, kind=DataError):
    """Check that the body raises a one-line error with all these words."""
    with pytest.raises(kind) as caught:
        yield
    said = str(caught.value).replace(tempfile.gettempdir(), "/tmp")  # with the same length for any TMPDIR
    assert "\n" not in said and len(said.encode()) < 700, said
    for word in words:
        assert str(word) in str(caught.value), (word, said)


def done(*words, **how):
    return succeeded(*words, **how).stdout
