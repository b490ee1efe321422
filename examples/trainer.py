"""Prune in `transformers.Trainer`, with the model's own dense self as its teacher.

    python examples/trainer.py MODEL DATA OUTPUT [--keep 0.1] [--epochs 4]

MODEL is a classifier that is fine-tuned on the task (a folder or a hub name), DATA a CSV with the columns `text` and
`label`, where labels are those of the model's configuration or their numbers. Needs `pip install 'platon[lab]'`.
"""

import argparse
from pathlib import Path

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import platon


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--epochs", type=float, default=4)
    given = parser.parse_args(words)

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSequenceClassification.from_pretrained(given.model)
    rows = load_dataset("csv", data_files=str(given.data))["train"].train_test_split(0.1, seed=0)

    def encode(row: dict) -> dict:
        label = row["label"] if isinstance(row["label"], int) else model.config.label2id[row["label"]]
        return {**tokenizer(row["text"], truncation=True), "labels": label}

    rows = rows.map(encode, remove_columns=rows["train"].column_names)
    distillation = platon.Distillation(model, "self", weight=0.5, hidden_weight=1)  # teaches
    callback = platon.PruningCallback(keep=given.keep)  # prunes
    trainer = Trainer(
        model,
        TrainingArguments(
            str(given.output / "checkpoints"), num_train_epochs=given.epochs, learning_rate=1e-4, report_to="none"
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
        callbacks=[callback],
    )
    trainer.train()
    distillation.detach()
    found = {"kept": callback.pruner.kept(), "accuracy": trainer.evaluate()["eval_accuracy"]}
    trainer.save_model(str(given.output / "model"))  # plain transformers loads it
    tokenizer.save_pretrained(given.output / "model")
    print(f"{found['kept']:.4f} of the prunable weights kept, accuracy {found['accuracy']:.3f}")
    return found


if __name__ == "__main__":
    main()
