"""What the user is told when a model, tokenizer or image processor cannot be loaded."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from platon.lab.errors import UserError, first_line, nearest

PAPER_MODELS = (
    "google-bert/bert-base-uncased",
    "microsoft/deberta-v3-base",
    "google/vit-base-patch16-224-in21k",
    "google/vit-base-patch16-224",
    "google/vit-base-patch16-384",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def refuse_pickles(name: str) -> None:
    """Raise for a local folder whose weights are pickles only: loading a pickle can run code."""
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise UserError(
                f"the model in the folder {name!r} has its weights in a pickle only ({pickles[0]}), which platon "
                "does not open; if you trust it, load it with transformers and save_pretrained, which makes safetensors"
            )


def sentence(name: str, what: str, error: Exception) -> str:
    """Why the part `what` of the model `name` cannot be loaded, and what to do."""
    causes = _causes(error)
    if any("trust_remote_code" in str(cause) for cause in causes):
        return f"the model {name!r} runs its own code; allow that with --trust-remote-code if you trust it"
    if what == "tokenizer" and any("sentencepiece" in str(c) or "tiktoken" in str(c) for c in causes):
        return f"the tokenizer of {name!r} cannot be read; it may need: pip install sentencepiece protobuf"
    if Path(name).is_file():
        return f"cannot load the {what} of {name!r}: {first_line(error)}"
    if Path(name).is_dir():
        missing = what == "config" and not (Path(name) / "config.json").is_file()
        reason = "there is no config.json" if missing else first_line(error)
        return f"cannot load the {what} of the model in the folder {name!r}: {reason}"
    close = nearest(name, PAPER_MODELS) or nearest(name, (m.split("/")[1] for m in PAPER_MODELS))
    if _any(causes, GatedRepoError):
        return f"the model {name!r} is gated; accept its terms on the hub and run `hf auth login`"
    if _any(causes, RepositoryNotFoundError, HFValidationError):
        return f"{name!r} is neither a local folder nor a model on the hub{close}"
    if _any(causes, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        return (
            f"{name!r} is no local folder, and the hub cannot be reached; give a folder with --model DIR, "
            f"or fetch it where there is a network: `hf download {name} --local-dir DIR`{close}"
        )
    return f"cannot load the {what} of {name!r} from the hub: {first_line(error)}{close}"


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _any(causes: list[BaseException], *kinds: type[BaseException]) -> bool:
    return any(isinstance(cause, kinds) for cause in causes)
