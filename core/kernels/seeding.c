/* The words by which numpy seeds its generators: those of `numpy.random.SeedSequence`, for 16 bytes of entropy.

   The entropy, as four words, is hashed into a pool of four, each of which is then mixed into each other one; the
   words are hashes of the pool's in turns. (After O'Neill's seed_seq_fe; numpy keeps it as it is for good.)

   And the order in which a generator so seeded puts the numbers below n: PCG64 (O'Neill's XSL RR 128/64), of whose
   numbers both halves are draws, the lower first, and the shuffle of Fisher and Yates from the end. Of a draw the bits
   count that the largest place has, and it is drawn again where it is beyond that.
*/

#include "loops.h"

#include <string.h>

#define POOL 4
#define WORDS 8                   /* of 32 bits, that are written */

static uint32_t hashed(uint32_t value, uint32_t *by, uint32_t next) {
    value ^= *by;
    *by *= next;
    value *= *by;
    return value ^ value >> 16;
}

static uint32_t mixed(uint32_t x, uint32_t y) {
    uint32_t found = 0xca01f9ddu * x - 0x4973f715u * y;
    return found ^ found >> 16;
}

static void seed_words(const uint8_t *entropy, uint8_t *out) {
    uint32_t pool[POOL], words[WORDS], by = 0x43b0d7e5u;
    memcpy(pool, entropy, sizeof pool);
    for (int i = 0; i < POOL; i++) pool[i] = hashed(pool[i], &by, 0x931e8875u);
    for (int from = 0; from < POOL; from++)
        for (int to = 0; to < POOL; to++)
            if (to != from) pool[to] = mixed(pool[to], hashed(pool[from], &by, 0x931e8875u));
    by = 0x8b51f9ddu;
    for (int i = 0; i < WORDS; i++) words[i] = hashed(pool[i % POOL], &by, 0x58f38dedu);
    memcpy(out, words, sizeof words);
}

typedef struct {
    uint64_t high, low, step_high, step_low;
    uint32_t spare;               /* the upper half of the last number, where it was not drawn yet */
    int has_spare;
} Generator;

static uint64_t upper_product(uint64_t a, uint64_t b) {
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (uint32_t)middle;
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

static void add(Generator *g, uint64_t high, uint64_t low) {
    g->low += low;
    g->high += high + (g->low < low);
}

static void step(Generator *g) {
    const uint64_t high = 0x2360ed051fc65da4u, low = 0x4385df649fccf645u;
    g->high = g->high * low + g->low * high + upper_product(g->low, low);
    g->low *= low;
    add(g, g->step_high, g->step_low);
}

static Generator seeded(const uint8_t *entropy) {
    uint64_t words[WORDS / 2];
    Generator g = {0};
    seed_words(entropy, (uint8_t *)words);
    g.step_high = words[2] << 1 | words[3] >> 63;
    g.step_low = words[3] << 1 | 1;
    step(&g);
    add(&g, words[0], words[1]);
    step(&g);
    return g;
}

static uint32_t drawn(Generator *g) {
    g->has_spare = !g->has_spare;
    if (!g->has_spare) return g->spare;
    step(g);
    uint64_t mixed_up = g->high ^ g->low, by = g->high >> 58, number = mixed_up >> by | mixed_up << (-by & 63);
    g->spare = (uint32_t)(number >> 32);
    return (uint32_t)number;
}

static void permute(const uint8_t *entropy, Py_ssize_t n, int64_t *out) {
    Generator g = seeded(entropy);
    for (Py_ssize_t i = 0; i < n; i++) out[i] = i;
    uint32_t mask = UINT32_MAX, j;
    for (Py_ssize_t i = n - 1; i > 0; i--) {
        while (mask >> 1 >= (uint64_t)i) mask >>= 1;
        do j = drawn(&g) & mask;
        while (j > i);
        int64_t kept = out[i];
        out[i] = out[j];
        out[j] = kept;
    }
}

/* False: it is not for us. */
PyObject *py_permute(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) return NULL;
    Py_ssize_t n = b[1].len / 8;
    int good = b[0].len == 4 * POOL && aligned(&b[1], 8) && n <= UINT32_MAX;
    if (good) FREELY(n, permute(b[0].buf, n, b[1].buf));
    release(b, 2);
    return PyBool_FromLong(good);
}

/* False: it is not for us. */
PyObject *py_seed_words(PyObject *self, PyObject *args) {
    Py_buffer b[2];
    int good;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) return NULL;
    good = b[0].len == 4 * POOL && b[1].len == 4 * WORDS;
    if (good) seed_words(b[0].buf, b[1].buf);
    release(b, 2);
    return PyBool_FromLong(good);
}
