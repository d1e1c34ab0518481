// Muon: momentum, the steps around the matmuls of the orthogonalization, and the update.
//
// A kernel processes many matrices at any addresses. blockIdx.y is the matrix; a row of a table has its offsets
// and sizes. Offsets are in elements from the first matrix.
#include "common.cuh"

constexpr double TINY = 1e-12;  // as in core/ops/api.py
constexpr int PIECE = 4096;     // elements per block of 256 threads, as in muon.py

// Constants of a step, computed once for all elements.
struct Step {
    real scale, momentum, rate, decay;  // scale is NaN if there is nothing to do
};

// scalars: MuonScalars of core/ops/api.py
extern "C" __global__ void __launch_bounds__(WARP)
muon_scalars(real* step, const double* norm, const double* scalars) {
    if (threadIdx.x) return;
    const double scale = clipped_scale(norm, scalars);
    *reinterpret_cast<Step*>(step) = {real(scale), real(scalars[2]), real(scalars[3]), real(scalars[4])};
}

struct Stretch {
    long long m, g, count;
};

struct Update {
    long long u, stands;  // 1: it has more rows than columns
};

struct Matrix {
    long long p, low, v, u, q, rows, columns;
};

template <typename Row>
__device__ __forceinline__ Row row_of(const long long* table) {
    return reinterpret_cast<const Row*>(table)[blockIdx.y];
}

// m ← μ m + (1 - μ) s g; g ← (1 - μ) s g + μ m
extern "C" __global__ void muon_momentum(real* m, real* g, const long long* table, const real* step) {
    const Step c = *reinterpret_cast<const Step*>(step);
    const Stretch own = row_of<Stretch>(table);
    const long long first = (long long)(blockIdx.x) * PIECE, last = min(own.count, first + PIECE);
    if (!(c.scale - c.scale == 0)) return;
    m += own.m;
    g += own.g;
    for (long long i = first + threadIdx.x; i < last; i += blockDim.x) {
        const real fresh = (1 - c.momentum) * c.scale * g[i], moved = c.momentum * m[i] + fresh;
        m[i] = moved;
        g[i] = fresh + c.momentum * moved;
    }
}

