// Causal attention, forward and backward, without a T x T matrix in memory.
// A block owns the rows of one tile (queries, or keys for their gradients) of one head of one sequence. It
// iterates over tiles of columns (keys, or queries). Scores are in registers, the factors of matmuls in shared
// memory. There are no atomics: every element has one owner and sums have a fixed order, so results are bitwise
// reproducible. `attention_shape` in attention.py sets these macros: the tiles, their shared memory, HEAD, and
// GROUP, the number of query heads per key/value head. Grids:
//   attention_forward, attention_backward_queries   (sequences · heads, tiles)
//   attention_backward_keys                         (sequences · heads / GROUP, tiles)
// qkv is (rows, (heads + 2 heads / GROUP) · HEAD); lse, delta are (sequences, heads, T) of real.
#include "common.cuh"
#include "seen.cuh"

constexpr int W = HEAD % PACK == 0 ? PACK : 1;    // elements per access to memory
constexpr int CHUNK = 16 / sizeof(real);          // reals per access to shared memory
constexpr int CHUNKS = (HEAD + CHUNK - 1) / CHUNK;
constexpr int STRIDE = (CHUNKS | 1) * CHUNK;      // an odd number of chunks, so that a column has no bank conflicts
constexpr real LOWEST = real(-1e30);              // below every score; exp of a difference to it is 0 or 1

// `HEIGHT` x `LANES` threads. Thread (i, j) has rows i, i + HEIGHT, … and columns j, j + LANES, …. For sums
// over columns it has chunks j, j + LANES, … of the head. The remaining threads of a warp repeat this work.
template <int ROWS_, int COLUMNS_, int HEIGHT_, int LANES_>
struct Tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, HEIGHT = HEIGHT_, LANES = LANES_;
    static constexpr int THREADS = HEIGHT * LANES < WARP ? WARP : HEIGHT * LANES;
    static constexpr int R = ROWS / HEIGHT, C = COLUMNS / LANES, N = (CHUNKS + LANES - 1) / LANES;
    static constexpr int WEIGHTS = (COLUMNS / CHUNK | 1) * CHUNK;  // stride of rows of weights
    static constexpr int FACTOR_ROWS = ROWS + COLUMNS, WEIGHT_REALS = WEIGHTS * ROWS;
    static_assert(ROWS % HEIGHT == 0 && COLUMNS % LANES == 0 && COLUMNS % CHUNK == 0, "whole threads");

    __device__ static int row(int r) { return threadIdx.x / LANES % HEIGHT + r * HEIGHT; }
    __device__ static int column(int c) { return threadIdx.x % LANES + c * LANES; }
    __device__ static bool has_chunk(int n) { return CHUNKS % LANES == 0 || column(n) < CHUNKS; }
};

using Forward = Tile<FORWARD_ROWS, FORWARD_COLUMNS, FORWARD_HEIGHT, FORWARD_LANES>;
using Backward = Tile<BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_HEIGHT, BACKWARD_LANES>;
constexpr int FORWARD_REALS = STRIDE * (Forward::FACTOR_ROWS + Forward::COLUMNS) + Forward::WEIGHT_REALS;
constexpr int BACKWARD_REALS = 2 * (STRIDE * Backward::FACTOR_ROWS + Backward::WEIGHT_REALS);
static_assert(sizeof(real) * FORWARD_REALS == FORWARD_SHARED, "attention_shape() counts differently");
static_assert(sizeof(real) * BACKWARD_REALS == BACKWARD_SHARED, "attention_shape() counts differently");

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// ---- copies between memory and shared memory: `count` rows of HEAD elements, `step` elements apart

template <int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(real* tile, const stored* from, long long step, int count) {
    constexpr int PIECES = W == 1 ? CHUNKS * CHUNK : HEAD / W;  // the end of the last chunk must be zero
#pragma unroll 2
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, at = i % PIECES * W;
        Elements<W> x = {};
        if (row < count && at < HEAD) x = load<W>(from + row * step + at);
        store_real<W>(tile + row * STRIDE + at, x);
    }
}

