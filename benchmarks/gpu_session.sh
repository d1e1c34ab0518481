#!/usr/bin/env bash
# One block of questions to a machine with a GPU that is rented for minutes, in one call.
#
#     python benchmarks/gpu_carry.py A            before, without a GPU: makes build/carry/A, which travels with the tree
#     benchmarks/gpu_session.sh A OUT [SECONDS]   there; 590 if left out
#
#     A  is everything right?   tests, presets against losses of a CPU, commands, NCCL, sanitizers, speed at a glance
#     N  the node's cores       AMX, threads and ranks, PyTorch beside it, text, sums over ranks; uses no GPU
#     B  how fast is it?        ways to train, PyTorch in its best mode, text, profile, kernels
#     C  what does it learn?    the same texts beside nanochat, by the clock
#
# Whoever gets a machine runs A first. Each part has a limit of its own, writes into OUT as it finds, and stops no
# other. OUT/block.json has what became of each, what was skipped and why, at which commit. PARTS names parts to do in place of all, for what a
# first call had no time for. The machine needs Python 3.12, CuPy, NumPy, pytest and pytest-xdist, for B, N and C
# PyTorch, and no network. What it lacks is installed from the carried wheels into a folder of its own.
#
# PY: a Python to use as it is, with nothing installed. REHEARSAL=1: toy sizes on the tests' stand-in for a GPU, so
# that each command has run once before it costs a device (tests/gpu/test_session.py).
set -u
block=${1:-} out=${2:-} total=${3:-590}
SECONDS=0
declare -A every
# In the order of what matters most.
every[A]="facts tests sanitize agreement commands nccl modes four collect speed"
every[N]="facts amx amx_losses threads ranks both torch ddp sums text serving small python_cost"
every[B]="facts ways torch decode autotune profile kernels large startup counters"
every[C]="facts within nanochat depth"
if [ -z "$out" ] || [ -z "${every[$block]:-}" ]; then
    echo "usage: $0 A|N|B|C FOLDER [SECONDS]" >&2
    exit 2
fi
parts=${PARTS:-${every[$block]}}
for part in $parts; do
    case " ${every[$block]} " in *" $part "*) ;; *)
        echo "block $block has no part $part: ${every[$block]}" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$(dirname "$0")/.." || exit 1
carry=${CARRY:-$PWD/build/carry/$block}
work=$(mktemp -d)
trap 'stop; rm -rf "$work"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 COLUMNS=120
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE DISTGPT_AUTO_DTYPE

# -- what is carried

# A part too: what fails here is known from block.json, and the others try with what is there.
prepare() {
    lay_out >"$out/prepare.txt" 2>&1
    local code=$?
    if [ $code -ne 0 ]; then tail -4 "$out/prepare.txt"; fi
    return $code
}
lay_out() {
    local code=0
    py=${PY:-python3}
    if [ -z "${PY:-}" ] && [ -e "$carry/wheels.tar.xz" ]; then install_lacking || code=$?; fi
    # The report is written even where the Python of the parts does not start.
    writer=$py
    if ! "$py" -c ""; then code=1 writer=python3; fi
    if [ -e "$carry/cache.tar.xz" ] && [ -z "${REHEARSAL:-}" ]; then
        tar -xf "$carry/cache.tar.xz" -C "$work" || code=$?
        export XDG_CACHE_HOME=$work/cache
    fi
    host=("$py")
    small=() narrow=() quick=() few=() time=2m minutes=1.6
    dist=("$py" -m distgpt)
    if [ -n "${REHEARSAL:-}" ]; then
        host=("$py" tests/gpu/hostgpu.py)
        dist=("${host[@]}")
        small=(--n-layer 1 --n-head 2 --n-embd 16 --seq-len 8 --batch-size 4 --steps 3)
        narrow=("${small[@]}" --vocab-size 300)  # of a preset with GPT-2's vocabulary
        quick=(--quick) few=(--batch-size 2) time=6s minutes=0.05
        export WHOLE_GPU=1 WHOLE_NCCL=1
    else
        export DISTGPT_TEST_GPU=1
    fi
    return $code
}
# A folder of its own, in which what the machine has is seen too. Only what it lacks is installed.
install_lacking() {
    mkdir "$work/wheels" && tar -xf "$carry/wheels.tar.xz" -C "$work/wheels" || return
    python3 -m venv --system-site-packages --without-pip "$work/venv" || return
    py=$work/venv/bin/python PATH=$work/venv/bin:$PATH
    "$py" benchmarks/gpu_carry.py --lacking "$work/wheels" >"$work/lacking" || return
    # pip has --python since 22.3.
    xargs -r python3 -m pip --python "$py" install --quiet --no-index --no-deps --no-compile \
        --disable-pip-version-check <"$work/lacking"
}

