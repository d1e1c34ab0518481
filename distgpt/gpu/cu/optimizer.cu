// AdamW and the outer step on the flat buffers, and rounding from them.
#include "common.cuh"

constexpr int W = 4;  // elements a thread works on

__device__ __forceinline__ long long own_place() {
    return ((long long)(blockIdx.x) * blockDim.x + threadIdx.x) * W;
}

// The run of (start, stop, decays) that holds element i: runs follow each other without gaps.
__device__ __forceinline__ int run_of(const long long* runs, int count, long long i) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (i < runs[3 * middle + 1]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// Rounded elements i … i + W, as far as they exist, in one piece where they do.
__device__ __forceinline__ void round_to(stored* low, const Elements<W>& x, long long i, int n) {
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

// knobs: grad_scale, clip, rate, keep, root. See `Kernels.adamw` for the formula.
extern "C" __global__ void adamw(real* p, stored* low, real* m, real* v, const real* g,
                                 const long long* runs, int run_count, const double* norm,
                                 const double* knobs, double beta1, double beta2, double eps, int n) {
    const long long i = own_place();
    if (i >= n) return;
    const bool whole = n - i >= W;
    Elements<W> np, nm, nv, ng;
    if (whole) {
        np = load_real<W>(p + i), nm = load_real<W>(m + i), nv = load_real<W>(v + i), ng = load_real<W>(g + i);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) {
            const long long j = i + k < n ? i + k : i;
            np.at[k] = p[j], nm.at[k] = m[j], nv.at[k] = v[j], ng.at[k] = g[j];
        }
    }
    const double length = knobs[0] * sqrt(norm[0]);
    if (!(length - length == 0)) return;  // not finite
    const double clip = knobs[1];
    const real scale = real(clip > 0 && length > clip ? knobs[0] * (clip / length) : knobs[0]);
    const real rate = real(knobs[2]), keep = real(knobs[3]), root = real(knobs[4]);
    const real b1 = real(beta1), b2 = real(beta2), c1 = real(1 - beta1), c2 = real(1 - beta2), e = real(eps);
    int run = run_of(runs, run_count, i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        while (run + 1 < run_count && i + k >= runs[3 * run + 1]) run++;
        const real kept = runs[3 * run + 2] ? keep : real(1);
        const real gradient = ng.at[k] * scale;
        nm.at[k] = b1 * nm.at[k] + c1 * gradient;
        nv.at[k] = b2 * nv.at[k] + c2 * gradient * gradient;
        np.at[k] = kept * np.at[k] - rate * nm.at[k] / (sqrt(nv.at[k]) * root + e);
    }
    if (whole) {
        store_real<W>(p + i, np), store_real<W>(m + i, nm), store_real<W>(v + i, nv);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++)
            if (i + k < n) p[i + k] = np.at[k], m[i + k] = nm.at[k], v[i + k] = nv.at[k];
    }
    if (low) round_to(low, np, i, n);
}

// low ← wide, rounded
extern "C" __global__ void round_to_stored(stored* low, const real* wide, int n) {
    const long long i = own_place();
    Elements<W> x;
#pragma unroll
    for (int k = 0; k < W; k++) x.at[k] = i + k < n ? wide[i + k] : real(0);
    round_to(low, x, i, n);
}

// y ← a - b
extern "C" __global__ void subtract(real* y, const real* a, const real* b, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a[i] - b[i];
}

// See `Kernels.nesterov` for the formula.
extern "C" __global__ void nesterov(real* p, stored* low, real* common, real* velocity, const real* change,
                                    double scale, double lr, double momentum, int n) {
    const long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const real moved = real(scale) * change[i], speed = real(momentum) * velocity[i] + moved;
    const real next = common[i] + real(lr) * (real(momentum) * speed + moved);
    velocity[i] = speed;
    common[i] = p[i] = next;
    if (low) low[i] = to_stored(next);
}