template <int ROWS, int THREADS>
__device__ __forceinline__ void store_rows(stored* to, const real* tile, long long step, int count) {
    constexpr int PIECES = HEAD / W;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const int row = i / PIECES, at = i % PIECES * W;
        if (row < count) store<W>(to + row * step + at, load_real<W>(tile + row * STRIDE + at));
    }
}

// ---- the two matmuls

// s[r][c] = (row r of `rows`) · (row c of `columns`)
template <typename T>
__device__ __forceinline__ void dots(real (&s)[T::R][T::C], const real* rows, const real* columns) {
    for (auto& row : s)
        for (real& x : row) x = 0;
#pragma unroll 2
    for (int d = 0; d < CHUNKS * CHUNK; d += CHUNK) {
        Elements<CHUNK> a[T::R], b[T::C];
#pragma unroll
        for (int r = 0; r < T::R; r++) a[r] = load_real<CHUNK>(rows + T::row(r) * STRIDE + d);
#pragma unroll
        for (int c = 0; c < T::C; c++) b[c] = load_real<CHUNK>(columns + T::column(c) * STRIDE + d);
#pragma unroll
        for (int r = 0; r < T::R; r++)
#pragma unroll
            for (int c = 0; c < T::C; c++)
#pragma unroll
                for (int k = 0; k < CHUNK; k++) s[r][c] += a[r].at[k] * b[c].at[k];
    }
}

template <typename T>
struct Sums {
    Elements<CHUNK> at[T::R][T::N];

    __device__ void scale_row(int r, real factor) {
#pragma unroll
        for (int n = 0; n < T::N; n++)
#pragma unroll
            for (int k = 0; k < CHUNK; k++) at[r][n].at[k] *= factor;
    }
};

template <typename T>
__device__ __forceinline__ void put_weights(real* weights, const real (&s)[T::R][T::C]) {
#pragma unroll
    for (int r = 0; r < T::R; r++)
#pragma unroll
        for (int c = 0; c < T::C; c++) weights[T::row(r) * T::WEIGHTS + T::column(c)] = s[r][c];
}

// sums[r] += Σ over columns of weights[r][column] · (row `column` of `columns`)
template <typename T>
__device__ __forceinline__ void add_weighted(Sums<T>& sums, const real* weights, const real* columns) {
#pragma unroll 1
    for (int first = 0; first < T::COLUMNS; first += CHUNK) {
        Elements<CHUNK> w[T::R];
#pragma unroll
        for (int r = 0; r < T::R; r++) w[r] = load_real<CHUNK>(weights + T::row(r) * T::WEIGHTS + first);
#pragma unroll
        for (int c = 0; c < CHUNK; c++)
#pragma unroll
            for (int n = 0; n < T::N; n++) {
                if (!T::has_chunk(n)) continue;
                const auto v = load_real<CHUNK>(columns + (first + c) * STRIDE + T::column(n) * CHUNK);
#pragma unroll
                for (int r = 0; r < T::R; r++)
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) sums.at[r][n].at[k] += w[r].at[c] * v.at[k];
            }
    }
}

// to ← sums over `count` rows of a tile, if `to` is set. No thread writes to the tile before the next
// barrier.
template <typename T>
__device__ __forceinline__ void sum_rows(real* to, const real* tile, int count) {
#pragma unroll 1
    for (int j = threadIdx.x; to && j < HEAD; j += T::THREADS) {
        real sum = 0;
#pragma unroll 8
        for (int row = 0; row < T::ROWS; row++) sum += row < count ? tile[row * STRIDE + j] : real(0);
        to[j] = sum;
    }
}

// Uses `tile`, which other threads may still read until the first barrier here.
template <typename T>
__device__ __forceinline__ void store_sums(stored* to, long long step, int count, real* tile,
                                           const Sums<T>& sums) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < T::R; r++)
