"""What hostfiles mean to MPICH, Open MPI and srun: written down as found by trying, and tried again here."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MPIRUN, inside, needs_mpi, refused

from distgpt.errors import DataError, UsageError
from distgpt.jobs import hostfile, launchers
from distgpt.jobs.hostfile import LAUNCHERS, parse, verdict, written_for

# A file, and the ranks on each host as they were started by MPICH 5.0.2 (`mpirun -f FILE` without -n), Open
# MPI 5.0.11 (`--hostfile FILE`) and Slurm 22.05.8 (`srun -m arbitrary -w ./FILE`). None: it ended with an
# error; "?": as many as the host has cores. DISTGPT_OPENMPI=PATH/mpirun tries Open MPI's column again.
READ = {
    b"ha:2\nhb:1\n": ("ha*2 hb*1", "ha:2*? hb:1*?", None),
    b"ha slots=2\nhb slots=1\n": (None, "ha*2 hb*1", None),
    b"ha*2\nhb\n": ("ha*2*1 hb*1", "ha*2*? hb*?", "ha*2 hb*1"),
    b"ha\nhb\n": ("ha*1 hb*1", "ha*? hb*?", "ha*1 hb*1"),
    b"ha\nhb": ("ha*1 hb*1", "ha*? hb*?", "ha*1 hb*1"),
    b"# x\n\nha\n": ("ha*1", "ha*?", "ha*1"),
    b"   \n  #hc:9\nha\n": ("ha*1", "ha*?", None),
    b"ha # x\n": (None, "ha*?", "ha*1"),
    b"ha slots=2 # x slots=5\n": (None, "ha*2", None),
    b"ha slots=2 // x\n": (None, "ha*2", None),
    b"ha:x\n": (None, "ha:x*?", None),
    b"ha:0\nhb:1\n": (None, "ha:0*? hb:1*?", None),
    b"hb:2\nha:x\n": (None, "hb:2*? ha:x*?", None),
    b"ha:\n": ("ha*1", "ha:*?", None),
    b"ha:-1\nhb:2\n": ("hb*1", "ha:-1*? hb:2*?", None),
    b"ha:2x\n": ("ha*2", "ha:2x*?", None),
    b"ha:+2\n": ("ha*2", None, None),
    b"ha:010\n": ("ha*10", "ha:010*?", None),
    b"ha:2:3\n": ("ha*2", "ha:2:3*?", None),
    b"ha :2\n": (None, "ha*?", None),
    b"ha: 2\n": (None, "ha:*?", None),
    b"ha 3\n": (None, "ha*?", None),
    b"ha:2 user=me\n": ("me@ha*2", None, None),
    b"me@ha:2\n": ("me@ha*2", "ha:2*?", None),
    b"me@ha slots=3\n": (None, "ha*3", None),
    b"ha slots=4 max_slots=8\n": (None, "ha*4", None),
    b"ha slots=3 max-slots=5\n": (None, "ha*3", None),
    b"ha max_slots=1\n": (None, "ha*1", None),
    b"ha slots=2 max_slots=1\n": (None, None, None),
    b"ha slots = 4\n": (None, "ha*4", None),
    b"ha count=3\n": (None, "ha*3", None),
    b"ha cpu=3\n": (None, "ha*3", None),
    b"ha cpus=3\n": (None, None, None),
    b"ha slot=3\n": (None, None, None),
    b"ha SLOTS=2\n": (None, None, None),
    b"ha slots=x\n": (None, None, None),
    b"ha slots=\nhb slots=1\n": (None, None, None),
    b"ha slots=2x\n": (None, None, None),
    b"ha slots=-1\n": (None, None, None),
    b"ha slots\n": (None, None, None),
    b"ha slots 4\n": (None, None, None),
    b"ha slots=0\nhb slots=1\n": (None, "ha*0 hb*1", None),
    b"ha slots=3 hb\n": (None, "ha*3", None),
    b"ha slots=1 slots=2\n": (None, None, None),
    b"ha slots=2, max_slots=4\n": (None, None, None),
    b"ha slots=010\n": (None, "ha*10", None),
    b"ha slots=1\nhb slots=1\nha slots=2\n": (None, None, None),
    b"ha:1\nhb:1\nha:2\n": ("ha*3 hb*1", "ha:1*? hb:1*? ha:2*?", None),
    b"ha\nhb\nha\n": ("ha*2 hb*1", "ha*2 hb*?", "ha*2 hb*1"),
    b"ha slots=2\nha\n": (None, "ha*3", None),
    b"ha\nha slots=2\n": (None, None, None),
    b"ha.x.org slots=1\nha.y.org slots=1\n": (None, None, None),
    b"10.0.0.1 slots=1\n10.0.0.2 slots=2\n": (None, "10.0.0.1*1 10.0.0.2*2", None),
    b"h_a slots=3\n": (None, "h_a*3", None),
    b"::1:2\n": ("1*2", "::1:2*?", None),
    b"::1 slots=3\n": (None, "::1*3", None),
    b"fe80::1\n": ("fe80*1", "fe80::1*?", None),
    b"[::1]:2\n": ("[*1", None, None),
    b"\tha:2\t\n": ("ha*2", "ha:2*?", None),
    b"\tha\tslots=3\t\n": (None, "ha*3", None),
    b"ha\r\nhb\r\n": ("ha*1 hb*1", None, None),
    b"ha slots=2\r\n": (None, None, None),
    b"\xef\xbb\xbfha\nhb\n": ("\ufeffha*1 hb*1", None, None),
    b"ha,hb:2\n": ("ha,hb*2", "ha,hb:2*?", None),
    b"ha hb\n": (None, "ha*?", "ha*1 hb*1"),
    b"h[1-2]:1\n": ("h[1-2]*1", None, None),
    b"ha;hb:2\n": ("ha;hb*2", None, None),
    b"-oProxyCommand=x:2\n": ("-oProxyCommand=x*2", None, None),
    b"-x slots=3\n": (None, "-x*3", None),
    b"a/b:1\n": ("a/b*1", None, None),
    b"+n1 slots=2\n": (None, None, None),
    b"_ha\n": ("_ha*1", "_ha*?", None),
    b"": (None, None, None),  # MPICH starts all ranks on this machine
    b"# x\n\n": (None, None, None),
}
IDS = [repr(content)[2:-1] for content in READ]
# Where our rules are others: two names on a line and a negative number are refused (MPICH takes the -1 off
# the other ranks), and spaces before nothing, or before a comment, are overlooked.
LOOSER = {("srun", b"ha hb\n"), ("srun", b"   \n  #hc:9\nha\n"), ("MPICH", b"ha:-1\nhb:2\n")}


def read(launcher, content):
    """The ranks on each host, as in READ, by our rules."""
    found = parse(content)
    said = verdict(launcher, found)
    readings = [line.readings[launcher] for line in found]
    refuses = ("refuses", "leaves with", "names no host")
    if any(trouble.what.startswith(refuses) for trouble, _ in said.troubles):
        return None
    if launcher == "srun" and (said.troubles or any(line.trouble for line in found)):
        return None
    ranks = {}
    for reading in readings:
        if reading.host:
            ranks.setdefault(reading.host.rpartition("@")[2], []).append(reading.ranks)
    if launcher == "Open MPI":
        ranks = {host: [n or 1 for n in each] if len(each) > 1 else each for host, each in ranks.items()}
    return {host: "?" if None in each else sum(each) for host, each in ranks.items()}


def written_down(text):
    if text is None:
        return None
    pairs = (part.rsplit("*", 1) for part in text.split())
    return {host.rpartition("@")[2]: "?" if ranks == "?" else int(ranks) for host, ranks in pairs}


@pytest.mark.parametrize("content", READ, ids=IDS)
def test_our_rules_are_what_was_found_by_trying(content):
    for launcher, text in zip(LAUNCHERS, READ[content], strict=True):
        if (launcher, content) not in LOOSER:
            assert read(launcher, content) == written_down(text), launcher


@needs_mpi
@pytest.mark.skipif(
    MPIRUN is None or launchers.mpirun(MPIRUN)["vendor"] != "MPICH", reason="needs MPICH's mpirun"
)
def test_mpich_still_reads_as_it_did(tmp_path):
    """With a program in place of ssh that starts what it is given here, under the name of the host."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\n[ "$1" = -x ] && shift\nASKED_AS=$1; shift\nexport ASKED_AS\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    options = ["-launcher", "ssh", "-launcher-exec", ssh, "-iface", "lo", "-f", tmp_path / "hosts"]
    for content, (mpich, _, _) in READ.items():
        if not content.strip().startswith(b"#") and content:
            (tmp_path / "hosts").write_bytes(content)
            words = [MPIRUN, *options, "sh", "-c", 'echo "$ASKED_AS"']
            done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60)
            started = done.stdout.split()
            found = {host.rpartition("@")[2]: started.count(host) for host in started}
            assert (found if done.returncode == 0 else None) == written_down(mpich), (content, done)
            if content in (b"ha:x\n", b"ha:0\nhb:1\n"):
                assert done.returncode == -8 and not done.stderr  # 136 in a shell


