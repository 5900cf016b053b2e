/* What the compiled loops share. */

#ifndef LOOPS_H
#define LOOPS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000 /* buffers are part of it since 3.11 */
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Where the C library can choose at run time, the loops are made for wider registers as well. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#define LARGE 16384               /* values from which on other threads may run meanwhile */

/* What every method does: lets other threads run meanwhile where it takes long. */
#define FREELY(n, ...)                             \
    do {                                           \
        if ((n) >= LARGE) {                        \
            Py_BEGIN_ALLOW_THREADS __VA_ARGS__;    \
            Py_END_ALLOW_THREADS                   \
        } else {                                   \
            __VA_ARGS__;                           \
        }                                          \
    } while (0)

static inline int aligned(const Py_buffer *buffer, size_t bytes) { return (uintptr_t)buffer->buf % bytes == 0; }

static inline void release(Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++) PyBuffer_Release(&buffers[i]);
}

/* Of checksum.c. */
PyObject *py_crc32(PyObject *self, PyObject *args);

/* Of seeding.c. */
PyObject *py_permute(PyObject *self, PyObject *args);
PyObject *py_seed_words(PyObject *self, PyObject *args);

/* Of descent.c. */
PyObject *py_descend(PyObject *self, PyObject *args);

/* Of table.c. */
PyObject *py_row_squares(PyObject *self, PyObject *args);
PyObject *py_pair_squares(PyObject *self, PyObject *args);
PyObject *py_row_mean(PyObject *self, PyObject *args);
PyObject *py_row_middle(PyObject *self, PyObject *args);

#endif
