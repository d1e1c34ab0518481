"""A run's directory for a group: whoever is in it may read, resume and remove the run."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import storage_errors
from distgpt.core.train.lines import Facts
from distgpt.fleet.recorder import Recorder

OF_GROUP = 0o070


class Group(Recorder):
    """Gives the files to the group, with the permissions that their owner has.

    The directory gets the setgid bit, by which files that come later get the group; the umask does not take
    away their permissions. New versions of files have them, too: they are made in the directory, and renamed.
    """

    def __init__(self, name: str) -> None:
        self._gid = _known(name)
        self._umask = os.umask(0)
        os.umask(self._umask & ~OF_GROUP)

    def started(self, facts: Facts) -> None:
        directory = Path(facts["directory"])
        with storage_errors("give to the group", directory):
            for path in (directory, *directory.rglob("*")):
                self._give(path)

    def close(self) -> None:
        os.umask(self._umask)

    def _give(self, path: Path) -> None:
        """Give a file to the group, unless it is another user's: of a run that a colleague began."""
        found = path.lstat()
        if found.st_uid != os.geteuid() or stat.S_ISLNK(found.st_mode):
            return
        os.chown(path, -1, self._gid)  # first: it takes the setgid bit away
        mode = stat.S_IMODE(found.st_mode) & ~OF_GROUP | (found.st_mode & 0o700) >> 3
        path.chmod(mode | stat.S_ISGID if stat.S_ISDIR(found.st_mode) else mode)


def _known(name: str) -> int:
    """Return the number of a group that this user is in; a name may be a number, too."""
    try:
        gid = int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(f"--group {name!r:.80}: there is no such group on this host") from None
    if os.geteuid() and gid not in (os.getegid(), *os.getgroups()):
        raise UsageError(f"--group {name}: you are not in this group, so you can give it no files (id)")
    return gid