OPENMPI = os.environ.get("DISTGPT_OPENMPI")


@pytest.mark.skipif(not OPENMPI, reason="needs Open MPI: DISTGPT_OPENMPI=PATH/mpirun")
def test_openmpi_still_reads_as_it_did(tmp_path):
    file, cores = tmp_path / "hosts", len(os.sched_getaffinity(0))
    flags = "--display allocation --do-not-launch --allow-run-as-root --bind-to none --hostfile"
    asking = [OPENMPI, *flags.split(), file]
    for content, (_, openmpi, _) in READ.items():
        file.write_bytes(content)
        done = subprocess.run([*asking, "true"], capture_output=True, encoding="utf-8", timeout=60)
        slots = re.findall(r"^ *(\S+): slots=(\d+) max_slots", done.stdout, re.MULTILINE)
        expected = written_down(openmpi)
        if expected:
            expected = {h: cores if n == "?" else n for h, n in expected.items()}
        assert ({host: int(n) for host, n in slots} if done.returncode == 0 else None) == expected, content


# What is said of them


def troubles(launcher, content):
    return {trouble.what: numbers for trouble, numbers in verdict(launcher, parse(content)).troubles}


def test_known_mistakes_have_their_words_and_remedies():
    for launcher, content, words in (
        ("MPICH", b"ha:1\nhb:x\nhc:0\n", "exit code 136 and no message"),
        ("MPICH", b"ha:-1\n", "leaves the host out"),
        ("MPICH", b"ha slots=2\n", "refuses the word slots"),
        ("MPICH", b"ha:2 # two\n", "refuses a comment behind a host"),
        ("MPICH", b"", "all ranks run on this machine"),
        ("MPICH", b"# nothing\n", "all ranks run on this machine"),
        ("MPICH", b"fe80::1\n", "cannot read an IPv6 address"),
        ("MPICH", b"\xef\xbb\xbfha:2\n", "byte order mark"),
        ("Open MPI", b"ha:2\n", "takes all of it for the name of a host, and starts a rank for each core"),
        ("Open MPI", b"ha slots=2\r\n", "line ends of Windows"),
        ("Open MPI", b"ha slots=2\nha slots=2\n", "refuses a second number of slots"),
        ("Open MPI", b"ha.x slots=2\nha.y slots=2\n", "differ only after the first dot"),
        ("Open MPI", b"", "No nodes are available"),
        ("srun", b"ha:2\n", "nodes that it does not know"),
        ("srun", b" ha\n", "begins with no letter or digit"),
        ("srun", b"10.0.0.1\n", "not by addresses"),
    ):
        said = verdict(launcher, parse(content)).troubles
        assert any(words in trouble.what and trouble.remedy for trouble, _ in said), (content, said)
    assert troubles("MPICH", b"ha:1\nhb:x\nhc:0\n") == {"leaves with exit code 136 and no message": [2, 3]}


