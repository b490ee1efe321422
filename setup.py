"""Compiles the sparse kernel where there is a C compiler; pyproject.toml describes the rest of the package.

Without one the package installs too (`optional`), and `platon.sparsify` uses `torch.sparse` and warns.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCES = [Path("src/platon/deploy/sparse.c"), *sorted(Path("src/platon/deploy").glob("sparse*.h"))]

setup(
    ext_modules=[
        # A plain library that is loaded by its path, not a Python module; setuptools builds it as an `Extension`.
        Extension(
            "platon.deploy._sparse",
            sources=[str(SOURCES[0])],
            depends=[str(file) for file in SOURCES[1:]],
            define_macros=[
                # As in sparse_kernel.py, which uses no library that was built from other sources.
                ("DIGEST", f'"{hashlib.sha256(b"".join(file.read_bytes() for file in SOURCES)).hexdigest()[:16]}"')
            ],
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno"],
            optional=True,
        )
    ]
)
