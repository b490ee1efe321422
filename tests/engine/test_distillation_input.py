"""Teachers by name and of other kinds, and one sentence for each that does not fit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import platon

_SIZE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
IDS = torch.randint(3, 31, (2, 5), generator=torch.Generator().manual_seed(0))


def bert(kind: Any = hf.BertForSequenceClassification, **others: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(hf.BertConfig(**{**_SIZE, **others})).train()


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_folder(tmp_path: Path) -> None:
    saved = bert()
    saved.save_pretrained(tmp_path)
    distillation = platon.Distillation(bert(), str(tmp_path))
    theirs = distillation.teacher.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in saved.state_dict().items())
    assert not any(module.training for module in distillation.teacher.modules())


def test_a_folder_of_another_architecture_is_refused(tmp_path: Path) -> None:
    hf.RobertaForSequenceClassification(hf.RobertaConfig(**_SIZE)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of type 'roberta' and the model of type 'bert'; load the teacher with"):
        platon.Distillation(bert(), str(tmp_path))


def test_a_folder_without_the_head_is_refused(tmp_path: Path) -> None:
    bert(hf.BertModel).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no weights for 'classifier.bias'; give a model that was trained"):
        platon.Distillation(bert(), str(tmp_path))


# --- a loop that computes its loss itself -----------------------------------------------------------------------------


class Classifier(nn.Module):
    """A model of torch's own layers that gives a tensor; texts come with the tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens.T)).mean(0))


def test_tensors() -> None:
    torch.manual_seed(0)
    model, teacher = Classifier(), Classifier()
    distillation = platon.Distillation(model, teacher, weight=0.25, temperature=1, hidden_weight=0.5)
    answers = model(IDS)
    task = F.cross_entropy(answers, torch.tensor([0, 2]))
    mixed = distillation.loss(answers, task)
    kl = F.kl_div(answers.log_softmax(-1), teacher(IDS).log_softmax(-1), log_target=True, reduction="batchmean")
    terms = distillation.terms
    torch.testing.assert_close(terms["outputs"], kl.detach())
    torch.testing.assert_close(mixed, 0.75 * task + 0.25 * (kl + 0.5 * terms["hidden"]))
    assert terms["hidden"] > 0


def test_a_loop_that_leaves_the_loss_out_is_noticed() -> None:
    model = Classifier()
    platon.Distillation(model, "self")
    model(IDS)
    with pytest.warns(UserWarning, match=r"distillation.loss\(outputs\) was not called"):
        model(IDS)
    model(IDS)  # said once


def test_labels_that_the_model_did_not_see() -> None:
    model = bert(hf.BertForTokenClassification)
    distillation = platon.Distillation(model, bert(hf.BertForTokenClassification, num_labels=2), weight=1)
    labels = torch.full((2, 5), -100)
    output = model(input_ids=IDS)
    assert distillation.loss(output) > 0
    assert distillation.loss(output, labels=labels) == 0


def test_there_is_no_loss_before_a_training_pass() -> None:
    model = bert().eval()
    distillation = platon.Distillation(model, "self")
    with pytest.raises(RuntimeError, match="the model has not run in training mode"):
        distillation.loss(model(input_ids=IDS))
    nothing = platon.Distillation(model, "self", weight=0)
    with pytest.raises(RuntimeError, match="its weight is 0"):
        nothing.loss(model(input_ids=IDS))
    task = torch.tensor(1.0)
    assert nothing.loss(model(input_ids=IDS), task) is task


