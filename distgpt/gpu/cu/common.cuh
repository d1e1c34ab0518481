// Types and small helpers of all kernels. A source is compiled once per storage type. It includes nothing
// else, so that neither CUDA's headers nor a C library need to be installed.
//
//   stored   the type of activations and parameters in memory: bfloat16 (its bits), float or double
//   real     the type of arithmetic, statistics and gradients of parameters
//   PACK     the number of stored elements per access: 16 bytes
#pragma once

#if defined(STORAGE_BFLOAT16)
typedef unsigned short stored;
typedef float real;
#elif defined(STORAGE_FLOAT64)
typedef double stored;
typedef double real;
#else
typedef float stored;
typedef float real;
#endif

constexpr int PACK = 16 / sizeof(stored);
constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ real to_real(stored x) {
#if defined(STORAGE_BFLOAT16)
    return __uint_as_float(unsigned(x) << 16);
#else
    return x;
#endif
}

__device__ __forceinline__ stored to_stored(real x) {  // to the nearest, ties to even
#if defined(STORAGE_BFLOAT16) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#elif defined(STORAGE_BFLOAT16)
    unsigned bits = __float_as_uint(x);
    if (x != x) return (unsigned short)(bits >> 16 | 0x40);
    return (unsigned short)((bits + ((bits >> 16 & 1) + 0x7fffu)) >> 16);
#else
    return x;
#endif
}

// The bits of one of the two bfloat16 around x. The nearer one is more likely. Depends only on index and key.
__device__ __forceinline__ unsigned short dithered(float x, unsigned index, unsigned key) {
    unsigned noise = index * 0x9E3779B1u + key;
    noise = (noise ^ noise >> 16) * 0x85EBCA6Bu;  // Murmur3's finalizer, as in kernels/fused/flat.py
    noise = (noise ^ noise >> 13) * 0xC2B2AE35u;
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7F800000u) != 0x7F800000u) bits += noise >> 16;
    else if ((bits & 0x7FFFFFFFu) > 0x7F800000u) bits |= 0x400000u;  // a NaN stays one
    return (unsigned short)(bits >> 16);
}

// W adjacent elements: one, or 16 bytes.
template <int W>
struct Elements {
    real at[W];
};

template <int W>
__device__ __forceinline__ void operator+=(Elements<W>& x, const Elements<W>& y) {
#pragma unroll
    for (int i = 0; i < W; i++) x.at[i] += y.at[i];
}

template <int W>
__device__ __forceinline__ void operator*=(Elements<W>& x, const Elements<W>& y) {
#pragma unroll
    for (int i = 0; i < W; i++) x.at[i] *= y.at[i];
}

// 16 bytes, moved in one access, as numbers of a type.
template <typename T>
union Moved {
    uint4 bits;
    T at[16 / sizeof(T)];
};

// 16 bytes as stored in memory. In this form, bfloat16 needs half the registers.
template <int W>
struct Piece {
    uint4 bits;
};

template <>
struct Piece<1> {
    stored bits;
};

template <int W>
__device__ __forceinline__ Piece<W> load_piece(const stored* p) {
    return {*reinterpret_cast<const decltype(Piece<W>::bits)*>(p)};
}

template <int W>
__device__ __forceinline__ Elements<W> elements(const Piece<W>& piece) {
    Elements<W> x;
    if constexpr (W == 1) {
        x.at[0] = to_real(piece.bits);
    } else {
        Moved<stored> moved;
        moved.bits = piece.bits;
#pragma unroll
        for (int i = 0; i < W; i++) x.at[i] = to_real(moved.at[i]);
    }
    return x;
}

template <int W>
__device__ __forceinline__ Elements<W> load(const stored* p) {
    return elements<W>(load_piece<W>(p));
}

template <int W>
__device__ __forceinline__ void store(stored* p, const Elements<W>& x) {
    if constexpr (W == 1) {
        *p = to_stored(x.at[0]);
    } else {
        Moved<stored> moved;
#pragma unroll
        for (int i = 0; i < W; i++) moved.at[i] = to_stored(x.at[i]);
        __stwb(reinterpret_cast<uint4*>(p), moved.bits);  // the compiler sometimes splits an ordinary store
    }
}

