// The threads of a CUDA block as fibers of one thread of the machine: each runs until it has to wait for
// others, and the scheduler goes on with the next. Everything is in an order that a number decides: forwards,
// backwards, or drawn at random from a seed, also which warp goes on after a shuffle. A kernel that lacks a
// barrier computes something else in some of them.
#pragma once

#include <link.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

// The scheduler's own code is right: the checks are for kernels, and take time.
#define UNCHECKED __attribute__((no_sanitize("undefined"))) inline

namespace fibers {

constexpr int WARP_SIZE = 32, MOST_THREADS = 1024;
constexpr size_t STACK = 64 << 10, PAGE = 4 << 10;

// -- changing from one stack to another

#if defined(__x86_64__) && !defined(FIBERS_UCONTEXT)

typedef void* Context;  // a stack pointer; what a callee must preserve lies on the stack

extern "C" __attribute__((visibility("hidden"))) void fibers_switch(Context* from, Context* to);
asm(R"(
    .text
    .globl fibers_switch
    .hidden fibers_switch
    .type fibers_switch, @function
fibers_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fibers_switch, . - fibers_switch
)");

inline void prepare(Context* context, unsigned char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK);
    *--top = nullptr;  // where a caller's address would be, so that the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    *context = top;
}

#else

}  // namespace fibers
#include <ucontext.h>
namespace fibers {

typedef ucontext_t Context;

inline void fibers_switch(Context* from, Context* to) { swapcontext(from, to); }

inline void prepare(Context* context, unsigned char* stack, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = STACK;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

#endif

// -- threads

enum State : unsigned char { FRESH, READY, AT_BARRIER, IN_WARP, DONE };
enum Meeting : unsigned char { SYNC, SHUFFLE };

struct Thread {
    State state;
    Meeting meeting;  // the rest is for IN_WARP
    unsigned mask;
    int source;
    uint64_t value, result;
    int stack;
    Context context;
};

inline Thread threads[MOST_THREADS];
inline int count, current;  // threads in the block, and the one that runs
inline Context scheduler;
constexpr long long FORWARDS = 0, BACKWARDS = -1;  // any other order is a seed
inline long long order;
inline uint64_t randomness;
inline char failure[512];
inline void (*body)(void*);
inline void* body_data;
inline void (*enter)(int thread);  // tells the kernel which thread it is now

inline unsigned char* stacks;  // the same for all libraries of a process, which may have only so many guard pages
inline int free_stacks[MOST_THREADS], free_count, used_stacks;

__attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    if (failure[0]) return;
    va_list values;
    va_start(values, format);
    vsnprintf(failure, sizeof failure, format, values);
    va_end(values);
}

// A number below `count`, by splitmix64.
UNCHECKED uint64_t drawn(uint64_t count) {
    uint64_t x = randomness += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (x ^ x >> 31) % count;
}

// Goes through 0 … count - 1 in the order of the launch: `next()` gives one after the other. Drawn anew for every
// walk, by a step that has no divisor in common with the count.
struct Walk {
    uint64_t count, start = 0, step = 1;

