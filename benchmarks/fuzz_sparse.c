/* Calls the sparse kernel with damaged arrays. Compiled together with sparse.c under AddressSanitizer and
   UndefinedBehaviorSanitizer, which end the program at the first access outside of an array:

       cc -g -O1 -std=gnu11 -fsanitize=address,undefined -fno-sanitize-recover=all sparse.c fuzz_sparse.c -o fuzz
       ./fuzz CASES SEED [LEVEL]

   A case is one to three random matrices in the kernel's format, random tokens, and one to three changes to one of the
   matrices: other counts, columns or starts, arrays that are too short or too long, other sizes. The matrices are
   computed side by side or one after the other, with or without a sum and a norm; beside them attention and a dense
   product are computed, on other arrays, which nothing damages, and an encoder of up to three layers, one of whose
   matrices is damaged too. Every
   array is allocated with exactly the size that the kernel is told. An undamaged case is computed a second time without
   the format and compared, an encoder with its parts, and a third time with activations. Prints the number of cases that
   were computed, refused, and undamaged, and a digest of all bits of the undamaged results: with one LEVEL (0 is the
   baseline) two builds for different processors can be compared. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROW_BLOCK 64
#define MOST 3

struct layer {
    const void *values;
    int64_t values_bytes;
    const void *columns;
    int64_t columns_bytes;
    const void *counts;
    int64_t counts_bytes;
    const void *starts;
    int64_t starts_bytes;
    const void *bias;
    int64_t bias_bytes;
    int64_t rows, columns_in, width, activation;
};

int platon_level(void);
int platon_sparse_problem(const struct layer *l);
int platon_fold(int file, int64_t bytes, uint8_t *folded);
int platon_sparse_linears(const float *x, int64_t tokens, int64_t x_stride, const struct layer *const *layers,
                          int count, float *const *outs, int threads, void *parallel, int level);
int platon_sparse_chain(const float *x, int64_t tokens, int64_t x_stride, const struct layer *const *layers, int count,
                        const float *added, int64_t added_stride, int has_norm, const float *weight,
                        int64_t weight_bytes, const float *bias, int64_t bias_bytes, float epsilon, float *out,
                        int threads, void *parallel, int level);

/* As in sparse.c. */
struct heads {
    const float *data;
    int64_t row, head, token;
};

struct attention {
    struct heads q, k, v;
    const void *mask;
    int64_t mask_kind, mask_row, mask_head, mask_query, mask_key;
    int64_t rows, heads, queries, keys, features, value_features, sharing;
    float *out;
    float scale;
};

struct affine {
    const void *weight;
    int64_t weight_bytes;
    const void *bias;
    int64_t bias_bytes;
    float epsilon;
};

struct encoder {
    const struct layer *inward[3];
    const struct layer *out;
    const struct layer *forward[7];
    int64_t forward_count, heads;
    struct affine first, last;
};

void platon_dense_linear(const float *x, int64_t tokens, int64_t x_stride, const float *weight, int64_t rows,
                         int64_t columns, const float *bias, float *out, int threads, void *parallel, int level);
int platon_attention(const struct attention *given, int threads, void *parallel, int level);
int platon_encoder(const struct encoder *const *layers, int count, const float *x, int64_t rows, int64_t tokens,
                   const struct attention *seen, float *result, int threads, void *parallel, int level);

static uint64_t state;

/* xorshift64*: the same cases on every machine. */
static uint64_t draw(uint64_t below) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 2685821657736338717ull >> 16) % below;
}

static float number(void) { return (float)draw(1000) / 500 - 1; }

struct array {
    void *data;
    int64_t bytes;
};

static struct array make(int64_t bytes) {
    struct array array = {malloc(bytes ? bytes : 1), bytes};
    if (!array.data)
        exit(3);
    return array;
}

static struct array numbers(int64_t count) {
    struct array array = make(4 * count);
    for (int64_t i = 0; i < count; i++)
        ((float *)array.data)[i] = number();
    return array;
}

