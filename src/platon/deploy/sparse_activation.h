/* Activations of vectors of sums, for one vector width; included by sparse_level.h. */

/* `one` where `which` is all ones, `other` where it is zero. */
TARGET INLINE static VEC NAME(choose)(INTS which, VEC one, VEC other) {
    return (VEC)((which & (INTS)one) | (~which & (INTS)other));
}

/* Of two numbers the smaller, `b` where `a` is NaN, and the larger, `a` where one of them is NaN; the nearest whole number
   of one that is not above 0; and y times 2 to the power of a whole number, y itself if it is NaN. AVX-512 has an
   instruction for each. */
#if VECTOR == 16 && !defined(LOWERED)
#define LEAST(a, b) (VEC) _mm512_min_ps((__m512)(a), (__m512)(b))
#define MOST_OF(a, b) (VEC) _mm512_max_ps((__m512)(b), (__m512)(a))
#define WHOLE(x) (VEC) _mm512_roundscale_ps((__m512)(x), _MM_FROUND_TO_NEAREST_INT)
#define SCALED(y, whole) (VEC) _mm512_scalef_ps((__m512)(y), (__m512)(whole))
#else
#define LEAST(a, b) NAME(choose)((a) < (b), a, b)
#define MOST_OF(a, b) NAME(choose)((a) < (b), b, a)
#define WHOLE(x) __builtin_convertvector(__builtin_convertvector((x)-0.5f, INTS), VEC)
#define SCALED(y, whole) (VEC)((BITS)(y) + ((BITS)__builtin_convertvector(whole, INTS) << 23))
#endif

TARGET static inline VEC NAME(absolute)(VEC x) { return (VEC)((INTS)x & 0x7fffffff); }

/* 2^x for x from -126 to 0. */
TARGET static inline VEC NAME(power)(VEC x) {
    VEC whole = WHOLE(x), fraction = x - whole;
    VEC y = (VEC){0} + 1.32669706e-3f;
    y = y * fraction + 9.67545994e-3f;
    y = y * fraction + 5.55074252e-2f;
    y = y * fraction + 0.240221217f;
    y = y * fraction + 0.693146944f;
    y = y * fraction + 1.00000012f;
    return SCALED(y, whole);
}

/* x Φ(x) = max(x, 0) - t Φ(-t), t = |x|. The polynomial is log2 Φ(-t), fitted up to 7.5, where t Φ(-t) is 2e-13. */
TARGET static inline VEC NAME(gelu)(VEC x) {
    VEC size = NAME(absolute)(x), t = LEAST(size, (VEC){0} + 7.5f);
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
    VEC size = NAME(absolute)(x), t = LEAST(size, (VEC){0} + 7.5f);
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
