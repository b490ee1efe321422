"""Datasets of images, decoded on access: memory holds only the bytes of parquet files, or the paths of files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from PIL import Image

from platon.lab.errors import UserError
from platon.lab.tasks.dataset import Split, subset
from platon.lab.tasks.path import existing_data, existing_folder, listing

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
HASHED = 2**30  # bytes of images that go into a fingerprint
VALIDATION = ("validation", "val", "valid", "test")


class Store(Protocol):
    """Compressed images by number: their sizes in bytes, their content, and where each is, for error messages."""

    def sizes(self) -> NDArray[np.int64]: ...

    def read(self, index: int) -> bytes: ...

    def where(self, index: int) -> str: ...


@dataclass(frozen=True)
class FileStore:
    """Images in files."""

    paths: Sequence[Path]

    def sizes(self) -> NDArray[np.int64]:
        return np.array([path.stat().st_size for path in self.paths], dtype=np.int64)

    def read(self, index: int) -> bytes:
        return self.paths[index].read_bytes()

    def where(self, index: int) -> str:
        return str(self.paths[index])


class ColumnStore:
    """Images in a column of a dataset, as the hub stores them: a struct of bytes and the path of the original file."""

    def __init__(self, split: Split, name: str) -> None:
        """The column must exist and hold images."""
        kind = split.rows.data.column(name).type
        fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
        if "bytes" not in fields or not (
            pa.types.is_binary(fields["bytes"]) or pa.types.is_large_binary(fields["bytes"])
        ):
            raise UserError(f"column {name!r} of {split.where} must hold images (their bytes), but holds {kind}")
        # From the arrow table itself: `datasets` would decode the images.
        self.bytes, self.place = pc.struct_field(split.rows.data.column(name), "bytes"), split.where

    def sizes(self) -> NDArray[np.int64]:
        # arrow takes the lengths from its offsets and does not read the images.
        return np.asarray(pc.binary_length(self.bytes).fill_null(0).to_numpy(), dtype=np.int64)

    def read(self, index: int) -> bytes:
        return self.bytes[index].as_py() or b""

    def where(self, index: int) -> str:
        return f"row {index} of {self.place}"


@dataclass
class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Images with labels, turned into pixels on access.

    picks: the rows of the store that are used.
    augment: crop each image at random and mirror half of them. The choice depends on (epoch, row) alone, so a resumed
        run sees the same images. `accelerate` calls `set_epoch`.
    """

    store: Store
    labels: NDArray[np.int64]
    picks: NDArray[np.int64]
    processor: Any = None
    augment: bool = False
    epoch: int = 0
    labelled: bool = True

    def __len__(self) -> int:
        return len(self.picks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self.picks[index])
        image = decode(self.store, row)
        if self.augment:
            image = crop(image, np.random.default_rng((self.epoch, row)))
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels} | ({"labels": int(self.labels[row])} if self.labelled else {})

    def set_epoch(self, epoch: int) -> None:
        """Augment differently from now on."""
        self.epoch = epoch

    def take(self, count: int | None) -> ImageDataset:
        """A random subset of so many images, the same every time."""
        if count is None or count >= len(self):
            return self
        return replace(self, picks=self.picks[subset(len(self), count)])

    def used_labels(self) -> NDArray[np.int64]:
        """The labels of the used rows, in their order."""
        return self.labels[self.picks]


def decode(store: Store, row: int) -> Image.Image:
    """The image in RGB."""
    with _opening(store, row):
        return Image.open(io.BytesIO(store.read(row))).convert("RGB")


@contextmanager
def _opening(store: Store, row: int) -> Iterator[None]:
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{store.where(row)} is not a readable image; replace or remove it") from error


def crop(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """A random crop with the same proportions and 64 to 100 % of the area, mirrored in half of the cases."""
    share = np.sqrt(random.uniform(0.64, 1))
    width, height = (max(1, round(side * share)) for side in image.size)
    left, top = random.integers(0, image.width - width + 1), random.integers(0, image.height - height + 1)
    part = image.crop((int(left), int(top), int(left) + width, int(top) + height))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def digest(splits: Mapping[str, ImageDataset]) -> str:
    """SHA-256 of labels, sizes and bytes; images that do not open are found on the way.

    Up to a gigabyte all bytes are read; of larger data those of every n-th image, because all of ImageNet take an hour.
    """
    sha = hashlib.sha256()
    for name, pictures in splits.items():
        sizes = pictures.store.sizes()[pictures.picks]
        sha.update(f"{name} {len(pictures)}\n".encode())
        sha.update(np.stack([pictures.used_labels(), sizes]).astype("<i8").tobytes())
        for row in pictures.picks[:: -(-int(sizes.sum()) // HASHED) or 1]:
            with _opening(pictures.store, int(row)):
                content = pictures.store.read(int(row))
                Image.open(io.BytesIO(content)).verify()
            sha.update(content)
    return sha.hexdigest()


def read_folder(
    data: Path, places: Sequence[str], classes: tuple[str, ...] | None = None
) -> tuple[dict[str, ImageDataset], tuple[str, ...]] | None:
    """Training and validation images from one folder for each class, and the classes; None without a train folder.

    With the `classes` of a trained model, only its validation images are read.
    """
    existing_folder(data)
    if classes is not None:
        root = next((data / place for place in places if _validation_of(data / place)), None)
        # A folder without a folder for validation may hold the folders of the classes itself.
        folder = data if root is None else _validation_of(root)
        assert folder is not None
        return {"validation": read_classes(folder, classes, "the model does not know")}, classes
    root = next((data / place for place in places if (data / place / "train").is_dir()), None)
    if root is None:
        return None
    validation = _validation_of(root)
    if validation is None:
        raise UserError(f"{root} has no validation folder (validation, val or test); it holds: {listing(root)}")
    classes = tuple(path.name for path in _folders(root / "train"))
    folders = {"train": root / "train", "validation": validation}
    return {name: read_classes(place, classes, "training does not have") for name, place in folders.items()}, classes


def _validation_of(root: Path) -> Path | None:
    return next((root / name for name in VALIDATION if (root / name).is_dir()), None)


def _folders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_unlabelled(data: Path) -> ImageDataset:
    """One image, or all images below a folder."""
    existing_data(data)
    found = [data] if data.is_file() else _images_below(data)
    if not found:
        raise UserError(f"{data} has no images; it holds: {listing(data)}")
    return ImageDataset(FileStore(found), np.zeros(len(found), np.int64), np.arange(len(found)), labelled=False)


def _images_below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def read_classes(folder: Path, classes: tuple[str, ...], unknown: str = "training does not have") -> ImageDataset:
    """The images below a folder with one folder for each class."""
    existing_folder(folder)
    paths, labels = [], []
    for place in _folders(folder):
        files = _images_below(place)
        if place.name not in classes:
            shown = ", ".join(classes[:8]) + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")
            raise UserError(f"{place} is a class that {unknown}: {shown}")
        paths += files
        labels += [classes.index(place.name)] * len(files)
    if not paths:
        raise UserError(f"{folder} has no images in folders named after their classes; it holds: {listing(folder)}")
    return ImageDataset(FileStore(paths), np.array(labels), np.arange(len(paths)))
