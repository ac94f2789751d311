/* Rows of mapped files, copied to one place after the other, by lazyshards.storage.gather, or lent as they lie, by
 * lazyshards.storage.lending.
 *
 * A read call for each row costs several times the copy of a small row; a copy out of a map costs the copy. But a
 * mapped file that shrinks answers with SIGBUS, which ends the process. So while this library copies, a handler of its
 * own ends the copy instead. Within what is lent it puts zeros where the file was, and notes it, so that what was made
 * of them is thrown away. At any other moment the signal goes where it would have gone.
 *
 * Only functions that glibc has had since 2.17 are used, and the file's status is asked for by its system call, so
 * that the wheel that carries this library may say manylinux2014.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
enum { POPULATE_READ = 22 }; /* MADV_POPULATE_READ, of Linux 5.14 */
#ifndef AT_STATX_FORCE_SYNC
#define AT_STATX_FORCE_SYNC 0x2000
#endif

enum { DONE = 0, FAULT = -1, AHEAD = 16, LOOKS = 8, STRETCH = 64, LARGE = 4 << 20, LOOKS_OF_LOAN = 16 };

/* Bytes of a row, and of all of them, from which they are copied past the caches. */
enum { LARGE_ROW = 2 << 10, LARGE_ROWS = 2 << 20 };

/* Nanoseconds a row above which the rows are not in the page cache; in it they take 50 to 500. */
static const int64_t SLOW_NS = 5000;

static __thread sigjmp_buf *volatile copying __attribute__((tls_model("initial-exec")));
static struct sigaction before;
static volatile int passed_on;
static volatile int hushed; /* how many read whole files, which asking for single rows would only delay */
static volatile pid_t installing; /* the process that holds the lock: one that another process held was forked away */

/* Maps of which bytes are lent; no copy is made out of them, so that zeros in one are seen by those it is lent to. */
enum { LENT_MAPS = 1024 };
static struct lent_map {
    volatile int taken, broken;
    char *volatile start;
    volatile int64_t nbytes;
} lent_maps[LENT_MAPS];

/* Put zeros in place of the rest of a map of which bytes are lent, if the address lies within it. */
static int patch(uintptr_t address)
{
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (int i = 0; i < LENT_MAPS; i++) {
        uintptr_t start = (uintptr_t)lent_maps[i].start, end = start + lent_maps[i].nbytes;
        if (start && start <= address && address < end) {
            char *from = (char *)(address & ~(page - 1));
            lent_maps[i].broken = 1;
            return mmap(from, (char *)end - from, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                        -1, 0)
                   == from;
        }
    }
    return 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    sigjmp_buf *back = copying;
    if (back) {
        copying = 0;
        siglongjmp(*back, 1);
    }
    int error = errno;
    if (info->si_code > 0 && patch((uintptr_t)info->si_addr)) {
        errno = error;
        return;
    }
    /* Not ours: the handler from before gets it when the instruction is tried again; the second time nobody does. */
    if (passed_on++) {
        struct sigaction nobody;
        memset(&nobody, 0, sizeof nobody);
        nobody.sa_handler = SIG_DFL;
        sigaction(number, &nobody, 0);
    } else {
        sigaction(number, &before, 0);
    }
}

/* Say where to go back to if a copy gives way, or (0) that none is made. To the compiler nobody reads it in between, so
 * that it may be left out (GCC 16 does), or moved past the copies; neither may be. */
static inline void set_copying(sigjmp_buf *back)
{
    __asm__ __volatile__("" ::: "memory");
    copying = back;
    __asm__ __volatile__("" ::: "memory");
}

/* Make the handler ours, if it is not: others, such as faulthandler, may have put theirs in its place meanwhile. */
static int guard(void)
{
    struct sigaction now;
    int failed = 0;
    const pid_t own = getpid();
    for (pid_t holder = own; holder;) {
        holder = __sync_val_compare_and_swap(&installing, 0, own);
        if (holder && holder != own && __sync_bool_compare_and_swap(&installing, holder, own)) {
            break;
        }
    }
    if (sigaction(SIGBUS, 0, &now)) {
        failed = 1;
    } else if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_bus_error) {
        struct sigaction ours;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_bus_error;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;
        before = now;
        failed = sigaction(SIGBUS, &ours, 0);
    }
    __sync_lock_release(&installing);
    return failed;
}

/* Ask for size, mtime in ns and inode of a file: of its path, or if that is empty of the open one. 0, or errno is set. */
static int ask_status(int file, const char *path, int how, int64_t *stamp)
{
    struct statx status;
    if (syscall(SYS_statx, file, path, how | (*path ? 0 : AT_EMPTY_PATH), STATX_SIZE | STATX_MTIME | STATX_INO,
                &status)) {
        return -1;
    }
    stamp[0] = (int64_t)status.stx_size;
    stamp[1] = status.stx_mtime.tv_sec * 1000000000LL + status.stx_mtime.tv_nsec;
    stamp[2] = (int64_t)(status.stx_ino & INT64_MAX);
    return 0;
}

