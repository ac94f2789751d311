/* The limits of this machine: the system calls that a request needs, and nothing else.
   Each function returns a count on success and -1 on any error. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* Read all of nbytes at offset: pread until done. */
static int read_all(int fd, char *out, int64_t nbytes, int64_t offset) {
    while (nbytes > 0) {
        ssize_t got = pread(fd, out, nbytes > 0x7ffff000 ? 0x7ffff000 : (size_t)nbytes, offset);
        if (got <= 0) return -1;
        out += got, offset += got, nbytes -= got;
    }
    return 0;
}

/* Gather the consecutive global rows [start, stop) of open npy shards into out; ends[i] is the row after shard i. */
int64_t gather(const int *fds, const int64_t *ends, int64_t shards, int64_t start, int64_t stop, int64_t row_nbytes,
               int64_t header_nbytes, char *out) {
    int64_t lo = 0, hi = shards, at = start;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (ends[mid] > start) hi = mid; else lo = mid + 1;
    }
    for (; at < stop; lo++) {
        int64_t first = lo ? ends[lo - 1] : 0, last = stop < ends[lo] ? stop : ends[lo];
        if (read_all(fds[lo], out, (last - at) * row_nbytes, header_nbytes + (at - first) * row_nbytes)) return -1;
        out += (last - at) * row_nbytes;
        at = last;
    }
    return stop - start;
}

/* Open, read header_nbytes and close each of the files whose names follow each other in names, each ended by NUL. */
int64_t read_headers(const char *names, int64_t files, int64_t header_nbytes) {
    char header[4096];
    for (int64_t i = 0; i < files; i++, names += strlen(names) + 1) {
        int fd = open(names, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return -1;
        ssize_t got = pread(fd, header, header_nbytes, 0);
        close(fd);
        if (got != header_nbytes) return -1;
    }
    return files;
}
