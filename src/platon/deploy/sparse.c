/* Sparse matrices times dense tokens in float32: out = activation(x Wᵀ + bias), with x [tokens, columns] and out
   [tokens, rows]; several matrices that read the same tokens at once, or one after the other, and then a sum and a norm.
   And the attention between such products, which would otherwise take a third of a sparse model's time, and the product
   of a dense matrix with few tokens, for layers that stay dense when text is generated.

   A matrix is stored in blocks of ROW_BLOCK rows, each divided into column panels of `width` <= 256 columns: most of
   the input that a panel reads, and the sums that it writes, then stay in the first-level cache. Inside a panel the
   non-zeros are stored row by row and, in a row, by column; rows with most non-zeros come first, so that the branch
   predictor knows where a row ends. A non-zero is a float and a byte (its column in the panel). For each row of a panel
   there is a 16-bit number: 64 * non-zeros + row.

   The caller passes the size of every array. No content of the arrays makes the kernel read or write outside of them:
   sizes and `starts` are checked at each call, a row's count is cut off at the end of its block, and the input tile has
   room for every column that a byte can name.

   Only C's and POSIX's own headers are used, so one build serves every version of PyTorch. Threads come from the
   caller's OpenMP runtime, whose `GOMP_parallel` is passed in: a second thread pool would compete with it for the cores.
*/

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROW_BLOCK 64
#define PANEL_REACH 256 /* columns that a byte can name */
#define MOST_THREADS 256
#define MOST_MATRICES 8 /* in one call */
#define QUERIES 6       /* that attention computes together */
#define AHEAD 512       /* how many non-zeros before its use one is prefetched, */
#define FAR_AHEAD 2048  /* and where all of them come from memory, as for a single token */
#define ABREAST 2       /* tiles that go through a matrix together */
#define NEAR (1 << 17)  /* floats that the second-level cache holds beside other things */
#define LANES 16        /* in the widest vector: attention pads keys and features to as many */
enum { NONE, GELU, GELU_TANH, RELU };
#define LOG2E 1.44269504f
enum { BASELINE, AVX2, AVX512 };
enum { DONE, NO_MEMORY, BAD_ARRAYS }; /* what the entry points return */

#define UNROLL _Pragma("GCC unroll 16")
#define APART __attribute__((noinline)) /* in a function by itself, a loop keeps its pointers in registers */
#define INLINE __attribute__((always_inline)) inline

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

/* A sparse layer as the caller passes it: every array with its size in bytes. `bias` may be NULL. */
struct layer {
    const float *values;
    int64_t values_bytes;
    const uint8_t *columns;
    int64_t columns_bytes;
    const uint16_t *counts; /* [row block][panel][64]: 64 * non-zeros + row, most non-zeros first */
    int64_t counts_bytes;
    const int64_t *starts; /* [row blocks + 1]: index of a row block's first value */
    int64_t starts_bytes;
    const float *bias;
    int64_t bias_bytes;
    int64_t rows, columns_in, width, activation;
};

struct matrix {
    const float *values;
    const uint8_t *columns;
    const uint16_t *counts;
    const int64_t *starts;
    const float *bias; /* or NULL */
    int64_t rows, columns_in, width, panels, blocks;
    int activation;
};

/* A layer norm as the caller passes it; `weight` and `bias` may be NULL. */
struct affine {
    const float *weight;
    int64_t weight_bytes;
    const float *bias;
    int64_t bias_bytes;
    float epsilon;
};

struct norm {
    const float *weight, *bias; /* or NULL */
    float epsilon;
};

/* Where the features of a token are: from data[row * .row + head * .head + token * .token] on. */
struct heads {
    const float *data;
    int64_t row, head, token;
};

/* Bytes that are not 0 for keys that are seen; floats that are added to scores; or a query sees the keys up to its place. */
enum { NO_MASK, FLAGS, NUMBERS, CAUSAL };

