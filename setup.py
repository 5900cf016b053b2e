"""The one part that is compiled. Without a compiler it is left out: numpy does the same, torch a descent."""

import os

from setuptools import Extension, setup

LOOPS = Extension(
    "anabranch.core.kernels._loops",
    [f"core/kernels/{name}.c" for name in ("loops", "checksum", "seeding", "descent", "table")],
    depends=["core/kernels/loops.h"],
    # Nothing may be contracted or reordered: numpy's loops give the same bits.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-strict-aliasing"],
    py_limited_api=True,
    libraries=[] if os.name == "nt" else ["m"],
    optional=True,
)

setup(ext_modules=[LOOPS], options={"bdist_wheel": {"py_limited_api": "cp311"}})