@pytest.mark.parametrize(
    "text, words",
    [
        (b"-oProxyCommand=touch:2", "begins with -"),
        (b"-l", "begins with -"),
        (b"ha;rm:1", "names no host"),
        (b"$(id):1", "names no host"),
        (b"`id`", "names no host"),
        (b"me@-oX:1", "names no host"),
        (b"-x@ha:1", "begins with -"),
        (b"h[1-3]:2", "by a range"),
        (b"ha,hb:2", "several hosts"),
        (b"h\xe4:1", "other than ASCII"),
        ("hä:1".encode(), "other than ASCII"),
        (b"ha\0b:1", "control characters"),
        (b"\x1b[31mha:1", "control characters"),
        (b"ha:1\rhb:1", "control characters"),
        (b"ha:x", "no number"),
        (b"ha slots=x", "no number"),
        (b"ha:0", "no ranks"),
        (b"ha:99999999999", "more than 10,000"),
        (b"ha slots=2147483648", "more than 10,000"),
        (b"ha:" + b"9" * 900, "more than 10,000"),
        (b"ha 2", "space before its number"),
        (b"ha: 2", "space before its number"),
        (b"ha :2", "space before its number"),
        (b"h" * 2000, "longer than"),
    ],
)
def test_what_is_no_line_of_any_hostfile_is_refused(text, words):
    (line,) = parse(text)
    assert line.trouble and words in line.trouble.what.replace("does not give a number", "no number")
    assert line.trouble.remedy
    assert not hostfile.names([line])
    with pytest.raises(UsageError, match="line 1"):
        written_for("mpich", [line])