# -- how a part is done

left() { echo $((total - SECONDS)); }
# limited SECONDS COMMAND …: with its output and exit code; not longer than there is time
limited() {
    local limit=$1 code
    shift
    if [ "$limit" -gt $(($(left) - 6)) ]; then limit=$(($(left) - 6)); fi
    if [ "$limit" -lt 4 ]; then
        echo "[no time left for $*]"
        return 75
    fi
    echo "\$ $*"
    timeout --signal="${signal:-INT}" --kill-after=5 "$limit" "$@" </dev/null
    code=$?
    echo "[exit code $code after second $SECONDS]"
    return $code
}
# into NAME SECONDS COMMAND …: the same into OUT/NAME.txt
into() {
    local name=$1
    shift
    limited "$@" >>"$out/$name.txt" 2>&1
}
# has NAME …: whether there are these programs or modules; what is not is kept in `skipped`, with `of` before it where
# only that of a part is left out
skipped=()
has() {
    local name all=0
    for name; do
        if ! type -P "$name" >/dev/null && ! "$py" -c "import $name" 2>/dev/null; then
            skipped+=("${of:+$of: }no $name")
            all=1
        fi
    done
    return $all
}
NOT_DONE=77  # the exit code of a part that was skipped
# worst CODE …: the first that is not 0
worst() {
    local code
    for code; do if [ "$code" -ne 0 ]; then return "$code"; fi; done
}
# tested NAME SECONDS ARGUMENT …: pytest with these arguments
tested() {
    local name=$1 seconds=$2
    shift 2
    into "$name" "$seconds" "$py" -m pytest "$@" -q --tb=short --maxfail=25 -p no:cacheprovider \
        --junitxml="$out/$name.xml"
    local code=$?
    grep -E '(passed|failed|errors?|skipped).*' "$out/$name.txt" | tail -1
    grep -E '^(FAILED|ERROR) ' "$out/$name.txt" | cut -c1-180 | head -6
    return $code
}
# measured NAME SECONDS GROUP …: groups of benchmarks/gpu.py, ours and PyTorch's
measured() {
    local name=$1 seconds=$2
    shift 2
    into "$name" "$seconds" "$py" benchmarks/gpu.py --only "$@" --seconds $((seconds - 8)) --out "$out/$name.json" \
        ${REHEARSAL:+--quick --host}
}
corpus=(--data corpus --tokenizer byte --val-fraction 0 --grad-accum 1 --sample-every 0)

# -- for all blocks

facts() {
    into facts 10 date -u
    into facts 10 cat "$carry/commit.txt"
    into facts 15 nvidia-smi
    into facts 15 nvidia-smi -q -d CLOCK,POWER,PERFORMANCE
    into facts 10 lscpu
    into facts 10 echo "$(nproc) CPUs, $cores cores for one thread each"
    into facts 30 "$py" -c 'from importlib.metadata import distributions as all
for each in sorted({f"{d.name} {d.version}" for d in all()}): print(each)'
    # shellcheck disable=SC2046
    into facts 10 grep . /dev/null $(find /sys/devices/system/node -maxdepth 2 -name 'cpulist' -o -maxdepth 2 -name distance)
    if [ "$block" = N ]; then return 0; fi  # it has the doctor when matmul is compiled
    into facts 40 "${dist[@]}" doctor
}

# -- A. Of a device 590 s: about 15 for facts, 110 tests, 100 agreement and sanitizers beside it, 50 commands, 25 + 120
# NCCL on two ranks, 60 on four, 90 speed. Time-sliced NCCL is guessed at 5 to 20 ms a call.