#pragma unroll
        for (int n = 0; n < T::N; n++)
            if (T::has_chunk(n))
                store_real<CHUNK>(tile + T::row(r) * STRIDE + T::column(n) * CHUNK, sums.at[r][n]);
    __syncthreads();
    store_rows<T::ROWS, T::THREADS>(to, tile, step, count);
}

// The position of a query head of one sequence, and of the key/value head that its GROUP shares.
struct Place {
    int sequence;
    long long head, head_of_all, first_row, qkv_step, y_step;

    // `unit`: among all query heads
    __device__ Place(unsigned unit, int seq_len, int n_head)
        : sequence(unit / n_head), head(unit % n_head), head_of_all(unit),
          first_row(sequence * (long long)seq_len), qkv_step((n_head + 2LL * (n_head / GROUP)) * HEAD),
          y_step((long long)n_head * HEAD) {}

    // part 0, 1, 2: q, k, v
    __device__ long long column(int part) const {
        return part == 0 ? head * HEAD : y_step + (part - 1) * (y_step / GROUP) + head / GROUP * HEAD;
    }
    __device__ long long in_qkv(int part, int t) const { return (first_row + t) * qkv_step + column(part); }
    __device__ long long in_y(int t) const { return (first_row + t) * y_step + head * HEAD; }
    // The position in dqkv's sums over the rows of each tile, (sequences · tiles, columns of qkv)
    __device__ real* in_sums(real* sums, int part) const {
        const long long row = (long long)sequence * gridDim.y + blockIdx.y;
        return sums ? sums + row * qkv_step + column(part) : nullptr;
    }
};

// ---- forward

// y ← softmax(q kᵀ / √HEAD, causal) v; lse ← log of the softmax's denominator
extern "C" __global__ void __launch_bounds__(Forward::THREADS)
attention_forward(stored* y, real* lse, const stored* qkv, const int* positions, int seq_len, int n_head) {
    using T = Forward;
    real* q = reinterpret_cast<real*>(dynamic_shared);
    real* k = q + T::ROWS * STRIDE;
    real *v = k + T::COLUMNS * STRIDE, *weights = v + T::COLUMNS * STRIDE;
    const Place place(blockIdx.x, seq_len, n_head);
    const int first = (gridDim.y - 1 - blockIdx.y) * T::ROWS;  // the longest work starts first
    const int rows = min(T::ROWS, seq_len - first);
    const real scale = 1 / sqrt(real(HEAD));

    load_rows<T::ROWS, T::THREADS>(q, qkv + place.in_qkv(0, first), place.qkv_step, rows);
    Sums<T> sums = {};
    real top[T::R], total[T::R];
    int begin[T::R];
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        top[r] = LOWEST, total[r] = 0;
        begin[r] = T::row(r) < rows ? first_key(positions, place, first + T::row(r)) : 0;
    }

    int start = first_key(positions, place, first) / T::COLUMNS * T::COLUMNS;
    for (; start < first + rows; start += T::COLUMNS) {
        const int columns = min(T::COLUMNS, seq_len - start);
        __syncthreads();
        load_rows<T::COLUMNS, T::THREADS>(k, qkv + place.in_qkv(1, start), place.qkv_step, columns);
        load_rows<T::COLUMNS, T::THREADS>(v, qkv + place.in_qkv(2, start), place.qkv_step, columns);
        __syncthreads();
        real s[T::R][T::C];
        dots<T>(s, q, k);
#pragma unroll
        for (int r = 0; r < T::R; r++) {
            const int query = first + T::row(r);
            real highest = top[r];
#pragma unroll
            for (int c = 0; c < T::C; c++) {
                s[r][c] *= scale;
                const int key = start + T::column(c);
                if (sees(query, begin[r], key)) highest = highest < s[r][c] ? s[r][c] : highest;
            }
#pragma unroll
            for (int step = T::LANES / 2; step > 0; step /= 2) {
                const real other = __shfl_xor_sync(ALL, highest, step);
                highest = highest < other ? other : highest;
            }
            const real fade = exp(top[r] - highest);
            top[r] = highest;
            total[r] *= fade;
            sums.scale_row(r, fade);
#pragma unroll
            for (int c = 0; c < T::C; c++) {
                const int key = start + T::column(c);
                s[r][c] = sees(query, begin[r], key) ? exp(s[r][c] - highest) : real(0);
                total[r] += s[r][c];
            }
        }
        put_weights<T>(weights, s);
        __syncthreads();
        add_weighted<T>(sums, weights, v);
    }