struct attention {
    struct heads q, k, v;
    const void *mask;
    int64_t mask_kind, mask_row, mask_head, mask_query, mask_key; /* elements from one to the next */
    int64_t rows, heads, queries, keys, features, value_features;
    int64_t sharing; /* heads that have the same keys and values */
    float *out;      /* [rows, queries, heads, value features] */
    float scale;
};

static inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

#define PASTE(a, b) a##_##b
/* Vectors in the widest tile: with as many sums of a row, aarch64 has registers left, SSE has not. A check defines it to
   compute the same on both. */
#ifndef BASELINE_MOST
#ifdef __aarch64__
#define BASELINE_MOST 16
#else
#define BASELINE_MOST 8
#endif
#endif
#define VECTOR 4
#define MOST BASELINE_MOST
#define TARGET
#define NAME(x) PASTE(x, baseline)
#include "sparse_level.h"

#ifdef __x86_64__
#define VECTOR 8
#define MOST 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(x) PASTE(x, avx2)
#include "sparse_level.h"

/* Four vectors of 16 floats hold the same 64 tokens as eight of 8. A test defines WIDEST to compile this variant for a
   machine without AVX-512. */
#ifdef WIDEST
#define LOWERED
#else
#define WIDEST "avx512f,avx512vl,avx2,fma"
#endif
#define VECTOR 16
#define MOST 4
#define TARGET __attribute__((target(WIDEST)))
#define NAME(x) PASTE(x, avx512)
#include "sparse_level.h"
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

static int64_t widest(int level) { return level == BASELINE ? 4 * BASELINE_MOST : 64; }

/* Tokens in a tile: one, the narrowest tile of vectors that holds all tokens that are left, or the widest. */
static int64_t tile_width(int level, int64_t left) {
    int64_t wide = level == BASELINE ? 4 : level == AVX2 ? 8 : 16;
    if (left == 1)
        return 1;
    while (wide < widest(level) && wide < left)
        wide *= 2;
    return wide;
}

/* Tokens in the widest tile of so many tokens. */
static int64_t lanes_for(int level, int64_t tokens) {
    return tokens < widest(level) ? tile_width(level, tokens) : widest(level);
}

/* The cost of the first `block` row blocks, in units of one non-zero: the non-zeros, and for each row its counts, its
   sums and its output. */
static int64_t cost(const struct matrix *m, int64_t block) {
    return m->starts[block] + block * ROW_BLOCK * (2 * m->panels + 4);
}

/* Features that a tile needs room for when this matrix reads it: every column that a byte can name. */
static int64_t reach(const struct matrix *m) {
    int64_t columns = (m->panels - 1) * m->width + PANEL_REACH;
    return columns > m->columns_in ? columns : m->columns_in;
}

/* Tiles that go through a matrix together, row block by row block, so that a weight comes from memory once for all of
   them: one if the second-level cache does not hold what more of them read. */
static int64_t abreast(const struct matrix *m, int64_t lanes) {
    return ABREAST * m->columns_in * lanes <= NEAR ? ABREAST : 1;
}

/* Whether a pointer is aligned for its elements and, unless the array is empty, not NULL. */
static int usable(const void *array, int64_t bytes, size_t element) {
    return bytes >= 0 && (array || !bytes) && (uintptr_t)array % element == 0;
}

