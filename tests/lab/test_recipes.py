"""The recipes against the paper's appendix: the tables below are its tables, typed from it and not from the code."""

import dataclasses

import pytest

from platon.lab.errors import UserError
from platon.lab.recipes import RECIPES, SETTINGS, Field, find

# fmt: off
# Table "Hyper-parameter setup of PLATON for GLUE benchmark"
GLUE_COLUMNS =                  ("mnli", "rte", "qnli", "mrpc", "qqp", "sst2", "cola", "stsb")
GLUE_ROWS = [
    # ratio, hyper-parameter
    (None, "epochs",             8,      20,    10,     10,     10,    6,      15,     15),
    (None, "batch",              32,     16,    32,     8,      32,    32,     32,     16),
    (None, "learning_rate",      8e-5,   1e-4,  1e-4,   1e-4,   1e-4,  8e-5,   1e-4,   1e-4),

    (20,   "warmup",             5400,   200,   2000,   300,    5400,  1000,   500,    500),
    (20,   "cooldown",           22000,  1200,  12000,  900,    22000, 5000,   1500,   2500),
    (20,   "beta1",              0.85,   0.85,  0.85,   0.85,   0.85,  0.85,   0.85,   0.85),
    (20,   "beta2",              0.85,   0.99,  0.95,   0.95,   0.85,  0.85,   0.95,   0.85),

    (15,   "warmup",             5400,   200,   2000,   300,    5400,  1000,   500,    500),
    (15,   "cooldown",           22000,  1200,  12000,  900,    22000, 5000,   1500,   2500),
    (15,   "beta1",              0.85,   0.85,  0.85,   0.85,   0.85,  0.85,   0.85,   0.85),
    (15,   "beta2",              0.90,   0.50,  0.90,   0.95,   0.90,  0.90,   0.975,  0.90),

    (10,   "warmup",             5400,   200,   2000,   300,    5400,  1000,   500,    500),
    (10,   "cooldown",           22000,  1200,  12000,  900,    22000, 5000,   1500,   2500),
    (10,   "beta1",              0.85,   0.85,  0.85,   0.85,   0.85,  0.85,   0.85,   0.85),
    (10,   "beta2",              0.85,   0.95,  0.95,   0.95,   0.90,  0.85,   0.95,   0.95),
]

# Table "Hyper-parameter setup of PLATON on question answering tasks", and the text above it
SQUAD_COLUMNS =                 (10,     15,    20,     30,     40,    50)
SQUAD_ROWS = [
    ("beta1",                    0.85,   0.85,  0.85,   0.85,   0.85,  0.85),
    ("beta2",                    0.975,  0.975, 0.975,  0.975,  0.900, 0.975),
]
SQUAD_TEXT = {"batch": 16, "epochs": 10, "optimizer": "adamw", "learning_rate": 3e-5}
SQUAD_SCHEDULE = {"warmup": 5400, "cooldown": 22000}

# Section "Image Classification" of the appendix
VIT_COLUMNS =                   ("cifar100", "imagenet")
VIT_ROWS = [
    ("image_size",               224,        384),
    ("batch",                    512,        150),
    ("learning_rate",            0.03,       0.03),
    ("optimizer",                "sgd",      "sgd"),
    ("clip",                     1.0,        1.0),
    ("decay",                    "cosine",   "cosine"),
    ("lr_warmup",                1000,       1000),
    ("warmup",                   2000,       7000),
    ("cooldown",                 8000,       10000),
    ("steps",                    20000,      60000),
    ("beta1",                    0.85,       0.85),
    ("beta2",                    0.85,       0.85),
]

# The results tables: which ratios were run
EVALUATED = {
    "bert-base":       {**dict.fromkeys(GLUE_COLUMNS, (20, 15, 10)), "squad": (10, 15, 20, 30, 40, 50)},
    "deberta-v3-base": dict.fromkeys(("mnli", "sst2", "squad"), (30, 20, 15, 10)),
    "vit-base":        {"cifar100": (30, 20, 10), "imagenet": (40, 30, 20)},
}

# The movement-pruning scripts, which the paper's baselines follow
SANH_COLUMNS =                  ("magnitude-10", "movement-10", "soft-movement", "l0")
SANH_ROWS = [
    ("freeze_embeddings",        True,           True,          True,            True),
    ("warmup",                   5400,           5400,          5400,            5400),
    ("cooldown",                 10800,          10800,         10800,           5400),
    ("lr_warmup",                5400,           5400,          5400,            5400),
    ("scope",                    "matrix",       "matrix",      None,            None),
    ("score_learning_rate",      None,           1e-2,          1e-2,            1e-1),
    ("score_init",               None,           0.0,           0.0,             2.197),
    ("tau",                      None,           None,          0.1,             None),
    ("penalty",                  None,           None,          400.0,           125.0),
    ("min_keep_per_matrix",      None,           None,          0.005,           None),
]
# fmt: on

GLUE_CELLS = [
    pytest.param(task, ratio, setting, value, id=f"{task}-{ratio}-{setting}")
    for row_ratio, setting, *cells in GLUE_ROWS
    for task, value in zip(GLUE_COLUMNS, cells, strict=True)
    for ratio in ([row_ratio] if row_ratio else [20, 15, 10])
]


def table(columns, rows):
    cells = ((column, row[0], value) for row in rows for column, value in zip(columns, row[1:], strict=True))
    return [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}") for cell in cells]


@pytest.mark.parametrize(("task", "ratio", "setting", "value"), GLUE_CELLS)
def test_glue_table(task, ratio, setting, value):
    assert find(f"paper/bert-base/{task}-{ratio}").fields[setting] == Field(value, "paper")