static int same(int file, const char *path, const int64_t *stamp)
{
    int64_t now[3];
    /* Forced: a network file system answers from its server, and not from what it knew a minute ago. */
    return !ask_status(file, path, AT_STATX_FORCE_SYNC, now) && !memcmp(now, stamp, sizeof now);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Map a file that is the one meant; 0 if it is not, or cannot be. */
char *lazyshards_map(const char *path, const int64_t *stamp)
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe in its place must not hang */
    if (file < 0) {
        return 0;
    }
    char *start = same(file, "", stamp) ? mmap(0, stamp[0], PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (start == MAP_FAILED) {
        return 0;
    }
    /* Rows far apart: what lies around them is not wanted. What is wanted is asked for below. */
    madvise(start, stamp[0], MADV_RANDOM);
    return start;
}

/* Say that one more reads whole files beside the gathers, or (-1) one less, or (0) that nobody does. */
void lazyshards_hush(int64_t change)
{
    if (change) {
        __sync_add_and_fetch(&hushed, (int)change);
    } else {
        hushed = 0;
    }
}

void lazyshards_unmap(char *start, int64_t nbytes)
{
    munmap(start, nbytes);
}

/* Return where a row lies, or 0 if that is not within its file, as whoever wrote a manifest may say; the last file whose
 * first row is not after it holds it. */
static char *place(char *const *maps, const int64_t *stamps, const int64_t *ends, const int64_t *offsets,
                   int64_t files, int64_t row, int64_t row_nbytes, int64_t *holder)
{
    int64_t low = 0, high = files;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ends[middle] <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *holder = low;
    int64_t at;
    if (low == files || __builtin_mul_overflow(row - (low ? ends[low - 1] : 0), row_nbytes, &at)
        || __builtin_add_overflow(at, offsets[low], &at) || at < 0 || at > stamps[3 * low] - row_nbytes) {
        return 0;
    }
    return maps[low] + at;
}

/* Return whether any of a few rows is not in the page cache. */
static int looks_cold(char *const *places, int64_t rows, uintptr_t page)
{
    unsigned char resident;
    int64_t step = rows / LOOKS ? rows / LOOKS : 1;
    for (int64_t i = 0; i < rows; i += step) {
        if (!mincore((void *)((uintptr_t)places[i] & ~(page - 1)), 1, &resident) && !(resident & 1)) {
            return 1;
        }
    }
    return 0;
}

/* Begin to read rows, all of them before the first is waited for. */
static void ask(char *const *places, int64_t first, int64_t rows, int64_t row_nbytes, uintptr_t page)
{
    for (int64_t i = first; i < rows; i++) {
        uintptr_t start = (uintptr_t)places[i], from = start & ~(page - 1);
        madvise((void *)from, start + row_nbytes - from, MADV_WILLNEED);
    }
}

/* Copy past the caches, which a large copy would only empty: half the traffic of memory. */
static void copy_large(char *out, const char *from, int64_t nbytes)
{
#ifdef __SSE2__
    int64_t head = -(uintptr_t)out & 15;
    head = head < nbytes ? head : nbytes;
    memcpy(out, from, head);
    out += head, from += head, nbytes -= head;
    for (; nbytes >= 64; nbytes -= 64, out += 64, from += 64) {
        _mm_prefetch(from + 512, _MM_HINT_NTA);
        for (int i = 0; i < 64; i += 16) {
            _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const __m128i *)(from + i)));
        }
    }
    _mm_sfence();
#endif
    memcpy(out, from, nbytes);
}

/* Copy rows of files that follow one another: file k holds rows up to ends[k], the first at offsets[k] of its map.
 * Then see that every file that was copied from is the one that was opened.
 *
 * `places` has room for a pointer a row, `touched` for a byte a file. Returns 0; -1 if a map gave way or a row does not
 * lie within its file, in which case `out` is undefined; else 1 plus the number of a file that changed. */
