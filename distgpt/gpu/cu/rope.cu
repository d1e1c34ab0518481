// Rotary positions, in place on the q and k parts of qkv: number i of a head is paired with i + head/2.
#include "common.cuh"

// A thread turns W pairs. qkv (n, 3 · n_head · 2 half), cos and sin (≥ start + seq_len, half)
template <int W>
__device__ void rope(stored* qkv, const real* cos, const real* sin, const int* start, int n, int seq_len,
                     int n_head, int half, int inverse) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    const int pieces = half / W, per_row = 2 * n_head * pieces;
    if (index >= unsigned(n) * per_row) return;
    const int row = int(index / per_row), rest = int(index % per_row);
    const int head = rest / pieces, j = rest % pieces * W;
    const int position = (start ? *start : 0) + row % seq_len;
    stored* left = qkv + size_t(row) * 6 * n_head * half + size_t(head) * 2 * half + j;
    stored* right = left + half;
    const Numbers<W> c = load_real<W>(cos + size_t(position) * half + j);
    const Numbers<W> s = load_real<W>(sin + size_t(position) * half + j);
    const Numbers<W> a = load<W>(left), b = load<W>(right);
    Numbers<W> out_left, out_right;
#pragma unroll
    for (int i = 0; i < W; i++) {
        const real turn = inverse ? -s.at[i] : s.at[i];
        out_left.at[i] = a.at[i] * c.at[i] - b.at[i] * turn;
        out_right.at[i] = a.at[i] * turn + b.at[i] * c.at[i];
    }
    store<W>(left, out_left);
    store<W>(right, out_right);
}

KERNEL(rope,
       (stored * qkv, const real* cos, const real* sin, const int* start, int n, int seq_len, int n_head,
        int half, int inverse),
       (qkv, cos, sin, start, n, seq_len, n_head, half, inverse))
