// Causal attention like attention.cu, forward and backward, on tensor cores: for bfloat16, head sizes that are
// multiples of 16 up to 128, and compute capability 8.0 or later.
//
// Each warp owns 16 rows of a block's ROWS (queries, or keys for their gradients). Its left factors (rows,
// weights) and its sums stay in registers. All warps iterate over the same tiles of columns (keys, or queries) in
// shared memory. The next tiles are loaded while the current ones are used. Weights are rounded to bfloat16, sums
// are float. There are no atomics, so results are bitwise reproducible.
//
// Blocks: sequences · heads (key/value heads for their gradients) · tiles. Tiles of a head are adjacent, so that
// its rows are cached, and start with the longest work. The arrays are the same as in attention.cu. Uses the
// delta of attention_delta.cu.
#include "common.cuh"
#include "seen.cuh"

// ---- tensor cores and their inputs, for compute capability 8.0 and later: a warp's product of bfloat16
// matrices with float sums, loads of matrices from shared memory, asynchronous copies to shared memory.
//
// All 32 lanes call these together. The PTX ISA defines the layout of elements in "Matrix Fragments for
// mma.m16n8k16 with floating point type". With g = lane / 4 and t = lane % 4, there are two elements per
// register, with the lower column (of b: row) in its low half:
//
//   a, 16 x 16   a[0] row g,     columns 2t, 2t + 1      a[2] row g,     columns 2t + 8, 2t + 9
//                a[1] row g + 8, columns 2t, 2t + 1      a[3] row g + 8, columns 2t + 8, 2t + 9
//   b, 16 x 8    b0   column g,  rows 2t, 2t + 1         b1   column g,  rows 2t + 8, 2t + 9
//   c, 16 x 8    c[0], c[1] row g, columns 2t, 2t + 1    c[2], c[3] row g + 8, the same columns
//
// Without a GPU, tests emulate these functions.

#if defined(__CUDA_ARCH__)

typedef unsigned SharedAddress;  // in bytes

__device__ __forceinline__ SharedAddress shared_address(const void* p) {
    return SharedAddress(__cvta_generic_to_shared(p));
}

// c += a b
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Load four matrices of 8 rows of 16 bytes. Lane 8 i + j has the address of row j of matrix i. to[i] gets
// columns 2t and 2t + 1 of row g of matrix i ("ldmatrix" in the PTX ISA).
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Load the transposed matrices: rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Copy BYTES (4 or 16) from memory to shared memory; zeros if `there` is false, without reading `from`.
template <int BYTES>
__device__ __forceinline__ void start_copy(SharedAddress to, const void* from, bool there) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                     : "memory");
    } else {
        static_assert(BYTES == 4, "a size that is not needed");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 4 : 0)
                     : "memory");
    }
}

// Wait for the thread's own copies. Other threads' copies need a barrier afterwards.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two elements in one register, each rounded to nearest
__device__ __forceinline__ unsigned pair_of(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

// ---- rows and sums in a warp

constexpr int SIDE = 16;                         // of the matrices that tensor cores multiply
constexpr int THREADS = ROWS / SIDE * WARP;
constexpr int STEPS = HEAD / SIDE;               // of a product over the head
constexpr int STRIDE = HEAD + PACK;              // odd number of 16 bytes, for no bank conflicts in 8 rows
[[maybe_unused]] constexpr int ROW_BYTES = STRIDE * sizeof(stored);
[[maybe_unused]] constexpr float LOWEST = -1e30f;  // below every score; exp2 of a difference is 0 or 1
[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f;
static_assert(sizeof(stored) == 2 && HEAD % SIDE == 0 && HEAD <= 128 && ROWS % SIDE == 0, "as said above");

// Columns of a tile, so that two pairs of tiles fit; and how many of them are used together for gradients,
// limited by registers.
[[maybe_unused]] constexpr int KEYS = HEAD <= 80 ? 64 : 32, KEY_PART = 32;
[[maybe_unused]] constexpr int QUERIES = 32, QUERY_PART = 16;

__device__ __forceinline__ int lane() { return threadIdx.x % WARP; }
__device__ __forceinline__ int group() { return lane() / 4; }
__device__ __forceinline__ int pair() { return lane() % 4 * 2; }

// A left factor, 16 x 16 · COUNT, and sums, 16 x 8 · COUNT, in the layout described above.
template <int COUNT>
struct Factor {
    unsigned at[COUNT][4];
};

template <int COUNT>
struct Sums {
    float at[COUNT][4];
};

// The row of element i of sums' part n, and its offset to the right of the diagonal of the warp's first row
// and column. ahead() is the offset of a thread's first element. further() adds a compile-time constant.
__device__ __forceinline__ int row_of(int i) { return group() + i / 2 * 8; }
__device__ __forceinline__ int ahead() { return pair() - group(); }
__device__ constexpr int further(int n, int i) { return n * 8 + i % 2 - i / 2 * 8; }

// Mask the scores between rows and columns that do not see each other. `hidden` comes from further().
template <int COUNT, typename Hidden>
__device__ __forceinline__ void hide(Sums<COUNT>& s, Hidden hidden) {
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (hidden(further(n, i))) s.at[n][i] = LOWEST;
}

// ---- copies between memory, shared memory and registers

// The first `count` of 16 rows of HEAD elements, `step` apart. The other rows are zeros.
__device__ __forceinline__ void load_rows(Factor<STEPS>& rows, const stored* from, int step, int count) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = group() + i % 2 * 8, column = s * SIDE + i / 2 * 8 + pair();
            rows.at[s][i] = row < count ? *reinterpret_cast<const unsigned*>(from + row * step + column) : 0;
        }
}

