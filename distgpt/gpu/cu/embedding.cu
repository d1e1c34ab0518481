// Token and position embedding, and their gradients, summed in an order that depends only on the tokens.
#include "common.cuh"

// x[row] ← wte[tokens[row]] + wpe[start + row mod seq_len], or wpe[positions[row]]. start (starts,): of all
// sequences or each, or null
template <int W>
__device__ void embed(stored* x, const int* tokens, const stored* wte, const stored* wpe, const int* start,
                      int starts, const int* positions, int n, int seq_len, int c) {
    const unsigned pieces = c / W, index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= n * pieces) return;
    const int row = int(index / pieces), j = int(index % pieces) * W;
    Elements<W> sum = load<W>(wte + size_t(tokens[row]) * c + j);
    if (wpe) {
        const int position = positions ? positions[row] : first_of(row, start, starts, seq_len) + row % seq_len;
        const Elements<W> place = load<W>(wpe + size_t(position) * c + j);
        sum += place;
    }
    store<W>(x + size_t(row) * c + j, sum);
}

// The last c of `width` columns of x[row] += w[tokens[row]]
template <int W>
__device__ void add_embedding(stored* x, const int* tokens, const stored* w, int n, int width, int c) {
    const unsigned pieces = c / W, index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= n * pieces) return;
    const int row = int(index / pieces), j = int(index % pieces) * W;
    stored* to = x + size_t(row) * width + width - c + j;
    Elements<W> sum = load<W>(to);
    sum += load<W>(w + size_t(tokens[row]) * c + j);
    store<W>(to, sum);
}

// out[i] ← tokens[i - 1]. The first of each sequence gets before[sequence], or 0 if it is null, and tokens at
// position 0 get 0 if there are positions.
extern "C" __global__ void previous_tokens(int* out, const int* tokens, const int* before,
                                           const int* positions, int n, int seq_len) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const bool begins = positions ? positions[i] == 0 : i % seq_len == 0;
    out[i] = !begins ? tokens[i - 1] : before ? before[i / seq_len] : 0;
}

// dwpe[t] += Σ over sequences of dx[sequence · seq_len + t]
template <int W>
__device__ void position_gradient(real* dwpe, const stored* dx, int n, int seq_len, int c) {
    const unsigned pieces = c / W, index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= seq_len * pieces) return;
    const int t = int(index / pieces), j = int(index % pieces) * W;
    Elements<W> sum = load_real<W>(dwpe + size_t(t) * c + j);
#pragma unroll 8
    for (int row = t; row < n; row += seq_len) {
        const Elements<W> v = load<W>(dx + size_t(row) * c + j);
        sum += v;
    }
    store_real<W>(dwpe + size_t(t) * c + j, sum);
}

// Sort rows by token, equal tokens by row: a radix sort of one byte per pass, with three kernels each. A
// block has a tile of 256 rows, one per value of a byte. By comparing all rows with each other, it counts
// each value, and its occurrences before each row. These are integers, so the result does not depend on
// timing.
constexpr int TILE = 256;

// The byte by which the tile's rows are sorted, -1 after the last row. `from`: current order of the rows, or
// null.
__device__ __forceinline__ int byte_of(const int* from, const int* tokens, int n, int round) {
    const int i = blockIdx.x * TILE + threadIdx.x;
    return i < n ? tokens[from ? from[i] : i] >> 8 * round & (TILE - 1) : -1;
}

// counts (TILE, tiles) ← rows of each tile per value; before (n,) ← rows before each row with the same value
extern "C" __global__ void __launch_bounds__(TILE)
count_values(int* counts, int* before, const int* from, const int* tokens, int n, int round) {
    __shared__ int4 values[TILE / 4];
    const int own = byte_of(from, tokens, n, round), thread = threadIdx.x, i = blockIdx.x * TILE + thread;
    reinterpret_cast<int*>(values)[thread] = own;
    __syncthreads();
    int count = 0, earlier = 0;
#pragma unroll 8
    for (int k = 0; k < TILE / 4; k++) {
        const int4 four = values[k];
        count += (four.x == thread) + (four.y == thread) + (four.z == thread) + (four.w == thread);
        earlier += (four.x == own && 4 * k < thread) + (four.y == own && 4 * k + 1 < thread) +
                   (four.z == own && 4 * k + 2 < thread) + (four.w == own && 4 * k + 3 < thread);
    }
    counts[thread * gridDim.x + blockIdx.x] = count;
    if (i < n) before[i] = earlier;
}

// The sum over the threads before this one, and over all of a block of TILE. All threads must call.
struct Scanned {
    int before, all;
};

__device__ __forceinline__ Scanned scan(int x) {
    __shared__ int of_warp[TILE / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = x;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int lower = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += lower;
    }
    __syncthreads();  // threads may still read the last sums
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    Scanned result = {sum - x, 0};
#pragma unroll
    for (int i = 0; i < TILE / WARP; i++) {
        if (i < warp) result.before += of_warp[i];
        result.all += of_warp[i];
    }
    return result;
}

