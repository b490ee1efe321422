"""The tasks `cifar100`, `imagenet` and `images`, the user's own."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    default_data_collator,
)

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import HubDataset, Split, first_line
from platon.lab.tasks.image import ColumnStore, ImageDataset, digest, read_classes, read_folder, read_unlabelled
from platon.lab.tasks.model import Pretrained
from platon.lab.tasks.path import listing
from platon.lab.tasks.sequence import TEST, rows_of
from platon.lab.tasks.target import Classes
from platon.lab.tasks.task import NEW, Prepared, Request, Task


@dataclass(frozen=True)
class Layout:
    """An image dataset of the hub and its columns.

    folders: where a local copy with one folder for each class may be, instead of the hub's files.
    """

    dataset: HubDataset
    image: str
    label: str
    classes: int
    folders: tuple[str, ...] = ()


LAYOUTS = {
    "cifar100": Layout(
        HubDataset("uoft-cs/cifar100", None, ("cifar100", "cifar100/cifar100", ".")), "img", "fine_label", 100
    ),
    "imagenet": Layout(
        HubDataset("ILSVRC/imagenet-1k", None, ("imagenet/data", "imagenet-1k/data", "imagenet", "data", ".")),
        "image",
        "label",
        1000,
        ("imagenet", "imagenet-1k", "."),
    ),
}


def prepare(task: Task, request: Request) -> Prepared:
    """Images from the hub, from its parquet files, or from one folder for each class."""
    splits, names = _read(task, request)
    target = Classes(names, task.metrics)
    labels = target.config()
    model: RandomViT | Resizable
    if request.model is None and task.model is None:
        model = RandomViT(small_vit(request.image_size or 32, **labels))
    else:
        model = Resizable(task, request, **labels)
    processor = model.processor()
    splits = {
        name: replace(
            images.take(rows_of(request, name)),
            processor=processor,
            augment=request.augment and name == "train",
        )
        for name, images in splits.items()
    }
    fingerprint = digest(splits)
    about = [
        (name, f"{len(images):,} images: {target.described(images.used_labels())}") for name, images in splits.items()
    ]
    train, new = splits.pop("train", None), splits.get(NEW)
    test = {name: splits.pop(name) for name in tuple(splits) if name == TEST and request.test is not None}
    return Prepared(
        build=model.build,
        train=() if train is None else train,
        evaluation=dict(splits),
        test=dict(test),
        collate=default_data_collator,
        score=target.score,
        chance={name: target.chance(images.used_labels()) for name, images in (splits | test).items()},
        metrics=task.metrics,
        fingerprint=fingerprint,
        processor=processor,
        notes=model.notes,
        about=[*([] if request.data is None else [("data", str(request.data))]), *about],
        answers=target.answers,
        source=None if new is None else [{"file": new.store.where(int(row))} for row in new.picks],
    )


def small_vit(image_size: int, **labels: Any) -> ViTConfig:
    """2.7 M weights in 6 layers: small enough to train on a CPU with images of 32 px."""
    return ViTConfig(
        image_size=image_size,
        patch_size=4,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        initializer_range=0.05,  # the usual 0.02 suits wider models; see digits_vit
        **labels,
    )


class RandomViT:
    """A ViT with random weights, built from a configuration; the counterpart of `Pretrained`."""

    def __init__(self, config: ViTConfig, **settings: Any) -> None:
        """`settings` are those of the image processor, except its size."""
        self.config, self.settings, self.notes = config, settings, list[str]()

    def processor(self) -> Any:
        """An image processor for the model's image size."""
        size: Any = self.config.image_size
        return ViTImageProcessorPil(size={"height": size, "width": size}, **self.settings)

    def build(self) -> PreTrainedModel:
        """A new model each time."""
        return ViTForImageClassification(copy.deepcopy(self.config))


