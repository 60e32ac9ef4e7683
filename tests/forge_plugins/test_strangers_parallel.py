"""Models that were not written for forge train under every strategy what one process trains, or are refused at the
start with the cure."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from forge_plugins import Remat
from tests.support import strangers_kit as kit
from tests.support.lasting_ranks import ranks
from tests.support.profiles import some

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

LEAKS = "the output of an early block is used by more than the next block"
FEW = "2 blocks (model.{}.0, ...) cannot make 4 stages"
NO_BLOCKS = "has neither repeated blocks in a ModuleList nor a Sequential to cut. Put its layers into one"
BATCH_NORM = "BatchNorm (model.bn1, model.layer1.0.bn1, model.layer1.0.bn2 and 17 more) would take statistics of each"
MASK = "passes a mask to scaled_dot_product_attention"
NO_TOKENS = "Name the tensors that hold the sequence in context_parallel.entries"
PIPELINES = ("pipeline", "interleaved, remat", "sharded pipeline")
REFUSED: dict[tuple[str, str], str] = {
    **{("t5", strategy): LEAKS for strategy in PIPELINES},
    **{("lstm", strategy): NO_BLOCKS for strategy in PIPELINES},
    **{("resnet", strategy): BATCH_NORM for strategy in ("pipeline", "sharded pipeline")},
    **{("pooled bert", strategy): f"Set {strategy}.find_unused=true, or freeze them" for strategy in ("ddp", "zero")},
    ("resnet", "interleaved, remat"): FEW.format("layer4"),
    ("grouped resnet", "interleaved, remat"): FEW.format("layer4"),
    ("mistral", "context"): f"{MASK}, which a ring of slices cannot apply. Use causal or full attention without one",
    ("t5", "context"): MASK,
    ("whisper", "context"): "Encoded computes whole sequences, but fails on a slice",
    ("vit", "context"): NO_TOKENS,
    ("clip", "context"): "Only self-attention along the sequence can be divided: no tokens that the model adds",
    ("gemma2", "context"): "does not call torch.nn.functional.scaled_dot_product_attention",
    ("pooled bert", "context"): "does not compute the same on divided sequences as on whole ones",
    ("grouped resnet", "context"): NO_TOKENS,
    ("transformer", "context"): "does not compute the same on divided sequences as on whole ones",
    ("lstm", "context"): "does not call torch.nn.functional.scaled_dot_product_attention",
}
"""What is said of a model and a strategy."""
EVERYWHERE = ("ddp", "zero", "fsdp", "fsdp, remat", "hybrid", "tensor", *PIPELINES)
ELSEWHERE = [
    ("pooled bert", "find_unused"),
    *((name, "zero 2") for name in ("gpt2", "llama", "whisper")),
    *((name, "context") for name in kit.CASES if "without padding" in name),
    ("mixtral", "experts"),
    ("mixtral", "sharded experts"),
    ("encoder", "context"),
    ("from tokens", "context"),
]
KILLED = [("checkpointed gpt2", strategy) for strategy in PIPELINES]
"""The other rank waits for a message when it hears of the refusal, so that its process ends."""
TABLE = [
    pair
    for pair in [*((name, strategy) for name in kit.CASES for strategy in EVERYWHERE), *ELSEWHERE]
    if pair not in REFUSED
    and pair not in KILLED
    and pair[0] != "resnet"
    and (pair[1] != "tensor" or kit.CASES[pair[0]].plan)
]


@cache
def alone(name: str) -> dict[str, Any]:
    return kit.fit(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), TABLE)
def test_a_strangers_model_trains_as_in_one_process(name: str, strategy: str) -> None:
    expected, case = alone(name), kit.CASES[name]
    for rank in ranks(kit.STRATEGIES[strategy][0])(kit.fit, name, strategy):
        assert kit.apart(rank["weights"], expected["weights"]) <= case.tolerance
        metrics = {key: value for key, value in rank["metrics"].items() if not key.startswith("experts/")}
        assert metrics == pytest.approx(expected["metrics"], rel=1e-6)


REFUSED_BY_EACH = [("t5", "pipeline"), ("mistral", "context")]


@pytest.mark.parametrize(
    ("name", "strategy"), some([*REFUSED_BY_EACH, *(pair for pair in REFUSED if pair not in REFUSED_BY_EACH)], quick=1)
)
def test_what_cannot_be_divided_is_refused_with_the_cure(name: str, strategy: str) -> None:
    errors = ranks(kit.STRATEGIES[strategy][0]).errors(kit.fit, name, strategy)
    assert all(error.startswith("PeerFailed") or REFUSED[name, strategy] in error for error in errors)
    assert any(REFUSED[name, strategy] in error for error in errors)


@pytest.mark.parametrize("name", some(["gpt2", "t5"]))
def test_remat_recomputes_with_the_caches_of_the_first_forward(name: str) -> None:
    again = kit.fit(name, None, (Remat(),))
    assert all(torch.equal(value, again["weights"][key]) for key, value in alone(name)["weights"].items())
