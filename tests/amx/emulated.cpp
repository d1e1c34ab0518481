// AMX on processors without it: carries out the tile instructions that the processor refuses.
//
// Such a processor raises SIGILL at each. The handler below reads the instruction, does to registers of its own what
// Intel's manual (Architecture Instruction Set Extensions, "AMX") says, and goes on behind it. So it is the machine
// code itself that is tested, at some hundredth of its speed. Loaded by LD_PRELOAD, so that children have it too.
//
// What the hardware would refuse (a register without a size, sizes that do not fit, a bad configuration) ends the
// process by SIGILL, with the reason on stderr. AMX_COUNTS names a file to which a process appends, at its end, how
// often each instruction ran: a test that counts none has tested nothing.

#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;
enum Kind { CONFIGURE, LOOK, RELEASE, ZERO, LOAD, STORE, DOT, KINDS };
const char *const NAMES[KINDS] = {"ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileload", "tilestore", "tdpbf16ps"};
unsigned long counts[KINDS];

struct Registers {
    bool configured;
    uint8_t rows[TILES];
    uint16_t bytes[TILES];  // of a row
    alignas(BYTES) uint8_t data[TILES][ROWS][BYTES];
};
thread_local Registers registers;  // each thread has registers of its own, as on the processor

// The instruction, decoded as far as those of AMX need it.
struct Instruction {
    int length, opcode, prefix;  // prefix: 0 none, 1 66, 2 F3, 3 F2
    int reg, rm, vvvv;           // tile registers, where the operand is one
    bool is_register;
    uint64_t address;
    int64_t stride;
};

constexpr int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

uint64_t general(const ucontext_t *context, int number) { return context->uc_mcontext.gregs[GENERAL[number]]; }

// Read a three-byte VEX instruction of the map 0F38 without a vector length or W; false: it is none of ours.
bool decode(const uint8_t *code, const ucontext_t *context, Instruction &found) {
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84)) return false;
    const int r = code[1] & 0x80 ? 0 : 8, x = code[1] & 0x40 ? 0 : 8, b = code[1] & 0x20 ? 0 : 8;
    const uint8_t modrm = code[4];
    const int mod = modrm >> 6, low = modrm & 7;
    found = {5, code[3], code[2] & 3, (modrm >> 3 & 7) + r, low + b, 15 - (code[2] >> 3 & 15), mod == 3, 0, 0};
    if (found.is_register) return true;
    int64_t base = 0;
    if (low == 4) {
        const uint8_t sib = code[found.length++];
        const int index = (sib >> 3 & 7) + x, of = (sib & 7) + b;
        if (index != 4) found.stride = static_cast<int64_t>(general(context, index)) << (sib >> 6);
        if ((sib & 7) == 5 && mod == 0)
            found.address = 0;
        else
            base = general(context, of);
    } else if (low == 5 && mod == 0) {
        base = context->uc_mcontext.gregs[REG_RIP];  // and the length, below
    } else {
        base = general(context, low + b);
    }
    const bool is_relative = low == 5 && mod == 0;
    const bool is_wide = mod == 2 || is_relative || (low == 4 && mod == 0 && (code[5] & 7) == 5);
    int64_t displacement = 0;
    if (mod == 1) {
        displacement = static_cast<int8_t>(code[found.length++]);
    } else if (is_wide) {
        int32_t four;
        memcpy(&four, code + found.length, 4);
        displacement = four;
        found.length += 4;
    }
    found.address = base + displacement + (is_relative ? found.length : 0);
    return true;
}

// Say why the processor would refuse it. The handler then lets it refuse.
bool refuse(const char *format, ...) {
    char text[200];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (write(2, "AMX refuses: ", 13) < 0 || write(2, text, size) < 0 || write(2, "\n", 1) < 0) return false;
    return false;
}

bool configure(const uint8_t *from) {
    if (from[0] > 1) return refuse("palette %d", from[0]);
    memset(&registers, 0, sizeof registers);
    if (from[0] == 0) return true;
    if (from[1]) return refuse("a start row of %d", from[1]);
    for (int i = 2; i < 64; i++)
        if ((i < 16 || (i >= 32 && i < 48) || i >= 56) && from[i]) return refuse("byte %d of a configuration", i);
    memcpy(registers.bytes, from + 16, sizeof registers.bytes);
    memcpy(registers.rows, from + 48, sizeof registers.rows);
    for (int i = 0; i < TILES; i++) {
        if (registers.rows[i] > ROWS || registers.bytes[i] > BYTES)
            return refuse("tmm%d of %d rows of %d bytes", i, registers.rows[i], registers.bytes[i]);
        if (!registers.rows[i] != !registers.bytes[i]) return refuse("tmm%d with half a size", i);
    }
    registers.configured = true;
    return true;
}

void look(uint8_t *to) {
    memset(to, 0, 64);
    if (!registers.configured) return;
    to[0] = 1;
    memcpy(to + 16, registers.bytes, sizeof registers.bytes);
    memcpy(to + 48, registers.rows, sizeof registers.rows);
}

bool has_size(int tile) {
    if (tile >= TILES) return refuse("tmm%d", tile);
    return (registers.configured && registers.rows[tile]) || refuse("tmm%d, which has no size", tile);
}

// Denormals are zero, before and after every operation.
float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

float widened(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return flushed(value);
}

