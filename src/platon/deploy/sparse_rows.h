/* One tile of tokens times one row block, for one vector width; included by sparse_level.h. */

/* The non-zeros of a row; CHAINS independent sums hide the latency of an addition where WIDE vectors are too few. The
   last ones are left. */
#define BY_CHAINS(ONE, WIDE, CHAINS)                                                                                  \
    for (; end - value >= CHAINS; value += CHAINS, column += CHAINS)                                                  \
        UNROLL for (int c = 0; c < CHAINS; c++) {                                                                     \
            const ONE *tokens = (const ONE *)(here + (size_t)column[c] * lanes);                                      \
            float weight = value[c];                                                                                  \
            UNROLL for (int v = 0; v < WIDE; v++) total[c][v] += weight * tokens[v];                                  \
        }

/* The same, four at a time. On x86 the kernel is bound by its loads: those of tokens, weights and columns. So four weights
   take one load: they are in every 128 bits of a vector, from which one of them is spread without another load. */
#if VECTOR == 16 && !defined(LOWERED)
#define LOAD_FOUR(weights) (VEC) _mm512_broadcast_f32x4(_mm_loadu_ps(weights))
#define SPREAD(four, c) (VEC) _mm512_permute_ps((__m512)(four), 0x55 * (c))
#elif VECTOR == 8
#define LOAD_FOUR(weights) (VEC) _mm256_broadcast_ps((const __m128 *)(weights))
#define SPREAD(four, c) (VEC) _mm256_permute_ps((__m256)(four), 0x55 * (c))
#endif
#ifdef SPREAD
#define ADD_SPREAD(c)                                                                                                 \
    UNROLL for (int v = 0; v < wide; v++) total[0][v] +=                                                              \
        SPREAD(four, c) * ((const VEC *)(here + (size_t)(columns >> 8 * (c) & 255) * lanes))[v];
#define BY_FOUR(ONE, WIDE, CHAINS)                                                                                    \
    for (; end - value >= 4; value += 4, column += 4) {                                                               \
        const int wide = WIDE;                                                                                        \
        VEC four = LOAD_FOUR(value);                                                                                  \
        uint32_t columns = column[0] | column[1] << 8 | column[2] << 16 | (uint32_t)column[3] << 24;                  \
        ADD_SPREAD(0) ADD_SPREAD(1) ADD_SPREAD(2) ADD_SPREAD(3)                                                       \
    }
#else
#define BY_FOUR BY_CHAINS
#endif

/* The sums of a row, WIDE vectors of tokens, stay in registers while its non-zeros are read. Rows without
   non-zeros are the last of a panel; they cost nothing but their bias. */
#define ROWS(NAME_, ONE, WIDE, CHAINS, LOOP)                                                                          \
    TARGET APART static void NAME_(const struct matrix *m, int64_t block, const float *tile, float *sums) {           \
        const int64_t lanes = WIDE * sizeof(ONE) / sizeof(float);                                                     \
        const float *value = m->values + m->starts[block];                                                            \
        const uint8_t *column = m->columns + m->starts[block];                                                        \
        const uint16_t *count = m->counts + block * m->panels * ROW_BLOCK;                                            \
        const float *last = m->values + m->starts[block + 1];                                                         \
        int64_t first_row = block * ROW_BLOCK;                                                                        \
        for (int64_t panel = 0; panel < m->panels; panel++, count += ROW_BLOCK) {                                     \
            const float *here = tile + panel * m->width * lanes;                                                      \
            for (int64_t i = 0; i < ROW_BLOCK; i++) {                                                                 \
                int64_t row = count[i] % ROW_BLOCK, length = count[i] / ROW_BLOCK, left = last - value;               \
                if (panel && !length)                                                                                 \
                    break;                                                                                            \
                ONE *sum = (ONE *)(sums + row * lanes);                                                               \
                ONE total[CHAINS][WIDE];                                                                              \
                float start = panel == 0 && m->bias && first_row + row < m->rows ? m->bias[first_row + row] : 0.0f;   \
                UNROLL for (int v = 0; v < WIDE; v++) {                                                               \
                    if (panel)                                                                                        \
                        total[0][v] = sum[v];                                                                         \
                    else                                                                                              \
                        total[0][v] = (ONE){0} + start;                                                               \
                }                                                                                                     \
                UNROLL for (int c = 1; c < CHAINS; c++) UNROLL for (int v = 0; v < WIDE; v++) total[c][v] = (ONE){0}; \
                const float *end = value + (length < left ? length : left);                                           \
                LOOP(ONE, WIDE, CHAINS)                                                                               \
                for (; value < end; value++, column++) {                                                              \
                    const ONE *tokens = (const ONE *)(here + (size_t)*column * lanes);                                \
                    float weight = *value;                                                                            \
                    UNROLL for (int v = 0; v < WIDE; v++) total[0][v] += weight * tokens[v];                          \
                }                                                                                                     \
                UNROLL for (int c = 1; c < CHAINS; c++)                                                               \
                    UNROLL for (int v = 0; v < WIDE; v++) total[0][v] += total[c][v];                                 \
                UNROLL for (int v = 0; v < WIDE; v++) sum[v] = total[0][v];                                           \
            }                                                                                                         \
        }                                                                                                             \
    }

#if VECTOR == 16 && !defined(__clang__) && !defined(LOWERED)
#include "sparse_token.h"
#else
ROWS(NAME(rows_of_one_token), float, 1, 8, BY_CHAINS)
#endif
ROWS(NAME(rows1), VEC, 1, 4, BY_CHAINS)
ROWS(NAME(rows2), VEC, 2, 2, BY_CHAINS)
ROWS(NAME(rows4), VEC, 4, 1, BY_FOUR)
#if MOST >= 8
ROWS(NAME(rows8), VEC, 8, 1, BY_FOUR)
#endif
#if MOST == 16
ROWS(NAME(rows16), VEC, 16, 1, BY_FOUR)
#endif

/* A row block whose rows are all empty: its biases. */
TARGET APART static void NAME(rows_of_biases)(const struct matrix *m, int64_t block, int64_t wide, float *sums) {
    for (int64_t i = 0; i < ROW_BLOCK; i++) {
        int64_t row = block * ROW_BLOCK + i;
        float bias = m->bias && row < m->rows ? m->bias[row] : 0.0f;
        for (int64_t t = 0; t < wide; t++)
            sums[i * wide + t] = bias;
    }
}

/* The sums of one row block for one tile of tokens, after the activation. */
TARGET static void NAME(compute)(const struct matrix *m, int64_t block, int64_t wide, const float *tile, float *sums) {
    if (m->starts[block] == m->starts[block + 1])
        NAME(rows_of_biases)(m, block, wide, sums);
    else
        switch (wide / VECTOR) {
        case 0:
            NAME(rows_of_one_token)(m, block, tile, sums);
            break;
        case 1:
            NAME(rows1)(m, block, tile, sums);
            break;
        case 2:
            NAME(rows2)(m, block, tile, sums);
            break;
        case 4:
            NAME(rows4)(m, block, tile, sums);
            break;
#if MOST >= 8
        case 8:
            NAME(rows8)(m, block, tile, sums);
            break;
#endif
#if MOST == 16
        default:
            NAME(rows16)(m, block, tile, sums);
#endif
        }
    if (m->activation != NONE)
        NAME(activate)(sums, ROW_BLOCK * wide, m->activation);
}

#undef ROWS
#undef BY_CHAINS
#undef BY_FOUR
#undef ADD_SPREAD
#undef SPREAD
#undef LOAD_FOUR
