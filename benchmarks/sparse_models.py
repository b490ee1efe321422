"""Every model type of the installed transformers that a tiny configuration can build: is it the same after `sparsify`?

    python benchmarks/sparse_models.py                       all types, a process each
    python benchmarks/sparse_models.py bert llama swin       these alone
    python benchmarks/sparse_models.py --results sparse.jsonl    append a line for each type, and skip those in the file

Each type is built with random weights, of which seven tenths are zeroed: in every layer, in every other one, and in two
of three. The sparsified copy, the last one saved and loaded again, has to give what the model gives: with few and many
tokens, with one, with padding on either side, with hidden states, attention maps or a cache asked for, and when it
generates. Dense layers of any size are computed by the kernel here, as large ones are.

- same: every output differs by no more than rounding, and copies generate the same tokens.
- refused: `sparsify` or `save` says why in one sentence.
- wrong: anything else.
- not built: the tiny configuration does not make a model that runs.
- failed: no result, as when the time is up.

Rounding is some times what the model itself differs by from its twin in float64.
"""

import copy
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import platon
from architectures import apart
from platon.deploy import dense_layer
from platon.deploy.trial import Guessed
from platon.engine.proof.call import mapped, short, tensors_in
from platon.engine.proof.sample import Case, attempts
from survey import arguments, each
from tiny_model import TYPES, build

CASES = (Case(3, 11), Case(2, 23, masked=True), Case(1, 40), Case(2, 1), Case(1, 9))
BOUND, TIMES = 2e-5, 30  # of the largest output; and of what the model differs by from its twin in float64

Call = tuple[tuple[Any, ...], dict[str, Any]]


def survey(name: str) -> dict[str, Any]:
    """What becomes of one model type."""
    found: dict[str, Any] = {"type": name, "difference": 0.0}
    try:
        model = build(name)
    except Exception as error:
        return {"type": name, "outcome": "not built", "why": str(error)}
    found["class"] = type(model).__name__
    made: list[Call] | None = None
    for kind, (full_ones, change) in KINDS.items():
        pruned = prune(copy.deepcopy(model), full_ones)
        made = made or list(calls(pruned))
        try:
            fast = change(pruned)
        except ValueError as error:
            return found | {"outcome": "refused", "why": f"{kind}: {error}"}
        except Exception as error:
            return found | {"outcome": "wrong", "why": f"{kind}: {short(error)}"}
        for place, (call, bound) in enumerate(zip(made, bounds(pruned, made), strict=True)):
            want = floats(pruned, call)
            for turn in range(2):  # what a whole layer computes is tried at its first call
                try:
                    difference = apart(want, floats(fast, call))
                except Exception as error:
                    return found | {"outcome": "wrong", "why": f"{kind}, call {place}: {short(error)}"}
                found["difference"] = max(difference, found["difference"])
                if difference > bound:
                    why = f"{kind}, call {place}, turn {turn}: differs by {difference:.1e}, more than {bound:.1e}"
                    return found | {"outcome": "wrong", "why": why}
        found["whole_layers"] = max(found.get("whole_layers", 0), whole_layers(fast))
        tokens = generated(pruned)
        if tokens is not None:
            found["generates"] = torch.equal(tokens, generated(fast))
            if not found["generates"]:
                return found | {"outcome": "wrong", "why": f"{kind}: generates other tokens"}
    return found | {"outcome": "same"}


@torch.no_grad()
def prune(model: nn.Module, full_ones: int) -> nn.Module:
    """Zero seven tenths of every linear layer but, where this is not 0, of one in so many."""
    random = torch.Generator().manual_seed(3)
    linears = [one for one in model.modules() if type(one).__name__ in ("Linear", "Conv1D")]
    for place, module in enumerate(linears):
        if not full_ones or place % full_ones:
            module.weight[torch.rand(module.weight.shape, generator=random) < 0.7] = 0
    return model


def calls(model: Any) -> Iterator[Call]:
    """What the model is called with."""
    for case in CASES:
        for args, kwargs in attempts(model, case):
            args, kwargs = mapped((args, kwargs), lambda t: t.float() if t.is_floating_point() else t)
            if runs(model, (args, kwargs)):
                yield args, kwargs
                break
        else:
            continue
        if case is CASES[0]:
            for more in ({"output_hidden_states": True}, {"output_attentions": True}, {"use_cache": True}):
                if runs(model, (args, kwargs | more)):
                    yield args, kwargs | more
            ids = kwargs.get("input_ids")
            if ids is not None:
                for places in (slice(0, 4), slice(-4, None)):
                    mask = torch.ones_like(ids)
                    mask[0, places] = 0
                    if runs(model, (args, kwargs | {"attention_mask": mask})):
                        yield args, kwargs | {"attention_mask": mask}


def runs(model: nn.Module, call: Call) -> bool:
    try:
        return bool(floats(model, call))
    except Exception:
        return False


@torch.no_grad()
def floats(model: nn.Module, call: Call) -> list[Tensor]:
    torch.manual_seed(1)  # some models draw random numbers
    args, kwargs = mapped(call, torch.clone)
    return [t.clone() for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]


def bounds(model: nn.Module, made: list[Call]) -> Iterator[float]:
    """What counts as rounding in each call: some times what the model differs by from its twin in float64."""
    exact = copy.deepcopy(model).double()
    for call in made:
        try:
            precise = floats(exact, mapped(call, lambda t: t.double() if t.is_floating_point() else t))
            yield max(BOUND, TIMES * apart(precise, floats(model, call)))
        except Exception:  # it does not run in float64
            yield BOUND


def whole_layers(model: nn.Module) -> int:
    """How many encoder layers, or attentions, are one call of the kernel."""
    held = [vars(module).get("forward") for module in model.modules()]
    return sum(isinstance(one, Guessed) and one.verdict[0] is not None for one in held)


def generated(model: Any) -> Tensor | None:
    """Tokens that two rows go on with, one of them after padding; `None`: the model does not generate from tokens."""
    if not getattr(model, "can_generate", lambda: False)() or model.main_input_name != "input_ids":
        return None
    start = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(start)
    mask[0, :3] = 0
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    settings |= {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    try:
        found: Tensor = model.generate(start, **settings)
    except Exception:
        return None
    return found


def _sparse(model: nn.Module) -> nn.Module:
    return platon.sparsify(model, dense_above=0.9)


def _loaded(model: nn.Module) -> nn.Module:
    with tempfile.TemporaryDirectory() as place:
        platon.save(_sparse(model), Path(place) / "model")
        return platon.load(Path(place) / "model")


KINDS = {"every layer": (0, _sparse), "every other layer": (2, _sparse), "saved and loaded": (3, _loaded)}


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dense_layer._FEWEST_WEIGHTS = 0
    known = each(survey, options.types or TYPES, options.results, options.seconds, here=options.here)
    counts = Counter(one["outcome"] for one in known)
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
    if counts["wrong"]:
        sys.exit("the bar: no type wrong")


if __name__ == "__main__":
    main()
