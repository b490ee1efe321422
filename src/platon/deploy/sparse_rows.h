/* One tile of tokens times one row block, for one vector width; included by sparse_level.h. */

/* The non-zeros of a row from `at` to `end`; CHAINS independent sums hide the latency of an addition. The last ones are
   left. */
#define BY_CHAINS(ONE, WIDE, CHAINS)                                                                                  \
    for (; at + CHAINS <= end; at += CHAINS)                                                                          \
        UNROLL for (int c = 0; c < CHAINS; c++) {                                                                     \
            const ONE *tokens = (const ONE *)(here + (size_t)m->columns[at + c] * lanes);                             \
            float weight = m->values[at + c];                                                                         \
            UNROLL for (int v = 0; v < WIDE; v++) total[c][v] += weight * tokens[v];                                  \
        }

/* The same, four at a time. On x86 the kernel is bound by its loads: those of tokens, weights and columns. So four weights
   take one load, and four columns another: weights are in every 128 bits of a vector, from which one of them is spread
   without another load. A load waits until those before it are done, of which there are always some dozens, and only then is
   the address of the next tokens known: so columns are loaded four non-zeros ahead, those of the next row `in_advance`.
   The last row of a matrix has none behind it and is left. The empty assembler statements keep GCC from loading later, and
   from computing the address of each vector anew. */
#if VECTOR == 16 && !defined(LOWERED)
#define LOAD_FOUR(weights) (VEC) _mm512_broadcast_f32x4(_mm_loadu_ps(weights))
#define SPREAD(four, c) (VEC) _mm512_permute_ps((__m512)(four), 0x55 * (c))
#elif VECTOR == 8
#define LOAD_FOUR(weights) (VEC) _mm256_broadcast_ps((const __m128 *)(weights))
#define SPREAD(four, c) (VEC) _mm256_permute_ps((__m256)(four), 0x55 * (c))
#endif
TARGET INLINE static uint32_t NAME(four_columns)(const uint8_t *at) {
    uint32_t four;
    memcpy(&four, at, 4);
    __asm__("" : "+r"(four));
    return four;
}
#ifdef SPREAD
#define ADD_SPREAD(c, chain)                                                                                          \
    {                                                                                                                 \
        size_t offset = (columns >> 8 * (c) & 255) * lanes * sizeof(float);                                           \
        __asm__("" : "+r"(offset));                                                                                   \
        const VEC *tokens = (const VEC *)((const char *)here + offset);                                               \
        UNROLL for (int v = 0; v < wide; v++) total[chain][v] += SPREAD(four, c) * tokens[v];                         \
    }
#define BY_FOUR(ONE, WIDE, CHAINS)                                                                                    \
    if (end + 4 <= count_of_all) {                                                                                    \
        const int wide = WIDE;                                                                                        \
        uint32_t columns = in_advance;                                                                                \
        in_advance = NAME(four_columns)(m->columns + end);                                                            \
        for (; at + 4 <= end; at += 4) {                                                                              \
            uint32_t next = NAME(four_columns)(m->columns + at + 4);                                                  \
            VEC four = LOAD_FOUR(m->values + at);                                                                     \
            ADD_SPREAD(0, 0) ADD_SPREAD(1, 1 % CHAINS) ADD_SPREAD(2, 0) ADD_SPREAD(3, 1 % CHAINS)                     \
            columns = next;                                                                                           \
        }                                                                                                             \
    }
#else
#define BY_FOUR BY_CHAINS
#endif

/* Non-zeros come from memory once for each tile. The processor's own prefetching stops where a page ends, so those that are
   read some rows later are asked for here: as many as most rows have. */
#define ASK_FOR(address, ahead) __builtin_prefetch((const void *)((uintptr_t)(address) + (ahead) * sizeof *(address)))
#define PREFETCH(value, column)                                                                                       \
    ASK_FOR(value, AHEAD), ASK_FOR((value) + LANES, AHEAD), ASK_FOR((value) + 2 * LANES, AHEAD),                      \
        ASK_FOR((value) + 3 * LANES, AHEAD), ASK_FOR(column, AHEAD)

/* The sums of a row, WIDE vectors of tokens, stay in registers while its non-zeros are read. Rows without
   non-zeros are the last of a panel; they cost nothing but their bias, with which the rows of the first panel begin. */
