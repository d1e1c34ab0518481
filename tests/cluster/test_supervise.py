"""`distgpt supervise`: launch lines, restarts, and errors without a restart."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distgpt.cluster import supervise
from distgpt.cluster.jobs import reach
from distgpt.cluster.jobs.launchers import HostLine
from distgpt.cluster.jobs.reach import Answer
from distgpt.cluster.supervise import Supervisor, chosen, parse, read_rooms
from distgpt.core.base.errors import UsageError
from distgpt.core.config import RunConfig
from distgpt.core.saved.run_lock import RunLock
from hosts import program

from conftest import BIN, MPIRUN, SMALL, inside, metrics, popen, refused, slow_ranks, wait_for

NO_LIMITS = {"least": 1, "restarts": None, "stall": None}
# A launch line, its parsed parts, and the line for 3 ranks on the hosts in "new".
LINES = {
    "mpirun -n 8 -f hosts distgpt train --out x": (
        (8, "hosts", None),
        "mpirun -n 3 -f new env A=1 distgpt train --out x",
    ),
    "/opt/bin/mpiexec.hydra -np 8 -ppn 4 -machinefile=h /opt/distgpt train": (
        (8, "h", "4"),
        "/opt/bin/mpiexec.hydra -np 3 -ppn 4 -machinefile new env A=1 /opt/distgpt train",
    ),
    "nice mpirun --hostfile h --np 2 -N 1 -x Z python3 -m distgpt tune --out x": (
        (2, "h", "1"),
        "nice mpirun --hostfile new --np 3 -N 1 -x Z env A=1 python3 -m distgpt tune --out x",
    ),
    "mpirun -n 2 numactl -l distgpt train -n 5": ((2, None, None), "mpirun -n 3 numactl -l env A=1 distgpt train -n 5"),
    "srun -n 8 -f distgpt train": ((1, None, None), "srun -n 8 -f env A=1 distgpt train"),
    "mpirun -n 2 python3 -P /a/distgpt train": ((2, None, None), "mpirun -n 3 env A=1 python3 -P /a/distgpt train"),
    "distgpt train --out x": ((1, None, None), "distgpt train --out x"),
}
# Invalid launch lines with --min-ranks 2.
WRONG = {
    "mpirun -n 2 distgpt infer": "pass the launch line",
    "train --out x": "pass the launch line",
    "mpirun -n 1 distgpt train : -n 1 distgpt train": "the :",
    "mpirun -n 2 -hosts a,b distgpt train": "-hosts",
    "mpirun --host=a,b distgpt train": "--host",
    "mpirun -f h distgpt train": "-n 8",
    "mpirun -n x distgpt train": "-n 8",
    "distgpt train": "--out",
    "distgpt train --log-format json": "--out",
    "distgpt train --out x --resume y": "omit --resume",
    "distgpt train --out x": "--min-ranks 2",
    "mpirun -n 2 -f nowhere distgpt train --out x": "nowhere",
}


@pytest.mark.parametrize("text", LINES)
def test_launch_line_is_parsed_and_moved(text):
    (ranks, hosts, each), moved = LINES[text]
    line = parse(text.split())
    assert (line.ranks, line.value("hostfile"), line.value("each")) == (ranks, hosts, each)
    assert " ".join(line.words("A=1", 3, Path("new"))) == moved


@pytest.mark.parametrize("text", WRONG)
def test_invalid_launches_are_rejected(text):
    refused(inside("supervise", "--min-ranks", "2", "--", *text.split()), 2, WRONG[text])


def test_hostfile_lines_are_slots(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("# ours\na:2\n\nb:2 user=me\nc\n")

    def of(vendor, words):
        monkeypatch.setattr(supervise, "mpirun", lambda program: {"vendor": vendor})
        return read_rooms(parse(["mpirun", *words.split(), "-f", str(tmp_path / "hosts"), "distgpt", "train"]))

    found = of("MPICH", "-n 4")
    assert found == [HostLine("a:2", "a", 2), HostLine("b:2 user=me", "b", 2), HostLine("c", "c", 1)]
    assert of("MPICH", "-n 4 -ppn 3")[2].slots == 3
    for vendor, words, why in (
        ("MPICH", "-n 6", "only 5 slots for 6 ranks"),
        ("Open MPI", "-n 4", "such as node1 slots=4"),
    ):
        with pytest.raises(UsageError, match=why):
            of(vendor, words)
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    with pytest.raises(UsageError, match="set the slots of each host"):
        of("Open MPI", "-n 2")
    everywhere = [room.host for room in chosen(found, {"a", "b", "c"}, 4)]
    assert everywhere == ["a", "b"]  # c is spare
    assert [room.host for room in chosen(found, {"a", "c"}, 4)] == ["a", "c"]
    assert [room.host for room in chosen(found, {"b", "c"}, 2)] == ["b"]


# A job that ends as planned in a file: per start a line with the step of its metrics and the exit code.
JOB = """
shift
while [ "$1" != --out ]; do shift; done
out=$2
echo start >> "$out/starts"
read -r step code <<END
$(sed -n "$(wc -l < "$out/starts")p" "$out/plan")
END
echo "{\\"step\\": $step, \\"loss\\": 1}" >> "$out/metrics.jsonl"
echo "distgpt: reason $code" >&2
case $code in hang) sleep 60;; *) exit $code;; esac
"""
ENDS = {
    "done": ([(9, 0)], {}, 0, ""),
    "a lost rank": ([(5, 9), (9, 0)], {}, 0, "after step 5: a rank was killed"),
    "saved": ([(5, 75), (8, 75), (9, 0)], {}, 0, "start 3, from the beginning"),
    "three times": ([(5, 70), (5, 1), (4, 1)], {}, 1, "3 times without a step beyond 5"),
    "in the end": ([(5, 9), (5, 9), (6, 9), (6, 9), (9, 0)], {}, 0, ""),
    "usage": ([(5, 2)], {}, 2, "not restarted, because it would fail again: exit code 2"),
    "data": ([(5, 65)], {}, 65, "not restarted"),
    "not finite": ([(5, 76)], {}, 76, "not restarted"),
    "a host that errs": ([(5, 71)], {}, 71, "not restarted"),
    "often": ([(5, 9), (6, 137)], {"restarts": 1}, 137, "reached --restarts 1"),
    "no step": ([(5, "hang"), (9, 0)], {"stall": 0.5}, 0, "after step 5: no step for"),
}  # fmt: skip


def job(folder, plan):
    (out := folder / "run").mkdir()
    (out / "plan").write_text("".join(f"{step} {code}\n" for step, code in plan))
    return [str(program(folder / "distgpt", JOB)), "train", "--out", str(out)]


@pytest.mark.ci
@pytest.mark.parametrize("name", ENDS)
def test_supervisor_restarts_recoverable_jobs(name, tmp_path, monkeypatch, capsys):
    plan, limits, code, words = ENDS[name]
    monkeypatch.setattr(supervise, "PAUSE", 0.0)
    monkeypatch.setattr(supervise, "SECONDS_BETWEEN_LOOKS", 0.02)
    found = Supervisor(parse(job(tmp_path, plan)), tmp_path / "run", False, **NO_LIMITS | limits).run()
    said = capsys.readouterr().err
    assert found == code and words in said, said
    assert (tmp_path / "run" / "starts").read_text().count("start") == len(plan)


@pytest.mark.ci
@pytest.mark.parametrize("number, passed, code", [
    (signal.SIGTERM, "TERM", 143),
    (signal.SIGHUP, "TERM", 129),
    (signal.SIGUSR2, "USR1", 75),
])  # fmt: skip
def test_supervisor_forwards_signals_and_ends(number, passed, code, tmp_path):
    words = job(tmp_path, [(5, 0)])
    trap = f'trap \'echo came > "$out/came"; exit 75\' {passed}\necho ready > "$out/ready"\nsleep 60 & wait\n'
    program(Path(words[0]), JOB.replace('echo "{', f'{trap}\necho "{{'))
    with popen("supervise", "--", *words, stderr=subprocess.PIPE, text=True) as process:
        wait_for((tmp_path / "run" / "ready").exists)
        os.kill(process.pid, number)
        assert process.wait(20) == code
    assert (tmp_path / "run" / "came").exists() and (tmp_path / "run" / "starts").read_text() == "start\n"


@pytest.mark.ci
@pytest.mark.smoke
def test_supervisor_logs_json_like_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "PAUSE", 0.0)
    words = [*job(tmp_path, [(5, 9), (9, 70), (9, 2)]), "--log-format", "json"]
    result = inside("supervise", "--", *words)
    said = [json.loads(line) for line in result.stderr.splitlines()]
    assert result.returncode == 2 and {(each["event"], each["level"]) for each in said} == {("supervisor", "notice")}
    assert said[0]["message"] == "the job ended after step 5: a rank was killed"
    assert said[-1]["message"] == "not restarted, because it would fail again: exit code 2"


@pytest.fixture
def three_hosts(tmp_path, monkeypatch):
    answers = {host: Answer(f"own-{host}") for host in ("a", "b", "c")}
    later = []  # changes after each query

    def clean(hosts, mark):
        found = {host: answers[host] for host in hosts}
        answers.update(later.pop(0) if later else {})
        return found

    monkeypatch.setattr(supervise, "clean", clean)
    monkeypatch.setattr(supervise, "clean_here", lambda mark: Answer("here"))
    monkeypatch.setattr(supervise, "mpirun", lambda program: {"vendor": "MPICH"})
    monkeypatch.setattr(supervise, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    (tmp_path / "hosts").write_text("a:4\nb:4\nc:3\n")
    words = ["mpirun", "-n", "8", "-f", str(tmp_path / "hosts"), "distgpt", "train"]

    def place(**limits):
        found = Supervisor(parse(words), tmp_path / "run", False, **NO_LIMITS | limits).place()
        return [room.host for room in found.rooms], found.ranks

    return place, answers, later


@pytest.fixture
def begun(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(RunConfig().with_values({"batch_size": 24}).to_toml())
    return tmp_path / "run"


def test_new_run_requires_all_hosts(three_hosts, capsys):
    place, answers, _ = three_hosts
    assert place() == (["a", "b"], 8) and "8 ranks on a, b" in capsys.readouterr().err
    answers["a"] = Answer(problem="connect to host a: No route to host")
    with pytest.raises(UsageError, match=r"a cannot be used .*No route.* all 8"):
        place()


@pytest.mark.parametrize(
    ("lost", "least", "hosts", "ranks"), [("a", 1, ["b", "c"], 6), ("ac", 3, ["b"], 4), ("bc", 4, ["a"], 4)]
)
@pytest.mark.usefixtures("begun")
def test_ranks_use_free_slots_and_divide_the_batch(three_hosts, capsys, lost, least, hosts, ranks):
    place, answers, _ = three_hosts
    answers.update(dict.fromkeys(lost, Answer(problem="not an answer")))
    assert place(least=least) == (hosts, ranks)
    assert f"{ranks} ranks on {', '.join(hosts)}; not to be used: {', '.join(lost)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lost", "room", "least", "hosts", "ranks"), [("ab", 3, 6, ["a", "c"], 6), ("a", 6, 7, ["a", "b"], 8)]
)
@pytest.mark.usefixtures("begun")
def test_supervisor_waits_for_hosts(three_hosts, capsys, lost, room, least, hosts, ranks):
    place, answers, later = three_hosts
    answers.update(dict.fromkeys(lost, Answer(problem="not an answer")))
    later += [{"a": Answer("own-a")}]
    assert place(least=least) == (hosts, ranks)
    waits = f"waiting for {', '.join(lost)}: {room} of at least {least} ranks available"
    assert waits in capsys.readouterr().err


HOLD = """
import sys
from pathlib import Path
from distgpt.core.saved import run_lock
run_lock.platform.node = lambda: "own-b"
lock = run_lock.RunLock(Path(sys.argv[1]))
lock.claim()
print("held", flush=True)
sys.stdin.readline()
try:
    lock.refuse_taken()
