/* The loops over rows of a table, compiled: what each one does is said in `plain_tables.py`, their twin.

   Rows are float32, dense or sparse, and of every coordinate; a value of one is its float32 times the row's scale, in
   double. Sums are made as numpy makes them: along a row pairwise, down a column one row after the other from 0.
*/

#include "loops.h"

#include <stdlib.h>
#include <string.h>

#define LEAF 128                  /* of numpy's pairwise sum: so many values have eight sums side by side */
#define AHEAD 256                 /* values of a row that are asked of the memory beforehand; it may lie behind its end */
#define TILE 64                   /* coordinates of all rows that are put in order at a time */

struct row {
    Py_buffer held[2];            /* values, places */
    const float *values;
    const int64_t *places;        /* NULL: every coordinate has a value */
    Py_ssize_t count;             /* of places */
    Py_ssize_t at;                /* of them lie before the coordinate that is next */
    double scale;
};

struct table {
    struct row *rows;
    Py_ssize_t n;
    double *room;                 /* a leaf of each row */
};

/* What is made of rows. */
struct sums {
    const double *centre;         /* squares are from here; NULL: between each two rows */
    Py_ssize_t block, count;      /* so many sums of each so many coordinates */
    const double *weights, *from; /* not NULL: first their mean is written, of what they are apart from here */
    double divisor, *mean;
};

/* --- rows of Python ---------------------------------------------------------------------------- */

static void close_table(struct table *t) {
    for (Py_ssize_t i = 0; i < t->n; i++)
        for (int j = 0; j < 2; j++)
            if (t->rows[i].held[j].obj) PyBuffer_Release(&t->rows[i].held[j]);
    free(t->rows);
    free(t->room);
}

/* Of tuples (values, places or None, scale), of which dense ones have values up to `stop`. 0: Python has an error;
   -1: it is not for us. */
static int open_table(PyObject *rows, Py_ssize_t stop, struct table *t) {
    if (!PyTuple_Check(rows)) return -1;
    t->n = 0;
    Py_ssize_t n = PyTuple_Size(rows);
    t->rows = calloc((size_t)n + 1, sizeof(struct row));
    t->room = malloc(sizeof(double) * LEAF * ((size_t)n + 1));
    int good = t->rows && t->room ? 1 : -1;
    for (Py_ssize_t i = 0; i < n && good == 1; i++) {
        struct row *row = &t->rows[i];
        PyObject *values, *places;
        t->n = i + 1;
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, i), "OOd", &values, &places, &row->scale)) good = 0;
        else if (PyObject_GetBuffer(values, &row->held[0], PyBUF_SIMPLE)) good = 0;
        else if (places != Py_None && PyObject_GetBuffer(places, &row->held[1], PyBUF_SIMPLE)) good = 0;
        else {
            row->values = row->held[0].buf;
            row->places = places == Py_None ? NULL : row->held[1].buf;
            row->count = row->held[1].len / 8;
            Py_ssize_t wanted = row->places ? row->count : stop;
            if (row->held[0].len / 4 < wanted || !aligned(&row->held[0], 4)) good = -1;
            if (row->places && !aligned(&row->held[1], 8)) good = -1;
        }
    }
    if (good != 1) close_table(t);
    return good;
}

/* --- values ------------------------------------------------------------------------------------ */

WIDE static void widen(const float *restrict x, Py_ssize_t n, double scale, double *restrict out) {
    for (Py_ssize_t i = 0; i < n; i++) out[i] = (double)x[i] * scale;
}

/* The row's values from `start` on; one call after the other goes on to higher coordinates. */
static void fill(struct row *row, Py_ssize_t start, Py_ssize_t n, double *out) {
    if (!row->places) {
        for (Py_ssize_t i = 0; i < n; i += 16) __builtin_prefetch(row->values + start + i + AHEAD);
        widen(row->values + start, n, row->scale, out);
        return;
    }
    memset(out, 0, sizeof(double) * (size_t)n);
    for (; row->at < row->count && row->places[row->at] - start < n; row->at++) {
        Py_ssize_t place = row->places[row->at] - start;
        if (place >= 0) out[place] = (double)row->values[row->at] * row->scale;
    }
}

