"""Change the code in many places and check that a test fails each time. Writes rates and survivors to rates.json.

    python tests/mutations/run.py record           # run once: record each test's function calls; slower than the tests
    python tests/mutations/run.py record FILES     # the same for new or changed test files
    python tests/mutations/run.py sample           # random mutants; exit code 1 if a directory's rate has fallen
    python tests/mutations/run.py sample gpu show  # in these directories
    python tests/mutations/run.py survivors        # the survivors in rates.json again, with new tests
    python tests/mutations/run.py listed [WORDS]   # mutants in mutations.py; exit code 1 if one survives

A mutant is killed if a test that passes without it fails or runs for too long. "equivalent" in rates.json lists
mutants that no test can detect, with reasons written by hand. They do not count.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from sampling import PER_ROOM, changed, sample

from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
RATES = Path(__file__).with_name("rates.json")
RECORD = ROOT / "build" / "coverage.json"
COPIED = ("distgpt", "tests", "data", "weights", "benchmarks", "docs", "pyproject.toml", "README.md")
CHOSEN = "not slow and not cluster and not rehearsal and not peer"
FIRST, MORE = (40, 8.0), (120, 25.0)  # tests, and seconds as recorded: first the likeliest killers
PLUGIN = """
import pytest
def pytest_runtest_logreport(report):
    if report.failed:
        print("\\nKILLER", report.nodeid, flush=True)
"""
TIMED = """
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        with open({!r}, "a") as out:
            out.write(f"{{report.nodeid}}\\t{{report.outcome}}\\t{{report.duration}}\\n")
"""
COLLECTED = """
def pytest_collection_finish(session):
    with open({!r}, "w") as out:
        out.write("\\n".join(item.nodeid for item in session.items))
"""
RESET = """
import sitecustomize
def pytest_runtest_logstart(nodeid, location):
    sitecustomize.begin_test()
"""


class Copy:
    """A copy of the repository that runs mutants sequentially."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        (folder / "plugins").mkdir()
        (folder / "plugins" / "killer.py").write_text(PLUGIN)
        self.clean: dict[tuple[str, ...], bool] = {}

    def fails(self, tests, seconds, file=None, text=None):
        """Run tests until one fails; return its name, or "" if all pass."""
        path = self.folder / "distgpt" / file if file else None
        before, times = (path.read_bytes(), path.stat()) if path else (b"", None)
        if path:
            path.write_text(text)
        options = ["-x", "-p", "no:cacheprovider", "-p", "killer", "-p", "no:xdist"]
        names = self.folder / "tests.txt"  # a file, because a name may be longer than an argument
        names.write_text("\n".join(tests))
        words = [sys.executable, "-B", "-m", "pytest", *options, f"@{names}"]
        python_path = f"{self.folder}:{self.folder / 'plugins'}"
        environment = {**os.environ, "PYTHONPATH": python_path, "DISTGPT_TEST_NOHUP": "1"}
        how = {"cwd": self.folder / "tests", "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, **how, text=True, errors="replace", start_new_session=True)
        try:
            told, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "TIMEOUT"
        finally:
            if path:
                path.write_bytes(before)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if process.returncode in (0, 5):
            return ""
        lines = (line for line in told.splitlines() if line.startswith("KILLER "))
        return next(lines, "IMPORT").removeprefix("KILLER ")

    def kills(self, tests, seconds, file, text):
        """Return the test that fails with this mutant but not without it, or ""."""
        while tests:
            killer = self.fails(tests, seconds, file, text)
            blamed = (short(killer),) if killer not in ("TIMEOUT", "IMPORT") else tuple(tests)
            if not killer:
                return ""
            if blamed not in self.clean:
                self.clean[blamed] = not self.fails(blamed, seconds)
            if self.clean[blamed]:
                return killer
            others = [test for test in tests if test not in blamed]
            if others == tests:  # the user selected a whole file
                sys.exit(f"{blamed[0]} fails already, without a mutant")
            tests = others
        return ""


def record(files):
    """Run all tests, or some files; record each test's duration and the functions that it calls."""
    known = json.loads(RECORD.read_text()) if files else {"seconds": {}, "functions": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "calls").mkdir()
        (folder / "times.py").write_text(TIMED.format(f"{name}/times.txt"))
        (folder / "reset.py").write_text(RESET)
        paths = {"PYTHONPATH": f"{Path(__file__).parent / 'tracing'}:{name}", "DISTGPT_TRACE": f"{name}/calls"}
        environment = {**os.environ, **paths, "DISTGPT_TRACED": str(ROOT / "distgpt")}
        words = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-m", CHOSEN]
        words += ["-p", "times", "-p", "reset", "-p", "no:cacheprovider", *files]
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment)
        calls = {line for path in (folder / "calls").iterdir() for line in path.read_text().splitlines()}
        times = [line.split("\t") for line in (folder / "times.txt").read_text().splitlines()]
    seconds = {short(test): float(took) for test, outcome, took in times if outcome == "passed"}
    again = {short(os.path.relpath(Path(file).resolve(), ROOT)) for file in files}
    kept = {test: s for test, s in known["seconds"].items() if not again & {test.partition("::")[0]}}
    functions = defaultdict(list)
    for function, tests in known["functions"].items():
        functions[function] = [test for test in tests if test in kept]
    for line in sorted(calls):
        test, _, function = line.partition("\t")
        if short(test) in seconds:
            functions[function].append(short(test))
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"seconds": kept | seconds, "functions": functions}))
    print(f"{len(seconds)} tests, {len(functions)} functions: {RECORD}")


