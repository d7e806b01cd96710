/* The file operations of a process below a folder, of which one, or each of some kinds, fails as a disk does. For LD_PRELOAD. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[4096], kinds[256], hit[4200];
static int error;
static long at, count;

/* The operation with this number fails, or, if it is 0, each of a kind in the list (" symlink link "). */
void arm(const char *folder, long number, const char *named, int code) {
    snprintf(root, sizeof root, "%s", folder);
    snprintf(kinds, sizeof kinds, "%s", named);
    at = number, error = code, count = 0, hit[0] = 0;
}
long counted(void) { return count; }
const char *failed(void) { return hit; }

static int fails(const char *kind, const char *path, int descriptor) {
    char name[64], target[4096], word[64];
    if (!root[0]) return 0;
    if (!path || path[0] != '/') {
        snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
        long length = readlink(descriptor == AT_FDCWD ? "/proc/self/cwd" : name, target, sizeof target - 1);
        if (length <= 0) return 0;
        target[length] = 0, path = target;
    }
    if (strncmp(path, root, strlen(root))) return 0;
    snprintf(word, sizeof word, " %s ", kind);
    if (++count != at && (at || !strstr(kinds, word))) return 0;
    if (!hit[0]) snprintf(hit, sizeof hit, "%s %s", kind, path);
    if (error == 0) kill(getpid(), SIGKILL);
    errno = error;
    return 1;
}

#define NEXT(type, name, ...) static type (*next)(__VA_ARGS__); if (!next) next = dlsym(RTLD_NEXT, name)
#define CALL(type, bad, name, kind, path, fd, given, ...) \
    type name given { \
        static type (*next) given; \
        if (!next) next = dlsym(RTLD_NEXT, #name); \
        return fails(kind, path, fd) ? bad : next(__VA_ARGS__); \
    }
CALL(int, -1, rename, "rename", a, AT_FDCWD, (const char *a, const char *b), a, b)
CALL(int, -1, symlink, "symlink", b, AT_FDCWD, (const char *a, const char *b), a, b)
CALL(int, -1, link, "link", a, AT_FDCWD, (const char *a, const char *b), a, b)
CALL(int, -1, linkat, "link", a, c, (int c, const char *a, int d, const char *b, int e), c, a, d, b, e)
CALL(int, -1, unlink, "unlink", a, AT_FDCWD, (const char *a), a)
CALL(int, -1, unlinkat, "unlink", a, c, (int c, const char *a, int b), c, a, b)
CALL(int, -1, rmdir, "rmdir", a, AT_FDCWD, (const char *a), a)
CALL(int, -1, mkdir, "mkdir", a, AT_FDCWD, (const char *a, mode_t b), a, b)
CALL(int, -1, chmod, "chmod", a, AT_FDCWD, (const char *a, mode_t b), a, b)
CALL(int, -1, fchmodat, "chmod", a, c, (int c, const char *a, mode_t b, int d), c, a, b, d)
CALL(int, -1, ftruncate64, "truncate", NULL, c, (int c, off64_t a), c, a)
CALL(ssize_t, -1, write, "write", NULL, c, (int c, const void *a, size_t b), c, a, b)
CALL(ssize_t, -1, pwrite64, "write", NULL, c, (int c, const void *a, size_t b, off64_t d), c, a, b, d)
CALL(ssize_t, -1, read, "read", NULL, c, (int c, void *a, size_t b), c, a, b)
CALL(DIR *, NULL, opendir, "opendir", a, AT_FDCWD, (const char *a), a)
CALL(int, -1, stat64, "stat", a, AT_FDCWD, (const char *a, struct stat64 *b), a, b)
CALL(int, -1, lstat64, "stat", a, AT_FDCWD, (const char *a, struct stat64 *b), a, b)

int fsync(int c) {
    struct stat s;
    NEXT(int, "fsync", int);
    return fails(!fstat(c, &s) && S_ISDIR(s.st_mode) ? "syncdir" : "fsync", NULL, c) ? -1 : next(c);
}
int close(int c) { /* closes, as the kernel does, whatever it says; what is only read does not fail */
    NEXT(int, "close", int);
    int bad = (fcntl(c, F_GETFL) & O_ACCMODE) != O_RDONLY && fails("close", NULL, c);
    return next(c) || bad ? -1 : 0;
}
int open64(const char *a, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    NEXT(int, "open64", const char *, int, ...);
    return fails(flags & O_ACCMODE ? "create" : "open", a, AT_FDCWD) ? -1 : next(a, flags, mode);
}
