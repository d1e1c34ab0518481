// The parts of plain attention: a block's tile of rows and columns, loads and stores, products, places.
#pragma once
#include "common.cuh"

constexpr int W = HEAD % PACK == 0 ? PACK : 1;    // elements moved at once from and to memory
constexpr int CHUNK = 16 / sizeof(real);          // reals moved at once from and to shared memory
constexpr int CHUNKS = (HEAD + CHUNK - 1) / CHUNK;
constexpr int STRIDE = (CHUNKS | 1) * CHUNK;      // an odd number of chunks: a column meets no bank twice
constexpr real LOWEST = real(-1e30);              // below every score; exp of a difference to it is 0 or 1

// `HEIGHT` x `LANES` threads. Thread (i, j) has rows i, i + HEIGHT, … and columns j, j + LANES, …; of sums over
// columns it has chunks j, j + LANES, … of the head. What a warp has beyond them repeats their work.
template <int ROWS_, int COLUMNS_, int HEIGHT_, int LANES_>
struct Tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, HEIGHT = HEIGHT_, LANES = LANES_;
    static constexpr int THREADS = HEIGHT * LANES < WARP ? WARP : HEIGHT * LANES;
    static constexpr int R = ROWS / HEIGHT, C = COLUMNS / LANES, N = (CHUNKS + LANES - 1) / LANES;
    static constexpr int WEIGHTS = (COLUMNS / CHUNK | 1) * CHUNK;  // from one row of weights to the next
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

// ---- between memory and shared memory: `count` rows of HEAD elements, `step` elements apart

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

// ---- the two products

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

// to ← sums over `count` rows of a tile, if wanted. Nobody writes to the tile before the next barrier.
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

// Through `tile`, which may still be read by others until the first barrier here.
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

// Where one head of one sequence lies, from blockIdx.x.
struct Place {
    int sequence;
    long long head, first_row, qkv_step, y_step;

    __device__ Place(int seq_len, int n_head)
        : sequence(blockIdx.x / n_head), head(blockIdx.x % n_head), first_row(sequence * (long long)seq_len),
          qkv_step(3LL * n_head * HEAD), y_step((long long)n_head * HEAD) {}

    // part 0, 1, 2: q, k, v
    __device__ long long in_qkv(int part, int t) const {
        return (first_row + t) * qkv_step + part * y_step + head * HEAD;
    }
    __device__ long long in_y(int t) const { return (first_row + t) * y_step + head * HEAD; }
    // Of dqkv's sums over the rows of each tile, (sequences · tiles, 3 · heads · HEAD)
    __device__ real* in_sums(real* sums, int part) const {
        const long long row = (long long)sequence * gridDim.y + blockIdx.y;
        return sums ? sums + row * qkv_step + part * y_step + head * HEAD : nullptr;
    }
};
