/* Activations of vectors of sums, for one vector width; included by sparse_level.h. */

/* The smaller of two numbers; `b` where `a` is NaN. */
TARGET static inline VEC NAME(least)(VEC a, VEC b) {
    INTS below = a < b;
    return (VEC)((below & (INTS)a) | (~below & (INTS)b));
}

/* The larger of two numbers; `a` where one of them is NaN. */
TARGET static inline VEC NAME(most_of)(VEC a, VEC b) {
    INTS below = a < b;
    return (VEC)((below & (INTS)b) | (~below & (INTS)a));
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
