/* A row block for a single token with AVX-512; included by sparse_rows.h.

   The features of a panel stay in registers, and those that 16 non-zeros read are picked from there: a permutation picks
   from two registers, then the higher bits of a column say which of these it was. That takes less time than 16 loads, and
   a matrix is read as fast as memory gives it. Rows with few non-zeros are read one by one. */

#define FEWEST_PICKED 6 /* non-zeros in a row */
#define MOST_PAIRS (PANEL_REACH / (2 * VECTOR))

/* The features that 16 columns name, of those in so many pairs of vectors. */
TARGET INLINE static __m512 NAME(pick)(const int pairs, const __m512 *features, const uint8_t *columns) {
    const __m512i place = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)columns));
    __m512 found[MOST_PAIRS];
    UNROLL for (int i = 0; i < pairs; i++) /* a permutation takes `place` modulo 32 */
        found[i] = _mm512_permutex2var_ps(features[2 * i], place, features[2 * i + 1]);
    UNROLL for (int bit = 32, left = pairs; left > 1; bit *= 2, left = (left + 1) / 2) {
        __mmask16 upper = _mm512_test_epi32_mask(place, _mm512_set1_epi32(bit));
        UNROLL for (int i = 0; i < left; i += 2)
            found[i / 2] = i + 1 < left ? _mm512_mask_blend_ps(upper, found[i], found[i + 1]) : found[i];
    }
    return found[0];
}

/* The non-zeros of a row from `at` to `end`, one by one. */
TARGET INLINE static float NAME(row_of_one_token)(const struct matrix *m, int64_t at, int64_t end, const float *here) {
    float sums[8] = {0}, sum = 0;
    PREFETCH(m->values + at, m->columns + at);
    for (; end - at >= 8; at += 8)
        UNROLL for (int c = 0; c < 8; c++) sums[c] += m->values[at + c] * here[m->columns[at + c]];
    for (; at < end; at++)
        sum += m->values[at] * here[m->columns[at]];
    UNROLL for (int c = 0; c < 8; c++) sum += sums[c];
    return sum;
}

/* Adds one panel to the sums of a row block: to `wide` those of rows whose features are picked, 16 sums a row. Returns the
   index of the first non-zero behind the panel. */
TARGET INLINE static int64_t NAME(panel_of_one_token)(const int pairs, const struct matrix *m, const uint16_t *count,
                                                      int64_t at, int64_t last, const float *here, __m512 *wide,
                                                      float *sums) {
    const int64_t most = m->starts[m->blocks] - VECTOR; /* a row that ends later has no 16 non-zeros to load behind it */
    __m512 features[2 * MOST_PAIRS];
    UNROLL for (int v = 0; v < 2 * pairs; v++) features[v] = _mm512_loadu_ps(here + v * VECTOR);
    for (int i = 0; i < ROW_BLOCK; i++) {
        int64_t row = count[i] % ROW_BLOCK, length = count[i] / ROW_BLOCK, left = last - at;
        int64_t end = at + (length < left ? length : left);
        if (!length)
            break;
        if (length < FEWEST_PICKED || end > most) {
            sums[row] += NAME(row_of_one_token)(m, at, end, here);
            at = end;
            continue;
        }
        __m512 total[2] = {wide[row], _mm512_setzero_ps()};
        for (; end - at >= 2 * VECTOR; at += 2 * VECTOR)
            UNROLL for (int c = 0; c < 2; c++) {
                int64_t from = at + c * VECTOR;
                ASK_FOR(m->values + from, FAR_AHEAD), ASK_FOR(m->columns + from, FAR_AHEAD);
                total[c] = _mm512_fmadd_ps(_mm512_loadu_ps(m->values + from),
                                           NAME(pick)(pairs, features, m->columns + from), total[c]);
            }
        for (; at < end; at += VECTOR) {
            __mmask16 own = end - at < VECTOR ? (1 << (end - at)) - 1 : 0xffff;
            ASK_FOR(m->values + at, FAR_AHEAD), ASK_FOR(m->columns + at, FAR_AHEAD);
            total[0] = _mm512_mask3_fmadd_ps(_mm512_loadu_ps(m->values + at),
                                             NAME(pick)(pairs, features, m->columns + at), total[0], own);
        }
        at = end;
        wide[row] = _mm512_add_ps(total[0], total[1]);
    }
    return at;
}

TARGET APART static void NAME(rows_of_one_token)(const struct matrix *given, int64_t block, const float *tile,
                                                 float *sums) {
    const struct matrix copied = *given, *m = &copied; /* no store can change it: it stays in registers */
    const uint16_t *count = m->counts + block * m->panels * ROW_BLOCK;
    int64_t at = m->starts[block], last = m->starts[block + 1];
    __m512 wide[ROW_BLOCK];
    UNROLL for (int row = 0; row < ROW_BLOCK; row++) wide[row] = _mm512_setzero_ps();
    NAME(rows_of_biases)(m, block, 1, sums);
    for (int64_t panel = 0; panel < m->panels; panel++, count += ROW_BLOCK, tile += m->width)
        switch ((m->width + 4 * VECTOR - 1) / (4 * VECTOR)) {
        case 1:
            at = NAME(panel_of_one_token)(2, m, count, at, last, tile, wide, sums);
            break;
        case 2:
            at = NAME(panel_of_one_token)(4, m, count, at, last, tile, wide, sums);
            break;
        case 3:
            at = NAME(panel_of_one_token)(6, m, count, at, last, tile, wide, sums);
            break;
        default:
            at = NAME(panel_of_one_token)(8, m, count, at, last, tile, wide, sums);
        }
    for (int row = 0; row < ROW_BLOCK; row++)
        sums[row] += _mm512_reduce_add_ps(wide[row]);
}

#undef FEWEST_PICKED
#undef MOST_PAIRS
