#!/usr/bin/env bash
# A short session on a GPU, in this order: facts, tests, benchmark, memory checks; a table comes last.
#
#     CACHE=FOLDER benchmarks/gpu_session.sh fill          before it, without a GPU: compile the kernels
#     CACHE=FOLDER benchmarks/gpu_session.sh OUT [SECONDS]  on the GPU
#
# Everything is written into OUT as it is found. Nothing is installed, no part's failure stops the others, and
# the whole is over after SECONDS (590 if left out). PY is the Python to use, with CuPy, NumPy and pytest; PEER
# one with PyTorch, if that is another. CACHE holds for one version of NVRTC and one kind of GPU (ARCH, sm_90
# if left out); without it about 60 kernels are compiled in the session.
set -u
out=${1:?"usage: $0 FOLDER [SECONDS]"}
total=${2:-590}
py=${PY:-python3}
SECONDS=0

absolute() { mkdir -p "$1" && (cd "$1" && pwd); }
if [ -n "${CACHE:-}" ]; then CACHE=$(absolute "$CACHE") || exit 1; fi
filling=
if [ "$out" = fill ]; then filling=yes; else out=$(absolute "$out") || exit 1; fi
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
if [ -n "${CACHE:-}" ]; then export XDG_CACHE_HOME=$CACHE; fi

# The tests of what runs on a GPU, the kernels' first.
others=$(grep -lE 'devices import' tests/gpu/test_*.py | grep -vE 'test_cuda_(kernels|model)|test_bench_gpu')
tests="tests/gpu/test_cuda_kernels.py tests/gpu/test_cuda_model.py $others"

if [ -n "$filling" ]; then
    : "${CACHE:?"name a folder: CACHE=FOLDER $0 fill"}"
    "$py" benchmarks/kernel_resources.py --fill-cache --arch "${ARCH:-sm_90}" || exit 1
    # On the processor the tests run the same kernels: each is compiled for the GPU too.
    # shellcheck disable=SC2086
    DISTGPT_FILL_CACHE=${ARCH:-sm_90} exec "$py" -m pytest $tests -q -p no:cacheprovider
fi

left() { echo $((total - SECONDS)); }
# limited SECONDS COMMAND …: with its output and exit code
limited() {
    local limit=$1
    shift
    echo "\$ $*"
    timeout --signal=INT --kill-after=8 "$limit" "$@" </dev/null
    echo "[exit code $?]"
}

{
    date -u
    limited 20 nvidia-smi
    limited 20 nvidia-smi -q -d CLOCK,POWER,PERFORMANCE
    limited 10 git log -1 --oneline
    limited 60 "$py" -m pip list --disable-pip-version-check
    limited 60 "$py" -c 'from distgpt.cli import main; main()' doctor
} >"$out/facts.txt" 2>&1

# A process for each file, so that a kernel that breaks the device breaks no other file's tests.
# The longest compile the loops of the processor, against which they compare, on a machine that has none yet.
end=$((SECONDS + ($(left) > 500 ? 240 : $(left) > 400 ? 130 : 50)))
for file in $tests; do
    name=$(basename "$file" .py)
    room=$((end - SECONDS < 120 ? end - SECONDS : 120))
    if [ $room -lt 5 ]; then
        echo "$name: no time left"
        continue
    fi
    DISTGPT_TEST_GPU=1 limited $room "$py" -m pytest "$file" --tb=short --maxfail=25 \
        -p no:cacheprovider --junitxml="$out/$name.xml" >"$out/$name.txt" 2>&1
    echo "$name: $(grep -E '(passed|failed|errors?|skipped).* in [0-9]' "$out/$name.txt" | tail -1)" \
        "$(tail -1 "$out/$name.txt")"
    grep -E '^(FAILED|ERROR) ' "$out/$name.txt" | cut -c1-180 | head -4
done
echo "tests took until second $SECONDS"

seconds=$(($(left) - 25))
limited "$((seconds + 10))" "$py" benchmarks/gpu.py --seconds "$seconds" --out "$out/gpu.json" \
    ${PEER:+--peer "$PEER"} >"$out/table.txt" 2>"$out/benchmark.log"

# Memory errors first: 45 s on an H100. The others take minutes.
for tool in memcheck racecheck synccheck; do
    command -v compute-sanitizer >/dev/null && [ "$(left)" -gt 60 ] || break
    DISTGPT_TEST_GPU=1 limited "$(($(left) - 15))" compute-sanitizer --tool $tool --error-exitcode 9 \
        "$py" -m pytest tests/gpu/test_attention.py tests/gpu/test_cuda_kernels.py -k 'attention or bfloat16' -x \
        -p no:cacheprovider >"$out/$tool.txt" 2>&1
    echo "$tool: $(grep -E 'SUMMARY|exit code' "$out/$tool.txt" | tail -2 | tr '\n' ' ')"
done

echo
cat "$out/table.txt"
echo "second $SECONDS of $total"
exit 0
