/* A whole encoder layer in one call: h = norm₁(out(attention(x)) + x), result = norm₂(layerₙ(… layer₁(h)) + h). What is
   passed on between its products stays in memory that the thread keeps. Included by sparse.c. */

struct affine {
    const float *weight;
    int64_t weight_bytes;
    const float *bias;
    int64_t bias_bytes;
    float epsilon;
};

struct encoder {
    const struct layer *inward[3]; /* that make queries, keys and values */
    const struct layer *out;
    const struct layer *forward[MOST_MATRICES];
    int64_t forward_count, heads;
    struct affine first, last;
};

/* x and result are [rows * tokens, features], without gaps. The mask is as in struct attention; `seen` gives its place,
   its kind and its strides alone. */
int platon_encoder(const struct encoder *e, const float *x, int64_t rows, int64_t tokens, const struct attention *seen,
                   float *result, int threads, parallel gomp_parallel, int level) {
    int64_t count = rows * tokens, features = e->inward[0]->columns_in;
    int64_t made = e->inward[0]->rows, passed = e->inward[2]->rows;
    struct matrix inward[3];
    if (!accept_all(e->inward, 3, inward)) /* their sizes decide about memory */
        return BAD_ARRAYS;
    if (e->heads < 1 || made < 1 || passed < 1 || made % e->heads || passed % e->heads || e->inward[1]->rows != made ||
        e->inward[1]->columns_in != features || e->inward[2]->columns_in != features || e->out->columns_in != passed ||
        e->out->rows != features || e->forward_count < 1 || e->forward_count > MOST_MATRICES ||
        e->forward[0]->columns_in != features || e->forward[e->forward_count - 1]->rows != features)
        return BAD_ARRAYS;
    if (count <= 0)
        return DONE;
    float *q = scratch(TENSORS, (size_t)(count * (2 * made + 2 * passed + features)));
    if (!q)
        return NO_MEMORY;
    float *k = q + count * made, *v = k + count * made, *attended = v + count * passed, *middle = attended + count * passed;
    float *outs[] = {q, k, v};
    struct attention a = *seen;
    int64_t own = made / e->heads, value_own = passed / e->heads;
    a.q = (struct heads){q, tokens * made, own, made};
    a.k = (struct heads){k, tokens * made, own, made};
    a.v = (struct heads){v, tokens * passed, value_own, passed};
    a.rows = rows, a.heads = e->heads, a.queries = a.keys = tokens, a.features = own, a.value_features = value_own;
    a.out = attended, a.scale = 1.0f / sqrtf((float)own);
    int failed = platon_sparse_linears(x, count, features, e->inward, 3, outs, threads, gomp_parallel, level);
    failed = failed ? failed : platon_attention(&a, threads, gomp_parallel, level);
    failed = failed ? failed
                    : platon_sparse_chain(attended, count, passed, &e->out, 1, x, features, 1, e->first.weight,
                                          e->first.weight_bytes, e->first.bias, e->first.bias_bytes, e->first.epsilon,
                                          middle, threads, gomp_parallel, level);
    return failed ? failed
                  : platon_sparse_chain(middle, count, features, e->forward, (int)e->forward_count, middle, features, 1,
                                        e->last.weight, e->last.weight_bytes, e->last.bias, e->last.bias_bytes,
                                        e->last.epsilon, result, threads, gomp_parallel, level);
}
