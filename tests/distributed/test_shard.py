"""What is sharded in a way that cannot be followed is refused in one sentence; the fingerprint tells masks apart."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import platon
from platon.engine.ranking.bits import pack
from platon.engine.ranking.noise import digest
from platon.engine.state import local_tensors

Make = Callable[[], nn.Module]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    place = tmp_path_factory.mktemp("group") / "store"
    # So that nothing of this group is taken for a launcher's.
    before = {name: os.environ.pop(name, None) for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.update({name: value for name, value in before.items() if value is not None})


def pruner(model: nn.Module) -> platon.Pruner:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return platon.Pruner(model, optimizer, schedule=platon.Constant(0.5), score=platon.Platon(window=1))


def refused(model: nn.Module) -> str:
    with pytest.raises(ValueError, match=r"; \w+") as caught:
        pruner(model)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    return sentence


def test_first_fsdp_is_refused(make_net: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: it switches to NO_SHARD, and is going away
        model = FullyShardedDataParallel(make_net(), use_orig_params=True, device_id=torch.device("cpu"))
    assert "use torch.distributed.fsdp.fully_shard" in refused(model)


def test_zero_3_is_refused(make_net: Make) -> None:
    model = make_net()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    assert "DeepSpeed ZeRO-3" in refused(model)


def test_mesh_of_two_dimensions_is_refused(make_net: Make) -> None:
    model = make_net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards")))
    assert "a mesh of 2 dimensions" in refused(model)


def test_other_placements_are_refused(make_net: Make) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for place in (Shard(1), Replicate()):
        model = make_net()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [place]))
        assert "platon follows Shard(0)" in refused(model)


def test_partly_sharded_is_refused(make_net: Make) -> None:
    model = make_net()
    for block in model.blocks:
        for linear in (block.query, block.up):
            fully_shard(linear)
    assert "is whole on each rank" in refused(model)


def test_hold_keeps_zeros_of_a_sharded_model(make_net: Make) -> None:
    model = make_net()
    with torch.no_grad():
        model.blocks[0].up.weight[::2] = 0
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = platon.hold(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weight = model.blocks[0].up.weight.full_tensor()
    assert not weight[::2].any()
    assert weight[1::2].all()
    assert not held.masks()["blocks.0.up.weight"].full_tensor()[::2].any()


def test_nonfinite_gradient_of_a_shard_is_named(make_net: Make) -> None:
    model = make_net()
    fully_shard(model)
    ours = pruner(model)
    model(torch.ones(2, 4)).sum().backward()
    model.blocks[1].up.weight.grad.to_local()[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"the gradient of 'blocks.1.up.weight' is not finite"):
        ours._hooks.optimizer.step()
    assert ours.step_count == 0


# --- the fingerprint --------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.data())
def test_digest_adds_up_over_shards_and_tells_masks_apart(kept: list[bool], data: st.DataObject) -> None:
    mask = torch.tensor(kept)
    whole = int(digest(pack(mask), len(kept), 5))
    cut = data.draw(st.integers(0, len(kept)))
    parts = [(mask[:cut].clone(), 5), (mask[cut:].clone(), 5 + cut)]
    total = sum(digest(pack(part), len(part), start) for part, start in parts)
    assert int(total) == whole
    flipped = mask.clone()
    place = data.draw(st.integers(0, len(kept) - 1))
    flipped[place] = ~flipped[place]
    assert int(digest(pack(flipped), len(kept), 5)) != whole


def test_fingerprint_follows_the_masks(make_net: Make) -> None:
    model = make_net()
    ours = pruner(model)
    before = ours.fingerprint()
    assert before == pruner(make_net()).fingerprint()
    model(torch.ones(2, 4)).sum().backward()
    ours._hooks.optimizer.step()
    assert ours.fingerprint() != before
    ours.check_ranks()


def test_state_of_one_process_and_of_ranks_are_interchangeable(make_net: Make, tmp_path: Path) -> None:
    def trained(shard: bool) -> tuple[nn.Module, platon.Pruner]:
        model = make_net()
        if shard:
            fully_shard(model)
        ours = pruner(model)
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            ours._hooks.optimizer.step()
            ours._hooks.optimizer.zero_grad()
        return model, ours

    _, plain = trained(shard=False)
    _, sharded = trained(shard=True)
    assert plain.fingerprint() == sharded.fingerprint()
    for source in (plain.state_dict(), plain.state_dict(whole=True), sharded.state_dict()):
        for shard in (False, True):
            model = make_net()
            if shard:
                fully_shard(model)
            other = pruner(model)
            tensors = {
                name: t.full_tensor() if hasattr(t, "full_tensor") and not shard else t
                for name, t in source["tensors"].items()
            }
            other.load_state_dict({**source, "tensors": tensors})
            assert other.fingerprint() == plain.fingerprint()
            wanted = local_tensors(plain._ranking, plain._store)
            for name, tensor in local_tensors(other._ranking, other._store).items():
                assert torch.equal(tensor, wanted[name])
