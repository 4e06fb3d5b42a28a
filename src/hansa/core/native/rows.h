/* Read rows from a file, check and multiply them piece by piece while a piece is in the cache. */
#ifndef HANSA_ROWS_H
#define HANSA_ROWS_H

#include "crc.h"
#include "gram.h"

#if (VL >= 8 || defined(HANSA_NEON)) && !defined(_WIN32)
#include <errno.h>
#include <unistd.h>

enum { ROWS_PIECE = 1 << 15, ROWS_APART = ROWS_PIECE + 64 }; /* entries; apart, or all rows would share cache sets */

/* Read up to `size` bytes of a file; returns the number read, or -errno. */
INLINE int64_t rows_read(int file, uint8_t *into, int64_t size, int64_t offset) {
    int64_t done = 0;
    while (done < size) {
        ssize_t some = pread(file, into + done, (size_t)(size - done), (off_t)(offset + done));
        if (some < 0 && errno == EINTR) continue;
        if (some < 0) return -errno;
        if (!some) break;
        done += some;
    }
    return done;
}

/* gram32_add of `n` entries of rows at byte offsets of a file, with checksums continued from crcs[row]. If a read fails
 * or the file ends, told[0] is the row and told[1] the bytes read of it, or -errno. */
static int64_t rows_gram(int64_t file, const int64_t *offsets, int64_t count, const float *vectors, int64_t vector,
                        int64_t many, int64_t n, double *lanes, uint32_t *crcs, int64_t *told) {
    float *piece = malloc((size_t)(count * ROWS_APART) * sizeof *piece);
    int64_t result = piece ? HANSA_OK : HANSA_NO_MEMORY;
    for (int64_t start = 0, some; result == HANSA_OK && start < n; start += some) {
        some = at_most(ROWS_PIECE, n - start);
        for (int64_t r = 0; r < count; r++) {
            uint8_t *into = (uint8_t *)(piece + r * ROWS_APART);
            int64_t size = some * (int64_t)sizeof *piece, from = start * (int64_t)sizeof *piece;
            int64_t found = rows_read((int)file, into, size, offsets[r] + from);
            if (found < size) {
                told[0] = r;
                told[1] = found < 0 ? found : from + found;
                free(piece);
                return HANSA_BAD_ROW;
            }
            crcs[r] = crc32_any(into, size, crcs[r]);
        }
        result = gram32_add(piece, ROWS_APART, count, vectors + start, vector, many, some, lanes);
    }
    free(piece);
    return result;
}
#else
#define rows_gram 0 /* Python reads and checks them */
#endif

#endif
