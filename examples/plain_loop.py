"""Prune in a plain PyTorch loop, with checkpoints: stop it whenever you like, and run it again to go on.

    python examples/plain_loop.py FOLDER [--keep 0.1] [--steps 300]

The model is a small transformer that learns whether most words of a row have odd numbers; put yours in its place. Needs
torch and safetensors.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import platon


class Classifier(nn.Module):
    def __init__(self, words: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def batch(step: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step, the same whenever it is computed: a loop that goes on sees what it would have seen."""
    tokens = torch.randint(64, (rows, 15), generator=torch.Generator().manual_seed(step))
    return tokens, ((tokens % 2).sum(1) > 7).long()


def main(words: list[str] | None = None) -> platon.Pruner:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-at", type=int, help="stop at this step, as an interruption would")
    given = parser.parse_args(words)

    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = platon.Cubic(final=given.keep, total=given.steps)
    pruner = platon.Pruner(model, optimizer, schedule=schedule)  # the only line that is about pruning
    if (given.folder / "training.pt").exists():
        load(given.folder, model, optimizer, pruner)
        print(f"going on at step {pruner.step_count}")

    while pruner.step_count < min(given.stop_at or given.steps, given.steps):
        tokens, labels = batch(pruner.step_count)
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()  # trains, then prunes
        optimizer.zero_grad()
        if pruner.step_count % 50 == 0:
            print(f"step {pruner.step_count:4}  loss {loss:.3f}  kept {pruner.kept():.3f}")
            save(given.folder, model, optimizer, pruner)
    save(given.folder, model, optimizer, pruner)

    tokens, labels = batch(-1, rows=2000)
    with torch.no_grad():
        accuracy = (model.eval()(tokens).argmax(1) == labels).float().mean().item()
    print(f"{pruner.kept():.4f} of {pruner.units.count} weights kept, accuracy {accuracy:.3f}")
    return pruner


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: platon.Pruner) -> None:
    """The pruner's state is numbers and words, which JSON holds, and tensors, which safetensors holds."""
    folder.mkdir(parents=True, exist_ok=True)
    state = pruner.state_dict()
    save_file(state.pop("tensors"), folder / "pruner.safetensors")
    (folder / "pruner.json").write_text(json.dumps(state))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "training.pt")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: platon.Pruner) -> None:
    training = torch.load(folder / "training.pt")
    model.load_state_dict(training["model"])
    optimizer.load_state_dict(training["optimizer"])
    state = json.loads((folder / "pruner.json").read_text())
    pruner.load_state_dict({**state, "tensors": load_file(folder / "pruner.safetensors")})


if __name__ == "__main__":
    main()