// pieces (matrices, pieces of one) ← Σ u² of each piece, of matrices of n elements
extern "C" __global__ void update_squares(double* pieces, const real* u, const long long* table, int n) {
    const long long first = (long long)(blockIdx.x) * PIECE, last = min((long long)(n), first + PIECE);
    u += row_of<Update>(table).u;
    real sum = 0;
    for (long long i = first + threadIdx.x; i < last; i += blockDim.x) sum += u[i] * u[i];
    const double total = block_sum(double(sum));
    if (threadIdx.x == 0) pieces[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = total;
}

// factor[matrix] ← 1 / (1.02 ‖u‖), from the squares of its pieces; a block for each matrix
extern "C" __global__ void shrinking(real* factor, const double* pieces, int count) {
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += pieces[size_t(blockIdx.x) * count + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) factor[blockIdx.x] = real(1 / (1.02 * sqrt(sum) + TINY));
}

template <typename T>
__device__ __forceinline__ real read(const T* x) {
    if constexpr (sizeof(T) == sizeof(real)) return *x;
    else return to_real(*x);
}

template <typename T>
__device__ __forceinline__ void write(T* x, real value) {
    if constexpr (sizeof(T) == sizeof(real)) *x = value;
    else *x = to_stored(value);
}

// to ← factor · from (rows, columns), or its transpose, in tiles of WARP x WARP. blockIdx.x is the tile;
// warps read and write its rows.
template <typename From, typename To>
__device__ __forceinline__ void lay(To* to, const From* from, int rows, int columns, bool turned, real factor) {
    __shared__ real tile[WARP][WARP + 1];
    const int across = (columns + WARP - 1) / WARP, top = blockIdx.x / across * WARP,
              left = blockIdx.x % across * WARP, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP,
              warps = blockDim.x / WARP;
    for (int i = warp; i < WARP; i += warps) {
        if (top + i >= rows || left + lane >= columns) continue;
        const size_t at = size_t(top + i) * columns + left + lane;
        const real value = factor * read(from + at);
        if (turned) tile[i][lane] = value;
        else write(to + at, value);
    }
    if (!turned) return;
    __syncthreads();
    for (int i = warp; i < WARP; i += warps)
        if (left + i < columns && top + lane < rows)
            write(to + size_t(left + i) * rows + top + lane, tile[lane][i]);
}

// x (matrices, low, high) ← factor · u. Matrices with more rows than columns are transposed.
extern "C" __global__ void
normalise(stored* x, const real* u, const long long* table, const real* factor, int low, int high) {
    const Update own = row_of<Update>(table);
    stored* to = x + size_t(blockIdx.y) * low * high;
    lay(to, u + own.u, own.stands ? high : low, own.stands ? low : high, own.stands, factor[blockIdx.y]);
}

// u ← x, transposed back
extern "C" __global__ void
widen_update(real* u, const stored* x, const long long* table, int low, int high) {
    const Update own = row_of<Update>(table);
    lay(u + own.u, x + size_t(blockIdx.y) * low * high, low, high, own.stands, real(1));
}

// q ← the mean squares of the rows of u, or of its columns if there are more of them; v ← β v + (1 - β) q. A
// block has WARP rows or columns. Each row is read by one warp. Columns are read by all warps together, and
// each warp adds up one.
extern "C" __global__ void __launch_bounds__(WARP * WARP)
mean_squares(real* v, real* q, const real* u, const long long* table, const real* step, double beta) {
    __shared__ real sums[WARP][WARP + 1];
    const Matrix own = row_of<Matrix>(table);
    const int rows = own.rows, columns = own.columns, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP,
              first = blockIdx.x * WARP, i = first + warp;
    const real scale = step[0];
    real sum = 0;
    u += own.u;
    if (rows >= columns) {
        if (i < rows)
            for (int j = lane; j < columns; j += WARP) {
                const real x = u[size_t(i) * columns + j];
                sum += x * x;
            }
    } else {
        if (first + lane < columns)
            for (int row = warp; row < rows; row += WARP) {
                const real x = u[size_t(row) * columns + first + lane];
                sum += x * x;
            }
        sums[warp][lane] = sum;
        __syncthreads();
        sum = sums[lane][warp];
    }
    sum = warp_sum(sum);
    if (lane || i >= max(rows, columns) || !(scale - scale == 0)) return;
    const real mean = sum / min(rows, columns);
    q[own.q + i] = mean;
    v[own.v + i] = real(beta) * v[own.v + i] + (1 - real(beta)) * mean;
}

struct Factors {
    real length, rate;
};

// factors (matrices, 2): length ← the common factor by which rows (or columns) divided by √v are too short;
// rate ← √max(1, rows / columns). One block per matrix (blockIdx.y).
extern "C" __global__ void __launch_bounds__(1024)
length_factor(real* factors, const real* v, const real* q, const long long* table) {
    const Matrix own = row_of<Matrix>(table);
    real before = 0, after = 0;
    for (int i = threadIdx.x; i < max(own.rows, own.columns); i += blockDim.x) {
        const real mean = q[own.q + i], root = sqrt(v[own.v + i]) + real(TINY);
        before += mean;
        after += mean / (root * root);
    }
    before = block_sum(before);
    after = block_sum(after);
    if (threadIdx.x) return;
    const real shape = real(int(own.rows)) / real(int(own.columns));
    reinterpret_cast<Factors*>(factors)[blockIdx.y] = {sqrt(before / (after + real(TINY))),
                                                       sqrt(shape > 1 ? shape : real(1))};
}

// p ← p - rate · (u + decay · p where u · p ≥ 0), with u scaled; low ← p, rounded
extern "C" __global__ void muon_step(real* p, stored* low, const real* v, const real* u, const long long* table,
                                     const real* factors, const real* step) {
    const Step c = *reinterpret_cast<const Step*>(step);
    const Matrix own = row_of<Matrix>(table);
    const Factors by = reinterpret_cast<const Factors*>(factors)[blockIdx.y];
    const long long n = own.rows * own.columns, first = (long long)(blockIdx.x) * PIECE;
    if (first >= n || !(c.scale - c.scale == 0)) return;
    const int columns = own.columns, row = int(first / columns), within = int(first % columns);
    const bool by_rows = own.rows >= own.columns;
    const int most = int(min(n - first, (long long)(PIECE)));
    const real rate = c.rate * by.rate;
    p += own.p + first;
    u += own.u + first;
    v += own.v;
    if (low) low += own.low + first;
    for (int i = threadIdx.x; i < most; i += blockDim.x) {
        const int at = within + i;  // counted from the start of a row, so 32 bits suffice
        const real second = v[by_rows ? row + at / columns : at % columns];
        const real move = u[i] * (by.length / (sqrt(second) + real(TINY)));
        const real kept = move * p[i] >= 0 ? p[i] : real(0);
        const real next = p[i] - rate * (move + c.decay * kept);
        p[i] = next;
        if (low) low[i] = to_stored(next);
    }
}
