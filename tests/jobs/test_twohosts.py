"""The two hosts of other tests: they leave nothing behind, and touch nothing that another run made."""

import subprocess
from pathlib import Path

import pytest
from twohosts import Unavailable, inhabitants, lacking, namespaces

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacking()), reason=lacking())]


def known():
    told = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in told.splitlines()}


@pytest.fixture
def spaces():
    """A pair that is there already."""
    try:
        with namespaces("dgt") as made:
            yield made
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_what_still_runs_in_them_at_the_end_is_killed():
    with namespaces("dgu") as made:
        words = ["ip", "netns", "exec", made[1], "setsid", "sh", "-c", "echo; trap '' TERM; sleep 600 & wait"]
        left = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert left.stdout.readline()
        inside = inhabitants(made[1])
        assert inside
    assert left.wait(timeout=60) != 0
    assert not any(map(alive, inside))
    assert not known() & set(made)


def alive(number):
    stat = Path(f"/proc/{number}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_those_of_another_run_are_left_alone(spaces):
    with pytest.raises(Unavailable, match="is there already"), namespaces("dgt"):
        pass
    assert set(spaces) <= known()
