// Documents side by side in a sequence, which do not see each other: with PACKED=1.
#pragma once

#ifndef PACKED
#define PACKED 0
#endif

// The first key that row t sees, and those after it see none before; `positions` as in kernels/api.py.
template <typename Place>
__device__ __forceinline__ int first_key(const int* positions, const Place& place, int t) {
    return PACKED ? t - positions[place.first_row + t] : 0;
}

// Whether a query sees a key; `begin` is the first key that it sees.
__device__ __forceinline__ bool sees(int query, int begin, int key) {
    return (!PACKED || begin <= key) && key <= query;
}

// The end of the queries, in steps of STEP from row t on, that see a key before `end`.
template <int STEP, typename Place>
__device__ __forceinline__ int last_query(const int* positions, const Place& place, int t, int end, int seq_len) {
    while (PACKED && t < seq_len && first_key(positions, place, t) < end) t += STEP;
    return PACKED ? t : seq_len;
}
