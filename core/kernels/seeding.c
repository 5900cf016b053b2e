/* The words by which numpy seeds its generators: those of `numpy.random.SeedSequence`, for 16 bytes of entropy.

   The entropy, as four words, is hashed into a pool of four, each of which is then mixed into each other one; the
   words are hashes of the pool's in turns. (After O'Neill's seed_seq_fe; numpy keeps it as it is for good.)
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
