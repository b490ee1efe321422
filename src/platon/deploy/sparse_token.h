/* A row block for a single token with AVX-512; included by sparse_rows.h.

   The non-zeros of a row are ordered by column, so 16 of them lie close together where a good part of a row is kept: the
   features that they read are picked from four vectors, which is faster than 16 loads. Other rows are loaded one by one.
*/

#define SPAN 64 /* features that are picked from without a second thought */

/* The features of 16 columns, of which the first `count` matter. TOKEN_REACH floats can be read from `features` on. */
TARGET INLINE static VEC NAME(pick)(const float *features, const uint8_t *column, int64_t count) {
    int first = column[0], span = column[count - 1] - first;
    const VEC *from = (const VEC *)(features + first);
    /* An intrinsic, because GCC converts vectors of bytes one by one. */
    INTS place = (INTS)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)column)) - first;
    VEC low = __builtin_shuffle(from[0], from[1], place), high = __builtin_shuffle(from[2], from[3], place);
    VEC found = NAME(choose)((place & 32) != 0, high, low); /* a shuffle takes `place` modulo 32 */
    for (int at = SPAN; at <= span; at += 32)
        found = NAME(choose)((place & ~31) == at, __builtin_shuffle(from[at / 16], from[at / 16 + 1], place), found);
    return found;
}

TARGET INLINE static float NAME(sum_of)(VEC v) {
    v += __builtin_shuffle(v, (INTS){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (INTS){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (INTS){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}

TARGET APART static void NAME(rows_of_one_token)(const struct matrix *m, int64_t block, const float *tile, float *sums) {
    const float *value = m->values + m->starts[block], *last = m->values + m->starts[block + 1];
    const uint8_t *column = m->columns + m->starts[block];
    const uint16_t *count = m->counts + block * m->panels * ROW_BLOCK;
    const INTS lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t panel = 0; panel < m->panels; panel++, count += ROW_BLOCK) {
        const float *here = tile + panel * m->width;
        for (int64_t i = 0; i < ROW_BLOCK; i++) {
            int64_t row = count[i] % ROW_BLOCK, length = count[i] / ROW_BLOCK, left = last - value;
            if (panel && !length)
                break;
            const float *end = value + (length < left ? length : left);
            float sum = 0;
            PREFETCH(value, column);
            /* Half more than the span of 16 non-zeros on average, so that there is mostly no second step. */
            if (24 * m->width <= SPAN * length) {
                VEC total = {0};
                for (; end - value >= VECTOR; value += VECTOR, column += VECTOR)
                    total += *(const VEC *)value * NAME(pick)(here, column, VECTOR);
                left = end - value;
                if (left && last - value >= VECTOR) {
                    VEC products = *(const VEC *)value * NAME(pick)(here, column, left);
                    total += (VEC)((INTS)products & (lane < (int32_t)left));
                    value += left, column += left;
                }
                sum = NAME(sum_of)(total);
            }
            float sums_of[8] = {0};
            for (; end - value >= 8; value += 8, column += 8)
                UNROLL for (int c = 0; c < 8; c++) sums_of[c] += value[c] * here[column[c]];
            for (; value < end; value++, column++)
                sum += *value * here[*column];
            UNROLL for (int c = 0; c < 8; c++) sum += sums_of[c];
            int64_t own = block * ROW_BLOCK + row;
            sums[row] = sum + (panel ? sums[row] : m->bias && own < m->rows ? m->bias[own] : 0.0f);
        }
    }
}

#undef SPAN
