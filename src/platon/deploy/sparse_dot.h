/* One row of a dense matrix times one token, for one vector width; included by sparse_level.h. */

#define DOT_CHAINS 4 /* sums at a time, to hide the latency of an addition */

TARGET static void NAME(dot)(const float *row, const float *x, int64_t columns, float *out) {
    VEC total[DOT_CHAINS];
    int64_t at = 0;
    UNROLL for (int c = 0; c < DOT_CHAINS; c++) total[c] = (VEC){0};
    for (; at + DOT_CHAINS * VECTOR <= columns; at += DOT_CHAINS * VECTOR)
        UNROLL for (int c = 0; c < DOT_CHAINS; c++) {
            int64_t from = at + c * VECTOR;
            ASK_FOR(row + from, FAR_AHEAD);
            total[c] += *(const VEC *)(row + from) * *(const VEC *)(x + from);
        }
    for (; at + VECTOR <= columns; at += VECTOR)
        total[0] += *(const VEC *)(row + at) * *(const VEC *)(x + at);
    float sum = NAME(total)((total[0] + total[1]) + (total[2] + total[3]));
    for (; at < columns; at++)
        sum += row[at] * x[at];
    *out = sum;
}

#undef DOT_CHAINS