def short(test):
    """Return the name of a test relative to tests/, without pytest-xdist's group."""
    return test.partition("@")[0].removeprefix("tests/")


def collected():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "names.py").write_text(COLLECTED.format(f"{folder}/names.txt"))
        environment = {**os.environ, "PYTHONPATH": folder}
        words = [sys.executable, "-m", "pytest", "--collect-only", "-p", "names", "-p", "no:cacheprovider"]
        subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        return {short(name) for name in Path(folder, "names.txt").read_text().splitlines()}


class Choice:
    """Return the tests that call a mutant's function, starting with fast and specific tests."""

    def __init__(self):
        recorded, there = json.loads(RECORD.read_text()), collected()
        self.seconds, self.tests = recorded["seconds"], defaultdict(set)
        self.of_file = defaultdict(set)
        for function, tests in recorded["functions"].items():
            file, _, name = function.partition(":")
            tests = there.intersection(tests)
            self.tests[file, name.partition(".<locals>")[0]].update(tests)
            self.of_file[file].update(tests)
        self.breadth = defaultdict(int)
        for tests in self.tests.values():
            for test in tests:
                self.breadth[test] += 1
        # Find callers by name, because the record does not include calls of compiled loops.
        self.names, self.imported = defaultdict(set), defaultdict(set)
        for path in (ROOT / "distgpt").rglob("*.py"):
            self._read(path, path.relative_to(ROOT / "distgpt").as_posix())

    def _read(self, path, file):
        def visit(node, function):
            for child in ast.iter_child_nodes(node):
                inner = function
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = f"{function}.{child.name}" if function else child.name
                elif isinstance(child, ast.Name | ast.Attribute):
                    self.names[getattr(child, "id", None) or child.attr].add((file, function))
                elif isinstance(child, ast.ImportFrom) and child.module:
                    self.imported[child.module.removeprefix("distgpt.").replace(".", "/") + ".py"].add(file)
                visit(child, inner)

        visit(ast.parse(path.read_text()), "")

    def of(self, file, function):
        tests, reached, around = set(), {(file, function)}, [(file, function)]
        while around and not tests and function:
            for place in around:
                tests |= self.tests.get(place, set())
            names = {name.rpartition(".")[2] for _, name in around if name}
            around = [place for name in names for place in self.names[name] if place not in reached]
            reached.update(around)
        # Code that runs at import is recorded only for tests that start a process.
        others = set(self.of_file[file])
        if not tests:
            for other in self.imported[file]:
                others |= self.of_file[other]
        parts = file.split("/")
        mirror = "/".join(parts[: 1 + (parts[0] == "core")]) + "/"  # its tests are most likely here

        def rank(test):
            likely = (1 if test in tests else 10) * (0.1 if test.startswith(mirror) else 1)
            return (0.05 + self.seconds[test]) * self.breadth[test] * likely

        return sorted(tests | others, key=rank)

    def cut(self, tests, most):
        """Return tests within these limits, those that are left, and the seconds of the first."""
        count, limit = most
        chosen, left, total = [], [], 0.0
        for test in tests:
            fits = len(chosen) < count and (not chosen or total + self.seconds[test] <= limit)
            (chosen if fits else left).append(test)
            total += self.seconds[test] * fits
        return chosen, left, total


