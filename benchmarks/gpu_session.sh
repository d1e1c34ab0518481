#!/usr/bin/env bash
# A short session on a GPU: its parts one after the other, what matters most first, a table at the end.
#
#     CACHE=FOLDER benchmarks/gpu_session.sh fill          before it, without a GPU: compile the kernels
#     CACHE=FOLDER benchmarks/gpu_session.sh OUT [SECONDS]  on the GPU
#
# Everything is written into OUT as it is found. Nothing is installed, no part's failure stops the others, and
# the whole is over after SECONDS (590 if left out). PARTS names parts to do, all in this order if left out:
#
#     facts kernels new agreement pytorch faster memcheck racecheck synccheck table tests rest
#
# so that a second call does what the first had no time for. PY is the Python to use, with CuPy, NumPy and pytest;
# PEER one with PyTorch, if that is another. CACHE holds for one version of NVRTC and one kind of GPU (ARCH, sm_90
# if left out); without it about 60 kernels are compiled in the session.
set -u
out=${1:?"usage: $0 FOLDER [SECONDS]"}
total=${2:-590}
py=${PY:-python3}
parts=${PARTS:-facts kernels new agreement pytorch faster memcheck racecheck synccheck table tests rest}
SECONDS=0

absolute() { mkdir -p "$1" && (cd "$1" && pwd); }
if [ -n "${CACHE:-}" ]; then CACHE=$(absolute "$CACHE") || exit 1; fi
filling=
if [ "$out" = fill ]; then filling=yes; else out=$(absolute "$out") || exit 1; fi
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
if [ -n "${CACHE:-}" ]; then export XDG_CACHE_HOME=$CACHE; fi

# The tests of what runs on a GPU, but for the kernels'.
others=$(grep -lE 'devices import' tests/gpu/test_*.py | grep -vE 'test_cuda_(kernels|model)|test_bench_gpu')
others="tests/gpu/test_cuda_model.py $others"

if [ -n "$filling" ]; then
    : "${CACHE:?"name a folder: CACHE=FOLDER $0 fill"}"
    "$py" benchmarks/kernel_resources.py --fill-cache --arch "${ARCH:-sm_90}" || exit 1
    # On the processor the tests run the same kernels: each is compiled for the GPU too.
    # shellcheck disable=SC2086
    DISTGPT_FILL_CACHE=${ARCH:-sm_90} exec "$py" -m pytest tests/gpu/test_cuda_kernels.py $others -q \
        -p no:cacheprovider
fi

left() { echo $((total - SECONDS)); }
# limited SECONDS COMMAND …: with its output and exit code; not longer than there is time
limited() {
    local limit=$1
    shift
    if [ "$limit" -gt $(($(left) - 10)) ]; then limit=$(($(left) - 10)); fi
    if [ "$limit" -lt 5 ]; then
        echo "[no time left for $*]"
        return
    fi
    echo "\$ $*"
    timeout --signal=INT --kill-after=8 "$limit" "$@" </dev/null
    echo "[exit code $?]"
}

# tested SECONDS NAME ARGUMENT …: pytest with these arguments into OUT/NAME, and a line about it
tested() {
    local limit=$1 name=$2
    shift 2
    DISTGPT_TEST_GPU=1 limited "$limit" "$py" -m pytest "$@" --tb=short --maxfail=25 -p no:cacheprovider \
        --junitxml="$out/$name.xml" >"$out/$name.txt" 2>&1
    echo "$name: $(grep -E '(passed|failed|errors?|skipped).* in [0-9]' "$out/$name.txt" | tail -1)" \
        "$(tail -1 "$out/$name.txt")"
    grep -E '^(FAILED|ERROR) ' "$out/$name.txt" | cut -c1-180 | head -4
}

