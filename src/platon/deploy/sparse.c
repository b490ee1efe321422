/* A sparse matrix times dense tokens, float32: out = activation(x Wᵀ + bias), x [tokens, columns], out [tokens, rows].

   The matrix lies in blocks of ROW_BLOCK rows, and each of those in parts of `width` <= 256 columns, so that the part
   of a tile that is being read and the sums that are being written stay near the first cache. Inside a part: row by
   row, the rows with most non-zeros first, so that the processor guesses where a row ends; the non-zeros of a row by
   column. A non-zero is a float and a byte (its column in the part); a row of a part is a number: how many, and which.

   No headers but C's own: one build serves every version of PyTorch. Threads are those of the caller's OpenMP runtime,
   whose `GOMP_parallel` is handed in, so that no second pool competes for the cores. */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROW_BLOCK 64
#define PIECES 4 /* of a thread's share of the work: what the others can take from it when they are done */
#define MOST_THREADS 256
enum { NONE, GELU, GELU_TANH, RELU };
enum { BASELINE, AVX2, AVX512 };

#define UNROLL _Pragma("GCC unroll 8")
#define APART __attribute__((noinline)) /* by itself, a loop keeps its pointers in registers */

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float oct __attribute__((vector_size(32), aligned(4), may_alias));
#ifdef __clang__
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t quad_index __attribute__((vector_size(16)));
typedef int32_t oct_index __attribute__((vector_size(32)));
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (quad_index){__VA_ARGS__})
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (oct_index){__VA_ARGS__})
#endif

struct matrix {
    const float *values;
    const uint8_t *columns;
    const uint16_t *counts; /* [block of rows][part][row]: 64 non-zeros + row, most first */
    const int64_t *starts;  /* [block of rows + 1]: its first value */
    const float *bias;      /* or NULL */
    int64_t rows, columns_in, width, parts, blocks;
};

struct job {
    struct matrix matrix;
    const float *x;
    float *out;
    int64_t tokens, x_stride, out_stride;
    int activation, level, threads;
    int64_t tile_cost, work; /* of a full tile; of everything */
    float *scratch;
    int64_t scratch_each;
    atomic_int arrived;
    atomic_int taken[MOST_THREADS]; /* pieces of each thread's share */
};

#define PASTE(a, b) a##_##b
#define VECTOR 4
#define MOST 8
#define TARGET
#define NAME(x) PASTE(x, baseline)
#include "sparse_tile.h"

#ifdef __x86_64__
#define VECTOR 8
#define MOST 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(x) PASTE(x, avx2)
#include "sparse_tile.h"

/* Four vectors of 16 floats hold the same 64 tokens. The macro lets a machine without AVX-512 run this variant, lowered
   to what it has. */
#ifndef WIDEST
#define WIDEST "avx512f,avx512vl,avx2,fma"
#endif
#define VECTOR 16
#define MOST 4
#define TARGET __attribute__((target(WIDEST)))
#define NAME(x) PASTE(x, avx512)
#include "sparse_tile.h"
#endif

