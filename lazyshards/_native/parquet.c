/* Columns of Parquet files, from their pages to rows, by lazyshards.formats.parquet_columns.
 *
 * The library that writes such files decodes a column at a time, and turning columns into rows then costs as much
 * again. Here a few rows of all columns are decoded and turned while they are in the cache. Nothing is taken on trust:
 * a file may say anything. Included by gather.c, with which it is one library. Source: the format's specification, Encodings.md
 * and parquet.thrift. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Headers of pages ------------------------------------------------------------------------------------------------ */

enum { DEPTH = 8, FIELDS = 40, STRUCT = 12 };

/* Bytes of Thrift's compact protocol. */
struct bytes {
    const uint8_t *at, *end;
    int is_cut, is_odd;
};

static int next(struct bytes *bytes)
{
    if (bytes->at < bytes->end) {
        return *bytes->at++;
    }
    bytes->is_cut = 1;
    return 0;
}

static uint64_t varint(struct bytes *bytes)
{
    uint64_t value = 0;
    for (int shift = 0; shift <= 63; shift += 7) {
        int byte = next(bytes);
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            return value;
        }
    }
    bytes->is_odd = 1;
    return 0;
}

static int64_t zigzag(struct bytes *bytes)
{
    uint64_t coded = varint(bytes);
    return (int64_t)(coded >> 1) ^ -(int64_t)(coded & 1);
}

static void pass(struct bytes *bytes, uint64_t count)
{
    if (count > (uint64_t)(bytes->end - bytes->at)) {
        bytes->is_cut = 1;
        count = bytes->end - bytes->at;
    }
    bytes->at += count;
}

/* Go to the value of the next field of a struct; 0 at its end. */
static int field(struct bytes *bytes, int64_t *number, int *kind)
{
    int head = next(bytes);
    if (head) {
        *kind = head & 15;
        *number = head >> 4 ? *number + (head >> 4) : zigzag(bytes);
        bytes->is_odd |= *number < INT16_MIN || *number > INT16_MAX;
    }
    return head && !bytes->is_cut && !bytes->is_odd;
}

/* Go past a value. */
static void skip(struct bytes *bytes, int kind, int depth)
{
    int64_t number = 0;
    uint64_t count;
    int head;
    switch (kind) {
    case 1:
    case 2:
        return;
    case 3:
        pass(bytes, 1);
        return;
    case 4:
    case 5:
    case 6:
        varint(bytes);
        return;
    case 7:
        pass(bytes, 8);
        return;
    case 8:
        pass(bytes, varint(bytes));
        return;
    case 9:
    case 10:
    case STRUCT:
        if (depth < DEPTH) {
            break;
        } /* fall through */
    default:
        bytes->is_odd = 1;
        return;
    }
    if (kind == STRUCT) {
        while (field(bytes, &number, &kind)) {
            skip(bytes, kind, depth + 1);
        }
        return;
    }
    head = next(bytes);
    count = head >> 4 == 15 ? varint(bytes) : (uint64_t)(head >> 4);
    if ((head & 15) <= 3) {
        pass(bytes, count);
        return;
    }
    for (; count && !bytes->is_cut && !bytes->is_odd; count--) {
        skip(bytes, head & 15, depth + 1);
    }
}

/* Note the integers and truths of a struct, and go past all else but structs that are noted in `within`. */
static void note(struct bytes *bytes, int64_t *found, int most, int64_t *within)
{
    int64_t number = 0;
    int kind = 0;
    while (field(bytes, &number, &kind)) {
        const int is_known = kind == 1 || kind == 2 || (kind >= 4 && kind <= 6) || kind == STRUCT;
        int64_t *inner = within && (number == 5 || number == 7 || number == 8) ? within + 8 * (number - 5) : 0;
        int64_t *noted = number > 0 && number < most ? found + number : 0;
        if (is_known && noted) {
            *noted = INT64_MIN; /* the last of a number counts */
        }
        for (int i = 0; is_known && inner && i < 8; i++) {
            inner[i] = INT64_MIN;
        }
        if (noted && (kind == 1 || kind == 2)) {
            *noted = 2 - kind;
        } else if (noted && kind >= 4 && kind <= 6) {
            *noted = zigzag(bytes);
            bytes->is_odd |= *noted != (int32_t)*noted; /* which others would cut */
        } else if (inner && kind == STRUCT) {
            note(bytes, inner, 8, 0);
        } else {
            skip(bytes, kind, 1);
        }
    }
}

/* Parse the header of a page. `facts` are, as those of lazyshards.formats.parquet_pages.PageHeader: kind, bytes in the
 * file and decompressed, checksum (INT64_MIN if there is none), values, their encoding, bytes of levels, whether they are
 * not compressed, whether all are there. Return how many bytes the header has, 0 if it is cut, -1 if it is odd. */
