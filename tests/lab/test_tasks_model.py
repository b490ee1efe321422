"""Models: whatever the Auto classes load, and one sentence when they cannot."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification
from transformers.utils import logging

import platon
from platon.lab.errors import UserError
from platon.lab.tasks import Prepared, Request, find

Write = Callable[..., Path]


@pytest.fixture
def prepare(write_sst2: Write) -> Callable[..., Prepared]:
    folder = write_sst2()
    return lambda model, **asked: find("sst2").prepare(Request(data=folder, model=str(model), **asked))


@pytest.fixture
def copied(tiny_bert: Path, tmp_path: Path) -> Path:
    """The tiny model, for a test that will spoil it."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "copied"))


def test_build_is_fresh_and_follows_the_seed(prepare: Callable[..., Prepared], tiny_bert: Path) -> None:
    prepared = prepare(tiny_bert)
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        heads.append(prepared.build().get_submodule("classifier").weight)
    assert torch.equal(heads[0], heads[1])
    assert heads[0] is not heads[1]


def test_a_head_of_another_size_is_replaced_quietly(
    copied: Path, prepare: Callable[..., Prepared], capfd: pytest.CaptureFixture[str]
) -> None:
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(copied, num_labels=7)
    BertForSequenceClassification(config).save_pretrained(copied)
    level = logging.get_verbosity()
    model = prepare(copied).build()
    assert model.get_submodule("classifier").weight.shape[0] == 2
    assert (logging.get_verbosity(), capfd.readouterr()) == (level, ("", ""))


def test_half_precision_files_are_trained_in_single(copied: Path, prepare: Callable[..., Prepared]) -> None:
    logging.disable_progress_bar()
    AutoModelForSequenceClassification.from_pretrained(copied, dtype=torch.float16).save_pretrained(copied)
    assert {p.dtype for p in prepare(copied).build().parameters()} == {torch.float32}


def test_folder_that_does_not_exist(tiny_bert: Path, prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(UserError, match=r"the model folder '.*tiny-brt' does not exist; nearest: 'tiny-bert'"):
        prepare(tiny_bert.with_name("tiny-brt"))
    with pytest.raises(UserError, match=r"the model folder './nowhere/at/all' does not exist"):
        prepare("./nowhere/at/all")
    with pytest.raises(UserError, match=r"config\.json' is a file; give the folder"):
        prepare(tiny_bert / "config.json")


@pytest.mark.usefixtures("offline")
def test_hub_out_of_reach(prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(
        UserError,
        match=r"'bert-base-uncasedd' is no local folder, and the hub cannot be reached; .*nearest: 'google-bert/",
    ):
        prepare("bert-base-uncasedd")


def test_unknown_on_the_hub(prepare: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        cause = huggingface_hub.errors.RepositoryNotFoundError.__new__(huggingface_hub.errors.RepositoryNotFoundError)
        raise OSError("not a valid model identifier") from cause

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(
        UserError, match=r"'deberta-v3-bse' is neither a local folder nor a model on the hub; nearest: .*deb"
    ):
        prepare("deberta-v3-bse")


def test_names_that_the_hub_cannot_have(prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(UserError, match=r"'not a name\?' is neither a local folder nor a model on the hub"):
        prepare("not a name?")


def spoil_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_kind(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


def spoil_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))


def spoil_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)


def swap_tokenizer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))


def spoil_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_config, r"cannot load the config of the model in the folder '.*copied': there is no config\.json"),
        (spoil_kind, r"is of type 'vit', which AutoModelForSequenceClassification cannot load for sst2"),
        (spoil_code, r"runs its own code; allow that with --trust-remote-code"),
        (spoil_tokenizer, r"the model '.*copied' has no tokenizer; save one beside it"),
        (swap_tokenizer, r"the tokenizer of '.*copied' has \d+ tokens, but its model knows 9 only"),
        (spoil_weights, r"cannot load the weights of the model in the folder '.*copied': Error no file named"),
        (truncate_weights, r"cannot load the weights of the model in the folder '.*copied'"),
    ],
)
def test_incomplete_folders(
    spoil: Callable[[Path], None], sentence: str, copied: Path, prepare: Callable[..., Prepared]
) -> None:
    spoil(copied)
    with pytest.raises(UserError, match=sentence) as caught:
        prepare(copied).build()
    assert "\n" not in str(caught.value)


