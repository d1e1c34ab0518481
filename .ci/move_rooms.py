"""Move the package's folders into twelve rooms, and rewrite what names them: python .ci/move_rooms.py.

Files map one to one. Run it again after a merge: it moves what still is in an old place, and rewrites the
rest. What imports don't show (lists of names in tests, depth of `__file__`) is edited by hand afterwards.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Old place → new place, below distgpt/. The first that fits counts.
MOVES = {
    "cli.py": "commands/cli.py",
    "counts.py": "core/model/counts.py",
    "launch": "cluster/launch",
    "layout": "cluster/affinity",
    "jobs": "cluster/jobs",
    "supervise/rooms.py": "cluster/supervise/host_slots.py",
    "supervise": "cluster/supervise",
    "decoding": "inference/decoding",
    "generation": "inference/generation",
    "serving": "inference/serving",
    "evaluation": "inference/evaluation",
    "rounded/loops": "inference/quantized",
    "rounded": "models/quantized",
    "adapters": "models/adapters",
    "formats": "models/formats",
    "texts": "corpora",
    "fleet/prometheus.py": "inference/serving/prometheus.py",
    "fleet": "callbacks/monitoring",
    "show/metrics.py": "core/saved/metrics.py",
    "guards": "callbacks",
    "doctor": "measure/doctor",
    "proofs": "measure/verification",
    "sweep/standings.py": "measure/sweep/ranking.py",
    "sweep": "measure/sweep",
}
# Tests follow their rooms, by folder.
TEST_MOVES = {
    "tests/jobs": "tests/cluster",
    "tests/layout": "tests/cluster",
    "tests/fleet": "tests/callbacks",
    "tests/doctor": "tests/measure",
    "tests/proofs": "tests/measure",
    "tests/sweep": "tests/measure",
    "tests/serving": "tests/inference",
    "tests/evaluation": "tests/inference",
    "tests/recorded": "tests/kernels",
    "tests/data": "tests/corpora",
}
NEW = {
    "cluster": """Where a run runs: launchers, cores and NUMA nodes, batch systems, restarts.

Not here: how ranks share a step (parallel), and what is sent between them (core/comm).""",
    "inference": """Generates text from weights: loops, prompts and chats, the server, scores.

Not here: the plain engine (core/generate), and how weights are stored (models).""",
    "models": """Weights in other forms: adapters, quantized weights, Hugging Face and GGUF files.

Not here: the architecture itself (core/model), and the project's own files (core/saved).""",
}
SKIP = ("benchmarks/results/", "data/", "weights/", ".ci/move_rooms.py")
ENDINGS = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".js", ".html", ".j2", ".ipynb", ""}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def moved(path: str) -> str:
    """Return the new place of a path below distgpt/; the same where it stays."""
    for old, new in MOVES.items():
        if path == old or path.startswith(f"{old}/"):
            return new + path[len(old) :]
    return path


def moved_test(name: str) -> str:
    folder, _, rest = name.removeprefix("tests/").partition("/")
    return f"{TEST_MOVES.get(f'tests/{folder}', f'tests/{folder}')}/{rest}".removesuffix("/")


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def tracked() -> list[str]:
    return git("ls-files").splitlines()


def move() -> None:
    for name in tracked():
        target = name
        if name.startswith("distgpt/"):
            target = f"distgpt/{moved(name.removeprefix('distgpt/'))}"
        if name.startswith("tests/"):
            target = moved_test(name)
        if target == name or not Path(name).exists():
            continue
        if Path(target).exists():
            raise SystemExit(f"{name}: {target} exists")
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(name).rename(target)
    subprocess.run(["find", "distgpt", "tests", "-type", "d", "-empty", "-delete"], check=True)
    for room, text in NEW.items():
        path = Path(f"distgpt/{room}/__init__.py")
        if not path.exists():
            path.write_text(f'"""{text}\n"""\n')


def rewritten(text: str, old_files: set[str], old_folders: set[str]) -> str:
    for old, new in MOVES.items():  # as modules
        pattern = rf"\bdistgpt\.{re.escape(dotted(old))}(?![\w])"
        text = re.sub(pattern, f"distgpt.{dotted(new)}", text)
        text = re.sub(rf"\bdistgpt/{re.escape(old)}(?=[/`\"'\s)]|$)", f"distgpt/{new}", text)

    def of_path(match: re.Match[str]) -> str:
        found = match.group()
        if f"tests/{found}" in old_files:
            return moved_test(f"tests/{found}").removeprefix("tests/")
        if found in old_files or found.rstrip("/") in old_folders:
            return moved(found.rstrip("/")) + "/" * found.endswith("/")
        return found

    text = re.sub(r"(?<![\w/.-])[a-z_]+(?:/[a-z_0-9]+)*\.(?:py|js|html)\b", of_path, text)
    text = re.sub(r"(?<=`)[a-z_]+(?:/[a-z_0-9]+)*/(?=`)", of_path, text)
    for old, new in TEST_MOVES.items():
        text = re.sub(rf"(?<![\w/]){old}/", f"{new}/", text)
    return text


def main() -> None:
    base = git("rev-list", "-n1", "HEAD").strip()
    names = [
        n.removeprefix("distgpt/") for n in git("ls-tree", "-r", "--name-only", base, "distgpt").splitlines()
    ]
    old_files = {name for name in names if moved(name) != name}
    tests = git("ls-tree", "-r", "--name-only", base, "tests").splitlines()
    old_files |= {name for name in tests if moved_test(name) != name}
    old_folders = {str(parent) for name in old_files for parent in Path(name).parents if str(parent) != "."}
    move()
    git("add", "--all")
    for name in tracked():
        path = Path(name)
        if name.startswith(SKIP) or path.suffix not in ENDINGS or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if (changed := rewritten(text, old_files, old_folders)) != text:
            path.write_text(changed)


if __name__ == "__main__":
    main()
