"""CUDA on this machine: what threads of a block do together, and the mistakes that must not pass."""

import hostgpu
import numpy as np
import pytest
from hostbuild import COMPILER, BuildError
from hostgpu import BACKWARDS, FORWARDS, HostDevice, HostGpuError, Launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

TOGETHER = """
#define ALL 0xffffffffu
constexpr int LANES = 32;

template <typename T>
__device__ __forceinline__ T sum_of_block(T x) {
    __shared__ T of_warp[LANES];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = lane < warps ? of_warp[lane] : T(0);
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(1024) sums(double* out, float* narrow, const int* in) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = sum_of_block(double(in[i])) + sum_of_block(double(i));
    narrow[i] = sum_of_block(float(in[i]));
}

extern "C" __global__ void shuffles(int* out, const int* in) {
    const int i = threadIdx.x, x = in[i];
    out[i] = __shfl_xor_sync(ALL, x, 5);
    out[blockDim.x + i] = __shfl_up_sync(ALL, x, 3u);
}

extern "C" __global__ void places(unsigned* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
}

extern "C" __global__ void numbers(float* out, double* wide, double given) {
    const float x = float(given);
    const float all[] = {exp(x), exp2(x), tanhf(x), logf(x), sqrtf(x), rsqrtf(x), pow(x, 2.0f),
                         fmaf(x, x, 1.0f), fmaxf(x, 2.0f), min(x, 1.0f), __uint_as_float(__float_as_uint(x))};
    for (int i = threadIdx.x; i < 11; i += blockDim.x) out[i] = all[i];
    if (threadIdx.x) return;
    *wide = rsqrt(4.0) + tanh(0.0) + fma(2.0, 3.0, 4.0) + max(3, 2) + exp2(2.0);
}
"""

MISTAKES = """
extern __shared__ __align__(16) unsigned char dynamic_shared[];

extern "C" __global__ void early_return(float* p) {
    if (threadIdx.x == 40) return;
    __syncthreads();
    p[threadIdx.x] = 1;
}
extern "C" __global__ void lonely_lane(float* p) {
    float x = threadIdx.x;
    if (threadIdx.x % 32 < 31) x += __shfl_xor_sync(0xffffffffu, x, 1);
    p[threadIdx.x] = x;
}
extern "C" __global__ void barrier_against_shuffle(float* p) {
    float x = threadIdx.x;
    if (threadIdx.x % 32 == 3) __syncthreads();
    else x = __shfl_xor_sync(0xffffffffu, x, 1);
    p[threadIdx.x] = x;
}
extern "C" __global__ void outside_the_mask(float* p) {
    float x = threadIdx.x;
    if (threadIdx.x < 16) x = __shfl_xor_sync(0xffffu, x, 16);
    p[threadIdx.x] = x;
}
extern "C" __global__ void not_in_its_mask(float* p) { p[0] = __shfl_xor_sync(0xffu, p[0], 1); }
extern "C" __global__ void too_much_shared(float* p) {
    dynamic_shared[threadIdx.x * 4] = 1;
    __syncthreads();
    p[threadIdx.x] = dynamic_shared[threadIdx.x * 4];
}
extern "C" __global__ void misaligned(float* p, int at) {
    *reinterpret_cast<uint4*>(p + at) = make_uint4(1, 2, 3, 4);
}
extern "C" __global__ void null(float* p, int at) { p[at] = 1; }
extern "C" __global__ void index(float* p, int at) {
    __shared__ float few[8];
    few[at + int(threadIdx.x)] = 1;
    p[0] = few[0];
}
extern "C" __global__ void overflow(int* p, int n) { p[0] = n * n; }
extern "C" __global__ void division(int* p, int n) { p[0] = 1 / n; }
extern "C" __global__ void shift(int* p, int n) { p[0] = 1 << n; }
extern "C" __global__ void write_at(float* p, int at) { if (threadIdx.x == 0) p[at] = 1; }
extern "C" __global__ void typed(unsigned short* a, const float* b, const double* c, int i, double d) {
    if (threadIdx.x == 0 && c) a[0] = (unsigned short)(i + d + (b != nullptr));
}
extern "C" __global__ void floating(float* a, float x) { a[0] = x; }
extern "C" __global__ void unwritten(float* p) {
    __shared__ float fixed[64];
    if (threadIdx.x == 0) fixed[0] = 1;
    if (blockIdx.x == 0) reinterpret_cast<float*>(dynamic_shared)[threadIdx.x] = fixed[threadIdx.x] = 2;
    __syncthreads();
    p[blockIdx.x * 64 + threadIdx.x] = fixed[threadIdx.x];
    p[128 + blockIdx.x * 64 + threadIdx.x] = reinterpret_cast<float*>(dynamic_shared)[threadIdx.x];
}
extern "C" __global__ void race(float* p) {
    __shared__ float row[64];
    row[threadIdx.x] = threadIdx.x;
    p[threadIdx.x] = row[63 - threadIdx.x];
}
extern "C" __global__ void middle_warp(float* p) {
    __shared__ float came[3];
    if (threadIdx.x < 3) came[threadIdx.x] = 0;
    __syncthreads();
    const int warp = threadIdx.x / 32;
    came[warp] = 1;
    __syncwarp();
    if (threadIdx.x == 32) p[blockIdx.x] = came[0] + came[2];
}
extern "C" __global__ void blocks_in_turn(int* p) { if (threadIdx.x == 0) p[1 + blockIdx.x] = p[0]++; }
"""


