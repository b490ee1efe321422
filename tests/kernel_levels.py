"""The compiled kernel for tests, at every instruction set that this machine runs."""

import copy

import pytest

from platon.deploy import sparse_kernel
from platon.deploy.sparse_kernel import LEVELS, SparseKernel

found = sparse_kernel.find()
#: for the tests of a module that needs the kernel
needs_kernel = pytest.mark.skipif(isinstance(found, str), reason=f"no kernel: {found}")
HERE = [level for level in range(len(LEVELS)) if isinstance(found, SparseKernel) and level <= found.level]
levels = pytest.mark.parametrize("level", HERE, ids=lambda level: LEVELS[level])


def at(level: int) -> SparseKernel:
    """The kernel, held to an instruction set."""
    held = copy.copy(found)
    assert isinstance(held, SparseKernel)
    held.level = level
    return held
