// A cable between two TAP devices, with a rate and a delay that are told: what tc's netem would do if the
// kernel had it. Each direction is a thread that stamps frames with when they arrive, and hands them over then.
//
//   link TAP TAP BITS_PER_SECOND DELAY_IN_MICROSECONDS
//
// Says "ready" once both devices are open; ends when standard input closes.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

constexpr size_t LARGEST_FRAME = 1 << 16;
constexpr auto TAKEN_AHEAD = std::chrono::milliseconds(1);  // the rest waits at the sender, as before a network card

struct Frame {
    Clock::time_point arrives;
    std::vector<char> bytes;
};

int opened(const char* name) {
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    ifreq request{};
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) {
        std::perror(name);
        std::exit(1);
    }
    return device;
}

void carry(int from, int to, double nanoseconds_per_byte, Nanoseconds delay) {
    prctl(PR_SET_TIMERSLACK, 1);  // wake when asked to, not 50 microseconds later
    std::deque<Frame> under_way;
    std::vector<char> buffer(LARGEST_FRAME);
    auto free_at = Clock::now();  // when the last bit that was taken in has left
    for (;;) {
        auto now = Clock::now();
        for (; !under_way.empty() && under_way.front().arrives <= now; under_way.pop_front()) {
            const auto& bytes = under_way.front().bytes;
            (void)!write(to, bytes.data(), bytes.size());
        }
        bool full = free_at > now + TAKEN_AHEAD;
        auto next = now + std::chrono::seconds(1);
        if (!under_way.empty()) next = std::min(next, under_way.front().arrives);
        if (full) next = std::min(next, free_at - TAKEN_AHEAD);
        auto left = std::max(Nanoseconds(0), Nanoseconds(next - Clock::now()));
        timespec until{time_t(left.count() / 1000000000), long(left.count() % 1000000000)};
        pollfd waiting{full ? -1 : from, POLLIN, 0};
        if (ppoll(&waiting, 1, &until, nullptr) <= 0) continue;
        ssize_t size = read(from, buffer.data(), buffer.size());
        if (size <= 0) continue;
        free_at = std::max(free_at, Clock::now()) + Nanoseconds(int64_t(size * nanoseconds_per_byte));
        under_way.push_back({free_at + delay, {buffer.begin(), buffer.begin() + size}});
    }
}

int main(int count, char** words) {
    if (count != 5) return 2;
    sched_param first{1};
    sched_setscheduler(0, SCHED_FIFO, &first);  // a cable does not wait for a core
    int a = opened(words[1]), b = opened(words[2]);
    double per_byte = 8e9 / std::atof(words[3]);
    auto delay = Nanoseconds(int64_t(std::atof(words[4]) * 1000));
    std::puts("ready");
    std::fflush(stdout);
    std::thread(carry, a, b, per_byte, delay).detach();
    std::thread(carry, b, a, per_byte, delay).detach();
    char nothing;
    while (read(0, &nothing, 1) > 0) {
    }
}
