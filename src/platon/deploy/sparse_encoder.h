/* A whole encoder layer in one call: h = norm₁(out(attention(x)) + x), result = norm₂(layerₙ(… layer₁(h)) + h). A few
   rows go through all of it before the next ones, so that what its products pass on stays in the cache. Included by
   sparse.c. */

/* Tokens that go through the layer together: at least, and as many as it takes to fill tiles, up to so many. */
#define FEW_TOKENS 128
#define MANY_TOKENS 512

struct encoder {
    const struct layer *inward[3]; /* that make queries, keys and values */
    const struct layer *out;
    const struct layer *forward[MOST_MATRICES - 1];
    int64_t forward_count, heads;
    struct affine first, last;
};

struct encoding {
    const struct encoder *encoder;
    const float *x;
    const struct attention *seen;
    float *result;
    int64_t tokens;         /* of a row */
    int64_t together, rows; /* rows that go through the layer together, and that threads take: a multiple of these */
    int level;
    atomic_int failed;
    atomic_llong taken;
};

/* The mask from one of its rows on. */
static const void *mask_from(const struct attention *a, int64_t row) {
    int64_t size = a->mask_kind == NUMBERS ? sizeof(float) : 1;
    return a->mask_kind == NO_MASK ? NULL : (const char *)a->mask + row * a->mask_row * size;
}

/* What follows attention: norm₂(layerₙ(… layer₁(h)) + h) of h = norm₁(out(attended) + x). */
static int run_onward(const struct encoding *w, const float *attended, const float *x, int64_t tokens, float *result,
                      int threads, parallel gomp_parallel) {
    const struct encoder *e = w->encoder;
    int64_t features = e->out->rows;
    int count = 1 + (int)e->forward_count;
    struct norm first, last;
    struct chain c = {.count = count, .level = w->level, .x = attended, .x_stride = e->out->columns_in, .added = x,
                      .added_stride = features, .added_features = features, .tokens = tokens, .out = result};
    if (!accept(e->out, c.matrices) || !accept_all(e->forward, count - 1, c.matrices + 1) ||
        !accept_norm(&e->first, features, &first) || !accept_norm(&e->last, features, &last))
        return BAD_ARRAYS;
    c.after[0] = (struct sum){1, count + 1, &first};  /* + x, which lies behind what the matrices make */
    c.after[count - 1] = (struct sum){1, 1, &last}; /* + h, which lies where the first matrix writes */
    return run_chain(&c, threads, gomp_parallel);
}

/* The layer for `rows` rows from `first` on. */
static int encode_rows(const struct encoding *w, int64_t first, int64_t rows, int threads, parallel gomp_parallel) {
    const struct encoder *e = w->encoder;
    int64_t tokens = w->tokens, count = rows * tokens, features = e->inward[0]->columns_in;
    int64_t made = e->inward[0]->rows, passed = e->inward[2]->rows;
    const float *x = w->x + first * tokens * features;
    float *q = scratch(TENSORS, (size_t)(count * (2 * made + 2 * passed)));
    if (!q)
        return NO_MEMORY;
    float *k = q + count * made, *v = k + count * made, *attended = v + count * passed, *outs[] = {q, k, v};
    struct attention a = *w->seen;
    int64_t own = made / e->heads, value_own = passed / e->heads;
    a.q = (struct heads){q, tokens * made, own, made};
    a.k = (struct heads){k, tokens * made, own, made};
    a.v = (struct heads){v, tokens * passed, value_own, passed};
    a.mask = mask_from(w->seen, first);
    a.rows = rows, a.heads = e->heads, a.queries = a.keys = tokens, a.features = own, a.value_features = value_own;
    a.out = attended, a.scale = 1.0f / sqrtf((float)own);
    int failed = platon_sparse_linears(x, count, features, e->inward, 3, outs, threads, gomp_parallel, w->level);
    failed = failed ? failed : platon_attention(&a, threads, gomp_parallel, w->level);
    float *result = w->result + first * tokens * features;
    return failed ? failed : run_onward(w, attended, x, count, result, threads, gomp_parallel);
}

/* Run by every thread: some rows at a time. */
static void run_rows(void *data) {
    struct encoding *w = data;
    for (int64_t first; (first = atomic_fetch_add(&w->taken, w->together)) < w->rows;) {
        int failed = encode_rows(w, first, w->together, 1, NULL);
        if (failed)
            atomic_store(&w->failed, failed);
    }
}

/* The fewest rows that fill their tiles of tokens but for a sixteenth of the work. */
static int64_t rows_together(int64_t tokens, int level) {
    int64_t rows = (FEW_TOKENS + tokens - 1) / tokens;
    for (;; rows++) {
        int64_t count = rows * tokens, left = count % widest(level);
        int64_t lost = left ? tile_width(level, left) - left : 0;
        if (16 * lost <= count || count >= MANY_TOKENS)
            return rows;
    }
}

/* x and result are [rows * tokens, features], without gaps. The mask is as in struct attention; `seen` gives its place,
   its kind and its strides alone. */
int platon_encoder(const struct encoder *e, const float *x, int64_t rows, int64_t tokens, const struct attention *seen,
                   float *result, int threads, parallel gomp_parallel, int level) {
    int64_t features = e->inward[0]->columns_in, made = e->inward[0]->rows, passed = e->inward[2]->rows;
    struct matrix inward[3];
    if (!accept_all(e->inward, 3, inward)) /* their sizes decide about memory */
        return BAD_ARRAYS;
    if (e->heads < 1 || made < 1 || passed < 1 || made % e->heads || passed % e->heads || e->inward[1]->rows != made ||
        e->inward[1]->columns_in != features || e->inward[2]->columns_in != features || e->out->columns_in != passed ||
        e->out->rows != features || e->forward_count < 1 || e->forward_count >= MOST_MATRICES ||
        e->forward[0]->columns_in != features || e->forward[e->forward_count - 1]->rows != features)
        return BAD_ARRAYS;
    if (rows <= 0 || tokens <= 0)
        return DONE;
    struct encoding w = {.encoder = e, .x = x, .seen = seen, .result = result, .tokens = tokens, .level = level};
    w.together = rows_together(tokens, level);
    int64_t products = 0;
    for (int i = 0; i < 3; i++)
        products += cost(&inward[i], inward[i].blocks) * rows * tokens;
    /* As many rows as are the same work for every thread; all threads share what is left. */
    int useful = useful_threads(threads, gomp_parallel, products);
    w.rows = rows / (w.together * useful) * w.together * useful;
    if (useful > 1 && w.rows)
        gomp_parallel(run_rows, &w, (unsigned)useful, 0);
    else
        run_rows(&w);
    int failed = atomic_load(&w.failed);
    return failed || w.rows == rows ? failed : encode_rows(&w, w.rows, rows - w.rows, threads, gomp_parallel);
}