def test_a_command_to_copy_is_quoted():
    (line,) = parse(b"h[1]';reboot;'")
    assert shlex.split(line.trouble.remedy)[-1] == "h[1]';reboot;'"


def test_a_user_is_known_however_it_is_written():
    for content in (b"me@ha:2", b"me@ha slots=2", b"ha:2 user=me", b"ha:2 binding=none user=me"):
        (line,) = parse(content)
        assert (line.login, line.slots, line.trouble) == ("me@ha", 2, None), content
    (line,) = parse(b"ha:2 user=-oProxyCommand=x")
    assert line.login == "ha"


def test_any_dialect_becomes_any_other():
    same = {
        "mpich": ["ha:3", "me@hb.org:1"],
        "openmpi": ["ha slots=3", "me@hb.org slots=1"],
        "slurm": ["ha*3", "hb.org*1"],
    }
    foreign = (
        b"\xef\xbb\xbfha:2 # x\r\n\r\nme@hb.org\r\nha:1\r\n",
        b"ha slots=3 max_slots=4\nme@hb.org count=1",
    )
    for content in (*foreign, *("\n".join(same[writer]).encode() for writer in ("mpich", "openmpi"))):
        for writer, rows in same.items():
            assert written_for(writer, parse(content)) == rows
    for writer, launcher in hostfile.WRITERS.items():
        found = parse("\n".join(same[writer]).encode())
        assert verdict(launcher, found) == hostfile.Verdict(4, []), writer
        assert [line.trouble for line in found] == [None, None]
    for writer, content in (
        ("mpich", b"::1 slots=2"),
        ("slurm", b"10.0.0.1:2"),
        ("slurm", b""),
        ("mpich", b"#"),
    ):
        with pytest.raises(UsageError):
            written_for(writer, parse(content))


def test_the_example_is_right_for_both():
    text = (Path(__file__).parents[2] / "hostfile.example").read_text()
    openmpi = "\n".join(
        line.removeprefix("# ") for line in text.splitlines() if " slots=" in line and "node" in line
    )
    for launcher, content in (("MPICH", text), ("Open MPI", openmpi)):
        assert verdict(launcher, parse(content.encode())) == hostfile.Verdict(8, []), launcher


def test_hostile_files_are_read_in_no_time():
    with pytest.raises(DataError, match="10,000 lines"):
        parse(b"ha:1\n" * 20_000)
    for content in (
        b"ha:1\n" * 9_000,
        b"\n" * 9_000,
        b"a" * (1 << 20),
        b" " * (1 << 20),
        b"ha " + b"x=" * 400,
    ):
        found = parse(content)
        for launcher in LAUNCHERS:
            verdict(launcher, found)


# The command, without asking hosts


def doctor(tmp_path, content, *args):
    (tmp_path / "hosts").write_bytes(content)
    return inside("doctor", "--hostfile", "hosts", *args, cwd=tmp_path)


@pytest.fixture
def mpich(monkeypatch):
    """MPICH, whatever is installed: only what is said about files is looked at."""
    from distgpt.doctor import before_launch

    monkeypatch.setattr(
        before_launch, "distant_mpi", lambda: {"problem": "", "vendor": "MPICH", "version": "5"}
    )
    here = {"path": sys.executable, "vendor": "MPICH"}
    monkeypatch.setattr(before_launch, "mpirun", lambda: here)
    return here