// All threads of the block copy COUNT such rows to a tile asynchronously.
template <int COUNT>
__device__ __forceinline__ void fetch(stored* tile, const stored* rows, int step, int count) {
    constexpr int PIECES = HEAD / PACK, AT_ONCE = THREADS / PIECES;
    const int first = threadIdx.x / PIECES, at = threadIdx.x % PIECES * PACK;
    rows += first * step + at;
    tile += first * STRIDE + at;
    if (THREADS % PIECES && first >= AT_ONCE) return;
#pragma unroll
    for (int row = 0; row < COUNT; row += AT_ONCE)
        if (row + AT_ONCE <= COUNT || first < COUNT - row)
            start_copy<16>(shared_address(tile + row * STRIDE), rows + row * step, row < count - first);
}

// Store rounded sums, each row times its factor, to `count` rows in memory, through 16 rows of a tile.
__device__ __forceinline__ void store_rows(stored* to, int step, int count, stored* tile,
                                           const Sums<2 * STEPS>& sums, float upper, float lower) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++) {
        unsigned* at = reinterpret_cast<unsigned*>(tile + group() * STRIDE + n * 8 + pair());
        at[0] = pair_of(sums.at[n][0] * upper, sums.at[n][1] * upper);
        at[8 * STRIDE / 2] = pair_of(sums.at[n][2] * lower, sums.at[n][3] * lower);
    }
    __syncwarp();
    constexpr int PIECES = HEAD / PACK;
#pragma unroll
    for (int i = lane(); i < SIDE * PIECES; i += WARP) {
        const int row = i / PIECES, at = i % PIECES * PACK;
        if (row < count)
            *reinterpret_cast<uint4*>(to + row * step + at) =
                *reinterpret_cast<const uint4*>(tile + row * STRIDE + at);
    }
}

// to ← sums over `count` rows of the block as they were stored, through its tile. All threads must call.
__device__ __forceinline__ void sum_rows(float* to, const stored* tile, int count) {
    static_assert(HEAD <= THREADS, "a thread for each column");
    __syncthreads();
    if (const int j = threadIdx.x; j < HEAD) {
        float sum = 0;
#pragma unroll 8
        for (int row = 0; row < ROWS; row++) sum += row < count ? to_real(tile[row * STRIDE + j]) : 0;
        to[j] = sum;
    }
    __syncthreads();
}

// ---- the two matmuls

// s ← a · tileᵀ, for 8 · COUNT rows of the tile
template <int COUNT>
__device__ __forceinline__ void dots(Sums<COUNT>& s, const Factor<STEPS>& a, const stored* tile) {
    s = {};
    const SharedAddress own =
        shared_address(tile + (lane() / 16 * 8 + lane() % 8) * STRIDE + lane() / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int n = 0; n < COUNT; n += 2) {
            unsigned b[4];
            load_matrices(b, own + n * 8 * ROW_BYTES + k * SIDE * int(sizeof(stored)));
            multiply_add(s.at[n], a.at[k], b[0], b[1]);
            multiply_add(s.at[n + 1], a.at[k], b[2], b[3]);
        }
}

// sums += weights · tile, for 8 · COUNT rows of the tile
template <int COUNT>
__device__ __forceinline__ void add_weighted(Sums<2 * STEPS>& sums, const Sums<COUNT>& weights,
                                             const stored* tile) {
    const SharedAddress own = shared_address(tile + lane() % 16 * STRIDE + lane() / 16 * 8);
#pragma unroll
    for (int k = 0; k < COUNT; k += 2) {
        const float(&left)[4] = weights.at[k], (&right)[4] = weights.at[k + 1];
        const unsigned a[4] = {pair_of(left[0], left[1]), pair_of(left[2], left[3]),
                               pair_of(right[0], right[1]), pair_of(right[2], right[3])};
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n += 2) {
            unsigned b[4];
            load_matrices_transposed(b, own + k * 8 * ROW_BYTES + n * 8 * int(sizeof(stored)));
            multiply_add(sums.at[n], a, b[0], b[1]);
            multiply_add(sums.at[n + 1], a, b[2], b[3]);
        }
    }
}

