"""Make what a session on a GPU needs and its machine lacks: a folder for each block, to travel with the tree.

    python benchmarks/gpu_carry.py A [N B C] [--into build/carry]

Needs a network and a C++ compiler, no GPU. A folder has, as the block uses it: cubins by the device's NVRTC,
wheels, losses of this CPU, texts, the commit. Its size is printed, and refused above 64 MiB.
`benchmarks/gpu_session.sh` reads it.
"""

from __future__ import annotations

import argparse
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
MOST = 64 << 20  # bytes, of a folder
ARCH, NVRTC, PYTHON = "sm_90", "13.0", "3.12"  # of the device's machine: the cache's key has the first two
SYSTEMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]

# What is there already is not installed. NumPy, CuPy, pytest and pytest-xdist have to be there.
PACKAGE = ("click", "rich", "markdown-it-py", "mdurl", "pygments", "jinja2", "markupsafe", "tokenizers")
PACKAGE += ("safetensors",)
LOOPS = ("numba", "llvmlite")  # the largest by far
RANKS = ("mpi4py", "mpich")
CUDNN = ("nvidia-cudnn-frontend>=1.28,<1.33",)  # without it our own attention runs, and every figure is lower
SERVER = ("starlette", "uvicorn", "anyio", "h11", "idna", "sniffio", "typing-extensions")
NANOCHAT = ("rustbpe", "tiktoken", "regex")
WHEELS = {
    "A": (*PACKAGE, *LOOPS, *RANKS, *CUDNN, *SERVER, "pytest-timeout"),
    "N": (*PACKAGE, *LOOPS, *RANKS, "pytest-timeout"),
    "B": (*PACKAGE, *LOOPS, *CUDNN),
    "C": (*PACKAGE, *LOOPS, *CUDNN, *NANOCHAT),
}
LOSSES = {"A": (), "N": ("fast", "gpt-mini")}  # of which cases: (), all
COMPILED, TESTED, READ = "ABC", "A", "C"  # blocks with cubins, with those of the tests too, with texts


def main() -> int:
    args = arguments()
    if args.lacking:
        print("\n".join(lacking(args.lacking)))
        return 0
    too_large = []
    for block in args.block:
        folder = args.into.resolve() / block
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fill(block, folder, args)
        sizes = {path.name: size_of(path) for path in sorted(folder.iterdir())}
        total = sum(sizes.values())
        parts = (f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
        print(f"{folder}: {total / 2**20:.1f} MiB:", ", ".join(parts), flush=True)
        too_large += [block] * (total > MOST)
    if too_large:
        print(
            f"more than {MOST >> 20} MiB: {', '.join(too_large)}; --without leaves packages out",
            file=sys.stderr,
        )
    return int(bool(too_large))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make what a session on a GPU needs and its machine lacks.")
    parser.add_argument("block", nargs="*", help="A, N, B or C; all if none is named")
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "carry")
    parser.add_argument(
        "--only", nargs="+", choices=("cache", "wheels", "losses", "texts"), help="for a rehearsal"
    )
    parser.add_argument("--quick", action="store_true", help="losses of toy sizes, no cubins of tests")
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--train", type=Path, help="C: documents to learn from, a text on each line as JSON")
    parser.add_argument("--val", type=Path, help="C: documents that are held out")
    parser.add_argument("--nanochat", type=Path, help="C: a checkout of it")
    parser.add_argument(
        "--nanochat-base", type=Path, help="C: its NANOCHAT_BASE_DIR, with texts and tokenizer"
    )
    parser.add_argument(
        "--lacking", type=Path, help="print the wheels of a folder that this Python lacks; no more"
    )
    args = parser.parse_args()
    args.block = args.block or list(WHEELS)
    if unknown := [block for block in args.block if block not in WHEELS]:
        parser.error(f"there is no block {unknown[0]}; there are {', '.join(WHEELS)}")
    return args


def fill(block: str, folder: Path, args: argparse.Namespace) -> None:
    wanted = set(args.only or ("cache", "wheels", "losses", "texts"))
    (folder / "commit.txt").write_text(printed("git", "log", "-1", "--format=%h %cs %s"))
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


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def cubins(cache: Path, into: Path, of_tests: bool) -> None:
    """Compile by the device's version of NVRTC: that of this Python, or one in an environment of its own."""
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
    if of_tests:  # on the processor the tests run the same kernels: each is compiled for the GPU too
        every = (HERE.parent / "tests" / "gpu").glob("test_*.py")
        files = sorted(each for each in every if "devices import" in each.read_text())
        words = (*files, "-m", "not slow", "-q", "-p", "no:cacheprovider")
        run(python, "-m", "pytest", *words, XDG_CACHE_HOME=str(cache), DISTGPT_FILL_CACHE=ARCH)


def wheels(packages: list[str], archive: Path) -> None:
    """Fetch wheels for the machine's Python, and pack what they hold: xz makes half of what zip makes."""
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
    """Put wheels, stored instead of compressed, into one archive."""
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in paths:
            stored = io.BytesIO()
            with zipfile.ZipFile(path) as before, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as after:
                for info in before.infolist():
                    kept = zipfile.ZipInfo(info.filename, info.date_time)
                    kept.external_attr = info.external_attr  # programs stay executable
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
    if args.train is None or args.val is None:
        print("C: no texts without --train and --val", file=sys.stderr)
        return
    (folder / "texts").mkdir()
    for name in ("train", "val"):
        shutil.copyfile(getattr(args, name), folder / "texts" / f"{name}.jsonl")
    if args.nanochat and args.nanochat_base:
        unneeded = shutil.ignore_patterns(".git", "*.jsonl", "dev")
        shutil.copytree(args.nanochat, folder / "nanochat", ignore=unneeded)
        shutil.copytree(args.nanochat_base, folder / "nanochat-base")
        for shard in (folder / "nanochat-base").rglob("*.parquet"):
            rewrite(shard)


def rewrite(shard: Path) -> None:
    """Put a shard's texts into what peers/for_nanochat reads: pyarrow's wheel takes most of 64 MiB."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(shard)
    groups = [file.read_row_group(i).column("text").to_pylist() for i in range(file.num_row_groups)]
    with lzma.open(shard, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(group) + "\n" for group in groups)


if __name__ == "__main__":
    sys.exit(main())
