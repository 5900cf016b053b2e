/* The loops of the codecs and of the fold, compiled: what each one does is said in `plain.py`, its twin.

   Both give the same bits: IEEE float32, one operation at a time, nothing contracted (-ffp-contract=off), no order
   of addition. A loop that meets what it is not for changes nothing and says so; its twin finds the words.
   ANABRANCH_KERNELS=numpy in the environment keeps this module from being imported.
*/

#include "loops.h"

#include <stdlib.h>
#include <string.h>

#define MAGNITUDE 0x7FFFFFFFu     /* of the bits of a float32: all but the sign */
#define INFINITE 0x7F800000u      /* what is not a number has more */
#define BF16_TOP 0x7F7F0000u      /* the largest finite one */
#define TO_WHOLE 12582912.0f      /* 1.5 * 2^23: added and taken away it rounds to the nearest, ties to even */
#define TINY 1e-30f
#define MORE 255

enum kind { INT8, INT4, E3M0 };
enum found { GOOD, BAD_CODE, BAD_PADDING };

static const float POWERS[16] = {
    0.0f, 0.015625f, 0.03125f, 0.0625f, 0.125f, 0.25f, 0.5f, 1.0f,
    0.0f, -0.015625f, -0.03125f, -0.0625f, -0.125f, -0.25f, -0.5f, -1.0f,
};

static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

/* --- magnitudes -------------------------------------------------------------------------------- */

WIDE static uint32_t top_of(const float *x, Py_ssize_t n) {
    uint32_t top = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & MAGNITUDE;
        top = bits > top ? bits : top;
    }
    return top;
}

static inline int any_over(const float *x, int n, uint32_t least) {
    uint32_t any = 0;
    for (int i = 0; i < n; i++) any |= (bits_of(x[i]) & MAGNITUDE) >= least;
    return (int)any;
}

/* Those of a range behind `count` others: how many there are then. */
static Py_ssize_t select_few(
    const float *x, Py_ssize_t start, Py_ssize_t stop, uint32_t least, Py_ssize_t count, Py_ssize_t room,
    int64_t *places, float *kept
) {
    for (Py_ssize_t i = start; i < stop; i++) {
        if (!any_over(x + i, 1, least)) continue;
        if (count < room) {
            places[count] = i;
            kept[count] = x[i];
        }
        count++;
    }
    return count;
}

/* How many there are; the first `room` of them are written. */
WIDE static Py_ssize_t select_over(
    const float *x, Py_ssize_t n, uint32_t least, Py_ssize_t room, int64_t *places, float *kept
) {
    Py_ssize_t count = 0, i = 0;
    for (; i + 32 <= n; i += 32) { /* mostly there is none: thirty-two are passed over at once */
        if (!any_over(x + i, 32, least)) continue;
        if (count + 32 > room) {
            count = select_few(x, i, i + 32, least, count, room, places, kept);
            continue;
        }
        for (int j = 0; j < 32; j++) { /* without branches: which it is nobody foresees */
            places[count] = i + j;
            kept[count] = x[i + j];
            count += any_over(x + i + j, 1, least);
        }
    }
    return select_few(x, i, n, least, count, room, places, kept);
}

/* --- codes of blocks --------------------------------------------------------------------------- */

/* To the sum of the nearest whole number and `offset`, which is even: it is the lowest byte of the float. */
WIDE static void whole_numbers(
    const float *restrict x, Py_ssize_t n, float inverse, float most, float offset, uint8_t *restrict out
) {
    for (Py_ssize_t i = 0; i < n; i++) {
        float level = x[i] * inverse;
        level = level < -most ? -most : level;
        level = level > most ? most : level;
        out[i] = (uint8_t)bits_of(level + (TO_WHOLE + offset));
    }
}