def judge(mutant, copy, choice):
    """Return the test that kills a mutant, or ""."""
    text = changed(mutant, (ROOT / "distgpt" / mutant.file).read_bytes())
    left = choice.of(mutant.file, mutant.function)
    for most in FIRST, MORE:
        chosen, left, seconds = choice.cut(left, most)
        if chosen and (killer := copy.kills(chosen, 90 + 6 * seconds, mutant.file, text)):
            return killer
    return ""


def in_parallel(function, items):
    """Call function(item, copy) for all items, with a copy of the repository per core; yield in order."""
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        copies = SimpleQueue()
        for i in range(workers):
            copies.put(Copy(Path(name, str(i))))

        def work(item):
            copy = copies.get()
            begun = time.monotonic()
            try:
                return function(item, copy), time.monotonic() - begun
            finally:
                copies.put(copy)

        yield from zip(items, pool.map(work, items), strict=True)


def keep(known, results):
    """Write the rates of finished directories and keep the other rates."""
    finished = {room: of for room, of in results.items() if of["of"] + len(of["equivalent"]) == PER_ROOM}
    RATES.write_text(json.dumps({**known, **finished}, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def sampled(rooms, only_survivors=False):
    """Run the sample, or its survivors; write rates.json; return whether a directory's rate fell."""
    choice = Choice()
    known = json.loads(RATES.read_text()) if RATES.exists() else {}
    equivalent = {name: why for of in known.values() for name, why in of["equivalent"].items()}
    mutants = [m for m in sample(ROOT / "distgpt") if not rooms or m.room in rooms]
    results = defaultdict(lambda: {"killed": 0, "of": 0, "survived": [], "equivalent": {}})
    todo = []
    for mutant in mutants:
        room = results[mutant.room]
        if mutant.name in equivalent:
            room["equivalent"][mutant.name] = equivalent[mutant.name]
        elif only_survivors and mutant.name not in known[mutant.room]["survived"]:
            room["of"] += 1
            room["killed"] += 1
        else:
            todo.append(mutant)
    for mutant, (killer, took) in in_parallel(lambda m, copy: judge(m, copy, choice), todo):
        room = results[mutant.room]
        room["of"] += 1
        room["killed"] += bool(killer)
        if not killer:
            room["survived"].append(mutant.name)
        verdict = f"killed by {killer}" if killer else "SURVIVED"
        print(f"{verdict:60}  {mutant.name}  ({took:.0f} s)", flush=True)
        keep(known, results)

    def rate(of):
        return of["killed"] / max(1, of["of"])

    fallen = [room for room, now in results.items() if room in known and rate(now) < rate(known[room])]
    killed, total = (sum(of[key] for of in results.values()) for key in ("killed", "of"))
    print(f"{killed} of {total} killed, {100 * killed / max(1, total):.0f} %")
    for room in fallen:
        print(f"{room}: fewer are killed than before")
    return bool(fallen)


def listed(words):
    """Run the mutants of mutations.py; return whether one survives."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.fault for word in words)]

    def work(mutation, copy):
        text = (ROOT / "distgpt" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} is not there once"
        changed_text = text.replace(mutation.old, mutation.new)
        return copy.kills(mutation.tests.split(maxsplit=2), 600, mutation.file, changed_text)

    survivors = 0
    for mutation, (killer, took) in in_parallel(work, chosen):
        survivors += not killer
        print(f"{'killed' if killer else 'SURVIVED':8}  {mutation.fault}  ({took:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return survivors > 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", *files]:
            record(files)
        case ["sample", *rooms]:
            sys.exit(sampled(rooms))
        case ["survivors", *rooms]:
            sys.exit(sampled(rooms, only_survivors=True))
        case ["listed", *words]:
            sys.exit(listed(words))
        case _:
            sys.exit(__doc__)