static void fill_all(const struct table *t, Py_ssize_t start, Py_ssize_t n, Py_ssize_t stride, double *out) {
    for (Py_ssize_t i = 0; i < t->n; i++) fill(&t->rows[i], start, n, out + i * stride);
}

/* --- means ------------------------------------------------------------------------------------- */

WIDE static void add_apart(
    double *restrict sum, double weight, const double *restrict x, const double *restrict from, Py_ssize_t n
) {
    for (Py_ssize_t i = 0; i < n; i++) sum[i] += weight * (x[i] - from[i]);
}

WIDE static void add_times(double *restrict sum, double weight, const double *restrict x, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++) sum[i] += weight * x[i];
}

/* Of rows that lie in `room`. */
static void mean_of_leaf(const struct table *t, const struct sums *s, Py_ssize_t start, Py_ssize_t n) {
    double sum[LEAF] = {0.0}, *out = s->mean + start;
    const double *from = s->from ? s->from + start : NULL;
    for (Py_ssize_t i = 0; i < t->n; i++) {
        if (from) add_apart(sum, s->weights[i], t->room + i * LEAF, from, n);
        else add_times(sum, s->weights[i], t->room + i * LEAF, n);
    }
    for (Py_ssize_t i = 0; i < n; i++) out[i] = from ? from[i] + sum[i] / s->divisor : sum[i] / s->divisor;
}

static void mean_of(const struct table *t, const struct sums *s, Py_ssize_t start, Py_ssize_t stop) {
    for (; start < stop; start += LEAF) {
        Py_ssize_t n = stop - start < LEAF ? stop - start : LEAF;
        fill_all(t, start, n, LEAF, t->room);
        mean_of_leaf(t, s, start, n);
    }
}

/* --- squares of distances ---------------------------------------------------------------------- */

