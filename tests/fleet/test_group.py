"""Run directories of a group: the permissions of each file, and a colleague who resumes."""

import grp
import os
import shutil
import stat
import subprocess

import pytest
from conftest import SCRIPT, SMALL, inside
from disks import names

from distgpt.core.base.errors import UsageError
from distgpt.core.cpu.compiling import disk_cache
from distgpt.fleet.group import Group


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o077, 0o022])
def umask(request):
    former = os.umask(request.param)
    yield request.param
    assert os.umask(former) == request.param  # the run has put it back


def test_all_files_of_a_run_are_the_groups_whatever_the_umask(tmp_path, umask):
    gid = 54321 if os.geteuid() == 0 else os.getgroups()[-1]
    run = tmp_path / "run"
    words = (*SMALL, "--steps", "3", "--save-every", "1", "--out", str(run))
    first = inside("train", *words)
    assert first.returncode == 0, first.stderr
    assert mode(run / "metrics.jsonl") == 0o666 & ~umask
    done = inside("train", *words[:-6], "--steps", "5", *words[-4:], "--resume", "auto", "--group", str(gid))
    assert done.returncode == 0, done.stderr
    folders, files = {0o077: (0o2770, 0o660), 0o022: (0o2775, 0o664)}[umask]
    for path in (run, *run.rglob("*")):
        assert mode(path) == (files if path.is_file() else folders), path
        assert path.stat().st_gid == gid, path
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"step-00000003", "step-00000005"}


def test_a_group_that_cannot_have_files_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="no such group"):
        Group("no-such-group")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getgroups", list)
    other = next(known.gr_name for known in grp.getgrall() if known.gr_gid != os.getegid())
    with pytest.raises(UsageError, match=f"--group {other}: you are not in this group"):
        Group(other)


@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
def test_a_colleague_resumes_the_run_and_its_owner_does_again(tmp_path):
    """Users 61001 and 61002 have groups of their own, and 61000 together; both have the umask 077."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    assert inside("train", *SMALL, "--steps", "1", "--out", str(tmp_path / "first")).returncode == 0
    compiled = disk_cache.folder()
    shared = tmp_path / "runs"
    shared.mkdir()
    os.chown(shared, 61001, 61000)
    shared.chmod(0o770)

    def train(user, steps, *more):
        home = tmp_path / str(user)
        if not home.exists():  # with the loops that this user has compiled: that takes a minute
            shutil.copytree(compiled, home / "distgpt" / compiled.name)
            for path in (home, *home.rglob("*")):
                os.chown(path, user, user)
        # It may read all files, since it has Python in this user's home; what it may write is what is tested.
        as_user = f"setpriv --reuid={user} --regid={user} --groups=61000"
        read = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
        return subprocess.run(
            [
                *as_user.split(),
                *read.split(),
                *SCRIPT,
                "train",
                *SMALL,
                "--steps",
                str(steps),
                "--save-every",
                "2",
                "--keep",
                "2",
                *more,
            ],
            cwd=shared,
            umask=0o077,
            env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home)},
            capture_output=True,
            text=True,
        )

    steps = (4, 8, 12)
    owners = set()
    for user, until in zip((61001, 61002, 61001), steps, strict=True):
        done = train(user, until, "--out", "run", "--group", "61000", "--resume", "auto")
        assert done.returncode == 0, done.stderr
        found = [path.stat() for path in (shared / "run").rglob("*")]
        assert {each.st_gid for each in found} == {61000}
        owners |= {each.st_uid for each in found}
    assert owners == {61001, 61002}
    assert names(shared / "run" / "checkpoints") == ["step-00000010", "step-00000012"]
    refused = train(61003, 14, "--out", "other", "--group", "0")
    assert refused.returncode == 2 and "you are not in this group" in refused.stderr
    assert not (shared / "other").exists()