int64_t lazyshards_page(const uint8_t *data, int64_t nbytes, int64_t *facts)
{
    enum { VALUES = 0, DICTIONARY = 2, VALUES_2 = 3, RLE = 3 };
    struct bytes bytes = {data, data + nbytes, 0, 0};
    int64_t found[FIELDS];
    for (int i = 0; i < FIELDS; i++) {
        found[i] = INT64_MIN;
    }
    note(&bytes, found, 5, found + 8);
    if (bytes.is_odd || bytes.is_cut) {
        return bytes.is_odd ? FAULT : 0;
    }
    const int64_t kind = found[1], *more = found + 8 * (kind == VALUES ? 1 : kind == DICTIONARY ? 3 : 4);
    facts[0] = kind;
    facts[1] = found[3];
    facts[2] = found[2];
    facts[3] = found[4];
    facts[4] = facts[5] = 0;
    facts[6] = -1;
    facts[7] = 0;
    facts[8] = 1;
    if (kind == VALUES || kind == DICTIONARY) {
        facts[4] = more[1];
        facts[5] = more[2];
        facts[8] = kind == DICTIONARY || (more[3] == RLE && more[4] != INT64_MIN);
    } else if (kind == VALUES_2) {
        if (more[5] < 0 || more[6] < 0) {
            return FAULT;
        }
        facts[4] = more[1];
        facts[5] = more[4];
        facts[6] = more[5] + more[6];
        facts[7] = more[7] == 0;
        facts[8] = more[2] == 0 && more[3] >= 0;
    }
    if (facts[1] < 0 || facts[2] < 0 || facts[4] < 0 || facts[5] < 0) {
        return FAULT;
    }
    return bytes.at - data;
}

/* Values of pages ------------------------------------------------------------------------------------------------- */

/* One column, at some value of a page. */
struct column {
    const uint8_t *data;       /* values as they are encoded */
    int64_t nbytes;            /* of them */
    const uint8_t *dictionary; /* 0 if the values are plain */
    int64_t entries;           /* of the dictionary */
    int64_t at;                /* first byte that was not looked at */
    int64_t left;              /* places left of the run before it */
    int64_t packed;            /* first bit of them; -1 if all are the same */
    int64_t place;             /* which */
    int64_t passed;            /* values still to be passed over */
};

/* Go to the next run of a column. */
static int next_run(struct column *column)
{
    uint64_t head = 0;
    int shift = 0, byte;
    do {
        if (column->at >= column->nbytes || shift > 28) {
            return FAULT;
        }
        byte = column->data[column->at++];
        head |= (uint64_t)(byte & 127) << shift;
        shift += 7;
    } while (byte & 128);
    const int64_t width = column->data[0]; /* there are bytes behind it */
    int64_t count = head >> 1, nbytes = head & 1 ? count * width : (width + 7) / 8;
    if (!count || width > 32 || nbytes > column->nbytes - column->at) {
        return FAULT;
    }
    if (head & 1) {
        column->left = count * 8;
        column->packed = column->at * 8;
    } else {
        column->left = count;
        column->packed = -1;
        column->place = 0;
        for (int64_t i = 0; i < nbytes; i++) {
            column->place |= (int64_t)column->data[column->at + i] << 8 * i;
        }
        if (column->place >= column->entries) {
            return FAULT;
        }
    }
    column->at += nbytes;
    return DONE;
}

/* Unpack places of a column's run, which has as many. Return whether all of them are in its dictionary; else they are
 * made to be. */
static int unpack(const struct column *column, int64_t count, uint32_t *places)
{
    const int64_t width = column->data[0];
    const uint8_t *data = column->data;
    const uint32_t mask = (uint32_t)((1ULL << width) - 1);
    int64_t bit = column->packed, i = 0;
    if (width == 16 && !(bit & 7)) {
        const uint8_t *from = data + (bit >> 3);
        for (; i < count; i++) {
            uint16_t place;
            memcpy(&place, from + 2 * i, 2);
            places[i] = place;
        }
    } else if (width == 8 && !(bit & 7)) {
        const uint8_t *from = data + (bit >> 3);
        for (; i < count; i++) {
            places[i] = from[i];
        }
    } else {
        /* As many as can be read eight bytes at a time. */
        for (; i < count && (bit >> 3) + 8 <= column->nbytes; i++, bit += width) {
            uint64_t word;
            memcpy(&word, data + (bit >> 3), 8);
            places[i] = (uint32_t)(word >> (bit & 7)) & mask;
        }
        for (; i < count; i++, bit += width) {
            uint64_t word = 0;
            for (int64_t k = bit >> 3; k < column->nbytes && k < (bit >> 3) + 8; k++) {
                word |= (uint64_t)data[k] << 8 * (k - (bit >> 3));
            }
            places[i] = (uint32_t)(word >> (bit & 7)) & mask;
        }
    }
    if (mask < column->entries) {
        return 1; /* whatever they are */
    }
    uint32_t most = 0;
    for (i = 0; i < count; i++) {
        most = places[i] > most ? places[i] : most;
    }
    return most < column->entries;
}

enum { BLOCK = 128 };

#define LOOK_UP(type)                                        \
    {                                                        \
        const type *from = (const type *)column->dictionary; \
        type *to = (type *)out;                              \
        for (int64_t i = 0; i < some; i++) {                 \
            to[i] = from[places[i]];                         \
        }                                                    \
    }

