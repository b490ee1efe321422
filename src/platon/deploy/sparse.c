/* A sparse matrix times dense tokens in float32: out = activation(x Wᵀ + bias), with x [tokens, columns] and out
   [tokens, rows].

   The matrix is stored in blocks of ROW_BLOCK rows, each divided into column panels of `width` <= 256 columns: the
   input that a panel reads and the sums that it writes then fit in the first-level cache. Inside a panel the
   non-zeros are stored row by row and, in a row, by column; rows with most non-zeros come first, so that the branch
   predictor knows where a row ends. A non-zero is a float and a byte (its column in the panel). For each row of a panel
   there is a 16-bit number: 64 * non-zeros + row.

   The caller passes the size of every array. No content of the arrays makes the kernel read or write outside of them:
   sizes and `starts` are checked at each call, a row's count is cut off at the end of its block, and the input tile has
   room for every column that a byte can name.

   Only C's own headers are used, so one build serves every version of PyTorch. Threads come from the caller's OpenMP
   runtime, whose `GOMP_parallel` is passed in: a second thread pool would compete with it for the cores. */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROW_BLOCK 64
#define PANEL_REACH 256 /* columns that a byte can name */
#define CHUNKS 4 /* of a thread's portion of the work; threads that are done take chunks from the others */
#define MOST_THREADS 256
enum { NONE, GELU, GELU_TANH, RELU };
enum { BASELINE, AVX2, AVX512 };

#define UNROLL _Pragma("GCC unroll 8")
#define APART __attribute__((noinline)) /* in a function by itself, a loop keeps its pointers in registers */

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

enum { DONE, NO_MEMORY, BAD_ARRAYS }; /* what platon_sparse_linear returns */

struct matrix {
    const float *values;
    const uint8_t *columns;
    const uint16_t *counts; /* [row block][panel][64]: 64 * non-zeros + row, most non-zeros first */
    const int64_t *starts;  /* [row blocks + 1]: index of a row block's first value */
    const float *bias;      /* or NULL */
    int64_t rows, columns_in, width, panels, blocks;
};