// ---- positions of a block and a warp

struct Place {
    int tile, tiles, seq_len, head_of_all, head, qkv_step, y_step, kv_step;
    long long first_row;

    // A query head. If blocks are of key/value heads, one of the query heads of its group.
    __device__ Place(int length, int n_head, bool of_keys = false, int member = 0)
        : tiles((length + ROWS - 1) / ROWS), seq_len(length), qkv_step((n_head + 2 * (n_head / GROUP)) * HEAD),
          y_step(n_head * HEAD), kv_step(n_head / GROUP * HEAD) {
        tile = blockIdx.x % tiles;
        head_of_all = blockIdx.x / tiles * (of_keys ? GROUP : 1) + member;
        head = head_of_all % n_head;
        first_row = head_of_all / n_head * (long long)seq_len;
    }

    // part 0, 1, 2: q, k, v
    __device__ int column(int part) const {
        return part == 0 ? head * HEAD : y_step + (part - 1) * kv_step + head / GROUP * HEAD;
    }
    __device__ long long in_qkv(int part, int t) const { return (first_row + t) * qkv_step + column(part); }
    __device__ long long in_y(int t) const { return (first_row + t) * y_step + head * HEAD; }
    __device__ long long in_lse(int t) const { return (long long)head_of_all * seq_len + t; }
    // The position in dqkv's sums over the rows of each tile, (sequences · tiles, columns of qkv)
    __device__ float* in_sums(float* sums, int part) const {
        const int sequence = head_of_all / (y_step / HEAD);
        return sums + ((long long)sequence * tiles + tile) * qkv_step + column(part);
    }
    __device__ int rows_from(int t) const { return seq_len - t; }
};

// The first visible keys of a thread's two query rows, from row t on
struct Begins {
    int at[2] = {0, 0};

    __device__ Begins(const int* positions, const Place& place, int t) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (BOUNDED && row_of(2 * half) < place.rows_from(t))
                at[half] = first_key(positions, place, t + row_of(2 * half));
    }

    // Mask the scores of keys, from `start` on, that come before the first visible key of their query.
    template <int COUNT>
    __device__ __forceinline__ void hide(Sums<COUNT>& s, int start) const {
#pragma unroll
        for (int n = 0; BOUNDED && n < COUNT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (start + n * 8 + pair() + i % 2 < at[i / 2]) s.at[n][i] = LOWEST;
    }
};

// The first row of a warp within its block
__device__ __forceinline__ int warp_row() { return threadIdx.x / WARP * SIDE; }

