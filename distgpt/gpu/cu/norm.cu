// Layer norm and RMS norm, with the residual sum before them. Compiled for rows of CHANNELS elements.
//
// A row belongs to ROW_THREADS threads, which keep it in registers from the first read to the last write.
// This is one warp if it suffices, with multiple rows per block of THREADS, or the whole block.
#include "common.cuh"

constexpr int C = CHANNELS;
constexpr int ROWS = THREADS / ROW_THREADS;  // rows per block iteration

// Blocks of the backward norm per multiprocessor. They limit the registers per thread.
constexpr int ROOM = (sizeof(stored) == 2 ? 3 : 2) * 128 / THREADS;
constexpr int RESIDENT = ROOM < 1 ? 1 : ROOM;

// The pieces of a row in one thread, as elements or as stored in memory.
template <int W>
constexpr int PIECES = (C + W * ROW_THREADS - 1) / (W * ROW_THREADS);

template <int W>
struct Row {
    Elements<W> piece[PIECES<W>];
};

template <int W>
struct StoredRow {
    Piece<W> piece[PIECES<W>];
};

template <int W>
__device__ __forceinline__ int place(int piece) {
    return (piece * ROW_THREADS + int(threadIdx.x) % ROW_THREADS) * W;
}

// Start all loads of a row before the first store. Loads cannot be moved before a store, since for all the
// compiler can tell it may write to the same memory.
template <int W>
__device__ __forceinline__ void load_row(StoredRow<W>& row, const stored* p) {
#pragma unroll
    for (int k = 0; k < PIECES<W>; k++)
        if (place<W>(k) < C) row.piece[k] = load_piece<W>(p + place<W>(k));
}

// The sum over the threads of a row.
__device__ __forceinline__ real row_sum(real x) {
    if constexpr (ROW_THREADS == WARP) return warp_sum(x);
    return block_sum(x);
}

// s ← x + r; y ← (s - mean) · rstd · w + b. Without r, s is x.
template <int W>
__device__ void add_norm(stored* y, stored* s, real* mean, real* rstd, const stored* x, const stored* r,
                         const stored* w, const stored* b, double eps, int n) {
    const int row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= n) return;  // true for all threads of the row
    const size_t at = size_t(row) * C;
    StoredRow<W> terms, added;
    load_row(terms, x + at);
    if (r) load_row(added, r + at);
    Row<W> values;
    real total = 0;
#pragma unroll
    for (int k = 0; k < PIECES<W>; k++) {
        const int j = place<W>(k);
        if (j < C) {
            Elements<W>& v = values.piece[k];
            v = elements(terms.piece[k]);
            if (r) {
                const Elements<W> residual = elements(added.piece[k]);
#pragma unroll
                for (int i = 0; i < W; i++) v.at[i] = to_real(to_stored(v.at[i] + residual.at[i]));
                store<W>(s + at + j, v);
            }
#pragma unroll
            for (int i = 0; i < W; i++) total += v.at[i];
        }
    }
    const real mu = mean ? row_sum(total) / C : real(0);
    real square = 0;
#pragma unroll
    for (int k = 0; k < PIECES<W>; k++)
        if (place<W>(k) < C)
#pragma unroll
            for (int i = 0; i < W; i++) {
                const real centred = values.piece[k].at[i] - mu;
                square += centred * centred;
            }
    const real scale = real(1) / sqrt(row_sum(square) / C + real(eps));
    if (threadIdx.x % ROW_THREADS == 0) {
        if (mean) mean[row] = mu;
        rstd[row] = scale;
    }
#pragma unroll
    for (int k = 0; k < PIECES<W>; k++) {
        const int j = place<W>(k);
        if (j < C) {
            Elements<W> v = values.piece[k];
#pragma unroll
            for (int i = 0; i < W; i++) v.at[i] = (v.at[i] - mu) * scale;
            if (w) v *= load<W>(w + j);
            if (b) v += load<W>(b + j);
            store<W>(y + at + j, v);
        }
    }
}

