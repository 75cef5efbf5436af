/* A file system that fails once, or from a moment on: LD_PRELOAD for a process.
 *
 * Counts the calls that write below PERVIT_REFUSED_FOLDER (PERVIT_REFUSED_CALLS=write) or read there (read), and lets call number
 * PERVIT_REFUSED_AT fail with PERVIT_REFUSED_ERRNO; with PERVIT_REFUSED_FOR=n the n calls from there on. PERVIT_REFUSED_LOG gets a
 * line for each: its number, the function, the path below the folder. Variables are read at each call: a forked process sets its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;

/* Whether this call fails; path may be relative to nothing: only absolute ones are below the folder. */
static int refused(int writes, const char *function, const char *path) {
    const char *folder = getenv("PERVIT_REFUSED_FOLDER"), *kind = getenv("PERVIT_REFUSED_CALLS");
    size_t length = folder ? strlen(folder) : 0;
    if (!length || !path || strncmp(path, folder, length) || (strcmp(kind ? kind : "write", "write") == 0) != writes) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    const char *log = getenv("PERVIT_REFUSED_LOG"), *at = getenv("PERVIT_REFUSED_AT"), *count = getenv("PERVIT_REFUSED_FOR");
    long first = at ? atol(at) : 0, last = first + (count ? atol(count) : 1) - 1;
    int fails = first && number >= first && number <= last;
    if (log) {
        char line[PATH_MAX + 100];
        int size = snprintf(line, sizeof line, "%ld %s %s%s\n", number, function, path + length, fails ? " fails" : "");
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file >= 0) { syscall(SYS_write, file, line, size); syscall(SYS_close, file); }
    }
    if (fails) errno = atoi(getenv("PERVIT_REFUSED_ERRNO"));
    return fails;
}

static int refused_file(int writes, const char *function, int file) {
    char link[64], path[PATH_MAX];
    int kept = errno;
    if (!getenv("PERVIT_REFUSED_FOLDER")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (size < 0) return 0;
    path[size] = 0;
    return refused(writes, function, path);
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
#define OF_FILE(writes, type, name, parameters, arguments, ...)                                                                       \
    type name parameters { return refused_file(writes, #name, file) ? -1 : REAL(type, name, __VA_ARGS__) arguments; }
#define OF_PATH(type, name, parameters, arguments, ...)                                                                               \
    type name parameters { return refused(1, #name, path) ? -1 : REAL(type, name, __VA_ARGS__) arguments; }

OF_FILE(1, ssize_t, write, (int file, const void *data, size_t size), (file, data, size), int, const void *, size_t)
OF_FILE(1, ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), int, const void *, size_t, off_t)
OF_FILE(1, ssize_t, pwrite64, (int file, const void *data, size_t size, off_t at), (file, data, size, at), int, const void *, size_t, off_t)
OF_FILE(1, ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count), int, const struct iovec *, int)
OF_FILE(1, int, fsync, (int file), (file), int)
OF_FILE(1, int, fdatasync, (int file), (file), int)
OF_FILE(1, int, ftruncate, (int file, off_t size), (file, size), int, off_t)
OF_FILE(1, int, ftruncate64, (int file, off_t size), (file, size), int, off_t)
OF_FILE(0, ssize_t, read, (int file, void *data, size_t size), (file, data, size), int, void *, size_t)
OF_FILE(0, ssize_t, pread, (int file, void *data, size_t size, off_t at), (file, data, size, at), int, void *, size_t, off_t)
OF_FILE(0, ssize_t, pread64, (int file, void *data, size_t size, off_t at), (file, data, size, at), int, void *, size_t, off_t)
OF_FILE(0, ssize_t, readv, (int file, const struct iovec *parts, int count), (file, parts, count), int, const struct iovec *, int)
OF_FILE(0, ssize_t, preadv, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at), int, const struct iovec *, int, off_t)
OF_FILE(0, ssize_t, preadv64, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at), int, const struct iovec *, int, off_t)
OF_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
OF_PATH(int, rename, (const char *path, const char *to), (path, to), const char *, const char *)
OF_PATH(int, link, (const char *path, const char *to), (path, to), const char *, const char *)

#define OPENING(name)                                                                                                                 \
    int name(const char *path, int flags, ...) {                                                                                      \
        va_list more;                                                                                                                 \
        va_start(more, flags);                                                                                                        \
        mode_t mode = va_arg(more, mode_t);                                                                                           \
        va_end(more);                                                                                                                 \
        return refused((flags & O_ACCMODE) != O_RDONLY, #name, path) ? -1 : REAL(int, name, const char *, int, ...)(path, flags, mode); \
    }
OPENING(open)
OPENING(open64)
