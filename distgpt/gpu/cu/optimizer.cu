// AdamW and the outer step on the flat buffers, and rounding.
#include "common.cuh"

constexpr int W = 4;  // elements per thread

__device__ __forceinline__ long long own_place() {
    return ((long long)(blockIdx.x) * blockDim.x + threadIdx.x) * W;
}

// Elements i … i + W of each array, 0 after the end. There is one branch for all arrays, so that all loads
// are in flight together.
template <int N>
__device__ __forceinline__ void load_all(Elements<W> (&x)[N], const real* const (&from)[N], long long i,
                                         long long n) {
    if (i + W <= n) {
#pragma unroll
        for (int a = 0; a < N; a++) x[a] = load_real<W>(from[a] + i);
    } else {
#pragma unroll
        for (int a = 0; a < N; a++)
#pragma unroll
            for (int k = 0; k < W; k++) x[a].at[k] = i + k < n ? from[a][i + k] : real(0);
    }
}

// The first KEPT arrays stay in the cache if they fit. The others are not read before the next step.
template <int KEPT, int N>
__device__ __forceinline__ void store_all(real* const (&to)[N], const Elements<W> (&x)[N], long long i,
                                          long long n) {
    if (i + W <= n) {
#pragma unroll
        for (int a = 0; a < N; a++) store_real<W>(to[a] + i, x[a], a >= KEPT);
    } else {
#pragma unroll
        for (int a = 0; a < N; a++)
#pragma unroll
            for (int k = 0; k < W; k++)
                if (i + k < n) to[a][i + k] = x[a].at[k];
    }
}

// The run of (start, stop, group, start in v) with element i. Runs are contiguous.
__device__ __forceinline__ int run_of(const long long* runs, int count, long long i) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (i < runs[4 * middle + 1]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// Store rounded elements i … i + W up to the end, in one access if possible.
__device__ __forceinline__ void round_to(stored* low, const Elements<W>& x, long long i, long long n) {
    struct alignas(W * sizeof(stored)) Four {
        stored at[W];
    } four;
#pragma unroll
    for (int k = 0; k < W; k++) four.at[k] = to_stored(x.at[k]);
    if (i + W <= n) {
        *reinterpret_cast<Four*>(low + i) = four;
    } else {
#pragma unroll
        for (int k = 0; k < W; k++)
            if (i + k < n) low[i + k] = four.at[k];
    }
}

// Constants of a step, computed once for all elements, since consumer GPUs are slow in double.
struct Common {
    real scale, correction, beta1, beta2, rest1, rest2, eps;  // scale is NaN if there is nothing to do
};

constexpr int COMMON = sizeof(Common) / sizeof(real);

// scalars: StepScalars of core/ops/api.py, then (step size, decay factor) of each group, which follow Common.
// See `Kernels.adamw` for the formula.
extern "C" __global__ void __launch_bounds__(WARP)
adamw_common(real* common, const double* norm, const double* scalars, int groups, double beta1, double beta2,
             double eps) {
    if (int(threadIdx.x) < 2 * groups) common[COMMON + threadIdx.x] = real(scalars[3 + threadIdx.x]);
    if (threadIdx.x) return;
    const double scale = clipped_scale(norm, scalars);
    *reinterpret_cast<Common*>(common) = {real(scale),     real(scalars[2]), real(beta1), real(beta2),
                                          real(1 - beta1), real(1 - beta2),  real(eps)};
}

extern "C" __global__ void adamw(real* p, stored* low, real* m, real* v, const real* g,
                                 const long long* runs, int run_count, const real* common, long long n) {
    const long long i = own_place(), first = (long long)(blockIdx.x) * blockDim.x * W;
    if (i >= n) return;
    int run = run_of(runs, run_count, first);  // the block's run; all its threads read the same
    while (run + 1 < run_count && i >= runs[4 * run + 1]) run++;  // the thread's: runs have multiples of W
    const long long group = runs[4 * run + 2];
    if (group < 0) return;
    v += runs[4 * run + 3] - runs[4 * run];
    Elements<W> x[4];
    load_all(x, {p, m, v, g}, i, n);
    const Common c = *reinterpret_cast<const Common*>(common);
    const real step_size = common[COMMON + 2 * group], factor = common[COMMON + 2 * group + 1];
#pragma unroll
    for (int k = 0; k < W; k++) {
        const real gradient = x[3].at[k] * c.scale;
        const real mk = x[1].at[k] = c.beta1 * x[1].at[k] + c.rest1 * gradient;
        const real vk = x[2].at[k] = c.beta2 * x[2].at[k] + c.rest2 * gradient * gradient;
        x[0].at[k] = factor * x[0].at[k] - step_size * mk / (sqrt(vk) * c.correction + c.eps);
    }
    if (!(c.scale - c.scale == 0)) return;  // last, because an earlier check would delay the loads
    store_all<1>({p, m, v}, {x[0], x[1], x[2]}, i, n);
    if (low) round_to(low, x[0], i, n);
}

// low ← wide, rounded
extern "C" __global__ void round_to_stored(stored* low, const real* wide, long long n) {
    const long long i = own_place();
    if (i >= n) return;
    Elements<W> x[1];
    load_all(x, {wide}, i, n);
    round_to(low, x[0], i, n);
}

// y ← a - b
extern "C" __global__ void subtract(real* y, const real* a, const real* b, long long n) {
    const long long i = own_place();
    if (i >= n) return;
    Elements<W> x[2];
    load_all(x, {a, b}, i, n);
#pragma unroll
    for (int k = 0; k < W; k++) x[0].at[k] -= x[1].at[k];
    store_all<1>({y}, {x[0]}, i, n);
}

// See `Kernels.nesterov` for the formula.
extern "C" __global__ void nesterov(real* p, stored* low, real* round_start, real* velocity, const real* change,
                                    double scale, double lr, double momentum, long long n) {
    const long long i = own_place();
    if (i >= n) return;
    const real share = real(scale), rate = real(lr), mu = real(momentum);
    Elements<W> x[3];
    load_all(x, {round_start, velocity, change}, i, n);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const real moved = share * x[2].at[k], speed = x[1].at[k] = mu * x[1].at[k] + moved;
        x[0].at[k] += rate * (mu * speed + moved);
    }
    store_all<1>({p, round_start, velocity}, {x[0], x[0], x[1]}, i, n);
    if (low) round_to(low, x[0], i, n);
}