int64_t lazyshards_gather(char *const *maps, const char *const *paths, const int64_t *stamps, const int64_t *ends,
                          const int64_t *offsets, int64_t files, const int64_t *wanted, int64_t rows,
                          int64_t row_nbytes, char *out, char **places, char *touched)
{
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    const int is_large = row_nbytes >= LARGE_ROW && rows >= LARGE_ROWS / row_nbytes;
    volatile int asked = 0;
    sigjmp_buf back;
    if (guard()) {
        return FAULT;
    }
    memset(touched, 0, files);
    for (int64_t i = 0; i < rows; i++) {
        int64_t holder;
        places[i] = place(maps, stamps, ends, offsets, files, wanted[i], row_nbytes, &holder);
        if (!places[i]) {
            return FAULT;
        }
        touched[holder] = 1;
    }
    if (!hushed && looks_cold(places, rows, page)) {
        ask(places, 0, rows, row_nbytes, page);
        asked = 1;
    }
    if (sigsetjmp(back, 0)) {
        return FAULT;
    }
    set_copying(&back);
    for (int64_t first = 0; first < rows; first += STRETCH) {
        int64_t last = rows - first < STRETCH ? rows : first + STRETCH;
        int64_t began = asked ? 0 : now_ns();
        for (int64_t i = first; i < last; i++) {
            if (i + AHEAD < rows) {
                const char *next = places[i + AHEAD];
                for (int64_t line = 0; line < row_nbytes && line < 512; line += 64) {
                    __builtin_prefetch(next + line);
                }
            }
            if (is_large) {
                copy_large(out + i * row_nbytes, places[i], row_nbytes);
            } else {
                memcpy(out + i * row_nbytes, places[i], row_nbytes);
            }
        }
        if (!asked && !hushed && now_ns() - began > (last - first) * (SLOW_NS + row_nbytes)) {
            ask(places, last, rows, row_nbytes, page);
            asked = 1;
        }
    }
    set_copying(0);
    for (int64_t i = 0; i < files; i++) {
        if (touched[i] && !same(AT_FDCWD, paths[i], stamps + 3 * i)) {
            return i + 1;
        }
    }
    return DONE;
}

/* Return whether all bytes of a stretch of a map are in the page cache. */
static int in_cache(const char *start, int64_t nbytes)
{
    enum { PAGES = 4096 };
    unsigned char resident[PAGES];
    const uintptr_t page = sysconf(_SC_PAGESIZE), end = (uintptr_t)start + nbytes;
    for (uintptr_t from = (uintptr_t)start & ~(page - 1); from < end; from += PAGES * page) {
        uintptr_t until = end - from < PAGES * page ? end : from + PAGES * page;
        if (mincore((void *)from, until - from, resident)) {
            return 0;
        }
        for (uintptr_t i = 0; i < (until - from + page - 1) / page; i++) {
            if (!(resident[i] & 1)) {
                return 0;
            }
        }
    }
    return 1;
}

/* Copy bytes of one mapped file, if they are in the page cache: then a copy is faster than a read call. Then see that
 * the file is the one that was opened. Returns 0; else `out` is undefined, and the bytes are to be read. */
int64_t lazyshards_copy(char *map, const char *path, const int64_t *stamp, int64_t offset, int64_t nbytes, char *out)
{
    sigjmp_buf back;
    if (offset < 0 || nbytes <= 0 || offset > stamp[0] - nbytes || !in_cache(map + offset, nbytes) || guard()
        || sigsetjmp(back, 0)) {
        return FAULT;
    }
    set_copying(&back);
    if (nbytes < LARGE) {
        memcpy(out, map + offset, nbytes);
    } else {
        copy_large(out, map + offset, nbytes);
    }
    set_copying(0);
    return same(AT_FDCWD, path, stamp) ? DONE : FAULT;
}

/* Return whether a few pages spread over a map are in the page cache: asking for all that no table of pages has yet
 * takes longer than mapping them. */
static int seems_in_cache(char *start, int64_t nbytes, int64_t page)
{
    unsigned char resident;
    const int64_t last = (nbytes - 1) / page;
    for (int i = 0; i < LOOKS_OF_LOAN; i++) {
        if (mincore(start + last * i / (LOOKS_OF_LOAN - 1) * page, 1, &resident) || !(resident & 1)) {
            return 0;
        }
    }
    return 1;
}

/* Map a file that is the one meant, to lend bytes of it, and tell the number of the map and where it starts; -1 if it
 * is another, or cannot be mapped, or this process may not know which of its pages are in the page cache. */