/* The matrix of a layer whose arrays have the lengths that it needs, with `starts` inside the values; 0: they have not. */
static int accept(const struct layer *l, struct matrix *m) {
    int64_t counts, starts, rows = l->rows, width = l->width;
    if (width < 1 || width > PANEL_REACH || rows < 0 || l->columns_in < 0 || (!l->bias && l->bias_bytes > 0) ||
        l->activation < NONE || l->activation > RELU)
        return 0;
    int64_t panels = l->columns_in > width ? l->columns_in / width + (l->columns_in % width != 0) : 1;
    int64_t blocks = rows / ROW_BLOCK + (rows % ROW_BLOCK != 0);
    *m = (struct matrix){l->values,     l->columns, l->counts, l->starts, l->bias, rows,
                         l->columns_in, width,      panels,    blocks,    (int)l->activation};
    if (!usable(l->values, l->values_bytes, 4) || !usable(l->columns, l->columns_bytes, 1) ||
        !usable(l->counts, l->counts_bytes, 2) || !usable(l->starts, l->starts_bytes, 8))
        return 0;
    if (l->bias && (!usable(l->bias, l->bias_bytes, 4) || l->bias_bytes % 4 || l->bias_bytes / 4 != rows))
        return 0;
    if (__builtin_mul_overflow(blocks, panels, &counts) || __builtin_mul_overflow(counts, 2 * ROW_BLOCK, &counts) ||
        __builtin_mul_overflow(blocks + 1, 8, &starts))
        return 0;
    if (l->values_bytes % 4 || l->columns_bytes != l->values_bytes / 4 || l->counts_bytes != counts ||
        l->starts_bytes != starts)
        return 0;
    int64_t before = 0;
    for (int64_t i = 0; i <= blocks; before = l->starts[i++])
        if (l->starts[i] < before)
            return 0;
    return before <= l->columns_bytes;
}

static int accept_all(const struct layer *const *layers, int count, struct matrix *matrices) {
    if (count < 1 || count > MOST_MATRICES)
        return 0;
    for (int i = 0; i < count; i++)
        if (!accept(layers[i], &matrices[i]))
            return 0;
    return 1;
}

/* The norm over `rows` features whose arrays have as many numbers; 0: they have not. */
static int accept_norm(const struct affine *a, int64_t rows, struct norm *norm) {
    *norm = (struct norm){a->weight, a->bias, a->epsilon};
    return (!a->weight || (usable(a->weight, a->weight_bytes, 4) && a->weight_bytes / 4 == rows)) &&
           (!a->bias || (usable(a->bias, a->bias_bytes, 4) && a->bias_bytes / 4 == rows));
}

/* Memory that a thread keeps between calls, because new memory costs page faults; freed when the thread ends. */
enum { TILES, TENSORS, SLOTS }; /* what a slot is for: the tiles of one product, and what several products pass on */
struct kept {
    size_t floats[SLOTS];
    float *data[SLOTS];
};
static pthread_key_t kept_key;
static pthread_once_t kept_once = PTHREAD_ONCE_INIT;

static void free_kept(void *memory) {
    for (int slot = 0; slot < SLOTS; slot++)
        free(((struct kept *)memory)->data[slot]);
    free(memory);
}

static void make_key(void) { pthread_key_create(&kept_key, free_kept); }

/* At least this many floats, aligned to cache lines; NULL: there is no memory. */
static float *scratch(int slot, size_t floats) {
    pthread_once(&kept_once, make_key);
    struct kept *kept = pthread_getspecific(kept_key);
    if (!kept) {
        kept = calloc(1, sizeof *kept);
        if (!kept || pthread_setspecific(kept_key, kept)) {
            free(kept);
            return NULL;
        }
    }
    if (kept->floats[slot] < floats) {
        free(kept->data[slot]);
        kept->data[slot] = aligned_alloc(64, (floats + 15) / 16 * 16 * sizeof(float));
        kept->floats[slot] = kept->data[slot] ? floats : 0;
    }
    return kept->data[slot];
}

typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Waking a thread pays off only for some ten microseconds of work. */
static int useful_threads(int threads, parallel gomp_parallel, int64_t products) {
    int64_t useful = 1 + products / 1000000;
    threads = !gomp_parallel || threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    return useful < threads ? (int)useful : threads;
}

#include "sparse_check.h"
#include "sparse_checksum.h"
#include "sparse_dense.h"
#include "sparse_side.h"
#include "sparse_chain.h"
#include "sparse_heads.h"
#include "sparse_inward.h"
#include "sparse_encoder.h"
