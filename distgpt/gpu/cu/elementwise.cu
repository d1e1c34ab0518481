// Elementwise kernels: GELU (tanh form), ReLU and SwiGLU, forward and backward; sums; rotary positions.
#include "common.cuh"

// tanh(u) = 1 - 2 / (e^2u + 1), so gelu(x) = x σ(2u) with u = √(2/π) (x + 0.044715 x³).
constexpr double LINEAR = 1.5957691216057308;  // 2 √(2/π)
constexpr double CUBIC = 0.07135481627260025;  // LINEAR · 0.044715

// In float, two instructions of the special function unit. Exact functions would take longer than memory
// access.
__device__ __forceinline__ float sigmoid(float x) {
    const float below = 1 + exp2_fast(x * -1.4426950408889634f);
#if defined(__CUDA_ARCH__)
    float share;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(below));
    return share;
#else
    return 1 / below;
#endif
}
__device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }

struct Gelu {
    static __device__ __forceinline__ real value(real x) {
        return x * sigmoid(x * (real(LINEAR) + real(CUBIC) * x * x));
    }
    static __device__ __forceinline__ real gradient(real x) {
        const real share = sigmoid(x * (real(LINEAR) + real(CUBIC) * x * x));
        return share + x * share * (real(1) - share) * (real(LINEAR) + real(3 * CUBIC) * x * x);
    }
};

struct Relu {  // preserves NaN
    static __device__ __forceinline__ real value(real x) { return x < 0 ? real(0) : x; }
    static __device__ __forceinline__ real gradient(real x) { return x > 0 ? real(1) : real(0); }
};

struct Relu2 {
    static __device__ __forceinline__ real value(real x) { return Relu::value(x) * Relu::value(x); }
    static __device__ __forceinline__ real gradient(real x) { return 2 * Relu::value(x); }
};

// Counts are ints, so 32 bits suffice. They divide far faster than 64.
__device__ __forceinline__ unsigned own_place(unsigned width) {
    return (blockIdx.x * blockDim.x + threadIdx.x) * width;
}

// y ← act(pre)
template <typename Act, int W>
__device__ void forward(stored* y, const stored* pre, int count) {
    const unsigned i = own_place(W);
    if (i >= unsigned(count)) return;
    Elements<W> x = load<W>(pre + i);
#pragma unroll
    for (int k = 0; k < W; k++) x.at[k] = Act::value(x.at[k]);
    store<W>(y + i, x);
}

// dpre ← y · act'(pre), where y is the gradient of the activation; then y ← act(pre), if requested.
template <typename Act, int W>
__device__ void backward(stored* dpre, stored* y, const stored* pre, int count, int again) {
    const unsigned i = own_place(W);
    if (i >= unsigned(count)) return;
    const Elements<W> x = load<W>(pre + i), dy = load<W>(y + i);
    Elements<W> out;
#pragma unroll
    for (int k = 0; k < W; k++) out.at[k] = dy.at[k] * Act::gradient(x.at[k]);
    store<W>(dpre + i, out);
    if (!again) return;
#pragma unroll
    for (int k = 0; k < W; k++) out.at[k] = Act::value(x.at[k]);
    store<W>(y + i, out);
}

