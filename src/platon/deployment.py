"""`platon.export` and `platon.measure`: any model to a form that is small or fast, and how fast it is.

They bring together what deploy/ makes and measures and what lab/ knows of tasks; the commands `export` and `speed` are
built on them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Tell = Callable[[str], None]
ONNX_FILE = "model.onnx"  # the name that Optimum looks for


def _nothing(text: str) -> None:
    pass


def export(
    model: PreTrainedModel | str | Path,
    folder: str | Path,
    format: str = "sparse",  # noqa: A002  # what it is, as in `platon export --format`
    *,
    processor: Any = None,
    batch: Mapping[str, Tensor] | None = None,
    tell: Tell = _nothing,
    precision: str = "float32",
    embeddings: str | None = None,
) -> Path:
    """Write a model in a form that is smaller, faster, or runs elsewhere, and check it.

    Args:
        model: of transformers, pruned or not; or the folder of a saved model or a run, or a name on the hub.
        folder: where to write.
        format: "sparse" (bits and values), "compact" (smaller matrices), "fast" (layers that skip zeros) or "onnx".
        processor: the tokenizer or image processor to save beside it; by default the one in the model's folder.
        batch: real inputs to check a compact model or an ONNX file on; a few sentences or random pixels by default.
        tell: is called with a line of text about each check.
        precision: "float16" rounds what "sparse" and "fast" store, as for `platon.save`.
        embeddings: "int8" the same for embedding tables.

    Returns:
        The folder. `platon.load` opens it; an ONNX folder is for Optimum's `ORTModelFor…` and ONNX Runtime.
    """
    if format not in FORMATS:
        raise ValueError(f"no format is called {format!r}; there are {', '.join(FORMATS)}")
    rounded = precision != "float32" or embeddings is not None
    if rounded and format not in ("sparse", "fast"):
        raise ValueError(f"precision and embeddings are for the formats sparse and fast, got {format!r}")
    folder, (opened, found) = Path(folder), _opened(model, *_BEST_FROM.get(format, ()))
    own = found if processor is None else processor
    FORMATS[format](opened, folder, own, batch, tell)
    if rounded:
        from platon.deploy.storage import load, save

        save(
            load(folder),
            folder,
            processor=own,
            sparse=format == "sparse",
            precision=precision,
            embeddings=embeddings,
        )
    return folder


def measure(
    model: PreTrainedModel | str | Path,
    dense: PreTrainedModel | str | Path | None = None,
    *,
    task: str | None = None,
    data: str | Path | None = None,
    metric: Callable[[Any], Mapping[str, Mapping[str, float]]] | None = None,
    batch: Mapping[str, Tensor] | None = None,
    engines: Sequence[str] = ("eager",),
    rows: Sequence[int] = (1, 8),
    lengths: Sequence[int] = (128,),
    rounds: int = 20,
    threads: int | None = None,
    tell: Tell = _nothing,
) -> dict[str, Any]:
    """Measure a model beside a dense one: latency, throughput, size on disk, peak memory, and the task's metric.

    Args:
        model: of transformers; or the folder of a saved model or a run, or a name on the hub.
        dense: what it is compared with; by default the model itself in dense kernels, which multiply zeros too.
        task: evaluate both on this task (`platon list tasks`), on `data`; the model must be a folder or a name.
        data: the user's file or folder for `task`; None is the hub.
        metric: evaluates a model, instead of `task`: model -> split -> metric -> value.
        batch: real inputs; by default rows of the task, a few sentences or random pixels.
        engines: eager, compile, onnx or sparse.
        rows: sizes of the batches.
        lengths: tokens in a row, for texts.
        rounds: how often each model runs in each setting.
        threads: torch's choice by default.
        tell: is called with a line of text after each measurement.

    Returns:
        What `platon speed` writes to speed.json.
    """
    from platon.deploy.speed import Setting
    from platon.deploy.speed import measure as measure_speed

    setting = Setting(tuple(engines), tuple(rows), tuple(lengths), rounds, threads)
    if task is not None:
        metric, batch = _task(model, task, data, metric, batch)
    with ExitStack() as held:
        pruned = held.enter_context(_saved(model))
        against = pruned if dense is None else held.enter_context(_saved(dense))
        inputs = batch or _example(*_opened(model))
        return measure_speed({"dense": against, "pruned": pruned}, inputs, setting, metric, tell)


def _task(model: Any, task: str, data: str | Path | None, metric: Any, batch: Any) -> tuple[Any, Any]:
    """The metric and a batch of a task, where they are not given."""
    from platon.lab.finished import open_source
    from platon.lab.source import find_source

    if not isinstance(model, str | Path):
        raise TypeError("with a task, model must be a folder or a name; save the model first, or give a metric")
    prepared, evaluate = open_source(find_source(str(model)), task, None if data is None else Path(data))[1:]
    return metric or evaluate, batch or prepared.batch()


def _opened(model: Any, *forms: str) -> tuple[Any, Any]:
    """The model, and the tokenizer or image processor that was saved with it, if it is a folder or a name.

    Of a run, the first of these forms that it has, or its `model/`.
    """
    if not isinstance(model, str | Path):
        return model, None
    from platon.deploy.loading import load
    from platon.lab.source import find_source
    from platon.lab.tasks.model import saved_processor

    folder = find_source(str(model)).form(*forms)
    return load(folder), saved_processor(folder)


@contextmanager
def _saved(model: Any) -> Iterator[Path]:
    """The folder of a model; one that is not saved yet is saved for as long as it is needed."""
    if isinstance(model, str | Path):
        from platon.lab.source import find_source

        yield find_source(str(model)).folder
        return
    from platon.deploy.storage import save

    with TemporaryDirectory() as place:
        yield save(model, Path(place) / "model")


def _example(model: Any, processor: Any) -> dict[str, Tensor]:
    from platon.deploy.example import example_batch

    return example_batch(model, processor)


# --- formats ----------------------------------------------------------------------------------------------------------


def _write_sparse(model: Any, folder: Path, processor: Any, batch: Any, tell: Tell) -> None:
    from platon.deploy.storage import save

    save(model, folder, sparse=True, processor=processor)


def _write_compact(model: Any, folder: Path, processor: Any, batch: Any, tell: Tell) -> None:
    from platon.deploy.shrink import shrink

    found = shrink(model, batch or _example(model, processor), folder, processor)
    tell(f"{found['parameters']:,} parameters; largest difference of the outputs {found['difference']:.1e}")


def _write_fast(model: Any, folder: Path, processor: Any, batch: Any, tell: Tell) -> None:
    from platon.deploy.sparse import sparsify
    from platon.deploy.storage import save

    save(sparsify(model), folder, processor=processor)


def _write_onnx(model: Any, folder: Path, processor: Any, batch: Any, tell: Tell) -> None:
    """The graph, with configuration, tokenizer or image processor beside it, as Optimum expects them."""
    from platon.deploy import onnx

    onnx.require()
    if folder.exists() and not (folder / ONNX_FILE).exists() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} holds something else than an ONNX model; choose another folder")
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        found = onnx.export(model, temporary / ONNX_FILE, [batch or _example(model, processor)])
        model.config.save_pretrained(temporary)
        if processor is not None:
            processor.save_pretrained(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ONNX_FILE).unlink(missing_ok=True)  # comes back last: without it, nothing is read
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == ONNX_FILE):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    tell(f"checked in ONNX Runtime; largest difference of the outputs {found.difference:.1e}")


FORMATS: dict[str, Callable[[Any, Path, Any, Any, Tell], None]] = {
    "sparse": _write_sparse,
    "compact": _write_compact,
    "fast": _write_fast,
    "onnx": _write_onnx,
}
_BEST_FROM = {"fast": ("compact",), "onnx": ("compact",)}  #: forms of a run that are better to start from
