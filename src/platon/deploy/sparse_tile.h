/* One tile of tokens times one row block, for one vector width. sparse.c includes this file once for each instruction
   set and defines VECTOR (floats in a vector), MOST (vectors in the widest tile), TARGET (a function attribute) and
   NAME(x) (x with a suffix).

   A tile is 1, 2, 4 or 8 vectors of tokens. It is stored feature by feature, the tokens of a feature contiguous, so
   that a weight is broadcast and multiplied with a contiguous vector. */

typedef float NAME(vec) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
#define VEC NAME(vec)
#define INTS NAME(ints)

/* The rows of one block. The sums of a row, WIDE vectors of tokens, stay in registers while its non-zeros are read.
   CHAINS independent sums hide the latency of an addition where WIDE vectors alone do not. */
#define ROWS(NAME_, WIDE, CHAINS)                                                                                     \
    TARGET APART static void NAME_(const struct matrix *m, int64_t block, const float *tile, float *sums) {           \
        const float *value = m->values + m->starts[block];                                                            \
        const uint8_t *column = m->columns + m->starts[block];                                                        \
        const uint16_t *count = m->counts + block * m->panels * ROW_BLOCK;                                            \
        const float *last = m->values + m->starts[block + 1];                                                         \
        int64_t first_row = block * ROW_BLOCK;                                                                        \
        for (int64_t panel = 0; panel < m->panels; panel++) {                                                         \
            const float *here = tile + panel * m->width * WIDE * VECTOR;                                              \
            for (int64_t i = 0; i < ROW_BLOCK; i++, count++) {                                                        \
                int64_t row = *count % ROW_BLOCK;                                                                     \
                VEC *sum = (VEC *)(sums + row * WIDE * VECTOR);                                                       \
                VEC total[CHAINS][WIDE];                                                                              \
                float start = panel == 0 && m->bias && first_row + row < m->rows ? m->bias[first_row + row] : 0.0f;   \
                UNROLL for (int v = 0; v < WIDE; v++) {                                                               \
                    if (panel)                                                                                        \
                        total[0][v] = sum[v];                                                                         \
                    else                                                                                              \
                        total[0][v] = (VEC){0} + start;                                                               \
                }                                                                                                     \
                UNROLL for (int c = 1; c < CHAINS; c++) UNROLL for (int v = 0; v < WIDE; v++) total[c][v] = (VEC){0}; \
                int64_t length = *count / ROW_BLOCK, left = last - value;                                             \
                const float *end = value + (length < left ? length : left);                                           \
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

/* The smaller of two numbers; `b` where `a` is NaN. */
TARGET static inline VEC NAME(least)(VEC a, VEC b) {
    INTS below = a < b;
    return (VEC)((below & (INTS)a) | (~below & (INTS)b));
}

TARGET static inline VEC NAME(absolute)(VEC x) { return (VEC)((INTS)x & 0x7fffffff); }

/* 2^x for x from -126 to 0. */
TARGET static inline VEC NAME(power)(VEC x) {
    INTS integer = __builtin_convertvector(x - 0.5f, INTS);
    VEC fraction = x - __builtin_convertvector(integer, VEC);
    VEC y = (VEC){0} + 1.32669706e-3f;
    y = y * fraction + 9.67545994e-3f;
    y = y * fraction + 5.55074252e-2f;
    y = y * fraction + 0.240221217f;
    y = y * fraction + 0.693146944f;
    y = y * fraction + 1.00000012f;
    return (VEC)((INTS)y + integer * (1 << 23));
}

/* x Φ(x) = max(x, 0) - t Φ(-t), t = |x|. The polynomial is log2 Φ(-t), fitted up to 7.5, where t Φ(-t) is 2e-13. */
TARGET static inline VEC NAME(gelu)(VEC x) {
    VEC size = NAME(absolute)(x), t = NAME(least)(size, (VEC){0} + 7.5f);
    VEC y = (VEC){0} - 9.36431732e-9f;
    y = y * t + 3.41511793e-7f;
    y = y * t - 5.20769572e-6f;
    y = y * t + 4.14799651e-5f;
    y = y * t - 1.53078159e-4f;
    y = y * t - 2.80779233e-4f;
    y = y * t + 7.32606696e-3f;
    y = y * t - 5.27417064e-2f;
    y = y * t - 0.459091455f;
    y = y * t - 1.1511302f;
    y = y * t - 0.999998271f;
    return 0.5f * (x + size) - t * NAME(power)(y);
}

/* max(x, 0) - t 2^-u / (1 + 2^-u), t = |x|, u = 2 √(2/π) (t + 0.044715 t³) / ln 2: 63 at t = 7.5. */
TARGET static inline VEC NAME(gelu_tanh)(VEC x) {
    VEC size = NAME(absolute)(x), t = NAME(least)(size, (VEC){0} + 7.5f);
    VEC y = NAME(power)(-t * (2.30220820f + 0.102943240f * t * t));
    return 0.5f * (x + size) - t * (y / (1.0f + y));
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
            *sum = (VEC)((INTS)*sum & ~(*sum < 0.0f)); /* NaN stays NaN */
}

/* Transpose 8 × 8 floats, in three rounds of shuffles of pairs. */
TARGET static inline void NAME(transpose8)(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
#if VECTOR == 4
    for (int down = 0; down < 8; down += 4)
        for (int right = 0; right < 8; right += 4) {
            const float *f = from + down * from_stride + right;
            float *o = to + right * to_stride + down;
            quad a = *(const quad *)f, b = *(const quad *)(f + from_stride);
            quad c = *(const quad *)(f + 2 * from_stride), d = *(const quad *)(f + 3 * from_stride);
            quad ab = SHUFFLE4(a, b, 0, 4, 1, 5), cd = SHUFFLE4(c, d, 0, 4, 1, 5);
            quad ef = SHUFFLE4(a, b, 2, 6, 3, 7), gh = SHUFFLE4(c, d, 2, 6, 3, 7);
            *(quad *)o = SHUFFLE4(ab, cd, 0, 1, 4, 5);
            *(quad *)(o + to_stride) = SHUFFLE4(ab, cd, 2, 3, 6, 7);
            *(quad *)(o + 2 * to_stride) = SHUFFLE4(ef, gh, 0, 1, 4, 5);
            *(quad *)(o + 3 * to_stride) = SHUFFLE4(ef, gh, 2, 3, 6, 7);
        }
#else
    oct a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = *(const oct *)(from + i * from_stride);
    UNROLL for (int i = 0; i < 4; i++) {
        b[2 * i] = SHUFFLE8(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[2 * i + 1] = SHUFFLE8(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = SHUFFLE8(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + 2 * j + 1] = SHUFFLE8(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        *(oct *)(to + i * to_stride) = SHUFFLE8(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(oct *)(to + (i + 4) * to_stride) = SHUFFLE8(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#endif
}

/* Transpose `down` rows of `right` floats. */
TARGET static void NAME(transpose)(const float *from, int64_t from_stride, int64_t down, int64_t right, float *to,
                                   int64_t to_stride) {
    int64_t row = 0;
    for (; row + 8 <= down; row += 8) {
        int64_t column = 0;
        for (; column + 8 <= right; column += 8)
            NAME(transpose8)(from + row * from_stride + column, from_stride, to + column * to_stride + row, to_stride);
        for (; column < right; column++)
            for (int64_t i = row; i < row + 8; i++)
                to[column * to_stride + i] = from[i * from_stride + column];
    }
    for (; row < down; row++)
        for (int64_t column = 0; column < right; column++)
            to[column * to_stride + row] = from[row * from_stride + column];
}

/* Copy up to `wide` tokens into a tile, feature by feature; missing tokens are 0. */
TARGET static void NAME(read_tile)(const struct product *p, int64_t token, int64_t wide, float *tile) {
    int64_t columns = p->matrix.columns_in, tokens = p->tokens - token < wide ? p->tokens - token : wide;
    const float *x = p->x + token * p->x_stride;
    /* 16 columns at a time: full cache lines of the input, and a slice of the tile that fits in the first cache. */
    for (int64_t column = 0; column < columns; column += 16)
        NAME(transpose)(x + column, p->x_stride, tokens, columns - column < 16 ? columns - column : 16,
                        tile + column * wide, wide);
    if (tokens < wide)
        for (int64_t column = 0; column < columns; column++)
            memset(tile + column * wide + tokens, 0, (wide - tokens) * sizeof(float));
}

/* Write the sums of one row block to the output, token by token. */
TARGET static void NAME(write_tile)(const struct product *p, int64_t token, int64_t wide, int64_t block,
                                    const float *sums) {
    int64_t tokens = p->tokens - token < wide ? p->tokens - token : wide;
    int64_t first = block * ROW_BLOCK, left = p->matrix.rows - first, rows = left < ROW_BLOCK ? left : ROW_BLOCK;
    float *out = p->out + token * p->out_stride + first;
    /* 8 tokens at a time, so that the rows of a token are written together. */
    for (int64_t t = 0; t < tokens; t += 8)
        NAME(transpose)(sums + t, wide, rows, tokens - t < 8 ? tokens - t : 8, out + t * p->out_stride,
                        p->out_stride);
}

/* One row block for one tile of tokens: sums, activation, output. */
TARGET static void NAME(compute)(const struct product *p, int64_t token, int64_t wide, int64_t block, const float *tile,
                                 float *sums) {
    switch (wide / VECTOR) {
    case 1:
        NAME(rows1)(&p->matrix, block, tile, sums);
        break;
    case 2:
        NAME(rows2)(&p->matrix, block, tile, sums);
        break;
    case 4:
        NAME(rows4)(&p->matrix, block, tile, sums);
        break;
#if MOST == 8
    default:
        NAME(rows8)(&p->matrix, block, tile, sums);
#endif
    }
    if (p->activation != NONE)
        NAME(activate)(sums, ROW_BLOCK * wide, p->activation);
    NAME(write_tile)(p, token, wide, block, sums);
}

#undef VEC
#undef INTS
#undef ROWS
#undef VECTOR
#undef MOST
#undef TARGET
#undef NAME
