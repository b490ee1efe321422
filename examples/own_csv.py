"""Fine-tune and prune a model on a CSV of your own, and predict with what comes out.

    python examples/own_csv.py MODEL DATA OUTPUT [--keep 0.2] [--epochs 6]

DATA has a column with texts and one with labels; a tenth of its rows is held out. MODEL is a folder or a hub name. An
interrupted run goes on when the command is repeated. Needs `pip install 'platon[lab]'`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import platon
from platon.lab.printer import Printer
from platon.lab.run import prune
from platon.lab.settings import resolve


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--text", default="a film that I would watch again", help="a text to classify")
    given = parser.parse_args(words)

    # The same as: platon prune --task text --data DATA --model MODEL --dense first --teacher dense --keep 0.2 …
    flags = {"task": "text", "data": str(given.data), "model": given.model, "keep": given.keep, "epochs": given.epochs}
    flags |= {"dense": "first", "teacher": "dense"}  # fine-tune, then prune that model and learn from it
    record = prune(resolve(flags=flags), given.output, resume=given.output.exists(), printer=Printer(print))

    # model/ is for plain transformers; fast/, where a run wrote it, is the same model with layers that skip zeros.
    folder = given.output / "fast" if (given.output / "fast").exists() else given.output / "model"
    model, tokenizer = platon.load(folder), AutoTokenizer.from_pretrained(given.output / "model")
    with torch.no_grad():
        chances = model(**tokenizer(given.text, return_tensors="pt")).logits.softmax(-1)[0]
    print(given.text)
    for number, chance in enumerate(chances.tolist()):
        print(f"  {model.config.id2label[number]:20} {chance:.3f}")
    return {"kept": record["kept"], **record["results"]["validation"]}


if __name__ == "__main__":
    main()