@pytest.fixture(params=[FORWARDS, BACKWARDS, 2], ids=["forwards", "backwards", "seed 2"])
def device(request):
    return HostDevice(order=request.param, texts={"together": TOGETHER, "mistakes": MISTAKES})


def start(device, kernel, *args, grid=(1,), block=(32,), shared=0, source="together", defines=()):
    device.launch(source, kernel, defines, grid, block, args, shared)
    device.synchronize()


def array(device, host):
    host = np.asarray(host)
    on_device = device.zeros(host.shape, host.dtype)
    device.upload(on_device, host)
    return on_device


@pytest.mark.parametrize("defines", [(), ("FIBERS_UCONTEXT",)], ids=["own switch", "ucontext"])
@pytest.mark.parametrize("threads", [96, 1024])
def test_a_block_adds_up_through_shuffles_and_shared_memory(device, threads, defines):
    host = np.arange(3 * threads, dtype=np.int32).reshape(3, threads) % 7
    out, narrow = device.zeros(host.shape, np.float64), device.zeros(host.shape, np.float32)
    args = out, narrow, array(device, host)
    start(device, "sums", *args, grid=(3,), block=(threads,), defines=defines)
    sums = host.sum(1, keepdims=True) * np.ones_like(host)
    numbers = np.arange(host.size).reshape(host.shape).sum(1, keepdims=True)
    assert np.array_equal(device.download(out), sums + numbers)
    assert np.array_equal(device.download(narrow), sums)


def test_shuffles_read_the_lanes_that_cuda_says(device):
    host, i = np.arange(64, dtype=np.int32) + 8, np.arange(64)
    out = device.zeros((2, 64), np.int32)
    start(device, "shuffles", out, array(device, host), block=(64,))
    xor, up = device.download(out)
    assert np.array_equal(xor, host[i ^ 5])
    assert np.array_equal(up, host[np.where(i % 32 >= 3, i - 3, i)])


def test_grids_and_blocks_have_three_dimensions(device):
    out = device.zeros((30, 64), np.uint32)
    start(device, "places", out, grid=(2, 3, 5), block=(4, 8, 2))
    assert np.array_equal(device.download(out), np.add.outer(1000 * np.arange(30), np.arange(64)))


