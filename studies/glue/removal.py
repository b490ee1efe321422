"""What do movement's scores say of a trained model? Remove a little by their order, train no more, and measure.

    python studies/glue/removal.py starts/minilm-sst2 data/glue/sst2

Scores are learned over 40 batches of 16 while the weights stay as they are; then a share of each matrix goes.
"""

import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

import platon

BATCHES, ROWS, SHARES = 40, 16, (0.01, 0.05, 0.1, 0.2)
STILL = 1e-30  # a learning rate that moves no weight


def main(start: str, data: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(start).eval()
    tokenizer = AutoTokenizer.from_pretrained(start)
    files = {split: str(next(Path(data).glob(f"{split}*"))) for split in ("train", "validation")}
    rows = load_dataset("parquet", data_files=files)

    def batch(some: dict[str, list]) -> BatchEncoding:
        inputs = tokenizer(some["sentence"], padding=True, truncation=True, max_length=64, return_tensors="pt")
        return BatchEncoding({**inputs, "labels": torch.tensor(some["label"])})

    lengths = [len(sentence) for sentence in rows["validation"]["sentence"]]
    by_length = rows["validation"].select(sorted(range(len(lengths)), key=lengths.__getitem__))
    held = [batch(some) for some in by_length.iter(109)]

    @torch.no_grad()
    def accuracy() -> float:
        right = [(model(**inputs).logits.argmax(-1) == inputs["labels"]).float() for inputs in held]
        return 100 * float(torch.cat(right).mean())

    matrices = platon.weights(model).matrices
    optimizer = torch.optim.SGD(model.parameters(), lr=STILL)
    pruner = platon.Pruner(model, optimizer, score=platon.Movement(), schedule=platon.Constant(1.0))
    for inputs in map(batch, rows["train"].shuffle(seed=0).select(range(BATCHES * ROWS)).iter(ROWS)):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = pruner.state_dict()["tensors"]
    pruner.detach()

    weights = {name: matrix.detach().clone() for name, matrix in matrices.items()}
    scores = {name: tensors[f"{name}:score"].view_as(weight) for name, weight in weights.items()}
    orders = {
        "lowest movement scores": scores,
        "highest movement scores": {name: -score for name, score in scores.items()},
        "at random": {name: torch.rand_like(weight) for name, weight in weights.items()},
        "smallest weights": {name: weight.abs() for name, weight in weights.items()},
    }
    print(f"nothing removed: {accuracy():.1f}\n")
    print("| removed | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    print("|---|" + "---:|" * len(SHARES))
    for order, keys in orders.items():
        ranks = {name: key.flatten().argsort() for name, key in keys.items()}
        cells = []
        for share in SHARES:
            with torch.no_grad():
                for name, matrix in matrices.items():
                    matrix.copy_(weights[name])
                    matrix.view(-1)[ranks[name][: round(share * matrix.numel())]] = 0
            cells.append(f"{accuracy():.1f}")
        print(f"| {order} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
