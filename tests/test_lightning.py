"""The callback for Lightning keeps the promises of the engine: compared with a plain loop, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import platon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from platon.lightning import PruningCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*logger.*connector|.*litlogger.*:UserWarning"),
]
Make = Callable[[], nn.Module]
ROWS, EPOCHS = 48, 3


class Module(pl.LightningModule):
    """A user's module around the net of the other tests, with dropout; `manual` steps the optimizer itself."""

    def __init__(self, net: nn.Module, manual: bool = False, dropout: float = 0.2) -> None:
        super().__init__()
        self.net, self.dropout = net, nn.Dropout(dropout)
        self.automatic_optimization = not manual

    def loss(self, batch: Tensor) -> Tensor:
        return self.dropout(self.net(batch)).square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch[0])
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("grade", -float(self.global_step))  # the earlier, the better

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows(size: int = 4) -> Any:
    data = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=size)


@pytest.fixture
def fit(make_net: Make, tmp_path: Path) -> Callable[..., Module]:
    """Train a module under a seed, with these callbacks and options of Trainer; gives the module."""

    def fit(
        *callbacks: Any,
        manual: bool = False,
        dropout: float = 0.2,
        validate: bool = False,
        resume: Any = None,
        **options: Any,
    ) -> Module:
        torch.manual_seed(0)
        module = Module(make_net(), manual, dropout)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        quiet |= {"enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks)}
        trainer = pl.Trainer(
            **{**quiet, "max_epochs": EPOCHS, "default_root_dir": tmp_path, "num_sanity_val_steps": 0, **options},
            callbacks=list(callbacks),
        )
        torch.manual_seed(1)
        trainer.fit(module, rows(), rows(ROWS) if validate else None, ckpt_path=resume)
        return module

    return fit


def looped(
    net: nn.Module, score: Any = None, keep: float | None = 0.25, accumulate: int = 1, clip: float = 0
) -> Module:
    """The same training in a plain loop, with `platon.Pruner`; without, if `keep` is None."""
    torch.manual_seed(0)
    module = Module(net).train()
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    total = EPOCHS * ROWS // 4 // accumulate
    pruner = keep and platon.Pruner(module, optimizer, score=score, schedule=platon.Cubic(keep, total, every=2))
    torch.manual_seed(1)
    for _ in range(EPOCHS):
        for number, (batch,) in enumerate(rows(), start=1):
            (module.loss(batch) / accumulate).backward()
            if number % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    if pruner:
        pruner.detach()
    return module


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


SCORES = [platon.Platon(), platon.Movement(), platon.HardConcrete()]


@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
def test_the_same_bits_as_a_plain_loop(score: Any, fit: Callable[..., Module], make_net: Make) -> None:
    callback = PruningCallback(0.25, every=2, score=score)
    module = fit(callback)
    assert same(module, looped(make_net(), score))
    assert callback.pruner is not None
    assert sum(int(m.count_nonzero()) for m in platon.weights(module).matrices.values()) == 192  # of 768
    assert callback.pruner.kept() == 0.25


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}], ids=str)
def test_accumulation_and_clipping(options: dict[str, Any], fit: Callable[..., Module], make_net: Make) -> None:
    accumulate, clip = options.get("accumulate_grad_batches", 1), options.get("gradient_clip_val", 0)
    assert same(fit(PruningCallback(0.25, every=2), **options), looped(make_net(), None, 0.25, accumulate, clip))


def test_manual_optimization(fit: Callable[..., Module]) -> None:
    assert same(fit(PruningCallback(0.25, every=2), manual=True), fit(PruningCallback(0.25, every=2)))


def test_keep_1_is_invisible(fit: Callable[..., Module]) -> None:
    assert same(fit(PruningCallback(1.0)), fit())


@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
def test_resumed_bit_for_bit(score: Any, fit: Callable[..., Module], tmp_path: Path) -> None:
    """From Lightning's own checkpoint, in the middle of the descent."""
    saved = ModelCheckpoint(tmp_path / "saved", filename="{step}", save_top_k=-1)  # after each epoch
    whole = fit(PruningCallback(0.25, every=2, score=score), saved, dropout=0.0)
    middle = tmp_path / "saved" / "step=12.ckpt"
    state = torch.load(middle, weights_only=True)["callbacks"]["PruningCallback"]["pruner"]
    assert state["step_count"] == 12
    assert 0.25 < state["keep"] < 1
    assert same(whole, fit(PruningCallback(0.25, every=2, score=score), dropout=0.0, resume=middle))


def test_another_share_is_refused(fit: Callable[..., Module], tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path / "saved", filename="{step}", save_top_k=-1)
    fit(PruningCallback(0.25), saved)
    with pytest.raises(ValueError, match=r"a training that keeps 0\.25 at its end, and this one keeps 0\.5"):
        fit(PruningCallback(0.5), resume=tmp_path / "saved" / "step=12.ckpt")
    fit(ModelCheckpoint(tmp_path / "plain", filename="{step}", save_top_k=-1))
    with pytest.raises(ValueError, match="belongs to a training without pruning"):
        fit(PruningCallback(0.5), resume=tmp_path / "plain" / "step=12.ckpt")


def test_a_denser_model_is_not_the_best(fit: Callable[..., Module], tmp_path: Path) -> None:
    """By this metric the first epoch is best; but there the share is not reached yet."""
    best = ModelCheckpoint(tmp_path / "best", filename="{step}", monitor="grade", mode="max", save_top_k=1)
    fit(PruningCallback(0.25, every=2, cooldown=0.4), best, validate=True)
    state = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    zeros = sum(int((t == 0).sum()) for name, t in state.items() if name.startswith("net.blocks") and t.ndim == 2)
    assert zeros == 768 - 192


def test_a_training_that_is_too_short_is_noticed(fit: Callable[..., Module]) -> None:
    with pytest.warns(UserWarning, match=r"after 36 steps .* give PruningCallback\(total=36\)"):
        fit(PruningCallback(0.25, total=90))


def test_a_training_without_an_end_is_refused(fit: Callable[..., Module]) -> None:
    with pytest.raises(ValueError, match="the length of the training is not known"):
        fit(PruningCallback(0.25), max_epochs=-1, max_time="00:00:10:00")


def test_hooks_go_when_the_training_fails(fit: Callable[..., Module], monkeypatch: pytest.MonkeyPatch) -> None:
    callback, step = PruningCallback(0.25), Module.training_step

    def failing(self: Module, batch: Any, index: int) -> Tensor:
        if index == 3:
            raise OSError("the disk is gone")
        return step(self, batch, index)

    monkeypatch.setattr(Module, "training_step", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(callback)
    assert callback.pruner is not None
    assert not callback.pruner._is_attached()