def test_functions_of_numbers_are_there_for_float_and_double(device):
    out, wide, x = device.zeros((11,), np.float32), device.zeros((1,), np.float64), 0.75
    start(device, "numbers", out, wide, x)
    exact = [np.exp(x), 2**x, np.tanh(x), np.log(x), np.sqrt(x), x**-0.5, x * x, x * x + 1, 2, x, x]
    assert np.allclose(device.download(out), exact, rtol=3e-7)
    assert device.download(wide)[0] == 0.5 + 10 + 3 + 4


def test_threads_that_go_different_ways_are_reported_and_the_next_launch_works(device):
    for kernel, message in (
        ("early_return", "divergent barrier.*thread 40 has returned"),
        ("lonely_lane", "divergent warp.*thread (31|63) has returned"),
        ("barrier_against_shuffle", "divergent warp.*thread (3|35) waits at __syncthreads"),
        ("outside_the_mask", "shuffles from lane .*which takes no part"),
        ("not_in_its_mask", "a mask that leaves itself out"),
        ("too_much_shared", "behind its 128 bytes of dynamic shared memory, at 128"),
    ):
        p, much = device.zeros((64,), np.float32), device.zeros((256,), np.float32)
        with pytest.raises(HostGpuError, match=f"mistakes.{kernel}: .*{message}"):
            start(device, kernel, p, source="mistakes", block=(64,), shared=128)
        start(device, "unwritten", much, source="mistakes", block=(64,), shared=256)


def test_what_a_processor_would_let_pass_is_reported_with_its_line(device):
    for kernel, dtype, at, message in (
        ("misaligned", np.float32, 1, "not aligned"),
        ("index", np.float32, 1, "outside its array"),
        ("overflow", np.int32, 1 << 16, "range of int"),
        ("division", np.int32, 0, "division by zero"),
        ("shift", np.int32, 32, "shift"),
        ("null", None, 0, "null"),
    ):
        array = None if dtype is None else device.zeros((64,), dtype)
        with pytest.raises(HostGpuError, match=rf"mistakes.{kernel}: .*:\d+: .*{message}"):
            start(device, kernel, array, at, source="mistakes")


def test_a_write_beside_an_array_is_found():
    for at, where in ((-1, "4 bytes before"), (10, "0 bytes behind"), (200, "behind")):
        device = HostDevice(texts={"mistakes": MISTAKES})
        p = device.zeros((10,), np.float32)
        with pytest.raises(HostGpuError, match=f"write_at wrote .*{where} an array of 40 bytes"):
            start(device, "write_at", p[2:5], at - 2, source="mistakes")
        with pytest.raises(HostGpuError, match=where):
            device.xp.check()


def test_arguments_have_the_types_that_the_kernel_declares(device):
    a, b, c = (device.zeros((4,), dtype) for dtype in (np.uint16, np.float32, np.float64))
    for given, sum in ((b, 8), (None, 7)):
        start(device, "typed", a, given, c, 3, 4.5, source="mistakes")
        assert device.download(a)[0] == sum
    for at, wrong, message in (
        (0, b, r"argument 0 is \*H, was given \*f"),
        (1, c, r"argument 1 is \*f, was given \*d"),
        (3, 3.0, "argument 3 is i, was given d"),
        (3, np.int64(3), "argument 3 is i, was given int64"),
        (3, None, r"argument 3 is i, was given \*"),
        (4, 4, "argument 4 is d, was given i"),
        (1, HostDevice().zeros((4,), np.float32), "argument 1 is no array of this device"),
    ):
        args = [a, b, c, 3, 4.5]
        args[at] = wrong
        with pytest.raises(HostGpuError, match=f"mistakes.typed: {message}"):
            start(device, "typed", *args, source="mistakes")