def test_image_model_without_a_processor(tiny_vit: Path, tmp_path: Path, make_png: Callable[..., bytes]) -> None:
    for split in ("train", "val"):
        place = tmp_path / "images" / split / "x"
        place.mkdir(parents=True)
        (place / "0.png").write_bytes(make_png(0))
    shutil.copytree(tiny_vit, tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"cannot load the image processor of the model in the folder"):
        find("images").prepare(Request(data=tmp_path / "images", model=str(tmp_path / "vit")))


# --- weights that do not fit ------------------------------------------------------------------------------------------


def test_a_new_head_is_noted(copied: Path, prepare: Callable[..., Prepared]) -> None:
    logging.disable_progress_bar()
    BertForSequenceClassification(AutoConfig.from_pretrained(copied, num_labels=7)).save_pretrained(copied)
    prepared = prepare(copied)
    prepared.build()
    [note] = prepared.notes
    assert "has another size than 2 labels need" in note
    assert "classifier.weight" in note
    prepared.build()
    assert len(prepared.notes) == 1


def test_a_body_of_another_shape_is_refused(copied: Path, prepare: Callable[..., Prepared]) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 20}))
    with pytest.raises(
        UserError, match=r"'bert\.encoder.*intermediate\.dense\.bias' is \[32\] in the file and \[20\] by the config"
    ):
        prepare(copied).build()


def test_weights_of_another_model_are_refused(copied: Path, prepare: Callable[..., Prepared]) -> None:
    weights = safetensors.torch.load_file(copied / "model.safetensors")
    some = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    safetensors.torch.save_file(some, copied / "model.safetensors", {"format": "pt"})
    prepared = prepare(copied)
    prepared.build()
    assert any("start from random values: bert.pooler.dense.bias" in note for note in prepared.notes)
    other = {f"other.{name}": tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(other, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"are not those of a BertForSequenceClassification: 'bert\..*' and \d+ more"):
        prepare(copied).build()


def test_pickles_are_refused(copied: Path, prepare: Callable[..., Prepared]) -> None:
    torch.save(safetensors.torch.load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    prepare(copied).build()
    (copied / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"weights in a pickle only \(pytorch_model\.bin\), which platon does not open"):
        prepare(copied).build()


@pytest.fixture
def compact(tiny_bert: Path, tmp_path: Path) -> Path:
    """The tiny model with half of its neurons gone, as platon saves it."""
    model = BertForSequenceClassification.from_pretrained(tiny_bert)
    layer = model.bert.encoder.layer[0]
    with torch.no_grad():
        layer.intermediate.dense.weight[::2] = 0
        layer.intermediate.dense.bias[::2] = 0
        layer.output.dense.weight[:, ::2] = 0
    small = platon.compact(model)
    assert small is not model
    platon.save(small, tmp_path / "compact", processor=AutoTokenizer.from_pretrained(tiny_bert))
    return tmp_path / "compact"


def test_a_compact_folder_keeps_its_weights(compact: Path, prepare: Callable[..., Prepared]) -> None:
    prepared = prepare(compact)
    model, saved = prepared.build(), platon.load(compact)
    assert model.get_parameter("bert.encoder.layer.0.intermediate.dense.weight").shape == (16, 16)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert prepared.notes == []


def test_a_compact_folder_with_another_head(compact: Path, write_parquet: Write, tmp_path: Path) -> None:
    for split in ("train", "validation_matched"):
        write_parquet(f"mnli/{split}.parquet", premise=["a", "b"], hypothesis=["c", "d"], label=[0, 2])
    prepared = find("mnli").prepare(Request(data=tmp_path, model=str(compact)))
    torch.manual_seed(0)
    model, saved = prepared.build(), platon.load(compact)
    assert model.get_parameter("classifier.weight").shape == (3, 16)
    assert model.num_labels == model.config.num_labels == 3
    assert torch.equal(
        model.get_parameter("bert.encoder.layer.0.output.dense.weight"),
        saved.get_parameter("bert.encoder.layer.0.output.dense.weight"),
    )
    assert "classifier.weight" in prepared.notes[0]
    rows = prepared.evaluation["matched"]
    assert torch.isfinite(model(**prepared.collate([rows[0], rows[1]])).loss)


def test_a_compact_folder_of_another_kind(compact: Path) -> None:
    from platon.lab.tasks.model import Pretrained

    with pytest.raises(
        UserError, match="is a BertForSequenceClassification, and this task needs a BertForQuestionAnswering"
    ):
        Pretrained(find("squad"), Request(model=str(compact))).build()
