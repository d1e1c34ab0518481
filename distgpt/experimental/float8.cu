// Rounding of a bfloat16 tensor to float8. Its scale is a power of two, so that rounding is all that is lost.
// `greatest` looks for the largest magnitude, block by block; the other kernels take the largest of those,
// scale and round. Sizes are multiples of 16, and rows follow each other without gaps.
#include "common.cuh"

// Magnitudes are compared as the bits of bfloat16, among which a NaN is the largest.
__device__ __forceinline__ int warp_max(int x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

// Once in a kernel: nothing waits for whoever still reads the last one.
__device__ __forceinline__ int block_max(int x) {
    __shared__ int of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? of_warp[lane] : 0);
}

// parts[b] ← the largest magnitude that block b has seen; pieces are of 8 elements
extern "C" __global__ void greatest(int* parts, const stored* x, int pieces) {
    int most = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) {
        Moved<stored> moved;
        moved.bits = reinterpret_cast<const uint4*>(x)[i];
#pragma unroll
        for (int j = 0; j < PACK; j++) most = max(most, moved.at[j] & 0x7fff);
    }
    most = block_max(most);
    if (threadIdx.x == 0) parts[blockIdx.x] = most;
}

// A format: bits of the mantissa, bias of the exponent, code of the largest number, 1.75 · 2^TOP.
struct E4M3 {
    static constexpr int MANTISSA = 3, BIAS = 7, LARGEST = 0x7e, TOP = 8;
};
struct E5M2 {
    static constexpr int MANTISSA = 2, BIAS = 15, LARGEST = 0x7b, TOP = 15;
};

// The codes of two numbers, `low` in the lower byte: the nearest, ties to even; LARGEST for what lies beyond.
template <typename F>
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    if constexpr (F::MANTISSA == 3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    unsigned pair = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned bits = __float_as_uint(i ? high : low), magnitude = bits & 0x7fffffffu;
        constexpr int DROPPED = 23 - F::MANTISSA, NORMAL = 127 - F::BIAS;  // NORMAL: exponents below it vanish
        unsigned code;
        if (magnitude > 0x7f800000u) {
            code = 0x7f;
        } else if (magnitude >= unsigned(NORMAL + 1) << 23) {
            const unsigned even = magnitude >> DROPPED & 1;
            code = ((magnitude + even + ((1u << (DROPPED - 1)) - 1)) >> DROPPED) - (NORMAL << F::MANTISSA);
        } else {  // a sum with this has the last digit of the smallest numbers as its own
            const float shift = __uint_as_float(unsigned(NORMAL + 1 + DROPPED) << 23);
            code = __float_as_uint(__uint_as_float(magnitude) + shift) - __float_as_uint(shift);
        }
        if (code > unsigned(F::LARGEST) && magnitude <= 0x7f800000u) code = F::LARGEST;
        pair |= (code | (bits >> 24 & 0x80)) << 8 * i;
    }
    return pair;
#endif
}

// The factor before rounding, from the largest magnitude of each of `count` blocks; *scale ← what undoes it.
// Neither is a number where the largest is none.
template <typename F>
__device__ __forceinline__ float factor_for(float* scale, const int* parts, int count) {
    int most = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) most = max(most, parts[i]);
    most = block_max(most);
    const int exponent = most >> 7, above = (most & 0x7f) > 0x60;
    const int power = exponent == 0xff ? 128 : min(F::TOP + 127 - exponent - above, 126);
    const unsigned none = 0x7fc00000u;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *scale = __uint_as_float(power == 128 ? none : unsigned(127 - power) << 23);
    return __uint_as_float(power == 128 ? none : unsigned(127 + power) << 23);
}

// 8 elements as 8 bytes
template <typename F>
__device__ __forceinline__ void rounded_piece(unsigned (&out)[2], const stored* x, float factor) {
    const Elements<PACK> each = load<PACK>(x);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const real* at = each.at + 4 * i;
        out[i] = rounded_pair<F>(at[0] * factor, at[1] * factor);
        out[i] |= rounded_pair<F>(at[2] * factor, at[3] * factor) << 16;
    }
}

// out ← x; pieces are of 16 elements
template <typename F>
__device__ __forceinline__ void narrow(uint4* out, float* scale, const stored* x, const int* parts, int count,
                                       int pieces) {
    const float factor = factor_for<F>(scale, parts, count);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) {
        unsigned halves[2][2];
        rounded_piece<F>(halves[0], x + size_t(i) * 16, factor);
        rounded_piece<F>(halves[1], x + size_t(i) * 16 + 8, factor);
        out[i] = make_uint4(halves[0][0], halves[0][1], halves[1][0], halves[1][1]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
narrow_e4m3(unsigned char* out, float* scale, const stored* x, const int* parts, int count, int pieces) {
    narrow<E4M3>(reinterpret_cast<uint4*>(out), scale, x, parts, count, pieces);
}

extern "C" __global__ void __launch_bounds__(256)
narrow_e5m2(unsigned char* out, float* scale, const stored* x, const int* parts, int count, int pieces) {
    narrow<E5M2>(reinterpret_cast<uint4*>(out), scale, x, parts, count, pieces);
}

// out (columns, rows) ← xᵀ, in E4M3; a block has TILE rows and columns, and TILE · 4 threads
constexpr int TILE = 64, TILE_ROW = TILE + 8;
extern "C" __global__ void __launch_bounds__(256)
narrow_turned(unsigned char* out, float* scale, const stored* x, const int* parts, int count, int rows,
              int columns) {
    __shared__ __align__(16) unsigned char tile[TILE][TILE_ROW];
    const float factor = factor_for<E4M3>(scale, parts, count);
    const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    for (int i = threadIdx.x; i < TILE * TILE / PACK; i += blockDim.x) {
        const int row = i / (TILE / PACK), column = i % (TILE / PACK) * PACK;
        if (top + row >= rows || left + column >= columns) continue;
        unsigned piece[2];
        rounded_piece<E4M3>(piece, x + size_t(top + row) * columns + left + column, factor);
        unsigned* to = reinterpret_cast<unsigned*>(&tile[row][column]);
        to[0] = piece[0];
        to[1] = piece[1];
    }
    __syncthreads();
    const int column = threadIdx.x % TILE, row = threadIdx.x / TILE * 16;
    if (left + column >= columns || top + row >= rows) return;
    Moved<unsigned char> moved;
#pragma unroll
    for (int i = 0; i < 16; i++) moved.at[i] = tile[row + i][column];
    *reinterpret_cast<uint4*>(out + size_t(left + column) * rows + top + row) = moved.bits;
}
