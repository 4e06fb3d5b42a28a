/* Decoding of bit_planes.h. Everything is checked before it is used, with the rules of
 * hansa/compress/entropy_coding.py, so that both accept the same bytes; the reason for a refusal is found there. */
#ifndef HANSA_BIT_PLANES_READ_H
#define HANSA_BIT_PLANES_READ_H

#include "bit_planes.h"
#include "dense_read.h"

enum { PLANES_BITS = 24, PLANES_WORDS = PLANES_BLOCK / 64 };

/* A block: which numbers reach the last plane read, the plane's bits, how many planes each number reaches. */
typedef struct {
    uint64_t alive[PLANES_WORDS], bits[PLANES_WORDS + 1], signs[PLANES_WORDS + 1];
    uint8_t highs[PLANES_BLOCK], parts[PLANES_BLOCK], marks[PLANES_BLOCK];
    int32_t codes[PLANES_BLOCK + PLANES_PAD], gaps[PLANES_BLOCK];
} planes_reading;

typedef struct {
    const uint8_t *at;
    int64_t left;
} bytes_left;

/* The next `size` bytes; null if there are fewer. */
INLINE const uint8_t *take_bytes(bytes_left *from, int64_t size) {
    const uint8_t *start = from->at;
    if (size > from->left) return NULL;
    from->at += size;
    from->left -= size;
    return start;
}

/* 64 bits from bit `at` of words, of which one more may be read. */
INLINE uint64_t bits_from(const uint64_t *words, int64_t at) {
    uint64_t low = words[at / 64] >> at % 64;
    return at % 64 ? low | words[at / 64 + 1] << (64 - at % 64) : low;
}

/* The lowest bits of `word`, in order, at the set bits of `mask`. */
INLINE uint64_t deposit(uint64_t word, uint64_t mask) {
#if VL >= 8
    return _pdep_u64(word, mask);
#else
    uint64_t out = 0;
    for (; mask; mask &= mask - 1, word >>= 1) out |= mask & -mask & (0 - (word & 1));
    return out;
#endif
}

/* Copy `count` bits to words with a zero word after them; 0 if a bit after the last is set. */
INLINE int copy_bits(const uint8_t *from, int64_t count, uint64_t *words) {
    if (count % 8 && from[count / 8] >> count % 8) return 0;
    words[(count + 63) / 64] = 0;
    if (count) words[(count - 1) / 64] = 0;
    memcpy(words, from, (size_t)((count + 7) / 8));
    return 1;
}

/* A varint of at most eight bytes that is not overlong; -1 if there is none. */
INLINE int64_t take_varint(bytes_left *from) {
    uint64_t value = 0;
    for (int k = 0; k < 8 && from->left; k++) {
        uint8_t byte = *from->at++;
        from->left--;
        value |= (uint64_t)(byte & 127) << 7 * k;
        if (byte < 128) return k && !byte ? -1 : (int64_t)value;
    }
    return -1;
}

/* Read `count` codes of `width` bits of `put_packed` into `out`, from exactly their bytes; 0 if padding is set. */
static int unpack_numbers(planes_reading *room, const uint8_t *from, int64_t count, int width, int32_t *out) {
    int whole = width / 8, high = width % 8;
    for (int64_t i = 0; i < count; i++) out[i] = 0;
    for (int plane = 0; plane < whole; plane++, from += count)
        INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] |= (int32_t)from[i] << 8 * plane;
    if (!high || !count) return 1;
    int64_t bytes = code_bytes(count, high);
    if (count * high % 8 && from[bytes - 1] >> (count * high % 8)) return 0;
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t word = eight_codes(from, bytes, i, high);
        memcpy(room->parts + i, &word, 8);
    }
    INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] |= (int32_t)room->parts[i] << 8 * whole;
    return 1;
}

/* Mark the listed indices below n in room->marks, one byte each: read-modify-writes of bits would wait for each other. */
static int read_varint_gaps(planes_reading *room, bytes_left data, int64_t n, int64_t count) {
    int64_t at = -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t gap = take_varint(&data);
        if (gap < 0 || gap >= n || (at += gap + 1) >= n) return 0;
        room->marks[at] = 1;
    }
    return !data.left;
}

static int read_rice_gaps(planes_reading *room, bytes_left data, int64_t n, int64_t count, int width) {
    int64_t unary = data.left - packed_bytes(count, width), listed = 0, end = -1, index = -1;
    if (unary < 0 || (count > 0) != (unary > 0)) return 0;
    if (!unpack_numbers(room, data.at + unary, count, width, room->gaps)) return 0;
    for (int64_t i = 0; i < unary; i += 8) {
        uint64_t word = 0;
        if (i + 8 <= unary) memcpy(&word, data.at + i, 8);
        else memcpy(&word, data.at + i, (size_t)(unary - i));
        if (__builtin_popcountll(word) > count - listed) return 0;
        for (; word; word &= word - 1, listed++) {
            int64_t at = 8 * i + __builtin_ctzll(word);
            index += ((at - end - 1) << width | room->gaps[listed]) + 1;
            if (index >= n) return 0;
            room->marks[index] = 1;
            end = at;
        }
    }
    return listed == count && (!count || end / 8 == unary - 1);
}

