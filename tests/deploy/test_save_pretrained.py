"""Saving to places that are in use, and `save_pretrained` of models that no configuration describes."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import platon
from platon.deploy import sparse_kernel
from platon.deploy.layer import CsrLinear, SparseLinear
from platon.deploy.place import place_of, swap
from platon.deploy.storage import MANIFEST, WEIGHTS

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TOKENS = {"input_ids": torch.arange(3, 19).view(2, 8)}


@pytest.fixture
def model() -> hf.BertForSequenceClassification:
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL)).eval()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.output.dense.weight[:, ::2] = 0.0
            for matrix in (layer.attention.self.query.weight, layer.intermediate.dense.weight):
                matrix[torch.rand(matrix.shape) > 0.2] = 0.0
    return model


@pytest.fixture
def compacted(model: nn.Module) -> nn.Module:
    return platon.compact(model)


@pytest.fixture
def fast(model: nn.Module) -> nn.Module:
    return platon.sparsify(model, dense_above=0.5)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


# --- places -----------------------------------------------------------------------------------------------------------


def test_a_link_stays_a_link(model: nn.Module, tmp_path: Path) -> None:
    for name in ("target", "not there yet"):
        link = tmp_path / f"link to {name}"
        link.symlink_to(tmp_path / name)
        if name == "target":
            platon.save(model, tmp_path / name)
            before = (tmp_path / name).stat().st_ino
        assert platon.save(model, link) == link
        assert link.is_symlink()
        assert not (tmp_path / name).is_symlink()
        assert torch.equal(logits(platon.load(link)), logits(model))
    assert (tmp_path / "target").stat().st_ino != before, "its target was replaced"
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ValueError, match="choose another folder"):
        platon.save(model, tmp_path / "circle")


@pytest.mark.parametrize("folder", [".", "..", "empty"])
def test_the_current_folder_is_not_replaced(
    model: nn.Module, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in it, and the shell that started the process, would be left in a folder that is deleted."""
    place = tmp_path / "empty" / "model"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    with pytest.raises(ValueError, match="is the current folder or holds it, so it is not replaced; name a new folder"):
        platon.save(model, tmp_path / "empty" if folder == "empty" else folder)
    assert Path.cwd() == place
    assert not list(place.iterdir())


def test_threads_that_save_to_one_folder(model: nn.Module, tmp_path: Path) -> None:
    """Each succeeds, one of them is there at the end, and nothing else is."""
    errors: list[BaseException] = []

    def save() -> None:
        try:
            for _ in range(4):
                platon.save(model, tmp_path / "model")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert torch.equal(logits(platon.load(tmp_path / "model")), logits(model))


def test_a_folder_that_is_being_replaced_is_not_taken_for_somebody_elses(tmp_path: Path) -> None:
    """Whoever looks while others swap and remove sees a saved model, or none."""

    def replace_often() -> None:
        for number in range(500):
            new = tmp_path / f"new{number}"
            new.mkdir()
            for name in ("a", "b", "c", MANIFEST):
                (new / name).touch()
            swap(new, tmp_path / "model")

    thread = threading.Thread(target=replace_often)
    thread.start()
    while thread.is_alive():
        assert place_of(tmp_path / "model") == tmp_path / "model"
    thread.join()


def test_a_folder_of_a_trainer_is_not_replaced(compacted: nn.Module, tmp_path: Path) -> None:
    """It has a manifest when a compact model was trained, and checkpoints too."""
    compacted.save_pretrained(tmp_path)
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(ValueError, match="holds something else than a saved model"):
        platon.save(compacted, tmp_path)
    assert (tmp_path / "checkpoint-10").exists()


