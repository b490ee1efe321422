"""Sweeps: what a file means, how runs go on, and what a killed sweep leaves."""

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forked import Forked
from platon import cli
from platon.lab import sweep
from platon.lab.duration import in_words
from platon.lab.errors import UserError
from platon.lab.recipes import RECIPES
from platon.lab.record import read_record
from platon.lab.run import prune
from platon.lab.sweep import workers as sweep_workers
from platon.lab.sweep.display import Display
from platon.lab.sweep.run import _expected, claimed
from platon.lab.sweep.run import run as run_sweep
from platon.lab.sweep.workers import Event

TINY = """
[settings]
task = "digits"
dense = "none"
train_rows = 64
eval_rows = 20
batch = 16
steps = 8
eval_every = 4
checkpoint_every = 2
every = 2
warmup = 1.0
cooldown = 3.0
"""
FILE = (
    TINY
    + """
[[product]]
method = "movement"
keep = 0.2
seed = [0, 1]

[[product]]
method = "dense"
keep = [0.2, 0.1]
seed = 0
"""
)


def write(place: Path, text: str = FILE) -> str:
    (place / "tiny.toml").write_text(text)
    return str(place / "tiny.toml")


def names(place: Path, text: str) -> list[str]:
    return [trial.name for trial in sweep.read(write(place, text), place / "runs")]


# --- what a file means ------------------------------------------------------------------------------------------------


def test_every_combination_is_a_run(tmp_path: Path) -> None:
    trials = sweep.read(write(tmp_path), tmp_path / "runs")
    assert [trial.name for trial in trials] == [
        "digits/movement-20-seed0",
        "digits/dense-seed0",  # once, whatever the share
        "digits/movement-20-seed1",  # seed by seed
    ]
    settings = trials[2].resolved.settings
    assert (settings.method, settings.keep, settings.seed, settings.steps) == ("movement", 0.2, 1, 8)
    assert trials[0].folder == tmp_path / "runs" / "digits" / "movement-20-seed0"


def test_any_setting_may_vary_and_is_in_the_name(tmp_path: Path) -> None:
    text = TINY + '[[product]]\nmethod = "magnitude"\nscope = ["global", "matrix"]\nkeep = 0.125\nbeta1 = 0.5\n'
    assert names(tmp_path, text) == [
        "digits/magnitude-12.5-scope=global-beta1=0.5-seed0",
        "digits/magnitude-12.5-scope=matrix-beta1=0.5-seed0",
    ]


def test_a_penalty_is_in_the_name(tmp_path: Path) -> None:
    assert names(tmp_path, TINY + '[[product]]\nmethod = "l0"\npenalty = [1.0, 30]\n') == [
        "digits/l0-penalty1-seed0",
        "digits/l0-penalty30-seed0",
    ]


def test_recipes_are_named_by_template(tmp_path: Path) -> None:
    text = '[[product]]\ntask = ["rte", "cola"]\nkeep = 0.15\nrecipe = "paper/bert-base/{task}-{ratio}"\n'
    trials = sweep.read(write(tmp_path, text), tmp_path)
    assert [trial.recipe for trial in trials] == ["paper/bert-base/rte-15", "paper/bert-base/cola-15"]
    assert trials[0].resolved.settings.beta2 == RECIPES["paper/bert-base/rte-15"].values["beta2"]


def test_models_and_data_are_named_by_template(tmp_path: Path) -> None:
    shared = '[settings]\nmodel = "starts/{task}-{seed}"\ndata = "glue/{task}"\n'
    text = shared + '[[product]]\ntask = ["rte", "cola"]\nseed = 3\n'
    settings = [trial.resolved.settings for trial in sweep.read(write(tmp_path, text), tmp_path / "runs")]
    assert [(own.model, own.data) for own in settings] == [("starts/rte-3", "glue/rte"), ("starts/cola-3", "glue/cola")]


