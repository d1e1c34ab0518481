// A switch between TAP devices, each at a cable with a rate and a delay that are told: what tc's netem would do
// if the kernel had it. With two devices it is one cable, whose delay is the sum of both.
//
//   link TAP BITS_PER_SECOND DELAY_IN_MICROSECONDS TAP BITS_PER_SECOND DELAY_IN_MICROSECONDS …
//
// A cable has its rate in each direction. The switch begins to pass a frame on with its first bit, if the way out is
// free; else it waits in turn, and none is lost. Frames are stamped with when that is, so being late adds up to nothing.
// Says "ready" once all devices are open; ends when standard input closes.

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
#include <map>
#include <memory>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Nanoseconds = std::chrono::nanoseconds;
using Bytes = std::shared_ptr<std::vector<char>>;

constexpr size_t LARGEST_FRAME = 1 << 16;
constexpr size_t ADDRESS = 6;       // bytes: a frame begins with its target's, then its sender's
constexpr size_t ON_THE_WIRE = 24;  // bytes of each that only Ethernet sees: preamble, sum, gap
constexpr auto TAKEN_AHEAD = std::chrono::milliseconds(1);  // the rest waits at the sender, as before a network card

struct Port {
    int device;
    double nanoseconds_per_byte;
    Nanoseconds delay;
    Time free_in, free_out;  // when the last bit that was taken in, or passed on, has left

    Nanoseconds lasts(size_t bytes) const { return Nanoseconds(int64_t((bytes + ON_THE_WIRE) * nanoseconds_per_byte)); }
};

struct Frame {
    size_t out;
    Bytes bytes;
    bool is_out;  // passed on by the switch: then all that is left is to hand it over
    Time last;    // when its last bit is at the switch
};

struct Switch {
    std::vector<Port> ports;
    std::multimap<Time, Frame> due;  // when the first bit is at the switch, or the last one at the other end
    std::map<std::string, size_t> found;

    // Take a frame from a device into its cable.
    void take(size_t in, std::vector<char>& buffer) {
        Port& port = ports[in];
        ssize_t size = read(port.device, buffer.data(), buffer.size());
        if (size < ssize_t(2 * ADDRESS)) return;
        auto bytes = std::make_shared<std::vector<char>>(buffer.begin(), buffer.begin() + size);
        Time begins = std::max(port.free_in, Clock::now());
        port.free_in = begins + port.lasts(size);
        found[std::string(bytes->data() + ADDRESS, ADDRESS)] = in;
        auto target = found.find(std::string(bytes->data(), ADDRESS));
        for (size_t out = 0; out < ports.size(); out++)
            if (target == found.end() ? out != in : out == target->second)
                due.insert({begins + port.delay, {out, bytes, false, port.free_in + port.delay}});
    }

    // Do what is due by now.
    void pass_on(Time now) {
        while (!due.empty() && due.begin()->first <= now) {
            auto [first, frame] = *due.begin();
            due.erase(due.begin());
            Port& port = ports[frame.out];
            if (frame.is_out) {
                (void)!write(port.device, frame.bytes->data(), frame.bytes->size());
                continue;
            }
            port.free_out = std::max(std::max(port.free_out, first) + port.lasts(frame.bytes->size()), frame.last);
            frame.is_out = true;
            due.insert({port.free_out + port.delay, frame});
        }
    }

    void run() {
        std::vector<char> buffer(LARGEST_FRAME);
        std::vector<pollfd> waiting(ports.size() + 1);
        waiting.back() = {0, POLLIN, 0};
        for (;;) {
            Time now = Clock::now(), next = now + std::chrono::seconds(1);
            pass_on(now);
            if (!due.empty()) next = std::min(next, due.begin()->first);
            for (size_t i = 0; i < ports.size(); i++) {
                bool full = ports[i].free_in > now + TAKEN_AHEAD;
                waiting[i] = {full ? -1 : ports[i].device, POLLIN, 0};
                if (full) next = std::min(next, ports[i].free_in - TAKEN_AHEAD);
            }
            auto left = std::max(Nanoseconds(0), Nanoseconds(next - Clock::now()));
            timespec until{time_t(left.count() / 1000000000), long(left.count() % 1000000000)};
            if (ppoll(waiting.data(), waiting.size(), &until, nullptr) <= 0) continue;
            for (size_t i = 0; i < ports.size(); i++)
                if (waiting[i].revents) take(i, buffer);
            char nothing;
            if (waiting.back().revents && read(0, &nothing, 1) <= 0) return;
        }
    }
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

int main(int count, char** words) {
    if (count < 7 || count % 3 != 1) return 2;
    sched_param first{1};
    sched_setscheduler(0, SCHED_FIFO, &first);  // a cable does not wait for a core
    prctl(PR_SET_TIMERSLACK, 1);                // wake when asked to, not 50 microseconds later
    Switch all;
    for (char** word = words + 1; *word; word += 3)
        all.ports.push_back(
            {opened(word[0]), 8e9 / std::atof(word[1]), Nanoseconds(int64_t(std::atof(word[2]) * 1000)), {}, {}});
    std::puts("ready");
    std::fflush(stdout);
    all.run();
}
