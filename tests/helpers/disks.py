"""Disks and rights as they may be: small disks, limits, ordinary users, and calls that fail."""

import contextlib
import os
import resource
import shutil
import subprocess

import pytest


def names(directory):
    return sorted(file.name for file in directory.iterdir())


@contextlib.contextmanager
def unprivileged():
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextlib.contextmanager
def file_size_limit(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def without_locks(folder):
    """Variables of a process on whose disks flock fails, as on Lustre without -o flock."""
    source, made = folder / "unlocked.c", folder / "unlocked.so"
    source.write_text("#include <errno.h>\nint flock(int fd, int how) { errno = ENOLCK; return -1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    return {"LD_PRELOAD": str(made)}


@contextlib.contextmanager
def small_disk(directory, options="size=1m"):
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk to fill, and not in every container")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def raising(error):
    def call(*_):
        raise error

    return call