/* The same array with another size: shorter or longer, the new bytes random. */
static void resize(struct array *array, int64_t bytes) {
    struct array other = make(bytes < 0 ? 0 : bytes);
    memcpy(other.data, array->data, other.bytes < array->bytes ? other.bytes : array->bytes);
    for (int64_t i = array->bytes; i < other.bytes; i++)
        ((uint8_t *)other.data)[i] = (uint8_t)draw(256);
    free(array->data);
    *array = other;
}

static void damage_bytes(struct array *array) {
    for (uint64_t changes = 1 + draw(4); array->bytes && changes; changes--)
        ((uint8_t *)array->data)[draw(array->bytes)] = (uint8_t)draw(256);
}

/* A matrix as it is, and in the kernel's format. */
struct matrix {
    struct array dense, values, columns, counts, starts, bias;
    int64_t rows, columns_in, width, told_rows, told_width, activation;
    int missing; /* whether it has no bias */
};

static struct matrix draw_matrix(int64_t rows, int64_t columns_in) {
    int64_t width = 1 + draw(256), panels = columns_in > width ? (columns_in + width - 1) / width : 1;
    int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, filled = 0;
    uint64_t percent = draw(3) ? draw(101) : 0;
    struct matrix m = {.rows = rows, .columns_in = columns_in, .width = width, .told_rows = rows, .told_width = width};
    m.dense = make(rows * columns_in * 4);
    m.values = make(rows * columns_in * 4);
    m.columns = make(rows * columns_in);
    m.counts = make(blocks * panels * ROW_BLOCK * 2);
    m.starts = make((blocks + 1) * 8);
    m.bias = numbers(draw(3) ? rows : 0);
    m.missing = !m.bias.bytes;
    float *weight = m.dense.data;
    for (int64_t i = 0; i < rows * columns_in; i++)
        weight[i] = draw(100) < percent ? number() : 0;
    for (int64_t block = 0; block < blocks; block++) {
        ((int64_t *)m.starts.data)[block] = filled;
        for (int64_t panel = 0; panel < panels; panel++) {
            /* Rows with non-zeros first, as the format asks for. */
            int64_t place = 0;
            for (int empty = 0; empty < 2; empty++)
                for (int64_t row = 0; row < ROW_BLOCK; row++) {
                    int64_t at = block * ROW_BLOCK + row, found = 0;
                    for (int64_t i = panel * width; at < rows && i < columns_in && i < (panel + 1) * width; i++)
                        found += weight[at * columns_in + i] != 0;
                    if (empty != !found)
                        continue;
                    ((uint16_t *)m.counts.data)[(block * panels + panel) * ROW_BLOCK + place++] =
                        (uint16_t)(found * ROW_BLOCK + row);
                    for (int64_t i = panel * width; found && i < columns_in && i < (panel + 1) * width; i++)
                        if (weight[at * columns_in + i] != 0) {
                            ((float *)m.values.data)[filled] = weight[at * columns_in + i];
                            ((uint8_t *)m.columns.data)[filled++] = (uint8_t)(i - panel * width);
                        }
                }
        }
    }
    ((int64_t *)m.starts.data)[blocks] = filled;
    resize(&m.values, filled * 4);
    resize(&m.columns, filled);
    return m;
}

static struct layer told(const struct matrix *m) {
    return (struct layer){m->values.data, m->values.bytes, m->columns.data,
                          m->columns.bytes, m->counts.data, m->counts.bytes,
                          m->starts.data, m->starts.bytes, m->missing ? NULL : m->bias.data,
                          m->missing ? -1 : m->bias.bytes, m->told_rows, m->columns_in,
                          m->told_width, m->activation};
}

static void free_matrix(const struct matrix *m) {
    free(m->dense.data), free(m->values.data), free(m->columns.data);
    free(m->counts.data), free(m->starts.data), free(m->bias.data);
}

