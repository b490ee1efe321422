"""Images, decoded when they are asked for: in memory are only the bytes of parquet files, and the paths of others."""

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
from platon.lab.tasks.source import Split, existing_folder, listing, subset

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
HASHED = 2**30  # bytes


class Store(Protocol):
    """Compressed images by number."""

    def sizes(self) -> NDArray[np.int64]: ...

    def read(self, index: int) -> bytes: ...

    def where(self, index: int) -> str: ...


@dataclass(frozen=True)
class Files:
    """Images as files."""

    paths: Sequence[Path]

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each."""
        return np.array([path.stat().st_size for path in self.paths], dtype=np.int64)

    def read(self, index: int) -> bytes:
        """The file's content."""
        return self.paths[index].read_bytes()

    def where(self, index: int) -> str:
        """The file's name."""
        return str(self.paths[index])


class Column:
    """Images as a column of the hub's kind: bytes, and the path that they once had."""

    def __init__(self, split: Split, name: str) -> None:
        """The column must exist and hold images."""
        kind = split.rows.data.column(name).type
        fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
        if "bytes" not in fields or not (
            pa.types.is_binary(fields["bytes"]) or pa.types.is_large_binary(fields["bytes"])
        ):
            raise UserError(f"column {name!r} of {split.where} must hold images (their bytes), but holds {kind}")
        # Straight from the arrow table, so that nothing decodes the images on the way.
        self.bytes, self.place = pc.struct_field(split.rows.data.column(name), "bytes"), split.where

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each: from the offsets, so the images themselves are not read."""
        return np.asarray(pc.binary_length(self.bytes).fill_null(0).to_numpy(), dtype=np.int64)

    def read(self, index: int) -> bytes:
        """The stored bytes."""
        return self.bytes[index].as_py() or b""

    def where(self, index: int) -> str:
        """Row and file."""
        return f"row {index} of {self.place}"


@dataclass
class Pictures(torch.utils.data.Dataset[dict[str, Any]]):
    """Images with labels, turned into pixels on access.

    picks: the rows of the store that are used.
    augment: show a random part of each image, mirrored or not: a function of (epoch, row) alone, so a resumed run sees
        the same images. `accelerate` calls `set_epoch`.
    """

    store: Store
    labels: NDArray[np.int64]
    picks: NDArray[np.int64]
    processor: Any = None
    augment: bool = False
    epoch: int = 0

    def __len__(self) -> int:
        """How many are used."""
        return len(self.picks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Pixels and label."""
        row = int(self.picks[index])
        image = decode(self.store, row)
        if self.augment:
            image = crop(image, np.random.default_rng((self.epoch, row)))
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": int(self.labels[row])}

    def set_epoch(self, epoch: int) -> None:
        """Draw other random parts from now on."""
        self.epoch = epoch

    def take(self, count: int | None) -> Pictures:
        """A subset of so many, always the same one."""
        if count is None or count >= len(self):
            return self
        return replace(self, picks=self.picks[subset(len(self), count)])

    def used_labels(self) -> NDArray[np.int64]:
        """In the order of the rows."""
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
    """A random part with the same proportions and 64 to 100 % of the area, in half of the cases mirrored."""
    share = np.sqrt(random.uniform(0.64, 1))
    width, height = (max(1, round(side * share)) for side in image.size)
    left, top = random.integers(0, image.width - width + 1), random.integers(0, image.height - height + 1)
    part = image.crop((int(left), int(top), int(left) + width, int(top) + height))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def digest(splits: Mapping[str, Pictures]) -> str:
    """SHA-256 of labels, sizes and bytes, and a first check that the images open.

    All bytes up to a gigabyte; of larger data those of every n-th image, for reading all of ImageNet takes an hour.
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


def read_folder(data: Path, places: Sequence[str]) -> tuple[dict[str, Pictures], tuple[str, ...]] | None:
    """Training and validation images from a folder a class, and the classes; None when no place has a train folder."""
    existing_folder(data)
    root = next((data / place for place in places if (data / place / "train").is_dir()), None)
    if root is None:
        return None
    validation = next((root / n for n in ("validation", "val", "valid", "test") if (root / n).is_dir()), None)
    if validation is None:
        raise UserError(f"{root} has no validation folder (validation, val or test); it holds: {listing(root)}")
    classes = tuple(sorted(p.name for p in (root / "train").iterdir() if p.is_dir() and not p.name.startswith(".")))
    found = {}
    for name, folder in {"train": root / "train", "validation": validation}.items():
        paths, labels = [], []
        for place in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
            if place.name not in classes:
                raise UserError(f"{place} is a class that training does not have: {listing(root / 'train')}")
            files = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
            paths += files
            labels += [classes.index(place.name)] * len(files)
        if not paths:
            raise UserError(f"{folder} has no images in folders named after their classes; it holds: {listing(folder)}")
        found[name] = Pictures(Files(paths), np.array(labels), np.arange(len(paths)))
    return found, classes