    UNCHECKED explicit Walk(uint64_t all) : count(all) {
        if (order == BACKWARDS) start = count - 1, step = count - 1;
        if (order == BACKWARDS || order == FORWARDS || count < 2) return;
        start = drawn(count);
        do step = 1 + drawn(count - 1);
        while (divisor(step, count) != 1);
    }
    static uint64_t divisor(uint64_t a, uint64_t b) { return b ? divisor(b, a % b) : a; }
    UNCHECKED uint64_t next() {
        const uint64_t at = start;
        start += step;
        if (start >= count) start -= count;
        return at;
    }
};

UNCHECKED void leave() { fibers_switch(&threads[current].context, &scheduler); }

// Out of a thread that has done something wrong, never to come back.
[[noreturn]] inline void abandon() {
    threads[current].state = DONE;
    leave();
    __builtin_unreachable();
}

inline void thread_main() {
    body(body_data);
    threads[current].state = DONE;
    free_stacks[free_count++] = threads[current].stack;
    leave();
    __builtin_unreachable();
}

UNCHECKED void wait_for_block() {
    threads[current].state = AT_BARRIER;
    leave();
}

UNCHECKED uint64_t meet(Meeting meeting, unsigned mask, uint64_t value, int source) {
    Thread& self = threads[current];
    self.state = IN_WARP, self.meeting = meeting, self.mask = mask, self.value = value, self.source = source;
    leave();
    return self.result;
}

// -- the scheduler

UNCHECKED unsigned char* share_stacks(unsigned char* of_others) {
    if (of_others) return stacks = of_others;
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* all = mmap(nullptr, (STACK + PAGE) * MOST_THREADS, PROT_READ | PROT_WRITE, kind, -1, 0);
    return stacks = all == MAP_FAILED ? nullptr : static_cast<unsigned char*>(all);
}

UNCHECKED int take_stack() {
    if (free_count) return free_stacks[--free_count];
    if (!stacks) return -1;
    mprotect(stacks + (STACK + PAGE) * used_stacks, PAGE, PROT_NONE);  // an overflow stops at once
    return used_stacks++;
}

UNCHECKED void run(int thread) {
    Thread& self = threads[thread];
    if (self.state == FRESH) {
        self.stack = take_stack();
        if (self.stack < 0) return fail("no memory for the threads' stacks");
        prepare(&self.context, stacks + (STACK + PAGE) * self.stack + PAGE, thread_main);
    }
    self.state = READY;
    current = thread;
    enter(thread);
    fibers_switch(&scheduler, &self.context);
}

inline const char* describe(int thread) {
    switch (threads[thread].state) {
        case AT_BARRIER: return "waits at __syncthreads";
        case DONE: return "has returned";
        case IN_WARP:
            return threads[thread].meeting == SHUFFLE ? "waits in a shuffle" : "waits at __syncwarp";
        default: return "runs";
    }
}

// The lanes that wait for each other exchange what they brought. False where one of them is missing.
UNCHECKED bool exchange(int first, int lane) {
    const unsigned mask = threads[first + lane].mask;
    if (!(mask >> lane & 1)) {
        fail("thread %d %s with a mask that leaves itself out", first + lane, describe(first + lane));
        return true;
    }
    for (int i = 0; i < WARP_SIZE; i++) {
        const Thread& other = threads[first + i];
        if (!(mask >> i & 1)) continue;
        bool here = other.state == IN_WARP && other.mask == mask;
        if (!here || other.meeting != threads[first + lane].meeting) return false;
    }
    for (int i = 0; i < WARP_SIZE; i++) {
        Thread& self = threads[first + i];
        if (!(mask >> i & 1)) continue;
        if (self.meeting == SHUFFLE && !(mask >> self.source & 1))
            fail("thread %d shuffles from lane %d, which takes no part", first + i, self.source);
        self.result = threads[first + self.source].value;
        self.state = READY;
    }
    return true;
}

inline void report_divergence(int first, int size, int waiting, const char* where) {
    for (int i = first; i < first + size; i++) {
        if (threads[i].state != threads[waiting].state || threads[i].meeting != threads[waiting].meeting ||
            threads[i].mask != threads[waiting].mask)
            return fail("divergent %s: thread %d %s, thread %d %s", where, waiting, describe(waiting), i,
                        describe(i));
    }
    fail("divergent %s: thread %d %s", where, waiting, describe(waiting));
}

// Runs a warp until its threads wait for each other, and lets them meet. False once all have returned or wait
// for other warps.
UNCHECKED bool go_on(int first) {
    Walk lanes(WARP_SIZE);
    for (int i = 0; i < WARP_SIZE; i++) {
        const int thread = first + int(lanes.next());
        if (threads[thread].state <= READY) run(thread);
        if (failure[0]) return false;
    }
    int waiting = -1;
    bool progress = false;
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        if (threads[first + lane].state != IN_WARP) continue;
        waiting = first + lane;
        progress |= exchange(first, lane);
        if (failure[0]) return false;
    }
    if (waiting >= 0 && !progress) report_divergence(first, WARP_SIZE, waiting, "warp");
    return progress && !failure[0];
}

// Runs all warps until they have returned or wait for each other: one after the other, or a piece of one drawn at
// random after a piece of another.
UNCHECKED void run_warps(int warps) {
    int left[MOST_THREADS / WARP_SIZE], count = 0;
    Walk walk{uint64_t(warps)};
    for (int i = 0; i < warps; i++) left[count++] = int(walk.next());
    const bool in_turn = order == FORWARDS || order == BACKWARDS;
    for (int done = 0; done < count && !failure[0];) {
        const int place = in_turn ? done : done + int(drawn(uint64_t(count - done)));
        if (go_on(left[place] * WARP_SIZE)) continue;
        const int finished = left[place];
        left[place] = left[done], left[done] = finished;
        done++;
    }
}

UNCHECKED void run_block() {
    for (int i = 0; i < count; i++) threads[i].state = FRESH;
    free_count = 0;
    for (int i = 0; i < used_stacks; i++) free_stacks[free_count++] = i;
    for (;;) {
        run_warps(count / WARP_SIZE);
        if (failure[0]) return;
        int waiting = 0, one = 0;
        for (int i = 0; i < count; i++) {
            if (threads[i].state != AT_BARRIER) continue;
            waiting++, one = i;
        }
        if (waiting == 0) return;
        if (waiting < count) {
            for (int i = 0; i < count; i++) threads[i].meeting = SYNC, threads[i].mask = 0;
            return report_divergence(0, count, one, "barrier");
        }
        for (int i = 0; i < count; i++) threads[i].state = READY;
    }
}

}  // namespace fibers