static void damage(struct matrix *m, struct array *out, int64_t tokens) {
    struct array *arrays[] = {&m->values, &m->columns, &m->counts, &m->starts, &m->bias};
    for (uint64_t changes = 1 + draw(3); changes; changes--)
        switch (draw(9)) {
        case 0:
        case 1:
            damage_bytes(&m->counts);
            break;
        case 2:
        case 3:
            damage_bytes(&m->columns);
            break;
        case 4:
            damage_bytes(&m->starts);
            break;
        case 5:
            if (m->starts.bytes >= 8)
                ((int64_t *)m->starts.data)[draw(m->starts.bytes / 8)] = (int64_t)draw(m->columns.bytes + 3) - 1;
            break;
        case 6: {
            struct array *array = arrays[draw(5)];
            resize(array, draw(2) ? (int64_t)draw(array->bytes + 40) : array->bytes - 1 - (int64_t)draw(8));
            break;
        }
        case 7:
            m->told_width = draw(3) ? (int64_t)draw(300) - 10 : (int64_t)(state >> 1);
            break;
        default:
            m->told_rows = draw(4) ? 1 + (int64_t)draw(2 * m->rows) : (int64_t)(state >> draw(64));
            if (m->told_rows > m->rows && m->told_rows < 100000) /* larger ones are refused: counts do not fit */
                resize(out, tokens * m->told_rows * 4);
        }
    m->activation = (int64_t)draw(4);
}

/* What a matrix makes of tokens, in double precision, and the sizes of what was added up. */
static void multiply(const struct matrix *m, int64_t tokens, const double *x, const double *x_size, double *out,
                     double *size) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t row = 0; row < m->rows; row++) {
            double sum = m->missing ? 0 : ((float *)m->bias.data)[row], all = fabs(sum);
            for (int64_t i = 0; i < m->columns_in; i++) {
                double weight = ((float *)m->dense.data)[row * m->columns_in + i];
                sum += weight * x[t * m->columns_in + i];
                all += fabs(weight) * x_size[t * m->columns_in + i];
            }
            out[t * m->rows + row] = sum;
            size[t * m->rows + row] = all;
        }
}

static uint64_t digest = 14695981039346656037ull;

/* FNV-1a. */
static void take(const struct array *array) {
    for (int64_t i = 0; i < array->bytes; i++)
        digest = (digest ^ ((const uint8_t *)array->data)[i]) * 1099511628211ull;
}

static int differs(const float *got, const double *want, const double *size, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(got[i] - want[i]) <= 1e-5 * size[i] + 1e-30))
            return 1;
    return 0;
}

/* What the register of a CRC-32 holds after these bytes, bit by bit. */
static uint32_t divide(uint32_t held, const uint8_t *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) {
        held ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            held = held >> 1 ^ (held & 1 ? 0xedb88320 : 0);
    }
    return held;
}

/* Whether the folded bytes of a file have another CRC-32 than all of them, or a file that ends before them has any. */
static int folds_wrongly(const struct array *array) {
    static FILE *file;
    int64_t bytes = array->bytes / 64 * 64, times = draw(64) ? 1 : 1 + (int64_t)draw(400000) / (bytes + 1);
    uint32_t held = 0xffffffff;
    uint8_t folded[16];
    if (!file && !(file = tmpfile()))
        exit(3);
    rewind(file);
    if (ftruncate(fileno(file), 0))
        exit(3);
    for (int64_t i = 0; i < times; i++, held = divide(held, array->data, bytes))
        fwrite(array->data, 1, bytes, file);
    fflush(file);
    int wrong = platon_fold(fileno(file), times * bytes, folded) && divide(0, folded, 16) != held;
    return wrong || platon_fold(fileno(file), times * bytes + 64, folded);
}

/* Tokens of all heads, side by side as the products write them, or head after head. */
static struct heads lay_out(const struct array *array, int64_t heads, int64_t tokens, int64_t features) {
    if (draw(2))
        return (struct heads){array->data, heads * tokens * features, features, heads * features};
    return (struct heads){array->data, heads * tokens * features, tokens * features, features};
}

static const float *token_of(const struct heads *of, int64_t row, int64_t head, int64_t token) {
    return of->data + row * of->row + head * of->head + token * of->token;
}

