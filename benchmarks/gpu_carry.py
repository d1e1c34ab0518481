"""Prepare files for a GPU machine without a network: a directory for each block of gpu_session.sh.

    python benchmarks/gpu_carry.py A [N B C] [--into build/carry]

Requires a network and a C++ compiler, but no GPU. Depending on the block, a directory has cubins for the GPU
machine, wheels, losses of this CPU, training data, and the commit. Its size must be at most 64 MiB.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MOST = 64 << 20  # bytes per directory
ARCH, NVRTC, PYTHON = "sm_90", "13.0", "3.12"  # the GPU machine's; the cache key has the first two
SYSTEMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]

# Installed packages are skipped. NumPy, CuPy, pytest and pytest-xdist must be installed.
PACKAGE = ("click", "rich", "markdown-it-py", "mdurl", "pygments", "jinja2", "markupsafe", "tokenizers")
PACKAGE += ("safetensors",)
LOOPS = ("numba", "llvmlite")  # the largest by far
RANKS = ("mpi4py", "mpich")
CUDNN = ("nvidia-cudnn-frontend>=1.28,<1.33",)  # without it, distgpt's slower attention kernels run
SERVER = ("starlette", "uvicorn", "anyio", "h11", "idna", "sniffio", "typing-extensions")
NANOCHAT = ("rustbpe", "tiktoken", "regex")
WHEELS = {
    "A": (*PACKAGE, *LOOPS, *RANKS, *CUDNN, *SERVER, "pytest-timeout"),
    "N": (*PACKAGE, *LOOPS, *RANKS, *SERVER, "pytest-timeout"),
    "B": (*PACKAGE, *LOOPS, *CUDNN),
    "C": (*PACKAGE, *LOOPS, *CUDNN, *NANOCHAT),
}
LOSSES = {"A": (), "N": ("fast", "gpt-mini")}  # names of the cases; () means all
# The parts of a directory; the first file of some is temporary.
MADE = {
    "cache": ("cache", "cache.tar.xz"),
    "wheels": ("downloads", "wheels.tar.xz"),
    "losses": ("losses.json",),
    "texts": ("texts", "nanochat", "nanochat-base"),
}
COMPILED, TESTED, READ = "ABC", "A", "C"  # blocks with cubins, with cubins of tests, with training data


def main() -> int:
    args = arguments()
    if args.lacking:
        print("\n".join(lacking(args.lacking)))
        return 0
    if args.commit:
        commit, warning = commit_of_this_tree(args.commit)
        print(commit)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
        return 0
    too_large = []
    for block in args.block:
        folder = args.into.resolve() / block
        folder.mkdir(parents=True, exist_ok=True)
        fill(block, folder, args)
        sizes = {path.name: size_of(path) for path in sorted(folder.iterdir())}
        total = sum(sizes.values())
        parts = (f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
        print(f"{folder}: {total / 2**20:.1f} MiB:", ", ".join(parts), flush=True)
        too_large += [block] * (total > MOST)
    for block in too_large:
        print(what_to_leave_out(block, args.into.resolve() / block), file=sys.stderr)
    return int(bool(too_large))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prepare files for a GPU machine without a network.")
    parser.add_argument("block", nargs="*", help="A, N, B or C; all if none is named")
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "carry")
    parser.add_argument("--only", nargs="+", choices=tuple(MADE), help="create only these parts again")
    parser.add_argument("--quick", action="store_true", help="losses of toy sizes, no cubins of tests")
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--train", type=Path, help="for C: training documents as JSON lines with text")
    parser.add_argument("--val", type=Path, help="C: documents that are held out")
    parser.add_argument("--nanochat", type=Path, help="C: a checkout of it")
    parser.add_argument(
        "--nanochat-base", type=Path, help="NANOCHAT_BASE_DIR with documents and tokenizer, for C"
    )
    parser.add_argument(
        "--lacking", type=Path, help="print the wheels in a directory that this Python lacks, and exit"
    )
    parser.add_argument(
        "--commit",
        type=Path,
        metavar="FOLDER",
        help="print this tree's commit, from .git or a directory, and exit",
    )
    args = parser.parse_args()
    args.only = args.only or list(MADE)
    args.block = args.block or list(WHEELS)
    if unknown := [block for block in args.block if block not in WHEELS]:
        parser.error(f"there is no block {unknown[0]}; there are {', '.join(WHEELS)}")
    if not (args.lacking or args.commit):
        needs_of_texts(parser, args)
    return args


def needs_of_texts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    reads = "texts" in args.only and any(block in READ for block in args.block)
    if reads and not (args.train and args.val):
        parser.error("block C requires --train and --val")
    if bool(args.nanochat) != bool(args.nanochat_base):
        parser.error("--nanochat and --nanochat-base need each other")
    if not reads and (given := args.nanochat or args.train or args.val):
        parser.error(f"{given} requires block C with --train and --val")


def fill(block: str, folder: Path, args: argparse.Namespace) -> None:
    wanted = set(args.only)
    for old in (folder / name for part in args.only for name in MADE[part]):
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    # Remaining parts are from the tree in commit.txt, which may differ from this one.
    if not any((folder / name).exists() for name in ("cache.tar.xz", "losses.json")):
        (folder / "commit.txt").write_text(f"{described()}\n{digest()}\n")
    if "cache" in wanted and block in COMPILED:
        cubins(folder / "cache", folder.parent, block in TESTED and not args.quick)
        with tarfile.open(folder / "cache.tar.xz", "w:xz") as tar:
            tar.add(folder / "cache", "cache")
        shutil.rmtree(folder / "cache")
    if "wheels" in wanted:
        chosen = [each for each in WHEELS[block] if each.split(">")[0] not in args.without]
        wheels(chosen, folder / "wheels.tar.xz")
    if "losses" in wanted and block in LOSSES:
        only = ("--only", *LOSSES[block]) if LOSSES[block] else ()
        quick = ("--quick",) if args.quick else ()
        run(sys.executable, HERE / "gpu_agreement.py", "make", folder / "losses.json", *only, *quick)
    if "texts" in wanted and block in READ:
        texts(folder, args)


def run(*words: object, **more: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), **more}
    subprocess.run([*map(str, words)], check=True, cwd=HERE.parent, env=env)


def printed(*words: str) -> str:
    return subprocess.run(words, cwd=HERE.parent, capture_output=True, text=True).stdout


def described() -> str:
    if not ((HERE.parent / ".git").exists() and shutil.which("git")):
        return ""
    commit = printed("git", "describe", "--always", "--dirty").strip()
    return f"{commit} {printed('git', 'log', '-1', '--format=%cs %s').strip()}" if commit else ""


def digest() -> str:
    """Return a hash that identifies this tree's package, with or without git."""
    package, found = HERE.parent / "distgpt", hashlib.sha256()
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        # Skip files that git ignores, which are created at run time.
        if path.is_file() and "__pycache__" not in name.parts and name.parts[0] != "compiled":
            found.update(f"{name.as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()


def commit_of_this_tree(carried: Path) -> tuple[str, str]:
    """Return the commit from .git or from the directory, if it has the same package, and a warning."""
    file, here = carried / "commit.txt", described()
    if not file.exists():
        return here or "unknown", "" if here else f"there is neither .git nor {file}: no commit is known"
    commit, *digests = file.read_text().splitlines() or [""]
    if digests != [digest()]:
        about = f"{carried} was made from another tree, {commit or 'with an unknown commit'}"
        return here or "unknown", f"{about}: cubins will be compiled again, and losses may differ"
    found = here or commit
    return found or "unknown", "" if found else f"{file} names no commit"


def what_to_leave_out(block: str, folder: Path) -> str:
    found = f"{block}: more than {MOST >> 20} MiB"
    if not (folder / "wheels.tar.xz").exists():
        return found
    with tarfile.open(folder / "wheels.tar.xz") as tar:
        sizes = sorted(((each.size, each.name.split("-")[0]) for each in tar), reverse=True)
    largest = ", ".join(f"{name.replace('_', '-')} {size / 2**20:.1f}" for size, name in sizes[:5])
    return (
        f"{found}; --without PACKAGE leaves one out. The largest, in MiB unpacked: {largest}. "
        "GPU stages import Numba: leave out numba and llvmlite only where the machine has them"
    )


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def cubins(cache: Path, into: Path, of_tests: bool) -> None:
    """Compile with the GPU machine's version of NVRTC, from this Python or from a separate environment."""
    python = into / "nvrtc" / "bin" / "python"
    if (
        printed(sys.executable, "-c", "from distgpt.gpu.compiling import *; print(nvrtc_version())").strip()
        == NVRTC
    ):
        python = Path(sys.executable)
    elif not python.exists():
        run(sys.executable, "-m", "venv", into / "nvrtc")
        run(python, "-m", "pip", "install", "-q", "-e", ".[test]", f"nvidia-cuda-nvrtc=={NVRTC}.*")
    run(python, HERE / "kernel_resources.py", "--fill-cache", "--arch", ARCH, XDG_CACHE_HOME=str(cache))
    if of_tests:  # the tests run these kernels on the CPU; compile them for the GPU as well
        every = (HERE.parent / "tests" / "gpu").glob("test_*.py")
        files = sorted(each for each in every if "devices import" in each.read_text())
        words = (*files, "-m", "not slow", "-q", "-p", "no:cacheprovider")
        run(python, "-m", "pytest", *words, XDG_CACHE_HOME=str(cache), DISTGPT_FILL_CACHE=ARCH)


def wheels(packages: list[str], archive: Path) -> None:
    downloads = archive.parent / "downloads"
    about = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={PYTHON}",
        "-d",
        downloads,
    ]
    about += [f"--platform={system}" for system in SYSTEMS]
    run(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *about, *packages)
    pack(sorted(downloads.glob("*.whl")), archive)
    shutil.rmtree(downloads)


