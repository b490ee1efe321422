"""Whether the arrays of a matrix are sound: the kernel's check and PyTorch's, against one that follows the format."""

import random

import pytest
import torch

from platon.deploy import sparse_kernel, sparse_matrix
from platon.deploy.sparse_kernel import SparseKernel
from platon.deploy.sparse_matrix import PROBLEMS, ROW_BLOCK, SparseMatrix, from_dense

found = sparse_kernel.find()


def walk(matrix: SparseMatrix) -> set[int]:
    """All that is wrong, by walking through the arrays number by number."""
    counts, columns, starts = ([int(one) for one in array] for array in (matrix.counts, matrix.columns, matrix.starts))
    wrong, at = set(), 0
    for place in range(0, len(counts), ROW_BLOCK):
        block, panel = divmod(place // ROW_BLOCK, matrix.panels)
        if panel == 0 and starts[block] != at:
            wrong.add(2)
        stored = [divmod(count & 0xFFFF, ROW_BLOCK) for count in counts[place : place + ROW_BLOCK]]
        if sorted(row for _, row in stored) != list(range(ROW_BLOCK)):
            wrong.add(1)
        for length, row in stored:
            if length and block * ROW_BLOCK + row >= matrix.rows:
                wrong.add(4)
            for column in columns[at : at + length]:
                if column >= matrix.width or panel * matrix.width + column >= matrix.columns_in:
                    wrong.add(3)
            at += length
    if starts[-1] != at or at != len(matrix.values):
        wrong.add(2)
    return wrong


def changed(matrix: SparseMatrix, chance: random.Random) -> SparseMatrix:
    """A few numbers of one array are other ones, or two of them have changed places."""
    name = chance.choice(["counts", "counts", "columns", "starts"])
    array = getattr(matrix, name).clone()
    for _ in range(chance.choice([0, 1, 1, 2])):
        if len(array):
            one, other = chance.randrange(len(array)), chance.randrange(len(array))
            now = int(array[one])
            array[one] = (
                chance.choice([int(array[other]), now ^ 1, now ^ 63, now ^ 64]) % 256
                if name == "columns"
                else (chance.choice([int(array[other]), now ^ 1, now ^ 63, now ^ 64, now + 64, -1]))
            )
            if chance.random() < 0.5:
                array[other] = now
    return matrix._replace(**{name: array})


@pytest.mark.parametrize("seed", range(12))
def test_both_checks_find_what_a_walk_finds(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    refused = 0
    for _ in range(40):
        rows, columns = chance.choice([0, 1, 63, 64, 70, 130]), chance.choice([1, 48, 192, 200, 500])
        weight = torch.randn(rows, columns) * (torch.rand(rows, columns) < chance.choice([0.0, 0.02, 0.3]))
        width = chance.choice([None, 7, 256])
        matrix = changed(from_dense(weight, width), chance)
        wanted = walk(matrix)
        refused += bool(wanted)
        checks = [sparse_matrix.content_problem]
        if isinstance(found, SparseKernel):
            checks.append(found.content_problem)
        for check in checks:
            number = check(matrix)
            assert number in wanted if wanted else number == 0, PROBLEMS[number - 1]
    assert 5 < refused < 36, "the changes make both kinds"