/* A mask for attention as it is described, or none. */
static struct array draw_mask(struct attention *a) {
    a->mask_kind = (int64_t)draw(4);
    if (a->mask_kind != 1 && a->mask_kind != 2) /* none, or a query sees the keys up to its place */
        return (struct array){NULL, 0};
    int each_head = (int)draw(2), each_query = (int)draw(2);
    a->mask_key = 1, a->mask_query = each_query ? a->keys : 0;
    a->mask_head = each_head ? a->keys * (each_query ? a->queries : 1) : 0;
    a->mask_row = a->keys * (each_query ? a->queries : 1) * (each_head ? a->heads : 1);
    struct array mask = a->mask_kind == 1 ? make(a->rows * a->mask_row) : numbers(a->rows * a->mask_row);
    for (int64_t i = 0; a->mask_kind == 1 && i < mask.bytes; i++)
        ((uint8_t *)mask.data)[i] = draw(3) > 0;
    a->mask = mask.data;
    return mask;
}

/* Whether attention to random keys, with a random mask or none, differs from double precision. */
static int attends_wrongly(int level) {
    struct attention a = {.rows = 1 + draw(3), .heads = 1 + draw(3), .queries = 1 + draw(20), .keys = 1 + draw(80)};
    int64_t key_heads = a.heads;
    a.sharing = 1 + (int64_t)draw(2), a.heads *= a.sharing;
    a.features = 1 + draw(40), a.value_features = draw(2) ? a.features : 1 + (int64_t)draw(40), a.scale = number();
    struct array q = numbers(a.rows * a.heads * a.queries * a.features);
    struct array k = numbers(a.rows * key_heads * a.keys * a.features);
    struct array v = numbers(a.rows * key_heads * a.keys * a.value_features);
    struct array out = make(a.rows * a.heads * a.queries * a.value_features * 4);
    a.q = lay_out(&q, a.heads, a.queries, a.features), a.k = lay_out(&k, key_heads, a.keys, a.features);
    a.v = lay_out(&v, key_heads, a.keys, a.value_features), a.out = out.data;
    struct array mask = draw_mask(&a);
    int wrong = platon_attention(&a, 1, NULL, level);
    for (int64_t at = 0; at < a.rows * a.heads * a.queries && !wrong; at++) {
        int64_t row = at / (a.heads * a.queries), head = at / a.queries % a.heads, query = at % a.queries;
        double score[80], most = -INFINITY, sum = 0;
        for (int64_t key = 0; key < a.keys; key++) {
            int64_t place = row * a.mask_row + head * a.mask_head + query * a.mask_query + key;
            double product = 0;
            for (int64_t i = 0; i < a.features; i++)
                product += (double)token_of(&a.q, row, head, query)[i] * token_of(&a.k, row, head / a.sharing, key)[i];
            score[key] = a.scale * product;
            if (a.mask_kind == 2)
                score[key] += ((const float *)a.mask)[place];
            if ((a.mask_kind == 1 && !((const uint8_t *)a.mask)[place]) || (a.mask_kind == 3 && key > query))
                score[key] = -INFINITY;
            most = fmax(most, score[key]);
        }
        for (int64_t key = 0; key < a.keys; key++)
            sum += score[key] = isinf(most) ? 0 : exp(score[key] - most);
        for (int64_t i = 0; i < a.value_features; i++) {
            double want = 0;
            for (int64_t key = 0; key < a.keys && sum; key++)
                want += score[key] / sum * token_of(&a.v, row, head / a.sharing, key)[i];
            double got = a.out[((row * a.queries + query) * a.heads + head) * a.value_features + i];
            wrong |= !(fabs(got - want) <= 1e-5);
        }
    }
    take(&out);
    if (!a.mask_kind) { /* a query that has NaN makes NaN */
        *(float *)q.data = NAN;
        wrong |= platon_attention(&a, 1, NULL, level) || !isnan(*a.out);
    }
    free(q.data), free(k.data), free(v.data), free(out.data), free(mask.data);
    return wrong;
}

#define IN_ENCODER 6 /* matrices, at most */

