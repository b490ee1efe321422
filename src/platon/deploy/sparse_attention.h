/* Attention of one head, for one vector width: softmax(q kᵀ + mask) v; included by sparse_level.h.

   QUERIES queries are computed at a time, from their scores for all keys to their output, so that the scores stay in the
   first-level cache. Queries are multiplied by log2(e) besides the scale, because 2^x takes less work than e^x. */

/* Vectors in a row of sums: with QUERIES rows, as many as there are registers for. */
#if VECTOR == 16
#define SIDE 4
#else
#define SIDE 2
#endif

/* out = left × right, for QUERIES rows of `left` and some vectors of the columns of `right`. `stride` floats lie between two
   rows of `right`, and of `out`. */
TARGET INLINE static void NAME(product_of)(const int vectors, const float *left, int64_t left_stride, const float *right,
                                           int64_t stride, int64_t length, float *out) {
    VEC sum[QUERIES][SIDE];
    UNROLL for (int q = 0; q < QUERIES; q++)
        UNROLL for (int v = 0; v < vectors; v++) sum[q][v] = (VEC){0};
    for (int64_t i = 0; i < length; i++)
        UNROLL for (int q = 0; q < QUERIES; q++)
            UNROLL for (int v = 0; v < vectors; v++)
                sum[q][v] += left[q * left_stride + i] * ((const VEC *)(right + i * stride))[v];
    UNROLL for (int q = 0; q < QUERIES; q++)
        UNROLL for (int v = 0; v < vectors; v++) ((VEC *)(out + q * stride))[v] = sum[q][v];
}

/* The same for so many columns, a multiple of VECTOR. */
TARGET APART static void NAME(product)(const float *left, int64_t left_stride, const float *right, int64_t stride,
                                       int64_t columns, int64_t length, float *out) {
    int64_t at = 0;
    for (; at + SIDE * VECTOR <= columns; at += SIDE * VECTOR)
        NAME(product_of)(SIDE, left, left_stride, right + at, stride, length, out + at);
    for (; at + 2 * VECTOR <= columns; at += 2 * VECTOR)
        NAME(product_of)(2, left, left_stride, right + at, stride, length, out + at);
    for (; at < columns; at += VECTOR)
        NAME(product_of)(1, left, left_stride, right + at, stride, length, out + at);
}

/* The largest of the lanes of a vector, and their sum. */
TARGET INLINE static float NAME(largest)(VEC v) {
    const quad *part = (const quad *)&v;
    quad most = part[0];
    UNROLL for (int i = 1; i < VECTOR / 4; i++) UNROLL for (int j = 0; j < 4; j++) most[j] =
        part[i][j] > most[j] ? part[i][j] : most[j];
    float left = most[0] > most[1] ? most[0] : most[1], right = most[2] > most[3] ? most[2] : most[3];
    return left > right ? left : right;
}

