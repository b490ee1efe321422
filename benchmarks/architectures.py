"""Every model type of the installed transformers that a tiny configuration can build: is it cut exactly?

    python benchmarks/architectures.py                       all types, a process each; some 25 minutes of one core
    python benchmarks/architectures.py bert t5 gemma3        these alone
    python benchmarks/architectures.py --onnx swin phi3      whether they, and then the compact ones, export to ONNX
    python benchmarks/architectures.py --results survey.jsonl --page docs/architectures.md    renew the page's table

For each type a model is built with random weights, biases and norms included. Half of the heads and neurons that platon
proves are zeroed, the model is compacted, and its outputs are compared with those of the zeroed model on inputs that
the proof has not seen; models that generate have to give the same tokens, and what is saved has to come back with the
same outputs.

- exact: groups were found, every output agrees to 1e-5 of the largest, at least 95 % of the zeroed weights are gone.
- refused: no head and no neuron is proved, with the first reason.
- wrong: anything else that came out of `platon.compact`.
- not built: the tiny configuration does not make a model that runs.
- failed: the survey itself came to no result, as when the time is up.
"""

import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import platon
from platon.deploy import onnx
from platon.engine.proof.call import short, tensors_in
from platon.engine.proof.discovery import heads, neurons, refusals
from survey import arguments, each, recorded
from tiny_model import TYPES, build, outputs

AT_LEAST = 60
_FROM, _TO = "<!-- survey: from here -->", "<!-- survey: to here -->"


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, as a share of the largest output."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            if a.ndim == b.ndim == 4:  # a map of attention or a cache: fewer heads
                continue
            return float("inf")
        if a.numel():
            a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
            largest = max(largest, float((a - b).abs().max() / a.abs().max().clamp(min=1.0)))
    return largest


def survey(name: str) -> dict[str, Any]:
    """What becomes of one model type."""
    start = time.process_time()
    found: dict[str, Any] = {"type": name}
    try:
        model = build(name)
    except Exception as error:
        return found | {"outcome": "not built", "why": str(error)}
    found["class"] = type(model).__name__
    prunable = _prunable(model)
    found["blocks"] = len(platon.engine.topology.blocks(model))
    groups: list[Any] = []
    reasons = []
    for kind, find in {"heads": heads, "neurons": neurons}.items():
        try:
            mine = find(model)
        except ValueError as error:
            mine = []
            reasons.append(str(error))
        found[kind] = len(mine)
        groups += mine
    found["covered"] = round(sum(int(g.sizes.sum()) for g in groups) / prunable, 3) if prunable else 0.0
    try:
        found["left"] = dict(list(refusals(model).items())[:6])
    except ValueError as error:
        found["left"] = {"": str(error)}
    if not groups:
        return found | {"outcome": "refused", "why": reasons[0], "seconds": round(time.process_time() - start, 1)}
    return found | _cut(model, groups) | {"seconds": round(time.process_time() - start, 1)}


def _prunable(model: nn.Module) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(m.numel() for m in platon.engine.topology.matrices(model).values())


def _zero_half(groups: list[Any]) -> int:
    """Zero about half of the units, at least one of each group left; how many weights that are."""
    random = torch.Generator().manual_seed(7)
    zeroed = 0
    with torch.no_grad():
        for group in groups:
            kept = torch.rand(group.count, generator=random) < 0.5
            kept[int(torch.randint(group.count, (1,), generator=random))] = True
            zeroed += int(group.sizes[~kept].sum())
            for part in group.slices:
                part.parameter.mul_(part.expand(kept.float()))
    return zeroed


def _cut(model: nn.Module, groups: list[Any]) -> dict[str, Any]:
    zeroed = _zero_half(groups)
    before = sum(p.numel() for p in model.parameters())
    expected, (args, kwargs) = outputs(model)
    try:
        small = platon.compact(model)
    except ValueError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return {"outcome": "wrong", "why": short(error)}
    result: dict[str, Any] = {"gone": round((before - sum(p.numel() for p in small.parameters())) / max(1, zeroed), 4)}
    try:
        with torch.no_grad():
            given = [t for t in tensors_in(small(*args, **kwargs)) if t.is_floating_point()]
        result["difference"] = apart(expected, given)
        result["generates"] = _generates(model, small)
        result["stored"] = _stored(small, args, kwargs)
    except Exception as error:
        return result | {"outcome": "wrong", "why": short(error)}
    fine = result["difference"] <= 1e-5 and result["gone"] >= 0.95 and result["generates"] is not False
    return result | {"outcome": "exact" if fine and result["stored"] is not False else "wrong"}


