/* One tile of tokens times one block of rows, for one vector width; included once for each instruction set.

   The includer defines VECTOR (floats in a vector), MOST (vectors in the widest tile), TARGET (an attribute) and
   NAME(x) (x with a suffix). A tile is 1, 2, 4 or 8 vectors of tokens. Inside it everything lies feature by feature,
   the tokens of a feature side by side, so that a weight is broadcast and meets a contiguous vector. */

typedef float NAME(vec) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
#define VEC NAME(vec)
#define INTS NAME(ints)

/* The rows of one block. WIDE vectors of tokens stay in registers while the non-zeros of a row stream by; CHAINS
   independent sums hide the latency of an addition where WIDE alone does not. */
#define ROWS(NAME_, WIDE, CHAINS)                                                                                     \
    TARGET APART static void NAME_(const struct matrix *m, int64_t block, const float *tile, float *sums) {           \
        const float *value = m->values + m->starts[block];                                                            \
        const uint8_t *column = m->columns + m->starts[block];                                                        \
        const uint16_t *count = m->counts + block * m->parts * ROW_BLOCK;                                             \
        int64_t first_row = block * ROW_BLOCK;                                                                        \
        for (int64_t part = 0; part < m->parts; part++) {                                                             \
            const float *here = tile + part * m->width * WIDE * VECTOR;                                               \
            for (int64_t row = 0; row < ROW_BLOCK; row++) {                                                           \
                VEC *sum = (VEC *)(sums + row * WIDE * VECTOR);                                                       \
                VEC total[CHAINS][WIDE];                                                                              \
                float start = part == 0 && m->bias && first_row + row < m->rows ? m->bias[first_row + row] : 0.0f;    \
                UNROLL for (int v = 0; v < WIDE; v++) {                                                               \
                    if (part)                                                                                         \
                        total[0][v] = sum[v];                                                                         \
                    else                                                                                              \
                        total[0][v] = (VEC){0} + start;                                                               \
                }                                                                                                     \
                UNROLL for (int c = 1; c < CHAINS; c++) UNROLL for (int v = 0; v < WIDE; v++) total[c][v] = (VEC){0}; \
                const float *end = value + *count++;                                                                  \
                if (CHAINS > 1)                                                                                       \
                    for (; end - value >= CHAINS; value += CHAINS, column += CHAINS)                                  \
                        UNROLL for (int c = 0; c < CHAINS; c++) {                                                     \
                            const VEC *tokens = (const VEC *)(here + (size_t)column[c] * WIDE * VECTOR);              \
                            float weight = value[c];                                                                  \
                            UNROLL for (int v = 0; v < WIDE; v++) total[c][v] += weight * tokens[v];                  \
                        }                                                                                             \
                for (; value < end; value++, column++) {                                                              \
                    const VEC *tokens = (const VEC *)(here + (size_t)*column * WIDE * VECTOR);                        \
                    float weight = *value;                                                                            \
                    UNROLL for (int v = 0; v < WIDE; v++) total[0][v] += weight * tokens[v];                          \
                }                                                                                                     \
                UNROLL for (int c = 1; c < CHAINS; c++)                                                               \
                    UNROLL for (int v = 0; v < WIDE; v++) total[0][v] += total[c][v];                                 \
                UNROLL for (int v = 0; v < WIDE; v++) sum[v] = total[0][v];                                           \
            }                                                                                                         \
        }                                                                                                             \
    }

ROWS(NAME(rows1), 1, 4)
ROWS(NAME(rows2), 2, 2)
ROWS(NAME(rows4), 4, 1)
#if MOST == 8
ROWS(NAME(rows8), 8, 1)
#endif

/* `yes` where the mask is all ones, else `no`. */
TARGET static inline VEC NAME(choose)(INTS mask, VEC yes, VEC no) {
    return (VEC)((mask & (INTS)yes) | (~mask & (INTS)no));
}

/* 2^x for x <= 0, and 2^-126 for all that is below. */
TARGET static inline VEC NAME(power)(VEC x) {
    x = NAME(choose)(x > -126.0f, x, (VEC){0} - 126.0f);
    INTS whole = __builtin_convertvector(x - 0.5f, INTS);
    VEC part = x - __builtin_convertvector(whole, VEC);
    VEC y = (VEC){0} + 1.53375775e-4f;
    y = y * part + 1.33998599e-3f;
    y = y * part + 9.61851981e-3f;
    y = y * part + 5.55032901e-2f;
    y = y * part + 0.240226462f;
    y = y * part + 0.693147182f;
    y = y * part + 1.0f;
    return (VEC)((INTS)y + whole * (1 << 23));
}

/* x Φ(x). Φ(-t) is 2^(g(t) - t² / 2 ln 2), g smooth; its fit ends at 5.5, beyond which Φ(-t) is below 2e-8. */
TARGET static inline VEC NAME(gelu)(VEC x) {
    INTS negative = x < 0.0f;
    VEC t = NAME(choose)(negative, -x, x), s = NAME(choose)(t < 5.5f, t, (VEC){0} + 5.5f);
    VEC g = (VEC){0} + 7.32967465e-8f;
    g = g * s - 1.91305867e-6f;
    g = g * s + 1.89638286e-5f;
    g = g * s - 6.02067739e-5f;
    g = g * s - 5.15672902e-4f;
    g = g * s + 7.68084452e-3f;
    g = g * s - 5.30388877e-2f;
    g = g * s + 0.262373239f;
    g = g * s - 1.15114367f;
    g = g * s - 0.999998987f;
    VEC below = NAME(power)(g - t * t * 0.72134752f);
    return x * NAME(choose)(negative, below, 1.0f - below); /* NaN and infinities through the product */
}

/* x / (1 + 2^-u), u = 2 √(2/π) (x + 0.044715 x³) / ln 2, by the power of -|u|. */
TARGET static inline VEC NAME(gelu_tanh)(VEC x) {
    INTS negative = x < 0.0f;
    VEC t = NAME(choose)(negative, -x, x);
    VEC e = NAME(power)(-t * (2.30220820f + 0.102943240f * t * t));
    return x * (NAME(choose)(negative, e, (VEC){0} + 1.0f) / (1.0f + e));
}

TARGET static void NAME(activate)(float *sums, int64_t count, int activation) {
    VEC *end = (VEC *)(sums + count);
    if (activation == GELU)
        for (VEC *sum = (VEC *)sums; sum < end; sum++)
            *sum = NAME(gelu)(*sum);
    else if (activation == GELU_TANH)
        for (VEC *sum = (VEC *)sums; sum < end; sum++)
            *sum = NAME(gelu_tanh)(*sum);
    else
        for (VEC *sum = (VEC *)sums; sum < end; sum++)
            *sum = NAME(choose)(*sum < 0.0f, (VEC){0}, *sum);
}

/* One block of rows for one tile, all but the writing. */
TARGET static void NAME(compute)(const struct job *job, int64_t wide, int64_t block, const float *tile, float *sums) {
    switch (wide / VECTOR) {
    case 1:
        NAME(rows1)(&job->matrix, block, tile, sums);
        break;
    case 2:
        NAME(rows2)(&job->matrix, block, tile, sums);
        break;
    case 4:
        NAME(rows4)(&job->matrix, block, tile, sums);
        break;
#if MOST == 8
    default:
        NAME(rows8)(&job->matrix, block, tile, sums);
#endif
    }
    if (job->activation != NONE)
        NAME(activate)(sums, ROW_BLOCK * wide, job->activation);
}

#undef VEC
#undef INTS
#undef ROWS
#undef VECTOR
#undef MOST
#undef TARGET
#undef NAME
