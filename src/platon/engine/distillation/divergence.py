"""Differences between what a student and its teacher give out, as losses: one number for each row or position."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Numbers that are converted to float32 at a time: 16 MB, however many positions and words there are.
_CHUNK = 2**22


class _Divergence(torch.autograd.Function):
    """T² KL(softmax(t/T) ‖ softmax(s/T)) of each row that counts, and 0 for the others.

    With plain autograd, the logits of a language model (positions × vocabulary) would be held several times over in
    float32. Here forward and backward pass go through them in chunks, and only the gradient, which autograd needs
    anyway, has the size of the logits.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, student: Tensor, teacher: Tensor, counts: Tensor, temperature: float) -> Tensor:
        places = counts.nonzero().squeeze(1)
        found = torch.zeros(len(student), dtype=_wide(student), device=student.device)
        for part in torch.split(places, _rows_a_chunk(student)):
            ours, theirs = _log_softmax(student, part, temperature), _log_softmax(teacher, part, temperature)
            share = theirs.exp()
            # A class that the teacher rules out (-inf) adds nothing; 0 · -inf would be NaN.
            found[part] = torch.where(share > 0, share * (theirs - ours), 0.0).sum(-1) * temperature**2
        ctx.save_for_backward(student, teacher, places)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """∂/∂s = T (softmax(s/T) - softmax(t/T))."""
        student, teacher, places = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        result = torch.zeros_like(student)
        for part in torch.split(places, _rows_a_chunk(student)):
            ours, theirs = _log_softmax(student, part, temperature), _log_softmax(teacher, part, temperature)
            slope = (ours.exp() - theirs.exp()) * (temperature * gradient[part, None])
            result[part] = slope.to(result.dtype)
        return result, None, None, None


def divergence(student: Tensor, teacher: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(t/T) ‖ softmax(s/T)) over the last dimension, where `counts` is True; 0 elsewhere.

    T² keeps the size of the gradient the same at every temperature (Hinton et al., 2015).
    """
    classes = student.shape[-1]
    flat = student.reshape(-1, classes), teacher.reshape(-1, classes), counts.reshape(-1)
    found: Tensor = _Divergence.apply(*flat, float(temperature))  # type: ignore[no-untyped-call]
    return found.view(counts.shape)


@torch.no_grad()
def cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """The sum of the cross entropies where `counts` is True, without gradients."""
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    total = torch.zeros((), dtype=_wide(logits), device=logits.device)
    for part in torch.split(counts.reshape(-1).nonzero().squeeze(1), _rows_a_chunk(flat)):
        total += F.cross_entropy(widened(flat[part]), wanted[part], reduction="sum")
    return total


def binary_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The same for labels that are independent of each other (sigmoid); the mean over the labels of each row."""
    ours, theirs = widened(student) / temperature, widened(teacher) / temperature
    share = theirs.sigmoid()
    yes = share * (F.logsigmoid(theirs) - F.logsigmoid(ours))
    no = (1 - share) * (F.logsigmoid(-theirs) - F.logsigmoid(-ours))
    return (yes + no).flatten(1).mean(1) * temperature**2


def squared_error(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over the numbers of each row."""
    return (widened(student) - widened(teacher)).square().flatten(1).mean(1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos of each row's vectors."""
    return 1 - F.cosine_similarity(widened(student), widened(teacher), dim=-1)


def relative_error(student: Tensor, teacher: Tensor, tokens: Tensor | None) -> Tensor:
    """‖s - t‖² / ‖t‖² of each row.

    Args:
        student: rows × tokens × width, or rows × anything.
        teacher: the same shape.
        tokens: rows × tokens, True where a token is no padding; `None`: all are none.
    """
    theirs = widened(teacher)
    difference = widened(student) - theirs
    if tokens is not None:
        # Before the square, and not as a product with the mask: padding may hold numbers that are not finite.
        outside = ~tokens.view(*tokens.shape, *(1,) * (difference.dim() - 2))
        difference, theirs = difference.masked_fill(outside, 0.0), theirs.masked_fill(outside, 0.0)
    norm = theirs.square().flatten(1).sum(1)
    return difference.square().flatten(1).sum(1) / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(_wide(tensor))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _rows_a_chunk(logits: Tensor) -> int:
    return max(1, _CHUNK // max(logits.shape[-1], 1))


def _log_softmax(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(widened(logits[rows]) / temperature, dim=-1)
