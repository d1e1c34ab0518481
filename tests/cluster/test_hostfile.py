"""Hostfiles as MPICH and Open MPI read them, by recorded and repeated trials."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from distgpt.cluster.jobs.launchers import hostfile_problems, mpirun, parse_hostfile
from distgpt.measure.doctor import hosts
from hosts import program

from conftest import MPIRUN, inside, refused, slow_ranks

LAUNCHERS = ("MPICH", "Open MPI")
# A file, and the ranks per host that MPICH 5.0.2 (`mpirun -f FILE` without -n) and Open MPI 5.0.11
# (`--hostfile FILE`) started. None means an error, "?" one rank per core.
READ = {
    b"ha:2\nhb:1\n": ("ha*2 hb*1", "ha:2*? hb:1*?"),
    b"ha slots=2\nhb slots=1\n": (None, "ha*2 hb*1"),
    b"ha\nhb\n": ("ha*1 hb*1", "ha*? hb*?"),
    b"# x\n\nha\n": ("ha*1", "ha*?"),
    b"ha # x\n": (None, "ha*?"),
    b"ha slots=2 // x\n": (None, "ha*2"),
    b"ha:x\n": (None, "ha:x*?"),
    b"ha :2\n": (None, "ha*?"),
    b"ha:2 user=me\n": ("me@ha*2", None),
    b"me@ha:2\n": ("me@ha*2", "ha:2*?"),
    b"ha slots=4 max_slots=8\n": (None, "ha*4"),
    b"ha slots = 4\n": (None, "ha*4"),
    b"ha cpus=3\n": (None, None),
    b"ha slots=x\n": (None, None),
    b"ha:1\nhb:1\nha:2\n": ("ha*3 hb*1", "ha:1*? hb:1*? ha:2*?"),
    b"10.0.0.1 slots=1\n10.0.0.2 slots=2\n": (None, "10.0.0.1*1 10.0.0.2*2"),
    b"\tha\tslots=3\t\n": (None, "ha*3"),
    b"ha slots=2\r\n": (None, None),
    b"ha,hb:2\n": ("ha,hb*2", "ha,hb:2*?"),
    b"ha hb\n": (None, "ha*?"),
    b"-oProxyCommand=x:2\n": ("-oProxyCommand=x*2", None),
    b"": (None, None),  # MPICH starts all ranks on this machine
}


def written_down(text):
    if text is None:
        return None
    pairs = (part.rsplit("*", 1) for part in text.split())
    return {host.rpartition("@")[2]: "?" if ranks == "?" else int(ranks) for host, ranks in pairs}


def meant(content, launcher):
    ranks = {}
    for line in parse_hostfile(content, launcher):
        ranks.setdefault(line.host.rpartition("@")[2], []).append(line.slots)
    return {host: sum(n or 1 for n in given) for host, given in ranks.items()}


def test_valid_hostfiles_match_launchers():
    for content, started in READ.items():
        for launcher, text in zip(LAUNCHERS, started, strict=True):
            found, ranks = hostfile_problems(launcher, parse_hostfile(content, launcher)), written_down(text)
            if ranks is None:
                assert found, (launcher, content)
            elif not found:
                counted = meant(content, launcher)
                assert ranks == {host: "?" if n == "?" else counted[host] for host, n in ranks.items()}, content


@slow_ranks
@pytest.mark.skipif(MPIRUN is None or mpirun(MPIRUN)["vendor"] != "MPICH", reason="needs MPICH's mpirun")
def test_mpich_reads_hostfiles_as_recorded(tmp_path):
    """A program replaces ssh and runs the command here."""
    script = '[ "$1" = -x ] && shift\nASKED_AS=$1; shift\nexport ASKED_AS\nexec sh -c "$*"'
    ssh = program(tmp_path / "ssh", script)
    options = ["-launcher", "ssh", "-launcher-exec", ssh, "-iface", "lo", "-f", tmp_path / "hosts"]
    for content in (content for content in READ if content):
        (tmp_path / "hosts").write_bytes(content)
        words = [MPIRUN, *options, "sh", "-c", 'echo "$ASKED_AS"']
        done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60)
        started = done.stdout.split()
        found = {host.rpartition("@")[2]: started.count(host) for host in started}
        assert (found if done.returncode == 0 else None) == written_down(READ[content][0]), (content, done)


HOSTILE = (b"-oProxyCommand=touch", b"me@-oX", b"$(id)", "h\xe4".encode(), b"\x1b[31mha", b"h" * 2000)
MISREAD = (
    ("MPICH", b"ha:1\nhb slots=2\n", "line 2: MPICH requires a host and its ranks, such as node1:4"),
    ("MPICH", b"# nothing\n", "all ranks would run on this machine"),
    ("Open MPI", b"ha:2\n", "line 1: Open MPI requires a host and its ranks, such as node1 slots=4"),
    ("Open MPI", b"ha slots=2\r\n", r"slots=2\r"),
    ("Open MPI", b"", "no host is listed"),
    *(("MPICH", text, "line 1: ") for text in (b"ha:x", b"ha:0", b"ha:10001", b"ha 2", b"ha :2")),
    *(("Open MPI", text, "line 1: ") for text in (b"ha slots=x", b"ha slots=0", b"ha 2", b"ha cpus=3")),
    *((mpi, name + n, "line 1: ") for mpi in LAUNCHERS for name in HOSTILE for n in (b"", b":2", b" slots=2")),
)


@pytest.mark.parametrize(("launcher", "content", "words"), MISREAD)
def test_misread_lines_show_correct_form(launcher, content, words):
    lines = parse_hostfile(content, launcher)
    (found,) = hostfile_problems(launcher, lines)
    assert words in found and not any(line.host for line in lines if line.problem)


def doctor(tmp_path, content, *args):
    (tmp_path / "hosts").write_bytes(content)
    return inside("doctor", "--hostfile", "hosts", *args, cwd=tmp_path)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(hosts, "distant_mpi", lambda: {"problem": "", "vendor": "MPICH", "version": "5"})
    found = {"path": sys.executable, "vendor": "MPICH"}
    monkeypatch.setattr(hosts, "mpirun", lambda: found)
    return found


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Install an `ssh` that runs this script with host $2 and command $3."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(script):
        program(tmp_path / "ssh", f'while [ "$1" != -- ]; do shift; done\n{script}')

    return make


def test_doctor_prints_working_launch(here, tmp_path):
    result = doctor(tmp_path, b"localhost:1\n")
    assert result.returncode == 0 and not result.stderr
    assert "mpirun -n 1 -f hosts distgpt train --stage mpi" in result.stdout
    here["vendor"] = "Open MPI"
    refused(doctor(tmp_path, b"localhost:1\n"), 2, "MPICH", "Open MPI")


@pytest.mark.ci
@pytest.mark.parametrize(("content", "named"), [
    (b"localhost slots=2\n", ["line 1", "such as node1:4"]),
    (b"", ["all ranks would run on this machine"]),
    (b"no-such-host.invalid:1\n", ["no-such-host.invalid", "/etc/hosts"]),
    (b"-oProxyCommand=touch${IFS}owned:1\n", ["line 1"]),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_doctor_exits_2_with_first_problem(tmp_path, content, named):
    refused(doctor(tmp_path, content, "--ssh"), 2, *named)
    assert [*tmp_path.iterdir()] == [tmp_path / "hosts"]


@pytest.mark.parametrize(("words", "code", "named"), [
    ("--ssh", 2, "--hostfile"),
    ("--hostfile x --stage mpi", 2, "--hostfile and --stage"),
    ("--hostfile /dev/zero", 65, "/dev/zero"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_doctor_rejects_invalid_options(words, code, named):
    refused(inside("doctor", *words.split()), code, named)


def test_doctor_warns_of_too_many_ranks(here, tmp_path):
    found = json.loads(doctor(tmp_path, b"localhost:1\n127.0.0.1:9999\n", "--json").stdout)
    (crowded,) = found["warnings"]
    assert crowded.startswith("127.0.0.1: 9,999 ranks for")


def test_hostile_hostfile_prints_no_control_characters(here, tmp_path):
    content = b"\x1b]0;title\x07ha:1\nh\xe4\xff:2\n" + b"x" * 5000 + b"\nha\0:1\n" + b"[:1\n" * 500
    result = doctor(tmp_path, content)
    assert result.returncode == 2 and result.stdout.replace("\n", "").isprintable()
    assert len(result.stdout) < 20_000 and len(result.stderr) < 2_000


@pytest.mark.ci
@pytest.mark.parametrize(("name", "client", "expected"), [
    ("localhost", "127.0.0.1", "mpirun -n 1 -f hosts distgpt"),
    ("nowhere.invalid", "127.0.0.1", "mpirun -localhost 127.0.0.1 -n 1 -f hosts distgpt"),
    ("nowhere.invalid", "", "nowhere.invalid"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_doctor_finds_address_of_launcher(ssh, tmp_path, monkeypatch, name, client, expected):
    ssh(f"SSH_CONNECTION='{client} 1 2 3' exec sh -c \"$3\"")
    monkeypatch.setattr(hosts.platform, "node", lambda: name)
    # The host that answers is this machine, with the MPI that is installed here.
    monkeypatch.setattr(hosts, "_judged", lambda host, own: ([], []))
    found = json.loads(doctor(tmp_path, b"other:1\n", "--ssh", "--json").stdout)
    assert expected in " ".join([found["command"], *found["problems"]])


@pytest.mark.ci
@pytest.mark.usefixtures("here")
def test_doctor_distrusts_answers_over_ssh(ssh, tmp_path, monkeypatch):
    ssh(
        """case $2 in
            alike) echo Welcome; exec sh -c "$3";;
            liar) echo '{"identity": 3}';;
            closed) printf 'no\\033[2Jway\\n' >&2; exit 255;;
            10.*) exec sleep 600;;
        esac
        """
    )
    monkeypatch.setattr(hosts, "SECONDS", 20.0)
    found = json.loads(doctor(tmp_path, b"alike:1\nliar:1\nclosed:1\n", "--ssh", "--json").stdout)
    alike, liar, closed = found["hosts"]
    assert alike["facts"]["versions"]["distgpt"] and not alike["problem"]
    assert not liar["facts"] and "no facts printed" in liar["problem"] and "way" in closed["problem"]
    assert len(found["problems"]) >= 2
    monkeypatch.setattr(hosts, "SECONDS", 0.5)
    refused(doctor(tmp_path, b"10.0.0.1:1\n", "--ssh"), 2, "10.0.0.1: did not answer within 0.5 s")


def test_doctor_proposes_command_for_other_hosts(tmp_path, monkeypatch):
    """Open MPI uses the PATH of ssh, without an environment's; MPICH does not."""
    for vendor, content in (("MPICH", "localhost:2\n"), ("Open MPI", "localhost slots=2\n")):
        (tmp_path / "hosts").write_text(content)
        monkeypatch.setattr(hosts, "mpirun", lambda vendor=vendor: {"path": "/bin/mpirun", "vendor": vendor})
        works = {"problem": "", "vendor": vendor, "version": "5"}
        monkeypatch.setattr(hosts, "distant_mpi", lambda works=works: works)
        monkeypatch.setattr(hosts, "is_refused_as_root", lambda: True)
        found = hosts.examine(tmp_path / "hosts", ssh=False)
        words = shlex.split(found["command"])
        assert ("--allow-run-as-root" in words) == (vendor == "Open MPI")
        words = [word for word in words if word != "--allow-run-as-root"]
        assert words[:3] == ["mpirun", "-n", "2"] and words[-3:] == ["train", "--stage", "mpi"], found
        (program,) = words[5:-3]
        assert Path(program).is_absolute() == (vendor == "Open MPI")
        assert shutil.which(program, path=str(Path(sys.executable).parent))
