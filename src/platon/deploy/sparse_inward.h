/* Queries, keys and values of a few heads at a time, and at once their attention: what a thread makes it reads itself, while
   it is in its cache, and no other core has to fetch it. Included by sparse.c. */

struct inward {
    struct matrix matrices[3];  /* that make queries, keys and values */
    struct attention attention; /* of all heads; a group of them reads what its thread has made */
    const float *tiles;         /* of the tokens, `tile_stride` floats apart */
    int64_t tile_stride, tokens, lanes;
    int64_t heads, groups; /* heads in a group, whose features begin with a row block in every matrix; how many groups */
    int level, threads;
    int64_t floats; /* of one thread's scratch memory */
    float *scratch;
    atomic_int arrived;
    atomic_llong taken;
};

static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

/* The fewest heads with so many features each that the next head begins with a row block. */
static int64_t heads_in_blocks(int64_t features) { return ROW_BLOCK / common_divisor(features, ROW_BLOCK); }

/* Features of a token that a group makes with a matrix. */
static int64_t group_features(const struct inward *in, int matrix) {
    return in->heads * (matrix < 2 ? in->attention.features : in->attention.value_features);
}

/* What the matrices make for a group, token by token. Two tiles are computed with a row block before the next one. */
static void make_group(const struct inward *in, int64_t group, float *const *made, float *sums) {
    int64_t most = widest(in->level), tiles = (in->tokens + most - 1) / most, together = abreast(in->matrices, in->lanes);
    for (int64_t begin = 0; begin < tiles; begin += together)
        for (int i = 0; i < 3; i++) {
            const struct matrix *m = &in->matrices[i];
            int64_t features = group_features(in, i), first = group * features / ROW_BLOCK;
            int64_t end = first + (features + ROW_BLOCK - 1) / ROW_BLOCK;
            for (int64_t block = first; block < end && block < m->blocks; block++)
                for (int64_t tile = begin; tile < begin + together && tile < tiles; tile++) {
                    int64_t token = tile * most, left = in->tokens - token, wide = tile_width(in->level, left);
                    float *out = made[i] + token * features + (block - first) * ROW_BLOCK;
                    CALL(in->level, compute, (m, block, wide, in->tiles + tile * in->tile_stride, sums));
                    CALL(in->level, write_tile, (sums, wide, left, m->rows - block * ROW_BLOCK, out, features));
                }
        }
}

static void run_group(const struct inward *in, int64_t group, float *memory) {
    struct attention a = in->attention;
    int64_t first = group * in->heads, stride = a.heads * a.value_features;
    float *made[3], *sums = memory;
    memory += ROW_BLOCK * in->lanes;
    for (int i = 0; i < 3; memory += in->tokens * group_features(in, i++))
        made[i] = memory;
    make_group(in, group, made, sums);
    struct heads *read[] = {&a.q, &a.k, &a.v};
    for (int i = 0; i < 3; i++) {
        int64_t features = group_features(in, i);
        *read[i] = (struct heads){made[i], a.queries * features, features / in->heads, features};
    }
    a.heads = a.heads - first < in->heads ? a.heads - first : in->heads;
    a.mask = mask_from(&a, 0, first);
    a.out += first * a.value_features;
    for (int64_t row = 0; row < a.rows; row++)
        for (int64_t head = 0; head < a.heads; head++)
            CALL(in->level, attend, (&a, row, head, stride, memory));
}

static void run_groups(void *data) {
    struct inward *in = data;
    int self = atomic_fetch_add(&in->arrived, 1);
    if (self >= in->threads)
        return;
    float *memory = in->scratch + self * in->floats;
    memset(memory, 0, ROW_BLOCK * in->lanes * sizeof(float)); /* damaged arrays can leave out rows */
    for (int64_t group; (group = atomic_fetch_add(&in->taken, 1)) < in->groups;)
        run_group(in, group, memory);
}

/* Divide the heads into groups. How many threads they keep busy; 0: so few groups would leave some with nothing to do. */
static int useful_inward(struct inward *in, int threads, parallel gomp_parallel) {
    const struct attention *a = &in->attention;
    int64_t own = heads_in_blocks(a->features), other = heads_in_blocks(a->value_features); /* powers of 2 */
    int64_t whole = own > other ? own : other;
    in->heads = whole < a->heads ? whole : a->heads;
    in->groups = (a->heads + in->heads - 1) / in->heads;
    int64_t products = attention_cost(a);
    for (int i = 0; i < 3; i++)
        products += cost(&in->matrices[i], in->matrices[i].blocks) * in->tokens;
    threads = useful_threads(threads, gomp_parallel, products);
    return threads == 1 || in->groups >= 2 * threads ? threads : 0;
}

/* Compute the attention of all heads from the tokens in tiles. */
static int run_inward(struct inward *in, int threads, parallel gomp_parallel) {
    if (!accept_attention(&in->attention))
        return BAD_ARRAYS;
    in->lanes = lanes_for(in->level, in->tokens);
    in->threads = threads;
    in->floats = ROW_BLOCK * in->lanes + attention_floats(&in->attention);
    for (int i = 0; i < 3; i++)
        in->floats += in->tokens * group_features(in, i);
    in->floats = padded(in->floats);
    in->scratch = scratch(TILES, (size_t)threads * in->floats);
    if (!in->scratch)
        return NO_MEMORY;
    if (threads > 1)
        gomp_parallel(run_groups, in, (unsigned)threads, 0);
    else
        run_groups(in);
    return DONE;
}