def test_a_launch_that_would_work_leaves_with_0_and_says_how(mpich, tmp_path):
    result = doctor(tmp_path, b"localhost:1\n")
    assert result.returncode == 0 and not result.stderr
    assert "mpirun -n 1 -f hosts distgpt train --stage mpi" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    mpich["vendor"] = "Open MPI"
    refused(doctor(tmp_path, b"localhost:1\n"), 2, "MPICH", "Open MPI")
    found = json.loads(doctor(tmp_path, b"localhost slots=1\n", "--json").stdout)
    assert found["installed"] == "Open MPI" and found["launchers"]["Open MPI"]["ranks"] == 1
    assert (
        found["launchers"]["Open MPI"]["command"] == "mpirun -n 1 --hostfile hosts distgpt train --stage mpi"
    )
    assert not found["launchers"]["MPICH"]["reads"] and found["hosts"][0]["here"]


def test_what_is_wrong_leaves_with_2_and_the_first_of_it(mpich, tmp_path):
    for content, words in (
        (b"localhost:x\n", ["line 1", "does not give a number"]),
        (b"localhost slots=2\n", ["line 1", "refuses the word slots", "--write-for mpich"]),
        (b"", ["all ranks run on this machine"]),
        (b"no-such-host.invalid:1\n", ["no-such-host.invalid", "nobody knows this name", "/etc/hosts"]),
        (b"-oProxyCommand=touch${IFS}owned:1\n", ["begins with -"]),
    ):
        refused(doctor(tmp_path, content), 2, *words)
    assert "exit code 136" in doctor(tmp_path, b"localhost:x\n").stdout
    assert [*tmp_path.iterdir()] == [tmp_path / "hosts"]


def test_names_of_one_host_and_too_many_ranks_are_worth_a_look(mpich, tmp_path):
    result = doctor(tmp_path, b"localhost:1\n127.0.0.1:9999\n")
    assert result.returncode == 0
    words = " ".join(result.stdout.split())
    assert "localhost, 127.0.0.1: one host" in words and "give a host one name in the hostfile" in words
    assert "127.0.0.1: 9,999 ranks for" in words
    mpich["path"] = None
    result = doctor(tmp_path, b"localhost:1\n")
    assert result.returncode == 2 or shutil.which("srun")


def test_a_hostile_file_makes_a_page_without_control_characters(mpich, tmp_path):
    content = (
        b"\x1b]0;title\x07ha:1\nh\xe4\xff:2\n\xe2\x80\xaeha:1\n"
        + b"x" * 5000
        + b"\nha\0:1\n"
        + b"[:1\n" * 500
    )
    result = doctor(tmp_path, content)
    assert result.returncode == 2 and result.stdout.replace("\n", "").isprintable()
    assert len(result.stdout) < 20_000 and len(result.stderr) < 2_000
    json.loads(doctor(tmp_path, content, "--json").stdout)


def test_a_file_is_written_for_another_launcher(tmp_path):
    result = doctor(tmp_path, b"ha:2\nme@hb\n", "--write-for", "slurm")
    assert (result.returncode, result.stdout) == (0, "ha*2\nhb*1\n")
    assert "line 2 without a number" in result.stderr and "line 2: srun takes no users" in result.stderr
    refused(doctor(tmp_path, b"ha:2\nhb:x\n", "--write-for", "openmpi"), 2, "line 2 of the hostfile")


def test_options_that_make_no_sense_together_are_refused(tmp_path):
    for args, words in (
        (["--ssh"], "--ssh needs --hostfile"),
        (["--write-for", "mpich"], "--write-for needs --hostfile"),
        (["--hostfile", "x", "--stage", "mpi"], "leave one of them out"),
        (["--hostfile", "x", "--write-for", "mpich", "--json"], "nothing else"),
    ):
        refused(inside("doctor", *args, cwd=tmp_path), 2, words)
    refused(inside("doctor", "--hostfile", "x", cwd=tmp_path), 74, "x")
    refused(inside("doctor", "--hostfile", "/dev/zero"), 65, "no regular file")
    refused(inside("doctor", "--hostfile", "x", env={"PMI_SIZE": "2", "PMI_RANK": "0"}), 2, "before a launch")