def test_launches_that_a_gpu_refuses_are_refused(device):
    p = device.zeros((4,), np.float32)
    for kernel, args, how, message in (
        ("write_at", (p,), {}, "takes 2 arguments, was given 1"),
        ("floating", (p, 1.0), {}, "argument 1 is f, was given d"),
        ("nothing", (p,), {}, "no such kernel"),
        ("write_at", (p, 0), {"grid": (0,)}, "grid"),
        ("write_at", (p, 0), {"grid": (1, 65536)}, "grid"),
        ("write_at", (p, 0), {"grid": (1, 1, 1, 1)}, "grid"),
        ("write_at", (p, 0), {"block": (48,)}, "48 threads"),
        ("write_at", (p, 0), {"block": (1024, 2)}, "2048 threads"),
        ("write_at", (p, 0), {"block": (4, 1, 128)}, "block"),
        ("write_at", (p, 0), {"shared": (227 << 10) + 1}, "shared memory"),
    ):
        with pytest.raises(HostGpuError, match=message):
            start(device, kernel, *args, **how, source="mistakes")
    assert device.xp.launches == []
    start(device, "write_at", p, 0, shared=227 << 10, source="mistakes")
    assert device.xp.launches == [Launch("mistakes", "write_at", (1,), (32,), 227 << 10)]


def test_a_source_that_does_not_compile_shows_the_compilers_message():
    device = HostDevice(texts={"bad": '#line 7 "bad.cu"\nextern "C" __global__ void bad(int* p) { p = 1; }'})
    with pytest.raises(BuildError, match=r"bad\.cu:7:"):
        start(device, "bad", None, source="bad")


def test_what_runs_here_can_be_compiled_for_a_gpu_too(device, monkeypatch):
    wanted = []
    monkeypatch.setattr(hostgpu, "FILL_CACHE", "sm_90")
    monkeypatch.setattr(hostgpu, "cubin", lambda *args: wanted.append(args))
    defines, p = ("STORAGE_FLOAT32",), device.zeros((4,), np.float32)
    for _ in range(2):
        device.launch("elementwise", "relu_packed", defines, (1,), (32,), (p, p, 4))
        start(device, "write_at", p, 0, source="mistakes")
    assert wanted == [("elementwise", defines, "sm_90")]


def test_shared_memory_that_nobody_wrote_is_not_a_number(device):
    p = device.zeros((2, 2, 64), np.float32)
    start(device, "unwritten", p, source="mistakes", grid=(2,), block=(64,), shared=256)
    fixed, dynamic = device.download(p)
    assert np.all(fixed[0] == 2) and np.all(dynamic[0] == 2)
    assert fixed[1, 0] == 1 and np.all(np.isnan(fixed[1, 1:])) and np.all(np.isnan(dynamic[1]))


def test_a_missing_barrier_shows(device):
    p = device.zeros((64,), np.float32)
    start(device, "race", p, source="mistakes", block=(64,))
    assert np.isnan(device.download(p)).any()


def test_orders_are_drawn_anew_for_each_block_and_each_launch_and_the_same_for_a_seed():
    """Forwards and backwards the warp in the middle comes after one of the others."""
    found = []
    for order in (FORWARDS, BACKWARDS, 2, 2, 3):
        device = HostDevice(order=order, texts={"mistakes": MISTAKES})
        p, turns = device.zeros((64,), np.float32), device.zeros((9,), np.int32)
        seen = []
        for _ in range(2):
            start(device, "middle_warp", p, source="mistakes", grid=(64,), block=(96,))
            device.zero(turns)
            start(device, "blocks_in_turn", turns, source="mistakes", grid=(8,))
            seen.append([*device.download(p), *device.download(turns)[1:]])
        found.append(seen)
    ahead, reverse, once, again, other = found
    assert ahead == [[1] * 64 + [*range(8)]] * 2
    assert reverse == [[1] * 64 + [*reversed(range(8))]] * 2
    assert once == again != other and once[0] != once[1]
    assert set(once[0][:64]) == {0, 1, 2} and sorted(once[0][64:]) == [*range(8)]


def test_a_failure_names_the_order_in_which_it_came():
    device = HostDevice(order=2, texts={"mistakes": MISTAKES})
    with pytest.raises(HostGpuError, match=r"early_return: .*divergent barrier.*in the order \d+"):
        start(device, "early_return", device.zeros((64,), np.float32), source="mistakes", block=(64,))