/* Collect the marks of n entries, zero after them, as bits. */
static void collect_marks(planes_reading *room, int64_t n) {
    for (int64_t i = 0; i < (n + 63) / 64; i++) {
        const uint8_t *marks = room->marks + 64 * i;
        uint64_t word = 0;
#if VL == 16
        word = _mm512_test_epi8_mask(_mm512_loadu_si512(marks), _mm512_set1_epi8(1));
#elif VL == 8
        for (int k = 0; k < 64; k += 32) {
            __m256i some = _mm256_slli_epi64(_mm256_loadu_si256((const __m256i *)(marks + k)), 7);
            word |= (uint64_t)(uint32_t)_mm256_movemask_epi8(some) << k;
        }
#else
        for (int k = 0; k < 64; k++) word |= (uint64_t)marks[k] << k;
#endif
        room->bits[i] = word;
    }
    room->bits[(n + 63) / 64] = 0;
}

/* Add one to the bytes whose bits are set. */
INLINE void count_reached(uint8_t *highs, uint64_t bits) {
#if VL == 16
    __m512i now = _mm512_loadu_si512(highs);
    _mm512_storeu_si512(highs, _mm512_mask_add_epi8(now, bits, now, _mm512_set1_epi8(1)));
#elif VL == 8
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i own = _mm256_set1_epi64x((long long)0x8040201008040201u);
    if (!bits) return;
    for (int k = 0; k < 2; k++, bits >>= 32, highs += 32) {
        __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)(uint32_t)bits), places);
        __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own), *at = (__m256i *)highs;
        _mm256_storeu_si256(at, _mm256_sub_epi8(_mm256_loadu_si256(at), set));
    }
#else
    for (; bits; bits &= bits - 1) highs[__builtin_ctzll(bits)]++;
#endif
}

/* Read one plane of the `n` numbers alive among `size`; returns how many reach it, -1 if it is refused. */
static int64_t read_plane(planes_reading *room, bytes_left *from, int64_t size, int64_t n) {
    const uint8_t *head = take_bytes(from, 5);
    if (!head) return -1;
    int64_t count = short_at(head, 0), length = short_at(head, 1), bitmap = (n + 7) / 8, set = 0;
    int flipped = head[4] & 1, code = head[4] >> 1 & 3, width = head[4] >> 3, known = 0;
    bytes_left data = {take_bytes(from, length), length};
    if (!data.at || 2 * count > n || (2 * count == n && flipped) || length > bitmap) return -1;
    if (code == INDEX_BITMAP && !width && length == bitmap && copy_bits(data.at, n, room->bits)) {
        for (int64_t i = 0; i < (n + 63) / 64; i++) set += __builtin_popcountll(room->bits[i]);
        known = set == count;
    } else if ((code == INDEX_VARINT && !width) || (code == INDEX_RICE && (!width || n >> (width - 1)))) {
        memset(room->marks, 0, 64 * (size_t)((n + 63) / 64));
        known = code == INDEX_VARINT ? read_varint_gaps(room, data, n, count)
                                     : read_rice_gaps(room, data, n, count, width);
        collect_marks(room, n);
    }
    if (!known) return -1;
    int64_t at = 0;
    for (int64_t i = 0; i < (size + 63) / 64; i++) {
        uint64_t mask = room->alive[i];
        if (!mask) continue;
        uint64_t word = bits_from(room->bits, at);
        at += __builtin_popcountll(mask);
        mask = room->alive[i] = deposit(flipped ? ~word : word, mask);
        count_reached(room->highs + 64 * i, mask);
    }
    return flipped ? n - count : count;
}

/* Add the varints of the `left` numbers that are alive after the last plane to room->codes; returns the largest, -1 if
 * they are refused. */
static int64_t read_rest(planes_reading *room, bytes_left *from, int64_t size, int64_t left, int shift, int planes) {
    const uint8_t *head = take_bytes(from, 2);
    if (!head) return -1;
    int64_t length = short_at(head, 0), highest = 0, most = ((int64_t)1 << (PLANES_BITS - shift)) - planes;
    bytes_left data = {take_bytes(from, length), length};
    if (!data.at) return -1;
    for (int64_t i = 0; i < (size + 63) / 64; i++)
        for (uint64_t word = room->alive[i]; word; word &= word - 1, left--) {
            int64_t rest = take_varint(&data);
            if (rest < 0 || rest > most) return -1;
            room->codes[64 * i + __builtin_ctzll(word)] += (int32_t)(rest << shift);
            highest = rest > highest ? rest : highest;
        }
    return left || data.left ? -1 : highest;
}

