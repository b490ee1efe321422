"""The task `digits`: scikit-learn's 8×8 digits and a small ViT. The default; it needs no network and no files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import ViTConfig, default_data_collator

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import subset
from platon.lab.tasks.metrics import chance, score
from platon.lab.tasks.model import Pretrained, name_labels
from platon.lab.tasks.task import Prepared, Request, Task
from platon.lab.tasks.vision import RandomViT

SIDE, LARGEST = 8, 16  # width and height in pixels; the largest value of a pixel


@dataclass(frozen=True)
class Digits(torch.utils.data.Dataset[dict[str, Any]]):
    """Images and labels, held in memory as tensors."""

    pixels: torch.Tensor
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[index], "labels": int(self.labels[index])}


def prepare(task: Task, request: Request) -> Prepared:
    """A fixed split of the 1,797 digits: 80 % to train, 20 % to validate, each digit in proportion."""
    names = name_labels(tuple("0123456789"))
    if request.data is not None:
        raise UserError(f"digits brings its own data; leave out --data {request.data}")
    model: RandomViT | Pretrained
    if request.model is None:
        model = RandomViT(
            digits_vit(**names),
            do_resize=False,
            rescale_factor=1 / LARGEST,
            image_mean=[0.5],
            image_std=[0.5],
        )
    else:
        model = Pretrained(task, request, **names)
        shape = (getattr(model.config, "image_size", None), getattr(model.config, "num_channels", None))
        if shape != (SIDE, 1):
            raise UserError(
                f"the model {request.model!r} takes {shape[0]} px and {shape[1]} channels, but digits have {SIDE} px "
                "and one; leave out --model, or give a model that was trained on digits"
            )
    processor = model.processor()
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, SIDE, SIDE, 1).astype(np.uint8)
    parts = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    sha = sha256()
    found = {}
    for name, rows, count in zip(("train", "validation"), parts, (request.train_rows, request.eval_rows), strict=True):
        used = np.sort(rows)
        used = used if count is None else used[subset(len(used), count)]
        sha.update(images[used].tobytes() + labels[used].astype("<i8").tobytes())
        pixels = processor(images=list(images[used]), return_tensors="pt")["pixel_values"]
        found[name] = Digits(pixels, labels[used].astype(np.int64))
    return Prepared(
        build=model.build,
        train=found["train"],
        evaluation={"validation": found["validation"]},
        collate=default_data_collator,
        score=partial(score, metrics=task.metrics),
        chance={"validation": chance(found["validation"].labels, task.metrics)},
        metrics=task.metrics,
        fingerprint=sha.hexdigest(),
        processor=processor,
        notes=model.notes,
        about=[
            ("data", "scikit-learn's digits, 8×8 pixels, 10 classes"),
            *((name, f"{len(one):,} images") for name, one in found.items()),
        ],
    )


def digits_vit(**labels: Any) -> ViTConfig:
    """Four layers of 64, 0.2 M weights, 16 patches of 2 px.

    The usual standard deviation of initial weights, 0.02, suits hidden sizes of 768 and more; at 64 it costs two
    points of accuracy.
    """
    return ViTConfig(
        image_size=SIDE,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        initializer_range=0.05,
        **labels,
    )
