/* Plain SGD of a chain of linear layers with max(x, 0) between them, one training after the other.

   | symbol | meaning                                                                                  |
   |--------|------------------------------------------------------------------------------------------|
   | x_l    | what goes into layer l, an example a row; x_0 the batch, the last one the scores z       |
   | w_l    | its weights as they multiply a row, (in, out); b_l its biases                            |
   | g      | the gradient at what comes out of a layer                                                |

       x_(l+1) = max(x_l w_l + b_l, 0), of the last layer without max;   g = (softmax z - 1 at the class) / length
       g <- g w_l^T where x_l > 0, of w_l before its step;   w_l <- w_l - rate x_l^T g, b_l <- b_l - rate sum g

   One operation at a time and each sum in an order of its own: weights have the same bits on every processor that
   has AVX2; a loss is of the C library's `log`. Narrower registers take twenty times as long, and torch less: there
   this is for nobody. A row has room for a multiple of COLUMNS, and there are a multiple of ROWS; what is beyond the
   chain is 0.
*/

#include "loops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define WITH_AVX2 __attribute__((target("avx2")))
#define ROWS 4
#define COLUMNS 16
#define LANES 8
#define LAYERS_MAX 16
#define WIDTH_MAX (1 << 24)
#define TO_WHOLE 12582912.0f      /* 1.5 * 2^23: added and taken away it rounds to the nearest */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    int layers;
    int64_t widths[LAYERS_MAX + 1], room[LAYERS_MAX + 1]; /* numbers of a row, and with what is beyond */
    float *x[LAYERS_MAX + 1], *w[LAYERS_MAX], *b[LAYERS_MAX], *back[LAYERS_MAX], *g, *below;
} Chain;

static int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* c (rows, columns) += scale a b: a has its rows `row` apart and their numbers `next`; b is (depth, columns). */
WITH_AVX2 static void add_product(
    float *c, int64_t rows, int64_t columns, const float *a, int64_t row, int64_t next, const float *b,
    int64_t depth, float scale
) {
    for (int64_t j = 0; j < columns; j += COLUMNS)
        for (int64_t i = 0; i < rows; i += ROWS) {
            lanes sums[ROWS][COLUMNS / LANES] = {{{0}}};
            const float *from = a + i * row;
            for (int64_t k = 0; k < depth; k++) {
                const lanes *p = (const lanes *)(b + k * columns + j);
                lanes low = p[0], high = p[1];
                for (int r = 0; r < ROWS; r++) {
                    sums[r][0] += from[r * row + k * next] * low;
                    sums[r][1] += from[r * row + k * next] * high;
                }
            }
            for (int r = 0; r < ROWS; r++) {
                lanes *to = (lanes *)(c + (i + r) * columns + j);
                to[0] += scale * sums[r][0];
                to[1] += scale * sums[r][1];
            }
        }
}

static inline float added(const lanes *x) {
    const float *p = (const float *)x;
    return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
}

/* e^x of x <= 0 in the place of x (n,), by Cephes' polynomial; where x is below -87, or no number, e^-87. */
WITH_AVX2 static void exponentials(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        lanes *at = (lanes *)(x + i), least = (lanes){0} - 87.0f;
        words over = (words)(*at > least);
        lanes v = (lanes)(((words)*at & over) | ((words)least & ~over));
        lanes moved_up = v * 1.44269504f + TO_WHOLE, whole = moved_up - TO_WHOLE; /* its lowest bits are the number */
        lanes r = v - whole * 0.693359375f + whole * 2.12194440e-4f;
        lanes y = 1.9875691500e-4f * r + 1.3981999507e-3f;
        y = y * r + 8.3334519073e-3f;
        y = y * r + 4.1665795894e-2f;
        y = y * r + 1.6666665459e-1f;
        y = y * r + 5.0000001201e-1f;
        *at = (y * r * r + r + 1.0f) * (lanes)(((words)moved_up + 127) << 23);
    }
}

