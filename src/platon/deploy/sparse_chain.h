/* Matrices one after the other, with sums and layer normalisations between them. What lies between the first input and
   the last output stays in a tile, which is neither transposed nor written to memory. Included by sparse.c. */

/* What follows a matrix: a sum with what lies at place `from` of the chain, if it adds at all, and a norm or NULL. */
struct sum {
    int adds, from;
    const struct norm *norm;
};

/* Some tokens on their way through the chain. */
struct tile {
    int64_t token, wide; /* the first one, and how many there is room for */
    float *memory;
};

struct chain {
    struct matrix matrices[MOST_MATRICES];
    struct sum after[MOST_MATRICES];
    int count, level, threads;
    const float *x, *added; /* `added` or NULL */
    int64_t tokens, x_stride, added_stride, added_features;
    float *out;
    float *in_tiles;                    /* or NULL: instead of `added` and `out`, tiles that are read and written over */
    int64_t tile_stride;                /* floats from one of these to the next */
    int64_t lanes, tiles;               /* tokens in the widest tile, and tiles */
    int64_t abreast;                    /* tiles that a thread takes at a time */
    int64_t place[MOST_MATRICES + 2];   /* of the input, of what each matrix makes and of `added` in the scratch memory */
    int64_t floats;                     /* of one tile's scratch memory */
    float *scratch;
    atomic_int arrived;
    atomic_llong taken;
    struct tile tile; /* that all threads work on together, */
    int step;         /* and its matrix */
};

/* The tile that begins with `token`. */
static struct tile tile_at(const struct chain *c, int64_t token, float *memory) {
    return (struct tile){token, tile_width(c->level, c->tokens - token), memory};
}

/* What lies at a place of the chain for a tile. */
static float *at_place(const struct chain *c, int place, struct tile t) {
    if (c->in_tiles && place >= c->count)
        return c->in_tiles + t.token / widest(c->level) * c->tile_stride;
    return t.memory + c->place[place];
}

static void compute_block(const struct chain *c, int step, int64_t block, struct tile t) {
    float *sums = at_place(c, step + 1, t) + block * ROW_BLOCK * t.wide;
    CALL(c->level, compute, (&c->matrices[step], block, t.wide, t.memory + c->place[step], sums));
}

static void read_inputs(const struct chain *c, struct tile t) {
    int64_t left = c->tokens - t.token;
    CALL(c->level, read_tile,
         (c->x + t.token * c->x_stride, c->x_stride, left, c->matrices->columns_in, t.wide, t.memory + c->place[0]));
    if (c->added)
        CALL(c->level, read_tile,
             (c->added + t.token * c->added_stride, c->added_stride, left, c->added_features, t.wide,
              t.memory + c->place[c->count + 1]));
}

/* The sum and the norm after a matrix. */
static void finish_step(const struct chain *c, int step, struct tile t) {
    int64_t rows = c->matrices[step].rows;
    const struct sum *sum = &c->after[step];
    float *made = at_place(c, step + 1, t);
    if (sum->adds)
        CALL(c->level, add_tile, (made, at_place(c, sum->from, t), rows * t.wide));
    if (sum->norm)
        CALL(c->level, norm_tile, (made, rows, t.wide, sum->norm));
}

static void write_output(const struct chain *c, struct tile t) {
    int64_t rows = c->in_tiles ? 0 : c->matrices[c->count - 1].rows;
    for (int64_t row = 0; row < rows; row += ROW_BLOCK)
        CALL(c->level, write_tile,
             (t.memory + c->place[c->count] + row * t.wide, t.wide, c->tokens - t.token, rows - row,
              c->out + t.token * rows + row, rows));
}

/* What a matrix reads behind the features that there are has to be numbers of ours, whatever the arrays contain. */
static void clear_ends(const struct chain *c, float *memory) {
    for (int i = 0; i < c->count; i++) {
        int64_t used = (i ? c->matrices[i - 1].rows : c->matrices->columns_in) * c->lanes;
        memset(memory + c->place[i] + used, 0, (c->place[i + 1] - c->place[i] - used) * sizeof(float));
    }
}

/* A matrix, and what follows it, for some tiles. */
static void run_step(const struct chain *c, int step, const struct tile *tiles, int64_t count) {
    int64_t together = abreast(&c->matrices[step], c->lanes);
    for (int64_t first = 0; first < count; first += together)
        for (int64_t block = 0; block < c->matrices[step].blocks; block++)
            for (int64_t i = first; i < first + together && i < count; i++)
                compute_block(c, step, block, tiles[i]);
    for (int64_t i = 0; i < count; i++)
        finish_step(c, step, tiles[i]);
}

