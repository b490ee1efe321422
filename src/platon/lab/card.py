"""The model card that is saved with a model: what was pruned, how good and how fast it is, and how to load it.

For readers who do not know platon. Results are in the card's metadata too, where the hub reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from platon.lab.measure import Measure
from platon.lab.percent import percent
from platon.lab.tasks import TASKS

#: kind of task -> the class that loads a model for it
_AUTO = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "text-generation": "AutoModelForCausalLM",
}
#: kind of task -> Optimum's class for ONNX Runtime
_ORT = {kind: name.replace("AutoModel", "ORTModel") for kind, name in _AUTO.items()}
#: our names of metrics -> the hub's
_METRICS = {"matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}


def model_card(
    record: dict[str, Any], form: str = "model", name: str = "FOLDER", speed: dict[str, Any] | None = None
) -> str:
    """The card of a run's model.

    Args:
        record: the run's.
        form: which of the run's folders it is for: model, compact, sparse, fast or onnx.
        name: where the reader loads it from: a name on the hub.
        speed: what `platon speed` has measured, if it has.
    """
    body = [
        _title(record),
        "",
        _what(record, form),
        "",
        *_results(record),
        *_speed(speed),
        *_loading(record, form, name),
    ]
    return str(ModelCard(f"---\n{_metadata(record, form, name)}\n---\n\n" + "\n".join([*body, *_settings(record)])))


def _kind(record: dict[str, Any]) -> str | None:
    """The hub's name for the kind of task; None for a task that was added by the user and is not registered here."""
    return TASKS[record["task"]].kind if record["task"] in TASKS else None


def _start_of(record: dict[str, Any]) -> str | None:
    """The model that training started from; of a folder its name alone, because the card may be read by anybody."""
    return _public(record["settings"]["model"]["value"]) if "model" in record["settings"] else None


def _public(value: Any) -> Any:
    """A setting's value without the path to a file or folder of the user."""
    looks_like_path = isinstance(value, str) and (value.startswith((".", "/", "~")) or Path(value).exists())
    return Path(value).name if looks_like_path else value


def _is_pruned(record: dict[str, Any]) -> bool:
    return record.get("decided_by", "keep") is not None and record["method"] != "dense"


def _metadata(record: dict[str, Any], form: str, name: str) -> str:
    kind, task, base = _kind(record), record["task"], _start_of(record)
    results = [
        EvalResult(
            task_type=kind or "other",
            dataset_type=task,
            dataset_name=TASKS[task].title.partition(":")[0] if task in TASKS else task,
            dataset_split=split,
            metric_type=_METRICS.get(metric, metric),
            metric_name=metric,
            metric_value=round(value, 6),
        )
        for split, metrics in record["results"].items()
        for metric, value in metrics.items()
    ]
    on_hub = base is not None and base == record["settings"]["model"]["value"] and base.count("/") == 1
    return ModelCardData(
        library_name="transformers" if form == "model" else "platon" if form != "onnx" else "optimum",
        pipeline_tag=kind,
        tags=[*(("pruned", "sparse") if _is_pruned(record) else ()), *(() if form != "onnx" else ("onnx",)), "platon"],
        base_model=base if on_hub else None,
        model_name=name.rpartition("/")[2] if name != "FOLDER" else f"{task}-{record['method']}",
        eval_results=results,
    ).to_yaml()


def _title(record: dict[str, Any]) -> str:
    share = f", {percent(record['kept'])} of the prunable weights kept" if _is_pruned(record) else ""
    return f"# {_start_of(record) or 'A small model'} on {record['task']}{share}"


def _what(record: dict[str, Any], form: str) -> str:
    title, prunable = record.get("title", record["method"]), record["parameters"]["prunable"]
    said = f"Fine-tuned with [platon](https://pypi.org/project/platon/), method {title} (`{record['method']}`)."
    if _is_pruned(record):
        zeros = {
            "model": " The others are zeros in ordinary tensors.",
            "sparse": " The others are not stored.",
            "compact": " Heads, neurons and columns that were pruned as a whole are cut out of its matrices.",
        }
        said += f" Of {prunable:,} weights in its blocks, {percent(record['kept'], 2)} are kept.{zeros.get(form, '')}"
    return said + _taught(record["settings"])


def _taught(settings: dict[str, Any]) -> str:
    """A sentence about the teacher; records of earlier versions do not name one."""
    teacher = settings.get("teacher", {"value": "none"})["value"]
    if teacher == "none":
        return ""
    what = "its dense version" if teacher == "dense" else f"`{_public(teacher)}`"
    return f" It learned from the answers of {what} (weight {settings['distil_weight']['value']:g})."


def _results(record: dict[str, Any]) -> Iterator[str]:
    dense = record.get("dense")
    yield from (
        "| split | metric | value |" + (" dense |" if dense else ""),
        "|---|---|---|" + ("---|" if dense else ""),
    )
    for split, metrics in record["results"].items():
        for metric, value in metrics.items():
            before = dense["results"].get(split, {}).get(metric) if dense else None
            number = Measure(metric).number
            twin = f" {'' if before is None else number(before)} |" if dense else ""
            direction = " (lower is better)" if Measure(metric).lower_is_better else ""
            yield f"| {split} | {metric}{direction} | {number(value)} |{twin}"
    yield ""


def _speed(speed: dict[str, Any] | None) -> Iterator[str]:
    """A line for the dense model, and one for each engine that ran the pruned one; of each size of batch."""
    if speed is None:
        return
    yield from ("| engine | model | batch | ms | faster |", "|---|---|---|---|---|")
    first: dict[tuple[Any, Any], float] = {}  # of each size: the dense model in eager PyTorch
    for line in speed["timings"]:
        size = (line["rows"], line["length"])
        if "median_ms" not in line or (size in first and line["model"] == "dense"):
            continue
        taken, (rows, length) = line["median_ms"], size
        ratio = first.setdefault(size, taken) / taken
        shape = f"{rows}" if length is None else f"{rows} × {length}"
        yield f"| {line['engine']} | {line['model']} | {shape} | {taken:.1f} | {ratio:.2f} × |"
    count, processor = speed["machine"]["threads"], speed["machine"]["processor"]
    threads = f"{count} thread{'s' if count > 1 else ''}"
    yield from ("", f"Median latency with {threads} of {processor}, measured with `platon speed`.", "")


def _loading(record: dict[str, Any], form: str, name: str) -> Iterator[str]:
    kind = _kind(record) or ""
    if form == "model":
        auto = _AUTO.get(kind, "AutoModel")
        lines = [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("{name}")']
    elif form == "onnx":
        auto = _ORT.get(kind, "ORTModelForFeatureExtraction")
        lines = [f"from optimum.onnxruntime import {auto}", "", f'model = {auto}.from_pretrained("{name}")']
    elif name == "FOLDER":
        lines = ["import platon", "", f'model = platon.load("{name}")']
    else:
        lines = ["import platon", "from huggingface_hub import snapshot_download", ""]
        lines.append(f'model = platon.load(snapshot_download("{name}"))')
    yield from ("```python", *lines, "```", "")


def _settings(record: dict[str, Any]) -> Iterator[str]:
    yield from (
        "<details><summary>Settings and versions</summary>",
        "",
        "| setting | value | source |",
        "|---|---|---|",
    )
    for key, said in record["settings"].items():
        yield f"| {key} | {_public(said['value'])} | {said.get('source', '')} |"
    versions = ", ".join(f"{key} {value}" for key, value in record.get("versions", {}).items())
    yield from ("", versions, "", "</details>", "")
