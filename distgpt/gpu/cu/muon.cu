// Muon: momentum, what surrounds the matmuls that orthogonalise, and the step along a matrix's update.
#include "common.cuh"

constexpr double TINY = 1e-12;  // as in kernels/api.py

// Constants of a step, computed once for all elements.
struct Step {
    real scale, momentum, rate, decay;  // scale is NaN if nothing is to be done
};

// scalars: MuonScalars of kernels/api.py
extern "C" __global__ void __launch_bounds__(WARP)
muon_scalars(real* step, const double* norm, const double* scalars) {
    if (threadIdx.x) return;
    const double scale = clipped_scale(norm, scalars);
    *reinterpret_cast<Step*>(step) = {real(scale), real(scalars[2]), real(scalars[3]), real(scalars[4])};
}

// m ← μ m + (1 - μ) s g; g ← (1 - μ) s g + μ m
extern "C" __global__ void muon_momentum(real* m, real* g, const real* step, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    const Step c = *reinterpret_cast<const Step*>(step);
    if (i >= n || !(c.scale - c.scale == 0)) return;
    const real fresh = (1 - c.momentum) * c.scale * g[i], moved = c.momentum * m[i] + fresh;
    m[i] = moved;
    g[i] = fresh + c.momentum * moved;
}

// factor[0] ← 1 / (1.02 ‖u‖), squares[0] = ‖u‖²
extern "C" __global__ void __launch_bounds__(WARP) shrinking(real* factor, const double* squares) {
    if (threadIdx.x == 0) factor[0] = real(1 / (1.02 * sqrt(squares[0]) + TINY));
}

// x ← factor · u
extern "C" __global__ void normalise(stored* x, const real* u, const real* factor, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = to_stored(u[i] * factor[0]);
}

// square (n, n) ← a + b · square + c · fourth
extern "C" __global__ void
polynomial(stored* square, const stored* fourth, double a, double b, double c, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= (long long)(n) * n) return;
    const real diagonal = i / n == i % n ? real(a) : real(0);
    square[i] = to_stored(diagonal + real(b) * to_real(square[i]) + real(c) * to_real(fourth[i]));
}

// u ← x
extern "C" __global__ void widen_update(real* u, const stored* x, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) u[i] = to_real(x[i]);
}

// q ← the mean squares of rows of u, a block for each; v ← β v + (1 - β) q
extern "C" __global__ void
rows_squared(real* v, real* q, const real* u, const real* step, double beta, int columns) {
    const real scale = step[0];
    real sum = 0;
    for (int j = threadIdx.x; j < columns; j += blockDim.x) {
        const real x = u[size_t(blockIdx.x) * columns + j];
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x || !(scale - scale == 0)) return;
    q[blockIdx.x] = sum / columns;
    v[blockIdx.x] = real(beta) * v[blockIdx.x] + (1 - real(beta)) * q[blockIdx.x];
}

// The same of columns, a thread for each.
extern "C" __global__ void
columns_squared(real* v, real* q, const real* u, const real* step, double beta, int rows, int columns) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    const real scale = step[0];
    if (j >= columns || !(scale - scale == 0)) return;
    real sum = 0;
    for (int i = 0; i < rows; i++) {
        const real x = u[size_t(i) * columns + j];
        sum += x * x;
    }
    q[j] = sum / rows;
    v[j] = real(beta) * v[j] + (1 - real(beta)) * q[j];
}

// factor[0] ← by how much rows (or columns) divided by √v are too short, all together; in one block
extern "C" __global__ void __launch_bounds__(1024)
length_factor(real* factor, const real* v, const real* q, int count) {
    real before = 0, after = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const real root = sqrt(v[i]) + real(TINY);
        before += q[i];
        after += q[i] / (root * root);
    }
    before = block_sum(before);
    after = block_sum(after);
    if (threadIdx.x == 0) factor[0] = sqrt(before / (after + real(TINY)));
}

// p ← p - rate · (u + decay · p where u · p ≥ 0), with u scaled; low ← p, rounded
extern "C" __global__ void muon_step(real* p, stored* low, const real* u, const real* v, const real* factor,
                                     const real* step, double shape, int by_rows, int columns, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    const Step c = *reinterpret_cast<const Step*>(step);
    if (i >= n || !(c.scale - c.scale == 0)) return;
    const real second = v[by_rows ? i / columns : i % columns], rate = c.rate * real(shape);
    const real move = u[i] * (factor[0] / (sqrt(second) + real(TINY))), kept = move * p[i] >= 0 ? p[i] : real(0);
    const real next = p[i] - rate * (move + c.decay * kept);
    p[i] = next;
    if (low) low[i] = to_stored(next);
}