static double in_pairs(const double *sums) {
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The sum of (a - b)^2 of at most LEAF values. */
WIDE static double apart(const double *a, const double *b, Py_ssize_t n) {
    double sums[8] = {0.0}, sum;
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += (a[i + j] - b[i + j]) * (a[i + j] - b[i + j]);
    sum = in_pairs(sums);
    for (; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sum;
}

/* The same of LEAF values and four rows b, which are summed side by side: one sum would wait for itself. */
WIDE static void four_apart(const double *restrict a, const double *restrict b, double *restrict out) {
    double sums[4][8] = {{0.0}};
    for (int i = 0; i < LEAF; i += 8)
        for (int row = 0; row < 4; row++)
            for (int j = 0; j < 8; j++) {
                double d = a[i + j] - b[row * LEAF + i + j];
                sums[row][j] += d * d;
            }
    for (int row = 0; row < 4; row++) out[row] = in_pairs(sums[row]);
}

/* The same of `a` and each of the rows b. */
static void all_apart(const double *a, const double *b, Py_ssize_t rows, Py_ssize_t n, double *out) {
    Py_ssize_t row = 0;
    if (n == LEAF)
        for (; row + 4 <= rows; row += 4) four_apart(a, b + row * LEAF, out + row);
    for (; row < rows; row++) out[row] = apart(a, b + row * LEAF, n);
}

/* What is summed of coordinates: of each row its squares from the centre, or of each pair those between. */
static void of_leaf(const struct table *t, const struct sums *s, Py_ssize_t start, Py_ssize_t n, double *out) {
    fill_all(t, start, n, LEAF, t->room);
    if (s->weights) mean_of_leaf(t, s, start, n);
    if (s->centre) {
        all_apart(s->centre + start, t->room, t->n, n, out);
        return;
    }
    for (Py_ssize_t i = 0; i < t->n; i++) {
        all_apart(t->room + i * LEAF, t->room + (i + 1) * LEAF, t->n - i - 1, n, out);
        out += t->n - i - 1;
    }
}

/* The same pairwise; `room` is for what the halves are summed to, of log2(n / LEAF) + 1 levels. */
static void of_block(
    const struct table *t, const struct sums *s, Py_ssize_t start, Py_ssize_t n, double *out, double *room
) {
    if (n <= LEAF) {
        of_leaf(t, s, start, n, out);
        return;
    }
    Py_ssize_t half = n / 2;
    half -= half % 8;
    of_block(t, s, start, half, out, room + s->count);
    of_block(t, s, start + half, n - half, room, room + s->count);
    for (Py_ssize_t i = 0; i < s->count; i++) out[i] += room[i];
}

static void of_blocks(
    const struct table *t, const struct sums *s, Py_ssize_t start, Py_ssize_t stop, double *out, double *room
) {
    for (; start < stop; start += s->block, out += s->count)
        of_block(t, s, start, stop - start < s->block ? stop - start : s->block, out, room);
}

/* --- what lies in the middle ------------------------------------------------------------------- */

typedef double pack __attribute__((vector_size(32)));
typedef int64_t flags __attribute__((vector_size(32)));

/* Of each pair the smaller one to `a`. */
WIDE static void exchange(double *restrict a, double *restrict b) {
    for (int i = 0; i < TILE; i += 4) {
        pack x, y;
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        flags less = x < y;
        pack low = (pack)((less & (flags)x) | (~less & (flags)y)), high = (pack)((less & (flags)y) | (~less & (flags)x));
        memcpy(a + i, &low, sizeof low);
        memcpy(b + i, &high, sizeof high);
    }
}

WIDE static int64_t between(const double *x, const double *least, const double *greatest, Py_ssize_t n) {
    int64_t count = 0;
    for (Py_ssize_t i = 0; i < n; i++) count += (x[i] >= least[i]) & (x[i] <= greatest[i]);
    return count;
}

/* The mean of those of `first` to `last` in order; how many of each row lie between them is added to `inside`. */
static void middle(
    const struct table *t, const int64_t *network, Py_ssize_t steps, Py_ssize_t first, Py_ssize_t last, Py_ssize_t start,
    Py_ssize_t stop, double *came, double *ordered, double *out, int64_t *inside
) {
    size_t bytes = sizeof(double) * TILE * (size_t)t->n;
    double sum[TILE];
    for (Py_ssize_t at = start; at < stop; at += TILE) {
        Py_ssize_t n = stop - at < TILE ? stop - at : TILE;
        fill_all(t, at, n, TILE, came);
        memcpy(ordered, came, bytes);
        for (Py_ssize_t s = 0; s < steps; s++)
            exchange(ordered + network[2 * s] * TILE, ordered + network[2 * s + 1] * TILE);
        memset(sum, 0, sizeof sum);
        for (Py_ssize_t i = first; i <= last; i++)
            for (int j = 0; j < TILE; j++) sum[j] += ordered[i * TILE + j];
        for (Py_ssize_t j = 0; j < n; j++) out[at + j] = sum[j] / (double)(last - first + 1);
        for (Py_ssize_t i = 0; i < t->n; i++)
            inside[i] += between(came + i * TILE, ordered + first * TILE, ordered + last * TILE, n);
    }
}

/* --- for the module ---------------------------------------------------------------------------- */

/* Whether a buffer has `count` numbers of 8 bytes. */
static int has(const Py_buffer *buffer, Py_ssize_t count) { return aligned(buffer, 8) && buffer->len >= 8 * count; }

/* Of all coordinates of a range; `out` has the sums of one block after the other. */
static PyObject *summed(PyObject *rows, struct sums *s, Py_ssize_t start, Py_ssize_t stop, const Py_buffer *out) {
    struct table t;
    int good = s->block > 0 && 0 <= start && start <= stop ? open_table(rows, stop, &t) : -1;
    if (good == 0) return NULL;
    if (good == 1) {
        Py_ssize_t levels = 2;
        for (Py_ssize_t n = s->block; n > LEAF / 2; n /= 2) levels++;
        s->count = s->centre ? t.n : t.n * (t.n - 1) / 2;
        double *room = malloc(sizeof(double) * (size_t)(s->count * levels + 1));
        good = room && has(out, s->count * ((stop - start + s->block - 1) / s->block)) ? 1 : -1;
        if (good == 1) FREELY(stop - start, of_blocks(&t, s, start, stop, out->buf, room));
        free(room);
        close_table(&t);
    }
    return PyBool_FromLong(good == 1);
}

PyObject *py_row_squares(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    PyObject *rows, *found;
    Py_ssize_t start, stop;
    struct sums s = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "Onnny*w*", &rows, &s.block, &start, &stop, &b[0], &b[1])) return NULL;
    s.centre = b[0].buf;
    found = has(&b[0], stop) ? summed(rows, &s, start, stop, &b[1]) : PyBool_FromLong(0);
    release(b, 2);
    return found;
}