#ifdef __x86_64__
#define CALL(level, name, arguments)                                                                                  \
    ((level) == AVX512 ? name##_avx512 arguments : (level) == AVX2 ? name##_avx2 arguments : name##_baseline arguments)
#else
#define CALL(level, name, arguments) name##_baseline arguments
#endif

/* What the library was built from: a build that is older than the sources beside it is not used. */
#ifndef DIGEST
#define DIGEST ""
#endif
const char *platon_digest(void) { return DIGEST; }

/* The best level that this processor runs. */
int platon_level(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return BASELINE;
}

static int64_t widest(int level) { return level == BASELINE ? 32 : 64; }

/* The narrowest tile that takes all of the tokens that are left, or the widest. */
static int64_t tile_width(int level, int64_t left) {
    int64_t wide = level == BASELINE ? 4 : level == AVX2 ? 8 : 16;
    while (wide < widest(level) && wide < left)
        wide *= 2;
    return wide;
}

/* What the first `block` blocks of rows cost, in non-zeros: each, its counts and sums, and its writing. */
static int64_t cost(const struct matrix *m, int64_t block) {
    return m->starts[block] + block * ROW_BLOCK * (2 * m->parts + 4);
}

/* The first block of rows that begins at or after this cost. */
static int64_t block_at(const struct matrix *m, int64_t wanted) {
    int64_t low = 0, high = m->blocks;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (cost(m, middle) < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A point of the work, 0 to job->work, as tile and block of rows. A narrow last tile costs less than a full one, but
   more than its share, because every weight is read for it all the same. */
static void point(const struct job *job, int64_t at, int64_t *tile, int64_t *block) {
    int64_t full = job->tokens / widest(job->level), total = cost(&job->matrix, job->matrix.blocks);
    *tile = at / job->tile_cost < full ? at / job->tile_cost : full;
    int64_t inside = at - *tile * job->tile_cost;
    int64_t scale = *tile < full ? job->tile_cost : job->work - full * job->tile_cost;
    *block = scale ? block_at(&job->matrix, (int64_t)((double)inside / scale * total)) : 0;
}

static void run_piece(const struct job *job, int64_t piece, int64_t *held, float *tile, float *sums) {
    int64_t pieces = (int64_t)job->threads * PIECES, at, block, last_tile, last_block;
    point(job, job->work / pieces * piece + job->work % pieces * piece / pieces, &at, &block);
    point(job, job->work / pieces * (piece + 1) + job->work % pieces * (piece + 1) / pieces, &last_tile, &last_block);
    for (; at < last_tile || (at == last_tile && block < last_block); at++, block = 0) {
        int64_t token = at * widest(job->level), wide = tile_width(job->level, job->tokens - token);
        int64_t end = at < last_tile ? job->matrix.blocks : last_block;
        if (token >= job->tokens)
            return;
        if (block < end && *held != at)
            CALL(job->level, read_tile, (job, token, wide, tile));
        *held = block < end ? at : *held;
        for (; block < end; block++)
            CALL(job->level, compute, (job, token, wide, block, tile, sums));
    }
}

/* What every thread runs: its own share, then what is left of the others'. Fewer threads than asked for do it all. */
static void work(void *data) {
    struct job *job = data;
    int self = atomic_fetch_add(&job->arrived, 1);
    if (self >= job->threads)
        return;
    float *tile = job->scratch + self * job->scratch_each, *sums = tile + job->matrix.columns_in * widest(job->level);
    int64_t held = -1;
    for (int i = 0; i < job->threads; i++) {
        int share = (self + i) % job->threads, piece;
        while ((piece = atomic_fetch_add(&job->taken[share], 1)) < PIECES)
            run_piece(job, (int64_t)share * PIECES + piece, &held, tile, sums);
    }
}

typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Returns 0, or 1 if there was no memory. A token's features lie side by side, in `x` and in `out`; strides are between
   tokens. `gomp_parallel` may be NULL (one thread); `level` is at most platon_level(). */
int platon_sparse_linear(const float *x, int64_t tokens, int64_t x_stride, const float *values, const uint8_t *columns,
                         const uint16_t *counts, const int64_t *starts, const float *bias, int64_t rows,
                         int64_t columns_in, int64_t width, int activation, float *out, int64_t out_stride, int threads,
                         parallel gomp_parallel, int level) {
    if (tokens <= 0 || rows <= 0)
        return 0;
    int64_t parts = columns_in > width ? (columns_in + width - 1) / width : 1;
    struct job job = {
        .matrix = {values, columns, counts, starts, bias, rows, columns_in, width, parts,
                   (rows + ROW_BLOCK - 1) / ROW_BLOCK},
        .x = x, .out = out, .tokens = tokens, .x_stride = x_stride, .out_stride = out_stride,
        .activation = activation, .level = level,
    };
    int64_t full = tokens / widest(level), left = tokens % widest(level);
    int64_t total = cost(&job.matrix, job.matrix.blocks), wide = left ? tile_width(level, left) : 0;
    job.tile_cost = 8 * total;
    job.work = full * job.tile_cost + (left ? total + 7 * total * wide / widest(level) : 0);
    /* A thread is not worth waking for less than some ten microseconds. */
    int64_t useful = 1 + job.work / 8 * widest(level) / 1000000;
    job.threads = !gomp_parallel || threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    if (useful < job.threads)
        job.threads = (int)useful;
    job.scratch_each = (columns_in + ROW_BLOCK) * widest(level);
    job.scratch = aligned_alloc(64, (size_t)job.threads * job.scratch_each * sizeof(float));
    if (!job.scratch)
        return 1;
    if (job.threads > 1)
        gomp_parallel(work, &job, (unsigned)job.threads, 0);
    else
        work(&job);
    free(job.scratch);
    return 0;
}