# One process for all files: CUDA's start and imports once for each of eight workers. What only runs on the stand-in
# skips itself.
tests() {
    local files=(tests/gpu)
    if [ -n "${REHEARSAL:-}" ]; then files=(tests/gpu/test_cuda_kernels.py -k "embed and bfloat16"); fi
    tested tests 150 "${files[@]}" -n "${WORKERS:-8}" --dist loadgroup
}
# Memory errors took 45 s on an H100, alone. They are looked for beside what is not timed.
sanitize() {
    has compute-sanitizer || return $NOT_DONE
    : >"$work/running"
    sanitized memcheck kernels test_cuda_kernels.py 'bfloat16 and not muon'
    sanitized memcheck attention test_attention.py attention
    sanitized racecheck attention test_attention.py '(attention_matches and bfloat16) or cached_attention'
    sanitized racecheck rows test_cuda_kernels.py '(norms or cross_entropy or sums or embed) and bfloat16'
    sanitized synccheck rows test_cuda_kernels.py '(norms or cross_entropy or sums or embed) and bfloat16'
}
sanitized() {
    local words=(-k "$4")
    if [ -n "${REHEARSAL:-}" ]; then words+=(--collect-only -q); fi  # fails where nothing is chosen
    # What is begun by & ignores INT. `timeout` leads a group of processes, which `stop` ends.
    # shellcheck disable=SC2016
    signal=TERM into "$1-$2" 220 bash -c 'echo $PPID >>"$0"; exec "$@"' "$work/groups" compute-sanitizer --tool "$1" \
        --error-exitcode 9 "$py" -m pytest "tests/gpu/$3" "${words[@]}" -x -p no:cacheprovider &
    echo $! >>"$work/running"
}
# A call that is cut ends the sanitizers too: it removes the folder that they read.
stop() {
    local group
    if [ ! -e "$work/groups" ]; then return; fi
    while read -r group; do kill -KILL -- "-$group" 2>/dev/null; done <"$work/groups"
}
# Their end, and a line about each. Waits no longer than there is time: each has its own limit.
collect() {
    local code=0 file process
    if [ ! -e "$work/running" ]; then
        skipped+=("no sanitizer was begun")
        return $NOT_DONE
    fi
    while read -r process; do wait "$process" 2>/dev/null || code=$?; done <"$work/running"
    rm -f "$work/running" "$work/groups"
    for file in "$out"/{mem,race,sync}check-*.txt; do
        echo "$(basename "$file" .txt): $(grep -E 'SUMMARY|exit code|no time' "$file" | tail -2 | tr '\n' ' ')"
    done
    return $code
}
agreement() {
    into agreement 130 "${host[@]}" benchmarks/gpu_agreement.py check "$carry/losses.json" --out "$out/agreement.json" \
        "${quick[@]}"
    local code=$?
    grep '"right": false' "$out/agreement.txt" | cut -c1-200
    return $code
}
# Starts a server, makes one request, and stops it.
served=$(cat <<'END'
import json, signal, subprocess, sys, time, urllib.request
server = subprocess.Popen(sys.argv[1:])
about = json.dumps({"prompt": "The ", "max_tokens": 8}).encode(), {"Content-Type": "application/json"}
answer = ""
for _ in range(100):
    try:
        request = urllib.request.Request("http://127.0.0.1:8765/v1/completions", *about)
        answer = urllib.request.urlopen(request, timeout=15).read().decode()
        break
    except OSError:
        time.sleep(0.25)
print(answer)
server.send_signal(signal.SIGINT)
sys.exit(server.wait(10) if answer else 1)
END
)
# Without --dtype where nothing is compared: what auto chooses on a GPU is asked too.
commands() {
    local run=$work/run codes=() new=(--max-new-tokens 40 --n 32)
    if [ -n "${REHEARSAL:-}" ]; then new=(--max-new-tokens 4 --n 2); fi
    into commands 40 "${dist[@]}" train --stage cuda --steps 200 --out "$run" "${small[@]}"
    codes+=($?)
    into commands 20 "${dist[@]}" infer --weights "$run/weights.safetensors" --stage cuda --prompt "The " "${new[@]}"
    codes+=($?)
    into commands 20 "${dist[@]}" eval --weights "$run/weights.safetensors" --stage cuda --dtype bfloat16 --val story \
        ${REHEARSAL:+--val-tokens 64}
    codes+=($?)
    into commands 30 "${dist[@]}" profile --stage cuda --preset tiny --dtype bfloat16 --steps 5 --out "$out/profile-tiny" \
        "${small[@]}"
    codes+=($?)
    into commands 30 mpirun -n 2 "${dist[@]}" train --stage mpi-cuda --allreduce host --steps 20 --out "$work/two" \
        "${small[@]}"
    codes+=($?)
    if of=serve has starlette uvicorn; then
        into commands 40 "$py" -c "$served" "${dist[@]}" serve --weights "$run/weights.safetensors" --stage cuda \
            --port 8765
        codes+=($?)
    fi
    grep -E '^\[exit code [^0]|\(--dtype\)$' "$out/commands.txt" | sort -u
    worst "${codes[@]}"
}
nccl() {
    has mpirun mpi4py || return $NOT_DONE
    into nccl 40 mpirun -n 2 "${host[@]}" benchmarks/nccl_on_one_gpu.py "${quick[@]}"
    local code=$?
    tail -3 "$out/nccl.txt"
    return $code
}
modes() {
    has mpirun mpi4py || return $NOT_DONE
    mkdir -p "$out/modes"
    into modes 150 mpirun -n 2 "${host[@]}" benchmarks/nccl_modes.py "$out/modes" "${quick[@]}"
    local code=$?
    grep -E 'same bits|DIFFERS|failed|away at most' "$out/modes.txt" | sort -u
    rm -f "$out"/modes/*/*.safetensors && rm -rf "$out"/modes/*/checkpoints
    return $code
}
four() {
    has mpirun mpi4py || return $NOT_DONE
    mkdir -p "$out/four"
    into four 40 mpirun -n 4 "${host[@]}" benchmarks/nccl_on_one_gpu.py "${quick[@]}"
    local code=$?
    into four 60 mpirun -n 4 "${host[@]}" benchmarks/nccl_modes.py "$out/four" --only allreduce overlapped sharded "${quick[@]}"
    worst $code $?
    code=$?
    grep -E 'all right|WRONG|DIFFERS|failed|away at most|same bits' "$out/four.txt" | sort -u
    rm -f "$out"/four/*/*.safetensors && rm -rf "$out"/four/*/checkpoints
    return $code
}
speed() {
    into speed 110 "${host[@]}" benchmarks/training_ways.py gpu --only bfloat16 \
        "fast, 8k tokens" "fast by AdamW, 8k tokens" --turns 2 --out "$out/speed.json" "${quick[@]}"
    local code=$?
    grep '^{' "$out/speed.txt"
    return $code
}