/* out = codes, negated where their bit is set. */
INLINE void write_signed(const int32_t *codes, uint64_t negative, int64_t n, int32_t *out) {
    int64_t k = 0;
#if VL == 16
    for (; k + 16 <= n; k += 16) {
        vi code = load_int(codes + k);
        store_int(out + k, _mm512_mask_sub_epi32(code, (__mmask16)(negative >> k), splat_int(0), code));
    }
#elif VL == 8
    const vi lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (; k + 8 <= n; k += 8) {
        vi set = _mm256_cmpeq_epi32(_mm256_and_si256(splat_int((int32_t)(negative >> k & 255)), lane), lane);
        store_int(out + k, _mm256_sub_epi32(_mm256_xor_si256(load_int(codes + k), set), set));
    }
#elif defined(HANSA_NEON)
    for (; k + 4 <= n; k += 4) {
        vi code = load_int(codes + k), set = vreinterpretq_s32_u32(bits_mask((uint32_t)(negative >> k)));
        store_int(out + k, vsubq_s32(veorq_s32(code, set), set));
    }
#endif
    for (; k < n; k++) out[k] = negative >> k & 1 ? -codes[k] : codes[k];
}

/* Read a block of n numbers; 0 if it is refused. */
static int read_block(planes_reading *room, bytes_left *from, int64_t n, int32_t *out) {
    const uint8_t *head = take_bytes(from, 2), *low;
    if (!head || head[0] > PLANES_BITS || head[1] < 1 || head[1] > PLANES_MOST) return 0;
    int shift = head[0], planes = head[1];
    int64_t left = n, words = (n + 63) / 64, highest = 0, nonzero = 0, rest = 0, at = 0;
    memset(room->alive, 0xff, 8 * (size_t)words);
    if (n % 64) room->alive[words - 1] = ((uint64_t)1 << n % 64) - 1;
    memset(room->highs, 0, 64 * (size_t)words);
    for (int plane = 0; plane < planes; plane++) {
        if (plane && left <= PLANES_FEW) return 0;
        left = read_plane(room, from, n, left);
        if (left < 0) return 0;
        if (left) highest = plane + 1;
    }
    if ((planes < PLANES_MOST && left > PLANES_FEW) || highest > (int64_t)1 << (PLANES_BITS - shift)) return 0;
    INDEPENDENT for (int64_t i = 0; i < n; i++) room->codes[i] = (int32_t)room->highs[i] << shift;
    if (left && (rest = read_rest(room, from, n, left, shift, planes)) < 0) return 0;
    if (shift) {
        low = take_bytes(from, packed_bytes(n, shift));
        if (!low || !unpack_numbers(room, low, n, shift, room->gaps)) return 0;
        INDEPENDENT for (int64_t i = 0; i < n; i++) room->codes[i] |= room->gaps[i];
    }
    memset(room->codes + n, 0, PLANES_PAD * sizeof(int32_t));
    int32_t top = 0;
    for (int64_t i = 0; i < n; i++) top = top < room->codes[i] ? room->codes[i] : top;
    if (top > 1 << PLANES_BITS) return 0;
    nonzero = reach(room->codes, n, 1, room->bits);
    low = take_bytes(from, (nonzero + 7) / 8);
    if (!low || !copy_bits(low, nonzero, room->signs)) return 0;
    for (int64_t i = 0; i < words; i++) {
        uint64_t mask = room->bits[i], negative = deposit(bits_from(room->signs, at), mask);
        at += __builtin_popcountll(mask);
        write_signed(room->codes + 64 * i, negative, at_most(64, n - 64 * i), out + 64 * i);
    }
    return 1;
}

/* Decode n >= 1 numbers from exactly `size` bytes: HANSA_OK, HANSA_NO_MEMORY, or HANSA_BAD_SIZE if they are refused. */
static int64_t planes_unpack(const uint8_t *data, int64_t size, int64_t n, int32_t *out) {
    planes_reading *room = malloc(sizeof *room);
    bytes_left from = {data, size};
    int good = 1;
    if (!room) return HANSA_NO_MEMORY;
    for (int64_t i = 0; i < n && good; i += PLANES_BLOCK)
        good = read_block(room, &from, at_most(PLANES_BLOCK, n - i), out + i);
    free(room);
    return good && !from.left ? HANSA_OK : HANSA_BAD_SIZE;
}

#endif
