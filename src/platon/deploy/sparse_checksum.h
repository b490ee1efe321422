/* The slow part of a CRC-32 at the speed of memory, by products of polynomials over GF(2). Included by sparse.c.

   Bytes are the coefficients of a polynomial, and their CRC-32 depends on its remainder modulo P alone (the polynomial of
   zlib). A part of 128 bits that stands n bits before another one is added to that one as
   low * (x^(n+32) mod P) + high * (x^(n-32) mod P), which is short and has the same remainder. Bits are in reversed order,
   as in zlib.

   The file is read and not mapped: pages that one thread maps and unmaps hold up the others. */

#define BUFFER (1 << 18) /* bytes read at a time: the second-level cache holds them until they are folded */
#define BEGIN 0xffffffff /* what zlib's register holds before the first byte */

#ifdef __x86_64__
#define FOLD_TARGET __attribute__((target("pclmul,sse4.1")))

FOLD_TARGET INLINE static __m128i fold(__m128i part, __m128i powers, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(part, powers, 0x00),
                                       _mm_clmulepi64_si128(part, powers, 0x11)), next);
}

/* Four parts with the bytes after them. */
FOLD_TARGET static void fold_bytes(const uint8_t *data, int64_t bytes, __m128i *parts) {
    const __m128i far = _mm_set_epi64x(0x1c6e41596, 0x154442bd4); /* x^(512-32), x^(512+32) */
    __m128i part[4];
    UNROLL for (int i = 0; i < 4; i++) part[i] = parts[i];
    for (int64_t at = 0; at < bytes; at += 64)
        UNROLL for (int i = 0; i < 4; i++)
            part[i] = fold(part[i], far, _mm_loadu_si128((const __m128i *)(data + at) + i));
    UNROLL for (int i = 0; i < 4; i++) parts[i] = part[i];
}

FOLD_TARGET static int fold_file(int file, int64_t bytes, uint8_t *buffer, uint8_t *folded) {
    const __m128i near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0); /* x^(128-32), x^(128+32) */
    __m128i part[4] = {{0}};
    for (int64_t at = 0, wanted; at < bytes; at += wanted) {
        wanted = bytes - at < BUFFER ? bytes - at : BUFFER;
        for (int64_t done = 0, more; done < wanted; done += more)
            if ((more = pread(file, buffer + done, (size_t)(wanted - done), at + done)) <= 0)
                return 0;
        for (int i = 0; i < 4 && !at; i++)
            buffer[i] ^= BEGIN >> 8 * i & 0xff;
        fold_bytes(buffer, wanted, part);
    }
    for (int i = 1; i < 4; i++)
        part[i] = fold(part[i - 1], near, part[i]);
    _mm_storeu_si128((__m128i *)folded, part[3]);
    return 1;
}
#endif

/* 16 bytes with the CRC-32 of the first `bytes` of a file, a multiple of 64 and not 0. Before them zlib's register has to
   hold 0. Returns 0 if this processor has no such products, or the file cannot be read. */
int platon_fold(int file, int64_t bytes, uint8_t *folded) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (bytes >= 64 && bytes % 64 == 0 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        uint8_t *buffer = malloc(BUFFER);
        int done = buffer && fold_file(file, bytes, buffer, folded);
        free(buffer);
        return done;
    }
#endif
    return 0;
}
