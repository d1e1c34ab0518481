// Token and position embedding, and their gradients, which are summed in an order that tokens alone decide.
#include "common.cuh"

// x[row] ← wte[tokens[row]] + wpe[start + row mod seq_len]
template <int W>
__device__ void embed(stored* x, const int* tokens, const stored* wte, const stored* wpe, const int* start,
                      int n, int seq_len, int c) {
    const int pieces = c / W;
    const long long index = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= (long long)(n)*pieces) return;
    const int row = int(index / pieces), j = int(index % pieces) * W;
    Numbers<W> word = load<W>(wte + size_t(tokens[row]) * c + j);
    if (wpe) {
        const int position = (start ? *start : 0) + row % seq_len;
        const Numbers<W> place = load<W>(wpe + size_t(position) * c + j);
#pragma unroll
        for (int i = 0; i < W; i++) word.at[i] += place.at[i];
    }
    store<W>(x + size_t(row) * c + j, word);
}

// dwpe[t] += Σ over sequences of dx[sequence · seq_len + t]
template <int W>
__device__ void position_gradient(real* dwpe, const stored* dx, int n, int seq_len, int c) {
    const int pieces = c / W;
    const long long index = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= (long long)(seq_len)*pieces) return;
    const int t = int(index / pieces), j = int(index % pieces) * W;
    Numbers<W> sum = load_real<W>(dwpe + size_t(t) * c + j);
    for (int row = t; row < n; row += seq_len) {
        const Numbers<W> v = load<W>(dx + size_t(row) * c + j);
#pragma unroll
        for (int i = 0; i < W; i++) sum.at[i] += v.at[i];
    }
    store_real<W>(dwpe + size_t(t) * c + j, sum);
}

constexpr int SORT_THREADS = 512;
constexpr int DIGIT = 4;  // bits that a round sorts by
constexpr int DIGITS = 1 << DIGIT;

// order (n,) ← the rows by token, equal tokens by row: a radix sort, in one block, of both arrays in turn.
// With an odd number of rounds the result lies in `order`, with an even one in `other`.
extern "C" __global__ void sort_rows(int* order, int* other, const int* tokens, int n, int rounds) {
    __shared__ int counts[DIGITS * SORT_THREADS];  // by digit, then by thread: the order they are placed in
    __shared__ int warp_totals[SORT_THREADS / WARP];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int share = (n + SORT_THREADS - 1) / SORT_THREADS;
    const int first = min(n, thread * share), last = min(n, first + share);
    const int *from = nullptr;
    int *to = order, *next = other;
    for (int round = 0; round < rounds; round++) {
        for (int digit = 0; digit < DIGITS; digit++) counts[digit * SORT_THREADS + thread] = 0;
        for (int i = first; i < last; i++) {
            const int token = tokens[from ? from[i] : i];
            counts[(token >> DIGIT * round & (DIGITS - 1)) * SORT_THREADS + thread]++;
        }
        __syncthreads();
        // Sums of all counts before each: a thread's DIGITS neighbours, then warps, then the block.
        int* own = counts + thread * DIGITS;
        int total = 0;
        for (int i = 0; i < DIGITS; i++) total += own[i];
        int before = total;
        for (int step = 1; step < WARP; step *= 2) {
            const int lower = __shfl_up_sync(ALL, before, step);
            if (lane >= step) before += lower;
        }
        if (lane == WARP - 1) warp_totals[warp] = before;
        __syncthreads();
        int sum = before - total;
        for (int i = 0; i < warp; i++) sum += warp_totals[i];
        for (int i = 0; i < DIGITS; i++) {
            const int count = own[i];
            own[i] = sum;
            sum += count;
        }
        __syncthreads();
        for (int i = first; i < last; i++) {
            const int row = from ? from[i] : i;
            to[counts[(tokens[row] >> DIGIT * round & (DIGITS - 1)) * SORT_THREADS + thread]++] = row;
        }
        __syncthreads();
        from = to;
        to = next;
        next = to == order ? other : order;
    }
}