WIDE static void powers(const float *restrict x, Py_ssize_t n, float inverse, uint8_t *restrict out) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i] * inverse), size = bits & MAGNITUDE;
        int32_t least = size >= (120u << 23), code = (int32_t)((size + (1u << 22)) >> 23) - 120;
        code = code < least ? least : code;
        code = code > 7 ? 7 : code;
        out[i] = (uint8_t)(code | (code ? (int32_t)(bits >> 28) & 8 : 0));
    }
}

/* Two codes of four bits to a byte. */
WIDE static void as_halves(const uint8_t *restrict codes, Py_ssize_t n, uint8_t *restrict out) {
    for (Py_ssize_t i = 0; i < n / 2; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    if (n % 2) out[n / 2] = codes[n - 1];
}

/* The largest magnitude's bits; from INFINITE on the codes are worth nothing. */
static uint32_t encode(
    const float *x, Py_ssize_t n, Py_ssize_t block, enum kind kind, float most, uint32_t scale_max,
    uint8_t *codes, uint8_t *scales
) {
    uint8_t fours[256];
    uint32_t largest = 0;
    for (Py_ssize_t start = 0; start < n; start += block) {
        Py_ssize_t size = n - start < block ? n - start : block;
        uint32_t top = top_of(x + start, size);
        largest = top > largest ? top : largest;
        if (top >= INFINITE) return top;
        float scale = float_of(top) > TINY ? float_of(top) : TINY;
        uint32_t bits = (bits_of(scale / most) + 0xFFFF) >> 16;
        bits = bits > scale_max ? scale_max : bits;
        uint16_t half = (uint16_t)bits;
        memcpy(scales, &half, 2);
        scales += 2;
        float inverse = 1.0f / float_of(bits << 16);
        if (kind == INT8) whole_numbers(x + start, size, inverse, most, 0.0f, codes + start);
        else {
            if (kind == E3M0) powers(x + start, size, inverse, fours);
            else whole_numbers(x + start, size, inverse, most, 8.0f, fours);
            as_halves(fours, size, codes + start / 2);
        }
    }
    return largest;
}

WIDE static int from_bytes(const uint8_t *codes, Py_ssize_t n, float scale, float *out) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int8_t code = (int8_t)codes[i];
        bad |= code == -128;
        out[i] = (float)code * scale;
    }
    return bad;
}

WIDE static int from_halves(const uint8_t *codes, Py_ssize_t n, float scale, float *out) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n / 2; i++) {
        int first = codes[i] & 15, second = codes[i] >> 4;
        bad |= first == 0 || second == 0;
        out[2 * i] = ((float)first - 8.0f) * scale;
        out[2 * i + 1] = ((float)second - 8.0f) * scale;
    }
    if (n % 2) {
        int last = codes[n / 2] & 15;
        bad |= last == 0;
        out[n - 1] = ((float)last - 8.0f) * scale;
    }
    return bad;
}

static int from_powers(const uint8_t *codes, Py_ssize_t n, float scale, float *out) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int code = i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
        bad |= code == 8;
        out[i] = POWERS[code] * scale;
    }
    return bad;
}

static enum found decode(
    const uint8_t *codes, const uint8_t *scales, Py_ssize_t n, Py_ssize_t block, enum kind kind, float *out
) {
    int bad = 0;
    if (kind != INT8 && n % 2 && codes[n / 2] >> 4) return BAD_PADDING;
    for (Py_ssize_t start = 0; start < n; start += block, scales += 2) {
        Py_ssize_t size = n - start < block ? n - start : block;
        uint16_t half;
        memcpy(&half, scales, 2);
        float scale = float_of((uint32_t)half << 16);
        if (kind == INT8) bad |= from_bytes(codes + start, size, scale, out + start);
        else if (kind == INT4) bad |= from_halves(codes + start / 2, size, scale, out + start);
        else bad |= from_powers(codes + start / 2, size, scale, out + start);
    }
    return bad ? BAD_CODE : GOOD;
}

/* --- bf16 -------------------------------------------------------------------------------------- */

