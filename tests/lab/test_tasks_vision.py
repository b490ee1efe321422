"""Images from parquet files and folders, and the embedded digits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from platon.lab.errors import UserError
from platon.lab.tasks import Prepared, Request, find

Write = Callable[..., Path]
Png = Callable[..., bytes]


@pytest.fixture
def cifar(write_parquet: Write, make_png: Png, tmp_path: Path) -> Path:
    for split, count in {"train": 12, "test": 8}.items():
        images = [{"bytes": make_png(n, 32), "path": None} for n in range(count)]
        write_parquet(f"cifar100/{split}.parquet", img=images, fine_label=[n * 9 for n in range(count)])
    return tmp_path


@pytest.fixture
def folder(make_png: Png, tmp_path: Path) -> Path:
    """Two classes, with files that are no images among them."""
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            place = tmp_path / "pets" / split / name
            place.mkdir(parents=True)
            for n in range(3):
                (place / f"{n}.PNG").write_bytes(make_png(10 * number + n))
            (place / "notes.txt").write_text("not an image")
            (place / ".hidden.png").write_text("not an image")
    return tmp_path / "pets"


def forward(prepared: Prepared) -> dict[str, float]:
    torch.manual_seed(0)
    split, rows = next(iter(prepared.evaluation.items()))
    batch = prepared.collate([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        output = prepared.build().eval()(**batch)
    return prepared.score(split, output.logits.numpy(), batch["labels"].numpy())


def test_cifar_builds_its_own_model(cifar: Path) -> None:
    prepared = find("cifar100").prepare(Request(data=cifar))
    assert list(prepared.evaluation) == ["test"]
    assert prepared.train[0]["pixel_values"].shape == (3, 32, 32)
    assert forward(prepared).keys() == {"accuracy"}
    assert prepared.lengths == {}
    config = prepared.build().config
    assert (config.num_labels, config.image_size, config.hidden_size) == (100, 32, 192)
    assert config.id2label[7] == "7"
    (cifar / "cifar100" / "fine_label_names.json").write_text(json.dumps([f"name {n}" for n in range(100)]))
    assert find("cifar100").prepare(Request(data=cifar)).build().config.id2label[7] == "name 7"
    for content, sentence in {"[]": "must name 100 classes, but names 0", "[1, ": "is no list of names"}.items():
        (cifar / "cifar100" / "fine_label_names.json").write_text(content)
        with pytest.raises(UserError, match=sentence):
            find("cifar100").prepare(Request(data=cifar))


def test_cifar_from_the_hub_is_the_same(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = find("cifar100").prepare(Request(data=cifar, train_rows=5))
    names = datasets.ClassLabel(names=[f"class {n}" for n in range(100)])
    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cifar / "cache")
        hub = {
            split: datasets.Dataset.from_list(_rows(cifar, split))
            .cast_column("img", datasets.Image())
            .cast_column("fine_label", names)
            for split in ("train", "test")
        }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: hub)
    remote = find("cifar100").prepare(Request(train_rows=5))
    assert remote.fingerprint == local.fingerprint
    assert torch.equal(remote.train[3]["pixel_values"], local.train[3]["pixel_values"])
    assert remote.build().config.id2label[1] == "class 1"


def _rows(folder: Path, split: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder / "cifar100" / f"{split}.parquet").to_pylist()
    return rows


def test_image_folder(folder: Path, tiny_vit: Path) -> None:
    prepared = find("images").prepare(Request(data=folder, model=str(tiny_vit)))
    assert (len(prepared.train), len(prepared.evaluation["validation"])) == (6, 6)
    assert [prepared.train[i]["labels"] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert prepared.build().config.id2label == {0: "cat", 1: "dog"}
    assert prepared.chance == {"validation": {"accuracy": 0.5}}
    forward(prepared)


def test_imagenet_as_a_folder(folder: Path, tiny_vit: Path) -> None:
    folder.rename(folder.with_name("imagenet"))
    prepared = find("imagenet").prepare(Request(data=folder.parent, model=str(tiny_vit)))
    assert prepared.build().config.num_labels == 2
    assert (
        find("imagenet").prepare(Request(data=folder.parent / "imagenet", model=str(tiny_vit))).fingerprint
        == prepared.fingerprint
    )


def test_imagenet_as_parquet(write_parquet: Write, make_png: Png, tmp_path: Path, tiny_vit: Path) -> None:
    for split in ("train", "validation"):
        for shard in range(2):
            images = [{"bytes": make_png(4 * shard + n), "path": f"{n}.png"} for n in range(4)]
            write_parquet(f"data/{split}-0000{shard}-of-00002.parquet", image=images, label=[0, 5, 999, 1])
    prepared = find("imagenet").prepare(Request(data=tmp_path, model=str(tiny_vit), eval_rows=3))
    assert (len(prepared.train), len(prepared.evaluation["validation"])) == (8, 3)
    assert prepared.build().config.num_labels == 1000


def test_files_too_large_for_memory_give_the_same(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = find("cifar100").prepare(Request(data=cifar))
    monkeypatch.setattr("platon.lab.tasks.dataset.IN_MEMORY", 100)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cifar / "cache")
    large = find("cifar100").prepare(Request(data=cifar))
    assert large.fingerprint == small.fingerprint
    assert torch.equal(large.train[3]["pixel_values"], small.train[3]["pixel_values"])


def test_only_a_sample_of_very_large_data_is_hashed(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platon.lab.tasks.image.HASHED", 10_000)
    first, second = (find("cifar100").prepare(Request(data=cifar)).fingerprint for _ in range(2))
    assert first == second


def test_augmentation_is_a_function_of_epoch_and_row(cifar: Path) -> None:
    def prepare(augment: bool) -> Any:
        return find("cifar100").prepare(Request(data=cifar, augment=augment))

    def pixels(rows: Any, epoch: int) -> torch.Tensor:
        rows.set_epoch(epoch)
        return torch.stack([rows[i]["pixel_values"] for i in range(len(rows))])

    plain, one, other = prepare(False), prepare(True).train, prepare(True).train
    first = pixels(one, 0)
    torch.rand(7), np.random.rand(7)  # whatever else draws random numbers
    assert torch.equal(first, pixels(other, 0))
    assert not torch.equal(first, pixels(one, 1))
    assert torch.equal(first, pixels(one, 0))
    assert not torch.equal(first, pixels(plain.train, 0))
    assert not prepare(True).evaluation["test"].augment


@pytest.mark.parametrize("size", [8, 16])
def test_another_image_size_keeps_the_position_embeddings(
    size: int, folder: Path, tiny_vit: Path, tmp_path: Path
) -> None:
    prepared = find("images").prepare(Request(data=folder, model=str(tiny_vit), image_size=size))
    model, original = prepared.build(), AutoModelForImageClassification.from_pretrained(tiny_vit)
    assert prepared.train[0]["pixel_values"].shape == (3, size, size)
    forward(prepared)
    pixels = torch.stack([prepared.train[i]["pixel_values"] for i in range(6)])
    with torch.no_grad():
        expected = original.vit(pixels, interpolate_pos_encoding=True).last_hidden_state
        found = model.vit(pixels).last_hidden_state
    torch.testing.assert_close(found, expected)
    model.save_pretrained(tmp_path / "saved")
    prepared.processor.save_pretrained(tmp_path / "saved")
    again = find("images").prepare(Request(data=folder, model=str(tmp_path / "saved")))
    assert torch.equal(again.train[0]["pixel_values"], pixels[0])
    with torch.no_grad():
        torch.testing.assert_close(again.build().vit(pixels).last_hidden_state, expected)


def test_image_size_that_does_not_fit(folder: Path, tiny_vit: Path) -> None:
    with pytest.raises(UserError, match=r"image_size 10 is not a multiple of the patch size 4"):
        find("images").prepare(Request(data=folder, model=str(tiny_vit), image_size=10))


def test_unreadable_images_are_named(
    folder: Path, cifar: Path, tiny_vit: Path, write_parquet: Write, make_png: Png
) -> None:
    images = [{"bytes": b"nothing" if n == 5 else make_png(n, 32), "path": None} for n in range(8)]
    write_parquet("cifar100/test.parquet", img=images, fine_label=[0] * 8)
    with pytest.raises(UserError, match=r"row 5 of .*test\.parquet is not a readable image; replace or remove it"):
        find("cifar100").prepare(Request(data=cifar))
    bad = folder / "train" / "dog" / "1.PNG"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(UserError, match=r"train/dog/1\.PNG is not a readable image; replace or remove it"):
        find("images").prepare(Request(data=folder, model=str(tiny_vit)))


def test_an_image_that_breaks_later_is_named_too(folder: Path, tiny_vit: Path) -> None:
    prepared = find("images").prepare(Request(data=folder, model=str(tiny_vit)))
    (folder / "train" / "cat" / "2.PNG").write_bytes(b"")
    with pytest.raises(UserError, match=r"train/cat/2\.PNG is not a readable image"):
        prepared.train[2]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"image": [1], "fine_label": [1]}, r"train\.parquet has no column 'img'; it has: image, fine_label"),
        ({"img": ["x"], "fine_label": [1]}, r"column 'img' of .* must hold images \(their bytes\), but holds string"),
        ({"img": [{"bytes": b""}], "fine_label": [100]}, r"row 0 of .* has the label 100, which is not in 0 to 99"),
        ({"img": [{"bytes": None}], "fine_label": [9]}, r"column 'img' of .* must hold images"),
        (
            {"img": [{"bytes": None}, {"bytes": b"x"}], "fine_label": [9, 9]},
            r"row 0 of .*train\.parquet is not a readable image",
        ),
    ],
)
def test_wrong_rows(columns: dict[str, Any], sentence: str, cifar: Path, write_parquet: Write) -> None:
    write_parquet("cifar100/train.parquet", **columns)
    with pytest.raises(UserError, match=sentence):
        find("cifar100").prepare(Request(data=cifar))


def test_wrong_folders(folder: Path, tiny_vit: Path, tmp_path: Path) -> None:
    def prepare(data: Path | None) -> Prepared:
        return find("images").prepare(Request(data=data, model=str(tiny_vit)))

    with pytest.raises(UserError, match="images needs your data"):
        prepare(None)
    with pytest.raises(
        UserError, match=r"has no folder train with a folder for each class; it holds: train, val|holds: pets"
    ):
        prepare(tmp_path)
    (folder / "val" / "bird").mkdir()
    with pytest.raises(UserError, match=r"val/bird is a class that training does not have: cat, dog"):
        prepare(folder)
    shutil.rmtree(folder / "val")
    with pytest.raises(UserError, match=r"has no validation folder \(validation, val or test\); it holds: train"):
        prepare(folder)
    (folder / "val").mkdir()
    with pytest.raises(UserError, match=r"val has no images in folders named after their classes; it holds: nothing"):
        prepare(folder)


def test_digits_need_nothing(tiny_vit: Path, tmp_path: Path) -> None:
    prepared = find("digits").prepare(Request())
    again = find("digits").prepare(Request())
    assert (len(prepared.train), len(prepared.evaluation["validation"])) == (1437, 360)
    assert prepared.fingerprint == again.fingerprint
    assert forward(prepared).keys() == {"accuracy"}
    assert prepared.train[0]["pixel_values"].min() == -1
    few = find("digits").prepare(Request(train_rows=100, eval_rows=50))
    assert (len(few.train), len(few.evaluation["validation"])) == (100, 50)
    assert few.fingerprint != prepared.fingerprint
    with pytest.raises(UserError, match="digits brings its own data; leave out --data"):
        find("digits").prepare(Request(data=tmp_path))
    with pytest.raises(UserError, match="takes 8 px and 3 channels, but digits have 8 px and one"):
        find("digits").prepare(Request(model=str(tiny_vit)))


def test_saved_digits_model_is_useful_on_its_own(tmp_path: Path) -> None:
    prepared = find("digits").prepare(Request(train_rows=20, eval_rows=20))
    model = prepared.build()
    model.save_pretrained(tmp_path / "run")
    prepared.processor.save_pretrained(tmp_path / "run")
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "run").config.id2label[3] == "3"
    pixels = AutoImageProcessor.from_pretrained(tmp_path / "run", backend="pil")(
        images=np.full((8, 8, 1), 16, dtype=np.uint8), return_tensors="pt"
    )["pixel_values"]
    assert torch.equal(pixels, torch.ones(1, 1, 8, 8))
    again = find("digits").prepare(Request(model=str(tmp_path / "run"), train_rows=20, eval_rows=20))
    for name, weight in again.build().state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_own_images_are_evaluated_with_the_models_classes(tmp_path: Path, tiny_vit: Path, make_png: Any) -> None:
    """From a folder with a folder for validation, or from the folders of the classes themselves."""
    for place in ("photos/train/ant", "photos/train/bee", "photos/train/cat", "photos/val/cat", "new/cat", "new/bee"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(2):
            (tmp_path / place / f"{number}.png").write_bytes(make_png(number))
    asked = Request(data=tmp_path / "photos", model=str(tiny_vit))
    prepared = find("images").prepare(asked)
    prepared.build().save_pretrained(tmp_path / "model")
    prepared.processor.save_pretrained(tmp_path / "model")
    same = find("images").prepare(asked.for_evaluation(tmp_path / "model"))
    assert (len(same.train), same.counts) == (0, {"validation": 2})
    assert same.evaluation["validation"][0]["labels"] == 2
    other = find("images").prepare(asked.for_evaluation(tmp_path / "model", tmp_path / "new"))
    assert [other.evaluation["validation"][n]["labels"] for n in range(4)] == [1, 1, 2, 2]
    (tmp_path / "new" / "dog").mkdir()
    (tmp_path / "new" / "dog" / "0.png").write_bytes(make_png(0))
    with pytest.raises(UserError, match=r"new/dog is a class that the model does not know: ant, bee, cat"):
        find("images").prepare(asked.for_evaluation(tmp_path / "model", tmp_path / "new"))