def test_repr() -> None:
    said = repr(platon.Distillation(bert(), "self", weight=0.3))
    assert said == (
        "Distillation(teacher=BertForSequenceClassification, weight=0.3, temperature=2.0, hidden_weight=0.0)"
    )


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"weight": 1.5}, "weight must be in [0, 1], got 1.5; write 0.5 for half teacher, half labels"),
        ({"weight": float("nan")}, "weight must be in [0, 1], got nan"),
        ({"temperature": 0}, "temperature must be above 0, got 0; 2 is usual"),
        ({"hidden_weight": -1}, "hidden_weight must be at least 0, got -1"),
        ({"layers": {0: 0}}, "layers pairs hidden states, and hidden_weight is 0"),
        ({"kind": "class"}, "kind must be one of 'spans', 'regression'"),
    ],
)
def test_numbers_that_cannot_be_right(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        platon.Distillation(bert(), "self", **settings)


@pytest.mark.parametrize(
    ("teacher", "sentence"),
    [
        (lambda: bert(vocab_size=32), "the teacher has 32 tokens in the vocabulary and the model 31"),
        (lambda: bert(num_labels=3), "the teacher has 3 labels and the model 2"),
        (
            lambda: bert(id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1}),
            "the teacher's labels are ['good', 'bad'] and the model's ['bad', 'good']",
        ),
        (nn.Identity, "the teacher Identity has no weights"),
    ],
)
def test_teachers_that_do_not_fit(teacher: Any, sentence: str) -> None:
    model = bert(id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    with pytest.raises(ValueError, match=re.escape(sentence)):
        platon.Distillation(model, teacher())


def test_other_teachers() -> None:
    model = bert()
    with pytest.raises(ValueError, match="the teacher is the model that is trained; give teacher='self'"):
        platon.Distillation(model, model)
    with pytest.raises(TypeError, match="teacher must be a module, 'self', a folder or a hub name, got 3"):
        platon.Distillation(model, 3)
    with pytest.raises(ValueError, match="Classifier has no from_pretrained to load it with; give a module"):
        platon.Distillation(Classifier(), "somewhere")
    assert not model._forward_hooks


def test_outputs_that_do_not_fit() -> None:
    model = bert()
    platon.Distillation(model, bert(hf.BertForTokenClassification))
    with pytest.raises(ValueError, match=r"gives outputs of shape \(2, 2\) and the teacher nothing of that kind"):
        model(input_ids=IDS)
    small = Classifier()
    small.head = nn.Linear(8, 2)
    model = Classifier()
    platon.Distillation(model, small)
    with pytest.raises(ValueError, match=r"outputs of shape \(2, 3\) and the teacher outputs of shape \(2, 2\)"):
        model(IDS)


class Pictures(nn.Module):
    """Gives four dimensions, as a segmentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.scale * pixels


def test_an_output_of_no_known_kind() -> None:
    model = Pictures()
    platon.Distillation(model, "self")
    with pytest.raises(ValueError, match=r"Pictures is of no known kind: it has tensors of shape \(1, 2, 3, 3\)"):
        model(torch.ones(1, 2, 3, 3))
    other = bert()
    platon.Distillation(other, "self", kind="spans")
    with pytest.raises(ValueError, match=r"is not of the kind 'spans': it has logits of shape \(2, 2\)"):
        other(input_ids=IDS)


def test_hidden_states_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="hidden_weight needs transformer blocks, and the student Pictures has none"):
        platon.Distillation(Pictures(), "self", hidden_weight=1)
    model = bert()
    platon.Distillation(model, bert(), hidden_weight=1, layers={1: 2})
    with pytest.raises(ValueError, match="layers pairs 1 with 2, but the student has layers 0 to 1 and the teacher"):
        model(input_ids=IDS)
    compiled = torch.compile(bert(), backend="eager")
    with pytest.raises(ValueError, match="attach Distillation before wrapping"):
        platon.Distillation(compiled, bert(hidden_size=20), hidden_weight=1)


# --- sentence embeddings ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    hf.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    bert(hf.BertModel, vocab_size=len(words)).save_pretrained(tmp_path)
    encoder = Transformer(str(tmp_path))
    model = SentenceTransformer(modules=[encoder, Pooling(16)], device="cpu")
    distillation = platon.Distillation(model, "self", weight=1, hidden_weight=1)
    model.train()
    features = model.tokenize(["a b c", "a"])
    output = model(features)
    with torch.no_grad():
        theirs = distillation.teacher(dict(features))["sentence_embedding"]
    right = (1 - F.cosine_similarity(output["sentence_embedding"], theirs)).mean()
    torch.testing.assert_close(distillation.terms["outputs"], right.detach())
    output["loss"].backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
