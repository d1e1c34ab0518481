#!/bin/sh
# Run the tests that carry weight, and short runs, in an arm64 Debian under emulation. As root; needs debootstrap
# and qemu-user-static with binfmt_misc. The Debian and its wheels stay in $ROOT. Emulation takes long.
set -eu
ROOT=$(realpath -m "${ROOT:-build/arm64}")
python=${PYTHON:-python3}
site=$ROOT/usr/local/lib/python3.11/dist-packages # of Debian 12

if [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then
  echo "no qemu for arm64 is registered; as root: apt install debootstrap qemu-user-static binfmt-support" >&2
  exit 69
fi
if [ ! -e "$ROOT/ready" ]; then
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 bookworm "$ROOT"
  for package in "$ROOT"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$ROOT"; done
  platforms=
  for version in 2_17 2_24 2_26 2_27 2_28; do platforms="$platforms --platform manylinux_${version}_aarch64"; done
  # shellcheck disable=SC2086
  set -- --quiet --only-binary=:all: --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
    $platforms --platform manylinux2014_aarch64
  "$python" -m pip download "$@" --dest "$ROOT/wheels" numpy numba click rich tokenizers matplotlib jinja2 \
    mpi4py mpich 'pytest<9.1' pytest-timeout safetensors
  "$python" -m pip install "$@" --no-index --no-deps --no-compile --target "$site" "$ROOT"/wheels/*.whl
  # What MPICH installs beside Python's packages, which --target leaves out.
  "$python" -m zipfile -e "$ROOT"/wheels/mpich-*.whl "$ROOT/mpich"
  cp -a "$ROOT"/mpich/mpich-*.data/data/. "$ROOT/usr/local/" && chmod +x "$ROOT"/usr/local/bin/*
  echo "root:x:0:0:root:/root:/bin/sh" >"$ROOT/etc/passwd"
  echo "127.0.0.1 localhost $(hostname)" >"$ROOT/etc/hosts"
  mkdir -p "$ROOT/repo" && touch "$ROOT/ready"
fi

trap 'umount "$ROOT/repo" "$ROOT/proc" "$ROOT/dev"' EXIT
mount -t proc proc "$ROOT/proc"
mount --bind /dev "$ROOT/dev"
mount --bind "$PWD" "$ROOT/repo"
inside() {
  nice -n 10 chroot "$ROOT" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root PYTHONPATH=/repo \
    NUMBA_CACHE_DIR=/tmp/numba LD_LIBRARY_PATH=/usr/local/lib COLUMNS=100 sh -c "cd /repo && $*"
}
small="--steps 5 --n-layer 1 --n-embd 32 --n-head 2 --seq-len 32 --batch-size 4 --threads 1 --progress plain"
inside "python3 -m distgpt train $small --set matmul=own --out /tmp/float32"
inside "python3 -m distgpt train $small --dtype bfloat16 --out /tmp/bfloat16"
inside "mpirun -n 2 python3 -m distgpt train $small --set matmul=own --stage mpi --out /tmp/mpi"
inside "python3 -m pytest -p no:cacheprovider --timeout 0 -m 'not slow' -k '${TESTS:-not float64}' \
  tests/core/cpu/test_matmul.py tests/core/cpu/test_int8.py tests/core/cpu/test_tiles.py"
