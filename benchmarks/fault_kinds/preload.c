/* Calls of the C library on paths below one folder, either failed or recorded. Loaded by LD_PRELOAD, idle until asked.

   faults_fail: the nth call of some kinds fails with an error, once or from then on for good; each failure is reported.
   faults_record: every change below the folder is appended to a log, in the order in which it happened, with its data.
*/
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, RENAME = 8, FSYNC = 16, ENTRY = 32 };
enum { CREATE, MKDIR, SYMLINK, DATA, TRUNCATE, SYNC, MOVE, REMOVE, SEEN };
enum { LONGEST = 4096 };

static int failing, recording; /* one of them, or none */
static char root[LONGEST];
static size_t root_length;
static int kinds, error_number, for_good, output = -1;
static long nth;
static atomic_long calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define ACTIVE (failing || recording)
#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static ssize_t raw_write(const void *data, size_t size) {
    REAL(write);
    return real(output, data, size);
}

static void begin(const char *folder, const char *file) {
    REAL(open);
    root_length = (size_t)snprintf(root, sizeof root, "%s", folder);
    output = real(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void faults_fail(const char *folder, int of, long after, int number, int always, const char *file) {
    begin(folder, file);
    kinds = of, nth = after, error_number = number, for_good = always;
    failing = 1;
}

void faults_record(const char *folder, const char *file) {
    begin(folder, file);
    recording = 1;
}

/* -- paths -- */

static int is_below(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == 0 || path[root_length] == '/');
}

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, LONGEST - 1);
    path[size < 0 ? 0 : size] = 0;
    return is_below(path);
}

static int of_name(int folder, const char *name, char *path) {
    char base[LONGEST];
    if (name == NULL) return 0;
    if (name[0] == '/') snprintf(path, LONGEST, "%s", name);
    else {
        if (folder == AT_FDCWD ? getcwd(base, sizeof base) == NULL : (of_descriptor(folder, base), base[0] == 0)) return 0;
        if (snprintf(path, LONGEST, "%s/%s", base, name) >= LONGEST) return 0;
    }
    return is_below(path);
}

/* -- failing -- */

static int fails(int kind, const char *path) {
    if (!failing || !(kinds & kind)) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (number < nth || (number > nth && !for_good)) return 0;
    char line[LONGEST + 1];
    int size = snprintf(line, sizeof line, "%s\n", path);
    raw_write(line, (size_t)size);
    errno = error_number;
    return 1;
}

/* -- recording -- */

static void record(uint32_t what, uint64_t inode, uint64_t place, const char *first, const char *second, const void *data,
                   uint64_t size) {
    uint64_t head[6] = {what, inode, place, strlen(first), strlen(second), size};
    size_t total = sizeof head + head[3] + head[4] + size;
    char *line = malloc(total), *end = line;
    end = mempcpy(end, head, sizeof head);
    end = mempcpy(end, first, head[3]);
    end = mempcpy(end, second, head[4]);
    memcpy(end, data, size);
    raw_write(line, total);
    free(line);
}

static uint64_t inode_of(int descriptor) {
    struct stat found;
    return fstat(descriptor, &found) ? 0 : found.st_ino;
}

static uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

#define RECORDED(call, ...) \
    do { \
        pthread_mutex_lock(&lock); \
        __typeof__(call) done = (call); \
        int kept = errno; \
        if (done >= 0) record(__VA_ARGS__); \
        pthread_mutex_unlock(&lock); \
        errno = kept; \
        return done; \
    } while (0)

/* -- the calls -- */

