/* The sum with a second input and layer normalisation, on a tile; included by sparse_level.h. */

/* tile += other, for `count` floats. */
TARGET static void NAME(add_tile)(float *restrict tile, const float *restrict other, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        tile[i] += other[i];
}

/* Layer normalisation of each token over `rows` features: (x - mean) / sqrt(variance + epsilon) * weight + bias. The
   tokens of a feature are side by side, so sums over features need no sums over a vector. COUNT vectors of ONE at once;
   `wide` floats lie between two features. */
#define NORM(NAME_, ONE, COUNT)                                                                                       \
    TARGET APART static void NAME_(float *tile, int64_t rows, int64_t wide, const struct norm *norm) {                \
        ONE mean[COUNT], scale[COUNT];                                                                                \
        UNROLL for (int v = 0; v < COUNT; v++) mean[v] = scale[v] = (ONE){0};                                         \
        for (int64_t row = 0; row < rows; row++)                                                                      \
            UNROLL for (int v = 0; v < COUNT; v++) mean[v] += ((const ONE *)(tile + row * wide))[v];                  \
        UNROLL for (int v = 0; v < COUNT; v++) mean[v] /= (float)rows;                                                \
        for (int64_t row = 0; row < rows; row++)                                                                      \
            UNROLL for (int v = 0; v < COUNT; v++) {                                                                  \
                ONE apart = ((const ONE *)(tile + row * wide))[v] - mean[v];                                          \
                scale[v] += apart * apart;                                                                            \
            }                                                                                                         \
        float *each = (float *)scale;                                                                                 \
        for (size_t i = 0; i < COUNT * (sizeof(ONE) / sizeof(float)); i++)                                             \
            each[i] = 1.0f / sqrtf(each[i] / (float)rows + norm->epsilon);                                            \
        for (int64_t row = 0; row < rows; row++) {                                                                    \
            float weight = norm->weight ? norm->weight[row] : 1.0f, bias = norm->bias ? norm->bias[row] : 0.0f;       \
            UNROLL for (int v = 0; v < COUNT; v++) {                                                                  \
                ONE *x = (ONE *)(tile + row * wide) + v;                                                              \
                *x = (*x - mean[v]) * scale[v] * weight + bias;                                                       \
            }                                                                                                         \
        }                                                                                                             \
    }

NORM(NAME(norm_of_one_token), float, 1)
NORM(NAME(norm1), VEC, 1)
NORM(NAME(norm2), VEC, 2)
NORM(NAME(norm4), VEC, 4)

TARGET static void NAME(norm_tile)(float *tile, int64_t rows, int64_t wide, const struct norm *norm) {
    if (wide < VECTOR)
        NAME(norm_of_one_token)(tile, rows, wide, norm);
    else if (wide == VECTOR)
        NAME(norm1)(tile, rows, wide, norm);
    else if (wide == 2 * VECTOR)
        NAME(norm2)(tile, rows, wide, norm);
    else
        for (int64_t token = 0; token < wide; token += 4 * VECTOR)
            NAME(norm4)(tile + token, rows, wide, norm);
}

#undef NORM
