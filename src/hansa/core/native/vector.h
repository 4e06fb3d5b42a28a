/* Vector operations for four instruction sets.
 *
 * Each isa_*.c sets HANSA_LANES and includes the kernel headers, so that every kernel is compiled once per instruction
 * set; dispatch.c selects one at run time. No kernel depends on the alignment of its pointers, so results depend on the
 * values only. */
#ifndef HANSA_VECTOR_H
#define HANSA_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL PRAGMA(clang loop unroll(full))
#define INDEPENDENT PRAGMA(clang loop vectorize(assume_safety))
#else
#define UNROLL PRAGMA(GCC unroll 64)
#define INDEPENDENT PRAGMA(GCC ivdep)
#endif

/* Hides a stride from the optimiser, which would turn "base + stride * 4" into one pointer per position and spill. */
#define OPAQUE(value) __asm__("" : "+r"(value))

#define VL HANSA_LANES

INLINE ptrdiff_t at_most(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
INLINE ptrdiff_t at_least(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }
INLINE ptrdiff_t round_up(ptrdiff_t n, ptrdiff_t unit) { return (n + unit - 1) / unit * unit; }

#if VL == 16 /* AVX-512 -------------------------------------------------------------------------------------------- */
#include <immintrin.h>
#define WIDE_REGISTERS 1
typedef __m512 vf;
typedef __m512i vi;
INLINE vf load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE vf splat(float s) { return _mm512_set1_ps(s); }
INLINE vf zero(void) { return _mm512_setzero_ps(); }
INLINE vf madd(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE __mmask16 first(ptrdiff_t n) { return (__mmask16)((1u << n) - 1u); }
INLINE vf load_part(const float *p, ptrdiff_t n) { return n < VL ? _mm512_maskz_loadu_ps(first(n), p) : load(p); }
INLINE void store_part(float *p, vf v, ptrdiff_t n) {
    if (n < VL) _mm512_mask_storeu_ps(p, first(n), v);
    else store(p, v);
}
INLINE vi load_int(const int32_t *p) { return _mm512_loadu_si512(p); }
INLINE void store_int(int32_t *p, vi v) { _mm512_storeu_si512(p, v); }
INLINE vi splat_int(int32_t s) { return _mm512_set1_epi32(s); }
INLINE vi add_int(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi where_bit(vi test, int32_t bit, vi v) {
    return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(test, splat_int(bit)), v);
}
INLINE vf where_equal(vi a, vi b, vf v) { return _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(a, b), v); }
INLINE vf where_positive(vf test, vf v) { /* v where test > 0 or test is NaN, else 0 */
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, zero(), _CMP_NLE_UQ), v);
}
INLINE vf select_positive(vf test, vf a, vf b) { /* a where test > 0, else b */
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(test, zero(), _CMP_GT_OQ), b, a);
}
INLINE vf larger(vf a, vf b) { return _mm512_max_ps(a, b); } /* NaN if b is, as in `smaller` */
INLINE vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE int any_within(vf a, vf reach) { /* whether some lane is not above reach: not greater, or NaN */
    return _mm512_cmp_ps_mask(a, reach, _CMP_NGT_UQ) != 0;
}
INLINE void challenge(vf *best, vi *which, vf rival, int32_t index) { /* torch's rule: greater, or NaN, wins */
    __mmask16 wins = _mm512_cmp_ps_mask(rival, *best, _CMP_GT_OQ) | _mm512_cmp_ps_mask(rival, rival, _CMP_UNORD_Q);
    *best = _mm512_mask_mov_ps(*best, wins, rival);
    *which = _mm512_mask_mov_epi32(*which, wins, splat_int(index));
}