int64_t lazyshards_map_to_lend(const char *path, const int64_t *stamp, char **start)
{
    int number = 0;
    if (stamp[0] <= 0 || access(path, W_OK)) {
        return FAULT;
    }
    while (number < LENT_MAPS && !__sync_bool_compare_and_swap(&lent_maps[number].taken, 0, 1)) {
        number++;
    }
    if (number == LENT_MAPS) {
        return FAULT;
    }
    struct lent_map *map = lent_maps + number;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char *made = file >= 0 && same(file, "", stamp) ? mmap(0, stamp[0], PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    if (file >= 0) {
        close(file);
    }
    if (made == MAP_FAILED) {
        __sync_lock_release(&map->taken);
        return FAULT;
    }
    map->broken = 0;
    map->nbytes = stamp[0];
    *start = map->start = made;
    return number;
}

/* Return 0 if bytes of such a map may be lent: they are within the file, and seem to be in the page cache. */
int64_t lazyshards_lend(int64_t number, int64_t offset, int64_t nbytes)
{
    const int64_t page = sysconf(_SC_PAGESIZE);
    struct lent_map *map = lent_maps + number;
    if (offset < 0 || nbytes <= 0 || offset > map->nbytes - nbytes || map->broken || guard()) {
        return FAULT;
    }
    char *start = map->start + offset / page * page;
    nbytes += offset % page;
    if (!seems_in_cache(start, nbytes, page)) {
        return FAULT;
    }
    madvise(start, nbytes, POPULATE_READ); /* all page faults at once, where the kernel knows how */
    return DONE;
}

/* Return 0 if what was lent of a map was the file that was opened all the time; else what was seen of it is worth
 * nothing, the bytes are to be read, and the map is to be given up. */
int64_t lazyshards_take_back(int64_t number, const char *path, const int64_t *stamp)
{
    return same(AT_FDCWD, path, stamp) && !lent_maps[number].broken ? DONE : FAULT;
}

/* Give up a map of which nothing is lent any more. */
void lazyshards_unmap_lent(int64_t number)
{
    struct lent_map *map = lent_maps + number;
    char *start = map->start;
    map->start = 0;
    munmap(start, map->nbytes);
    __sync_lock_release(&map->taken);
}

/* Read the first bytes of files whose names, each ended by a null byte, follow one another; of none, ask for the status.
 *
 * `data` has room for `nbytes` a file; `facts` for five numbers: bytes read, size, mtime in ns, inode, and errno. */
void lazyshards_heads(const char *names, int64_t files, int64_t nbytes, char *data, int64_t *facts)
{
    for (int64_t i = 0; i < files; i++, names += strlen(names) + 1, data += nbytes, facts += 5) {
        int file = -1;
        ssize_t got = -1;
        if (!*names) {
            errno = ENOENT;
        } else if (!nbytes) {
            got = ask_status(AT_FDCWD, names, 0, facts + 1);
        } else {
            do {
                file = open(names, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
            } while (file < 0 && errno == EINTR);
            if (file >= 0 && !ask_status(file, "", 0, facts + 1)) {
                do {
                    got = pread(file, data, nbytes, 0);
                } while (got < 0 && errno == EINTR);
            }
        }
        facts[0] = got;
        facts[4] = got < 0 ? errno : 0;
        if (file >= 0) {
            close(file);
        }
    }
}

static inline uint32_t turn(uint32_t one, uint32_t other, uint32_t key, uint64_t side)
{
    uint32_t mixed = other ^ key;
    mixed *= 0x7FEB352Du;
    mixed ^= mixed >> 15;
    mixed *= 0x846CA68Bu;
    mixed ^= mixed >> 16;
    uint32_t sum = one + (uint32_t)((mixed * side) >> 32), less = sum - (uint32_t)side;
    return less < sum ? less : sum;
}

/* Put in place of each value where lazyshards.samplers.KeyedPermutation takes it: the same network, in place.
 * The number of rounds is even. */
void lazyshards_permute(uint64_t *values, int64_t count, uint64_t size, uint64_t side, const uint32_t *keys,
                        int64_t rounds)
{
    enum { LANES = 256 };
    uint32_t left[LANES], right[LANES];
    for (int64_t start = 0; start < count; start += LANES) {
        int64_t lanes = count - start < LANES ? count - start : LANES;
        uint64_t *some = values + start;
        for (int64_t i = 0; i < lanes; i++) {
            left[i] = some[i] / side;
            right[i] = some[i] % side;
        }
        for (int64_t k = 0; k < rounds; k += 2) {
            for (int64_t i = 0; i < lanes; i++) {
                left[i] = turn(left[i], right[i], keys[k], side);
            }
            for (int64_t i = 0; i < lanes; i++) {
                right[i] = turn(right[i], left[i], keys[k + 1], side);
            }
        }
        for (int64_t i = 0; i < lanes; i++) {
            some[i] = left[i] * side + right[i];
            while (some[i] >= size) { /* hardly ever */
                uint32_t one = some[i] / side, other = some[i] % side;
                for (int64_t k = 0; k < rounds; k += 2) {
                    one = turn(one, other, keys[k], side);
                    other = turn(other, one, keys[k + 1], side);
                }
                some[i] = one * side + other;
            }
        }
    }
}

#include "parquet.c"