#pragma unroll
    for (int r = 0; r < T::R; r++) {
#pragma unroll
        for (int step = T::LANES / 2; step > 0; step /= 2) total[r] += __shfl_xor_sync(ALL, total[r], step);
        sums.scale_row(r, 1 / total[r]);
        if (T::column(0) == 0 && T::row(r) < rows)
            lse[(long long)blockIdx.x * seq_len + first + T::row(r)] = top[r] + log(total[r]);
    }
    store_sums<T>(y + place.in_y(first), place.y_step, rows, q, sums);
}

// ---- backward, with p = exp(q kᵀ / √HEAD - lse) and ds = p · (dy vᵀ - delta)

// dq ← Σ over keys of ds · k / √HEAD
extern "C" __global__ void __launch_bounds__(Backward::THREADS)
attention_backward_queries(stored* dqkv, real* sums, const stored* dy, const real* lse, const real* delta,
                           const stored* qkv, const int* positions, int seq_len, int n_head) {
    using T = Backward;
    real* q = reinterpret_cast<real*>(dynamic_shared);
    real* dout = q + T::ROWS * STRIDE;
    real* k = dout + T::ROWS * STRIDE;
    real *v = k + T::COLUMNS * STRIDE, *weights = v + T::COLUMNS * STRIDE;
    const Place place(blockIdx.x, seq_len, n_head);
    const int first = (gridDim.y - 1 - blockIdx.y) * T::ROWS;
    const int rows = min(T::ROWS, seq_len - first);
    const real scale = 1 / sqrt(real(HEAD));

    load_rows<T::ROWS, T::THREADS>(q, qkv + place.in_qkv(0, first), place.qkv_step, rows);
    load_rows<T::ROWS, T::THREADS>(dout, dy + place.in_y(first), place.y_step, rows);
    real log_sum[T::R], mean[T::R];
    int begin[T::R];
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        begin[r] = T::row(r) < rows ? first_key(positions, place, first + T::row(r)) : 0;
        const long long at = (long long)blockIdx.x * seq_len + first + T::row(r);
        log_sum[r] = T::row(r) < rows ? lse[at] : real(0);
        mean[r] = T::row(r) < rows ? delta[at] : real(0);
    }
    Sums<T> dq = {};

    int start = first_key(positions, place, first) / T::COLUMNS * T::COLUMNS;
    for (; start < first + rows; start += T::COLUMNS) {
        const int columns = min(T::COLUMNS, seq_len - start);
        __syncthreads();
        load_rows<T::COLUMNS, T::THREADS>(k, qkv + place.in_qkv(1, start), place.qkv_step, columns);
        load_rows<T::COLUMNS, T::THREADS>(v, qkv + place.in_qkv(2, start), place.qkv_step, columns);
        __syncthreads();
        real s[T::R][T::C], dp[T::R][T::C];
        dots<T>(s, q, k);
        dots<T>(dp, dout, v);
#pragma unroll
        for (int r = 0; r < T::R; r++)
#pragma unroll
            for (int c = 0; c < T::C; c++) {
                const int key = start + T::column(c);
                const bool seen = T::row(r) < rows && sees(first + T::row(r), begin[r], key);
                s[r][c] = seen ? exp(s[r][c] * scale - log_sum[r]) * (dp[r][c] - mean[r]) : real(0);
            }
        put_weights<T>(weights, s);
        __syncthreads();
        add_weighted<T>(dq, weights, k);
    }
