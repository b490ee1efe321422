"""Selection inside rows, N:M patterns, and scores that read what weights multiply, against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import platon
from platon.engine.ranking.row import best

KEEP = 0.4


def llama(inputs: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=inputs,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    ).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()


def batches() -> list[dict[str, Tensor]]:
    """Two batches; the second has padding, whose tokens must not count."""
    random = torch.Generator().manual_seed(1)
    found = []
    for lengths in ((8, 8), (6, 3)):
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(0, 40, mask.shape, generator=random)
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def rows_kept(scores: Tensor, k: int) -> Tensor:
    """The k highest of each row, one at a time, the first of equal ones; a row for each output."""
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for number, row in enumerate(scores.tolist()):
        ranked = sorted(range(len(row)), key=lambda place: (-row[place], place))
        kept[number, ranked[:k]] = True
    return kept


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """For each linear layer all tokens that it multiplied, padding left out, from hooks of our own."""
    found: dict[str, list[Tensor]] = {}
    handles = []
    mask = torch.ones(0)

    def record(name: str) -> None:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.setdefault(name, []).append(args[0][mask.bool()].double())

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))

    for name in platon.weights(model).matrices:
        record(name.removesuffix(".weight"))
    with torch.no_grad():
        for batch in batches():
            mask = batch["attention_mask"]
            model(**batch)
    for handle in handles:
        handle.remove()
    return {f"{name}.weight": torch.cat(tokens) for name, tokens in found.items()}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_wanda_keeps_what_its_formula_says_row_by_row(make: object) -> None:
    model = make()  # type: ignore[operator]
    before = {name: matrix.detach().clone() for name, matrix in platon.weights(model).matrices.items()}
    tokens = inputs_of(model)
    pruner = platon.prune_once(model, KEEP, score=platon.Wanda(), batches=batches())
    for name, mask in pruner.masks().items():
        stored_with_inputs_first = before[name].shape[0] == tokens[name].shape[1] and make is gpt2
        weight = before[name].T if stored_with_inputs_first else before[name]
        shown = mask.T if stored_with_inputs_first else mask
        norm = tokens[name].square().sum(0).sqrt()
        k = round(KEEP * weight.shape[1])
        assert torch.equal(shown, rows_kept(weight.double().abs() * norm, k)), name
        assert torch.equal(model.get_parameter(name), before[name] * mask)
    assert pruner.kept() == pytest.approx(KEEP, abs=0.05)
    assert "Wanda" in repr(pruner)


def test_magnitude_in_rows_needs_no_data() -> None:
    model = llama()
    before = {name: matrix.detach().clone() for name, matrix in platon.weights(model).matrices.items()}
    masks = platon.prune_once(model, KEEP, score=platon.Magnitude(scope="row")).masks()
    for name, weight in before.items():
        assert torch.equal(masks[name], rows_kept(weight.abs(), round(KEEP * weight.shape[1])))


@given(
    st.integers(1, 5).flatmap(
        lambda rows: st.integers(1, 4).flatmap(
            lambda groups: st.tuples(
                st.lists(
                    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=4 * groups, max_size=4 * groups),
                    min_size=rows,
                    max_size=rows,
                ),
                st.integers(1, 3),
            )
        )
    )
)
def test_groups_of_neighbours_with_equal_scores(case: tuple[list[list[float]], int]) -> None:
    scores, k = torch.tensor(case[0]), case[1]
    expected = rows_kept(scores.view(-1, 4), k).view(scores.shape)
    assert torch.equal(best(scores, 4, k), expected)


def test_two_of_four_is_what_a_gpu_takes() -> None:
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    model = llama(inputs=64).bfloat16()
    pruner = platon.prune_once(model, 0.5, score=platon.Wanda(scope="2:4"), batches=batches())
    assert pruner.kept() == 0.5
    for name, mask in pruner.masks().items():
        weight = model.get_parameter(name).detach()
        assert (mask.view(-1, 4).sum(1) == 2).all()
        if weight.shape[0] % 32 == 0 and weight.shape[1] % 64 == 0:
            # The layout of `torch.sparse.to_sparse_semi_structured`; it refuses more than 2 of 4.
            packed = sparse_semi_structured_from_dense_cutlass(weight)
            assert torch.equal(sparse_semi_structured_to_dense_cutlass(*packed), weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_multiplies_two_of_four() -> None:
    weight = torch.randn(128, 128)
    layer = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 8))
    layer[0].weight.data = weight
    with pytest.warns(UserWarning, match="no transformer blocks"):
        platon.prune_once(layer, 0.5, score=platon.Magnitude(scope="2:4"))
    half = layer[0].weight.detach().half().cuda()
    x = torch.randn(128, 128).half().cuda()
    packed = torch.sparse.to_sparse_semi_structured(half)
    torch.testing.assert_close(packed @ x, half @ x, rtol=1e-2, atol=1e-2)


def test_the_pattern_is_reached_by_a_descent() -> None:
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = platon.Cubic(final=0.5, total=8, warmup=1, cooldown=2, every=1)
    pruner = platon.Pruner(model, optimizer, score=platon.Magnitude(scope="2:4"), schedule=schedule)
    shares = []
    for _ in range(8):
        ids = torch.randint(0, 40, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(pruner.kept())
    assert shares[0] == 1
    assert sorted(shares, reverse=True) == shares
    assert shares[-1] == 0.5
    assert {0.75} < set(shares)


@pytest.mark.parametrize(
    ("prune", "sentence"),
    [
        (lambda: platon.Magnitude(scope="4:2"), "scope must be 'global', 'matrix', 'row', or a pattern"),
        (lambda: platon.Magnitude(scope="rows"), "scope must be"),
        (
            lambda: platon.prune_once(llama(), 0.1, score=platon.Magnitude(scope="2:4")),
            r"scope 2:4 keeps 0.5 of the weights, but keep is 0.1; write keep 0.5",
        ),
        (
            lambda: platon.prune_once(llama(20), 0.25, score=platon.Magnitude(scope="2:8")),
            r"has 20 inputs, no multiple of 8, so scope 2:8 does not fit it",
        ),
        (lambda: platon.prune_once(llama(), 0.5, score=platon.Wanda()), r"no input of 'model.layers.0.*' was seen"),
        (lambda: platon.prune_once(llama(), 0.5, score=platon.Platon()), "Platon needs gradients"),
        (
            lambda: _on_neurons(platon.Wanda()),
            r"Wanda with scope 'row' ranks single weights; prune weights, not groups",
        ),
        (lambda: _on_neurons(platon.Magnitude(scope="2:4")), "Magnitude with scope '2:4' ranks single weights"),
        (lambda: _packed_attention(), "cannot be read, because its module, MultiheadAttention, is no linear layer"),
    ],
)
def test_what_cannot_be_pruned_so_is_refused(prune: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        prune()  # type: ignore[operator]


def _on_neurons(score: platon.Score) -> None:
    model = llama()
    platon.prune_once(model, 0.5, score=score, units=platon.neurons(model), batches=batches())


def _packed_attention() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    platon.prune_once(nn.TransformerEncoder(layer, 2), 0.5, score=platon.Wanda())


def test_a_refused_pruner_leaves_no_hooks() -> None:
    model = llama()
    foreign = torch.optim.SGD(llama().parameters())
    own = torch.optim.SGD(model.parameters())
    for optimizer, units in ((foreign, None), (own, platon.neurons(model))):
        with pytest.raises(ValueError, match=r"the optimizer does not hold|ranks single weights"):
            platon.Pruner(model, optimizer, score=platon.Wanda(), schedule=platon.Constant(0.5), units=units)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_pruning_once_leaves_mode_gradients_and_hooks_alone() -> None:
    model = llama().train()
    model(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 4, dtype=torch.int64)).loss.backward()
    gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    platon.prune_once(model, 0.5, score=platon.Wanda(), batches=batches())
    assert model.training
    assert gradients
    assert all(torch.equal(model.get_parameter(name).grad, grad) for name, grad in gradients.items())  # type: ignore[arg-type]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_evaluation_between_steps_does_not_count() -> None:
    def norms(evaluate: bool) -> dict[str, Tensor]:
        model = llama().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        pruner = platon.Pruner(model, optimizer, score=platon.Wanda(), schedule=platon.Constant(0.5))
        for batch in batches():
            model(**batch, labels=batch["input_ids"]).loss.backward()
            if evaluate:
                with torch.no_grad():
                    model.eval()(**batches()[0])
                model.train()
            optimizer.step()
        return {name: own.clone() for name, own in pruner.state_dict()["tensors"].items()}

    one, other = norms(False), norms(True)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