WIDE static void to_bf16(const float *x, Py_ssize_t n, uint16_t *out) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]), size = bits & MAGNITUDE;
        size = size > BF16_TOP ? BF16_TOP : size;
        bits = (bits & ~MAGNITUDE) | size;
        out[i] = (uint16_t)((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16);
    }
}

WIDE static int from_bf16(const uint8_t *halves, Py_ssize_t n, float *out) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, halves + 2 * i, 2);
        bad |= (half & 0x7F80) == 0x7F80;
        out[i] = float_of((uint32_t)half << 16);
    }
    return bad;
}

/* --- indices ----------------------------------------------------------------------------------- */

static int read_gaps(const uint8_t *data, Py_ssize_t length, Py_ssize_t k, int64_t n, int64_t *out) {
    int64_t at = -1;
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        at += data[i];
        if (data[i] == MORE) continue;
        if (found == k) return 0;
        out[found++] = ++at;
    }
    return found == k && (length == 0 || data[length - 1] != MORE) && at < n;
}

static Py_ssize_t write_gaps(const int64_t *indices, Py_ssize_t k, uint8_t *out, Py_ssize_t room) {
    int64_t before = -1;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < k; before = indices[i++]) {
        int64_t gap = indices[i] - before - 1;
        if (gap < 0 || gap / MORE + 1 > room - at) return -1;
        for (; gap >= MORE; gap -= MORE) out[at++] = MORE;
        out[at++] = (uint8_t)gap;
    }
    return at;
}

static int read_numbers(const uint8_t *data, Py_ssize_t k, int64_t n, int64_t *out) {
    int64_t before = -1;
    int bad = 0;
    for (Py_ssize_t i = 0; i < k; i++) {
        uint32_t number;
        memcpy(&number, data + 4 * i, 4);
        bad |= (int64_t)number <= before;
        out[i] = before = number;
    }
    return !bad && before < n;
}

/* --- the fold ---------------------------------------------------------------------------------- */

WIDE static void add_dense(float *out, Py_ssize_t n, float scale, const float *x) {
    for (Py_ssize_t i = 0; i < n; i++) out[i] += scale * x[i];
}

static int add_sparse(float *out, int64_t n, float scale, const int64_t *indices, const float *x, Py_ssize_t k) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < k; i++) bad |= indices[i] < 0 || indices[i] >= n;
    if (bad) return 0;
    for (Py_ssize_t i = 0; i < k; i++) out[indices[i]] += scale * x[i];
    return 1;
}

/* --- levels of a grid -------------------------------------------------------------------------- */

WIDE static void to_levels(
    const float *restrict x, Py_ssize_t n, float inverse, float more, float most, int32_t *restrict out
) {
    for (Py_ssize_t i = 0; i < n; i++) {
        float size = float_of(bits_of(x[i]) & MAGNITUDE) * inverse + more;
        int32_t level = (int32_t)(size < most ? size : most);
        out[i] = x[i] < 0.0f ? -level : level;
    }
}

WIDE static void add_levels(float *restrict out, Py_ssize_t n, float unit, const int32_t *restrict levels) {
    for (Py_ssize_t i = 0; i < n; i++) out[i] += (float)levels[i] * unit;
}

WIDE static void plane_of(const int32_t *restrict levels, Py_ssize_t n, int shift, uint8_t *restrict out) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t level = (uint32_t)levels[i], folded = (level << 1) ^ (0u - (level >> 31));
        out[i] = (uint8_t)(folded >> shift);
    }
}

static void to_planes(const int32_t *levels, Py_ssize_t n, Py_ssize_t planes, uint8_t *out) {
    for (Py_ssize_t start = 0; start < n; start += LARGE) /* which stay in the cache from one plane to the next */
        for (Py_ssize_t plane = 0; plane < planes; plane++)
            plane_of(levels + start, n - start < LARGE ? n - start : LARGE, 8 * (int)plane, out + plane * n + start);
}

/* --- as a module ------------------------------------------------------------------------------- */

