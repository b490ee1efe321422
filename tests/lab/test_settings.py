"""Settings: who said what, who wins, and how steps follow the length of a training."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from platon.engine.methods import METHODS
from platon.engine.schedule import Cubic
from platon.lab import recipes
from platon.lab.errors import UserError
from platon.lab.settings import FIELDS, ResolvedSettings, Settings, resolve, type_of
from platon.lab.step_count import StepCounts, count_steps

RTE = "paper/bert-base/rte-10"  # 2,490 rows, batch 16, 20 epochs: 3,120 steps; t_i 200, t_f 1,200, warm-up 10 %
CIFAR = "paper/vit-base/cifar100-10"  # 20,000 steps; t_i 2,000, t_f 8,000, warm-up of 1,000 steps


def config(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def said(resolved: ResolvedSettings, *names: str) -> list[tuple[Any, str]]:
    return [(getattr(resolved.settings, name), resolved.sources[name]) for name in names]


# --- who wins ---------------------------------------------------------------------------------------------------------


def test_without_a_word_all_is_ours() -> None:
    resolved = resolve()
    assert set(resolved.sources) == set(FIELDS)
    assert set(resolved.sources.values()) == {"ours"}
    assert said(resolved, "task", "dense", "keep") == [("digits", "ours"), ("first", "ours"), (0.1, "ours")]
    assert resolved.recipe is None


def test_each_overrides_what_stands_before_it(tmp_path: Path) -> None:
    file = config(tmp_path, 'batch = 8\nlearning_rate = 1\nmodel = "mine"\n')
    resolved = resolve(RTE, file, {"batch": 4, "seed": 7, "epochs": None})
    assert said(resolved, "task", "beta2", "decay", "reference_steps") == [
        ("rte", "paper"),
        (0.95, "paper"),
        ("linear", "code"),
        (3120, "ours"),
    ]
    assert said(resolved, "epochs", "seed", "eval_batch") == [(20.0, "paper"), (7, "user"), (64, "ours")]
    assert said(resolved, "batch", "learning_rate", "model") == [(4, "user"), (1.0, "user"), ("mine", "user")]
    assert isinstance(resolved.settings.learning_rate, float)  # a whole number is a fine float
    assert resolved.recipe == RTE


def test_config_file_may_name_the_recipe_and_a_flag_beats_it(tmp_path: Path) -> None:
    file = config(tmp_path, f'recipe = "{RTE}"\nkeep = 0.5\n')
    assert resolve(config=file).recipe == RTE
    assert said(resolve(config=file), "keep", "task") == [(0.5, "user"), ("rte", "paper")]
    other = resolve(CIFAR, file)
    assert (other.recipe, other.settings.task, other.settings.keep) == (CIFAR, "cifar100", 0.5)


def test_config_file_takes_every_setting_under_its_own_name(tmp_path: Path) -> None:
    words = {"task": "sst2", "dense": "beside", "optimizer": "sgd", "decay": "cosine", "precision": "bf16"}
    words |= {
        "timing": "before",
        "scope": "matrix",
        "report_to": "tensorboard",
        "units": "weights",
        "labels": "several",
    }
    values: dict[str, Any] = {}
    for name in FIELDS:
        if name == "penalty":  # it is said instead of keep
            continue
        values[name] = words.get(name, {str: "word", int: 3, float: 0.25, bool: True}[type_of(name)])
    text = "\n".join(f"{n} = {str(v).lower() if v is True else repr(v)}" for n, v in values.items())
    resolved = resolve(config=config(tmp_path, text))
    assert dataclasses.asdict(resolved.settings) == values | {"penalty": None}
    assert {name for name, source in resolved.sources.items() if source != "user"} == {"penalty"}


def test_a_share_or_a_penalty() -> None:
    recipe = "sanh/bert-base/squad-l0"
    assert said(resolve(recipe), "penalty", "keep") == [(125.0, "code"), (0.1, "ours")]
    steered = resolve(recipe, flags={"keep": 0.3})
    assert said(steered, "penalty", "keep") == [(None, "ours"), (0.3, "user")]
    assert said(resolve(recipe, flags={"penalty": 3.0}), "penalty") == [(3.0, "user")]
    with pytest.raises(UserError, match="keep and penalty are both given"):
        resolve(recipe, flags={"keep": 0.3, "penalty": 3.0})


def test_the_users_word_on_length_beats_the_recipes() -> None:
    by_steps, by_epochs = resolve(CIFAR), resolve(CIFAR, flags={"epochs": 2.0})
    assert said(by_steps, "steps") == [(20_000, "paper")]
    assert said(by_epochs, "steps", "epochs") == [(None, "ours"), (2.0, "user")]
    assert count_steps(by_epochs, 51_200).total == 200
    assert count_steps(resolve(CIFAR, flags={"epochs": 2.0, "steps": 7}), 51_200).total == 7
    assert count_steps(resolve(RTE, flags={"steps": 10}), 2_490).total == 10


def test_record_holds_value_and_source_of_each_setting() -> None:
    plain = resolve(RTE, flags={"seed": 3}).with_user(batch=2).plain()
    assert list(plain) == list(FIELDS)
    assert plain["seed"] == {"value": 3, "source": "user"}
    assert plain["batch"] == {"value": 2, "source": "user"}
    assert plain["warmup"] == {"value": 200.0, "source": "paper"}


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_each_recipe_becomes_settings(recipe: str) -> None:
    fields = recipes.RECIPES[recipe].fields
    resolved = resolve(recipe)
    for name, field in fields.items():
        if field.value is not None:
            assert said(resolved, name) == [(field.value, field.source)]
    total = resolved.settings.reference_steps
    assert total is not None
    rows = recipes.ROWS.get(resolved.settings.task, 0)
    assert count_steps(resolved, rows).total == total  # a full training has exactly the steps that the counts refer to


# --- what is wrong, in one sentence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lerning_rate = 1", "has a setting 'lerning_rate' that is not known; nearest: 'learning_rate'"),
        ("zzzz = 1", "has a setting 'zzzz' that is not known$"),
        ("keep = 'a lot'", "keep must be of type float, got 'a lot'"),
        ("keep = true", "keep must be of type float, got True"),
        ("batch = 1.5", "batch must be of type int, got 1.5"),
        ("seed = '1'", "seed must be of type int, got '1'"),
        ("augment = 1", "augment must be of type bool, got 1"),
        ("task = 3", "no task is called '3'"),
        ("model = 3", "model must be of type str, got 3"),
        ("model = ['a']", r"model must be of type str, got \['a'\]"),
        ("recipe = 3", "recipe must be of type str, got 3"),
        ("learning_rate = nan", "learning_rate must be a finite number, got nan"),
        ("epochs = inf", "epochs must be a finite number, got inf"),
        ("optimizer = 'adam'", "optimizer must be one of adamw, adamax, sgd, got 'adam'"),
        ("dense = 'last'", "dense must be one of none, beside, first, got 'last'"),
        ("[training]\nbatch = 3", "has a setting 'training' that is not known"),
        ("batch = ", "cannot read config file .*run.toml"),
        ("recipe = 'paper/bert-base/rte-11'", "no recipe 'paper/bert-base/rte-11'; nearest: .*paper/bert-base/rte-10"),
    ],
)
def test_config_that_cannot_be(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(config=config(tmp_path, text))


def test_config_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config file .*none\.toml"):
        resolve(config=tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"cannot read config file .*: .*directory"):
        resolve(config=tmp_path)
    (tmp_path / "image.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read config file"):
        resolve(config=tmp_path / "image.toml")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"epochs": 0.0}, "epochs must be above 0, got 0"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"warmup": -1.0}, "warmup must be at least 0, got -1"),
        ({"lr_warmup": -0.5}, "lr_warmup must be at least 0, got -0.5"),
        ({"checkpoints": 0}, "checkpoints must be at least 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"eval_every": -1}, "eval_every must be at least 1, got -1"),
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"learning_rate": -0.1}, "learning_rate must be at least 0, got -0.1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1"),
        ({"momentum": -1.0}, "momentum must be at least 0, got -1"),
        ({"clip": -1.0}, "clip must be at least 0, got -1"),
        (
            {"steps": 100, "warmup": 60.0, "cooldown": 50.0},
            r"warmup \+ cooldown must not exceed the 100 steps of the training, got 60 \+ 50; shorten one of them",
        ),
    ],
)
def test_plan_that_cannot_be(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        count_steps(resolve(flags=flags), 1000)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_full_training_has_the_recipes_own_counts() -> None:
    assert count_steps(resolve(RTE), 2_490) == StepCounts(3120, 200, 1200, 312, 312, 31, 312)
    assert count_steps(resolve(CIFAR), 50_000) == StepCounts(20_000, 2_000, 8_000, 1_000, 2_000, 200, 2_000)


def test_shorter_training_scales_the_recipes_counts() -> None:
    short = count_steps(resolve(RTE, flags={"steps": 312}), 2_490)
    assert (short.warmup, short.cooldown, short.lr_warmup) == (20, 120, 31)
    fewer_rows = count_steps(resolve(RTE, flags={"train_rows": 160}), 160)  # 20 epochs of 10 batches
    assert (fewer_rows.total, fewer_rows.warmup, fewer_rows.cooldown) == (200, 13, 77)
    short = count_steps(resolve(CIFAR, flags={"steps": 200}), 50_000)
    assert (short.warmup, short.cooldown, short.lr_warmup) == (20, 80, 10)


def test_what_the_user_counts_is_taken_as_said() -> None:
    short = count_steps(resolve(CIFAR, flags={"steps": 200, "warmup": 50.0, "lr_warmup": 7.0}), 50_000)
    assert (short.warmup, short.cooldown, short.lr_warmup) == (50, 80, 7)
    # A step count that the user's own flag took over does not scale, though the recipe's reference is still there.
    same = count_steps(resolve(RTE, flags={"steps": 3120, "warmup": 200.0, "cooldown": 1200.0}), 2_490)
    assert (same.warmup, same.cooldown) == (200, 1200)
    given = count_steps(resolve(RTE, flags={"steps": 1560, "reference_steps": 1560}), 2_490)
    assert (given.warmup, given.cooldown) == (200, 1200)


def test_below_one_is_a_share_of_the_training_whoever_says_it() -> None:
    shares = count_steps(resolve(flags={"steps": 1000, "warmup": 0.25, "cooldown": 0.5, "lr_warmup": 0.0}), 1000)
    assert (shares.warmup, shares.cooldown, shares.lr_warmup) == (250, 500, 0)
    one = count_steps(resolve(flags={"steps": 1000, "warmup": 1.0}), 1000)
    assert one.warmup == 1
    assert count_steps(resolve(RTE, flags={"steps": 100}), 2_490).lr_warmup == 10
    assert count_steps(resolve(flags={"steps": 5, "lr_warmup": 100.0}), 1000).lr_warmup == 5


def test_epochs_count_whole_batches() -> None:
    steps = {
        epochs: count_steps(resolve(flags={"epochs": epochs, "batch": 32}), 100).total for epochs in (0.1, 1.0, 2.5)
    }
    assert steps == {0.1: 1, 1.0: 4, 2.5: 10}
    assert count_steps(ResolvedSettings(Settings(batch=500), resolve().sources), 100).total == 3


def test_tiny_trainings_still_log_evaluate_and_save() -> None:
    tiny = count_steps(resolve(flags={"steps": 1}), 10)
    assert (tiny.eval_every, tiny.log_every, tiny.checkpoint_every) == (1, 1, 1)
    said_so = count_steps(resolve(flags={"steps": 100, "eval_every": 7, "log_every": 3, "checkpoint_every": 9}), 10)
    assert (said_so.eval_every, said_so.log_every, said_so.checkpoint_every) == (7, 3, 9)


# --- settings that were stored ----------------------------------------------------------------------------------------


def test_stored_settings_are_read_back() -> None:
    resolved = resolve(RTE, flags={"seed": 3})
    assert ResolvedSettings.from_plain(resolved.plain(), RTE) == resolved
    older = {name: one for name, one in resolved.plain().items() if name != "exponent"}
    assert said(ResolvedSettings.from_plain(older), "exponent", "seed") == [(1.0, "ours"), (3, "user")]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch": "many"}, "batch must be of type int, got 'many'"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"keep": 80}, r"keep must be in \(0, 1\], got 80"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, adamax, sgd, got 'adam'"),
        ({"precision": None}, "precision needs a value"),
        ({"task": "sst-2"}, "no task is called 'sst-2'; nearest: 'sst2'"),
        ({"lerning_rate": 1}, "there is no setting 'lerning_rate'; nearest: 'learning_rate'"),
    ],
)
def test_stored_settings_are_checked_as_a_users_are(changed: dict[str, Any], sentence: str) -> None:
    plain = resolve().plain() | {name: {"value": value, "source": "user"} for name, value in changed.items()}
    with pytest.raises(UserError, match=sentence):
        ResolvedSettings.from_plain(plain)


@pytest.mark.parametrize("plain", [None, [], {"batch": 3}, {"batch": {"value": 3}}, {"batch": {"source": "user"}}])
def test_stored_settings_of_another_form(plain: Any) -> None:
    with pytest.raises(UserError, match="a value and a source"):
        ResolvedSettings.from_plain(plain)
    with pytest.raises(UserError, match="recipe must be of type str, got 3"):
        ResolvedSettings.from_plain({}, 3)
    odd = {"batch": {"value": 3, "source": "somebody"}}
    with pytest.raises(UserError, match="batch needs a value and a source"):
        ResolvedSettings.from_plain(odd)


def test_a_users_no_overrides_a_recipes_yes() -> None:
    recipe = "sanh/bert-base/squad-l0"
    assert said(resolve(recipe), "freeze_embeddings") == [(True, "code")]
    assert said(resolve(recipe, flags={"freeze_embeddings": False}), "freeze_embeddings") == [(False, "user")]


def test_defaults_are_the_engines() -> None:
    """A setting that a score has too has the same default, or leaves it to the score."""
    for method in METHODS.values():
        for field in dataclasses.fields(method.score) if method.score is not None else ():
            if field.name in FIELDS:
                assert FIELDS[field.name].default in (None, field.default), (method, field.name)
    cubic = {field.name: field.default for field in dataclasses.fields(Cubic)}
    for name in ("warmup", "cooldown", "every"):
        assert FIELDS[name].default == cubic[name]
    assert (cubic["every"], cubic["warmup"], cubic["cooldown"]) == (10, 0.1, 0.3)


def test_settings_from_before_a_setting() -> None:
    """A run from before rows were held out by class is evaluated on the rows that it held out then."""
    plain = resolve(flags={"task": "text"}).plain()
    assert plain["stratify"]["value"] is True
    del plain["stratify"]
    assert ResolvedSettings.from_plain(plain).settings.stratify is False
