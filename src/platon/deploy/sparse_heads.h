/* Attention of all heads, one after the other on each thread; included by sparse.c. */

struct attending {
    const struct attention *attention;
    int level, threads;
    int64_t together; /* heads that a thread computes one after the other */
    int64_t floats;   /* of one thread's scratch memory */
    float *scratch;
    atomic_int arrived;
    atomic_llong taken;
};

static void run_heads(void *data) {
    struct attending *work = data;
    int self = atomic_fetch_add(&work->arrived, 1);
    if (self >= work->threads)
        return;
    const struct attention *a = work->attention;
    int64_t out_token = a->heads * a->value_features;
    for (int64_t item; (item = atomic_fetch_add(&work->taken, work->together)) < a->rows * a->heads;)
        for (int64_t i = item; i < item + work->together; i++)
            CALL(work->level, attend, (a, i / a->heads, i % a->heads, out_token, work->scratch + self * work->floats));
}

/* Whether all queries of a row see the same keys, as they do where a mask is for padding. */
static int is_same_for_queries(const struct attention *a) {
    if (a->mask_kind != FLAGS || a->mask_head || a->mask_key != 1)
        return 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const uint8_t *first = (const uint8_t *)a->mask + row * a->mask_row;
        for (int64_t query = 1; query < a->queries; query++)
            if (memcmp(first, first + query * a->mask_query, a->keys))
                return 0;
    }
    return 1;
}

/* The mask from one of its rows and heads on. */
static const void *mask_from(const struct attention *a, int64_t row, int64_t head) {
    int64_t size = a->mask_kind == NUMBERS ? sizeof(float) : 1;
    return !a->mask ? NULL : (const char *)a->mask + (row * a->mask_row + head * a->mask_head) * size;
}

/* Scratch memory for one head, in floats. */
static int64_t attention_floats(const struct attention *a) {
    int64_t wide = padded(a->keys), deep = padded(a->value_features);
    return padded(a->features * wide + a->keys * deep + QUERIES * (2 * wide + a->features + deep));
}

/* Multiplications of all heads. */
static int64_t attention_cost(const struct attention *a) {
    return a->rows * a->heads * a->queries * a->keys * (a->features + a->value_features);
}

/* Prepare what `attend` takes; 0: there is nothing that it could compute. */
static int accept_attention(struct attention *a) {
    if (a->rows <= 0 || a->heads <= 0 || a->queries <= 0 || a->keys <= 0 || a->features <= 0 || a->value_features <= 0 ||
        a->sharing <= 0)
        return 0;
    a->scale *= LOG2E;
    if (a->mask_kind == CAUSAL)
        a->mask_query = 1; /* each query has a mask of its own */
    else if (a->mask_query && is_same_for_queries(a))
        a->mask_query = 0;
    return 1;
}

/* out = softmax(scale · q kᵀ + mask) v for every row and head; 0 where a query sees no key. */
int platon_attention(const struct attention *given, int threads, parallel gomp_parallel, int level) {
    struct attention a = *given;
    if (!accept_attention(&a))
        return BAD_ARRAYS;
    struct attending work = {.attention = &a, .level = level, .floats = attention_floats(&a)};
    work.threads = useful_threads(threads, gomp_parallel, attention_cost(&a));
    /* The heads of a row share cache lines and each loads the next one's features, unless the rows are too few. */
    work.together = a.rows < 2 * work.threads ? 1 : a.heads;
    work.scratch = scratch(TILES, (size_t)work.threads * work.floats);
    if (!work.scratch)
        return NO_MEMORY;
    if (work.threads > 1)
        gomp_parallel(run_heads, &work, (unsigned)work.threads, 0);
    else
        run_heads(&work);
    return DONE;
}
