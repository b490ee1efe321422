"""The table of tasks: complete, quick to list, helpful about wrong names."""

import subprocess
import sys
from pathlib import Path

import pytest

from platon.lab.errors import UserError
from platon.lab.tasks import TASKS, Request, find

NAMES = "mnli rte qnli mrpc qqp sst2 cola stsb squad cifar100 imagenet digits text tokens lm images embed"


def test_all_tasks_of_the_paper_and_the_users_own() -> None:
    assert list(TASKS) == NAMES.split()
    assert all(task.name == name and task.title and task.metrics and task.splits for name, task in TASKS.items())


def test_listing_imports_nothing_heavy() -> None:
    code = "import sys, platon.lab.tasks; print({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no task is called 'sst-2'; nearest: 'sst2'"):
        find("sst-2")
    with pytest.raises(UserError, match=r"no task is called 'zzzzzz'; `platon list tasks`"):
        find("zzzzzz")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"train_rows": -5}, "train_rows must be at least 1, got -5"),
        ({"holdout": 10}, "holdout must be between 0 and 1, got 10; write 0.1 for 10 %"),
    ],
)
def test_impossible_requests(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Request(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mnli", "squad", "cifar100", "imagenet"])
def test_data_folder_that_does_not_exist(name: str, tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    with pytest.raises(UserError, match=r"data folder .*datasett does not exist; nearest: 'datasets'"):
        find(name).prepare(Request(data=tmp_path / "datasett"))


@pytest.mark.parametrize(("name", "repository"), [("rte", "nyu-mll/glue"), ("squad", "rajpurkar/squad")])
@pytest.mark.usefixtures("offline")
def test_no_network_says_what_to_do(
    name: str, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)  # whatever this machine has downloaded
    with pytest.raises(
        UserError, match=rf"hub cannot be reached .*{repository}; .*--data DIR, .*hf download {repository}"
    ):
        find(name).prepare(Request())
