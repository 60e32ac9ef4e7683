"""How a stage calls the blocks of a model: what they take and return, without other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge.errors import TaskError
from forge_cluster.pipeline.running import BlockCalls, StageEnded

CPU = torch.device("cpu")
WIDTH = 3


class Block(nn.Module):
    """Returns a tuple, with the length of what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.extra: Any = None

    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, int, Any]:
        return torch.tanh(self.fc(hidden)) * scale, hidden.shape[1], self.extra


class Blocks(nn.Module):
    """Tokens go to the first block, by name; each block checks the length that the one before returned."""

    def __init__(self, count: int = 5, call: Any = lambda block, x: block(hidden=x, scale=2.0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(7, WIDTH), nn.ModuleList(Block() for _ in range(count))
        self.call = call

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embed(tokens), tokens.shape[1]
        for block in self.blocks:
            x, found, _ = self.call(block, x)
            assert found == length
        return x.sum()


def calls_of(model: Blocks) -> BlockCalls:
    return BlockCalls({f"blocks.{n}": block for n, block in enumerate(model.blocks)}, "Blocks", CPU)


def stage(model: Blocks, calls: BlockCalls, begin: int, end: int, received: Tensor | None) -> Tensor:
    with calls.running(begin, end, received, seed=0):
        try:
            return model(TOKENS)
        except StageEnded as ended:
            return ended.output


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1]])


@pytest.mark.parametrize("call", [lambda b, x: b(hidden=x), lambda b, x: b(x), lambda b, x: b(x, scale=2.0)])
def test_stages_one_after_the_other_are_the_model(call: Any) -> None:
    model = Blocks(call=call)
    expected, calls = model(TOKENS), calls_of(model)
    sent = stage(model, calls, 0, 4, None)
    assert torch.equal(stage(model, calls, 4, 5, sent), expected)


def test_a_first_block_may_take_tokens() -> None:
    layers = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    expected = layers(TOKENS)
    calls = BlockCalls(dict(layers.named_children()), "Sequential", CPU)
    with pytest.raises(StageEnded) as ended, calls.running(0, 2, None, seed=0):
        layers(TOKENS)
    with calls.running(2, 3, ended.value.output, seed=0):
        assert torch.equal(layers(TOKENS), expected)


def test_what_another_rank_computed_may_be_changed_in_place() -> None:
    model = Blocks(call=lambda block, x: ((out := block(x))[0].mul_(0.5), *out[1:]))
    expected, calls = model(TOKENS), calls_of(model)
    assert torch.equal(stage(model, calls, 4, 5, stage(model, calls, 0, 4, None)), expected)


def test_a_use_of_what_another_rank_computed_shows() -> None:
    class Summed(Blocks):
        def forward(self, tokens: Tensor) -> Tensor:
            first, length, _ = self.blocks[0](self.embed(tokens))
            return self.blocks[1](first)[0].sum() + first.sum() * 0 * length

    model = Summed(2)
    calls = calls_of(model)
    sent = stage(model, calls, 0, 1, None)
    assert stage(model, calls, 1, 2, sent).isnan()


def test_a_number_that_may_change_is_not_imitated() -> None:
    model = Blocks(2, call=lambda block, x: block(x))
    model.blocks.apply(lambda block: setattr(block, "extra", 0.5))
    calls = calls_of(model)
    sent = stage(model, calls, 0, 1, None)
    seen: list[Any] = []
    model.call = lambda block, x: (out := block(x), seen.append(out[2]))[0]
    stage(model, calls, 1, 2, sent)
    assert seen[0].isnan()
    assert seen[1] == 0.5


def test_whole_numbers_that_change_are_refused() -> None:
    model = Blocks(2)
    calls = calls_of(model)
    for number in range(2):
        model.blocks.apply(lambda block, number=number: setattr(block, "extra", number))
        if not number:
            stage(model, calls, 0, 1, None)
    with pytest.raises(TaskError, match=r"blocks.0 returns other numbers or shapes than for an earlier batch"):
        stage(model, calls, 0, 1, None)


def test_an_object_that_cannot_be_imitated_is_refused() -> None:
    model = Blocks(2)
    model.blocks.apply(lambda block: setattr(block, "extra", object()))
    with pytest.raises(TaskError, match=r"blocks.0 returns a object, which other ranks cannot imitate. Return tensors"):
        stage(model, calls_of(model), 0, 1, None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_a_block_is_refused(reentrant: bool) -> None:
    model = Blocks(2, call=lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    calls = calls_of(model)
    sent = stage(model, calls, 0, 1, None).detach().requires_grad_()
    with pytest.raises(TaskError, match=r"computes blocks.1 a second time in its backward .* use the plugin remat"):
        stage(model, calls, 1, 2, sent).backward()


def test_a_blocks_own_forward_is_restored() -> None:
    model = Blocks(2)
    own = model.blocks[0].forward
    model.blocks[0].forward = own
    calls = calls_of(model)
    assert model.blocks[0].forward is not own
    calls.remove()
    assert vars(model.blocks[0])["forward"] is own
    assert "forward" not in vars(model.blocks[1])