constexpr int CHUNK = 32;  // sorted rows that a block adds up

__device__ __forceinline__ int token_at(const int* tokens, const int* order, int n, int i) {
    return i < 0 || i >= n ? -1 : tokens[order[i]];
}

// dwte[token] += Σ dx over its rows, as far as they lie in one chunk. What a token has at the start of a chunk
// that began earlier goes to partial[chunk][0], what goes on behind its end to partial[chunk][1].
template <int W>
__device__ void token_gradient(real* dwte, real* partial, const int* order, const int* tokens,
                               const stored* dx, int n, int c) {
    const int chunk = blockIdx.x, first = chunk * CHUNK, last = min(n, first + CHUNK);
    for (int j = (blockIdx.y * blockDim.x + threadIdx.x) * W; j < c; j += gridDim.y * blockDim.x * W) {
        for (int i = first; i < last;) {
            const int token = tokens[order[i]];
            const bool begun = i == first && token_at(tokens, order, n, i - 1) == token;
            Numbers<W> sum;
#pragma unroll
            for (int k = 0; k < W; k++) sum.at[k] = 0;
            for (; i < last && tokens[order[i]] == token; i++) {
                const Numbers<W> v = load<W>(dx + size_t(order[i]) * c + j);
#pragma unroll
                for (int k = 0; k < W; k++) sum.at[k] += v.at[k];
            }
            const bool goes_on = i == last && token_at(tokens, order, n, i) == token;
            if (begun || goes_on) {
                store_real<W>(partial + (size_t(chunk) * 2 + !begun) * c + j, sum);
            } else {
                real* out = dwte + size_t(token) * c + j;
                Numbers<W> v = load_real<W>(out);
#pragma unroll
                for (int k = 0; k < W; k++) v.at[k] += sum.at[k];
                store_real<W>(out, v);
            }
        }
    }
}

// The rest: a token that goes on behind the end of the chunk it begins in is added up by that chunk's block.
template <int W>
__device__ void token_gradient_across(real* dwte, const real* partial, const int* order, const int* tokens,
                                      int n, int c) {
    const int chunk = blockIdx.x, first = chunk * CHUNK, end = first + CHUNK;
    if (end >= n) return;
    const int token = tokens[order[end - 1]];
    if (token_at(tokens, order, n, end) != token) return;
    if (token_at(tokens, order, n, first) == token && token_at(tokens, order, n, first - 1) == token) return;
    for (int j = (blockIdx.y * blockDim.x + threadIdx.x) * W; j < c; j += gridDim.y * blockDim.x * W) {
        real* out = dwte + size_t(token) * c + j;
        Numbers<W> sum = load_real<W>(out), v = load_real<W>(partial + (size_t(chunk) * 2 + 1) * c + j);
#pragma unroll
        for (int k = 0; k < W; k++) sum.at[k] += v.at[k];
        for (int later = chunk + 1; token_at(tokens, order, n, later * CHUNK) == token; later++) {
            v = load_real<W>(partial + size_t(later) * 2 * c + j);
#pragma unroll
            for (int k = 0; k < W; k++) sum.at[k] += v.at[k];
        }
        store_real<W>(out, sum);
    }
}

KERNEL(embed,
       (stored * x, const int* tokens, const stored* wte, const stored* wpe, const int* start, int n,
        int seq_len, int c),
       (x, tokens, wte, wpe, start, n, seq_len, c))
KERNEL(position_gradient, (real * dwpe, const stored* dx, int n, int seq_len, int c),
       (dwpe, dx, n, seq_len, c))
KERNEL(token_gradient,
       (real * dwte, real* partial, const int* order, const int* tokens, const stored* dx, int n, int c),
       (dwte, partial, order, tokens, dx, n, c))
KERNEL(token_gradient_across,
       (real * dwte, const real* partial, const int* order, const int* tokens, int n, int c),
       (dwte, partial, order, tokens, n, c))