TARGET INLINE static float NAME(total)(VEC v) {
    const quad *part = (const quad *)&v;
    quad sum = part[0];
    UNROLL for (int i = 1; i < VECTOR / 4; i++) sum += part[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* For each of QUERIES rows of `count` scores: scores = 2^(scores + mask - the row's largest), and their sum. A row is 0 if
   its mask leaves no key. `stride` floats lie between two rows, `step` between their masks. */
TARGET APART static void NAME(exponentials)(float *scores, int64_t stride, int64_t count, const float *mask, int64_t step,
                                            float *sums) {
    const VEC lowest = (VEC){0} - 126.0f;
    float largest[QUERIES];
    VEC most[QUERIES], sum[QUERIES];
    UNROLL for (int q = 0; q < QUERIES; q++) most[q] = (VEC){0} - INFINITY, sum[q] = (VEC){0};
    for (int64_t i = 0; i < count; i += VECTOR)
        UNROLL for (int q = 0; q < QUERIES; q++) {
            VEC *at = (VEC *)(scores + q * stride + i), score = *at + *(const VEC *)(mask + q * step + i);
            most[q] = MOST_OF(most[q], score); /* one that is NaN is passed over, and makes the sum NaN */
            *at = score;
        }
    UNROLL for (int q = 0; q < QUERIES; q++) {
        largest[q] = NAME(largest)(most[q]);
        largest[q] = largest[q] < -FLT_MAX ? 0 : largest[q];
    }
    for (int64_t i = 0; i < count; i += VECTOR)
        UNROLL for (int q = 0; q < QUERIES; q++) {
            VEC *at = (VEC *)(scores + q * stride + i), score = *at - largest[q];
            INTS there = ~(score < lowest);
            *at = (VEC)((INTS)NAME(power)(MOST_OF(score, lowest)) & there);
            sum[q] += *at;
        }
    UNROLL for (int q = 0; q < QUERIES; q++) sums[q] = NAME(total)(sum[q]);
}

/* What is added to the scores of a query for the first `count` keys, or places behind the last key: -infinity for those that
   it does not see. */
TARGET static void NAME(read_mask)(const struct attention *a, int64_t row, int64_t head, int64_t query, int64_t count,
                                   float *mask) {
    int64_t first = row * a->mask_row + head * a->mask_head + query * a->mask_query, step = a->mask_key;
    const uint8_t *flags = a->mask;
    const float *numbers = a->mask;
    int64_t keys = a->keys < count ? a->keys : count;
    if (a->mask_kind == NO_MASK)
        memset(mask, 0, keys * sizeof(float));
    else if (a->mask_kind == CAUSAL)
        for (int64_t i = 0; i < keys; i++)
            mask[i] = i <= query ? 0 : -INFINITY;
    else if (a->mask_kind == FLAGS)
        for (int64_t i = 0; i < keys; i++)
            mask[i] = flags[first + i * step] ? 0 : -INFINITY;
    else
        for (int64_t i = 0; i < keys; i++) {
            /* The lowest float, which many masks have, must not become -infinity: a query that sees no key at all sees
               all of them alike then. */
            float number = numbers[first + i * step], scaled = number * LOG2E;
            mask[i] = scaled < -FLT_MAX && number >= -FLT_MAX ? -FLT_MAX : scaled;
        }
    for (int64_t i = keys; i < count; i++)
        mask[i] = -INFINITY;
}

/* Load what a head reads for some tokens into the second-level cache. Its tokens are too far apart for the hardware. */
TARGET INLINE static void NAME(prefetch)(const struct heads *of, int64_t row, int64_t head, int64_t token, int64_t features) {
    const float *data = of->data + row * of->row + head * of->head + token * of->token;
    for (int64_t i = 0; i < features; i += 16)
        __builtin_prefetch(data + i, 0, 2);
}

/* `out_token` floats lie between the outputs of two tokens. */
TARGET static void NAME(attend)(const struct attention *a, int64_t row, int64_t head, int64_t out_token, float *memory) {
    const int64_t features = a->features, keys = a->keys, wide = padded(keys), deep = padded(a->value_features);
    float *key = memory, *value = key + features * wide, *scores = value + keys * deep, *mask = scores + QUERIES * wide;
    float *query = mask + QUERIES * wide, *out = query + QUERIES * features, sums[QUERIES];
    const int64_t shared = head / a->sharing, next = (head + 1) / a->sharing;
    NAME(transpose)(a->k.data + row * a->k.row + shared * a->k.head, a->k.token, keys, features, key, wide);
    for (int64_t i = 0; i < features; i++)
        memset(key + i * wide + keys, 0, (wide - keys) * sizeof(float));
    for (int64_t i = 0; i < keys; i++) {
        memcpy(value + i * deep, a->v.data + row * a->v.row + shared * a->v.head + i * a->v.token,
               a->value_features * sizeof(float));
        memset(value + i * deep + a->value_features, 0, (deep - a->value_features) * sizeof(float));
    }
    for (int64_t first = 0; first < a->queries; first += QUERIES) {
        int64_t count = a->queries - first < QUERIES ? a->queries - first : QUERIES;
        /* The keys that one of these queries sees, and as many as fill a vector. */
        int64_t seen = a->mask_kind == CAUSAL && first + QUERIES < keys ? first + QUERIES : keys, filled = padded(seen);
        for (int64_t q = 0; q < QUERIES; q++) {
            const float *from = a->q.data + row * a->q.row + head * a->q.head +
                                (first + (q < count ? q : count - 1)) * a->q.token;
            for (int64_t i = 0; i < features; i++)
                query[q * features + i] = from[i] * a->scale;
        }
        for (int64_t token = first; head + 1 < a->heads && token < first + QUERIES && token < keys; token++) {
            NAME(prefetch)(&a->k, row, next, token, features);
            NAME(prefetch)(&a->v, row, next, token, a->value_features);
        }
        NAME(product)(query, features, key, wide, filled, features, scores);
        if (a->mask_query || !first)
            for (int64_t q = 0; q < (a->mask_query ? QUERIES : 1); q++)
                NAME(read_mask)(a, row, head, first + (q < count ? q : count - 1), filled, mask + q * wide);
        NAME(exponentials)(scores, wide, filled, mask, a->mask_query ? wide : 0, sums);
        NAME(product)(scores, wide, value, deep, deep, seen, out);
        for (int64_t q = 0; q < count; q++) {
            float *to = a->out + (row * a->queries + first + q) * out_token + head * a->value_features;
            float factor = sums[q] == 0 ? 0 : 1 / sums[q];
            for (int64_t i = 0; i < a->value_features; i++)
                to[i] = out[q * deep + i] * factor;
        }
    }
}

#undef SIDE
