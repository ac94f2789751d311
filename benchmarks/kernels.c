/* The limits of this machine: the system calls that a request needs, and nothing else.
   Each function returns a count on success and -1 on any error. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
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

/* One thread's share of the rows: every one whose number is first, first + step, ... */
struct share {
    const int *fds;
    const int64_t *files, *offsets;
    int64_t first, step, rows, row_nbytes;
    char *out;
    int failed;
};

static void *read_share(void *given) {
    struct share *own = given;
    for (int64_t i = own->first; i < own->rows; i += own->step) {
        own->failed |= read_all(own->fds[own->files[i]], own->out + i * own->row_nbytes, own->row_nbytes, own->offsets[i]);
    }
    return 0;
}

/* Read rows, each from its file at its offset, from so many threads at a time: a deep queue for a device. */
int64_t read_rows(const int *fds, const int64_t *files, const int64_t *offsets, int64_t rows, int64_t row_nbytes,
                  int64_t threads, char *out) {
    enum { MOST = 1024 };
    pthread_t running[MOST];
    struct share shares[MOST];
    int64_t begun = 0, failed = 0;
    for (; begun < threads && begun < MOST; begun++) {
        shares[begun] = (struct share){fds, files, offsets, begun, threads, rows, row_nbytes, out, 0};
        if (pthread_create(&running[begun], 0, read_share, &shares[begun])) {
            failed = 1;
            break;
        }
    }
    for (int64_t i = 0; i < begun; i++) {
        pthread_join(running[i], 0);
        failed |= shares[i].failed;
    }
    return failed ? -1 : rows;
}