struct product {
    struct matrix matrix;
    const float *x;
    float *out;
    int64_t tokens, x_stride, out_stride;
    int activation, level, threads;
    int64_t tile_cost, work; /* the cost of a full tile of tokens, and of everything */
    float *scratch;
    int64_t tile_floats, scratch_floats; /* of one thread: its tile, and all that it has */
    int64_t lanes;                       /* tokens in the widest tile of this call */
    atomic_int arrived;
    atomic_int taken[MOST_THREADS]; /* chunks taken from each thread's portion */
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

/* Four vectors of 16 floats hold the same 64 tokens as eight of 8. A test defines WIDEST to compile this variant for a
   machine without AVX-512. */
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

/* A digest of the sources, set by the build: a library that is older than the sources is not used. */
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

/* Tokens in a tile: the narrowest tile that holds all tokens that are left, or the widest. */
static int64_t tile_width(int level, int64_t left) {
    int64_t wide = level == BASELINE ? 4 : level == AVX2 ? 8 : 16;
    while (wide < widest(level) && wide < left)
        wide *= 2;
    return wide;
}

/* The cost of the first `block` row blocks, in units of one non-zero: the non-zeros, and for each row its counts, its
   sums and its output. */
static int64_t cost(const struct matrix *m, int64_t block) {
    return m->starts[block] + block * ROW_BLOCK * (2 * m->panels + 4);
}

/* The first row block that begins at or after this cost. */
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

/* Convert a position in the work, 0 to product->work, to a tile and a row block. A narrow last tile costs less than a
   full one, but more than its share of tokens, because every weight is read for it too. */
static void position(const struct product *p, int64_t at, int64_t *tile, int64_t *block) {
    int64_t full = p->tokens / widest(p->level), total = cost(&p->matrix, p->matrix.blocks);
    *tile = at / p->tile_cost < full ? at / p->tile_cost : full;
    int64_t inside = at - *tile * p->tile_cost;
    int64_t scale = *tile < full ? p->tile_cost : p->work - full * p->tile_cost;
    *block = scale ? block_at(&p->matrix, (int64_t)((double)inside / scale * total)) : 0;
}

/* One chunk of the work. `held` is the tile of tokens that this thread's scratch memory holds, or -1. */
static void run_chunk(const struct product *p, int64_t chunk, int64_t *held, float *tile, float *sums) {
    int64_t chunks = (int64_t)p->threads * CHUNKS, at, block, last_tile, last_block;
    position(p, p->work / chunks * chunk + p->work % chunks * chunk / chunks, &at, &block);
    position(p, p->work / chunks * (chunk + 1) + p->work % chunks * (chunk + 1) / chunks, &last_tile, &last_block);
    for (; at < last_tile || (at == last_tile && block < last_block); at++, block = 0) {
        int64_t token = at * widest(p->level), wide = tile_width(p->level, p->tokens - token);
        int64_t end = at < last_tile ? p->matrix.blocks : last_block;
        if (token >= p->tokens)
            return;
        if (block < end && *held != at)
            CALL(p->level, read_tile, (p, token, wide, tile));
        *held = block < end ? at : *held;
        for (; block < end; block++)
            CALL(p->level, compute, (p, token, wide, block, tile, sums));
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
    int64_t used = p->matrix.columns_in * p->lanes;
    memset(tile + used, 0, (p->scratch_floats - used) * sizeof(float));
    int64_t held = -1;
    for (int i = 0; i < p->threads; i++) {
        int portion = (self + i) % p->threads, chunk;
        while ((chunk = atomic_fetch_add(&p->taken[portion], 1)) < CHUNKS)
            run_chunk(p, (int64_t)portion * CHUNKS + chunk, &held, tile, sums);
    }
}

/* Whether a pointer is aligned for its elements and, unless the array is empty, not NULL. */
static int usable(const void *array, int64_t bytes, size_t element) {
    return bytes >= 0 && (array || !bytes) && (uintptr_t)array % element == 0;
}

/* Whether the arrays have the lengths that the matrix needs, and `starts` stays inside the values. */
static int fits(const struct matrix *m, int64_t values_bytes, int64_t columns_bytes, int64_t counts_bytes,
                int64_t starts_bytes, int64_t bias_bytes) {
    int64_t counts, starts;
    if (!usable(m->values, values_bytes, 4) || !usable(m->columns, columns_bytes, 1) ||
        !usable(m->counts, counts_bytes, 2) || !usable(m->starts, starts_bytes, 8))
        return 0;
    if (m->bias && (!usable(m->bias, bias_bytes, 4) || bias_bytes % 4 || bias_bytes / 4 != m->rows))
        return 0;
    if (__builtin_mul_overflow(m->blocks, m->panels, &counts) ||
        __builtin_mul_overflow(counts, 2 * ROW_BLOCK, &counts) || __builtin_mul_overflow(m->blocks + 1, 8, &starts))
        return 0;
    if (values_bytes % 4 || columns_bytes != values_bytes / 4 || counts_bytes != counts || starts_bytes != starts)
        return 0;
    int64_t before = 0;
    for (int64_t i = 0; i <= m->blocks; before = m->starts[i++])
        if (m->starts[i] < before)
            return 0;
    return before <= columns_bytes;
}

typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Returns DONE, NO_MEMORY or BAD_ARRAYS. A token's features are contiguous in `x` and in `out`; the strides are between
   tokens. Every array of the matrix comes with its size in bytes; `bias` may be NULL. `gomp_parallel` may be NULL (one
   thread); `level` is at most platon_level(). */
int platon_sparse_linear(const float *x, int64_t tokens, int64_t x_stride, const float *values, int64_t values_bytes,
                         const uint8_t *columns, int64_t columns_bytes, const uint16_t *counts, int64_t counts_bytes,
                         const int64_t *starts, int64_t starts_bytes, const float *bias, int64_t bias_bytes,
                         int64_t rows, int64_t columns_in, int64_t width, int activation, float *out,
                         int64_t out_stride, int threads, parallel gomp_parallel, int level) {
    if (tokens <= 0 || rows <= 0)
        return DONE;
    if (width < 1 || width > PANEL_REACH || columns_in < 0 || (!bias && bias_bytes > 0))
        return BAD_ARRAYS;
    int64_t panels = columns_in > width ? columns_in / width + (columns_in % width != 0) : 1;
    struct product p = {
        .matrix = {values, columns, counts, starts, bias, rows, columns_in, width, panels,
                   rows / ROW_BLOCK + (rows % ROW_BLOCK != 0)},
        .x = x, .out = out, .tokens = tokens, .x_stride = x_stride, .out_stride = out_stride,
        .activation = activation, .level = level,
    };
    if (!fits(&p.matrix, values_bytes, columns_bytes, counts_bytes, starts_bytes, bias_bytes))
        return BAD_ARRAYS;
    int64_t full = tokens / widest(level), left = tokens % widest(level);
    int64_t total = cost(&p.matrix, p.matrix.blocks), wide = left ? tile_width(level, left) : 0;
    p.tile_cost = 8 * total;
    p.work = full * p.tile_cost + (left ? total + 7 * total * wide / widest(level) : 0);
    /* Waking a thread pays off only for some ten microseconds of work. */
    int64_t useful = 1 + p.work / 8 * widest(level) / 1000000;
    p.threads = !gomp_parallel || threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    if (useful < p.threads)
        p.threads = (int)useful;
    p.lanes = full ? widest(level) : wide;
    int64_t reach = (panels - 1) * width + PANEL_REACH;
    p.tile_floats = (reach > columns_in ? reach : columns_in) * p.lanes;
    p.scratch_floats = (p.tile_floats + ROW_BLOCK * p.lanes + 15) / 16 * 16;
    p.scratch = aligned_alloc(64, (size_t)p.threads * p.scratch_floats * sizeof(float));
    if (!p.scratch)
        return NO_MEMORY;
    if (p.threads > 1)
        gomp_parallel(work, &p, (unsigned)p.threads, 0);
    else
        work(&p);
    free(p.scratch);
    return DONE;
}