#: the paper's tables: runs of each
PAPER = {
    "glue": 8 * 5 * 3 * 5 + 8 * 5,
    "squad": (1 + 2 + 2) * 6 * 5 + 5,
    "deberta": 3 * 5 * 4 * 5 + 3 * 5,
    "vit": 2 * 5 * 3 * 5 + 2 * 5,
    "variants": 3 * 4 * 5,
    "betas": 2 * 6 * 5 - 5,
    "structured": 2 * 2 * 5,
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_tables_come_with_the_package(name: str) -> None:
    assert set(sweep.packaged()) == set(PAPER)
    trials = sweep.read(name, Path("runs"))
    assert len(trials) == PAPER[name]
    assert sweep.title(sweep.packaged()[name])
    for trial in trials:
        assert trial.recipe in RECIPES
        assert trial.resolved.settings.task in trial.name


def test_soft_movement_in_the_papers_tables_is_steered_to_its_column() -> None:
    trial = next(trial for trial in sweep.read("squad", Path()) if trial.name == "squad/l0-15-seed0")
    settings = trial.resolved.settings
    assert (settings.keep, settings.penalty, settings.score_learning_rate) == (0.15, None, 0.1)


def test_the_command_says_what_the_settings_say(tmp_path: Path) -> None:
    text = TINY + '[[product]]\nmethod = "platon"\naugment = [true, false]\ngroup_by_length = [true, false]\n'
    from platon.lab.settings import resolve

    for trial in sweep.read(write(tmp_path, text), tmp_path / "runs"):
        words = trial.command()
        assert words[:6] == [sys.executable, "-m", "platon", "prune", "--output", str(trial.folder)]
        rest = words[6:]
        flags: dict[str, Any] = {}
        while rest:
            name = rest.pop(0).removeprefix("--").replace("-", "_")
            if name.removeprefix("no_") in ("augment", "fast", "group_by_length"):
                flags[name.removeprefix("no_")] = not name.startswith("no_")
            else:
                flags[name] = rest.pop(0)
        from platon.lab.settings import type_of

        for name, value in flags.items():
            if isinstance(value, str):
                flags[name] = type_of(name)(value)
        assert resolve(None, None, flags).settings == trial.resolved.settings


def test_no_over_a_recipes_yes_reaches_the_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the child itself reads its command line."""
    recipe = next(name for name, one in RECIPES.items() if one.values.get("freeze_embeddings") is True)
    text = f'[[product]]\nrecipe = "{recipe}"\nfreeze_embeddings = [false, true]\naugment = [false, true]\n'
    given: list[Any] = []

    class Given(Exception):  # noqa: N818
        pass

    def take(resolved: Any, *others: Any, **more: Any) -> None:
        given.append(resolved.settings)
        raise Given

    monkeypatch.setattr("platon.lab.run.prune", take)
    monkeypatch.setattr("platon.cli.training.check_name", lambda name: None)  # there is no hub here
    trials = sweep.read(write(tmp_path, text), tmp_path / "runs")
    for trial in trials:
        with pytest.raises(Given):
            cli.app(trial.command()[3:], standalone_mode=False)
    assert given == [trial.resolved.settings for trial in trials]
    assert [settings.freeze_embeddings for settings in given] == [False, False, True, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"is no sweep: it needs \[\[product\]\] tables"),
        ("[[product]]\nkep = 0.1\n", "has a setting 'kep' that is not known; nearest: 'keep'"),
        ("[settings]\nmehtod = 1\n[[product]]\nkeep = 0.1\n", "has a setting 'mehtod' that is not known"),
        ("[[product]]\nkeep = 'much'\n", "run 'digits/platon-much-seed0': keep must be of type float, got 'much'"),
        ("[[product]]\ntask = ['digits', 'sst3']\n", "run 'sst3/platon-seed0': no task"),
        ("[[product]]\nkeep = 0.1\nrecipe = '{modle}'\n", "may name {task}, {method}, {seed} and {ratio}"),
        ("[[product]\n", "cannot read sweep file"),
        ("[product]\nkeep = 0.1\n", "is no sweep"),
        (
            "[[product]]\nkeep = 0.1\n[[product]]\nkeep = 0.1\nrecipe = 'paper/bert-base/rte-10'\n",
            "two different runs the name",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        sweep.read(write(tmp_path, text), tmp_path / "runs")
    assert "\n" not in str(caught.value) or "cannot read" in words


def test_no_such_sweep_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no sweep file 'gleu'.*nearest: 'glue'"):
        sweep.read("gleu", tmp_path)


# --- running ----------------------------------------------------------------------------------------------------------


def quiet() -> Console:
    return Console(file=io.StringIO(), record=True, width=200)


def go(source: str, folder: Path, workers: int = 2, engine: str = "local") -> int:
    return run_sweep(source, folder, workers, engine, dry=False, estimate=False, console=quiet())


def results(folder: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.glob("*/*/record.json")):  # no deeper: files come and go while a sweep runs
        record = read_record(path.parent)
        found[str(path.parent.relative_to(folder))] = {k: v for k, v in record.items() if k not in ("seconds",)}
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the sweep, one after the other in this process: it takes longer to start one than to run it."""
    place = tmp_path_factory.mktemp("sweep")
    for trial in sweep.read(write(place), place / "runs"):
        prune(trial.resolved, trial.folder)
    return place / "runs"


def test_finished_runs_are_skipped(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_workers, "start", None)  # nothing is started
    assert go(write(tmp_path), straight) == 0


def kill_after(wanted: int, process: "subprocess.Popen[bytes] | Forked", folder: Path) -> None:
    """Kill the sweep when so many of its runs have a record."""
    until = time.monotonic() + 120
    while len(results(folder)) < wanted and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert wanted <= len(results(folder)) < 3, "it must not be through before it is killed"


def test_killed_twice_it_ends_with_the_same_records(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path)
    command = [sys.executable, "-m", "platon", "sweep", source, "--output", str(tmp_path / "runs"), "--no-estimate"]
    command += ["--jobs", "1"]
    as_users_do = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kill_after(1, as_users_do, tmp_path / "runs")
    monkeypatch.setattr(sweep_workers, "start", Forked)  # it takes longer to start an interpreter than to run
    kill_after(2, Forked(command, tmp_path / "log"), tmp_path / "runs")
    assert go(source, tmp_path / "runs") == 0
    mine, theirs = results(tmp_path / "runs"), results(straight)
    assert mine.keys() == theirs.keys()
    for name, record in mine.items():
        assert record == theirs[name], name
    assert {path.stem for path in (tmp_path / "runs" / "logs").iterdir()} == {name.replace("/", "-") for name in mine}


def test_a_run_that_dies_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_workers, "start", Forked)
    text = TINY + f'[[product]]\nmethod = "platon"\nkeep = 0.2\nmodel = ["{tmp_path / "nowhere"}"]\n'
    text += '[[product]]\nmethod = "magnitude"\nkeep = 0.2\n'
    trials = sweep.read(write(tmp_path, text), tmp_path / "runs")
    events = [event for event in sweep_workers.run_locally(trials, tmp_path / "runs", 2) if event is not None]
    assert [event.what for event in events[:2]] == ["started", "started"]
    ends = {event.trial.resolved.settings.method: event for event in events[2:]}
    assert {method: event.what for method, event in ends.items()} == {"platon": "failed", "magnitude": "finished"}
    assert "nowhere" in ends["platon"].why