static PyObject *py_top(PyObject *self, PyObject *args) {
    Py_buffer b[1];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*", &b[0])) return NULL;
    long top = -1;
    Py_ssize_t n = b[0].len / 4;
    if (aligned(&b[0], 4)) FREELY(n, top = (long)top_of(b[0].buf, n));
    release(b, 1);
    return PyLong_FromLong(top);
}

static PyObject *py_over(PyObject *self, PyObject *args) {
    Py_buffer b[3];
    unsigned int least;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*Iw*w*", &b[0], &least, &b[1], &b[2])) return NULL;
    Py_ssize_t n = b[0].len / 4, count = -1, room = b[1].len / 8;
    if (aligned(&b[0], 4) && aligned(&b[1], 8) && aligned(&b[2], 4) && b[2].len >= 4 * room)
        FREELY(n, count = select_over(b[0].buf, n, least, room, b[1].buf, b[2].buf));
    release(b, 3);
    return PyLong_FromSsize_t(count);
}

static PyObject *py_encode(PyObject *self, PyObject *args) {
    Py_buffer b[3];
    Py_ssize_t block;
    int kind;
    float most;
    unsigned int scale_max;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nifIw*w*", &b[0], &block, &kind, &most, &scale_max, &b[1], &b[2])) return NULL;
    Py_ssize_t n = b[0].len / 4, bytes = kind == INT8 ? n : (n + 1) / 2;
    long top = -1;
    if (aligned(&b[0], 4) && 2 <= block && block <= 256 && block % 2 == 0 && b[1].len >= bytes &&
        b[2].len >= 2 * ((n + block - 1) / block))
        FREELY(n, top = (long)encode(b[0].buf, n, block, kind, most, scale_max, b[1].buf, b[2].buf));
    release(b, 3);
    return PyLong_FromLong(top);
}

static PyObject *py_decode(PyObject *self, PyObject *args) {
    Py_buffer b[3];
    Py_ssize_t block;
    int kind;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*niw*", &b[0], &b[1], &block, &kind, &b[2])) return NULL;
    Py_ssize_t n = b[2].len / 4, bytes = kind == INT8 ? n : (n + 1) / 2;
    long found = -1;
    if (aligned(&b[2], 4) && block >= 2 && block % 2 == 0 && b[0].len >= bytes &&
        b[1].len >= 2 * ((n + block - 1) / block))
        FREELY(n, found = decode(b[0].buf, b[1].buf, n, block, kind, b[2].buf));
    release(b, 3);
    return PyLong_FromLong(found);
}

