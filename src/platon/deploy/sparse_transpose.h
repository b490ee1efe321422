/* Transposes between tokens, feature after feature, and tiles, token after token; included by sparse_level.h. */

/* Transpose 8 × 8 floats, in three rounds of shuffles of pairs. */
TARGET INLINE static void NAME(transpose8)(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
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
TARGET static void NAME(read_tile)(const float *x, int64_t stride, int64_t tokens, int64_t columns, int64_t wide,
                                   float *tile) {
    tokens = tokens < wide ? tokens : wide;
    if (wide == 1) {
        if (columns) /* an array without features may have no address, which memcpy does not allow */
            memcpy(tile, x, columns * sizeof(float));
        return;
    }
    /* 16 columns at a time: full cache lines of the input, and a slice of the tile that fits in the first cache. The
       tokens are far apart, which no hardware prefetcher follows. */
    for (int64_t column = 0; column < columns; column += 16) {
        if (column + 32 < columns)
            for (int64_t t = 0; t < tokens; t++)
                __builtin_prefetch(x + t * stride + column + 32);
        NAME(transpose)(x + column, stride, tokens, columns - column < 16 ? columns - column : 16,
                        tile + column * wide, wide);
    }
    if (tokens < wide)
        for (int64_t column = 0; column < columns; column++)
            memset(tile + column * wide + tokens, 0, (wide - tokens) * sizeof(float));
}

/* Write the sums of up to ROW_BLOCK rows to the output, token by token. */
TARGET static void NAME(write_tile)(const float *sums, int64_t wide, int64_t tokens, int64_t rows, float *out,
                                    int64_t stride) {
    tokens = tokens < wide ? tokens : wide;
    rows = rows < ROW_BLOCK ? rows : ROW_BLOCK;
    if (wide == 1) {
        memcpy(out, sums, rows * sizeof(float));
        return;
    }
    /* 8 tokens at a time, so that the rows of a token are written together. */
    for (int64_t t = 0; t < tokens; t += 8)
        NAME(transpose)(sums + t, wide, rows, tokens - t < 8 ? tokens - t : 8, out + t * stride, stride);
}
