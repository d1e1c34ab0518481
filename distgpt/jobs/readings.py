"""What MPICH, Open MPI and srun read on a line of a hostfile, right or wrong.

The rules are what MPICH 5.0.2, Open MPI 5.0.11 and Slurm 22.05 did when they were tried: the cases are in
tests/jobs/test_hostfile.py. srun reads such a file with `-m arbitrary -w ./FILE`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBER = re.compile(r"[0-9]{1,9}")
_SET_BY_OPENMPI = ("slots", "count", "cpu", "max_slots", "max-slots", "port")
_FOR_SRUN = "--write-for slurm writes what it reads"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong, in the same words for all lines of its kind, and the way out."""

    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a launcher makes of a line: a host, "" if none, and its ranks: None for one on each core."""

    host: str
    ranks: int | None
    trouble: Trouble | None = None


def read_by_mpich(text: str) -> Reading:
    name, *rest = text.split()
    parts = [part for part in name.split(":") if part] or [""]
    number = re.match(r"[+-]?[0-9]{1,12}", parts[1]) if len(parts) > 1 else None
    ranks = int(number[0]) if number else int(len(parts) == 1)
    trouble = None
    for word in rest:
        key, equals, value = word.partition("=")
        if key not in ("user", "binding") or not (equals and value):
            if word.startswith("#"):
                trouble = Trouble("refuses a comment behind a host", "give the comment a line of its own")
            else:
                trouble = Trouble(f"refuses the word {key[:30]}", "--write-for mpich writes what it reads")
            return Reading("", None, trouble)
    if ranks == 0:
        trouble = Trouble("leaves with exit code 136 and no message", "write a number, as in node1:4")
    elif ranks < 0:
        trouble = Trouble("leaves the host out without a word", "write a number from 1 on")
    return Reading("" if trouble else parts[0], ranks, trouble)


def read_by_openmpi(text: str) -> Reading:
    body = re.split("#|//", text)[0]
    writes = "--write-for openmpi writes what it reads"
    refused = Reading("", None, Trouble("refuses the line with a parse error", writes))
    if text.startswith("\ufeff"):
        return Reading("", None, Trouble("refuses the byte order mark", "save the file without it"))
    if "\r" in body:
        remedy = r"sed -i 's/\r$//' writes Unix line ends, and so does --write-for"
        return Reading("", None, Trouble("refuses the line ends of Windows", remedy))
    if re.search(r"[^\w.,:*@=\s-]", body):
        return refused
    first, *tokens = re.findall(r"[^\s=]+|=", body) or [""]
    host, found = first.rpartition("@")[2], dict[str, int]()
    if first == "=" or tokens[:1] == ["="] or first.count("@") > 1:
        return refused
    while tokens:
        word = tokens.pop(0)
        known = word in _SET_BY_OPENMPI
        if tokens[:1] != ["="] and not known:
            continue  # a word that it passes over
        value = tokens[1] if len(tokens) > 1 and tokens[0] == "=" else ""
        if not known or word in found or not NUMBER.fullmatch(value):
            return refused
        found[word] = int(value)
        del tokens[:2]
    slots = [found[word] for word in ("slots", "count", "cpu") if word in found]
    limit = found.get("max_slots", found.get("max-slots"))
    if len(slots) > 1 or (slots and limit is not None and limit < slots[0]):
        return refused
    return Reading(host, slots[0] if slots else limit)


def read_by_srun(text: str) -> Reading:
    if text.startswith("\ufeff"):
        return Reading("", None, Trouble("refuses the byte order mark", "save the file without it"))
    if not re.match("[A-Za-z0-9]", text):
        return Reading("", None, Trouble("refuses a line that begins with no letter or digit", _FOR_SRUN))
    if "\r" in text:
        return Reading("", None, Trouble("takes the line ends of Windows for part of a name", _FOR_SRUN))
    names = re.split(r"[\s,]+", text.partition("#")[0].strip())
    host, star, number = names[0].partition("*")
    if len(names) > 1 or re.search("[:@=]", names[0]):
        return Reading("", None, Trouble("takes the words for nodes that it does not know", _FOR_SRUN))
    if star and (not NUMBER.fullmatch(number) or int(number) == 0):
        return Reading("", None, Trouble("takes all of it for the name of a node", _FOR_SRUN))
    return Reading(host, int(number) if star else 1)