// One block per value: counts ← rows of earlier tiles with the value; totals (TILE,) ← rows of all tiles
extern "C" __global__ void __launch_bounds__(TILE) add_up_tiles(int* counts, int* totals, int tiles) {
    int* own = counts + blockIdx.x * tiles;
    int sum = 0;
    for (int start = 0; start < tiles; start += TILE) {
        const int tile = start + threadIdx.x;
        const Scanned scanned = scan(tile < tiles ? own[tile] : 0);
        if (tile < tiles) own[tile] = sum + scanned.before;
        sum += scanned.all;
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// to (n,) ← the rows in their new order
extern "C" __global__ void __launch_bounds__(TILE)
place_rows(int* to, const int* counts, const int* totals, const int* before, const int* from,
           const int* tokens, int n, int round) {
    __shared__ int starts[TILE];
    const int value = byte_of(from, tokens, n, round), i = blockIdx.x * TILE + threadIdx.x;
    starts[threadIdx.x] = scan(totals[threadIdx.x]).before;
    __syncthreads();
    if (i < n) to[starts[value] + counts[value * gridDim.x + blockIdx.x] + before[i]] = from ? from[i] : i;
}

constexpr int CHUNK = 32;  // sorted rows per block

__device__ __forceinline__ int token_at(const int* tokens, const int* order, int n, int i) {
    return i < 0 || i >= n ? -1 : tokens[order[i]];
}

// dwte[token] += Σ dx over its rows within one chunk, for the last c of `width` columns of dx. A token that
// continues from the previous chunk is summed in partial[chunk][0], and one that continues in the next chunk
// in partial[chunk][1].
template <int W>
__device__ void token_gradient(real* dwte, real* partial, const int* order, const int* tokens,
                               const stored* dx, int n, int width, int c) {
    dx += width - c;
    const int chunk = blockIdx.x, first = chunk * CHUNK, last = min(n, first + CHUNK);
    for (int j = (blockIdx.y * blockDim.x + threadIdx.x) * W; j < c; j += gridDim.y * blockDim.x * W) {
        for (int i = first; i < last;) {
            const int token = tokens[order[i]];
            const bool begun = i == first && token_at(tokens, order, n, i - 1) == token;
            Elements<W> sum;
#pragma unroll
            for (int k = 0; k < W; k++) sum.at[k] = 0;
            for (; i < last && tokens[order[i]] == token; i++) {
                const Elements<W> v = load<W>(dx + size_t(order[i]) * width + j);
                sum += v;
            }
            const bool goes_on = i == last && token_at(tokens, order, n, i) == token;
            if (begun || goes_on) {
                store_real<W>(partial + (size_t(chunk) * 2 + !begun) * c + j, sum);
            } else {
                real* out = dwte + size_t(token) * c + j;
                Elements<W> v = load_real<W>(out);
                v += sum;
                store_real<W>(out, v);
            }
        }
    }
}

// The rest: if a token continues after its first chunk, this chunk's block adds it up.
template <int W>
__device__ void token_gradient_across(real* dwte, const real* partial, const int* order, const int* tokens,
                                      int n, int c) {
    const int chunk = blockIdx.x, first = chunk * CHUNK, end = first + CHUNK;
    if (end >= n) return;
    const int token = tokens[order[end - 1]];
    if (token_at(tokens, order, n, end) != token) return;
    if (token_at(tokens, order, n, first) == token && token_at(tokens, order, n, first - 1) == token) return;
    int stop = chunk + 2, beyond = (n + CHUNK - 1) / CHUNK;  // the first chunk that it does not reach
    while (stop < beyond) {
        const int middle = (stop + beyond) / 2;
        if (tokens[order[middle * CHUNK]] == token) stop = middle + 1;
        else beyond = middle;
    }
    for (int j = (blockIdx.y * blockDim.x + threadIdx.x) * W; j < c; j += gridDim.y * blockDim.x * W) {
        real* out = dwte + size_t(token) * c + j;
        Elements<W> sum = load_real<W>(out), v = load_real<W>(partial + (size_t(chunk) * 2 + 1) * c + j);
        sum += v;
#pragma unroll 4
        for (int later = chunk + 1; later < stop; later++) {
            v = load_real<W>(partial + size_t(later) * 2 * c + j);
            sum += v;
        }
        store_real<W>(out, sum);
    }
}

KERNEL(embed,
       (stored * x, const int* tokens, const stored* wte, const stored* wpe, const int* start,
        int starts, const int* positions, int n, int seq_len, int c),
       (x, tokens, wte, wpe, start, starts, positions, n, seq_len, c))
KERNEL(add_embedding, (stored * x, const int* tokens, const stored* w, int n, int width, int c),
       (x, tokens, w, n, width, c))
KERNEL(position_gradient, (real * dwpe, const stored* dx, int n, int seq_len, int c),
       (dwpe, dx, n, seq_len, c))
KERNEL(token_gradient,
       (real * dwte, real* partial, const int* order, const int* tokens, const stored* dx, int n, int width,
        int c),
       (dwte, partial, order, tokens, dx, n, width, c))
KERNEL(token_gradient_across,
       (real * dwte, const real* partial, const int* order, const int* tokens, int n, int c),
       (dwte, partial, order, tokens, n, c))
