"""`platon prune` as torchrun starts it: one run, written by the first process; killed, resumed, refused."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

import forked
import platon.lab.run
import platon.lab.tasks.digits
import platon.report.run_figure  # noqa: F401  # before processes are forked, so that none imports them again
from platon.lab import checkpoint
from platon.lab.record import read_history, read_record

TINY = shlex.split(
    "--train-rows 128 --eval-rows 40 --batch 16 --steps 12 --eval-every 3 --log-every 2 --checkpoint-every 4 "
    "--every 2 --warmup 1 --cooldown 5 --dense none --keep-checkpoints --no-fast"
)


TORCHRUN = shlex.split("-m torch.distributed.run --nproc-per-node 2")
#: without a GPU, accelerate starts several processes of a machine under this flag alone
ACCELERATE = shlex.split(
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no"
)


def launched(folder: Path, *flags: str, launcher: Sequence[str] = TORCHRUN) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "platon", "prune", *TINY, "--output", str(folder), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


Job = TypeVar("Job", "subprocess.Popen[str]", forked.Forked)


def until_saved(job: Job, folder: Path) -> Job:
    """Wait for the first checkpoint, from which it goes on."""
    marker = folder / "checkpoints" / "checkpoint-4" / checkpoint.MARKER
    while not marker.exists() and job.poll() is None:
        time.sleep(0.005)
    return job


def command(folder: Path, *flags: str) -> list[str]:
    return ["python", "-m", "platon", "prune", *TINY, "--output", str(folder), *flags]


def run_ranks(folder: Path, log: Path, *flags: str) -> tuple[list[int | None], str]:
    """Two ranks that are told what torchrun tells them, but need not import anything: their exit codes and words."""
    words = command(folder, *flags)
    ranks = [forked.Forked(words, log, variables) for variables in forked.rank_variables(2)]
    return [rank.wait() for rank in ranks], log.read_text()


def finished(job: "subprocess.Popen[str]") -> str:
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said[-3000:]
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("job") / "whole"
    said = finished(launched(folder))
    assert said.count("step 12 of 12") == 1  # one of them speaks
    assert said.count("Next:") == 1
    return folder


def assert_same_bits(folder: Path, other: Path) -> None:
    mine, theirs = (load_file(place / "model" / "model.safetensors") for place in (folder, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_two_ranks_leave_one_run(whole: Path) -> None:
    record = read_record(whole)
    total = record["parameters"]["prunable"]
    assert record["kept"] == round(0.1 * total) / total
    assert [line["step"] for line in read_history(whole) if "loss" in line] == [2, 4, 6, 8, 10, 12]
    places = checkpoint.steps(whole / "checkpoints")
    assert list(places) == [8, 12]
    for place in places.values():
        assert checkpoint.problem(place) is None
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= json.loads((place / checkpoint.MARKER).read_text())[
            "files"
        ].keys()


def test_killed_rank_and_resumption(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = until_saved(forked.Forked(command(folder), tmp_path / "killed.log", ranks=2), folder)
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    assert job.wait() != 0
    assert not (folder / "record.json").exists()
    codes, said = run_ranks(folder, tmp_path / "resumed.log", "--resume")
    assert codes == [0, 0], said
    assert said.count("resuming at step") == 1
    assert_same_bits(folder, whole)
    assert read_record(folder)["results"] == read_record(whole)["results"]


def test_folder_of_another_run_is_refused_once(whole: Path, tmp_path: Path) -> None:
    before = (whole / "record.json").read_bytes()
    codes, said = run_ranks(whole, tmp_path / "log")
    assert codes == [2, 2], said
    assert said.count("holds a run already; continue it with --resume, or choose another --output") == 1
    assert (whole / "record.json").read_bytes() == before


@pytest.mark.slow
def test_accelerate_starts_the_same_run(whole: Path, tmp_path: Path) -> None:
    said = finished(launched(tmp_path / "run", launcher=ACCELERATE))
    assert said.count("Next:") == 1
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-12" / "rng_state_1.pth").exists()  # there were two
    assert_same_bits(tmp_path / "run", whole)


@pytest.mark.slow
def test_signal_stops_all_ranks_at_one_step_and_one_process_goes_on(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = until_saved(launched(folder), folder)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=240)
    assert said.count("a checkpoint is saved") == 1, said
    last, problems = checkpoint.last_complete(folder / "checkpoints")
    assert last is not None
    assert not problems
    finished(launched(folder, "--resume", launcher=[]))
    record = read_record(folder)
    assert record["kept"] == read_record(whole)["kept"]