static int opened(int (*real)(int, const char *, int, ...), int folder, const char *name, int flags, mode_t mode) {
    char path[LONGEST];
    if (!ACTIVE || !of_name(folder, name, path)) return real(folder, name, flags, mode);
    if (fails(OPEN, path)) return -1;
    if (!recording) return real(folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    int existed = inode_at(path) != 0, descriptor = real(folder, name, flags, mode), kept = errno;
    if (descriptor >= 0 && (flags & O_CREAT) && !existed) record(CREATE, inode_of(descriptor), 0, path, "", "", 0);
    else if (descriptor >= 0 && (flags & O_TRUNC)) record(TRUNCATE, inode_of(descriptor), 0, path, "", "", 0);
    else if (descriptor >= 0 && (flags & O_ACCMODE) != O_RDONLY) record(SEEN, inode_of(descriptor), 0, path, "", "", 0);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return descriptor;
}

#define MODE \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, mode_t) : 0; \
    va_end(more)

static int real_openat(int folder, const char *name, int flags, ...) {
    MODE;
    REAL(openat);
    return real(folder, name, flags, mode);
}

int open(const char *name, int flags, ...) { MODE; return opened(real_openat, AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE; return opened(real_openat, AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE; return opened(real_openat, folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE; return opened(real_openat, folder, name, flags, mode); }

DIR *opendir(const char *name) {
    REAL(opendir);
    char path[LONGEST];
    if (failing && of_name(AT_FDCWD, name, path) && fails(OPEN, path)) return NULL;
    return real(name);
}

#define READING(name, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        char path[LONGEST]; \
        if (failing && of_descriptor(descriptor, path) && fails(READ, path)) return -1; \
        return real arguments; \
    }

READING(read, (int descriptor, void *data, size_t size), (descriptor, data, size))
READING(pread, (int descriptor, void *data, size_t size, off_t place), (descriptor, data, size, place))
READING(pread64, (int descriptor, void *data, size_t size, off64_t place), (descriptor, data, size, place))
READING(readv, (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count))

#define WRITING(name, parameters, arguments, where) \
    ssize_t name parameters { \
        REAL(name); \
        char path[LONGEST]; \
        if (!ACTIVE || descriptor == output || !of_descriptor(descriptor, path)) return real arguments; \
        if (fails(WRITE, path)) return -1; \
        if (!recording) return real arguments; \
        RECORDED(real arguments, DATA, inode_of(descriptor), (uint64_t)(where), path, "", data, (uint64_t)done); \
    }

WRITING(write, (int descriptor, const void *data, size_t size), (descriptor, data, size),
        lseek(descriptor, 0, SEEK_CUR) - done)
WRITING(pwrite, (int descriptor, const void *data, size_t size, off_t place), (descriptor, data, size, place), place)
WRITING(pwrite64, (int descriptor, const void *data, size_t size, off64_t place), (descriptor, data, size, place), place)

ssize_t writev(int descriptor, const struct iovec *parts, int count) { /* a short write of the first part is a valid one */
    REAL(writev);
    char path[LONGEST];
    if (!ACTIVE || !of_descriptor(descriptor, path)) return real(descriptor, parts, count);
    for (; count > 1 && parts->iov_len == 0; parts++, count--) {}
    return count ? write(descriptor, parts->iov_base, parts->iov_len) : 0;
}

#define ON_DESCRIPTOR(name, kind, parameters, arguments, what, where) \
    int name parameters { \
        REAL(name); \
        char path[LONGEST]; \
        if (!ACTIVE || !of_descriptor(descriptor, path)) return real arguments; \
        if (fails(kind, path)) return -1; \
        if (!recording) return real arguments; \
        RECORDED(real arguments, what, inode_of(descriptor), (uint64_t)(where), path, "", "", 0); \
    }

ON_DESCRIPTOR(fsync, FSYNC, (int descriptor), (descriptor), SYNC, 0)
ON_DESCRIPTOR(fdatasync, FSYNC, (int descriptor), (descriptor), SYNC, 0)
ON_DESCRIPTOR(ftruncate, WRITE, (int descriptor, off_t size), (descriptor, size), TRUNCATE, size)
ON_DESCRIPTOR(ftruncate64, WRITE, (int descriptor, off64_t size), (descriptor, size), TRUNCATE, size)

#define ON_NAME(name, kind, parameters, arguments, folder, where, what, inode, second) \
    int name parameters { \
        REAL(name); \
        char path[LONGEST]; \
        if (!ACTIVE || !of_name(folder, where, path)) return real arguments; \
        if (fails(kind, path)) return -1; \
        if (!recording) return real arguments; \
        RECORDED(real arguments, what, inode, 0, path, second, "", 0); \
    }

ON_NAME(mkdir, ENTRY, (const char *at, mode_t mode), (at, mode), AT_FDCWD, at, MKDIR, inode_at(path), "")
ON_NAME(mkdirat, ENTRY, (int in, const char *at, mode_t mode), (in, at, mode), in, at, MKDIR, inode_at(path), "")
ON_NAME(symlink, ENTRY, (const char *to, const char *at), (to, at), AT_FDCWD, at, SYMLINK, inode_at(path), to)
ON_NAME(symlinkat, ENTRY, (const char *to, int in, const char *at), (to, in, at), in, at, SYMLINK, inode_at(path), to)
ON_NAME(unlink, ENTRY, (const char *at), (at), AT_FDCWD, at, REMOVE, 0, "")
ON_NAME(unlinkat, ENTRY, (int in, const char *at, int flags), (in, at, flags), in, at, REMOVE, 0, "")
ON_NAME(rmdir, ENTRY, (const char *at), (at), AT_FDCWD, at, REMOVE, 0, "")

static char *target(int folder, const char *name, char *path) {
    of_name(folder, name, path);
    return path;
}

ON_NAME(rename, RENAME, (const char *at, const char *to), (at, to), AT_FDCWD, at, MOVE, 0,
        target(AT_FDCWD, to, (char[LONGEST]){0}))
ON_NAME(renameat, RENAME, (int in, const char *at, int other, const char *to), (in, at, other, to), in, at, MOVE, 0,
        target(other, to, (char[LONGEST]){0}))
ON_NAME(renameat2, RENAME, (int in, const char *at, int other, const char *to, unsigned flags), (in, at, other, to, flags),
        in, at, MOVE, 0, target(other, to, (char[LONGEST]){0}))
