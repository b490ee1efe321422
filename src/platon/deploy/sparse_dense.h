/* A dense matrix for a few tokens, as when text is generated: each weight is read once, as fast as memory gives it.
   Included by sparse.c after the levels. */

#define DENSE_ROWS 64 /* that a thread takes at a time */

struct dense {
    const float *x, *weight, *bias; /* [tokens, columns], [rows, columns], [rows] or NULL */
    int64_t tokens, x_stride, rows, columns;
    float *out; /* [tokens, rows] */
    int level, threads;
    atomic_int arrived;
    atomic_llong taken;
};

/* Run by every thread: some rows at a time. */
static void run_dense(void *data) {
    struct dense *d = data;
    if (atomic_fetch_add(&d->arrived, 1) >= d->threads)
        return;
    for (int64_t first; (first = atomic_fetch_add(&d->taken, DENSE_ROWS)) < d->rows;) {
        int64_t end = first + DENSE_ROWS < d->rows ? first + DENSE_ROWS : d->rows;
        for (int64_t row = first; row < end; row++)
            for (int64_t token = 0; token < d->tokens; token++) {
                float sum;
                CALL(d->level, dot, (d->weight + row * d->columns, d->x + token * d->x_stride, d->columns, &sum));
                d->out[token * d->rows + row] = sum + (d->bias ? d->bias[row] : 0.0f);
            }
    }
}

/* out = x Wᵀ + bias, with contiguous rows of W and of the output. */
void platon_dense_linear(const float *x, int64_t tokens, int64_t x_stride, const float *weight, int64_t rows,
                         int64_t columns, const float *bias, float *out, int threads, parallel gomp_parallel,
                         int level) {
    struct dense d = {x, weight, bias, tokens, x_stride, rows, columns, out, .level = level};
    d.threads = useful_threads(threads, gomp_parallel, 8 * rows * columns);
    if (d.threads > 1)
        gomp_parallel(run_dense, &d, (unsigned)d.threads, 0);
    else
        run_dense(&d);
}