#define REPEAT(type)                                                     \
    {                                                                    \
        const type value = ((const type *)column->dictionary)[column->place]; \
        type *to = (type *)out;                                          \
        for (int64_t i = 0; i < some; i++) {                             \
            to[i] = value;                                               \
        }                                                                \
    }

/* Pass over values of a column, or write them. Both the dictionary and `out` are aligned. */
static int look_up(struct column *column, int64_t count, int64_t itemsize, uint8_t *out)
{
    uint32_t places[BLOCK];
    while (count) {
        if (!column->left && next_run(column)) {
            return FAULT;
        }
        int64_t some = count < column->left ? count : column->left;
        if (out) {
            some = some < BLOCK ? some : BLOCK;
            if (column->packed >= 0) {
                if (!unpack(column, some, places)) {
                    return FAULT;
                }
                if (itemsize == 4) {
                    LOOK_UP(uint32_t)
                } else {
                    LOOK_UP(uint64_t)
                }
            } else if (itemsize == 4) {
                REPEAT(uint32_t)
            } else {
                REPEAT(uint64_t)
            }
            out += some * itemsize;
        }
        if (column->packed >= 0) {
            column->packed += some * column->data[0];
        }
        column->left -= some;
        count -= some;
    }
    return DONE;
}

/* Write columns as rows. */
static void write_rows(const uint8_t *const *from, int64_t columns, int64_t rows, int64_t itemsize, uint8_t *out,
                       int64_t stride)
{
    int64_t row = 0;
#ifdef __SSE2__
    if (itemsize == 4) {
        for (; row + 4 <= rows; row += 4) {
            uint8_t *to = out + row * stride;
            int64_t k = 0;
            for (; k + 4 <= columns; k += 4, to += 16) {
                __m128i a = _mm_loadu_si128((const __m128i *)(from[k] + row * 4));
                __m128i b = _mm_loadu_si128((const __m128i *)(from[k + 1] + row * 4));
                __m128i c = _mm_loadu_si128((const __m128i *)(from[k + 2] + row * 4));
                __m128i d = _mm_loadu_si128((const __m128i *)(from[k + 3] + row * 4));
                __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
                __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
                _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(ab, cd));
                _mm_storeu_si128((__m128i *)(to + stride), _mm_unpackhi_epi64(ab, cd));
                _mm_storeu_si128((__m128i *)(to + 2 * stride), _mm_unpacklo_epi64(ab_high, cd_high));
                _mm_storeu_si128((__m128i *)(to + 3 * stride), _mm_unpackhi_epi64(ab_high, cd_high));
            }
            for (; k < columns; k++, to += 4) {
                for (int64_t i = 0; i < 4; i++) {
                    memcpy(to + i * stride, from[k] + (row + i) * 4, 4);
                }
            }
        }
    }
#endif
    for (; row < rows; row++) {
        uint8_t *to = out + row * stride;
        if (itemsize == 4) {
            for (int64_t k = 0; k < columns; k++) {
                memcpy(to + 4 * k, from[k] + row * 4, 4);
            }
        } else {
            for (int64_t k = 0; k < columns; k++) {
                memcpy(to + 8 * k, from[k] + row * 8, 8);
            }
        }
    }
}

/* Write the next values of columns as rows, `stride` bytes apart. Values are of four or eight bytes. Return 0; -1 if
 * a column has not as many, or a place that its dictionary does not have: then `out` is undefined. */
int64_t lazyshards_columns(struct column *columns, int64_t count, int64_t rows, int64_t itemsize, uint8_t *out,
                           int64_t stride)
{
    enum { STRIP = 64, PADDED = BLOCK * 8 + 64 };
    uint64_t strip[STRIP * PADDED / 8];
    const uint8_t *from[STRIP];
    for (int64_t first = 0; first < count; first += STRIP) {
        int64_t some = count - first < STRIP ? count - first : STRIP;
        struct column *these = columns + first;
        for (int64_t k = 0; k < some; k++) {
            struct column *column = these + k;
            if (column->passed) {
                if (column->dictionary) {
                    if (look_up(column, column->passed, itemsize, 0)) {
                        return FAULT;
                    }
                } else {
                    column->at += column->passed * itemsize;
                }
                column->passed = 0;
            }
            if (!column->dictionary && (column->at < 0 || column->nbytes - column->at < rows * itemsize)) {
                return FAULT;
            }
        }
        for (int64_t row = 0; row < rows; row += BLOCK) {
            int64_t block = rows - row < BLOCK ? rows - row : BLOCK;
            for (int64_t k = 0; k < some; k++) {
                struct column *column = these + k;
                if (column->dictionary) {
                    uint8_t *to = (uint8_t *)strip + k * PADDED;
                    if (look_up(column, block, itemsize, to)) {
                        return FAULT;
                    }
                    from[k] = to;
                } else {
                    from[k] = column->data + column->at;
                    column->at += block * itemsize;
                }
            }
            write_rows(from, some, block, itemsize, out + row * stride + first * itemsize, stride);
        }
    }
    return DONE;
}
