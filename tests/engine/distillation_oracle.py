"""The distillation loss from its equations: plain autograd, one row and one position after the other.

Shares no code with the engine. Logits are float64 where gradients are compared.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² Σ p (log p - log q) of two vectors of logits."""
    p = torch.exp(teacher / temperature) / torch.exp(teacher / temperature).sum()
    q = torch.exp(student / temperature) / torch.exp(student / temperature).sum()
    return temperature**2 * (p * (p.log() - q.log())).sum()


def mean(items: Sequence[Tensor], number: int | None, zero: Tensor) -> Tensor:
    """The sum of the items by their number, or by another."""
    total = zero
    for item in items:
        total = total + item
    return total / (max(len(items), 1) if number is None else number)


def classes(student: Tensor, teacher: Tensor, labels: Tensor | None, temperature: float) -> Tensor:
    rows = [r for r in range(len(student)) if labels is None or labels[r] != -100]
    return mean([kl(student[r], teacher[r], temperature) for r in rows], None, student.sum() * 0)


def multi_label(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    found = []
    for ours, theirs in zip(student, teacher, strict=True):
        logits = zip(ours, theirs, strict=True)
        pairs = [kl(torch.stack([s, s * 0]), torch.stack([t, t * 0]), temperature) for s, t in logits]
        found.append(sum(pairs) / len(pairs))
    return mean(found, None, student.sum() * 0)


def regression(student: Tensor, teacher: Tensor) -> Tensor:
    return ((student - teacher) ** 2).sum() / student.numel()


def spans(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], mask: Tensor | None, temperature: float
) -> Tensor:
    found = []
    for r in range(len(student[0])):
        inside = [i for i in range(student[0].shape[1]) if mask is None or mask[r, i]]
        parts = [kl(s[r, inside], t[r, inside], temperature) for s, t in zip(student, teacher, strict=True)]
        found.append((parts[0] + parts[1]) / 2)
    return mean(found, None, student[0].sum() * 0)


def counted(shape: tuple[int, int], labels: Tensor | None, mask: Tensor | None, causal: bool) -> list[tuple[int, int]]:
    """The positions that count; for a causal model, those whose next token counts."""
    found = []
    for r in range(shape[0]):
        for i in range(shape[1]):
            place = i + 1 if causal else i
            if place < shape[1] and (labels is None or labels[r, place] != -100) and (mask is None or mask[r, place]):
                found.append((r, i))
    return found


def tokens(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    causal: bool = False,
    number: int | None = None,
) -> Tensor:
    places = counted(tuple(student.shape[:2]), labels, mask, causal)
    return mean([kl(student[r, i], teacher[r, i], temperature) for r, i in places], number, student.sum() * 0)


def embedding(student: Tensor, teacher: Tensor) -> Tensor:
    found = [1 - s @ t / (s.norm() * t.norm()) for s, t in zip(student, teacher, strict=True)]
    return mean(found, None, student.sum() * 0)


def hidden(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    mask: Tensor | None,
    weights: Sequence[int] | None = None,
    number: int | None = None,
) -> Tensor:
    """The mean over rows, weighted by their items, and over layers of ‖s - t‖² / ‖t‖² over a row's tokens."""
    rows = len(student[0])
    weights = [1] * rows if weights is None else weights
    total = student[0].sum() * 0
    for ours, theirs in zip(student, teacher, strict=True):
        for r in range(rows):
            inside = [i for i in range(ours.shape[1]) if mask is None or mask[r, i]]
            difference = ((ours[r, inside] - theirs[r, inside]) ** 2).sum()
            total = total + weights[r] * difference / (theirs[r, inside] ** 2).sum()
    return total / len(student) / (max(sum(weights), 1) if number is None else number)


def mixture(task: Tensor, distilled: Tensor, weight: float) -> Tensor:
    return (1 - weight) * task + weight * distilled
