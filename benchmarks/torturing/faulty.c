// Real errors, signals and a jumping clock for one process, whatever it is written in: LD_PRELOAD=faulty.so.
//
// Counts the calls below a folder that change it (or, if asked, those that read it) and does something at the
// so many-th: fails it, shortens it, or sends a signal. All of it is told by the environment:
//
//   FAULTY_ROOT    the folder
//   FAULTY_STATE   another folder: rank-N (its process), hit (when the fault came), and what others leave there
//   FAULTY_LOG     a file: a line per counted call, with its number, the seconds, its name, its bytes and its path
//   FAULTY_READS   count what reads instead of what changes
//   FAULTY_AT      the number of the call, from 1; 0: none
//   FAULTY_TIMES   for how many calls an error lasts; 0: for ever
//   FAULTY_ERROR   the errno it fails with; what needs no room does not fail for the lack of it
//   FAULTY_SHORT   1: only half of a write is done, without an error; 2: and then the process is killed
//   FAULTY_SIGNAL  the number of a signal that is sent before the call
//   FAULTY_TO      whom to: "all", a rank, or "launcher", whose number stands in the file of that name
//   FAULTY_CLOCK   SECONDS:SHIFT, …: from so many seconds after the start CLOCK_REALTIME is shifted by so many

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WATCHED = 1 << 16, SHIFTS = 8, RANKS = 64 };

static char root[PATH_MAX], state[PATH_MAX];
static size_t root_length;
static int log_file = -1, is_on, counts_reads;
static long at, times = 1, failure, shortened, number;
static const char *to = "";
static _Atomic long count;
static _Atomic unsigned char watched[WATCHED];  // by descriptor: 1, it is below the folder; 2, and may be written to
static double shift_at[SHIFTS], shift_by[SHIFTS], begun;
static int shifts;

static double now(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static long told(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

static void leave_note(const char *name, const char *text) {
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", state, name);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file >= 0) {
        (void)!syscall(SYS_write, file, text, strlen(text));
        syscall(SYS_close, file);
    }
}

static pid_t noted(const char *name) {
    char path[2 * PATH_MAX], text[32] = "";
    snprintf(path, sizeof path, "%s/%s", state, name);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file >= 0) {
        (void)!syscall(SYS_read, file, text, sizeof text - 1);
        syscall(SYS_close, file);
    }
    return atoi(text);
}

static void send_signal(void) {
    char name[32];
    int own = 0;
    pid_t pid;
    if (!strcmp(to, "launcher")) {
        if ((pid = noted("launcher")) > 0) kill(pid, number);
        return;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        snprintf(name, sizeof name, "rank-%d", rank);
        if ((strcmp(to, "all") && atoi(to) != rank) || (pid = noted(name)) <= 0) continue;
        if (pid == getpid()) own = 1;
        else kill(pid, number);
    }
    if (own) kill(getpid(), number);  // the last, since it may be the end
}

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("FAULTY_ROOT"), *notes = getenv("FAULTY_STATE"), *log = getenv("FAULTY_LOG");
    begun = now();
    if (!where || !notes) return;
    unsetenv("LD_PRELOAD");  // not for what this process starts
    snprintf(root, sizeof root, "%s", where);
    snprintf(state, sizeof state, "%s", notes);
    root_length = strlen(root);
    counts_reads = getenv("FAULTY_READS") != NULL;
    at = told("FAULTY_AT", 0);
    times = told("FAULTY_TIMES", 1);
    failure = told("FAULTY_ERROR", 0);
    shortened = told("FAULTY_SHORT", 0);
    number = told("FAULTY_SIGNAL", 0);
    if (getenv("FAULTY_TO")) to = strdup(getenv("FAULTY_TO"));
    char name[32], pid[32];
    snprintf(name, sizeof name, "rank-%ld", told("PMI_RANK", 0));
    snprintf(pid, sizeof pid, "%d\n", getpid());
    leave_note(name, pid);
    if (log) {
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        log_file = fcntl(file, F_DUPFD_CLOEXEC, 900);
        syscall(SYS_close, file);
    }
    char *clock = getenv("FAULTY_CLOCK");
    for (char *rest = clock; rest && *rest && shifts < SHIFTS; shifts++) {
        shift_at[shifts] = strtod(rest, &rest);
        shift_by[shifts] = *rest == ':' ? strtod(rest + 1, &rest) : 0;
        if (*rest == ',') rest++;
    }
    is_on = 1;
}

static int is_below(int folder, const char *path) {
    if (!is_on || !path) return 0;
    if (*path != '/') return folder >= 0 && folder < WATCHED && watched[folder];
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int is_watched(int file) { return is_on && file >= 0 && file < WATCHED && watched[file]; }

// What becomes of a call below the folder: 0, it is done; -1, it fails with errno; 1, half of it is done.
static int struck(const char *call, const char *path, size_t size, int reads) {
    if (reads != counts_reads) return 0;
    long own = atomic_fetch_add(&count, 1) + 1;
    if (log_file >= 0) {
        char line[PATH_MAX + 128];
        const char *shown = path && !strncmp(path, root, root_length) ? path + root_length : path;
        snprintf(line, sizeof line, "%ld %.6f %s %zu %s\n", own, now(), call, size, shown && *shown ? shown : ".");
        (void)!syscall(SYS_write, log_file, line, strlen(line));
    }
    if (at <= 0 || own < at || (times && own >= at + times)) return 0;
    if (own == at) {
        char text[64];
        snprintf(text, sizeof text, "%.6f %s\n", now(), call);
        leave_note("hit", text);
        if (number) send_signal();
    }
    if (shortened && size > 1) return 1;
    int needs_room = strcmp(call, "unlink") && strcmp(call, "utimensat");
    if (!failure || ((failure == ENOSPC || failure == EDQUOT) && !needs_room)) return 0;
    errno = failure;
    return -1;
}

static const char *path_of(int file, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, PATH_MAX - 1);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

static int on_file(int file, const char *call) {
    char buffer[PATH_MAX];
    return is_watched(file) ? struck(call, path_of(file, buffer), 0, 0) : 0;
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    int below = is_below(folder, path);
    if (below && struck("open", path, 0, !(flags & O_CREAT))) return -1;
    int file = syscall(SYS_openat, folder, path, flags, mode);
    if (file >= 0 && file < WATCHED && is_on) watched[file] = below ? (flags & O_ACCMODE ? 2 : 1) : 0;
    return file;
}

#define MODE(flags)                                  \
    mode_t mode = 0;                                 \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {         \
        va_list rest;                                \
        va_start(rest, flags);                       \
        mode = va_arg(rest, mode_t);                 \
        va_end(rest);                                \
    }
int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }

int close(int file) {  // which closes even where it fails, as when the last bytes could not be stored
    int failed = is_watched(file) && watched[file] == 2 ? on_file(file, "close") : 0, why = errno;
    if (file >= 0 && file < WATCHED) watched[file] = 0;
    int closed = syscall(SYS_close, file);
    if (failed >= 0) return closed;
    errno = why;
    return -1;
}

static ssize_t wrote(int file, const char *call, size_t size, const void *bytes, long offset) {
    char buffer[PATH_MAX];
    int verdict = is_watched(file) ? struck(call, path_of(file, buffer), size, 0) : 0;
    if (verdict < 0) return -1;
    size_t part = verdict ? size / 2 : size;
    ssize_t done = offset < 0 ? syscall(SYS_write, file, bytes, part) : syscall(SYS_pwrite64, file, bytes, part, offset);
    if (verdict && shortened == 2) kill(getpid(), SIGKILL);
    return done;
}
ssize_t write(int file, const void *bytes, size_t size) { return wrote(file, "write", size, bytes, -1); }
ssize_t pwrite(int file, const void *bytes, size_t size, off_t offset) { return wrote(file, "pwrite", size, bytes, offset); }
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t offset) { return wrote(file, "pwrite", size, bytes, offset); }

ssize_t writev(int file, const struct iovec *parts, int number_of_parts) {
    char buffer[PATH_MAX];
    int verdict = is_watched(file) ? struck("writev", path_of(file, buffer), 0, 0) : 0;
    return verdict < 0 ? -1 : syscall(SYS_writev, file, parts, number_of_parts);
}

ssize_t read(int file, void *bytes, size_t size) {
    char buffer[PATH_MAX];
    int verdict = is_watched(file) ? struck("read", path_of(file, buffer), size, 1) : 0;
    return verdict < 0 ? -1 : syscall(SYS_read, file, bytes, verdict ? size / 2 : size);
}

int fsync(int file) { return on_file(file, "fsync") < 0 ? -1 : syscall(SYS_fsync, file); }
int fdatasync(int file) { return on_file(file, "fdatasync") < 0 ? -1 : syscall(SYS_fdatasync, file); }
int ftruncate(int file, off_t size) { return on_file(file, "ftruncate") < 0 ? -1 : syscall(SYS_ftruncate, file, size); }
int ftruncate64(int file, off64_t size) { return on_file(file, "ftruncate") < 0 ? -1 : syscall(SYS_ftruncate, file, size); }
int futimens(int file, const struct timespec when[2]) {
    return on_file(file, "utimensat") < 0 ? -1 : syscall(SYS_utimensat, file, NULL, when, 0);
}

static int on_path(int folder, const char *path, const char *call) {
    return is_below(folder, path) ? struck(call, path, 0, 0) : 0;
}
int utimensat(int folder, const char *path, const struct timespec when[2], int flags) {
    return on_path(folder, path, "utimensat") < 0 ? -1 : syscall(SYS_utimensat, folder, path, when, flags);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    return on_path(folder, path, "mkdir") < 0 ? -1 : syscall(SYS_mkdirat, folder, path, mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int unlinkat(int folder, const char *path, int flags) {
    return on_path(folder, path, "unlink") < 0 ? -1 : syscall(SYS_unlinkat, folder, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int renameat2(int from_folder, const char *from, int to_folder, const char *onto, unsigned flags) {
    int below = is_below(from_folder, from) || is_below(to_folder, onto);
    return below && struck("rename", onto, 0, 0) < 0 ? -1 : syscall(SYS_renameat2, from_folder, from, to_folder, onto, flags);
}
int renameat(int from_folder, const char *from, int to_folder, const char *onto) {
    return renameat2(from_folder, from, to_folder, onto, 0);
}
int rename(const char *from, const char *onto) { return renameat2(AT_FDCWD, from, AT_FDCWD, onto, 0); }
int linkat(int from_folder, const char *from, int to_folder, const char *onto, int flags) {
    return on_path(to_folder, onto, "link") < 0 ? -1 : syscall(SYS_linkat, from_folder, from, to_folder, onto, flags);
}
int link(const char *from, const char *onto) { return linkat(AT_FDCWD, from, AT_FDCWD, onto, 0); }

static double shift(void) {
    double found = 0, since = now() - begun;
    for (int i = 0; i < shifts; i++)
        if (since >= shift_at[i]) found = shift_by[i];
    return found;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, clock, time);
    if (!failed && clock == CLOCK_REALTIME && shifts) time->tv_sec += (time_t)shift();
    return failed;
}
int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, time, zone);
    if (!failed && shifts) time->tv_sec += (time_t)shift();
    return failed;
}
time_t time(time_t *where) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (where) *where = t.tv_sec;
    return t.tv_sec;
}