# measured SECONDS NAME GROUP …: groups of the benchmark into OUT/NAME.json
measured() {
    local limit=$1 name=$2
    shift 2
    if [ "$limit" -gt $(($(left) - 25)) ]; then limit=$(($(left) - 25)); fi
    limited $((limit + 10)) "$py" benchmarks/gpu.py --only "$@" --seconds "$limit" --out "$out/$name.json" \
        ${PEER:+--peer "$PEER"} >"$out/$name.txt" 2>"$out/$name.log"
}

# sanitized SECONDS TOOL NAME FILE WORDS: tests of kernels under one of the sanitizer's tools
sanitized() {
    local tool=$2 name=$2-$3
    command -v compute-sanitizer >/dev/null || return
    DISTGPT_TEST_GPU=1 limited "$1" compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$py" -m pytest "tests/gpu/$4" -k "$5" -x -p no:cacheprovider >"$out/$name.txt" 2>&1
    echo "$name: $(grep -E 'SUMMARY|exit code' "$out/$name.txt" | tail -2 | tr '\n' ' ')"
}

facts() {
    {
        date -u
        limited 20 nvidia-smi
        limited 20 nvidia-smi -q -d CLOCK,POWER,PERFORMANCE
        limited 10 git log -1 --oneline
        limited 30 "$py" -m pip list --disable-pip-version-check
        limited 30 "$py" -c 'from distgpt.cli import main; main()' doctor
    } >"$out/facts.txt" 2>&1
}

kernels() { tested 90 kernels tests/gpu/test_cuda_kernels.py; }

# What no GPU has run yet, and what has a file of its own.
new() { tested 90 new tests/gpu/test_float8.py tests/gpu/test_second_stream_on_gpu.py; }

# 50 steps of a preset in its full size, on the GPU and on the processor, whose loops a new machine compiles first.
agreement() { tested 120 agreement tests/gpu/test_cuda_model.py -k full_size; }

pytorch() { measured 150 pytorch machine 'GPT-2 bfloat16'; }

# What is built and waits for a figure.
faster() { measured 120 faster 'GPT-2 second stream' 'GPT-2 float8'; }

# Memory errors took 45 s on an H100. Races take longer, so they are looked for in one kind of kernel after the
# other: what has no time left costs only itself.
memcheck() {
    sanitized 75 memcheck kernels test_cuda_kernels.py bfloat16
    sanitized 45 memcheck attention test_attention.py attention
}
races() {
    sanitized 30 "$1" norms test_cuda_kernels.py 'norms and bfloat16'
    sanitized 30 "$1" loss test_cuda_kernels.py 'cross_entropy and bfloat16'
    sanitized 30 "$1" sums test_cuda_kernels.py '(sums or sorted or embed) and not float64'
    sanitized 30 "$1" activations test_cuda_kernels.py 'linear_act and bfloat16'
    sanitized 45 "$1" attention test_attention.py 'tensor_cores_is or with_a_cache'
}
racecheck() { races racecheck; }
synccheck() { races synccheck; }

table() { measured 120 table profile kernels; }

# A process for each file, so that a kernel that breaks the device breaks no other file's tests.
tests() { for file in $others; do tested 90 "$(basename "$file" .py)" "$file"; done; }

rest() {
    measured 400 rest 'gpt-mini float32' 'gpt-mini bfloat16' 'forward XL' 'forward S' decoding 'decoding many' \
        'GPT-2 TF32' ablation
}

for part in $parts; do
    case $part in
    facts | kernels | new | agreement | pytorch | faster | memcheck | racecheck | synccheck | table | tests | rest) ;;
    *)
        echo "there is no part $part" >&2
        exit 2
        ;;
    esac
done
for part in $parts; do
    if [ "$(left)" -lt 20 ]; then
        echo "$part: no time left"
        continue
    fi
    $part
    echo "$part took until second $SECONDS"
done

for name in pytorch faster table rest; do
    if [ -e "$out/$name.txt" ]; then echo && cat "$out/$name.txt"; fi
done
echo "second $SECONDS of $total"
exit 0
