// What CUDA C++ has beyond C++, as far as the kernels use it, so that g++ compiles them for this machine.
#pragma once

#include <utility>

#include "fibers.h"

#define __global__ __attribute__((noinline, used))
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // static in a function, may be extern, and all in one place of memory

struct uint3 {
    unsigned x, y, z;
};
inline uint3 threadIdx, blockIdx, blockDim, gridDim;

#define VECTOR2(type, of) \
    struct __align__(2 * sizeof(of)) type { of x, y; }; \
    inline type make_##type(of x, of y) { return {x, y}; }
#define VECTOR4(type, of) \
    struct __align__(16) type { of x, y, z, w; }; \
    inline type make_##type(of x, of y, of z, of w) { return {x, y, z, w}; }
VECTOR2(uint2, unsigned)
VECTOR2(int2, int)
VECTOR2(float2, float)
VECTOR2(double2, double)
VECTOR4(uint4, unsigned)
VECTOR4(int4, int)
VECTOR4(float4, float)
#undef VECTOR2
#undef VECTOR4

// -- waiting and exchanging

inline void __syncthreads() { fibers::wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { fibers::meet(fibers::SYNC, mask, 0, 0); }

namespace shim {

template <typename T>
inline T shuffle(unsigned mask, T x, int source) {
    static_assert(sizeof(T) <= 8 && __is_trivially_copyable(T));
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    bits = fibers::meet(fibers::SHUFFLE, mask, bits, source);
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The lane to read from, or the own one where the other lies outside the part of `width` lanes.
inline int lane_in_part(int other, int width) {
    const int lane = fibers::current % fibers::WARP_SIZE;
    return other >= 0 && other / width == lane / width ? other : lane;
}

template <typename To, typename From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

}  // namespace shim

#define SHUFFLES(T) \
    inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) { \
        int lane = fibers::current % 32, other = lane ^ bits; \
        return shim::shuffle(mask, x, other / width > lane / width ? lane : other); \
    } \
    inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) { \
        return shim::shuffle(mask, x, shim::lane_in_part(fibers::current % 32 + int(by), width)); \
    } \
    inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) { \
        return shim::shuffle(mask, x, shim::lane_in_part(fibers::current % 32 - int(by), width)); \
    } \
    inline T __shfl_sync(unsigned mask, T x, int source, int width = 32) { \
        return shim::shuffle(mask, x, fibers::current % 32 / width * width + (source & (width - 1))); \
    }
SHUFFLES(int)
SHUFFLES(unsigned)
SHUFFLES(long long)
SHUFFLES(unsigned long long)
SHUFFLES(float)
SHUFFLES(double)
#undef SHUFFLES

inline unsigned __ballot_sync(unsigned mask, int yes) {
    return unsigned(fibers::meet(fibers::BALLOT, mask, yes != 0, 0));
}
inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) == mask; }

inline int atomicAdd(int* at, int x) {
    int before = *at;
    *at += x;
    return before;
}

// -- memory, bits

template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcs(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline void __stcs(T* p, T x) { *p = x; }
template <typename T> inline void __stcg(T* p, T x) { *p = x; }

inline unsigned __float_as_uint(float x) { return shim::same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return shim::same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return shim::same_bits<float>(x); }
inline float __int_as_float(int x) { return shim::same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return shim::same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return shim::same_bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

// -- numbers: C's functions under C's names, and for float under those of double too

#define FUNCTION1(name) \
    extern "C" double name(double) noexcept; \
    extern "C" float name##f(float) noexcept; \
    inline float name(float x) { return name##f(x); }
#define FUNCTION2(name) \
    extern "C" double name(double, double) noexcept; \
    extern "C" float name##f(float, float) noexcept; \
    inline float name(float x, float y) { return name##f(x, y); }
FUNCTION1(exp)
FUNCTION1(exp2)
FUNCTION1(expm1)
FUNCTION1(log)
FUNCTION1(log2)
FUNCTION1(log1p)
FUNCTION1(sqrt)
FUNCTION1(tanh)
FUNCTION1(fabs)
FUNCTION1(floor)
FUNCTION1(ceil)
FUNCTION2(pow)
FUNCTION2(fmax)
FUNCTION2(fmin)
#undef FUNCTION1
#undef FUNCTION2
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }

#define EXTREMES(T, least, most) \
    inline T min(T x, T y) { return least; } \
    inline T max(T x, T y) { return most; }
EXTREMES(int, x < y ? x : y, x > y ? x : y)
EXTREMES(unsigned, x < y ? x : y, x > y ? x : y)
EXTREMES(long long, x < y ? x : y, x > y ? x : y)
EXTREMES(float, fminf(x, y), fmaxf(x, y))
EXTREMES(double, fmin(x, y), fmax(x, y))
#undef EXTREMES

#include "launch.h"
