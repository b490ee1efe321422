/* Matrices side by side: all read the same tokens, each has an output of its own. The tokens come as they are in memory,
   one after the other, or in tiles already. Included by sparse.c. */

#define CHUNKS 4 /* of a thread's portion of the work; threads that are done take chunks from the others */

struct product {
    struct matrix matrices[MOST_MATRICES];
    float *const *outs;
    int count;
    int64_t first_block[MOST_MATRICES + 1], first_cost[MOST_MATRICES + 1]; /* of each matrix; the last ones are totals */
    const float *x, *tiles; /* the tokens, or their tiles, `tile_stride` floats apart */
    int64_t tokens, x_stride, tile_stride;
    int level, threads;
    int64_t tile_cost, work; /* the cost of a full tile of tokens, and of everything */
    float *scratch;
    int64_t tile_floats, scratch_floats; /* of one thread: its tile, and all that it has */
    int64_t lanes;                       /* tokens in the widest tile of this call */
    atomic_int arrived;
    atomic_int taken[MOST_THREADS]; /* chunks taken from each thread's portion */
};

/* The first row block, counted over all matrices, that begins at or after this cost. */
static int64_t block_at(const struct product *p, int64_t wanted) {
    int i = 0;
    while (i + 1 < p->count && p->first_cost[i + 1] <= wanted)
        i++;
    int64_t low = 0, high = p->matrices[i].blocks;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (p->first_cost[i] + cost(&p->matrices[i], middle) < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return p->first_block[i] + low;
}

/* Convert a position in the work, 0 to product->work, to a tile and a row block. A narrow last tile costs less than a
   full one, but more than its share of tokens, because every weight is read for it too. */
static void position(const struct product *p, int64_t at, int64_t *tile, int64_t *block) {
    int64_t full = p->tokens / widest(p->level), total = p->first_cost[p->count];
    *tile = at / p->tile_cost < full ? at / p->tile_cost : full;
    int64_t inside = at - *tile * p->tile_cost;
    int64_t scale = *tile < full ? p->tile_cost : p->work - full * p->tile_cost;
    *block = scale ? block_at(p, (int64_t)((double)inside / scale * total)) : 0;
}

/* One row block, counted over all matrices, for a tile. */
static void run_block(const struct product *p, int64_t token, int64_t wide, int64_t block, const float *tile,
                      float *sums) {
    int i = 0;
    while (block >= p->first_block[i + 1])
        i++;
    const struct matrix *m = &p->matrices[i];
    int64_t own = block - p->first_block[i], first = own * ROW_BLOCK, left = p->tokens - token;
    float *out = p->outs[i] + token * m->rows + first;
    CALL(p->level, compute, (m, own, wide, tile, sums));
    CALL(p->level, write_tile, (sums, wide, left, m->rows - first, out, m->rows));
}

/* One chunk of the work. `held` is the tile of tokens that this thread's scratch memory holds, or -1. */
static void run_chunk(const struct product *p, int64_t chunk, int64_t *held, float *tile, float *sums) {
    int64_t chunks = (int64_t)p->threads * CHUNKS, at, block, last_tile, last_block;
    position(p, p->work / chunks * chunk + p->work % chunks * chunk / chunks, &at, &block);
    position(p, p->work / chunks * (chunk + 1) + p->work % chunks * (chunk + 1) / chunks, &last_tile, &last_block);
    for (; at < last_tile || (at == last_tile && block < last_block); at++, block = 0) {
        int64_t token = at * widest(p->level), left = p->tokens - token, wide = tile_width(p->level, left);
        int64_t end = at < last_tile ? p->first_block[p->count] : last_block;
        if (left <= 0)
            return;
        if (!p->tiles && block < end && *held != at)
            CALL(p->level, read_tile,
                 (p->x + token * p->x_stride, p->x_stride, left, p->matrices->columns_in, wide, tile));
        *held = block < end ? at : *held;
        for (; block < end; block++)
            run_block(p, token, wide, block, p->tiles ? p->tiles + at * p->tile_stride : tile, sums);
    }
}

/* Run by every thread: the chunks of its own portion, then those that are left of the others'. All chunks are done even
   if the runtime starts fewer threads than asked for. */
static void work(void *data) {
    struct product *p = data;
    int self = atomic_fetch_add(&p->arrived, 1);
    if (self >= p->threads)
        return;
    float *tile = p->scratch + self * p->scratch_floats, *sums = tile + p->tile_floats;
    /* Damaged arrays can name columns behind the last one, or leave out rows: they must not find foreign memory there. */
    int64_t used = p->tiles ? 0 : p->matrices->columns_in * p->lanes;
    memset(tile + used, 0, (p->scratch_floats - used) * sizeof(float));
    int64_t held = -1;
    for (int i = 0; i < p->threads; i++) {
        int portion = (self + i) % p->threads, chunk;
        while ((chunk = atomic_fetch_add(&p->taken[portion], 1)) < CHUNKS)
            run_chunk(p, (int64_t)portion * CHUNKS + chunk, &held, tile, sums);
    }
}

/* Compute a product whose tokens and outputs are set. */
static int run_product(struct product *p, const struct layer *const *layers, int threads, parallel gomp_parallel) {
    if (!accept_all(layers, p->count, p->matrices))
        return BAD_ARRAYS;
    for (int i = 0; i < p->count; i++) {
        const struct matrix *m = &p->matrices[i];
        if (m->columns_in != p->matrices->columns_in)
            return BAD_ARRAYS;
        p->first_block[i + 1] = p->first_block[i] + m->blocks;
        p->first_cost[i + 1] = p->first_cost[i] + cost(m, m->blocks);
    }
    if (p->tokens <= 0 || !p->first_block[p->count])
        return DONE;
    int64_t most = widest(p->level), full = p->tokens / most, left = p->tokens % most, total = p->first_cost[p->count];
    p->tile_cost = 8 * total;
    p->work = full * p->tile_cost + (left ? total + 7 * total * tile_width(p->level, left) / most : 0);
    p->threads = useful_threads(threads, gomp_parallel, p->work / 8 * most);
    p->lanes = lanes_for(p->level, p->tokens);
    for (int i = 0; i < p->count && !p->tiles; i++) {
        int64_t floats = reach(&p->matrices[i]) * p->lanes;
        p->tile_floats = floats > p->tile_floats ? floats : p->tile_floats;
    }
    p->scratch_floats = (p->tile_floats + ROW_BLOCK * p->lanes + 15) / 16 * 16;
    p->scratch = scratch(TILES, (size_t)p->threads * p->scratch_floats);
    if (!p->scratch)
        return NO_MEMORY;
    if (p->threads > 1)
        gomp_parallel(work, p, (unsigned)p->threads, 0);
    else
        work(p);
    return DONE;
}

/* outs[i] = activation(x Wᵢᵀ + biasᵢ). Returns DONE, NO_MEMORY or BAD_ARRAYS. A token's features are contiguous in `x`,
   `x_stride` floats are between tokens; the outputs are contiguous. `gomp_parallel` may be NULL (one thread); `level` is
   at most platon_level(). */
int platon_sparse_linears(const float *x, int64_t tokens, int64_t x_stride, const struct layer *const *layers,
                          int count, float *const *outs, int threads, parallel gomp_parallel, int level) {
    struct product p = {.outs = outs, .count = count, .x = x, .tokens = tokens, .x_stride = x_stride, .level = level};
    return run_product(&p, layers, threads, gomp_parallel);
}
