"""The model card that goes with a pruned model."""

from __future__ import annotations

from typing import Any


def model_card(record: dict[str, Any]) -> str:
    """What was done, what came out, and how to load it, for people who do not have platon."""
    settings = record["settings"]
    name = settings["model"]["value"] or "a small model built from config"
    pruned = record["method"] != "dense"
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [{'pruned, sparse, ' if pruned else ''}platon]",
        "---",
        "",
        f"# {name} on {record['task']}" + (f", {record['kept']:.1%} of the prunable weights kept" if pruned else ""),
        "",
        f"Fine-tuned with [platon](https://pypi.org/project/platon/), method `{record['method']}`. "
        "The pruned weights are zeros in ordinary tensors: load it with plain transformers.",
        "",
        "| split | metric | value |" + (" dense |" if record["dense"] else ""),
        "|---|---|---|" + ("---|" if record["dense"] else ""),
    ]
    for split, metrics in record["results"].items():
        for metric, value in metrics.items():
            twin = f" {100 * record['dense']['results'][split][metric]:.2f} |" if record["dense"] else ""
            lines.append(f"| {split} | {metric} | {100 * value:.2f} |{twin}")
    lines += ["", "## Settings", "", "| setting | value | source |", "|---|---|---|"]
    lines += [f"| {key} | {said['value']} | {said['source']} |" for key, said in settings.items()]
    lines += ["", "## Versions", "", ", ".join(f"{key} {value}" for key, value in record["versions"].items()), ""]
    return "\n".join(lines)
