"""The tasks that can be trained: data, model and metric, one file a family.

The table is plain data: listing the tasks imports neither torch nor transformers.
"""

from platon.lab.errors import UserError, nearest
from platon.lab.tasks.task import Prepared, Request, Task

__all__ = ["TASKS", "Prepared", "Request", "Task", "find"]

BERT = "google-bert/bert-base-uncased"
VIT = "google/vit-base-patch16-224-in21k"


def _glue(name: str, title: str, *metrics: str, splits: tuple[str, ...] = ("validation",)) -> Task:
    return Task(name, title, metrics, "text-classification", "glue", splits, BERT)


def _images(name: str, title: str, family: str, split: str = "validation", model: str | None = None) -> Task:
    return Task(name, title, ("accuracy",), "image-classification", family, (split,), model)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("mnli", "GLUE MNLI: does one sentence entail another?", "accuracy", splits=("matched", "mismatched")),
        _glue("rte", "GLUE RTE: does the first sentence entail the second?", "accuracy"),
        _glue("qnli", "GLUE QNLI: does the sentence answer the question?", "accuracy"),
        _glue("mrpc", "GLUE MRPC: do two sentences say the same?", "accuracy", "f1"),
        _glue("qqp", "GLUE QQP: do two questions ask the same?", "accuracy", "f1"),
        _glue("sst2", "GLUE SST-2: is the review positive?", "accuracy"),
        _glue("cola", "GLUE CoLA: is the sentence grammatical?", "matthews"),
        _glue("stsb", "GLUE STS-B: how similar are two sentences, 0 to 5?", "pearson", "spearman"),
        Task("squad", "SQuAD v1.1: find the answer", ("f1", "exact_match"), "question-answering", "squad", model=BERT),
        _images("cifar100", "CIFAR-100: images of 100 classes", "vision", "test"),
        _images("imagenet", "ImageNet-1k: images of 1,000 classes", "vision", model=VIT),
        _images("digits", "scikit-learn's 8×8 digits, embedded", "digits"),
        Task("text", "your own texts and labels", ("accuracy",), "text-classification", "own", model=BERT),
        _images("images", "your own images, a folder a class", "vision", model=VIT),
    )
}


def find(name: str) -> Task:
    """The task of this name; a UserError with the nearest names when there is none."""
    if name not in TASKS:
        raise UserError(f"no task is called {name!r}{nearest(name, TASKS)}; `platon list tasks` shows all")
    return TASKS[name]
