/* The layers of an encoder in one call. Each computes h = norm₁(out(attention(x)) + x) and then
   norm₂(layerₙ(… layer₁(h)) + h). From one layer to the next the tokens stay in tiles, which are not transposed. A few rows
   go through a layer before the next ones, so that what its products pass on stays in the cache. Included by sparse.c. */

/* Tokens that go through a layer together: at least, and as many as it takes to fill tiles, up to so many. */
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
    const struct encoder *encoder; /* the layer that is computed now */
    const float *x;                /* the tokens, for the first layer; NULL: they are in the tiles */
    float *result;                 /* for the last layer; NULL: the tokens stay in the tiles */
    const struct attention *seen;
    int64_t tokens, features;      /* of a row, and of a token */
    int64_t together, rows;        /* rows that go through a layer together, and that threads take: a multiple of these */
    float *tiles;
    int64_t tile_floats;           /* of a tile */
    int level;
    atomic_int failed;
    atomic_llong taken;
};

static int64_t tile_count(int level, int64_t tokens) { return (tokens + widest(level) - 1) / widest(level); }

/* Tokens to their tiles. What a matrix reads behind their features has to be numbers of ours. */
static void read_tiles(const struct encoding *w, const float *x, int64_t tokens, float *tile) {
    for (int64_t token = 0; token < tokens; token += widest(w->level), tile += w->tile_floats) {
        int64_t wide = tile_width(w->level, tokens - token), used = w->features * wide;
        CALL(w->level, read_tile, (x + token * w->features, w->features, tokens - token, w->features, wide, tile));
        memset(tile + used, 0, (w->tile_floats - used) * sizeof(float));
    }
}

static void write_tiles(const struct encoding *w, const float *tile, int64_t tokens, float *result) {
    for (int64_t token = 0; token < tokens; token += widest(w->level), tile += w->tile_floats) {
        int64_t wide = tile_width(w->level, tokens - token);
        for (int64_t row = 0; row < w->features; row += ROW_BLOCK)
            CALL(w->level, write_tile, (tile + row * wide, wide, tokens - token, w->features - row,
                                        result + token * w->features + row, w->features));
    }
}

/* What follows attention: norm₂(layerₙ(… layer₁(h)) + h) of h = norm₁(out(attended) + x), with x in tiles. */
static int run_onward(const struct encoding *w, const float *attended, int64_t tokens, float *tiles, int threads,
                      parallel gomp_parallel) {
    const struct encoder *e = w->encoder;
    int count = 1 + (int)e->forward_count;
    struct norm first, last;
    struct chain c = {.count = count, .level = w->level, .x = attended, .x_stride = e->out->columns_in,
                      .tokens = tokens, .in_tiles = tiles, .tile_stride = w->tile_floats};
    if (!accept(e->out, c.matrices) || !accept_all(e->forward, count - 1, c.matrices + 1) ||
        !accept_norm(&e->first, w->features, &first) || !accept_norm(&e->last, w->features, &last))
        return BAD_ARRAYS;
    c.after[0] = (struct sum){1, count + 1, &first}; /* + x */
    c.after[count - 1] = (struct sum){1, 1, &last};  /* + h, which lies where the first matrix writes */
    return run_chain(&c, threads, gomp_parallel);
}

/* Queries, keys and values, all heads of one before the next one's, and then the attention of all heads; `q` is memory for
   what the matrices make. */
static int run_apart(const struct encoding *w, const struct inward *in, float *q, int threads, parallel gomp_parallel) {
    struct attention a = in->attention;
    int64_t made = a.heads * a.features, passed = a.heads * a.value_features;
    float *k = q + in->tokens * made, *v = k + in->tokens * made, *outs[] = {q, k, v};
    struct product p = {.outs = outs, .count = 3, .tokens = in->tokens, .level = in->level, .tiles = in->tiles,
                        .tile_stride = in->tile_stride};
    a.q = (struct heads){q, a.queries * made, a.features, made};
    a.k = (struct heads){k, a.keys * made, a.features, made};
    a.v = (struct heads){v, a.keys * passed, a.value_features, passed};
    int failed = run_product(&p, w->encoder->inward, threads, gomp_parallel);
    return failed ? failed : platon_attention(&a, threads, gomp_parallel, in->level);
}