/* Whether a dense product with few tokens differs from double precision. */
static int is_dense_wrong(int level) {
    int64_t tokens = 1 + draw(9), rows = draw(140), columns = draw(200), gap = draw(3), stride = columns + gap;
    struct array x = numbers(tokens * stride - gap), weight = numbers(rows * columns), bias = numbers(rows);
    struct array out = numbers(tokens * rows);
    double *want = malloc(out.bytes * 2 + 1), *size = malloc(out.bytes * 2 + 1);
    const float *added = draw(2) ? bias.data : NULL;
    platon_dense_linear(x.data, tokens, stride, weight.data, rows, columns, added, out.data, 1, NULL, level);
    for (int64_t i = 0; i < tokens * rows; i++) {
        size[i] = fabs(want[i] = added ? added[i % rows] : 0);
        for (int64_t c = 0; c < columns; c++) {
            double product = ((float *)x.data)[i / rows * stride + c];
            product *= ((float *)weight.data)[i % rows * columns + c];
            want[i] += product, size[i] += fabs(product);
        }
    }
    int wrong = differs(out.data, want, size, tokens * rows);
    take(&out);
    free(want), free(size), free(x.data), free(weight.data), free(bias.data), free(out.data);
    return wrong;
}

/* In place of the OpenMP runtime: threads that run one after the other. */
static void in_turn(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    for (unsigned i = 0; i < threads + flags; i++)
        work(data);
}

/* Features of a head: few, or as many as let the kernel divide the heads into groups. */
static int64_t head_features(void) {
    static const int64_t many[] = {16, 24, 32, 48, 64, 96, 128};
    return draw(2) ? 1 + (int64_t)draw(20) : many[draw(7)];
}

/* Whether an encoder, whose layers are all the same, differs from its parts; one with a damaged matrix or norm only has to
   stay in bounds. */
static int encodes_wrongly(int level) {
    struct attention a = {.rows = 1 + draw(10), .sharing = 1};
    a.heads = 1 + draw(5), a.queries = 1 + draw(40);
    int64_t features = 1 + draw(80), tokens = a.rows * a.queries, between = 1 + draw(140);
    int64_t made = a.heads * head_features(), passed = draw(2) ? made : a.heads * head_features();
    int damaged = draw(8) != 0, count = 5 + (int)draw(2);
    int64_t sizes[][2] = {{made, features}, {made, features}, {passed, features}, {features, passed},
                          {count == 5 ? features : between, features}, {features, between}};
    struct matrix matrices[IN_ENCODER];
    struct layer layers[IN_ENCODER];
    const struct layer *told_of[IN_ENCODER];
    struct array affine[4], unused = make(0), x = numbers(tokens * features), result = make(tokens * features * 4);
    a.keys = a.queries;
    struct array mask = draw_mask(&a);
    for (int i = 0; i < 4; i++)
        affine[i] = numbers(features);
    for (int i = 0; i < count; i++)
        matrices[i] = draw_matrix(sizes[i][0], sizes[i][1]);
    if (damaged && draw(4))
        damage(&matrices[draw(count)], &unused, 0);
    else if (damaged) {
        struct array *victim = &affine[draw(4)]; /* drawn first: the order of arguments is not the same everywhere */
        resize(victim, (int64_t)draw(8 * features));
    }
    for (int i = 0; i < count; i++) {
        layers[i] = told(&matrices[i]);
        told_of[i] = &layers[i];
    }
    struct encoder e = {{told_of[0], told_of[1], told_of[2]}, told_of[3], {told_of[4]}, count - 4, a.heads,
                        {affine[0].data, affine[0].bytes, affine[1].data, affine[1].bytes, 0.1f},
                        {affine[2].data, affine[2].bytes, affine[3].data, affine[3].bytes, 0.1f}};
    if (count == 6)
        e.forward[1] = told_of[5];
    const struct encoder *same[] = {&e, &e, &e};
    int depth = 1 + (int)draw(3), threads = 1 + (int)draw(4);
    int code = platon_encoder(same, depth, x.data, a.rows, a.queries, &a, result.data, threads, (void *)in_turn, level);
    int wrong = code == 1 || (!damaged && code);
    if (!damaged && !wrong) {
        struct array q = make(tokens * made * 4), k = make(tokens * made * 4), v = make(tokens * passed * 4);
        struct array attended = make(tokens * passed * 4), middle = make(tokens * features * 4);
        struct array want = make(tokens * features * 4);
        float *outs[] = {q.data, k.data, v.data};
        a.features = made / a.heads, a.value_features = passed / a.heads;
        a.q = (struct heads){q.data, a.queries * made, a.features, made};
        a.k = (struct heads){k.data, a.queries * made, a.features, made};
        a.v = (struct heads){v.data, a.queries * passed, a.value_features, passed};
        a.out = attended.data, a.scale = 1 / sqrtf((float)a.features);
        for (int i = 0; i < depth; i++) {
            const float *from = i ? want.data : x.data;
            platon_sparse_linears(from, tokens, features, told_of, 3, outs, 1, NULL, level);
            platon_attention(&a, 1, NULL, level);
            platon_sparse_chain(attended.data, tokens, passed, told_of + 3, 1, from, features, 1, affine[0].data,
                                affine[0].bytes, affine[1].data, affine[1].bytes, 0.1f, middle.data, 1, NULL, level);
            platon_sparse_chain(middle.data, tokens, features, told_of + 4, count - 4, middle.data, features, 1,
                                affine[2].data, affine[2].bytes, affine[3].data, affine[3].bytes, 0.1f, want.data, 1,
                                NULL, level);
        }
        for (int64_t i = 0; i < tokens * features; i++)
            wrong |= !(fabsf(((float *)result.data)[i] - ((float *)want.data)[i]) <= 1e-3f);
        take(&result);
        free(q.data), free(k.data), free(v.data), free(attended.data), free(middle.data), free(want.data);
    }
    for (int i = 0; i < count; i++)
        free_matrix(&matrices[i]);
    for (int i = 0; i < 4; i++)
        free(affine[i].data);
    free(unused.data), free(x.data), free(result.data), free(mask.data);
    return wrong;
}