except Exception as error:
    print(error, flush=True)
lock.release()
"""


@pytest.mark.ci
def test_lock_of_host_that_never_answered_is_taken_over(three_hosts, begun, capsys):
    place, answers, _ = three_hosts
    hold = HOLD.replace("own-b", "b")
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(begun)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        answers["b"] = Answer(problem="No route to host")
        assert place(least=5) == (["a", "c"], 6) and f"process {other.pid} on b" in capsys.readouterr().err
        other.communicate(b"\n")


@pytest.mark.ci
def test_directory_is_taken_over_only_from_lost_host(three_hosts, begun, capsys):
    place, answers, later = three_hosts
    words = [sys.executable, "-c", HOLD, str(begun)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        for problem in ("ssh: connect to host b port 22: Connection refused", "not an answer"):
            answers.update(a=Answer(), b=Answer("own-b"), c=Answer())
            later.append({"a": Answer("own-a"), "b": Answer(problem=problem), "c": Answer("own-c")})
            assert RunLock(begun).is_held() and place(least=5) == (["a", "c"], 6)
        told = next(line for line in capsys.readouterr().err.splitlines() if str(begun) in line)
        assert f"process {other.pid} on own-b" in told
        mine = RunLock(begun)
        mine.claim()
        try:
            said, _ = other.communicate("\n")  # the lost host is no longer the owner
            assert f"in use by process {os.getpid()} on {platform.node()}" in said
            mine.refuse_taken()
        finally:
            mine.release()


@pytest.mark.ci
def test_leftover_processes_are_found_and_killed():
    mark = f"DISTGPT_TEST={os.getpid()}"
    sleep = ["sh", "-c", "sleep 60 & echo on; wait"]
    env = dict(os.environ, DISTGPT_TEST=str(os.getpid()))
    with subprocess.Popen(sleep, env=env, stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout.readline() == "on\n"
        assert reach.clean(["localhost"], f"{mark}0") == {"localhost": Answer(platform.node())}
        assert ours.poll() is None
        reach.clean(["localhost"], mark)
        assert ours.wait(5) == -signal.SIGKILL


@pytest.mark.ci
@pytest.mark.parametrize("shell", ["sh", "csh"])
def test_hosts_answer_in_any_login_shell(shell, tmp_path, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    program(tmp_path / "ssh", f'while [ "$1" != -- ]; do shift; done\nexec {shell} -c "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert reach.clean(["192.0.2.1"], "DISTGPT_TEST=none") == {"192.0.2.1": Answer(platform.node())}


@slow_ranks
def test_supervised_run_survives_killed_rank(tmp_path):
    words = ["train", "--stage", "mpi", *SMALL, "--steps", "60", "--save-every", "20", "--out"]
    line = [MPIRUN, "-n", "2", str(BIN / "distgpt"), *words]
    assert subprocess.run([*line, tmp_path / "whole"], capture_output=True).returncode == 0
    out = tmp_path / "run"
    with popen("supervise", "--", *line, str(out), stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("step-*")), 60)
        os.kill(json.loads((out / "running.json").read_text())["pid"], signal.SIGKILL)
        killed = time.monotonic()
        said = process.communicate(timeout=100)[1]
    assert process.returncode == 0 and "start 2, from step" in said, said
    assert time.monotonic() - killed < 60 and list(metrics(out)) == list(range(1, 61))
    same = [path.read_bytes() for path in (tmp_path / "whole" / "weights.safetensors", out / "weights.safetensors")]
    assert same[0] == same[1]