// Sums of the even and of the odd k, each a chain of fused multiply-adds, are added to C in the end.
bool dot(int c, int a, int b) {
    if (!has_size(c) || !has_size(a) || !has_size(b)) return false;
    if (c == a || c == b || a == b) return refuse("a product of tmm%d, tmm%d, tmm%d", c, a, b);
    Registers &t = registers;
    if (t.rows[c] != t.rows[a] || t.bytes[a] % 4 || t.bytes[a] / 4 != t.rows[b] || t.bytes[c] != t.bytes[b] || t.bytes[b] % 4)
        return refuse("a product of %d x %d by %d x %d bytes to %d x %d", t.rows[a], t.bytes[a], t.rows[b], t.bytes[b],
                      t.rows[c], t.bytes[c]);
    const int pairs = t.rows[b], columns = t.bytes[c] / 4;
    float even[ROWS], odd[ROWS], right[ROWS][2][ROWS];
    for (int k = 0; k < pairs; k++)
        for (int n = 0; n < columns; n++)
            for (int half = 0; half < 2; half++) {
                uint16_t bits;
                memcpy(&bits, &t.data[b][k][4 * n + 2 * half], 2);
                right[k][half][n] = widened(bits);
            }
    for (int m = 0; m < t.rows[c]; m++) {
        for (int n = 0; n < columns; n++) even[n] = odd[n] = 0;
        for (int k = 0; k < pairs; k++) {
            uint16_t pair[2];
            memcpy(pair, &t.data[a][m][4 * k], 4);
            const float first = widened(pair[0]), second = widened(pair[1]);
            for (int n = 0; n < columns; n++) {
                even[n] = flushed(std::fma(first, right[k][0][n], even[n]));
                odd[n] = flushed(std::fma(second, right[k][1][n], odd[n]));
            }
        }
        float *sums = reinterpret_cast<float *>(t.data[c][m]);
        for (int n = 0; n < columns; n++) sums[n] = flushed(flushed(sums[n]) + flushed(even[n] + odd[n]));
    }
    return true;
}

bool moved(const Instruction &each, bool is_load) {
    if (!has_size(each.reg)) return false;
    Registers &t = registers;
    auto *memory = reinterpret_cast<uint8_t *>(each.address);
    for (int row = 0; row < t.rows[each.reg]; row++, memory += each.stride) {
        uint8_t *line = t.data[each.reg][row];
        if (is_load)
            memcpy(line, memory, t.bytes[each.reg]);
        else
            memcpy(memory, line, t.bytes[each.reg]);
    }
    return true;
}

// Carry it out; false: it is none of ours, or refused.
bool carry_out(const Instruction &each, Kind &kind) {
    switch (each.opcode) {
    case 0x49:
        if (each.prefix == 0 && !each.is_register) return kind = CONFIGURE, configure(reinterpret_cast<uint8_t *>(each.address));
        if (each.prefix == 1 && !each.is_register) return kind = LOOK, look(reinterpret_cast<uint8_t *>(each.address)), true;
        if (each.prefix == 0) return kind = RELEASE, memset(&registers, 0, sizeof registers), true;
        if (each.prefix != 3 || !each.is_register || !has_size(each.reg)) return false;
        return kind = ZERO, memset(registers.data[each.reg], 0, sizeof registers.data[each.reg]), true;
    case 0x4B:
        if (each.prefix == 0 || each.is_register) return false;
        kind = each.prefix == 2 ? STORE : LOAD;
        return moved(each, kind == LOAD);
    case 0x5C:
        if (each.prefix != 2 || !each.is_register) return false;
        return kind = DOT, dot(each.reg, each.rm, each.vvvv);
    }
    return false;
}

bool is_handled;
struct sigaction before;  // of whoever else asked for SIGILL

void handle(int, siginfo_t *info, void *given) {
    auto *context = static_cast<ucontext_t *>(given);
    const int error = errno;
    const auto *code = reinterpret_cast<const uint8_t *>(context->uc_mcontext.gregs[REG_RIP]);
    Instruction each;
    Kind kind;
    if (decode(code, context, each) && carry_out(each, kind)) {
        context->uc_mcontext.gregs[REG_RIP] += each.length;
        __atomic_fetch_add(&counts[kind], 1, __ATOMIC_RELAXED);
    } else {
        is_handled = false;
        sigaction(info->si_signo, &before, nullptr);  // it is raised again, for whoever else asked for it
    }
    errno = error;
}

__attribute__((constructor)) void begin() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGILL, &action, &before);
    is_handled = true;
}

__attribute__((destructor)) void end() {
    const char *name = getenv("AMX_COUNTS");
    if (!name || !counts[DOT]) return;
    if (FILE *file = fopen(name, "a")) {
        char line[200];
        int size = snprintf(line, sizeof line, "%d", getpid());
        for (int kind = 0; kind < KINDS; kind++)
            size += snprintf(line + size, sizeof line - size, " %s %lu", NAMES[kind], counts[kind]);
        fprintf(file, "%s\n", line);
        fclose(file);
    }
}

}  // namespace

// Python's faulthandler asks for SIGILL too. What others ask for is done with what is none of ours.
extern "C" int sigaction(int number, const struct sigaction *asked, struct sigaction *old) {
    static auto *real = reinterpret_cast<decltype(&sigaction)>(dlsym(RTLD_NEXT, "sigaction"));
    if (number != SIGILL || !is_handled) return real(number, asked, old);
    if (old) *old = before;
    if (asked) before = *asked;
    return 0;
}

// Linux grants the tile registers only where they are: here they are granted in its place.
extern "C" long syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    long a[6];
    for (long &each : a) each = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_arch_prctl && a[0] == 0x1023 && a[1] == 18) return 0;
    register long r10 asm("r10") = a[3];
    register long r8 asm("r8") = a[4];
    register long r9 asm("r9") = a[5];
    long answer;
    asm volatile("syscall" : "=a"(answer) : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                 : "rcx", "r11", "memory");
    if (answer < 0 && answer > -4096) {
        errno = static_cast<int>(-answer);
        return -1;
    }
    return answer;
}
