"""How the tests are run: offline, on one thread, and in which order. tiny_models.py has the models that they share."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports a hub client: nothing here may reach for the network. Two workers share two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imports make a million objects that stay. The garbage collector does not run while they are made and skips them later:
# accelerate collects garbage after each training, which would take as long as the small trainings here.
gc.disable()

# Properties are tried on a few examples by `make test`, the same each time, and on many others by `make check`.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("few", max_examples=50, derandomize=True, **PATIENT)
settings.register_profile("many", max_examples=1000, **PATIENT)
settings.load_profile("few")

#: files that take a minute: a worker that began one of them last would leave the other without work
LONG = (
    "test_docs.py",
    "test_faults.py",
    "test_masks.py",
    "test_job.py",
    "test_methods.py",
    "test_cli.py",
    "test_sweep.py",
)


def pytest_configure(config: pytest.Config) -> None:
    hands_out_tests = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out_tests:  # that process runs none, and would make the workers wait until it has imported torch
        config.pluginmanager.import_plugin("tiny_models")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