@pytest.mark.parametrize(("ratio", "setting", "value"), table(SQUAD_COLUMNS, SQUAD_ROWS))
def test_squad_table(ratio, setting, value):
    assert find(f"paper/bert-base/squad-{ratio}").fields[setting] == Field(value, "paper")


@pytest.mark.parametrize("ratio", SQUAD_COLUMNS)
def test_squad_text(ratio):
    fields = find(f"paper/bert-base/squad-{ratio}").fields
    for setting, value in {**SQUAD_TEXT, **SQUAD_SCHEDULE}.items():
        assert fields[setting] == Field(value, "paper")


@pytest.mark.parametrize(("task", "setting", "value"), table(VIT_COLUMNS, VIT_ROWS))
def test_vit_text(task, setting, value):
    for ratio in EVALUATED["vit-base"][task]:
        assert find(f"paper/vit-base/{task}-{ratio}").fields[setting] == Field(value, "paper")


@pytest.mark.parametrize(("method", "setting", "value"), table(SANH_COLUMNS, SANH_ROWS))
def test_baselines_follow_the_movement_scripts(method, setting, value):
    fields = find(f"sanh/bert-base/squad-{method}").fields
    assert fields.get(setting) == (None if value is None else Field(value, "code"))


def test_names_are_complete():
    names = {
        f"paper/{model}/{task}-{ratio}"
        for model, tasks in EVALUATED.items()
        for task, ratios in tasks.items()
        for ratio in ratios
    }
    names |= {f"paper/bert-base/squad-{ratio}-structured" for ratio in (40, 50)}
    names |= {f"sanh/bert-base/squad-{m}-{ratio}" for m in ("magnitude", "movement") for ratio in SQUAD_COLUMNS}
    names |= {"sanh/bert-base/squad-soft-movement", "sanh/bert-base/squad-l0"}
    assert set(RECIPES) == names
    assert len(names) == 24 + 6 + 12 + 6 + 2 + 12 + 2


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_its_name_says(name):
    origin, model, rest = name.split("/")
    values = find(name).values
    hub = {"bert-base": "bert-base-uncased", "deberta-v3-base": "deberta-v3-base"}
    assert values["model"].endswith("/" + hub.get(model, "vit-base-patch16-224-in21k"))
    assert values["units"] == ("columns" if rest.endswith("-structured") else "weights")
    words = rest.removesuffix("-structured").split("-")
    assert values["task"] == words.pop(0)
    if words[-1].isdigit():
        assert values["keep"] == int(words.pop()) / 100
    else:
        assert "keep" not in values  # the penalty decides
    assert values["method"] == ("platon" if origin == "paper" else "-".join(words))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_whole(name):
    recipe = find(name)
    values = recipe.values
    assert recipe.name == name
    assert list(values) == [setting for setting in SETTINGS if setting in values]
    assert (values["epochs"] is None) != (values["steps"] is None)
    assert values["warmup"] + values["cooldown"] <= values["reference_steps"]
    assert ("max_length" in values) != ("image_size" in values)
    if values["method"] == "platon":
        assert (values["window"], values["every"], values["timing"], values["scope"]) == (10, 10, "after", "global")


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("paper/")])
def test_what_the_paper_does_not_say_is_not_called_the_papers(name):
    fields = find(name).fields
    said = {setting for setting, field in fields.items() if field.source == "paper"}
    everywhere = {"task", "model", "method", "keep", "units", "scope", "beta1"}
    if "deberta" in name or "structured" in name:
        assert said == everywhere
    assert everywhere <= said
    silent = {"window", "every", "timing", "freeze_embeddings", "momentum", "weight_decay", "max_length", "stride"}
    if "vit" not in name:
        silent |= {"lr_warmup", "decay", "clip", "reference_steps"}
    assert not said & silent


def test_deberta_on_squad_is_the_authors_script():
    fields = find("paper/deberta-v3-base/squad-10").fields
    script = {"epochs": 10, "batch": 16, "learning_rate": 3e-5, "warmup": 5400, "cooldown": 5 * 5400, "beta2": 0.95}
    assert {setting: fields[setting] for setting in script} == {s: Field(v, "code") for s, v in script.items()}
    assert find("paper/deberta-v3-base/squad-30").fields["beta2"] == Field(0.95, "ours")


@pytest.mark.parametrize("ratio", [40, 50])
def test_structured_trains_as_without_structure(ratio):
    plain = find(f"paper/bert-base/squad-{ratio}").values
    assert find(f"paper/bert-base/squad-{ratio}-structured").values == {**plain, "units": "columns"}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("paper/bert-base/rte-10", 20 * 156),
        ("paper/bert-base/sst2-10", 6 * 2105),
        ("paper/bert-base/squad-10", 10 * 5533),
        ("paper/vit-base/imagenet-20", 60_000),
    ],
)
def test_reference_steps(name, steps):
    assert find(name).values["reference_steps"] == steps


def test_recipes_are_read_only():
    recipe = find("paper/bert-base/rte-10")
    with pytest.raises(TypeError):
        recipe.fields["keep"] = Field(0.5, "ours")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "mine"
    recipe.values["keep"] = 0.5
    assert recipe.values["keep"] == 0.1


@pytest.mark.parametrize("typo", ["paper/bert-base/rte10", "bert-base/rte-10", "paper/bert-bsae/rte-10"])
def test_find_names_the_nearest(typo):
    with pytest.raises(UserError, match="nearest: paper/bert-base/rte-10"):
        find(typo)
