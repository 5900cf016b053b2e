/* CRC-32 as zlib has it, where the processor multiplies without carries.

   A CRC is the remainder of the message, as a polynomial over GF(2), by P. What lies n bits before the end may be
   replaced by its product with x^n mod P, which is short: so 64 bytes are folded into the next 64 until 16 are left,
   and those are looked up byte by byte. Bits are in reverse order throughout, as they are on the wire; a constant is
   x^n mod P in that order, doubled, since the product of two reversed numbers lies one bit too low.
*/

#include "loops.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define REVERSED 0xEDB88320u      /* P without x^32 */
#define AHEAD 2048                /* bytes that are asked of the memory beforehand; they may lie behind the end */
#define WITHOUT_CARRIES __attribute__((target("pclmul,sse2")))

static const uint64_t BY_64[2] = {0x154442BD4, 0x1C6E41596}; /* n = 512 + 32, 512 - 32 */
static const uint64_t BY_16[2] = {0x1751997D0, 0x0CCAA009E}; /* n = 128 + 32, 128 - 32 */

static uint32_t by_bytes(uint32_t state, const uint8_t *data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        state ^= data[i];
        for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ (REVERSED & (0u - (state & 1)));
    }
    return state;
}

static inline WITHOUT_CARRIES __m128i loaded(const void *from) { return _mm_loadu_si128((const __m128i *)from); }

static inline WITHOUT_CARRIES __m128i folded(__m128i x, __m128i by, __m128i into) {
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), into);
}

/* Of at least 64 bytes. */
static WITHOUT_CARRIES uint32_t crc32(uint32_t crc, const uint8_t *data, size_t n) {
    __m128i x[4], by = loaded(BY_64);
    uint8_t left[16];
    for (int i = 0; i < 4; i++) x[i] = loaded(data + 16 * i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
    for (data += 64, n -= 64; n >= 64; data += 64, n -= 64) {
        __builtin_prefetch(data + AHEAD);
        for (int i = 0; i < 4; i++) x[i] = folded(x[i], by, loaded(data + 16 * i));
    }
    by = loaded(BY_16);
    for (int i = 1; i < 4; i++) x[0] = folded(x[0], by, x[i]);
    for (; n >= 16; data += 16, n -= 16) x[0] = folded(x[0], by, loaded(data));
    memcpy(left, &x[0], sizeof left);
    return ~by_bytes(by_bytes(0, left, sizeof left), data, n);
}

static int is_for_us(const Py_buffer *data) { return data->len >= 64 && __builtin_cpu_supports("pclmul"); }

#else

static uint32_t crc32(uint32_t crc, const uint8_t *data, size_t n) { (void)data; (void)n; return crc; }
static int is_for_us(const Py_buffer *data) { (void)data; return 0; }

#endif

/* -1: it is not for us. */
PyObject *py_crc32(PyObject *self, PyObject *args) {
    Py_buffer b[1];
    unsigned int crc;
    long long found = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*I", &b[0], &crc)) return NULL;
    if (is_for_us(&b[0])) FREELY(b[0].len, found = crc32(crc, b[0].buf, (size_t)b[0].len));
    release(b, 1);
    return PyLong_FromLongLong(found);
}
