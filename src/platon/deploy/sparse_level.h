/* The kernel for one vector width. sparse.c includes this file once for each instruction set and defines VECTOR (floats
   in a vector), MOST (vectors in the widest tile), TARGET (a function attribute) and NAME(x) (x with a suffix).

   A tile is 1, 2, 4, 8 or 16 vectors of tokens, or a single token. It is stored feature by feature, the tokens of a feature
   contiguous, so that a weight is broadcast and multiplied with a contiguous vector. */

typedef float NAME(vec) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef uint32_t NAME(bits) __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
#define VEC NAME(vec)
#define INTS NAME(ints)
#define BITS NAME(bits)

#include "sparse_activation.h"
#include "sparse_transpose.h"
#include "sparse_rows.h"
#include "sparse_norm.h"
#include "sparse_attention.h"
#include "sparse_dot.h"

#undef VEC
#undef INTS
#undef BITS
#undef VECTOR
#undef MOST
#undef TARGET
#undef NAME
#undef ASK_FOR
#undef LEAST
#undef MOST_OF
#undef WHOLE
#undef SCALED
