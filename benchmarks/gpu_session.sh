#!/usr/bin/env bash
# All that a short time on a GPU is for, in this order: facts, tests, benchmark, memory checks; a table comes last.
#
#     benchmarks/gpu_session.sh FOLDER [SECONDS]
#
# Everything is written into FOLDER as it is found. Nothing is installed, no part's failure stops the others, and
# the whole is over after SECONDS (590 if left out). PY is the Python to use, with CuPy, NumPy and pytest; PEER
# one with PyTorch, if that is another.
set -u
out=${1:?"usage: $0 FOLDER [SECONDS]"}
total=${2:-590}
py=${PY:-python3}
SECONDS=0

mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1

left() { echo $((total - SECONDS)); }
# limited SECONDS COMMAND …: with what it said, and how it ended
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
end=$((SECONDS + ($(left) > 400 ? 130 : 50)))
others=$(grep -lE 'devices import' tests/gpu/test_*.py | grep -vE 'test_cuda_(kernels|model)|test_bench_gpu')
for file in tests/gpu/test_cuda_kernels.py tests/gpu/test_cuda_model.py $others; do
    name=$(basename "$file" .py)
    room=$((end - SECONDS < 60 ? end - SECONDS : 60))
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

if command -v compute-sanitizer >/dev/null && [ "$(left)" -gt 45 ]; then
    DISTGPT_TEST_GPU=1 limited "$(($(left) - 15))" compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$py" -m pytest tests/gpu/test_cuda_kernels.py -x -p no:cacheprovider >"$out/memcheck.txt" 2>&1
    grep -E 'ERROR SUMMARY|exit code' "$out/memcheck.txt" | tail -2
fi

echo
cat "$out/table.txt"
echo "second $SECONDS of $total"
exit 0