// As above for (n, c), and partial (slices, c) ← sums over the rows of each slice of dpre
template <typename Act, int W>
__device__ void backward_sums(real* partial, stored* dpre, stored* y, const stored* pre, int again, int n, int c) {
    constexpr int AT_ONCE = 2;  // rows loaded before a store
    const Slice<W> slice(n);
    Elements<W> sum = {};
    for (int row = slice.first; slice.column < c && row < slice.last; row += AT_ONCE * DOWN) {
        Piece<W> xs[AT_ONCE], dys[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const size_t at = size_t(row + k * DOWN) * c + slice.column;
            if (row + k * DOWN < slice.last) xs[k] = load_piece<W>(pre + at), dys[k] = load_piece<W>(y + at);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (row + k * DOWN >= slice.last) break;
            const size_t at = size_t(row + k * DOWN) * c + slice.column;
            const Elements<W> x = elements(xs[k]), dy = elements(dys[k]);
            Elements<W> out;
#pragma unroll
            for (int i = 0; i < W; i++) out.at[i] = dy.at[i] * Act::gradient(x.at[i]);
            sum += out;
            store<W>(dpre + at, out);
            if (!again) continue;
#pragma unroll
            for (int i = 0; i < W; i++) out.at[i] = Act::value(x.at[i]);
            store<W>(y + at, out);
        }
    }
    hand_over_columns(partial, sum, c);
}

// SwiGLU: silu of the left half of a row scales the right half, which gives h elements per row.
template <int W>
__device__ void swiglu(stored* y, const stored* pre, int count, int h) {
    const unsigned i = own_place(W);
    if (i >= unsigned(count)) return;
    const stored* p = pre + size_t(i / h) * h + i;
    const Elements<W> left = load<W>(p), right = load<W>(p + h);
    Elements<W> out;
#pragma unroll
    for (int k = 0; k < W; k++) out.at[k] = left.at[k] * sigmoid(left.at[k]) * right.at[k];
    store<W>(y + i, out);
}

template <int W>
__device__ void swiglu_backward(stored* dpre, stored* y, const stored* pre, int count, int h,
                                int again) {
    const unsigned i = own_place(W);
    if (i >= unsigned(count)) return;
    const size_t at = size_t(i / h) * h + i;
    const Elements<W> left = load<W>(pre + at), right = load<W>(pre + at + h), dy = load<W>(y + i);
    Elements<W> dleft, dright, out;
#pragma unroll
    for (int k = 0; k < W; k++) {
        const real share = sigmoid(left.at[k]), silu = left.at[k] * share;
        dleft.at[k] = dy.at[k] * right.at[k] * (share + silu * (real(1) - share));
        dright.at[k] = dy.at[k] * silu;
        out.at[k] = silu * right.at[k];
    }
    store<W>(dpre + at, dleft);
    store<W>(dpre + at + h, dright);
    if (again) store<W>(y + i, out);
}

// y ← a + b
template <int W>
__device__ void add(stored* y, const stored* a, const stored* b, int count) {
    const unsigned i = own_place(W);
    if (i >= unsigned(count)) return;
    Elements<W> left = load<W>(a + i);
    const Elements<W> right = load<W>(b + i);
    left += right;
    store<W>(y + i, left);
}

// Every row of y (…, c) += b
template <int W>
__device__ void add_bias(stored* y, const stored* b, int count, int c) {
    const unsigned i = own_place(W);
    if (i >= unsigned(count)) return;
    Elements<W> left = load<W>(y + i);
    const Elements<W> right = load<W>(b + i % c);
    left += right;
    store<W>(y + i, left);
}

#define ACTIVATION(name, Act)                                                                              \
    template <int W>                                                                                       \
    __device__ void name(stored* y, const stored* pre, int count) {                                  \
        forward<Act, W>(y, pre, count);                                                                    \
    }                                                                                                      \
    template <int W>                                                                                       \
    __device__ void name##_backward(stored* dpre, stored* y, const stored* pre, int count,           \
                                    int again) {                                                           \
        backward<Act, W>(dpre, y, pre, count, again);                                                      \
    }                                                                                                      \
    template <int W>                                                                                       \
    __device__ void name##_backward_sums(real* partial, stored* dpre, stored* y, const stored* pre,        \
                                         int again, int n, int c) {                                        \
        backward_sums<Act, W>(partial, dpre, y, pre, again, n, c);                                         \
    }                                                                                                      \
    BOUNDED_KERNEL(name##_backward_sums, DOWN * WARP, 4,                                                   \
                   (real * partial, stored* dpre, stored* y, const stored* pre, int again, int n, int c),  \
                   (partial, dpre, y, pre, again, n, c))                                                   \
    KERNEL(name, (stored * y, const stored* pre, int count), (y, pre, count))                        \
    KERNEL(name##_backward, (stored * dpre, stored* y, const stored* pre, int count, int again),     \
           (dpre, y, pre, count, again))