def test_other_settings_in_a_runs_place_are_refused(straight: Path, tmp_path: Path) -> None:
    source = write(tmp_path, FILE.replace("steps = 8", "steps = 9"))
    with pytest.raises(UserError, match="holds a run with steps 8, the sweep says 9; choose another --output"):
        go(source, straight)


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    with claimed(tmp_path / "runs"), pytest.raises(UserError, match="another sweep works on"):
        go(write(tmp_path), tmp_path / "runs")


def test_a_dry_run_tells_the_time_and_makes_nothing(tmp_path: Path) -> None:
    console = quiet()
    folder = tmp_path / "runs"
    assert run_sweep(write(tmp_path), folder, 1, "local", dry=True, estimate=True, console=console) == 0
    text = console.export_text()
    assert "3 runs" in text
    assert "digits: 3 runs × 8 steps × " in text
    assert "about " in text
    assert not folder.exists()


@pytest.mark.slow
def test_the_same_runs_on_ray(straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert go(write(tmp_path), tmp_path / "runs", engine="ray") == 0
    mine, theirs = results(tmp_path / "runs"), results(straight)
    assert json.dumps(mine, sort_keys=True) == json.dumps(theirs, sort_keys=True)


# --- the display ------------------------------------------------------------------------------------------------------


def test_the_display_counts(straight: Path, tmp_path: Path) -> None:
    trials = sweep.read(write(tmp_path), tmp_path / "runs")
    display = Display(trials, 2, dict.fromkeys(trials, 100.0))
    assert display.left == 150
    display.update(Event(trials[0], "started"))
    display.update(Event(trials[1], "started"))
    display.update(Event(trials[1], "failed", "no space left"))
    shutil.copytree(straight / trials[0].name, trials[0].folder)
    display.update(Event(trials[0], "finished"))
    factor = read_record(trials[0].folder)["seconds"] / 100  # the first run corrects what was expected of the others
    assert display.left == pytest.approx(50 * factor)
    display.taken[trials[0]] = 150.0
    assert display.left == pytest.approx(75)
    console = quiet()
    console.print(display)
    text = console.export_text()
    assert "1 of 3 done, 0 running, 1 failed, about 1 min 15 s left" in text
    assert "no space left" in text


def test_times_in_words() -> None:
    assert [in_words(s) for s in (3.4, 75, 3700)] == ["3 s", "1 min 15 s", "1 h 1 min"]


# --- what the command says at its end ---------------------------------------------------------------------------------


def test_an_interrupted_sweep_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("platon.lab.sweep.run.run", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.app(["sweep", "mine.toml", "--output", str(tmp_path)])
    assert left.value.code == 130
    said = " ".join(capsys.readouterr().err.split())
    assert f"have a checkpoint. Go on with: platon sweep mine.toml --output {tmp_path}" in said


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (2, 1)])
def test_a_finished_sweep_says_what_comes_next(
    failed: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platon.lab.sweep.run.run", lambda *args: failed)
    with pytest.raises(SystemExit) as left:
        cli.app(["sweep", "mine.toml", "--output", str(tmp_path)])
    assert left.value.code == code
    found = capsys.readouterr()
    assert ("platon report " in found.out) is (not failed)
    assert ("Run them again with: platon sweep mine.toml" in " ".join(found.err.split())) is bool(failed)


def test_runs_of_no_steps_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platon.lab.timing.measure_step", lambda resolved: pytest.fail("a training was started"))
    text = TINY.replace("steps = 8", "steps = 0") + '[[product]]\nmethod = "magnitude"\nkeep = [0.2, 0.1]\n'
    trials = sweep.read(write(tmp_path, text), tmp_path / "runs")
    said = io.StringIO()
    prune(trials[0].resolved, trials[0].folder)
    found = _expected(trials, trials[1:], 1, Console(file=said))
    assert list(found.values()) == [0.0]
    assert "1 runs × 0 steps" in said.getvalue()