// Load the tiles of k and v from key `start` on.
__device__ __forceinline__ void fetch_keys(stored (&tiles)[2][KEYS * STRIDE], const stored* qkv,
                                           const Place& place, int start) {
    const stored *k = qkv + place.in_qkv(1, start), *v = k + place.kv_step;
    fetch<KEYS>(tiles[0], k, place.qkv_step, place.rows_from(start));
    fetch<KEYS>(tiles[1], v, place.qkv_step, place.rows_from(start));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // never launched on older GPUs

// ---- forward

struct Softmax {
    float top[2] = {LOWEST, LOWEST}, total[2] = {0, 0};

    // Convert scores to weights, and rescale earlier sums. `scale` converts scores to powers of 2.
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
            const float fade = exp2_fast((top[half] - highest) * scale);
            const float offset = BOUNDED && highest == LOWEST ? 0 : -highest * scale;  // all are masked
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
attention_forward(stored* y, real* lse, const stored* qkv, const int* positions, int seq_len, int n_head) {
    __shared__ __align__(16) stored tiles[2][2][KEYS * STRIDE];  // k and v, current and next
    const Place place(seq_len, n_head);
    const int first = (place.tiles - 1 - place.tile) * ROWS, end = min(first + ROWS, seq_len);
    const int own = first + warp_row(), last = own < end ? own + SIDE - 1 : -1;  // the warp's last column
    const float root = sqrtf(float(HEAD)), scale = LOG2_E / root;

    int start = first_key(positions, place, first) / KEYS * KEYS;
    fetch_keys(tiles[0], qkv, place, start);
    const Begins begins(positions, place, own);
    Factor<STEPS> q;
    load_rows(q, qkv + place.in_qkv(0, own < end ? own : first), place.qkv_step, place.rows_from(own));
    Sums<2 * STEPS> sums = {};
    Softmax softmax;
    for (int stage = 0; start < end; start += KEYS, stage ^= 1) {
        wait_for_copies();
        __syncthreads();  // the tiles have arrived, and no thread reads the previous ones
        if (start + KEYS < end) fetch_keys(tiles[stage ^ 1], qkv, place, start + KEYS);
        if (start > last) continue;
        Sums<KEYS / 8> s;
        dots(s, q, tiles[stage][0]);
        if (start + KEYS > own) hide(s, [&](int right) { return right > own - start - ahead(); });
        begins.hide(s, start);
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
                           const stored* qkv, const int* positions, int seq_len, int n_head) {
    __shared__ __align__(16) stored tiles[2][2][KEYS * STRIDE];  // k and v, current and next
    const Place place(seq_len, n_head);
    const int first = (place.tiles - 1 - place.tile) * ROWS, end = min(first + ROWS, seq_len);
    const int own = first + warp_row(), last = own < end ? own + SIDE - 1 : -1;
    const int rows = place.rows_from(own), from = own < end ? own : first;
    const float root = sqrtf(float(HEAD)), scale = LOG2_E / root;

    int start = first_key(positions, place, first) / KEYS * KEYS;
    fetch_keys(tiles[0], qkv, place, start);
    const Begins begins(positions, place, own);
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
    for (int stage = 0; start < end; start += KEYS, stage ^= 1) {
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
            begins.hide(s, start + part);
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
                        const stored* qkv, const int* positions, int seq_len, int n_head) {
    static_assert(2 * QUERIES <= THREADS, "a thread for each statistic");
    static_assert(4 * QUERIES >= ROWS, "room for results");
    __shared__ __align__(16) stored tiles[2][2][QUERIES * STRIDE];  // q and dy, current and next
    __shared__ __align__(16) float statistics[2][2][QUERIES];       // lse and delta
    const Place place(seq_len, n_head, true);
    const int first = place.tile * ROWS, own = first + warp_row();
    const int rows = place.rows_from(own), from = own < seq_len ? own : first;
    const float root = sqrtf(float(HEAD)), scale = LOG2_E / root;
    const int column = threadIdx.x % QUERIES, which = threadIdx.x / QUERIES;
    const auto fetch_queries = [&](const Place& of, int stage, int start) {
        const int count = of.rows_from(start);
        fetch<QUERIES>(tiles[stage][0], qkv + of.in_qkv(0, start), of.qkv_step, count);
        fetch<QUERIES>(tiles[stage][1], dy + of.in_y(start), of.y_step, count);
        if (which < 2)
            start_copy<4>(shared_address(&statistics[stage][which][column]),
                          (which ? delta : lse) + of.in_lse(column) + start, column < count);
    };

    fetch_queries(place, 0, first);
    Factor<STEPS> k, v;
    load_rows(k, qkv + place.in_qkv(1, from), place.qkv_step, rows);
    load_rows(v, qkv + place.in_qkv(2, from), place.qkv_step, rows);
    Sums<2 * STEPS> dk = {}, dv = {};
    const int stop = last_query<QUERIES>(positions, place, first + QUERIES, first + ROWS, seq_len);
#pragma unroll 1
    for (int member = 0; member < GROUP; member++) {
        const Place of(seq_len, n_head, true, member);
        if (member > 0) {
            __syncthreads();  // no thread reads the last tiles
            fetch_queries(of, 0, first);
        }
        for (int start = first, stage = 0; start < stop; start += QUERIES, stage ^= 1) {
            wait_for_copies();
            __syncthreads();
            if (start + QUERIES < stop) fetch_queries(of, stage ^ 1, start + QUERIES);
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
                for (int n = 0; BOUNDED && n < QUERY_PART / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int query = min(start + part + n * 8 + pair() + i % 2, seq_len - 1);
                        if (own + row_of(i) < first_key(positions, of, query)) s.at[n][i] = LOWEST;
                    }
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
    }
    __syncthreads();
    stored* results = tiles[0][0] + warp_row() * STRIDE;
    store_rows(dqkv + place.in_qkv(1, from), place.qkv_step, rows, results, dk, 1 / root, 1 / root);
    if (sums) sum_rows(place.in_sums(sums, 1), tiles[0][0], place.rows_from(first));
    store_rows(dqkv + place.in_qkv(2, from), place.qkv_step, rows, results, dv, 1, 1);
    if (sums) sum_rows(place.in_sums(sums, 2), tiles[0][0], place.rows_from(first));
}

#endif