ACTIVATION(gelu, Gelu)
ACTIVATION(relu, Relu)
ACTIVATION(relu2, Relu2)
KERNEL(swiglu, (stored * y, const stored* pre, int count, int h), (y, pre, count, h))
KERNEL(swiglu_backward, (stored * dpre, stored* y, const stored* pre, int count, int h, int again),
       (dpre, y, pre, count, h, again))
KERNEL(add, (stored * y, const stored* a, const stored* b, int count), (y, a, b, count))
KERNEL(add_bias, (stored * y, const stored* b, int count, int c), (y, b, count, c))

// ---- RoPE, in place on the q and k parts of qkv: element i of a head is paired with i + head/2

// A thread rotates W pairs of q and k, in `heads` heads of 2 half elements at the start of each row of qkv
// (n, row_size). cos and sin (≥ start + seq_len, half)
template <int W>
__device__ void rope(stored* qkv, const real* cos, const real* sin, const int* start, int starts, int n,
                     int seq_len, int heads, int row_size, int half, int inverse) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    const int pieces = half / W, per_row = heads * pieces;
    if (index >= unsigned(n) * per_row) return;
    const int row = int(index / per_row), rest = int(index % per_row);
    const int head = rest / pieces, j = rest % pieces * W;
    const int position = first_of(row, start, starts, seq_len) + row % seq_len;
    stored* left = qkv + size_t(row) * row_size + size_t(head) * 2 * half + j;
    stored* right = left + half;
    const Elements<W> c = load_real<W>(cos + size_t(position) * half + j);
    const Elements<W> s = load_real<W>(sin + size_t(position) * half + j);
    const Elements<W> a = load<W>(left), b = load<W>(right);
    Elements<W> out_left, out_right;
#pragma unroll
    for (int i = 0; i < W; i++) {
        const real turn = inverse ? -s.at[i] : s.at[i];
        out_left.at[i] = a.at[i] * c.at[i] - b.at[i] * turn;
        out_right.at[i] = a.at[i] * turn + b.at[i] * c.at[i];
    }
    store<W>(left, out_left);
    store<W>(right, out_right);
}

KERNEL(rope,
       (stored * qkv, const real* cos, const real* sin, const int* start, int starts, int n, int seq_len,
        int heads, int row_size, int half, int inverse),
       (qkv, cos, sin, start, starts, n, seq_len, heads, row_size, half, inverse))

// ---- norms of the heads of q and k, in place; a warp per head, `count` heads in total and `heads` per row
// of qkv

constexpr double QK_SCALE = 1.2;  // as in core/ops/api.py

extern "C" __global__ void
qk_norm(stored* qkv, real* rstd, double eps, int count, int heads, int size, int row_size) {
    const int unit = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (unit >= count) return;
    stored* x = qkv + size_t(unit / heads) * row_size + size_t(unit % heads) * size;
    real sum = 0;
    for (int j = lane; j < size; j += WARP) sum += to_real(x[j]) * to_real(x[j]);
    const real inverse = 1 / sqrt(warp_sum(sum) / size + real(eps)), factor = real(QK_SCALE) * inverse;
    for (int j = lane; j < size; j += WARP) x[j] = to_stored(to_real(x[j]) * factor);
    if (lane == 0) rstd[unit] = inverse;
}

