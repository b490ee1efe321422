"""The model card that is saved with a model."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard, ModelCardData


def _taught(settings: dict[str, Any]) -> str:
    """A sentence about the teacher; records of earlier versions do not name one."""
    teacher = settings.get("teacher", {"value": "none"})["value"]
    if teacher == "none":
        return ""
    what = "its dense version" if teacher == "dense" else f"`{teacher}`"
    return f" It learned from the answers of {what} (weight {settings['distil_weight']['value']:g})."


def model_card(record: dict[str, Any]) -> str:
    """What was done, the results, and how to load the model, for readers who do not know platon."""
    settings, dense = record["settings"], record["dense"]
    name = settings["model"]["value"] or "a small model built from config"
    pruned = record["decided_by"] is not None
    data = ModelCardData(library_name="transformers", tags=[*(("pruned", "sparse") if pruned else ()), "platon"])
    lines = [
        f"# {name} on {record['task']}" + (f", {record['kept']:.1%} of the prunable weights kept" if pruned else ""),
        "",
        f"Fine-tuned with [platon](https://pypi.org/project/platon/), method {record['title']} (`{record['method']}`). "
        "The pruned weights are zeros in ordinary tensors: load it with plain transformers." + _taught(settings),
        "",
        "| split | metric | value |" + (" dense |" if dense else ""),
        "|---|---|---|" + ("---|" if dense else ""),
    ]
    for split, metrics in record["results"].items():
        for metric, value in metrics.items():
            twin = f" {100 * dense['results'][split][metric]:.2f} |" if dense else ""
            lines.append(f"| {split} | {metric} | {100 * value:.2f} |{twin}")
    lines += ["", "## Settings", "", "| setting | value | source |", "|---|---|---|"]
    lines += [f"| {key} | {said['value']} | {said['source']} |" for key, said in settings.items()]
    lines += ["", "## Versions", "", ", ".join(f"{key} {value}" for key, value in record["versions"].items()), ""]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)))
