"""The tasks that can be trained: data, model and metric.

The table holds names only: listing the tasks imports neither torch nor transformers. docs/add-a-task.md adds one.
"""

from typing import Any

from platon.lab.errors import UserError, nearest
from platon.lab.tasks.task import Prepared, Request, Rows, Task

__all__ = ["TASKS", "Prepared", "Request", "Rows", "Task", "find", "register"]

BERT = "google-bert/bert-base-uncased"
VIT = "google/vit-base-patch16-224-in21k"
TASKS: dict[str, Task] = {}


def register(task: Task) -> Task:
    """Add a task to those that `platon prune --task` and `platon list tasks` know."""
    if task.name in TASKS:
        raise ValueError(f"there is a task {task.name!r} already; choose another name")
    TASKS[task.name] = task
    return task


def find(name: str) -> Task:
    """The task of this name; a UserError with the nearest names when there is none."""
    if name not in TASKS:
        raise UserError(f"no task is called {name!r}{nearest(name, TASKS)}; `platon list tasks` shows all")
    return TASKS[name]


def _glue(name: str, title: str, *metrics: str, splits: tuple[str, ...] = ("validation",)) -> Task:
    return Task(
        name, title, metrics, "text-classification", "platon.lab.tasks.glue:prepare", splits, BERT, predicts=True
    )


def _images(name: str, title: str, preparation: str, split: str = "validation", model: str | None = None) -> Task:
    kind, defaults = "image-classification", _DEFAULTS.get(name, {})
    return Task(
        name,
        title,
        ("accuracy",),
        kind,
        preparation,
        (split,),
        model,
        defaults,
        own_test=name == "images",
        predicts=name != "digits",
    )


_VISION = "platon.lab.tasks.vision:prepare"
_DEFAULTS: dict[str, dict[str, Any]] = {
    # The model of digits starts from random weights, so it is trained dense before it is pruned.
    "digits": {"dense": "first", "epochs": 30.0, "batch": 32, "learning_rate": 5e-4, "weight_decay": 0.1},
    "cifar100": {"epochs": 10.0, "batch": 128, "learning_rate": 5e-4, "weight_decay": 0.01},
}

for _task in (
    _glue("mnli", "GLUE MNLI: does one sentence entail another?", "accuracy", splits=("matched", "mismatched")),
    _glue("rte", "GLUE RTE: does the first sentence entail the second?", "accuracy"),
    _glue("qnli", "GLUE QNLI: does the sentence answer the question?", "accuracy"),
    _glue("mrpc", "GLUE MRPC: do two sentences say the same?", "accuracy", "f1"),
    _glue("qqp", "GLUE QQP: do two questions ask the same?", "accuracy", "f1"),
    _glue("sst2", "GLUE SST-2: is the review positive?", "accuracy"),
    _glue("cola", "GLUE CoLA: is the sentence grammatical?", "matthews"),
    _glue("stsb", "GLUE STS-B: how similar are two sentences, 0 to 5?", "pearson", "spearman"),
    Task(
        "squad",
        "SQuAD v1.1: find the answer",
        ("f1", "exact_match"),
        "question-answering",
        "platon.lab.tasks.squad:prepare",
        model=BERT,
    ),
    _images("cifar100", "CIFAR-100: images of 100 classes", _VISION, "test"),
    _images("imagenet", "ImageNet-1k: images of 1,000 classes", _VISION, model=VIT),
    _images("digits", "scikit-learn's 8×8 digits, embedded", "platon.lab.tasks.digits:prepare"),
    Task(
        "text",
        "your own texts with classes, several labels each, or numbers",
        ("accuracy",),
        "text-classification",
        "platon.lab.tasks.text:prepare",
        model=BERT,
        own_test=True,
        predicts=True,
    ),
    Task(
        "tokens",
        "your own words with tags: named entities, parts of speech",
        ("f1", "precision", "recall", "accuracy"),
        "token-classification",
        "platon.lab.tasks.tokens:prepare",
        model=BERT,
        own_test=True,
        predicts=True,
    ),
    Task(
        "lm",
        "your own text: a causal language model predicts the next token",
        ("perplexity",),
        "text-generation",
        "platon.lab.tasks.lm:prepare",
        defaults={"epochs": 1.0, "batch": 8, "eval_batch": 4},
        own_test=True,
    ),
    _images("images", "your own images, one folder for each class", _VISION, model=VIT),
    Task(
        "embed",
        "your own texts, no labels: embed them as the dense model does",
        ("cosine", "rank_correlation", "neighbours"),
        "sentence-similarity",
        "platon.lab.tasks.embed:prepare",
        defaults={
            "teacher": "dense",
            "distil_weight": 1.0,
            "hidden_weight": 1.0,
            "epochs": 1.0,
            "learning_rate": 1e-4,
            "eval_rows": 2000,
        },
        labelled=False,
        predicts=True,
    ),
):
    register(_task)