# --- save_pretrained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compacted", "fast"])
def test_save_pretrained_writes_what_load_opens(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Also of a copy, of what came back from a folder, and beside other files."""
    model = request.getfixturevalue(kind)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    again = platon.load(platon.save(model, tmp_path / "saved"))
    for one in (model, copy.deepcopy(model), again):
        one.save_pretrained(tmp_path / "model")
        assert torch.equal(logits(platon.load(tmp_path / "model")), logits(model))
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert not list((tmp_path / "model").glob(".*"))


def test_a_copy_saves_itself(compacted: nn.Module, tmp_path: Path) -> None:
    twin = copy.deepcopy(compacted)
    with torch.no_grad():
        twin.classifier.bias.add_(1.0)
    twin.save_pretrained(tmp_path / "twin")
    assert torch.equal(logits(platon.load(tmp_path / "twin")), logits(twin))
    assert not torch.equal(logits(twin), logits(compacted))
    data = io.BytesIO()
    torch.save(twin, data)
    data.seek(0)
    thawed = torch.load(data, weights_only=False)
    thawed.save_pretrained(tmp_path / "thawed")
    assert torch.equal(logits(platon.load(tmp_path / "thawed")), logits(twin))


def test_trainer_saves_what_load_opens(compacted: nn.Module, tmp_path: Path) -> None:
    arguments = hf.TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True)
    hf.Trainer(compacted, arguments).save_model(str(tmp_path / "run"))
    assert (tmp_path / "run" / "training_args.bin").exists()
    assert torch.equal(logits(platon.load(tmp_path / "run")), logits(compacted))


def test_others_are_saved_as_before(model: hf.PreTrainedModel, tmp_path: Path) -> None:
    """A model whose shapes are those of its configuration: transformers opens it."""
    back = platon.load(platon.save(model, tmp_path / "saved"))
    back.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / MANIFEST).exists()
    plain = hf.BertForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    assert torch.equal(logits(plain), logits(model))


def test_pushing_is_refused(compacted: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not pushed; save it, then upload the folder"):
        compacted.save_pretrained(tmp_path / "model", push_to_hub=True)


# --- sparsified models ------------------------------------------------------------------------------------------------


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear | CsrLinear)}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_sparsified_model_comes_back(architecture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every architecture: the same layers are sparse, to the bit, and no dense matrix is made on the way."""
    if isinstance(sparse_kernel.find(), str):
        pytest.skip(str(sparse_kernel.find()))
    model = architecture.build().eval()
    with torch.no_grad():
        for matrix in platon.weights(model).matrices.values():
            matrix[torch.rand(matrix.shape) > 0.3] = 0.0
    fast = platon.sparsify(model, dense_above=0.5)
    platon.save(fast, tmp_path / "fast")
    monkeypatch.setattr("platon.deploy.sparse_matrix.from_dense", None)
    monkeypatch.setattr("platon.deploy.sparse_matrix.to_dense", None)
    monkeypatch.setattr("platon.deploy.calibration.limit", None)
    back = platon.load(tmp_path / "fast")
    assert type(back) is type(fast)
    assert sparse_layers(back).keys() == sparse_layers(fast).keys() != set()
    assert [m.activation for m in sparse_layers(back).values()] == [m.activation for m in sparse_layers(fast).values()]
    assert not back.training
    assert not any(parameter.requires_grad for parameter in back.parameters())
    batch = architecture.batch(model)
    with torch.no_grad():
        assert torch.equal(back(**batch).to_tuple()[0], fast(**batch).to_tuple()[0])


def test_compact_and_sparse_come_back(compacted: nn.Module, tmp_path: Path) -> None:
    fast = platon.sparsify(compacted, dense_above=0.5)
    assert sparse_layers(fast)
    back = platon.load(platon.save(fast, tmp_path / "fast"))
    assert torch.equal(logits(back), logits(fast))
    assert sparse_layers(back).keys() == sparse_layers(fast).keys()


@pytest.mark.parametrize(("writes", "reads"), [(True, False), (False, True), (False, False)])
def test_a_machine_without_the_kernel(
    model: nn.Module, writes: bool, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the same folder, and computes with `torch.sparse`."""
    found = sparse_kernel.find()
    if isinstance(found, str):
        pytest.skip(found)
    monkeypatch.setattr(sparse_kernel, "find", lambda: found if writes else "this test hides it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = platon.sparsify(model, dense_above=0.5)
    platon.save(fast, tmp_path / "fast")
    monkeypatch.setattr(sparse_kernel, "find", lambda: found if reads else "this test hides it")
    if reads:
        back = platon.load(tmp_path / "fast")
    else:
        with pytest.warns(UserWarning, match=r"no compiled sparse kernel: this test hides it; torch.sparse takes"):
            back = platon.load(tmp_path / "fast")
    assert {type(layer) for layer in sparse_layers(back).values()} == {SparseLinear if reads else CsrLinear}
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-4, atol=1e-5)


def test_damaged_sparse_layers_are_refused(fast: nn.Module, tmp_path: Path) -> None:
    folder = platon.save(fast, tmp_path / "fast")
    name = next(iter(sparse_layers(fast)))
    good = load_file(folder / WEIGHTS)
    for array, value in {"columns": 32, "counts": 64 * 99, "starts": 7}.items():
        changed = {key: tensor.clone() for key, tensor in good.items()}
        changed[f"{name}.{array}"].fill_(value)
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(ValueError, match=f"the weights are damaged: in the sparse layer '{name}'"):
            platon.load(folder)