// Loads of W elements of an array of `real`, in pieces of 16 bytes.
template <int W>
__device__ __forceinline__ Elements<W> load_real(const real* p) {
    Elements<W> x;
    if constexpr (W * sizeof(real) % 16 == 0) {
        constexpr int EACH = 16 / sizeof(real);
#pragma unroll
        for (int i = 0; i < W; i += EACH) {
            Moved<real> moved;
            moved.bits = *reinterpret_cast<const uint4*>(p + i);
#pragma unroll
            for (int j = 0; j < EACH; j++) x.at[i + j] = moved.at[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x.at[i] = p[i];
    }
    return x;
}

// `once`: not read again soon, so that it need not replace other data in the cache.
template <int W>
__device__ __forceinline__ void store_real(real* p, const Elements<W>& x, bool once = false) {
    if constexpr (W * sizeof(real) % 16 == 0) {
        constexpr int EACH = 16 / sizeof(real);
#pragma unroll
        for (int i = 0; i < W; i += EACH) {
            Moved<real> moved;
#pragma unroll
            for (int j = 0; j < EACH; j++) moved.at[j] = x.at[i + j];
            if (once) __stcs(reinterpret_cast<uint4*>(p + i), moved.bits);
            else *reinterpret_cast<uint4*>(p + i) = moved.bits;
        }
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) p[i] = x.at[i];
    }
}

// 2 to the power of x, with an error of about 2 ulp; 0 if the result is below the normal range.
__device__ __forceinline__ float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -126 ? 0.0f : exp2f(x);
#endif
}

// The position of the first token of a row's sequence. `start` has one value for all, one each, or is null
// (0).
__device__ __forceinline__ int first_of(int row, const int* start, int starts, int seq_len) {
    return start ? start[row / seq_len % starts] : 0;
}

// The sum over the lanes of a warp, returned to every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

// The sum over a block of whole warps, in a fixed order, returned to every thread. All threads must call.
template <typename T>
__device__ __forceinline__ T block_sum(T x) {
    __shared__ T of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // threads may still read the last sum
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? of_warp[lane] : T(0));
}

// ---- column sums: a block has WARP pieces of W columns in a slice of the rows, and reads DOWN rows at a
// time. The grid's height is the number of slices.

constexpr int DOWN = 8;

template <int W>
struct Slice {
    int column, first, last;  // the thread's first column and row; the end of the slice

    __device__ __forceinline__ explicit Slice(int n) {
        const int rows = (n + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * rows;
        column = (blockIdx.x * WARP + threadIdx.x % WARP) * W;
        first = begin + threadIdx.x / WARP;
        last = min(n, begin + rows);
    }
};

// partial (slices, c) ← the sum of a slice, from the sums of its threads. All threads must call.
template <int W>
__device__ __forceinline__ void hand_over_columns(real* partial, const Elements<W>& sum, int c) {
    __shared__ real sums[DOWN][WARP * W];
    const int lane = threadIdx.x % WARP, down = threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < W; i++) sums[down][lane * W + i] = sum.at[i];
    __syncthreads();
    for (int i = threadIdx.x; i < WARP * W; i += blockDim.x) {
        const int column = blockIdx.x * WARP * W + i;
        if (column >= c) break;
        real total = 0;
#pragma unroll
        for (int d = 0; d < DOWN; d++) total += sums[d][i];
        partial[size_t(blockIdx.y) * c + column] = total;
    }
}

// Instantiates `name` for W = PACK and W = 1, as the kernels name_packed and name_single. The second is for
// rows that are not a multiple of 16 bytes. Written as KERNEL(name, (parameters), (arguments)).
// BOUNDED_KERNEL also sets the maximum number of threads per block (a launch with too many registers would
// fail), and the minimum number of blocks of the first kernel per multiprocessor.
#define KERNEL(name, parameters, arguments) BOUNDED_KERNEL(name, 1024, 1, parameters, arguments)
#define BOUNDED_KERNEL(name, threads, blocks, parameters, arguments)         \
    extern "C" __global__ void __launch_bounds__(threads, blocks)            \
    name##_packed parameters { name<PACK> arguments; }                       \
    extern "C" __global__ void __launch_bounds__(threads)                    \
    name##_single parameters { name<1> arguments; }

// The factor of gradients. The first scalars are grad_scale and clip. NaN if the norm is not finite.
__device__ __forceinline__ double clipped_scale(const double* norm, const double* scalars) {
    const double length = scalars[0] * sqrt(norm[0]), clip = scalars[1];
    if (!(length - length == 0)) return length - length;
    return clip > 0 && length > clip ? scalars[0] * (clip / length) : scalars[0];
}