def pack(paths: list[Path], archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in paths:
            stored = io.BytesIO()
            with zipfile.ZipFile(path) as before, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as after:
                for info in before.infolist():
                    kept = zipfile.ZipInfo(info.filename, info.date_time)
                    kept.external_attr = info.external_attr  # keep programs executable
                    after.writestr(kept, before.read(info.filename))
            about = tarfile.TarInfo(path.name)
            about.size = stored.tell()
            stored.seek(0)
            tar.addfile(about, stored)


def lacking(folder: Path) -> list[str]:
    def is_there(wheel: Path) -> bool:
        try:
            return bool(importlib.metadata.version(wheel.name.split("-")[0]))
        except importlib.metadata.PackageNotFoundError:
            return False

    return [str(wheel) for wheel in sorted(folder.glob("*.whl")) if not is_there(wheel)]


def texts(folder: Path, args: argparse.Namespace) -> None:
    (folder / "texts").mkdir()
    for name in ("train", "val"):
        shutil.copyfile(getattr(args, name), folder / "texts" / f"{name}.jsonl")
    if args.nanochat:
        unneeded = shutil.ignore_patterns(".git", "*.jsonl", "dev")
        shutil.copytree(args.nanochat, folder / "nanochat", ignore=unneeded)
        shutil.copytree(args.nanochat_base, folder / "nanochat-base")
        for shard in (folder / "nanochat-base").rglob("*.parquet"):
            rewrite(shard)


def rewrite(shard: Path) -> None:
    """Write a shard as JSON lines for peers/for_nanochat, since pyarrow's wheel takes most of 64 MiB."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(shard)
    groups = [file.read_row_group(i).column("text").to_pylist() for i in range(file.num_row_groups)]
    with lzma.open(shard, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(group) + "\n" for group in groups)


if __name__ == "__main__":
    sys.exit(main())