// Add up the sums of the rows of a block in order, and write the total to the block's place.
template <int W>
__device__ void hand_over(real* partial, const Row<W>& sums) {
    if constexpr (ROWS == 1) {
#pragma unroll
        for (int k = 0; k < PIECES<W>; k++)
            if (place<W>(k) < C) store_real<W>(partial + place<W>(k), sums.piece[k]);
    } else {
        __shared__ real total[C];
        for (int turn = 0; turn < ROWS; turn++) {
            __syncthreads();
            if (int(threadIdx.x) / ROW_THREADS != turn) continue;
#pragma unroll
            for (int k = 0; k < PIECES<W>; k++)
                if (place<W>(k) < C)
#pragma unroll
                    for (int i = 0; i < W; i++) {
                        real& sum = total[place<W>(k) + i];
                        sum = (turn ? sum : real(0)) + sums.piece[k].at[i];
                    }
        }
        __syncthreads();
        for (int j = threadIdx.x; j < C; j += THREADS) partial[j] = total[j];
        __syncthreads();
    }
}

// dx ← dres + rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w; y ← x̂ · w + b, if requested; and
// each block's Σ dy · x̂, Σ dy and Σ dx in sums (blocks, 3C), if requested.
template <int W>
__device__ void norm_backward(stored* dx, stored* y, real* sums, const stored* dy, const stored* dres,
                              const stored* s, const real* mean, const real* rstd, const stored* w,
                              const stored* b, int n) {
    Row<W> dgain, dshift, dinput;
#pragma unroll
    for (int k = 0; k < PIECES<W>; k++)
#pragma unroll
        for (int i = 0; i < W; i++) dgain.piece[k].at[i] = dshift.piece[k].at[i] = dinput.piece[k].at[i] = 0;
    for (int first = blockIdx.x * ROWS; first < n; first += gridDim.x * ROWS) {
        const int row = first + threadIdx.x / ROW_THREADS;
        if (row >= n) break;  // true for all threads of the row
        const size_t at = size_t(row) * C;
        StoredRow<W> gradient, value, added;
        load_row(gradient, dy + at);
        load_row(value, s + at);
        if (dres) load_row(added, dres + at);
        const real mu = mean ? mean[row] : real(0), scale = rstd[row];
        real along = 0, total = 0;
#pragma unroll
        for (int k = 0; k < PIECES<W>; k++) {
            const int j = place<W>(k);
            if (j < C) {
                Elements<W> g = elements(gradient.piece[k]), v = elements(value.piece[k]);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    v.at[i] = (v.at[i] - mu) * scale;
                    dgain.piece[k].at[i] += g.at[i] * v.at[i];
                    dshift.piece[k].at[i] += g.at[i];
                }
                if (w) g *= load<W>(w + j);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    along += g.at[i] * v.at[i];
                    total += g.at[i];
                }
            }
        }
        along = row_sum(along) / C;
        total = mean ? row_sum(total) / C : real(0);
#pragma unroll
        for (int k = 0; k < PIECES<W>; k++) {
            const int j = place<W>(k);
            if (j < C) {
                Elements<W> g = elements(gradient.piece[k]), v = elements(value.piece[k]), gain = {};
                if (w) {
                    gain = load<W>(w + j);
                    g *= gain;
                }
#pragma unroll
                for (int i = 0; i < W; i++) {
                    v.at[i] = (v.at[i] - mu) * scale;
                    g.at[i] = scale * (g.at[i] - total - v.at[i] * along);
                }
                if (dres) g += elements(added.piece[k]);
                dinput.piece[k] += g;
                store<W>(dx + at + j, g);
                if (y) {
                    if (w) v *= gain;
                    if (b) v += load<W>(b + j);
                    store<W>(y + at + j, v);
                }
            }
        }
    }
    if (sums) {
        real* mine = sums + size_t(blockIdx.x) * 3 * C;
        hand_over<W>(mine, dgain);
        hand_over<W>(mine + C, dshift);
        hand_over<W>(mine + 2 * C, dinput);
    }
}

BOUNDED_KERNEL(add_norm, THREADS, 1,
       (stored* y, stored* s, real* mean, real* rstd, const stored* x, const stored* r, const stored* w,
        const stored* b, double eps, int n),
       (y, s, mean, rstd, x, r, w, b, eps, n))
BOUNDED_KERNEL(norm_backward, THREADS, RESIDENT,
       (stored* dx, stored* y, real* sums, const stored* dy, const stored* dres, const stored* s,
        const real* mean, const real* rstd, const stored* w, const stored* b, int n),
       (dx, y, sums, dy, dres, s, mean, rstd, w, b, n))