PyObject *py_pair_squares(PyObject *self, PyObject *args) {
    Py_buffer b[1];
    PyObject *rows, *found;
    Py_ssize_t start, stop;
    struct sums s = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "Onnnw*", &rows, &s.block, &start, &stop, &b[0])) return NULL;
    found = summed(rows, &s, start, stop, &b[0]);
    release(b, 1);
    return found;
}

/* A mean of rows; with a place for them the squares from it as well. `from` is None or where the mean is taken from. */
PyObject *py_row_mean(PyObject *self, PyObject *args) {
    Py_buffer b[4] = {{0}};
    PyObject *rows, *from, *sums, *found = NULL;
    Py_ssize_t start, stop;
    struct table t;
    struct sums s = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "Onnny*dOw*O", &rows, &s.block, &start, &stop, &b[0], &s.divisor, &from, &b[1], &sums))
        return NULL;
    if (from != Py_None && PyObject_GetBuffer(from, &b[2], PyBUF_SIMPLE)) goto end;
    if (sums != Py_None && PyObject_GetBuffer(sums, &b[3], PyBUF_WRITABLE)) goto end;
    s.weights = b[0].buf;
    s.mean = b[1].buf;
    s.centre = s.mean;
    s.from = from == Py_None ? NULL : b[2].buf;
    int good = 0 <= start && start <= stop && PyTuple_Check(rows) && has(&b[0], PyTuple_Size(rows)) &&
               has(&b[1], stop) && (!s.from || has(&b[2], stop)) ? 1 : -1;
    if (good == 1 && sums != Py_None) found = summed(rows, &s, start, stop, &b[3]);
    else {
        if (good == 1) good = open_table(rows, stop, &t);
        if (good == 1) {
            FREELY(stop - start, mean_of(&t, &s, start, stop));
            close_table(&t);
        }
        found = good == 0 ? NULL : PyBool_FromLong(good == 1);
    }
end:
    for (int i = 0; i < 4; i++)
        if (b[i].obj) PyBuffer_Release(&b[i]);
    return found;
}

/* Whether a network of exchanges is one of n rows. */
static int is_of(const int64_t *network, Py_ssize_t steps, Py_ssize_t n) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < 2 * steps; i++) bad |= network[i] < 0 || network[i] >= n;
    return !bad;
}

PyObject *py_row_middle(PyObject *self, PyObject *args) {
    Py_buffer b[3];
    PyObject *rows;
    Py_ssize_t first, last, start, stop;
    struct table t;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*nnnnw*w*", &rows, &b[0], &first, &last, &start, &stop, &b[1], &b[2])) return NULL;
    int good = 0 <= start && start <= stop ? open_table(rows, stop, &t) : -1;
    if (good == 1) {
        Py_ssize_t steps = b[0].len / 16;
        double *room = calloc((size_t)t.n * 2 + 1, sizeof(double) * TILE); /* a last tile may be short */
        if (!room || !has(&b[0], 0) || !has(&b[1], stop) || !has(&b[2], t.n) || !is_of(b[0].buf, steps, t.n) ||
            first < 0 || first > last || last >= t.n)
            good = -1;
        else
            FREELY(stop - start, middle(&t, b[0].buf, steps, first, last, start, stop, room, room + t.n * TILE,
                                        b[1].buf, b[2].buf));
        free(room);
        close_table(&t);
    }
    release(b, 3);
    return good == 0 ? NULL : PyBool_FromLong(good == 1);
}
