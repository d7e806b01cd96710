/* Preloaded into a run: makes calls of the C library fail, wait or lie. It calls the kernel itself:
 * dlsym takes a lock, in which a loader worker would wait that was forked while it was held.
 *
 * The file SOAK_ORDERS says what, from when it exists on: "NAME VALUE", such as "rename step-". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Whether the order has this name; then also its value. */
static int ordered(const char *name, char value[128]) {
    int before = errno, found = 0;
    char text[200], given[64];
    const char *path = getenv("SOAK_ORDERS");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        long size = syscall(SYS_read, file, text, sizeof text - 1);
        syscall(SYS_close, file);
        text[size > 0 ? size : 0] = 0;
        found = sscanf(text, "%63s %127s", given, value) == 2 && !strcmp(given, name);
    }
    errno = before;
    return found;
}

/* Whether a file of the run, or one whose path has this part, is open as a descriptor. */
static int is_open_as(int descriptor, const char *part) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    path[size > 0 ? size : 0] = 0;
    return strstr(path, part) != NULL;
}

static void wait_if_slow(int descriptor) {
    char value[128];
    if (ordered("slow", value) && is_open_as(descriptor, "/run/")) {
        struct timespec time = {0, atol(value) * 1000000L};
        syscall(SYS_nanosleep, &time, NULL);
    }
}

int rename(const char *from, const char *to) {
    char value[128];
    if (ordered("rename", value) && strstr(to, value)) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    char value[128];
    if (ordered("full", value) && is_open_as(descriptor, value)) {
        errno = ENOSPC;
        return -1;
    }
    wait_if_slow(descriptor);
    return syscall(SYS_write, descriptor, data, size);
}

int fsync(int descriptor) {
    wait_if_slow(descriptor);
    return syscall(SYS_fsync, descriptor);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    char value[128];
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME && ordered("clock", value)) now->tv_sec += atol(value);
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    char value[128];
    int result = syscall(SYS_gettimeofday, now, zone);
    if (ordered("clock", value)) now->tv_sec += atol(value);
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