#elif VL == 8 /* AVX2 with FMA -------------------------------------------------------------------------------------- */
#include <immintrin.h>
#define WIDE_REGISTERS 0
typedef __m256 vf;
typedef __m256i vi;
INLINE vf load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store(float *p, vf v) { _mm256_storeu_ps(p, v); }
INLINE vf splat(float s) { return _mm256_set1_ps(s); }
INLINE vf zero(void) { return _mm256_setzero_ps(); }
INLINE vf madd(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vi first(ptrdiff_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf load_part(const float *p, ptrdiff_t n) { return n < VL ? _mm256_maskload_ps(p, first(n)) : load(p); }
INLINE void store_part(float *p, vf v, ptrdiff_t n) {
    if (n < VL) _mm256_maskstore_ps(p, first(n), v);
    else store(p, v);
}
INLINE vi load_int(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store_int(int32_t *p, vi v) { _mm256_storeu_si256((__m256i *)p, v); }
INLINE vi splat_int(int32_t s) { return _mm256_set1_epi32(s); }
INLINE vi add_int(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi where_bit(vi test, int32_t bit, vi v) {
    vi mask = splat_int(bit);
    return _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_and_si256(test, mask), mask), v);
}
INLINE vf where_equal(vi a, vi b, vf v) { return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)), v); }
INLINE vf where_positive(vf test, vf v) { return _mm256_and_ps(_mm256_cmp_ps(test, zero(), _CMP_NLE_UQ), v); }
INLINE vf select_positive(vf test, vf a, vf b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(test, zero(), _CMP_GT_OQ)); }
INLINE vf larger(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf smaller(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE int any_within(vf a, vf reach) { return _mm256_movemask_ps(_mm256_cmp_ps(a, reach, _CMP_NGT_UQ)) != 0; }
INLINE void challenge(vf *best, vi *which, vf rival, int32_t index) {
    vf wins = _mm256_or_ps(_mm256_cmp_ps(rival, *best, _CMP_GT_OQ), _mm256_cmp_ps(rival, rival, _CMP_UNORD_Q));
    *best = _mm256_blendv_ps(*best, rival, wins);
    *which = _mm256_blendv_epi8(*which, splat_int(index), _mm256_castps_si256(wins));
}

#elif defined(HANSA_NEON) /* Arm with 128-bit vectors ----------------------------------------------------------------- */
#include <arm_neon.h>
#define WIDE_REGISTERS 1
typedef float32x4_t vf;
typedef int32x4_t vi;
INLINE vf load(const float *p) { return vld1q_f32(p); }
INLINE void store(float *p, vf v) { vst1q_f32(p, v); }
INLINE vf splat(float s) { return vdupq_n_f32(s); }
INLINE vf zero(void) { return vdupq_n_f32(0); }
INLINE vf madd(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf load_part(const float *p, ptrdiff_t n) {
    if (n >= VL) return load(p);
    vf v = zero();
    if (n > 0) v = vld1q_lane_f32(p, v, 0);
    if (n > 1) v = vld1q_lane_f32(p + 1, v, 1);
    if (n > 2) v = vld1q_lane_f32(p + 2, v, 2);
    return v;
}
INLINE void store_part(float *p, vf v, ptrdiff_t n) {
    if (n >= VL) {
        store(p, v);
        return;
    }
    if (n > 0) vst1q_lane_f32(p, v, 0);
    if (n > 1) vst1q_lane_f32(p + 1, v, 1);
    if (n > 2) vst1q_lane_f32(p + 2, v, 2);
}
INLINE vi load_int(const int32_t *p) { return vld1q_s32(p); }
INLINE void store_int(int32_t *p, vi v) { vst1q_s32(p, v); }
INLINE vi splat_int(int32_t s) { return vdupq_n_s32(s); }
INLINE vi add_int(vi a, vi b) { return vaddq_s32(a, b); }
INLINE vf where_mask(uint32x4_t mask, vf v) { return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(v))); }
INLINE vi where_bit(vi test, int32_t bit, vi v) {
    return vandq_s32(vreinterpretq_s32_u32(vtstq_s32(test, splat_int(bit))), v);
}
INLINE vf where_equal(vi a, vi b, vf v) { return where_mask(vceqq_s32(a, b), v); }
INLINE vf where_positive(vf test, vf v) { return where_mask(vmvnq_u32(vcleq_f32(test, zero())), v); }
INLINE vf select_positive(vf test, vf a, vf b) { return vbslq_f32(vcgtq_f32(test, zero()), a, b); }
INLINE vf larger(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE vf smaller(vf a, vf b) { return vminq_f32(a, b); }
INLINE int any_within(vf a, vf reach) { return vminvq_u32(vcgtq_f32(a, reach)) == 0; }
INLINE void challenge(vf *best, vi *which, vf rival, int32_t index) {
    uint32x4_t wins = vorrq_u32(vcgtq_f32(rival, *best), vmvnq_u32(vceqq_f32(rival, rival)));
    *best = vbslq_f32(wins, rival, *best);
    *which = vbslq_s32(wins, splat_int(index), *which);
}
/* One bit per lane of a mask, the first lane lowest; and the mask of four bits. */
INLINE uint32_t mask_bits(uint32x4_t mask) { return vaddvq_u32(vandq_u32(mask, (uint32x4_t){1, 2, 4, 8})); }
INLINE uint32x4_t bits_mask(uint32_t bits) { return vtstq_u32(vdupq_n_u32(bits), (uint32x4_t){1, 2, 4, 8}); }

#else /* any machine, by the compiler's vector types ---------------------------------------------------------------- */
#define WIDE_REGISTERS 0
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float s) { return (vf){s, s, s, s}; }
INLINE vf zero(void) { return (vf){0}; }
INLINE vf madd(vf a, vf b, vf c) { return a * b + c; }
INLINE vf load_part(const float *p, ptrdiff_t n) {
    float lanes[VL] = {0};
    for (int i = 0; i < VL && i < n; i++) lanes[i] = p[i];
    return load(lanes);
}
INLINE void store_part(float *p, vf v, ptrdiff_t n) {
    for (int i = 0; i < VL && i < n; i++) p[i] = v[i];
}
INLINE vi load_int(const int32_t *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_int(int32_t *p, vi v) { memcpy(p, &v, sizeof v); }
INLINE vi splat_int(int32_t s) { return (vi){s, s, s, s}; }
INLINE vi add_int(vi a, vi b) { return a + b; }
INLINE vi where_bit(vi test, int32_t bit, vi v) { return (vi)((test & splat_int(bit)) != splat_int(0)) & v; }
INLINE vf where_equal(vi a, vi b, vf v) { return (vf)((vi)(a == b) & (vi)v); }
INLINE vf where_positive(vf test, vf v) { return (vf)(~(vi)(test <= zero()) & (vi)v); }
INLINE vf select_positive(vf test, vf a, vf b) {
    vi above = (vi)(test > zero());
    return (vf)((above & (vi)a) | (~above & (vi)b));
}
INLINE vf larger(vf a, vf b) { return (vf)(((vi)(a > b) & (vi)a) | (~(vi)(a > b) & (vi)b)); }
INLINE vf smaller(vf a, vf b) { return (vf)(((vi)(a < b) & (vi)a) | (~(vi)(a < b) & (vi)b)); }
INLINE int any_within(vf a, vf reach) {
    vi beyond = (vi)(a > reach);
    int all = -1;
    for (int i = 0; i < VL; i++) all &= beyond[i];
    return all == 0;
}
INLINE void challenge(vf *best, vi *which, vf rival, int32_t index) {
    vi wins = (vi)(rival > *best) | (vi)(rival != rival);
    *best = (vf)((wins & (vi)rival) | (~wins & (vi)*best));
    *which = (wins & splat_int(index)) | (~wins & *which);
}
#endif

INLINE float sum_lanes(vf v) {
    float lanes[VL];
    store(lanes, v);
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#if VL == 8
/* Compaction table of masks: byte k of entry m is the position of the k-th set bit of m. */
#define LANE(m, i) ((uint64_t)((m) >> (i) & 1 ? (i) : 0) << 8 * __builtin_popcount((m) & ((1 << (i)) - 1)))
#define LANES(m) \
    LANE(m, 0) | LANE(m, 1) | LANE(m, 2) | LANE(m, 3) | LANE(m, 4) | LANE(m, 5) | LANE(m, 6) | LANE(m, 7)
#define LANES_4(m) LANES(m), LANES((m) + 1), LANES((m) + 2), LANES((m) + 3)
#define LANES_16(m) LANES_4(m), LANES_4((m) + 4), LANES_4((m) + 8), LANES_4((m) + 12)
#define LANES_64(m) LANES_16(m), LANES_16((m) + 16), LANES_16((m) + 32), LANES_16((m) + 48)
static const uint64_t lanes_of[256] = {LANES_64(0), LANES_64(64), LANES_64(128), LANES_64(192)};
#elif defined(HANSA_NEON)
/* The same in bytes of 32-bit lanes: entry m has the four bytes of each set bit's lane. */
#define PLACED(m, i) ((m) >> (i) & 1 ? 0x03020100u + 0x04040404u * (i) : 0)
#define PLACES(m, k)                                                                                                \
    ((__builtin_popcount((m) & 0) == (k) ? PLACED(m, 0) : 0) | (__builtin_popcount((m) & 1) == (k) ? PLACED(m, 1) : 0) | \
     (__builtin_popcount((m) & 3) == (k) ? PLACED(m, 2) : 0) | (__builtin_popcount((m) & 7) == (k) ? PLACED(m, 3) : 0))
#define LANES(m) {PLACES(m, 0), PLACES(m, 1), PLACES(m, 2), PLACES(m, 3)}
static const uint32_t lanes_of[16][4] = {LANES(0),  LANES(1),  LANES(2),  LANES(3), LANES(4),  LANES(5),
                                         LANES(6),  LANES(7),  LANES(8),  LANES(9), LANES(10), LANES(11),
                                         LANES(12), LANES(13), LANES(14), LANES(15)};
#endif

/* Appends the nonzero entries of `value` with their places. Writes up to VL beyond the new end. */
INLINE ptrdiff_t append(float *values, int32_t *places, ptrdiff_t end, vf value, vi place) {
#if VL == 16
    __mmask16 keep = _mm512_cmp_ps_mask(value, zero(), _CMP_NEQ_UQ);
    store(values + end, _mm512_maskz_compress_ps(keep, value));
    store_int(places + end, _mm512_maskz_compress_epi32(keep, place));
    return end + __builtin_popcount(keep);
#elif VL == 8
    int keep = _mm256_movemask_ps(_mm256_cmp_ps(value, zero(), _CMP_NEQ_UQ));
    vi lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)lanes_of[keep]));
    store(values + end, _mm256_permutevar8x32_ps(value, lanes));
    store_int(places + end, _mm256_permutevar8x32_epi32(place, lanes));
    return end + __builtin_popcount((unsigned)keep);
#elif defined(HANSA_NEON)
    uint32_t keep = mask_bits(vmvnq_u32(vceqzq_f32(value)));
    uint8x16_t lanes = vreinterpretq_u8_u32(vld1q_u32(lanes_of[keep]));
    store(values + end, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(value), lanes)));
    store_int(places + end, vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(place), lanes)));
    return end + __builtin_popcount(keep);