static PyObject *py_to_bf16(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) return NULL;
    Py_ssize_t n = b[0].len / 4;
    int good = aligned(&b[0], 4) && aligned(&b[1], 2) && b[1].len >= 2 * n;
    if (good) FREELY(n, to_bf16(b[0].buf, n, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_from_bf16(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) return NULL;
    Py_ssize_t n = b[1].len / 4;
    int good = aligned(&b[1], 4) && b[0].len >= 2 * n;
    if (good) FREELY(n, good = !from_bf16(b[0].buf, n, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_read_gaps(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    long long n;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*Lw*", &b[0], &n, &b[1])) return NULL;
    int good = aligned(&b[1], 8);
    if (good) FREELY(b[0].len, good = read_gaps(b[0].buf, b[0].len, b[1].len / 8, n, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_write_gaps(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) return NULL;
    Py_ssize_t k = b[0].len / 8, length = -1;
    if (aligned(&b[0], 8)) FREELY(k, length = write_gaps(b[0].buf, k, b[1].buf, b[1].len));
    release(b, 2);
    return PyLong_FromSsize_t(length);
}

static PyObject *py_read_numbers(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    long long n;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*Lw*", &b[0], &n, &b[1])) return NULL;
    Py_ssize_t k = b[1].len / 8;
    int good = aligned(&b[1], 8) && b[0].len >= 4 * k;
    if (good) FREELY(k, good = read_numbers(b[0].buf, k, n, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_add_dense(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    float scale;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*fy*", &b[0], &scale, &b[1])) return NULL;
    Py_ssize_t n = b[0].len / 4;
    int good = aligned(&b[0], 4) && aligned(&b[1], 4) && b[1].len == b[0].len;
    if (good) FREELY(n, add_dense(b[0].buf, n, scale, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_add_sparse(PyObject *self, PyObject *args) {
    Py_buffer b[3];
    float scale;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*fy*y*", &b[0], &scale, &b[1], &b[2])) return NULL;
    Py_ssize_t n = b[0].len / 4, k = b[1].len / 8;
    int good = aligned(&b[0], 4) && aligned(&b[1], 8) && aligned(&b[2], 4) && b[2].len == 4 * k;
    if (good) FREELY(k, good = add_sparse(b[0].buf, n, scale, b[1].buf, b[2].buf, k));
    release(b, 3);
    return PyBool_FromLong(good);
}

static PyObject *py_to_levels(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    float inverse, more, most;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*fffw*", &b[0], &inverse, &more, &most, &b[1])) return NULL;
    Py_ssize_t n = b[0].len / 4;
    int good = aligned(&b[0], 4) && aligned(&b[1], 4) && b[1].len == b[0].len;
    if (good) FREELY(n, to_levels(b[0].buf, n, inverse, more, most, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_add_levels(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    float unit;
    (void)self;
    if (!PyArg_ParseTuple(args, "w*fy*", &b[0], &unit, &b[1])) return NULL;
    Py_ssize_t n = b[0].len / 4;
    int good = aligned(&b[0], 4) && aligned(&b[1], 4) && b[1].len == b[0].len;
    if (good) FREELY(n, add_levels(b[0].buf, n, unit, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyObject *py_to_planes(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) return NULL;
    Py_ssize_t n = b[0].len / 4, planes = n ? b[1].len / n : 0;
    int good = aligned(&b[0], 4) && planes <= 4;
    if (good) FREELY(n, to_planes(b[0].buf, n, planes, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

static PyMethodDef METHODS[] = {
    {"top", py_top, METH_VARARGS, NULL},
    {"over", py_over, METH_VARARGS, NULL},
    {"encode", py_encode, METH_VARARGS, NULL},
    {"decode", py_decode, METH_VARARGS, NULL},
    {"to_bf16", py_to_bf16, METH_VARARGS, NULL},
    {"from_bf16", py_from_bf16, METH_VARARGS, NULL},
    {"read_gaps", py_read_gaps, METH_VARARGS, NULL},
    {"write_gaps", py_write_gaps, METH_VARARGS, NULL},
    {"read_numbers", py_read_numbers, METH_VARARGS, NULL},
    {"add_dense", py_add_dense, METH_VARARGS, NULL},
    {"add_sparse", py_add_sparse, METH_VARARGS, NULL},
    {"to_levels", py_to_levels, METH_VARARGS, NULL},
    {"add_levels", py_add_levels, METH_VARARGS, NULL},
    {"to_planes", py_to_planes, METH_VARARGS, NULL},
    {"crc32", py_crc32, METH_VARARGS, NULL},
    {"permute", py_permute, METH_VARARGS, NULL},
    {"seed_words", py_seed_words, METH_VARARGS, NULL},
    {"descend", py_descend, METH_VARARGS, NULL},
    {"row_squares", py_row_squares, METH_VARARGS, NULL},
    {"pair_squares", py_pair_squares, METH_VARARGS, NULL},
    {"row_mean", py_row_mean, METH_VARARGS, NULL},
    {"row_middle", py_row_middle, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_loops", "See core/kernels/plain.py.", -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__loops(void) {
    const char *wanted = getenv("ANABRANCH_KERNELS");
    const uint16_t one = 1;
    if (wanted && strcmp(wanted, "numpy") == 0) {
        PyErr_SetString(PyExc_ImportError, "ANABRANCH_KERNELS=numpy");
        return NULL;
    }
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "the bytes on the wire are little-endian");
        return NULL;
    }
    return PyModule_Create(&MODULE);
}