def _generates(model: Any, small: Any) -> bool | None:
    """Whether both give the same tokens; `None`: the model does not generate from tokens."""
    if not getattr(model, "can_generate", lambda: False)() or model.main_input_name != "input_ids":
        return None
    start = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(5))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(start)}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    settings |= {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    try:
        expected = model.generate(start, **settings)
    except Exception:
        return None
    return bool(torch.equal(expected, small.generate(start, **settings)))


def _stored(small: Any, args: Any, kwargs: Any) -> bool | str:
    """Whether it is the same after saving and loading, or why it cannot be saved.

    Tensors have to come back bit for bit; outputs up to rounding, which depends on where in memory a matrix begins.
    """
    with tempfile.TemporaryDirectory() as place:
        try:
            platon.save(small, Path(place) / "model")
        except ValueError as error:
            return str(error)[:200]
        back = platon.load(Path(place) / "model")
    before, after = small.state_dict(), back.state_dict()
    if before.keys() != after.keys() or not all(torch.equal(tensor, after[key]) for key, tensor in before.items()):
        return False
    with torch.no_grad():
        one, other = ([t for t in tensors_in(m(*args, **kwargs)) if t.is_floating_point()] for m in (small, back))
    return apart(one, other) <= 1e-5


def exported(name: str) -> dict[str, Any]:
    """Whether a model with half of its units zeroed exports to ONNX, and whether the compact one does."""
    model = build(name)
    _, (_, kwargs) = outputs(model)
    batch = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
    _zero_half(heads(model) + neurons(model))
    found: dict[str, Any] = {"type": name}
    for kind, one in {"model": model, "compact": platon.compact(model)}.items():
        with tempfile.TemporaryDirectory() as place:
            try:
                found[kind] = onnx.export(one, Path(place) / "model.onnx", [batch]).difference
            except ValueError as error:
                found[kind] = str(error)
    fine = isinstance(found["compact"], float) or isinstance(found["model"], str)
    return found | {"outcome": "exact" if fine else "wrong"}


def table(found: list[dict[str, Any]]) -> str:
    """The survey as the table of docs/architectures.md, below how many there are of each outcome."""
    counts = Counter(one["outcome"] for one in found)
    missing = len(TYPES) - len(found)
    lines = [
        f"Of the {len(TYPES)} types of transformers {transformers.__version__}, {counts['exact']} are cut exactly, "
        f"{counts['refused']} are refused, and {counts['wrong']} are wrong.",
        f"Of {counts['not built']} others, no configuration that was tried makes a small model that runs; "
        f"{counts['failed']} took too long, {missing} were not tried.",
        "",
        "| type | heads | neurons | covered | difference | tokens | left out, and why |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for one in sorted(found, key=lambda one: (one["outcome"] != "exact", str(one["type"]))):
        if one["outcome"] in ("not built", "failed"):
            continue
        difference = f"{one['difference']:.0e}" if one.get("difference") else "0"
        tokens = {True: "the same", False: "others"}.get(one.get("generates"), "")
        if one["outcome"] != "exact":
            difference, tokens = f"**{one['outcome']}**", ""
        why = one.get("why") or next(iter(one["left"].values()), "")
        cells = (one["type"], one["heads"], one["neurons"], f"{one['covered']:.0%}", difference, tokens, _brief(why))
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def renew(page: Path, found: list[dict[str, Any]]) -> None:
    """Put the survey's table in place of the one on the page."""
    before, _, rest = page.read_text().partition(_FROM)
    _, mark, after = rest.partition(_TO)
    if not mark:
        sys.exit(f"{page} has no place for the table: no lines {_FROM!r} and {_TO!r}")
    page.write_text(f"{before}{_FROM}\n\n{table(found)}\n\n{_TO}{after}")


def _brief(why: str) -> str:
    """The reason alone, without the names of modules."""
    why = why.partition("could be proved (")[2].partition(": ")[2] or why.partition("are not known: ")[2] or why
    why = re.sub(r" that '[^']*' reads", "", why.partition(" (")[0])
    return why.partition("; ")[0].removesuffix(")").replace("|", "/")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--page", type=Path, help="renew the table on this page by what is in --results, try nothing")
    parser.add_argument("--onnx", action="store_true", help="export models and compact models to ONNX instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if options.page:
        renew(options.page, recorded(options.results))
        return
    work = exported if options.onnx else survey
    known = each(work, options.types or TYPES, options.results, options.seconds, here=options.here)
    counts = Counter(one["outcome"] for one in known)
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
    if counts["wrong"] or (not options.types and counts["exact"] < AT_LEAST):
        sys.exit(f"the bar: no type wrong, and of all types at least {AT_LEAST} exact")


if __name__ == "__main__":
    main()