/* Run by every thread, each with tiles of its own. */
static void run_tiles(void *data) {
    struct chain *c = data;
    int self = atomic_fetch_add(&c->arrived, 1);
    if (self >= c->threads)
        return;
    float *memory = c->scratch + self * c->abreast * c->floats;
    for (int64_t i = 0; i < c->abreast; i++)
        clear_ends(c, memory + i * c->floats);
    for (int64_t first; (first = atomic_fetch_add(&c->taken, c->abreast)) < c->tiles;) {
        struct tile tiles[ABREAST];
        int64_t count = 0;
        for (; count < c->abreast && first + count < c->tiles; count++)
            tiles[count] = tile_at(c, (first + count) * widest(c->level), memory + count * c->floats);
        for (int64_t i = 0; i < count; i++)
            read_inputs(c, tiles[i]);
        for (int step = 0; step < c->count; step++)
            run_step(c, step, tiles, count);
        for (int64_t i = 0; i < count; i++)
            write_output(c, tiles[i]);
    }
}

/* Run by every thread: row blocks of one matrix for the tile that all of them share. */
static void run_blocks(void *data) {
    struct chain *c = data;
    for (int64_t block; (block = atomic_fetch_add(&c->taken, 1)) < c->matrices[c->step].blocks;)
        compute_block(c, c->step, block, c->tile);
}

static void share_tiles(struct chain *c, parallel gomp_parallel) {
    clear_ends(c, c->scratch);
    for (int64_t token = 0; token < c->tokens; token += widest(c->level)) {
        c->tile = tile_at(c, token, c->scratch);
        read_inputs(c, c->tile);
        for (c->step = 0; c->step < c->count; c->step++) {
            atomic_store(&c->taken, 0);
            gomp_parallel(run_blocks, c, (unsigned)c->threads, 0);
            finish_step(c, c->step, c->tile);
        }
        write_output(c, c->tile);
    }
}

/* Compute a chain whose matrices, sums and tensors are set. */
static int run_chain(struct chain *c, int threads, parallel gomp_parallel) {
    int64_t rows = c->matrices[c->count - 1].rows, products = 0, lanes = widest(c->level);
    for (int i = 1; i < c->count; i++)
        if (c->matrices[i].columns_in != c->matrices[i - 1].rows)
            return BAD_ARRAYS;
    if (c->tokens <= 0 || rows <= 0)
        return DONE;
    c->lanes = lanes_for(c->level, c->tokens);
    c->tiles = (c->tokens + lanes - 1) / lanes;
    for (int i = 0; i <= c->count; i++) {
        int64_t made = i ? c->matrices[i - 1].blocks * ROW_BLOCK : c->matrices->columns_in;
        int64_t read = i < c->count ? reach(&c->matrices[i]) : rows;
        c->place[i + 1] = c->place[i] + (made > read ? made : read) * c->lanes;
        products += i < c->count ? cost(&c->matrices[i], c->matrices[i].blocks) * c->tokens : 0;
    }
    c->floats = c->place[c->count + 1] + (c->added ? c->added_features * c->lanes : 0);
    c->floats = (c->floats + 15) / 16 * 16;
    c->threads = useful_threads(threads, gomp_parallel, products);
    /* With few tiles for many threads some would have nothing to do: then all of them share each tile. */
    int shared = c->tiles < 2 * c->threads && c->tiles % c->threads;
    c->abreast = c->threads == 1 || c->tiles % (ABREAST * c->threads) == 0 ? ABREAST : 1;
    c->scratch = scratch(TILES, (size_t)(shared ? 1 : c->threads * c->abreast) * c->floats);
    if (!c->scratch)
        return NO_MEMORY;
    if (shared)
        share_tiles(c, gomp_parallel);
    else if (c->threads > 1)
        gomp_parallel(run_tiles, c, (unsigned)c->threads, 0);
    else
        run_tiles(c);
    return DONE;
}

/* out = norm(layerₙ(… layer₁(x)) + added), where a layer is activation(x Wᵀ + bias). `added` [tokens, rows of the last
   layer] may be NULL; `has_norm` says whether there is a norm, whose weight and bias may be NULL. Otherwise as
   platon_sparse_linears. */
int platon_sparse_chain(const float *x, int64_t tokens, int64_t x_stride, const struct layer *const *layers, int count,
                        const float *added, int64_t added_stride, int has_norm, const float *weight,
                        int64_t weight_bytes, const float *bias, int64_t bias_bytes, float epsilon, float *out,
                        int threads, parallel gomp_parallel, int level) {
    struct affine given = {weight, weight_bytes, bias, bias_bytes, epsilon};
    struct norm norm;
    struct chain c = {.count = count, .level = level, .x = x, .tokens = tokens, .x_stride = x_stride, .out = out};
    if (!accept_all(layers, count, c.matrices))
        return BAD_ARRAYS;
    int64_t rows = c.matrices[count - 1].rows;
    if (!accept_norm(&given, rows, &norm))
        return BAD_ARRAYS;
    if (added == x && (rows != c.matrices->columns_in || added_stride != x_stride))
        return BAD_ARRAYS; /* the same numbers cannot be both */
    if (added && added != x)
        c.added = added, c.added_stride = added_stride, c.added_features = rows;
    c.after[count - 1] = (struct sum){added != NULL, added == x ? 0 : count + 1, has_norm ? &norm : NULL};
    return run_chain(&c, threads, gomp_parallel);
}