class Resizable(Pretrained):
    """A pre-trained model for images of the size that the user asks for."""

    def __init__(self, task: Task, request: Request, **config: Any) -> None:
        """Refuse an image size that is not a multiple of the model's patch size."""
        super().__init__(task, request, **config)
        self.size = request.image_size
        patch = getattr(self.config, "patch_size", None)
        if self.size is not None and isinstance(patch, int) and self.size % patch:
            raise UserError(f"image_size {self.size} is not a multiple of the patch size {patch} of {self.name!r}")

    def processor(self, **changes: Any) -> Any:
        """The image processor saved with the model, set to the asked size."""
        processor = super().processor(**changes)
        if self.size is None:
            return processor
        square = {"height": self.size, "width": self.size}
        # Some processors scale the shorter side and crop the centre; others scale both sides.
        changes = {"size": square if "height" in processor.size else {"shortest_edge": self.size}}
        if getattr(processor, "do_center_crop", False):
            changes["crop_size"] = square
        return super().processor(**changes)

    def build(self) -> PreTrainedModel:
        """The model; position embeddings are interpolated once, here, so that the saved model is an ordinary one."""
        model = super().build()
        if self.size is not None and self.size != model.config.image_size:
            resize_positions(model, self.size)
        return model


def resize_positions(model: PreTrainedModel, size: int) -> None:
    """Make a ViT take images of another size."""
    able = (m for m in model.modules() if hasattr(m, "interpolate_pos_encoding") and hasattr(m, "patch_embeddings"))
    place: Any = next(able, None)
    old = getattr(place, "position_embeddings", None)
    if place is None or not isinstance(old, torch.nn.Parameter):
        raise UserError(f"image_size cannot be changed for a model of type {model.config.model_type!r}; leave it out")
    patches = place.patch_embeddings
    extra = old.shape[1] - patches.num_patches  # the class token, and DeiT's second one
    count = (size // model.config.patch_size) ** 2
    with torch.no_grad():
        new = place.interpolate_pos_encoding(old.new_zeros(1, extra + count, old.shape[2]), size, size)
    place.position_embeddings = torch.nn.Parameter(new.clone())
    patches.image_size, patches.num_patches = (size, size), count
    place.image_size = (size, size)
    model.config.image_size = size


def _read(task: Task, request: Request) -> tuple[dict[str, ImageDataset], tuple[str, ...]]:
    """The splits, and the names of the classes in order."""
    layout, data = LAYOUTS.get(task.name), request.data
    if not request.labelled:
        assert data is not None
        names = Pretrained(task, request).labels()
        assert names is not None
        return {NEW: read_unlabelled(data)}, names
    if layout is None and data is None:
        raise UserError(
            "the task images needs your data: give a folder with train/CLASS/ and validation/CLASS/ with --data"
        )
    if layout is None:
        assert data is not None
        classes = Pretrained(task, request).labels() if request.evaluation_only else None
        found = read_folder(data, (".",), classes)
        if found is None:
            raise UserError(f"{data} has no folder train with a folder for each class; it holds: {listing(data)}")
        if request.test is not None:
            found[0][TEST] = read_classes(Path(request.test), found[1])
        return found
    if data is not None and layout.folders:
        found = read_folder(data, layout.folders)
        if found is not None:
            return found
    wanted = {} if request.evaluation_only else {"train": True}
    splits = layout.dataset.read(data, wanted | {task.splits[0]: True})
    images = {}
    for name, split in splits.items():
        split.require((layout.image, layout.label)).require_labels(layout.label, layout.classes)
        labels = split.rows.data.column(layout.label).to_numpy().astype(np.int64)
        images[name] = ImageDataset(ColumnStore(split, layout.image), labels, np.arange(len(labels)))
    return images, _names(next(iter(splits.values())), layout)


def _names(split: Split, layout: Layout) -> tuple[str, ...]:
    """The classes' names: the hub's, those in a list beside the local file, or numbers."""
    feature = split.rows.features[layout.label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    beside = Path(split.where).parent / f"{layout.label}_names.json"
    if not beside.is_file():
        return tuple(str(number) for number in range(layout.classes))
    try:
        names = tuple(str(name) for name in json.loads(beside.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{beside} is no list of names; correct or remove it ({first_line(error)})") from error
    if len(set(names)) != layout.classes:
        raise UserError(
            f"{beside} must name {layout.classes} classes, but names {len(set(names))}; correct or remove it"
        )
    return names
