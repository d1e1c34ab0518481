// Causal attention like attention.cu's, forward and backward, on tensor cores: for bfloat16, heads of
// multiples of 16 elements up to 128, and compute capability 8.0 or later.
//
// Each warp owns 16 rows of a block's ROWS (queries, or keys for their gradients). Its left factors (its rows,
// weights) and its sums stay in registers; the tiles of columns that all warps go through (keys, or queries)
// come to shared memory, the next ones while the last ones are used. Weights are rounded
// to bfloat16, sums are float. No atomics: results repeat bit by bit.
//
// Blocks: sequences · heads · tiles, the tiles of a head side by side, so that they find its rows in the
// cache, and of them those with the longest work first. The arrays are those of attention.cu, whose delta
// serves too.
#include "attention_mma.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // older GPUs are never asked to

// ---- forward

struct Softmax {
    float top[2] = {LOWEST, LOWEST}, total[2] = {0, 0};

    // Scores to weights; what was summed so far fades. `scale` turns scores into powers of 2.
    template <int COUNT>
    __device__ __forceinline__ void weigh(Sums<COUNT>& s, Sums<2 * STEPS>& sums, float scale) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = top[half];
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                highest = fmaxf(highest, fmaxf(s.at[n][2 * half], s.at[n][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 2));
            const float fade = exp2_fast((top[half] - highest) * scale), offset = -highest * scale;
            top[half] = highest;
            total[half] *= fade;
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) sums.at[n][i] *= fade;
#pragma unroll
            for (int n = 0; n < COUNT; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s.at[n][i] = exp2_fast(fmaf(s.at[n][i], scale, offset));
                    total[half] += s.at[n][i];
                }
        }
    }

    __device__ __forceinline__ void add_up_lanes() {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int step = 1; step <= 2; step *= 2) total[half] += __shfl_xor_sync(ALL, total[half], step);
    }
};

// y ← softmax(q kᵀ / √HEAD, causal) v; lse ← log of the softmax's denominator
extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 64 ? 4 : 3)
attention_forward(stored* y, real* lse, const stored* qkv, int seq_len, int n_head) {
    __shared__ __align__(16) stored tiles[2][2][KEYS * STRIDE];  // k and v, now and next
    const Place place(seq_len, n_head);
    const int first = (place.tiles - 1 - place.tile) * ROWS, end = min(first + ROWS, seq_len);
    const int own = first + warp_row(), last = own < end ? own + SIDE - 1 : -1;  // the warp's last column
    const float root = sqrtf(float(HEAD)), scale = LOG2_E / root;

    fetch_keys(tiles[0], qkv, place, 0);
    Factor<STEPS> q;
    load_rows(q, qkv + place.in_qkv(0, own < end ? own : first), place.qkv_step, place.rows_from(own));
    Sums<2 * STEPS> sums = {};
    Softmax softmax;
    for (int start = 0, stage = 0; start < end; start += KEYS, stage ^= 1) {
        wait_for_copies();
        __syncthreads();  // the tiles are here, and nobody reads those before them any more
        if (start + KEYS < end) fetch_keys(tiles[stage ^ 1], qkv, place, start + KEYS);
        if (start > last) continue;
        Sums<KEYS / 8> s;
        dots(s, q, tiles[stage][0]);
        if (start + KEYS > own) hide(s, [&](int right) { return right > own - start - ahead(); });
        softmax.weigh(s, sums, scale);
        add_weighted(sums, s, tiles[stage][1]);
    }
    __syncthreads();
    if (last < 0) return;

    softmax.add_up_lanes();
    const int rows = place.rows_from(own);
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (pair() == 0 && row_of(2 * half) < rows)
            lse[place.in_lse(own + row_of(2 * half))] = softmax.top[half] / root + logf(softmax.total[half]);
    store_rows(y + place.in_y(own), place.y_step, rows, tiles[0][0] + warp_row() * STRIDE, sums,
               1 / softmax.total[0], 1 / softmax.total[1]);
}

// ---- backward, with p = exp(q kᵀ / √HEAD - lse) and ds = p · (dy vᵀ - delta)

