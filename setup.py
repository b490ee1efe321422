"""The one thing that pyproject.toml cannot say: the sparse kernel is compiled where there is a C compiler.

Without one the package installs all the same (`optional`), and `platon.sparsify` says what it uses instead.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCES = [Path("src/platon/deploy") / name for name in ("sparse.c", "sparse_tile.h")]

setup(
    ext_modules=[
        # Not a Python module, a plain library that is loaded by its path; `Extension` is what setuptools can build.
        Extension(
            "platon.deploy._sparse",
            sources=[str(SOURCES[0])],
            depends=[str(SOURCES[1])],
            define_macros=[
                # As in kernel.py, which takes no library that was built from other sources.
                ("DIGEST", f'"{hashlib.sha256(b"".join(file.read_bytes() for file in SOURCES)).hexdigest()[:16]}"')
            ],
            extra_compile_args=["-O3", "-std=gnu11"],
            optional=True,
        )
    ]
)
