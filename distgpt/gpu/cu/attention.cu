// Causal attention, forward and backward, that never holds a T x T matrix.
// A block owns the rows of one tile (queries, or keys for their gradients) of one head of one sequence and
// goes through tiles of columns (keys, or queries). Scores live in registers, the factors of matmuls in shared
// memory. No atomics: every element has one owner and sums have one order, so results repeat bit by bit.
// `attention_shape` in attention.py gives the tiles, their shared memory and HEAD as macros. Grids:
//   attention_forward, attention_backward_queries, attention_backward_keys   (sequences · heads, tiles)
//   attention_delta                                                          DELTA_LANES for each row and head
// qkv is (rows, 3 · heads · HEAD); lse, delta are (sequences, heads, T) of real.
#include "attention.cuh"

// ---- forward

// y ← softmax(q kᵀ / √HEAD, causal) v; lse ← log of the softmax's denominator
extern "C" __global__ void __launch_bounds__(Forward::THREADS)
attention_forward(stored* y, real* lse, const stored* qkv, int seq_len, int n_head) {
    using T = Forward;
    real* q = reinterpret_cast<real*>(dynamic_shared);
    real* k = q + T::ROWS * STRIDE;
    real *v = k + T::COLUMNS * STRIDE, *weights = v + T::COLUMNS * STRIDE;
    const Place place(seq_len, n_head);
    const int first = (gridDim.y - 1 - blockIdx.y) * T::ROWS;  // the longest work starts first
    const int rows = min(T::ROWS, seq_len - first);
    const real scale = 1 / sqrt(real(HEAD));

    load_rows<T::ROWS, T::THREADS>(q, qkv + place.in_qkv(0, first), place.qkv_step, rows);
    Sums<T> sums = {};
    real top[T::R], total[T::R];
#pragma unroll
    for (int r = 0; r < T::R; r++) top[r] = LOWEST, total[r] = 0;

    for (int start = 0; start < first + rows; start += T::COLUMNS) {
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
                if (start + T::column(c) <= query) highest = highest < s[r][c] ? s[r][c] : highest;
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
                s[r][c] = start + T::column(c) <= query ? exp(s[r][c] - highest) : real(0);
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

// delta ← Σ dy · y over a head, which is Σ p · (dy vᵀ) over its keys; `count` is rows · heads
extern "C" __global__ void attention_delta(real* delta, const stored* dy, const stored* y, int count,
                                           int seq_len, int n_head) {
    const long long index = (long long)blockIdx.x * (blockDim.x / DELTA_LANES) + threadIdx.x / DELTA_LANES;
    const int lane = threadIdx.x % DELTA_LANES, head = int(index % n_head);
    const long long row = index / n_head;
    real sum = 0;
    if (index < count) {
        for (int d = lane * W; d < HEAD; d += DELTA_LANES * W) {
            const Elements<W> a = load<W>(dy + index * HEAD + d), b = load<W>(y + index * HEAD + d);
#pragma unroll
            for (int i = 0; i < W; i++) sum += a.at[i] * b.at[i];
        }
    }
#pragma unroll
    for (int step = DELTA_LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (lane == 0 && index < count) delta[(row / seq_len * n_head + head) * seq_len + row % seq_len] = sum;
}

// dq ← Σ over keys of ds · k / √HEAD
extern "C" __global__ void __launch_bounds__(Backward::THREADS)
attention_backward_queries(stored* dqkv, real* sums, const stored* dy, const real* lse, const real* delta,
                           const stored* qkv, int seq_len, int n_head) {
    using T = Backward;
    real* q = reinterpret_cast<real*>(dynamic_shared);
    real* dout = q + T::ROWS * STRIDE;
    real* k = dout + T::ROWS * STRIDE;
    real *v = k + T::COLUMNS * STRIDE, *weights = v + T::COLUMNS * STRIDE;
    const Place place(seq_len, n_head);
    const int first = (gridDim.y - 1 - blockIdx.y) * T::ROWS;
    const int rows = min(T::ROWS, seq_len - first);
    const real scale = 1 / sqrt(real(HEAD));

    load_rows<T::ROWS, T::THREADS>(q, qkv + place.in_qkv(0, first), place.qkv_step, rows);
    load_rows<T::ROWS, T::THREADS>(dout, dy + place.in_y(first), place.y_step, rows);
    real log_sum[T::R], mean[T::R];
#pragma unroll
    for (int r = 0; r < T::R; r++) {
        const long long at = (long long)blockIdx.x * seq_len + first + T::row(r);
        log_sum[r] = T::row(r) < rows ? lse[at] : real(0);
        mean[r] = T::row(r) < rows ? delta[at] : real(0);
    }
    Sums<T> dq = {};

    for (int start = 0; start < first + rows; start += T::COLUMNS) {
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
                const bool seen = T::row(r) < rows && start + T::column(c) <= first + T::row(r);
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
                        const stored* qkv, int seq_len, int n_head) {
    using T = Backward;
    real* k = reinterpret_cast<real*>(dynamic_shared);
    real* v = k + T::ROWS * STRIDE;
    real* q = v + T::ROWS * STRIDE;
    real* dout = q + T::COLUMNS * STRIDE;
    real *p_weights = dout + T::COLUMNS * STRIDE, *ds_weights = p_weights + T::WEIGHT_REALS;
    const Place place(seq_len, n_head);
    const int first = blockIdx.y * T::ROWS;
    const int rows = min(T::ROWS, seq_len - first);
    const real scale = 1 / sqrt(real(HEAD));

    load_rows<T::ROWS, T::THREADS>(k, qkv + place.in_qkv(1, first), place.qkv_step, rows);
    load_rows<T::ROWS, T::THREADS>(v, qkv + place.in_qkv(2, first), place.qkv_step, rows);
    Sums<T> dk = {}, dv = {};

    for (int start = first / T::COLUMNS * T::COLUMNS; start < seq_len; start += T::COLUMNS) {
        const int columns = min(T::COLUMNS, seq_len - start);
        __syncthreads();
        load_rows<T::COLUMNS, T::THREADS>(q, qkv + place.in_qkv(0, start), place.qkv_step, columns);
        load_rows<T::COLUMNS, T::THREADS>(dout, dy + place.in_y(start), place.y_step, columns);
        __syncthreads();
        real s[T::R][T::C], dp[T::R][T::C];
        dots<T>(s, k, q);
        dots<T>(dp, v, dout);
#pragma unroll
        for (int c = 0; c < T::C; c++) {
            const bool inside = T::column(c) < columns;
            const long long at = (long long)blockIdx.x * seq_len + start + T::column(c);
            const real log_sum = inside ? lse[at] : real(0), mean = inside ? delta[at] : real(0);
#pragma unroll
            for (int r = 0; r < T::R; r++) {
                const bool seen = inside && first + T::row(r) <= start + T::column(c);
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
#pragma unroll
    for (int r = 0; r < T::R; r++) dk.scale_row(r, scale);
    store_sums<T>(dqkv + place.in_qkv(1, first), place.qkv_step, rows, k, dk);
    sum_rows<T>(place.in_sums(sums, 1), k, rows);
    store_sums<T>(dqkv + place.in_qkv(2, first), place.qkv_step, rows, v, dv);
    sum_rows<T>(place.in_sums(sums, 2), v, rows);
}