/* The mean loss of a batch; the scores become their gradient. What is not finite makes all of it no number. */
WITH_AVX2 static double cross_entropy(float *z, int64_t room, int64_t classes, const int64_t *at, int64_t length) {
    double loss = 0.0;
    float each = 1.0f / (float)length;
    lanes wrong = {0};
    for (int64_t i = 0; i < length; i++) {
        float *row = z + i * room, most = row[0];
        for (int64_t c = 1; c < classes; c++) most = row[c] > most ? row[c] : most;
        for (int64_t c = classes; c < room; c++) row[c] = most;
        for (int64_t c = 0; c < room; c += LANES) {
            wrong += 0.0f * *(lanes *)(row + c);
            *(lanes *)(row + c) -= most;
        }
        loss -= row[at[i]];
    }
    exponentials(z, length * room);
    for (int64_t i = 0; i < length; i++) {
        float *row = z + i * room;
        lanes sums = {0};
        for (int64_t c = classes; c < room; c++) row[c] = 0.0f;
        for (int64_t c = 0; c < room; c += LANES) sums += *(lanes *)(row + c);
        float sum = added(&sums), part = each / sum + added(&wrong);
        for (int64_t c = 0; c < room; c += LANES) *(lanes *)(row + c) *= part;
        row[at[i]] -= each;
        loss += log((double)sum);
    }
    return (loss + added(&wrong)) / (double)length;
}

WITH_AVX2 static void keep_positive(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] < 0.0f ? 0.0f : x[i]; /* what is no number stays */
}

WITH_AVX2 static void drop_where_zero(float *g, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) g[i] = x[i] > 0.0f ? g[i] : 0.0f;
}

/* b -= rate times the sum of the rows of g. */
WITH_AVX2 static void add_rows(float *b, const float *g, int64_t room, int64_t length, float rate) {
    for (int64_t j = 0; j < room; j += LANES) {
        lanes sum = {0};
        for (int64_t i = 0; i < length; i++) sum += *(const lanes *)(g + i * room + j);
        *(lanes *)(b + j) -= rate * sum;
    }
}

/* To `out` (columns, rows), both multiples of COLUMNS: by blocks, whose rows stay in the nearest cache. */
WITH_AVX2 static void transpose(float *out, const float *in, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += COLUMNS)
        for (int64_t c = 0; c < columns; c += COLUMNS)
            for (int64_t j = 0; j < COLUMNS; j++)
                for (int64_t i = 0; i < COLUMNS; i++)
                    out[(c + j) * rows + r + i] = in[(r + i) * columns + c + j];
}

/* One step: x_0 has the batch, of which these are the classes. */
static double descend(Chain *n, const int64_t *at, int64_t length, float rate) {
    int64_t rows = up_to(length, ROWS);
    int last = n->layers;
    for (int l = 0; l < last; l++) {
        int64_t room = n->room[l + 1];
        for (int64_t i = 0; i < rows; i++) memcpy(n->x[l + 1] + i * room, n->b[l], 4 * room);
        add_product(n->x[l + 1], rows, room, n->x[l], n->room[l], 1, n->w[l], n->widths[l], 1.0f);
        if (l + 1 < last) keep_positive(n->x[l + 1], rows * room);
    }
    double loss = cross_entropy(n->x[last], n->room[last], n->widths[last], at, length);
    memcpy(n->g, n->x[last], 4 * length * n->room[last]);
    for (int l = last - 1; l >= 0; l--) {
        int64_t in = n->room[l], out = n->room[l + 1];
        memset(n->g + length * out, 0, 4 * (rows - length) * out);
        if (l) {
            transpose(n->back[l], n->w[l], in, out);
            memset(n->below, 0, 4 * rows * in);
            add_product(n->below, rows, in, n->g, out, 1, n->back[l], n->widths[l + 1], 1.0f);
            drop_where_zero(n->below, n->x[l], rows * in);
        }
        add_product(n->w[l], in, out, n->x[l], 1, in, n->g, length, -rate);
        add_rows(n->b[l], n->g, out, length, rate);
        float *kept = n->g;
        n->g = n->below;
        n->below = kept;
    }
    return loss;
}

/* Memory for all of it, zeros; what is before the first array is the block to free. */
static float *made(Chain *n, int64_t length) {
    int64_t rows = up_to(length, ROWS), widest = 0, size = 0;
    for (int l = 0; l <= n->layers; l++) {
        n->room[l] = up_to(n->widths[l], COLUMNS);
        widest = n->room[l] > widest ? n->room[l] : widest;
        size += rows * n->room[l] + (l ? 2 * n->room[l - 1] * n->room[l] + n->room[l] : 0);
    }
    float *block = calloc(size + 2 * rows * widest, 4), *next = block;
    if (!block) return NULL;
    for (int l = 0; l <= n->layers; l++) {
        n->x[l] = next;
        next += rows * n->room[l];
        if (!l) continue;
        n->w[l - 1] = next;
        n->back[l - 1] = n->w[l - 1] + n->room[l - 1] * n->room[l];
        n->b[l - 1] = n->back[l - 1] + n->room[l - 1] * n->room[l];
        next = n->b[l - 1] + n->room[l];
    }
    n->g = next;
    n->below = next + rows * widest;
    return block;
}

