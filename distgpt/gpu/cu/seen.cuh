// The keys that a query sees: with PACKED=1 its document's, and with WINDOW ≠ 0 the last WINDOW up to its
// own.
#pragma once

#ifndef PACKED
#define PACKED 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif

constexpr bool BOUNDED = PACKED || WINDOW;

// The first key of the window of row t.
__device__ __forceinline__ int window_begin(int t) { return WINDOW ? max(0, t + 1 - WINDOW) : 0; }

// The first key that row t sees. Later rows see no earlier key. `positions` as in kernels/api.py.
template <typename Place>
__device__ __forceinline__ int first_key(const int* positions, const Place& place, int t) {
    return max(PACKED ? t - positions[place.first_row + t] : 0, window_begin(t));
}

// Whether a query sees a key. `begin`: the first key that it sees.
__device__ __forceinline__ bool sees(int query, int begin, int key) {
    return (!BOUNDED || begin <= key) && key <= query;
}

// The end of the queries that see a key before `end`, in steps of STEP from row t on.
template <int STEP, typename Place>
__device__ __forceinline__ int last_query(const int* positions, const Place& place, int t, int end, int seq_len) {
    while (BOUNDED && t < seq_len && first_key(positions, place, t) < end) t += STEP;
    return BOUNDED ? t : seq_len;
}
