/* The packets' checksum, zlib's CRC-32. On x86-64 by carry-less products: 64 bytes are folded at a time (Gopal et al.,
 * "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009; the constants are x^n modulo the reflected
 * polynomial). On Arm by its own instruction. */
#ifndef HANSA_CRC_H
#define HANSA_CRC_H

#include "native.h"
#include "vector.h"

#if VL >= 8
INLINE __m128i crc_fold(__m128i x, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(high, next), low);
}

INLINE __m128i crc_load(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)data); }

/* Continue the checksum `crc` with `size` bytes, at least 64 and a multiple of 16. */
static uint32_t crc32_fold(const uint8_t *data, int64_t size, uint32_t crc) {
    const __m128i by64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by8 = _mm_set_epi64x(0, 0x0163cd6124), reduce = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i even = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i x[4];
    UNROLL for (int i = 0; i < 4; i++) x[i] = crc_load(data + 16 * i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        UNROLL for (int i = 0; i < 4; i++) x[i] = crc_fold(x[i], by64, crc_load(data + 16 * i));
    __m128i one = x[0], two;
    UNROLL for (int i = 1; i < 4; i++) one = crc_fold(one, by16, x[i]);
    for (; size >= 16; data += 16, size -= 16) one = crc_fold(one, by16, crc_load(data));
    one = _mm_xor_si128(_mm_srli_si128(one, 8), _mm_clmulepi64_si128(one, by16, 0x10));
    two = _mm_srli_si128(one, 4);
    one = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(one, even), by8, 0x00), two);
    two = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(one, even), reduce, 0x10), even);
    one = _mm_xor_si128(one, _mm_clmulepi64_si128(two, reduce, 0x00));
    return ~(uint32_t)_mm_extract_epi32(one, 1);
}

/* Continue the checksum with any number of bytes. */
static uint32_t crc32_any(const uint8_t *data, int64_t size, uint32_t crc) {
    int64_t whole = size & ~(int64_t)15;
    if (whole >= 64) {
        crc = crc32_fold(data, whole, crc);
        data += whole;
        size -= whole;
    }
    for (crc = ~crc; size > 0; data++, size--) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}
#elif defined(HANSA_NEON)
/* By their own names: the header of some compilers has them only if the whole file may use them. */
#if defined(__clang__)
#define crc32_word __builtin_arm_crc32d
#define crc32_byte __builtin_arm_crc32b
#else
#define crc32_word __builtin_aarch64_crc32x
#define crc32_byte __builtin_aarch64_crc32b
#endif

/* Continue the checksum with any number of bytes. */
static uint32_t crc32_any(const uint8_t *data, int64_t size, uint32_t crc) {
    for (crc = ~crc; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, sizeof word);
        crc = crc32_word(crc, word);
    }
    for (; size > 0; data++, size--) crc = crc32_byte(crc, *data);
    return ~crc;
}
#define crc32_fold crc32_any
#else
#define crc32_fold 0 /* zlib's is as fast */
#endif

#endif
