"""Figures of a run, and parameter names split into layers and matrices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    SwinConfig,
    SwinModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

from platon import weights
from platon.lab.errors import UserError
from platon.lab.record import append_history, write_json
from platon.report.layer import layer_table
from platon.report.run_figure import draw_run


def record(**changes: Any) -> dict[str, Any]:
    """A record of a run on digits, with the entries that the figures read."""
    names = ("attention.q_proj", "attention.o_proj", "mlp.fc1")
    layers = {f"vit.layers.{n}.{name}.weight": 0.05 * (n + 1) for n in range(3) for name in names}
    results = {"validation": {"accuracy": 0.75}}
    plain = {"format": 1, "task": "digits", "method": "platon", "metrics": ["accuracy"], "results": results}
    plain |= {"settings": {}, "kept": 0.1, "parameters": {"all": 10, "prunable": 8, "left": 3}, "seconds": 2.0}
    plain |= {"layers": layers, "best": {"step": 8, "value": 0.75}, "dense": {"results": results}}
    return plain | changes


def folder_with(place: Path, found: dict[str, Any], evaluations: bool = True) -> Path:
    write_json(place / "record.json", found)
    for step in range(1, 11):
        kept = {} if found["method"] == "dense" else {"keep": 1 / step, "kept": 1 / step}
        append_history(place, {"step": step, "loss": 1.0, **kept})
        if evaluations and step % 2 == 0:
            append_history(place, {"step": step, "eval_validation_accuracy": step / 12})
    return place


@pytest.mark.parametrize(
    ("found", "evaluations", "names"),
    [
        (record(), True, ["training.png", "layers.png"]),
        (record(dense=None, best=None), True, ["training.png", "layers.png"]),
        (record(best=None), False, ["training.png", "layers.png"]),
        (record(method="dense", dense=None), True, ["training.png"]),
        (record(layers={"one.0.weight": 1.0}), True, ["training.png", "layers.png"]),
    ],
    ids=["pruned", "without a twin", "without evaluations", "dense", "one matrix"],
)
def test_figures_are_drawn(found: dict[str, Any], evaluations: bool, names: list[str], tmp_path: Path) -> None:
    drawn = draw_run(folder_with(tmp_path, found, evaluations))
    assert drawn == [tmp_path / "figures" / name for name in names]
    for path in drawn:
        with Image.open(path) as image:
            image.load()
            assert min(image.size) > 150
            assert image.convert("L").getextrema() != (255, 255)  # something is on it


def test_drawing_again_replaces_the_figures(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, record())
    before = [path.read_bytes() for path in draw_run(folder)]
    assert [path.read_bytes() for path in draw_run(folder)] == before


def test_unfinished_run_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        draw_run(tmp_path)


PROJECTIONS = [*(f"attention.{name}_proj" for name in "qkvo"), "mlp.fc1", "mlp.fc2"]
SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 16}
MODELS: dict[str, tuple[Callable[[], Any], list[str], list[str]]] = {
    "bert": (
        lambda: BertModel(BertConfig(vocab_size=9, **SMALL)),
        [str(n) for n in range(12)],
        [*(f"attention.{name}" for name in ("query", "key", "value", "output")), "intermediate", "output"],
    ),
    "vit": (
        lambda: ViTModel(ViTConfig(image_size=8, patch_size=4, **SMALL)),
        [str(n) for n in range(12)],
        PROJECTIONS,
    ),
    "t5": (
        lambda: T5Model(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)),
        ["0", "1", "decoder 0", "decoder 1"],
        [
            *(f"SelfAttention.{name}" for name in "qkvo"),
            *("DenseReluDense.wi", "DenseReluDense.wo"),
            *(f"EncDecAttention.{name}" for name in "qkvo"),
        ],
    ),
    "gpt2": (
        lambda: GPT2Model(GPT2Config(vocab_size=9, n_embd=8, n_layer=11, n_head=2, n_positions=8)),
        [str(n) for n in range(11)],
        ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    ),
    # Stages with blocks in them: both numbers make the row.
    "swin": (
        lambda: SwinModel(SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2])),
        ["0.0", "0.1", "1.0", "1.1"],
        PROJECTIONS,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_become_rows_and_columns(name: str) -> None:
    build, rows, columns = MODELS[name]
    shares = {matrix: 1 / (n + 1) for n, matrix in enumerate(weights(build()).matrices)}
    found_rows, found_columns, cells = layer_table(shares)
    assert (found_rows, found_columns) == (rows, columns)
    assert sorted(cells.values()) == sorted(shares.values())  # every matrix has a cell of its own


def test_cells_hold_the_shares_of_their_matrices() -> None:
    shares = {"bert.encoder.layer.10.attention.self.key.weight": 0.25, "bert.encoder.layer.2.output.dense.weight": 0.5}
    assert layer_table(shares) == (
        ["10", "2"],
        ["attention.key", "output"],
        {("10", "attention.key"): 0.25, ("2", "output"): 0.5},
    )


def test_names_without_layers_are_shown_as_they_are() -> None:
    assert layer_table({"encoder.in_proj_weight": 0.5}) == ([""], ["encoder.in_proj"], {("", "encoder.in_proj"): 0.5})
    packed = {"layers.3.self_attn.in_proj_weight": 0.5, "layers.3.linear1.weight": 1.0}
    assert layer_table(packed)[:2] == (["3"], ["self_attn.in_proj", "linear1"])