#define ROWS(KIND, ONE, WIDE, CHAINS, LOOP)                                                                           \
    TARGET INLINE static int64_t NAME(panel_of_##KIND)(const struct matrix *m, const uint16_t *count, int64_t at,     \
                                                        int64_t last, const float *here, const float *bias,           \
                                                        int64_t biases, float *sums, const int is_first) {            \
        const int64_t lanes = WIDE * sizeof(ONE) / sizeof(float), count_of_all = m->starts[m->blocks];                \
        uint32_t in_advance = at + 4 <= count_of_all ? NAME(four_columns)(m->columns + at) : 0, next_count = *count;  \
        (void)in_advance; /* BY_CHAINS does without */                                                                \
        for (int i = 0; i < ROW_BLOCK; i++) {                                                                         \
            int64_t row = next_count % ROW_BLOCK, length = next_count / ROW_BLOCK, left = last - at;                  \
            next_count = count[i + 1 < ROW_BLOCK ? i + 1 : i];                                                        \
            __asm__("" : "+r"(next_count));                                                                           \
            int64_t end = at + (length < left ? length : left);                                                       \
            if (!is_first && !length)                                                                                 \
                break;                                                                                                \
            ONE *sum = (ONE *)(sums + row * lanes);                                                                   \
            ONE total[CHAINS][WIDE];                                                                                  \
            float start = is_first && row < biases ? bias[row] : 0.0f;                                                \
            UNROLL for (int v = 0; v < WIDE; v++)                                                                     \
                if (is_first)                                                                                         \
                    total[0][v] = (ONE){0} + start;                                                                   \
                else                                                                                                  \
                    total[0][v] = sum[v];                                                                             \
            UNROLL for (int c = 1; c < CHAINS; c++) UNROLL for (int v = 0; v < WIDE; v++) total[c][v] = (ONE){0};     \
            PREFETCH(m->values + at, m->columns + at);                                                                \
            LOOP(ONE, WIDE, CHAINS)                                                                                   \
            for (; at < end; at++) {                                                                                  \
                const ONE *tokens = (const ONE *)(here + (size_t)m->columns[at] * lanes);                             \
                float weight = m->values[at];                                                                         \
                UNROLL for (int v = 0; v < WIDE; v++) total[0][v] += weight * tokens[v];                              \
            }                                                                                                         \
            UNROLL for (int c = 1; c < CHAINS; c++) UNROLL for (int v = 0; v < WIDE; v++) total[0][v] += total[c][v]; \
            UNROLL for (int v = 0; v < WIDE; v++) sum[v] = total[0][v];                                               \
        }                                                                                                             \
        return at;                                                                                                    \
    }                                                                                                                 \
    TARGET APART static void NAME(KIND)(const struct matrix *given, int64_t block, const float *tile, float *sums) {  \
        const struct matrix copied = *given, *m = &copied; /* no store can change it: it stays in registers */        \
        const uint16_t *count = m->counts + block * m->panels * ROW_BLOCK;                                            \
        int64_t at = m->starts[block], last = m->starts[block + 1], first_row = block * ROW_BLOCK;                    \
        const float *bias = m->bias ? m->bias + first_row : NULL;                                                     \
        int64_t biases = m->bias ? m->rows - first_row : 0;                                                           \
        at = NAME(panel_of_##KIND)(m, count, at, last, tile, bias, biases, sums, 1);                                  \
        for (int64_t panel = 1; panel < m->panels; panel++) {                                                         \
            tile += m->width * WIDE * sizeof(ONE) / sizeof(float);                                                    \
            count += ROW_BLOCK;                                                                                       \
            at = NAME(panel_of_##KIND)(m, count, at, last, tile, NULL, 0, sums, 0);                                   \
        }                                                                                                             \
    }

/* A row block whose rows are all empty: its biases. */
TARGET APART static void NAME(rows_of_biases)(const struct matrix *m, int64_t block, int64_t wide, float *sums) {
    for (int64_t i = 0; i < ROW_BLOCK; i++) {
        int64_t row = block * ROW_BLOCK + i;
        float bias = m->bias && row < m->rows ? m->bias[row] : 0.0f;
        for (int64_t t = 0; t < wide; t++)
            sums[i * wide + t] = bias;
    }
}

#if VECTOR == 16 && !defined(LOWERED)
#include "sparse_token.h"
#else
ROWS(rows_of_one_token, float, 1, 8, BY_CHAINS)
#endif
ROWS(rows1, VEC, 1, 4, BY_CHAINS)
ROWS(rows2, VEC, 2, 2, BY_FOUR)
ROWS(rows4, VEC, 4, 2, BY_FOUR)
#if MOST >= 8
ROWS(rows8, VEC, 8, 1, BY_FOUR)
#endif
#if MOST == 16
ROWS(rows16, VEC, 16, 1, BY_FOUR)
#endif

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
#undef PREFETCH
