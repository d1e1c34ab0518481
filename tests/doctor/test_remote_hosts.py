"""`distgpt doctor --hostfile FILE --ssh` on two hosts, with everything that may be wrong there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from twohosts import (
    BIN,
    NET,
    Unavailable,
    call,
    inhabitants,
    lacking,
    plain_link,
    program,
    running,
    start_sshd,
    two_hosts,
    wait_for,
)

from distgpt.doctor import remote
from distgpt.jobs.readings import Trouble

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())

# What the Python of a session does before anything else, or which variables it has, by the name of the host.
SITES = {
    "clock": "import time\nreal = time.time\ntime.time = lambda: real() + 7\n",
    "numpy": "import importlib.metadata as m\nreal = m.version\n"
    "m.version = lambda name: '1.0' if name == 'numpy' else real(name)\n",
    "flood": "while True: print('x' * 1000)\n",
    "liar": 'print(\'{"identity": 3, "versions": []}\', flush=True)\nimport os; os.read(0, 1)\n'
    "print('{\"time\": 1.0}', flush=True)\nos._exit(0)\n",
    "rude": "import os\nos.write(2, b'hello\\n\\x1b]0;owned\\x07 no, never\\n')\nos._exit(3)\n",
    "noisy": "print('Welcome!\\n{\"news\": 1}\\n{')\n",
    "hangs": "import time\ntime.sleep(600)\n",
}
PACKAGES = {
    "older": ("distgpt", "__version__ = '0.0.9'\n"),
    "without-mpi": ("mpi4py", "raise ImportError('planted')\n"),
}
VARIABLES = {"basic": "NUMBA_CPU_NAME=x86-64 NUMBA_CPU_FEATURES=+sse2,-avx2"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A folder with an `ssh` that knows the second host under many names, and the hosts' namespaces."""
    folder = tmp_path_factory.mktemp("hosts")
    try:
        with two_hosts(folder, plain_link) as (_, _, spaces):
            daemons = []
            nobody = f"neigh add {NET}.78 lladdr 02:00:00:00:00:01 dev eth0"  # what is sent there is lost
            call("ip", "-n", spaces[0], *nobody.split())
            with running(daemons):
                blocks = [
                    configured(folder, spaces[1], daemons, name) for name in (*SITES, *PACKAGES, *VARIABLES)
                ]
                (folder / "bin").mkdir()
                (folder / "known").write_text(f"{NET}.2 {(folder / 'host.pub').read_text()}")
                call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "other")
                (folder / "changed").write_text(f"{NET}.2 {(folder / 'other.pub').read_text()}")
                blocks += [
                    f"Host locked\nHostName {NET}.2\nIdentityFile {folder / 'other'}\n",
                    f"Host stranger\nHostName {NET}.2\nUserKnownHostsFile /dev/null\n",
                    f"Host changed\nHostName {NET}.2\nUserKnownHostsFile {folder / 'changed'}\n",
                    f"Host closed\nHostName {NET}.2\nPort 9\n",
                    f"Host gone\nHostName {NET}.77\n",
                    f"Host silent\nHostName {NET}.78\n",
                    f"Host * !locked\nIdentityFile {folder / 'user'}\n",
                    f"Host *\nUserKnownHostsFile {folder / 'known'}\nIdentitiesOnly yes\n",
                ]
                (folder / "config").write_text("\n".join(blocks))
                program(folder / "bin" / "ssh", f'exec {shutil.which("ssh")} -F {folder / "config"} "$@"')
                yield folder, spaces
    except Unavailable as reason:
        pytest.skip(str(reason))


def configured(folder, space, daemons, name):
    """Start a daemon whose sessions differ, and tell ssh of it as a host of this name."""
    place, port = folder / name, 2200 + len(daemons)
    place.mkdir()
    if name in PACKAGES:
        package, text = PACKAGES[name]
        (place / package).mkdir()
        (place / package / "__init__.py").write_text(text)
    else:
        (place / "sitecustomize.py").write_text(SITES.get(name, ""))
    variables = f"PYTHONPATH={place} {VARIABLES.get(name, '')}".strip()
    daemons.append(start_sshd(folder, space, f"node-{name}", Port=port, SetEnv=variables))
    wait_for(
        lambda: (
            f":{port} "
            in subprocess.run(
                ["ip", "netns", "exec", space, "ss", "-ltn"], capture_output=True, text=True
            ).stdout
        )
    )
    return f"Host {name}\nHostName {NET}.2\nPort {port}\nHostKeyAlias {NET}.2\n"


def words(cluster, hosts, *args, python=None):
    """The command and its environment, on the first of the two hosts."""
    folder, spaces = cluster
    file = folder / "asked"
    file.write_text("".join(f"{host}:1\n" for host in hosts))
    start = ["ip", "netns", "exec", spaces[0], "unshare", "-u", "sh", "-c", 'hostname node1; exec "$0" "$@"']
    run = [python or sys.executable, "-m", "distgpt", "doctor", "--hostfile", file, "--ssh", *args]
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}", "COLUMNS": "100"}
    env["RES_OPTIONS"] = "timeout:1 attempts:1"  # there is nobody to ask for names
    return [*start, *map(str, run)], env


def asked(cluster, hosts, *args, **how):
    command, env = words(cluster, hosts, *args, **how)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def test_two_hosts_that_are_alike_are_ready(cluster):
    result = asked(cluster, [f"{NET}.1", f"{NET}.2"])
    assert result.returncode == 0 and not result.stderr
    assert "the hosts    are ready" in result.stdout and "worth a look" not in result.stdout
    found = json.loads(asked(cluster, [f"{NET}.1", f"{NET}.2", "noisy"], "--json").stdout)
    first, second, third = found["hosts"]
    assert first["here"] and not second["here"] and not found["missing"]
    assert first["facts"]["versions"] == second["facts"]["versions"] == third["facts"]["versions"]
    assert second["facts"]["identity"].startswith("node2 ") and third["facts"]["identity"].startswith(
        "node-noisy "
    )
    assert 0 < second["ssh_s"] < 60
    assert abs(second["clock_s"]) <= second["clock_doubt_s"] + 0.05 < 1