/* The weights of a model, as torch has them, (out, in) and then the biases, into the chain; or back. */
static void moved(Chain *n, float *weights, int into) {
    for (int l = 0; l < n->layers; l++) {
        int64_t in = n->widths[l], out = n->widths[l + 1], room = n->room[l + 1];
        for (int64_t o = 0; o < out; o++)
            for (int64_t i = 0; i < in; i++, weights++) {
                float *own = n->w[l] + i * room + o;
                if (into) *own = *weights;
                else *weights = *own;
            }
        if (into) memcpy(n->b[l], weights, 4 * out);
        else memcpy(weights, n->b[l], 4 * out);
        weights += out;
    }
}

/* The sum of the mean losses of all steps, the first from `rows`; classes of a batch go to `at`. */
static double trained(
    Chain *n, float *weights, const float *x, const int64_t *y, const int64_t *rows, const int64_t *lengths,
    int64_t steps, float rate, int64_t *at
) {
    double loss = 0.0;
    int64_t width = n->widths[0];
    moved(n, weights, 1);
    for (int64_t s = 0; s < steps; rows += lengths[s++]) {
        for (int64_t i = 0; i < lengths[s]; i++) {
            memcpy(n->x[0] + i * n->room[0], x + rows[i] * width, 4 * width);
            at[i] = y[rows[i]];
        }
        loss += descend(n, at, lengths[s], rate);
    }
    moved(n, weights, 0);
    return loss;
}

/* The longest batch, or 0 if they are not what a chain takes. */
static int64_t longest(Chain *n, const Py_buffer *b) {
    const int64_t *y = b[3].buf, *rows = b[4].buf, *lengths = b[5].buf, *widths = b[1].buf;
    int64_t count = b[3].len / 8, found = 0, all = 0, size = 0;
    n->layers = (int)(b[1].len / 8 <= LAYERS_MAX + 1 ? b[1].len / 8 - 1 : 0);
    for (int l = 0; l <= n->layers; l++) {
        n->widths[l] = widths[l];
        if (widths[l] < 1 || widths[l] > WIDTH_MAX) return 0;
        size += l ? (widths[l - 1] + 1) * widths[l] : 0;
    }
    if (n->layers < 1 || b[0].len != 4 * size || b[2].len != 4 * count * widths[0]) return 0;
    for (int64_t s = 0; s < b[5].len / 8; s++) {
        if (lengths[s] < 1 || lengths[s] > b[4].len / 8 - all) return 0;
        all += lengths[s];
        found = lengths[s] > found ? lengths[s] : found;
    }
    if (all != b[4].len / 8) return 0;
    for (int64_t i = 0; i < all; i++)
        if (rows[i] < 0 || rows[i] >= count || y[rows[i]] < 0 || y[rows[i]] >= widths[n->layers]) return 0;
    return found;
}

/* None: it is not for us. */
PyObject *py_descend(PyObject *self, PyObject *args) {
    Py_buffer b[6];
    Chain n;
    double rate, loss = 0.0;
    int good, failed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*d", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &rate)) return NULL;
    good = __builtin_cpu_supports("avx2") && aligned(&b[0], 4) && aligned(&b[2], 4);
    for (int i = 1; i < 6; i++) good = good && (i == 2 || aligned(&b[i], 8));
    int64_t length = good ? longest(&n, b) : 0;
    if (length) {
        float *block = made(&n, length);
        int64_t *at = malloc(8 * length);
        failed = !block || !at;
        Py_BEGIN_ALLOW_THREADS;
        if (!failed)
            loss = trained(
                &n, b[0].buf, b[2].buf, b[3].buf, b[4].buf, b[5].buf, b[5].len / 8, (float)rate, at
            );
        free(block);
        free(at);
        Py_END_ALLOW_THREADS
    }
    release(b, 6);
    if (failed) return PyErr_NoMemory();
    if (!length) Py_RETURN_NONE;
    return PyFloat_FromDouble(loss);
}

#else

PyObject *py_descend(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    Py_RETURN_NONE;
}

#endif