#else
    float v[VL];
    int32_t p[VL];
    store(v, value);
    store_int(p, place);
    for (int i = 0; i < VL; i++) {
        values[end] = v[i];
        places[end] = p[i];
        end += v[i] != 0;
    }
    return end;
#endif
}

/* 32-bit matrix transpose: to[c][r] = from[r][c] ------------------------------------------------------------------- */

#if VL == 16
INLINE void transpose_block(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row) {
    vf a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = load(from + i * from_row);
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + j + 2])));
        a[i + 2 * j + 1] =
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + j + 2])));
    }
    UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
        b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
        b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xdd);
    }
    UNROLL for (int j = 0; j < 8; j++) {
        store(to + j * to_row, _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88));
        store(to + (j + 8) * to_row, _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd));
    }
}
#elif VL == 8
INLINE void transpose_block(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row) {
    vf a[8], b[8];
    UNROLL for (int i = 0; i < 4; i++) { /* rows i and i + 4 in two halves: later operations stay within them */
        a[2 * i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + i * from_row)),
                                        _mm_loadu_ps(from + (i + 4) * from_row), 1);
        a[2 * i + 1] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + i * from_row + 4)),
                                            _mm_loadu_ps(from + (i + 4) * from_row + 4), 1);
    }
    UNROLL for (int h = 0; h < 2; h++) {
        b[0] = _mm256_unpacklo_ps(a[h], a[2 + h]);
        b[1] = _mm256_unpackhi_ps(a[h], a[2 + h]);
        b[2] = _mm256_unpacklo_ps(a[4 + h], a[6 + h]);
        b[3] = _mm256_unpackhi_ps(a[4 + h], a[6 + h]);
        UNROLL for (int j = 0; j < 2; j++) {
            store(to + (4 * h + 2 * j) * to_row, _mm256_shuffle_ps(b[j], b[2 + j], 0x44));
            store(to + (4 * h + 2 * j + 1) * to_row, _mm256_shuffle_ps(b[j], b[2 + j], 0xee));
        }
    }
}
#elif defined(HANSA_NEON)
INLINE void transpose_block(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row) {
    float32x4x2_t upper = vtrnq_f32(load(from), load(from + from_row));
    float32x4x2_t lower = vtrnq_f32(load(from + 2 * from_row), load(from + 3 * from_row));
    UNROLL for (int c = 0; c < 2; c++) {
        store(to + c * to_row, vcombine_f32(vget_low_f32(upper.val[c]), vget_low_f32(lower.val[c])));
        store(to + (c + 2) * to_row, vcombine_f32(vget_high_f32(upper.val[c]), vget_high_f32(lower.val[c])));
    }
}
#else
INLINE void transpose_block(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row) {
    for (int c = 0; c < VL; c++)
        for (int r = 0; r < VL; r++) to[c * to_row + r] = from[r * from_row + c];
}
#endif

static void transpose(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row, ptrdiff_t rows,
                      ptrdiff_t columns) {
    ptrdiff_t whole_rows = rows - rows % VL, whole_columns = columns - columns % VL;
    for (ptrdiff_t c = 0; c < whole_columns; c += VL)
        for (ptrdiff_t r = 0; r < whole_rows; r += VL)
            transpose_block(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
    for (ptrdiff_t c = 0; c < columns; c++)
        for (ptrdiff_t r = c < whole_columns ? whole_rows : 0; r < rows; r++)
            to[c * to_row + r] = from[r * from_row + c];
}

#endif