// dq ← Σ over keys of ds · k / √HEAD
extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 64 ? 3 : 2)
attention_backward_queries(stored* dqkv, real* sums, const stored* dy, const real* lse, const real* delta,
                           const stored* qkv, int seq_len, int n_head) {
    __shared__ __align__(16) stored tiles[2][2][KEYS * STRIDE];  // k and v, now and next
    const Place place(seq_len, n_head);
    const int first = (place.tiles - 1 - place.tile) * ROWS, end = min(first + ROWS, seq_len);
    const int own = first + warp_row(), last = own < end ? own + SIDE - 1 : -1;
    const int rows = place.rows_from(own), from = own < end ? own : first;
    const float root = sqrtf(float(HEAD)), scale = LOG2_E / root;

    fetch_keys(tiles[0], qkv, place, 0);
    Factor<STEPS> q, dout;
    load_rows(q, qkv + place.in_qkv(0, from), place.qkv_step, rows);
    load_rows(dout, dy + place.in_y(from), place.y_step, rows);
    float offset[2], mean[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(2 * half);
        offset[half] = row < rows ? -lse[place.in_lse(own + row)] * LOG2_E : 0;
        mean[half] = row < rows ? delta[place.in_lse(own + row)] : 0;
    }
    Sums<2 * STEPS> dq = {};
    for (int start = 0, stage = 0; start < end; start += KEYS, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (start + KEYS < end) fetch_keys(tiles[stage ^ 1], qkv, place, start + KEYS);
#pragma unroll 1
        for (int part = 0; part < KEYS && start + part <= last; part += KEY_PART) {
            const stored *k = tiles[stage][0] + part * STRIDE, *v = tiles[stage][1] + part * STRIDE;
            Sums<KEY_PART / 8> s, dp;
            dots(s, q, k);
            dots(dp, dout, v);
            if (start + part + KEY_PART > own)
                hide(s, [&](int right) { return right > own - start - part - ahead(); });
#pragma unroll
            for (int n = 0; n < KEY_PART / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float p = exp2_fast(fmaf(s.at[n][i], scale, offset[i / 2]));
                    s.at[n][i] = p * (dp.at[n][i] - mean[i / 2]);
                }
            add_weighted(dq, s, k);
        }
    }
    __syncthreads();
    store_rows(dqkv + place.in_qkv(0, from), place.qkv_step, rows, tiles[0][0] + warp_row() * STRIDE, dq,
               1 / root, 1 / root);
    if (sums) sum_rows(place.in_sums(sums, 0), tiles[0][0], place.rows_from(first));
}

// dk ← Σ over queries of ds · q / √HEAD; dv ← Σ over queries of p · dy
extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 64 ? 3 : 2)
attention_backward_keys(stored* dqkv, real* sums, const stored* dy, const real* lse, const real* delta,
                        const stored* qkv, int seq_len, int n_head) {
    static_assert(2 * QUERIES <= THREADS, "a thread for each statistic");
    static_assert(4 * QUERIES >= ROWS, "room for results");
    __shared__ __align__(16) stored tiles[2][2][QUERIES * STRIDE];  // q and dy, now and next
    __shared__ __align__(16) float statistics[2][2][QUERIES];       // lse and delta
    const Place place(seq_len, n_head);
    const int first = place.tile * ROWS, own = first + warp_row();
    const int rows = place.rows_from(own), from = own < seq_len ? own : first;
    const float root = sqrtf(float(HEAD)), scale = LOG2_E / root;
    const int column = threadIdx.x % QUERIES, which = threadIdx.x / QUERIES;
    const real* statistic = (which ? delta : lse) + place.in_lse(column);
    const auto fetch_queries = [&](int stage, int start) {
        const int count = place.rows_from(start);
        fetch<QUERIES>(tiles[stage][0], qkv + place.in_qkv(0, start), place.qkv_step, count);
        fetch<QUERIES>(tiles[stage][1], dy + place.in_y(start), place.y_step, count);
        if (which < 2)
            start_copy<4>(shared_address(&statistics[stage][which][column]), statistic + start,
                          column < count);
    };

    fetch_queries(0, first);
    Factor<STEPS> k, v;
    load_rows(k, qkv + place.in_qkv(1, from), place.qkv_step, rows);
    load_rows(v, qkv + place.in_qkv(2, from), place.qkv_step, rows);
    Sums<2 * STEPS> dk = {}, dv = {};
    for (int start = first, stage = 0; start < seq_len; start += QUERIES, stage ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (start + QUERIES < seq_len) fetch_queries(stage ^ 1, start + QUERIES);
        if (rows <= 0) continue;
#pragma unroll 1
        for (int part = 0; part < QUERIES; part += QUERY_PART) {
            if (start + part + QUERY_PART <= own) continue;
            const stored *q = tiles[stage][0] + part * STRIDE, *dout = tiles[stage][1] + part * STRIDE;
            Sums<QUERY_PART / 8> s, dp;
            dots(s, k, q);
            dots(dp, v, dout);
            if (start + part < own + SIDE)
                hide(s, [&](int right) { return right < own - start - part - ahead(); });
#pragma unroll
            for (int n = 0; n < QUERY_PART / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int at = part + n * 8 + pair() + i % 2;
                    s.at[n][i] = exp2_fast(fmaf(s.at[n][i], scale, -statistics[stage][0][at] * LOG2_E));
                    dp.at[n][i] = s.at[n][i] * (dp.at[n][i] - statistics[stage][1][at]);
                }
            add_weighted(dv, s, dout);
            add_weighted(dk, dp, q);
        }
    }
    __syncthreads();
    stored* results = tiles[0][0] + warp_row() * STRIDE;
    store_rows(dqkv + place.in_qkv(1, from), place.qkv_step, rows, results, dk, 1 / root, 1 / root);
    if (sums) sum_rows(place.in_sums(sums, 1), tiles[0][0], place.rows_from(first));
    store_rows(dqkv + place.in_qkv(2, from), place.qkv_step, rows, results, dv, 1, 1);
    if (sums) sum_rows(place.in_sums(sums, 2), tiles[0][0], place.rows_from(first));
}

#endif
