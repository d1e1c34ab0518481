// Starting a kernel: all its blocks one after the other, on poisoned shared memory, with what it takes.
#pragma once

namespace shim {
constexpr size_t MOST_SHARED = 227 << 10, SHARED_GUARD = 1 << 10;
constexpr unsigned char POISON = 0xff;  // a NaN of every type
}  // namespace shim

thread_local __align__(256) unsigned char dynamic_shared[shim::MOST_SHARED + shim::SHARED_GUARD];

namespace shim {

// Shared memory is this library's part of the memory that each thread of the machine has for itself.
struct Shared {
    unsigned char* start;
    size_t size;
};

inline int find_shared(dl_phdr_info* library, size_t, void* found) {
    bool own = false;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const auto& part = library->dlpi_phdr[i];
        uintptr_t from = library->dlpi_addr + part.p_vaddr;
        own |= part.p_type == PT_LOAD && uintptr_t(&find_shared) - from < part.p_memsz;
    }
    for (int i = 0; own && i < library->dlpi_phnum; i++) {
        const auto& part = library->dlpi_phdr[i];
        if (part.p_type == PT_TLS)
            *static_cast<Shared*>(found) = {static_cast<unsigned char*>(library->dlpi_tls_data), part.p_memsz};
    }
    return own;
}

inline uint3 places[fibers::MOST_THREADS];  // of the threads in their block

UNCHECKED void enter_thread(int thread) { threadIdx = places[thread]; }

inline void run_grid(size_t shared) {
    dynamic_shared[0] = POISON;  // from its first use on the memory exists
    Shared all{};
    dl_iterate_phdr(find_shared, &all);
    const unsigned char* dynamic_end = dynamic_shared + sizeof dynamic_shared;
    const size_t before = size_t(dynamic_shared - all.start);
    const size_t after = size_t(all.start + all.size - dynamic_end);
    const uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
    fibers::Walk walk(blocks);
    for (uint64_t i = 0; i < blocks; i++) {
        const uint64_t b = walk.next();
        blockIdx = {unsigned(b % gridDim.x), unsigned(b / gridDim.x % gridDim.y),
                    unsigned(b / gridDim.x / gridDim.y)};
        memset(all.start, POISON, before);
        memset(dynamic_shared, POISON, shared + SHARED_GUARD);
        memset(dynamic_shared + sizeof dynamic_shared, POISON, after);
        fibers::run_block();
        for (size_t j = shared; !fibers::failure[0] && j < shared + SHARED_GUARD; j++)
            if (dynamic_shared[j] != POISON)
                fibers::fail("wrote behind its %zu bytes of dynamic shared memory, at %zu", shared, j);
        if (fibers::failure[0]) {
            size_t end = strlen(fibers::failure);
            snprintf(fibers::failure + end, sizeof fibers::failure - end, " (block %u, %u, %u)", blockIdx.x,
                     blockIdx.y, blockIdx.z);
            return;
        }
    }
}

// -- parameters: their types in letters, and their values out of an array of pointers

template <typename T> constexpr const char* LETTER = "?";
template <> inline constexpr const char* LETTER<void> = "?";
template <> inline constexpr const char* LETTER<unsigned char> = "B";
template <> inline constexpr const char* LETTER<unsigned short> = "H";
template <> inline constexpr const char* LETTER<int> = "i";
template <> inline constexpr const char* LETTER<unsigned> = "I";
template <> inline constexpr const char* LETTER<long long> = "q";
template <> inline constexpr const char* LETTER<unsigned long long> = "Q";
template <> inline constexpr const char* LETTER<float> = "f";
template <> inline constexpr const char* LETTER<double> = "d";
template <typename T> constexpr const char* LETTER<const T> = LETTER<T>;

template <typename T> constexpr const char* POINTER = "";
template <typename T> constexpr const char* POINTER<T*> = "*";
template <typename T> struct Pointee { typedef T type; };
template <typename T> struct Pointee<T*> { typedef T type; };

template <typename... P>
inline const char* signature(void (*)(P...)) {
    static thread_local char text[256];  // ranks are threads here, and ask at the same time
    size_t end = 0;
    text[0] = 0;
    ((end += size_t(snprintf(text + end, sizeof text - end, "%s%s%s", end ? " " : "", POINTER<P>,
                             LETTER<typename Pointee<P>::type>))),
     ...);
    return text;
}

template <typename... P>
struct Call {
    void (*kernel)(P...);
    void** args;

    template <size_t... I>
    void with(std::index_sequence<I...>) {
        kernel(*static_cast<P*>(args[I])...);
    }
    static void run(void* self) { static_cast<Call*>(self)->with(std::index_sequence_for<P...>()); }
};

template <typename... P>
inline const char* launch(void (*kernel)(P...), const unsigned* grid, const unsigned* block, size_t shared,
                          long long order, void** args) {
    Call<P...> call{kernel, args};
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    fibers::count = int(block[0] * block[1] * block[2]);
    for (unsigned t = 0; t < unsigned(fibers::count); t++)
        places[t] = {t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
    fibers::order = order, fibers::randomness = uint64_t(order);
    fibers::body = Call<P...>::run;
    fibers::body_data = &call;
    fibers::enter = enter_thread;
    fibers::failure[0] = 0;
    run_grid(shared);
    return fibers::failure;
}

// -- what g++'s checks call when one fails

struct Place {
    const char* file;
    unsigned line, column;
};
#define CHECK(name, what) \
    extern "C" __attribute__((visibility("hidden"), used)) void __ubsan_handle_##name(const Place* place) { \
        fibers::fail("%s:%u: %s", place->file, place->line, what); \
        fibers::abandon(); \
    }
CHECK(type_mismatch_v1, "a pointer is null or not aligned as its type must be")
CHECK(out_of_bounds, "an index lies outside its array")
CHECK(shift_out_of_bounds, "a shift by too many bits")
CHECK(divrem_overflow, "a division by zero")
CHECK(add_overflow, "an addition leaves the range of int")
CHECK(sub_overflow, "a subtraction leaves the range of int")
CHECK(mul_overflow, "a multiplication leaves the range of int")
CHECK(negate_overflow, "a negation leaves the range of int")
#undef CHECK

}  // namespace shim