/* The layer for `rows` rows from `first` on. */
static int encode_rows(const struct encoding *w, int64_t first, int64_t rows, int threads, parallel gomp_parallel) {
    const struct encoder *e = w->encoder;
    int64_t tokens = w->tokens, count = rows * tokens, before = first * tokens * w->features;
    int64_t made = e->inward[0]->rows, passed = e->inward[2]->rows;
    float *tiles = w->tiles + first / w->together * tile_count(w->level, w->together * tokens) * w->tile_floats;
    struct inward in = {.attention = *w->seen, .tiles = tiles, .tile_stride = w->tile_floats, .tokens = count,
                        .level = w->level};
    struct attention *a = &in.attention;
    a->mask = mask_from(w->seen, first, 0);
    a->rows = rows, a->heads = e->heads, a->sharing = 1, a->queries = a->keys = tokens;
    a->features = made / e->heads, a->value_features = passed / e->heads, a->scale = 1.0f / sqrtf((float)a->features);
    if (!accept_all(e->inward, 3, in.matrices))
        return BAD_ARRAYS;
    int useful = useful_inward(&in, threads, gomp_parallel);
    float *attended = scratch(TENSORS, (size_t)(count * (useful ? passed : 2 * made + 2 * passed)));
    if (!attended)
        return NO_MEMORY;
    a->out = attended;
    if (w->x)
        read_tiles(w, w->x + before, count, tiles);
    int failed = useful ? run_inward(&in, useful, gomp_parallel)
                        : run_apart(w, &in, attended + count * passed, threads, gomp_parallel);
    failed = failed ? failed : run_onward(w, attended, count, tiles, threads, gomp_parallel);
    if (!failed && w->result)
        write_tiles(w, tiles, count, w->result + before);
    return failed;
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

/* Whether a layer's matrices and norms are sound and fit each other, for tokens of so many features. Adds the cost of
   queries, keys and values, and raises `floats` to what a tile of `lanes` tokens needs that the layer reads and writes. */
static int accept_encoder(const struct encoder *e, int64_t features, int64_t lanes, int64_t *products, int64_t *floats) {
    struct matrix inward[3], out, forward[MOST_MATRICES];
    struct norm norm;
    int64_t made = e->inward[0]->rows, passed = e->inward[2]->rows, last = e->forward_count - 1;
    if (last < 0 || last >= MOST_MATRICES - 1 || !accept_all(e->inward, 3, inward) || !accept(e->out, &out) ||
        !accept_all(e->forward, (int)e->forward_count, forward) || !accept_norm(&e->first, features, &norm) ||
        !accept_norm(&e->last, features, &norm))
        return 0;
    if (e->heads < 1 || made < 1 || passed < 1 || made % e->heads || passed % e->heads || inward[1].rows != made ||
        inward[0].columns_in != features || inward[1].columns_in != features || inward[2].columns_in != features ||
        out.columns_in != passed || out.rows != features || forward[0].columns_in != features ||
        forward[last].rows != features)
        return 0;
    int64_t deepest = forward[last].blocks * ROW_BLOCK;
    for (int i = 0; i < 3; i++) {
        *products += cost(&inward[i], inward[i].blocks);
        deepest = deepest > reach(&inward[i]) ? deepest : reach(&inward[i]);
    }
    *floats = *floats > deepest * lanes ? *floats : deepest * lanes;
    return 1;
}

/* One layer after the other. x and result are [rows * tokens, features], without gaps. The mask, the same for all layers,
   is as in struct attention; `seen` gives its place, its kind and its strides alone. */
int platon_encoder(const struct encoder *const *layers, int count, const float *x, int64_t rows, int64_t tokens,
                   const struct attention *seen, float *result, int threads, parallel gomp_parallel, int level) {
    if (count < 1)
        return BAD_ARRAYS;
    struct encoding w = {.seen = seen, .tokens = tokens, .features = layers[0]->inward[0]->columns_in, .level = level};
    int64_t products = 0, lanes = lanes_for(level, rows * tokens);
    for (int i = 0; i < count; i++)
        if (!accept_encoder(layers[i], w.features, lanes, &products, &w.tile_floats))
            return BAD_ARRAYS;
    if (rows <= 0 || tokens <= 0)
        return DONE;
    w.together = rows_together(tokens, level);
    /* As many rows as are the same work for every thread; all threads share what is left. */
    int useful = useful_threads(threads, gomp_parallel, products / count * rows * tokens);
    w.rows = rows / (w.together * useful) * w.together * useful;
    int64_t left = rows - w.rows, groups = w.rows / w.together;
    int64_t tiles = groups * tile_count(level, w.together * tokens) + tile_count(level, left * tokens);
    w.tile_floats = padded(w.tile_floats);
    w.tiles = aligned_alloc(64, (size_t)(tiles * w.tile_floats) * sizeof(float));
    int failed = w.tiles ? DONE : NO_MEMORY;
    for (int i = 0; i < count && !failed; i++) {
        w.encoder = layers[i], w.x = i ? NULL : x, w.result = i + 1 < count ? NULL : result;
        atomic_store(&w.taken, 0);
        if (useful > 1 && w.rows)
            gomp_parallel(run_rows, &w, (unsigned)useful, 0);
        else
            run_rows(&w);
        failed = atomic_load(&w.failed);
        if (left && !failed)
            failed = encode_rows(&w, w.rows, left, threads, gomp_parallel);
    }
    free(w.tiles);
    return failed;
}