# -- N. `gpt-mini` ran 3.8 times as fast by AMX on 8 cores of a Sapphire Rapids; nothing was seen on more than 8.
# Of a device 590 s: about 10 for facts, 90 tests with everything compiled beside them, 40 losses, 80 threads, 80
# ranks, 50 both, 140 PyTorch, 60 DDP. `benchmarks/node_table.py OUT` makes the page's tables.

# As many as to rehearse each command, where a machine has fewer. A run takes no second thread of a core.
seats=$("${PY:-python3}" -c 'import os
from distgpt.cluster.affinity.machine import read_machine
print(*(core[0].number for core in read_machine(allowed=os.sched_getaffinity(0)).cores), sep="\n")' ||
    seq 0 $(($(nproc) - 1))) # a CPU of each core
cores=${REHEARSAL:+4}
cores=${cores:-$(wc -l <<<"$seats")}
powers() { local n=1; while [ $n -le "$1" ]; do echo $n && n=$((n * 2)); done; }
# Steps of 8,192 tokens: 9 s on one core by AMX.
node() { # [of=CORES] node NAME RANKS THREADS … [-- OPTION …]: steps of the node's model by each number of threads
    local name=$1 ranks=$2 launch=() stage=serial threads=()
    shift 2
    while [ $# -gt 0 ] && [ "$1" != -- ]; do threads+=("$1") && shift; done
    shift
    if [ "${of:-$cores}" -lt "$cores" ]; then launch=(taskset -c "$(head -n "$of" <<<"$seats" | paste -sd,)"); fi
    if [ "$ranks" -gt 1 ]; then launch+=(mpirun -n "$ranks") stage=mpi; fi
    DISTGPT_AMX=${amx:-1} into "${name%%-*}" "${seconds:-120}" "${launch[@]}" "$py" benchmarks/training_ways.py node \
        --stage $stage --threads "${threads[@]}" --warm-up 1 --out "$out/$name.json" "$@" "${quick[@]}"
}
compile_for() {
    quick=(--quick)
    node compiled 1 2 -- --only "$1"
}
# On a new machine nothing is compiled. A process for each kind of loop, beside the tests, which are not timed.
amx() {
    local files=(tests/core/cpu/test_tiles.py tests/core/cpu/test_matmul.py tests/core/cpu/test_cpu_attention.py) code way
    if [ -n "${REHEARSAL:-}" ]; then files=(tests/core/cpu/test_tiles.py); fi
    for way in "GPT-2 bfloat16" "fast bfloat16" "fast float32"; do
        signal=TERM compile_for "$way" &
    done
    signal=TERM amx=0 compile_for "GPT-2 bfloat16" &
    signal=TERM DISTGPT_AMX=1 into compiled 120 "$py" -m distgpt bench infer --dtype bfloat16 --dtype int8 --requests 2 \
        --out "$work/compiled" --preset S --prompt 4 --new 4 &
    DISTGPT_AMX=1 tested amx 150 "${files[@]}" -n "${WORKERS:-8}" --dist loadgroup
    code=$?
    wait
    rm -f "$out/compiled.json"
    DISTGPT_AMX=1 into doctor 40 "$py" -m distgpt doctor  # draws the node
    return $code
}
amx_losses() {
    DISTGPT_AMX=1 into amx_losses 90 "$py" benchmarks/gpu_agreement.py check "$carry/losses.json" --stage serial \
        --only gpt-mini fast --out "$out/amx_losses.json" "${quick[@]}"
    local code=$?
    grep '^{' "$out/amx_losses.txt"
    return $code
}
threads() {
    local code=0
    # All and one first: their ratio is asked for.
    # shellcheck disable=SC2046
    node threads 1 "$cores" 1 $(powers $((cores - 1)) | tail -n +2 | sort -rn) -- --peaks --only "GPT-2 bfloat16" || code=$?
    amx=0 seconds=40 node threads-without-amx 1 "$cores" -- --peaks --only "GPT-2 bfloat16" || code=$?
    grep '^{' "$out/threads.txt"
    return $code
}
ranks() {
    local n code=0
    has mpirun mpi4py || return $NOT_DONE
    for n in $(powers "$cores" | tail -n +2 | sort -rn); do
        seconds=50 node "ranks-$n" "$n" 1 -- --only "GPT-2 bfloat16" || code=$?
    done
    grep '^{' "$out/ranks.txt"
    return $code
}
# All cores by ranks of several threads, and half of them.
both() {
    local n all code=0
    has mpirun mpi4py || return $NOT_DONE
    for all in "$cores" $((cores / 2)); do
        for n in $(powers $((all / 2)) | tail -n +2); do
            of=$all seconds=40 node "both-$n-$all" "$n" $((all / n)) -- --only "GPT-2 bfloat16" || code=$?
        done
    done
    grep '^{' "$out/both.txt"
    return $code
}
# Modes one by one, so that what was found stays when there is no more time.
ddp() {
    has torch || return $NOT_DONE
    into ddp 100 "$py" benchmarks/torch_ways.py --ways keep-freed+autocast:4 keep-freed:4 compile+keep-freed+autocast:4 \
        --threads "$cores" --out "$out/ddp.json" "${quick[@]}"
    local code=$?
    grep '^{' "$out/ddp.txt"
    return $code
}
text() {
    local size=(--preset gpt2 --prompt 256 --new 64) dtype code=0
    if [ -n "${REHEARSAL:-}" ]; then size=(--preset S --prompt 4 --new 4); fi
    for dtype in bfloat16 int8; do
        DISTGPT_AMX=1 into text 50 "$py" -m distgpt bench infer --dtype $dtype --requests 1 --requests 32 \
            --out "$out/text-$dtype" "${size[@]}" || code=$?
    done
    return $code
}
# GPT-2's shape with random weights, served: 1 and 32 clients.
serving() {
    local run=$work/served code server
    has starlette uvicorn || return $NOT_DONE
    DISTGPT_AMX=1 into serving 60 "$py" -m distgpt train --preset gpt2 --dtype bfloat16 "${corpus[@]}" --batch-size 4 \
        --steps 1 --out "$run" "${narrow[@]}" || return
    DISTGPT_AMX=1 "$py" -m distgpt serve --weights "$run/weights.safetensors" --dtype bfloat16 --port 8766 --log quiet \
        >"$out/server.txt" 2>&1 </dev/null &
    server=$!
    into serving 70 "$py" benchmarks/serving.py 8766 ${REHEARSAL:+4}
    code=$?
    kill -TERM $server && wait $server
    grep -aE '^first token|clients,' "$out/serving.txt"
    return $code
}
sums() {
    local n code=0 sizes=43M,496M
    if [ -n "${REHEARSAL:-}" ]; then sizes=64K,256K; fi
    has mpirun mpi4py || return $NOT_DONE
    for n in $(powers "$cores" | tail -n +2); do
        into sums 20 "$py" -m distgpt bench allreduce --ranks "$n" --seconds 10 --sizes $sizes --out "$out/sums" || code=$?
    done
    return $code
}
small() {
    # shellcheck disable=SC2046
    node small 1 $(powers "$cores" | sort -rn) -- --only "fast bfloat16" "tiny bfloat16" "fast float32" "tiny float32"
    local code=$?
    grep '^{' "$out/small.txt"
    return $code
}
# What Python costs in a step needs no cores to be true, and is told beside the steps above.
python_cost() {
    local few=()
    if [ -n "${REHEARSAL:-}" ]; then few=(--presets tiny --threads 1 2 --steps 2); fi
    DISTGPT_AMX=1 into python_cost 100 "$py" benchmarks/python_cost.py --out "$out/python_cost.json" "${few[@]}"
    local code=$?
    tail -12 "$out/python_cost.txt"
    return $code
}

# -- B. GPT-2 124M: 598,000 tokens/s, PyTorch compiled 492,000, one sequence 1,208 tokens/s [2026-11-22].

ways() {
    into ways 150 "${host[@]}" benchmarks/training_ways.py gpu --turns 2 --out "$out/ways.json" --only bfloat16 \
        "heads of 128" "fast, 8k tokens" smollm2 "${quick[@]}"
    local code=$?
    grep '^{' "$out/ways.txt"
    return $code
}
torch() {
    has torch || return $NOT_DONE
    if [ "$block" = N ]; then
        into torch 170 "$py" benchmarks/torch_ways.py --threads "$cores" --out "$out/torch.json" "${quick[@]}"
        local code=$?
        grep '^{' "$out/torch.txt"
        return $code
    else
        measured torch 130 'GPT-2 bfloat16'
    fi
}
autotune() {
    has torch || return $NOT_DONE
    measured autotune 170 autotune
}
decode() {
    local run=$work/gpt2 code=0 n new=${REHEARSAL:+4}
    into decode 40 "${dist[@]}" train --stage cuda --preset gpt2 --dtype bfloat16 "${corpus[@]}" --batch-size 4 --steps 1 \
        --out "$run" "${narrow[@]}"
    for n in 1 32 128; do
        if [ -n "${REHEARSAL:-}" ]; then n=$((n > 1 ? 3 : 1)); fi
        into decode 30 "${dist[@]}" infer --weights "$run/weights.safetensors" --stage cuda --dtype bfloat16 --json \
            --temperature 0 --n "$n" --prompt "Once upon a time" --max-new-tokens "${new:-128}" || code=$?
    done
    measured hugging-face 50 decoding || code=$?
    return $code
}
profile() {
    local shape=(--stage cuda --preset gpt2 --dtype bfloat16 "${corpus[@]:0:8}" --batch-size 64 --recompute none --steps 5)
    into profile 40 "${dist[@]}" profile "${shape[@]}" --out "$out/profile" "${narrow[@]}"
}
kernels() { measured kernels 60 kernels; }
large() {
    into large 90 "${host[@]}" benchmarks/training_ways.py gpu --only gpt2-xl qwen3 \
        --out "$out/large.json" "${quick[@]}"
    local code=$?
    grep '^{' "$out/large.txt"
    return $code
}
# From the command to the end of three steps: with cubins and choices from before, and with nothing.
startup() {
    local start
    for start in warm-1 warm-2 cold; do
        if [ $start = cold ]; then local -x XDG_CACHE_HOME=$work/empty; fi  # of this part alone
        into startup 45 bash -c 'time "$@"' - "${dist[@]}" train --stage cuda --preset gpt-mini --dtype bfloat16 --steps 3 \
            --out "$work/start-$start" "${small[@]}"
    done
    grep -E '^(real|\[exit)' "$out/startup.txt"
}
counters() {
    has ncu || return $NOT_DONE
    into counters 90 ncu --set basic --launch-count 4 -k 'regex:attention_backward|norm_backward|polynomial' \
        "${dist[@]}" profile --stage cuda --preset gpt2-fast --dtype bfloat16 "${corpus[@]:0:8}" --batch-size 16 --steps 1 \
        --out "$work/ncu" "${narrow[@]}"
}

# -- C. Both read the same texts, and are judged by bits per byte on the same held-out documents.

texts=(--data "$carry/texts/train.jsonl" --val "$carry/texts/val.jsonl")
learn() { # learn NAME SECONDS OPTION …
    local name=$1 seconds=$2
    shift 2
    into "$name" "$seconds" "${dist[@]}" train --stage cuda "${texts[@]}" --out "$work/$name" "$@"
    local code=$?
    cp "$work/$name/metrics.jsonl" "$out/$name.jsonl"
    cp "$work/$name/summary.json" "$out/$name.json"
    grep -E '^losses' "$out/$name.txt"
    return $code
}
within() { learn within 170 --within $time ${REHEARSAL:+--depth 1} "${few[@]}"; }
depth() { learn depth 140 --dtype bfloat16 --depth ${REHEARSAL:-8} --set train_minutes="$minutes" "${few[@]}"; }
# `benchmarks/gpu_carry.py C --nanochat CHECKOUT --nanochat-base FOLDER` brings it. FA3 cannot be had without a network.
nanochat() {
    if [ ! -d "$carry/nanochat" ]; then
        skipped+=("no nanochat is carried")
        return $NOT_DONE
    fi
    local steps=(--depth=8 --max-seq-len=1024 --window-pattern=L --core-metric-every=-1 --sample-every=-1)
    NANOCHAT_BASE_DIR=$carry/nanochat-base PYTHONPATH=$carry/nanochat:$PWD/benchmarks/peers/for_nanochat \
        into nanochat 250 "$py" -m scripts.base_train "${steps[@]}" --run=dummy --eval-every=100
    local code=$?
    grep -E 'Validation bpb' "$out/nanochat.txt" | tail -3
    return $code
}

# -- all parts

# Written anew after each part, so that a call that is cut leaves what was answered.
report() {
    "$writer" - "$out/block.json" "$block" "$commit" "${REHEARSAL:-}" "$NOT_DONE" "${ended[@]}" <<'END'
import datetime, json, sys
from pathlib import Path
path, block, commit, rehearsal, not_done, *ended = sys.argv[1:]
parts = {}
for name, code, seconds, skipped in (each.split("|", 3) for each in ended):
    whole = bool(skipped) and code == not_done
    parts[name] = {"exit_code": None if whole else int(code), "seconds": int(seconds)}
    parts[name] |= {"skipped": skipped} if skipped else {}
found = {"block": block, "commit": commit, "parts": parts}
found |= {"date": datetime.date.today().isoformat(), "rehearsal": bool(rehearsal)}
Path(path).write_text(json.dumps(found, indent=1) + "\n")
END
}
ended=()
# finish NAME: does a part, and notes what became of it
finish() {
    local part=$1 code began=$SECONDS missing
    skipped=()
    $part >"$work/said" 2>&1
    code=$?
    missing=$(printf '; %s' "${skipped[@]}") && missing=${missing:2}
    sed 's/^/    /' "$work/said"
    if [ -n "$missing" ] && [ $code -eq $NOT_DONE ]; then
        echo "$part: skipped: $missing, until second $SECONDS"
    else
        echo "$part: exit code $code, $((SECONDS - began)) s, until second $SECONDS${missing:+; skipped: $missing}"
    fi
    ended+=("$part|$code|$((SECONDS - began))|$missing")
}

finish prepare
commit=$("$writer" benchmarks/gpu_carry.py --commit "$carry") || commit=unknown
report
for part in $parts; do
    # What runs already has to be waited for.
    if [ "$(left)" -lt 12 ] && [ "$part" != collect ]; then
        echo "$part: no time left"
        ended+=("$part|75|0|")
    else
        finish "$part"
    fi
    report
done
if [ -e "$work/running" ]; then finish collect && report; fi
echo "second $SECONDS of $total"
exit 0
