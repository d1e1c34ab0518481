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

#define VECTOR4(type, of) \
    struct __align__(16) type { of x, y, z, w; }; \
    inline type make_##type(of x, of y, of z, of w) { return {x, y, z, w}; }
VECTOR4(uint4, unsigned)
VECTOR4(int4, int)
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

template <typename To, typename From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

}  // namespace shim

#define SHUFFLES(T) \
    inline T __shfl_xor_sync(unsigned mask, T x, int bits) { \
        return shim::shuffle(mask, x, fibers::current % 32 ^ bits); \
    } \
    inline T __shfl_up_sync(unsigned mask, T x, unsigned by) { \
        int lane = fibers::current % 32; \
        return shim::shuffle(mask, x, lane < int(by) ? lane : lane - int(by)); \
    }
SHUFFLES(int)
SHUFFLES(float)
SHUFFLES(double)
#undef SHUFFLES

inline unsigned __float_as_uint(float x) { return shim::same_bits<unsigned>(x); }
inline void __stwb(uint4* p, uint4 x) { *p = x; }
inline void __stcs(uint4* p, uint4 x) { *p = x; }
inline float __uint_as_float(unsigned x) { return shim::same_bits<float>(x); }

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
FUNCTION1(log)
FUNCTION1(sqrt)
FUNCTION1(tanh)
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

#define EXTREMES(T, least, most) \
    inline T min(T x, T y) { return least; } \
    inline T max(T x, T y) { return most; }
EXTREMES(int, x < y ? x : y, x > y ? x : y)
EXTREMES(long long, x < y ? x : y, x > y ? x : y)
EXTREMES(float, fminf(x, y), fmaxf(x, y))
EXTREMES(double, fmin(x, y), fmax(x, y))
#undef EXTREMES

// -- tensor cores: what gpu/cu/attention_mma.cu takes from PTX, word by word as the PTX ISA describes it

typedef const unsigned char* SharedAddress;
inline SharedAddress shared_address(const void* p) { return static_cast<SharedAddress>(p); }

namespace shim {

// What the lanes of one warp have brought together: matrices by row and column, or addresses of rows.
struct Together {
    float a[16][16], b[16][8];
    SharedAddress rows[fibers::WARP_SIZE];
};
inline Together together[fibers::MOST_THREADS / fibers::WARP_SIZE];

inline int lane() { return fibers::current % fibers::WARP_SIZE; }
inline Together& own_warp() { return together[fibers::current / fibers::WARP_SIZE]; }
inline void meet_warp() { fibers::meet(fibers::SYNC, 0xffffffffu, 0, 0); }

inline float half_of(unsigned pair, int i) { return same_bits<float>(pair >> 16 * i << 16); }

inline unsigned rounded(float x) {  // to the 16 bits of bfloat16, ties to even
    const unsigned bits = same_bits<unsigned>(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void load_matrices(unsigned (&to)[4], SharedAddress row, bool transposed) {
    if (uintptr_t(row) % 16) fibers::fail("a row of a matrix at an address that is not a multiple of 16");
    own_warp().rows[lane()] = row;
    meet_warp();
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned short pair[2];
        for (int i = 0; i < 2; i++) {
            const int across = lane() % 4 * 2 + i, down = lane() / 4;
            const int r = transposed ? across : down, c = transposed ? down : across;
            memcpy(&pair[i], own_warp().rows[8 * matrix + r] + 2 * c, 2);
        }
        to[matrix] = pair[0] | unsigned(pair[1]) << 16;
    }
    meet_warp();
}

// A copy arrives when it is waited for; until then there is poison where it goes.
struct Copy {
    unsigned char* to;
    const void* from;
    int bytes;
    bool there;
};
constexpr int MOST_COPIES = 64;
inline Copy copies[fibers::MOST_THREADS][MOST_COPIES];
inline int copies_under_way[fibers::MOST_THREADS];

}  // namespace shim

inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    shim::Together& all = shim::own_warp();
    const int group = shim::lane() >> 2, in_group = shim::lane() % 4;
    for (int i = 0; i < 8; i++) {
        const int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
        const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        all.a[row][column] = shim::half_of(a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; i++) {
        const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
        all.b[row][group] = shim::half_of(i < 2 ? b0 : b1, i % 2);
    }
    shim::meet_warp();
    for (int i = 0; i < 4; i++) {
        const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
        for (int k = 0; k < 16; k++) c[i] += all.a[row][k] * all.b[k][column];
    }
    shim::meet_warp();
}

inline void load_matrices(unsigned (&to)[4], SharedAddress row) { shim::load_matrices(to, row, false); }
inline void load_matrices_transposed(unsigned (&to)[4], SharedAddress row) {
    shim::load_matrices(to, row, true);
}

template <int BYTES>
inline void start_copy(SharedAddress to, const void* from, bool there) {
    int& count = shim::copies_under_way[fibers::current];
    if (count == shim::MOST_COPIES) return fibers::fail("more than %d copies under way", count);
    if ((uintptr_t(to) | (there ? uintptr_t(from) : 0)) % BYTES)
        fibers::fail("a copy of %d bytes between addresses that are not multiples of it", BYTES);
    unsigned char* place = const_cast<unsigned char*>(to);
    memset(place, 0xff, BYTES);
    shim::copies[fibers::current][count++] = {place, from, BYTES, there};
}

inline void wait_for_copies() {
    int& count = shim::copies_under_way[fibers::current];
    for (int i = 0; i < count; i++) {
        const shim::Copy& copy = shim::copies[fibers::current][i];
        if (copy.there) memcpy(copy.to, copy.from, size_t(copy.bytes));
        else memset(copy.to, 0, size_t(copy.bytes));
    }
    count = 0;
}

inline unsigned pair_of(float low, float high) { return shim::rounded(low) | shim::rounded(high) << 16; }

#include "launch.h"
