import numpy as np
import pytest
from hostbuild import COMPILER
from hostgpu import FORWARDS, HostDevice, HostGpuError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

MISTAKES = """
extern __shared__ __align__(16) unsigned char dynamic_shared[];

extern "C" __global__ void early_return(float* p) {
    if (threadIdx.x != 40) { __syncthreads(); p[threadIdx.x] = 1; }
}
extern "C" __global__ void lonely_lane(float* p) {
    p[threadIdx.x] = threadIdx.x % 32 < 31 ? __shfl_xor_sync(0xffffffffu, p[threadIdx.x], 1) : 0;
}
extern "C" __global__ void barrier_against_shuffle(float* p) {
    if (threadIdx.x % 32 == 3) __syncthreads();
    else p[threadIdx.x] = __shfl_xor_sync(0xffffffffu, p[threadIdx.x], 1);
}
extern "C" __global__ void outside_the_mask(float* p) {
    if (threadIdx.x < 16) p[threadIdx.x] = __shfl_xor_sync(0xffffu, p[threadIdx.x], 16);
}
extern "C" __global__ void not_in_its_mask(float* p) { p[0] = __shfl_xor_sync(0xffu, p[0], 1); }
extern "C" __global__ void too_much_shared(float* p) {
    dynamic_shared[threadIdx.x * 4] = 1;
    __syncthreads();
    p[threadIdx.x] = dynamic_shared[threadIdx.x * 4];
}
extern "C" __global__ void index(float* p, int at) { __shared__ float few[8]; p[0] = few[at + int(threadIdx.x)] = 1; }
extern "C" __global__ void write_at(float* p, int at) { if (threadIdx.x == 0) p[at] = 1; }
extern "C" __global__ void typed(unsigned short* a, const float* b, const double* c, int i, double d) {
    if (threadIdx.x == 0 && c) a[0] = (unsigned short)(i + d + (b != nullptr));
}
"""


@pytest.fixture(params=[FORWARDS, 2], ids=["forwards", "seed 2"])
def device(request):
    return HostDevice(order=request.param, texts={"mistakes": MISTAKES})


def start(device, kernel, *args, block=(32,), shared=0):
    device.launch("mistakes", kernel, (), (1,), block, args, shared)
    device.synchronize()


def test_divergent_threads_are_reported(device):
    for kernel, message in (
        ("early_return", "divergent barrier.*thread 40 has returned"),
        ("lonely_lane", "divergent warp.*thread (31|63) has returned"),
        ("barrier_against_shuffle", "divergent warp.*thread (3|35) waits at __syncthreads"),
        ("outside_the_mask", "shuffles from lane .*which takes no part"),
        ("not_in_its_mask", "a mask that leaves itself out"),
        ("too_much_shared", "behind its 128 bytes of dynamic shared memory, at 128"),
    ):
        p = device.zeros((64,), np.float32)
        with pytest.raises(HostGpuError, match=f"mistakes.{kernel}: .*{message}"):
            start(device, kernel, p, block=(64,), shared=128)
        start(device, "write_at", p, 0, block=(64,))
    with pytest.raises(HostGpuError, match=r"mistakes.index: .*:\d+: .*outside its array"):
        start(device, "index", p, 1)


def test_write_outside_an_array_is_found():
    for at, where in ((-1, "4 bytes before"), (10, "0 bytes behind"), (200, "behind")):
        device = HostDevice(texts={"mistakes": MISTAKES})
        p = device.zeros((10,), np.float32)
        with pytest.raises(HostGpuError, match=f"write_at wrote .*{where} an array of 40 bytes"):
            start(device, "write_at", p[2:5], at - 2)
        with pytest.raises(HostGpuError, match=where):
            device.xp.check()


def test_arguments_must_have_declared_types(device):
    a, b, c = (device.zeros((4,), dtype) for dtype in (np.uint16, np.float32, np.float64))
    for given, sum in ((b, 8), (None, 7)):
        start(device, "typed", a, given, c, 3, 4.5)
        assert device.download(a)[0] == sum
    for at, wrong, message in (
        (0, b, r"argument 0 is \*H, was given \*f"),
        (3, 3.0, "argument 3 is i, was given d"),
        (3, None, r"argument 3 is i, was given \*"),
        (1, HostDevice().zeros((4,), np.float32), "argument 1 is no array of this device"),
    ):
        args = [a, b, c, 3, 4.5]
        args[at] = wrong
        with pytest.raises(HostGpuError, match=f"mistakes.typed: {message}"):
            start(device, "typed", *args)
    for args, how, message in (
        ((a,), {}, "takes 5 arguments, was given 1"),
        ((a, b, c, 3, 4.5), {"block": (48,)}, "48 thr"),
    ):
        with pytest.raises(HostGpuError, match=message):
            start(device, "typed", *args, **how)
