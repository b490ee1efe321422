/* Whether the contents of a matrix are as `from_dense` makes them. Included by sparse.c. */

/* Rows or columns twice or outside of the matrix; the kernel would stay inside its arrays, and compute something else. */
enum { SOUND, ROW_TWICE, WRONG_STARTS, NO_SUCH_COLUMN, NO_SUCH_ROW };

/* One of the numbers above. The caller has checked the lengths of the arrays. */
int platon_sparse_problem(const struct layer *l) {
    struct matrix m;
    if (!accept(l, &m))
        return WRONG_STARTS;
    const uint16_t *count = m.counts;
    int64_t at = 0;
    for (int64_t block = 0; block < m.blocks; block++) {
        if (m.starts[block] != at)
            return WRONG_STARTS;
        for (int64_t panel = 0; panel < m.panels; panel++, count += ROW_BLOCK) {
            int64_t width = m.columns_in - panel * m.width, length = 0;
            uint64_t rows = 0;
            for (int64_t i = 0; i < ROW_BLOCK; i++) {
                rows |= (uint64_t)1 << count[i] % ROW_BLOCK;
                length += count[i] / ROW_BLOCK;
                if (count[i] / ROW_BLOCK && block * ROW_BLOCK + count[i] % ROW_BLOCK >= m.rows)
                    return NO_SUCH_ROW;
            }
            if (rows != UINT64_MAX)
                return ROW_TWICE;
            if (length > m.starts[block + 1] - at)
                return WRONG_STARTS;
            uint8_t last = 0;
            for (int64_t i = at; i < at + length; i++)
                last = m.columns[i] > last ? m.columns[i] : last;
            if (length && last >= (width < m.width ? width : m.width))
                return NO_SUCH_COLUMN;
            at += length;
        }
    }
    return m.starts[m.blocks] == at && at == l->columns_bytes ? SOUND : WRONG_STARTS;
}