#pragma unroll
    for (int r = 0; r < T::R; r++) dq.scale_row(r, scale);
    store_sums<T>(dqkv + place.in_qkv(0, first), place.qkv_step, rows, q, dq);
    sum_rows<T>(place.in_sums(sums, 0), q, rows);
}

// dk ← Σ over queries of ds · q / √HEAD; dv ← Σ over queries of p · dy
extern "C" __global__ void __launch_bounds__(Backward::THREADS)
attention_backward_keys(stored* dqkv, real* sums, const stored* dy, const real* lse, const real* delta,
                        const stored* qkv, const int* positions, int seq_len, int n_head) {
    using T = Backward;
    real* k = reinterpret_cast<real*>(dynamic_shared);
    real* v = k + T::ROWS * STRIDE;
    real* q = v + T::ROWS * STRIDE;
    real* dout = q + T::COLUMNS * STRIDE;
    real *p_weights = dout + T::COLUMNS * STRIDE, *ds_weights = p_weights + T::WEIGHT_REALS;
    const Place place(blockIdx.x * GROUP, seq_len, n_head);
    const int first = blockIdx.y * T::ROWS;
    const int rows = min(T::ROWS, seq_len - first);
    const real scale = 1 / sqrt(real(HEAD));

    load_rows<T::ROWS, T::THREADS>(k, qkv + place.in_qkv(1, first), place.qkv_step, rows);
    load_rows<T::ROWS, T::THREADS>(v, qkv + place.in_qkv(2, first), place.qkv_step, rows);
    Sums<T> dk = {}, dv = {};
    const int begin_of_queries = first / T::COLUMNS * T::COLUMNS;
    const int stop = last_query<T::COLUMNS>(positions, place, begin_of_queries + T::COLUMNS, first + rows, seq_len);

#pragma unroll 1
    for (int member = 0; member < GROUP; member++) {
        const Place of(blockIdx.x * GROUP + member, seq_len, n_head);
        for (int start = begin_of_queries; start < stop; start += T::COLUMNS) {
            const int columns = min(T::COLUMNS, seq_len - start);
            __syncthreads();
            load_rows<T::COLUMNS, T::THREADS>(q, qkv + of.in_qkv(0, start), of.qkv_step, columns);
            load_rows<T::COLUMNS, T::THREADS>(dout, dy + of.in_y(start), of.y_step, columns);
            __syncthreads();
            real s[T::R][T::C], dp[T::R][T::C];
            dots<T>(s, k, q);
            dots<T>(dp, v, dout);
#pragma unroll
            for (int c = 0; c < T::C; c++) {
                const bool inside = T::column(c) < columns;
                const long long at = of.head_of_all * seq_len + start + T::column(c);
                const real log_sum = inside ? lse[at] : real(0), mean = inside ? delta[at] : real(0);
                const int begin = inside ? first_key(positions, of, start + T::column(c)) : 0;
#pragma unroll
                for (int r = 0; r < T::R; r++) {
                    const int key = first + T::row(r);
                    const bool seen = inside && sees(start + T::column(c), begin, key);
                    s[r][c] = seen ? exp(s[r][c] * scale - log_sum) : real(0);
                    dp[r][c] = s[r][c] * (dp[r][c] - mean);
                }
            }
            put_weights<T>(p_weights, s);
            put_weights<T>(ds_weights, dp);
            __syncthreads();
            add_weighted<T>(dv, p_weights, dout);
            add_weighted<T>(dk, ds_weights, q);
        }
    }
#pragma unroll
    for (int r = 0; r < T::R; r++) dk.scale_row(r, scale);
    store_sums<T>(dqkv + place.in_qkv(1, first), place.qkv_step, rows, k, dk);
    sum_rows<T>(place.in_sums(sums, 1), k, rows);
    store_sums<T>(dqkv + place.in_qkv(2, first), place.qkv_step, rows, v, dv);
    sum_rows<T>(place.in_sums(sums, 2), v, rows);
}