extern "C" __global__ void
qk_norm_backward(stored* dqkv, const stored* qkv, const real* rstd, int count, int heads, int size,
                 int row_size) {
    const int unit = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (unit >= count) return;
    const size_t at = size_t(unit / heads) * row_size + size_t(unit % heads) * size;
    const stored* x = qkv + at;
    stored* dx = dqkv + at;
    real along = 0;
    for (int j = lane; j < size; j += WARP) along += to_real(x[j]) * to_real(dx[j]);
    along = warp_sum(along) / (real(QK_SCALE * QK_SCALE) * size);
    const real factor = real(QK_SCALE) * rstd[unit];
    for (int j = lane; j < size; j += WARP) dx[j] = to_stored(factor * (to_real(dx[j]) - to_real(x[j]) * along));
}

// The same with gains (2 size): of the first `queries` heads, and of the others. xhat (rows, heads · size)

extern "C" __global__ void
qk_norm_gain(stored* qkv, stored* xhat, real* rstd, const stored* gain, double eps, int count, int heads,
             int queries, int size, int row_size) {
    const int unit = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (unit >= count) return;
    stored* x = qkv + size_t(unit / heads) * row_size + size_t(unit % heads) * size;
    stored* normed = xhat + size_t(unit) * size;
    const stored* w = gain + (unit % heads < queries ? 0 : size);
    real sum = 0;
    for (int j = lane; j < size; j += WARP) sum += to_real(x[j]) * to_real(x[j]);
    const real inverse = 1 / sqrt(warp_sum(sum) / size + real(eps));
    for (int j = lane; j < size; j += WARP) {
        const real value = to_real(x[j]) * inverse;
        normed[j] = to_stored(value);
        x[j] = to_stored(value * to_real(w[j]));
    }
    if (lane == 0) rstd[unit] = inverse;
}

// A warp for q of a row, and one for k, `count` in total. Each lane has its own elements. dgain (rows, 2
// size)
extern "C" __global__ void
qk_norm_gain_backward(stored* dqkv, real* dgain, const stored* xhat, const real* rstd, const stored* gain,
                      int count, int heads, int queries, int size, int row_size) {
    const int unit = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (unit >= count) return;
    const int row = unit / 2, is_key = unit % 2;
    const int first = is_key ? queries : 0, last = is_key ? heads : queries;
    const stored* w = gain + is_key * size;
    stored* dx = dqkv + size_t(row) * row_size;
    const stored* x = xhat + size_t(row) * heads * size;
    for (int j = lane; j < size; j += WARP) {
        real sum = 0;
        for (int i = first * size + j; i < last * size; i += size) sum += to_real(dx[i]) * to_real(x[i]);
        dgain[size_t(unit) * size + j] = sum;
    }
    for (int head = first; head < last; head++) {
        const int at = head * size;
        real along = 0;
        for (int j = lane; j < size; j += WARP)
            along += to_real(dx[at + j]) * to_real(w[j]) * to_real(x[at + j]);
        along = warp_sum(along) / size;
        const real scale = rstd[size_t(row) * heads + head];
        for (int j = lane; j < size; j += WARP)
            dx[at + j] = to_stored(scale * (to_real(dx[at + j]) * to_real(w[j]) - to_real(x[at + j]) * along));
    }
}

// y ← w + scale · b a, or w if there is no b; y, w (count,) in rows of `inputs`, b (outputs, rank)
extern "C" __global__ void
add_low_rank(stored* y, const stored* w, const stored* b, const stored* a, double scale, int count, int inputs,
             int rank) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    if (!b) {
        y[i] = w[i];
        return;
    }
    const stored* factor = b + size_t(i / inputs) * rank;
    const stored* column = a + i % inputs;
    real sum = 0;
    for (int k = 0; k < rank; k++) sum += to_real(factor[k]) * to_real(column[size_t(k) * inputs]);
    const real total = to_real(w[i]) + real(scale) * sum;
#if defined(STORAGE_BFLOAT16)
    y[i] = dithered(total, unsigned(i), 0);
#else
    y[i] = total;
#endif
}
