/* Calls the sparse kernel with damaged arrays. Compiled together with sparse.c under AddressSanitizer and
   UndefinedBehaviorSanitizer, which end the program at the first access outside of an array:

       cc -g -O1 -std=gnu11 -fsanitize=address,undefined -fno-sanitize-recover=all sparse.c fuzz_sparse.c -o fuzz
       ./fuzz CASES SEED

   A case is a random matrix in the kernel's format, random tokens, and one to three changes: other counts, columns or
   starts, arrays that are too short or too long, other sizes. Every array is allocated with exactly the size that the
   kernel is told. An undamaged case is computed a second time without the format and compared. Prints the number of
   cases that were computed, refused, and undamaged. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROW_BLOCK 64

int platon_level(void);
int platon_sparse_linear(const float *x, int64_t tokens, int64_t x_stride, const float *values, int64_t values_bytes,
                         const uint8_t *columns, int64_t columns_bytes, const uint16_t *counts, int64_t counts_bytes,
                         const int64_t *starts, int64_t starts_bytes, const float *bias, int64_t bias_bytes,
                         int64_t rows, int64_t columns_in, int64_t width, int activation, float *out,
                         int64_t out_stride, int threads, void *parallel, int level);

static uint64_t state;

/* xorshift64*: the same cases on every machine. */
static uint64_t draw(uint64_t below) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 2685821657736338717ull >> 16) % below;
}

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

int main(int count, char **words) {
    int64_t cases = count > 1 ? atoll(words[1]) : 1000, computed = 0, refused = 0, undamaged = 0;
    state = 88172645463325252ull + (count > 2 ? strtoull(words[2], NULL, 10) : 0) * 1000003;
    for (int64_t number = 0; number < cases; number++) {
        int64_t rows = 1 + draw(140), columns_in = draw(300), width = 1 + draw(256), tokens = 1 + draw(90);
        int64_t panels = columns_in > width ? (columns_in + width - 1) / width : 1;
        int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        uint64_t percent = draw(101);
        struct array dense = make(rows * columns_in * 4), values = make(rows * columns_in * 4);
        struct array columns = make(rows * columns_in);
        struct array counts = make(blocks * panels * ROW_BLOCK * 2), starts = make((blocks + 1) * 8);
        struct array bias = make(draw(3) ? rows * 4 : 0);
        struct array x = make(tokens * columns_in * 4), out = make(tokens * rows * 4);
        float *weight = dense.data, *token = x.data;
        for (int64_t i = 0; i < rows * columns_in; i++)
            weight[i] = draw(100) < percent ? (float)draw(1000) / 500 - 1 : 0;
        for (int64_t i = 0; i < tokens * columns_in; i++)
            token[i] = (float)draw(1000) / 500 - 1;
        for (int64_t i = 0; i < bias.bytes / 4; i++)
            ((float *)bias.data)[i] = (float)draw(1000) / 500 - 1;
        int64_t filled = 0;
        for (int64_t block = 0; block < blocks; block++) {
            ((int64_t *)starts.data)[block] = filled;
            for (int64_t panel = 0; panel < panels; panel++)
                for (int64_t row = 0; row < ROW_BLOCK; row++) {
                    int64_t before = filled, at = block * ROW_BLOCK + row;
                    for (int64_t i = panel * width; at < rows && i < columns_in && i < (panel + 1) * width; i++)
                        if (weight[at * columns_in + i] != 0) {
                            ((float *)values.data)[filled] = weight[at * columns_in + i];
                            ((uint8_t *)columns.data)[filled++] = (uint8_t)(i - panel * width);
                        }
                    ((uint16_t *)counts.data)[(block * panels + panel) * ROW_BLOCK + row] =
                        (uint16_t)((filled - before) * ROW_BLOCK + row);
                }
        }
        ((int64_t *)starts.data)[blocks] = filled;
        resize(&values, filled * 4);
        resize(&columns, filled);

        struct array *arrays[] = {&values, &columns, &counts, &starts, &bias};
        int64_t told_rows = rows, told_width = width;
        int damaged = draw(8) != 0, missing = !bias.bytes;
        for (uint64_t changes = damaged ? 1 + draw(3) : 0; changes; changes--)
            switch (draw(9)) {
            case 0:
            case 1:
                damage_bytes(&counts);
                break;
            case 2:
            case 3:
                damage_bytes(&columns);
                break;
            case 4:
                damage_bytes(&starts);
                break;
            case 5:
                ((int64_t *)starts.data)[draw(blocks + 1)] = (int64_t)draw(filled + 3) - 1;
                break;
            case 6: {
                struct array *array = arrays[draw(5)];
                if (array == &starts)
                    changes = 1; /* the last change: case 5 writes to it by index */
                resize(array, draw(2) ? (int64_t)draw(array->bytes + 40) : array->bytes - 1 - (int64_t)draw(8));
                break;
            }
            case 7:
                told_width = draw(3) ? (int64_t)draw(300) - 10 : (int64_t)(state >> 1);
                break;
            default:
                told_rows = draw(4) ? 1 + (int64_t)draw(2 * rows) : (int64_t)(state >> draw(64));
                if (told_rows > rows && told_rows < 100000) /* larger ones are refused: counts and starts do not fit */
                    resize(&out, tokens * told_rows * 4);
            }
        int level = (int)draw(platon_level() + 1);
        int code = platon_sparse_linear(x.data, tokens, columns_in, values.data, values.bytes, columns.data,
                                        columns.bytes, counts.data, counts.bytes, starts.data, starts.bytes,
                                        missing ? NULL : bias.data, missing ? -1 : bias.bytes, told_rows, columns_in,
                                        told_width, (int)draw(4) * damaged, out.data, told_rows, 1, NULL, level);
        if (code == 1) {
            printf("no memory in case %ld\n", (long)number);
            return 1;
        }
        computed += code == 0;
        refused += code == 2;
        undamaged += !damaged;
        for (int64_t t = 0; !damaged && t < tokens; t++)
            for (int64_t row = 0; row < rows; row++) {
                double sum = missing ? 0 : ((float *)bias.data)[row], size = fabs(sum);
                for (int64_t i = 0; i < columns_in; i++) {
                    double term = (double)weight[row * columns_in + i] * token[t * columns_in + i];
                    sum += term;
                    size += fabs(term);
                }
                if (code || !(fabs(sum - ((float *)out.data)[t * rows + row]) <= 3e-6 * size + 1e-30)) {
                    printf("wrong result in case %ld\n", (long)number);
                    return 1;
                }
            }
        struct array all[] = {dense, values, columns, counts, starts, bias, x, out};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i].data);
    }
    printf("{\"computed\": %ld, \"refused\": %ld, \"undamaged\": %ld}\n", (long)computed, (long)refused,
           (long)undamaged);
    return 0;
}