int main(int words_count, char **words) {
    int64_t cases = words_count > 1 ? atoll(words[1]) : 1000, computed = 0, refused = 0, undamaged = 0;
    state = 88172645463325252ull + (words_count > 2 ? strtoull(words[2], NULL, 10) : 0) * 1000003;
    for (int64_t index = 0; index < cases; index++) {
        int count = 1 + (int)draw(MOST), chained = (int)draw(2), damaged = draw(8) != 0, has_norm = (int)draw(2);
        int64_t columns_in = draw(300), tokens = draw(4) ? 1 + draw(90) : 1, before = columns_in;
        struct matrix matrices[MOST];
        struct array outs[MOST];
        for (int i = 0; i < count; i++) {
            matrices[i] = draw_matrix(1 + draw(140), chained ? before : columns_in);
            before = matrices[i].rows;
            outs[i] = make(tokens * before * 4);
        }
        struct array x = numbers(tokens * columns_in), added = numbers(tokens * before);
        struct array weight = numbers(before), bias = numbers(before);
        int victim = (int)draw(count);
        if (damaged)
            damage(&matrices[victim], &outs[victim], tokens);
        if (damaged && chained && draw(4) == 0)
            resize(draw(2) ? &weight : &bias, (int64_t)draw(4 * before));
        struct layer layers[MOST];
        const struct layer *pointers[MOST];
        float *results[MOST];
        for (int i = 0; i < count; i++) {
            layers[i] = told(&matrices[i]);
            pointers[i] = &layers[i];
            results[i] = outs[i].data;
        }
        for (int i = 0; i < count; i++)
            if (platon_sparse_problem(&layers[i]) && !damaged) {
                printf("a sound matrix is refused in case %ld\n", (long)index);
                return 1;
            }
        if (folds_wrongly(&x)) {
            printf("wrong checksum in case %ld\n", (long)index);
            return 1;
        }
        /* A told number of rows changes what the added tokens have to hold. */
        int adds = draw(2) && matrices[count - 1].told_rows == before;
        int level = (int)draw(platon_level() + 1), code;
        level = words_count > 3 ? atoi(words[3]) : level;
        if (attends_wrongly(level)) {
            printf("wrong attention in case %ld\n", (long)index);
            return 1;
        }
        if (is_dense_wrong(level)) {
            printf("wrong dense product in case %ld\n", (long)index);
            return 1;
        }
        if (encodes_wrongly(level)) {
            printf("wrong encoder layer in case %ld\n", (long)index);
            return 1;
        }
        if (chained)
            code = platon_sparse_chain(x.data, tokens, columns_in, pointers, count, adds ? added.data : NULL, before,
                                       has_norm, weight.data, weight.bytes, bias.data, bias.bytes, 1e-5f,
                                       results[count - 1], 1, NULL, level);
        else
            code = platon_sparse_linears(x.data, tokens, columns_in, pointers, count, results, 1, NULL, level);
        if (code == 1) {
            printf("no memory in case %ld\n", (long)index);
            return 1;
        }
        computed += code == 0;
        refused += code == 2;
        undamaged += !damaged;
        if (!damaged) {
            int64_t most = columns_in > 140 ? columns_in : 140, bytes = tokens * most * sizeof(double);
            double *in = malloc(bytes + 1), *in_size = malloc(bytes + 1), *out = malloc(bytes), *size = malloc(bytes);
            int wrong = code;
            for (int64_t i = 0; i < tokens * columns_in; i++)
                in_size[i] = fabs(in[i] = ((float *)x.data)[i]);
            for (int i = 0; i < count && !wrong; i++) {
                multiply(&matrices[i], tokens, in, in_size, out, size);
                if (!chained)
                    wrong |= differs(results[i], out, size, tokens * matrices[i].rows);
                else {
                    memcpy(in, out, tokens * matrices[i].rows * sizeof(double));
                    memcpy(in_size, size, tokens * matrices[i].rows * sizeof(double));
                }
            }
            for (int64_t t = 0; chained && !wrong && t < tokens; t++) {
                double mean = 0, variance = 0, *row = out + t * before, most_size = 0;
                for (int64_t i = 0; i < before; i++) {
                    row[i] += adds ? ((float *)added.data)[t * before + i] : 0;
                    mean += row[i] / before;
                    most_size = fmax(most_size, size[t * before + i] + 1);
                }
                for (int64_t i = 0; i < before; i++)
                    variance += (row[i] - mean) * (row[i] - mean) / before;
                double scale = 1 / sqrt(variance + 1e-5);
                for (int64_t i = 0; has_norm && i < before; i++) {
                    row[i] = (row[i] - mean) * scale * ((float *)weight.data)[i] + ((float *)bias.data)[i];
                    size[t * before + i] = most_size * (1 + scale) * (1 + scale * most_size);
                }
                for (int64_t i = 0; !has_norm && i < before; i++)
                    size[t * before + i] += 1;
            }
            wrong |= chained && !wrong && differs(results[count - 1], out, size, tokens * before);
            if (wrong) {
                printf("wrong result in case %ld\n", (long)index);
                return 1;
            }
            free(in), free(in_size), free(out), free(size);
            for (int i = 0; i < count; i++)
                layers[i].activation = (int64_t)draw(4);
            if (chained)
                platon_sparse_chain(x.data, tokens, columns_in, pointers, count, adds ? added.data : NULL, before,
                                    has_norm, weight.data, weight.bytes, bias.data, bias.bytes, 1e-5f,
                                    results[count - 1], 1, NULL, level);
            else
                platon_sparse_linears(x.data, tokens, columns_in, pointers, count, results, 1, NULL, level);
            for (int i = chained ? count - 1 : 0; i < count; i++)
                take(&outs[i]);
        }
        for (int i = 0; i < count; i++)
            free_matrix(&matrices[i]), free(outs[i].data);
        free(x.data), free(added.data), free(weight.data), free(bias.data);
    }
    printf("{\"computed\": %ld, \"refused\": %ld, \"undamaged\": %ld, \"digest\": %lu}\n", (long)computed, (long)refused,
           (long)undamaged, (unsigned long)digest);
    return 0;
}