@pytest.mark.slow
def test_every_trouble_has_its_remedy(cluster):
    expected = {
        "locked": ("refuses your key", "ssh-copy-id locked"),
        "stranger": ("is not known to ssh", "log in once by hand and look at its key: ssh stranger"),
        "changed": ("has another host key", "ssh-keygen -R changed"),
        "closed": ("has no ssh daemon on its port", "start sshd there"),
        "silent": ("does not answer", "does a firewall let ssh through"),
        "gone": ("cannot be reached", "is it switched on"),
        "nobody.invalid": ("has a name that nobody knows", "/etc/hosts"),
        "older": ("has distgpt 0.0.9, which cannot answer", "the same version"),
        "flood": ("prints without end", "login scripts"),
        "liar": ("answers what distgpt never says", "the same version"),
        "rude": ("did not answer", "ssh -v"),
    }
    result = asked(cluster, expected, "--json")
    assert result.returncode == 2 and result.stderr.startswith("distgpt: a job on the hosts of")
    found = json.loads(result.stdout)
    said = {host["host"]: host["trouble"] for host in found["hosts"]}
    for host, (what, remedy) in expected.items():
        assert said[host], host
        assert what in said[host]["what"] and remedy in said[host]["remedy"], said[host]
    page = asked(cluster, ["rude", "locked", "without-mpi"])
    assert page.returncode == 2 and page.stdout.replace("\n", "").isprintable()
    words_of_page = " ".join(page.stdout.split())
    assert "without-mpi: --stage mpi needs mpi4py and an MPI library (planted)" in words_of_page
    assert "\\x1b]0;owned\\x07 no, never" in words_of_page


@pytest.mark.slow
def test_what_differs_is_worth_a_look(cluster):
    result = asked(cluster, ["clock", "numpy", "basic", f"{NET}.2"], "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    (clock,) = [text for text in found["warnings"] if "clock" in text]
    assert clock.startswith("clock: the clock is ") and " s ahead" in clock
    assert found["hosts"][0]["clock_s"] == pytest.approx(7, abs=0.5)
    (numpy,) = [text for text in found["warnings"] if text.startswith("numpy: ")]
    assert "numpy 1.0, and here" in numpy and "drift apart" in numpy
    (basic,) = [text for text in found["warnings"] if text.startswith("basic: ")]
    assert "another processor" in basic and "without avx2" in basic and "NUMBA_CPU_NAME" in basic
    assert len(found["warnings"]) == 3


@pytest.mark.slow
def test_a_host_of_two_names_is_found_by_what_it_answers(cluster):
    result = asked(cluster, [f"{NET}.2", f"root@{NET}.2"])
    assert result.returncode == 0 and "one host" not in result.stdout
    with (cluster[0] / "config").open("a") as config:
        config.write(f"\nHost second-name\nHostName {NET}.2\nHostKeyAlias {NET}.2\n")
    found = json.loads(asked(cluster, [f"{NET}.2", "second-name"], "--json").stdout)
    (warning,) = found["warnings"]
    assert warning.startswith(f"{NET}.2, second-name: one host")


@pytest.mark.slow
def test_an_interpreter_that_is_only_here_is_missed_there(cluster, tmp_path):
    """In a mount namespace of its own there is a Python that the other host does not have."""
    only, real = tmp_path / "only", Path(sys.prefix)
    only.mkdir()
    make = f"mount -t tmpfs t {only} && mkdir {only}/bin && cp {real}/pyvenv.cfg {only}"
    make += f" && ln -s {real}/lib {only}/lib && ln -s {real}/bin/python {only}/bin/python"
    command, env = words(cluster, [f"{NET}.2"], python=only / "bin" / "python")
    inside = ["unshare", "-m", "sh", "-c", f'{make} && exec "$0" "$@"', *command]
    result = subprocess.run(inside, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    said = " ".join(result.stdout.split())
    assert f"{NET}.2: has no distgpt for" in said and "install it there at the same path" in said


@pytest.mark.slow
def test_an_interrupt_leaves_no_ssh_behind(cluster):
    command, env = words(cluster, ["hangs"] * 2 + [f"{NET}.2"])
    left = lambda: [n for n in inhabitants(cluster[1][0]) if named(n) == "ssh"]  # noqa: E731
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        wait_for(left)
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=30)[1]
    assert child.returncode == 130 and said == "distgpt: interrupted\n"
    wait_for(lambda: not left())


def named(number):
    try:
        return Path(f"/proc/{number}/comm").read_text().strip()
    except OSError:
        return ""


def test_a_host_that_says_nothing_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr(remote, "SECONDS", 1.0)
    monkeypatch.setenv("PATH", f"{cluster[0] / 'quiet'}:{os.environ['PATH']}")
    (cluster[0] / "quiet").mkdir()
    program(cluster[0] / "quiet" / "ssh", "sleep 600 & echo; exec sleep 600")
    begun = time.monotonic()
    answers = remote.asked([f"host{i}" for i in range(40)], "/mpirun")
    assert time.monotonic() - begun < 20 and len(answers) == 40
    assert {answer.trouble for answer in answers.values()} == {
        Trouble("gave no answer within 1 s", "try it by hand: see ssh -v")
    }
