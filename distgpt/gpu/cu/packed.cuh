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
