"""The recipe shakespeare_char: nanoGPT's model, its windows, the text at the end; and that it can be continued."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import forge
from forge.cli import main
from forge.data import TokenStream
from forge_recipes import shakespeare
from forge_recipes.shakespeare import ALPHABET, CharGPT, decode, encode

SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context": 16}
TEXT = ALPHABET + "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 24


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with a short text."""
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(TEXT)
    monkeypatch.setenv("FORGE_DATA", str(tmp_path))
    return tmp_path


# -- the model --------------------------------------------------------------------------------------------------------


def nanogpt(task: CharGPT, tokens: Tensor, heads: int, dropout: float) -> Tensor:
    """nanoGPT's forward, written out with the task's weights."""
    weights = dict(task.named_parameters())
    batch, length = tokens.shape
    x = weights["tokens.weight"][tokens] + weights["positions.weight"][torch.arange(length)]
    x = F.dropout(x, dropout)
    for i in range(len(task.blocks)):
        own = {name.removeprefix(f"blocks.{i}."): weight for name, weight in weights.items()}
        width = x.shape[-1]
        h = F.layer_norm(x, (width,), own["norm1.weight"])
        q, k, v = (h @ own["attention.qkv.weight"].T).split(width, dim=2)
        q, k, v = (part.view(batch, length, heads, width // heads).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // heads)
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, -math.inf).softmax(-1)
        y = (F.dropout(scores, dropout) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(y @ own["attention.out.weight"].T, dropout)
        h = F.gelu(F.layer_norm(x, (width,), own["norm2.weight"]) @ own["mlp.0.weight"].T)
        x = x + F.dropout(h @ own["mlp.2.weight"].T, dropout)
    return F.layer_norm(x, (x.shape[-1],), weights["norm.weight"]) @ weights["tokens.weight"].T


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_model_computes_what_nanogpt_computes(dropout: float) -> None:
    task, tokens = CharGPT(**SMALL, dropout=dropout), torch.randint(65, (3, 16))
    with torch.no_grad():
        for weight in task.double().parameters():
            weight.mul_(5)  # so large that nothing is nearly linear
    torch.manual_seed(5)
    own = task(tokens)
    torch.manual_seed(5)
    torch.testing.assert_close(own, nanogpt(task, tokens, heads=2, dropout=dropout))


def test_matrices_decay_and_norms_do_not() -> None:
    task = CharGPT(**SMALL)
    decaying, others = task.configure_optimizers().param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decaying["betas"] == (0.9, 0.99)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}


# -- the data ---------------------------------------------------------------------------------------------------------


def test_tokens_are_places_in_the_sorted_characters() -> None:
    assert sorted(set(ALPHABET)) == list(ALPHABET)
    assert len(ALPHABET) == 65
    assert decode(encode(TEXT)) == TEXT
    with pytest.raises(forge.DataError, match="'é' does not occur in tiny Shakespeare"):
        encode("café")


def test_training_windows_are_slices_of_the_first_nine_tenths() -> None:
    train = shakespeare.shakespeare(window=16, batch_size=4).train
    assert isinstance(train, TokenStream)
    cut, tokens = int(0.9 * len(TEXT)), torch.tensor(encode(TEXT))
    starts = train.sample_indices(0, 0, train.samples)
    assert len(set(starts)) > len(starts) // 2  # anywhere
    assert max(starts) + 16 < cut
    for number, (inputs, targets) in enumerate(train):
        for row, start in enumerate(starts[4 * number : 4 * number + 4]):
            assert torch.equal(inputs[row], tokens[start : start + 16])
            assert torch.equal(targets[row], tokens[start + 1 : start + 17])


def test_a_validation_is_every_window_of_the_rest_in_order() -> None:
    val = shakespeare.shakespeare(window=16).val
    assert isinstance(val, TokenStream)
    rest = torch.tensor(encode(TEXT[int(0.9 * len(TEXT)) :]))
    windows = (len(rest) - 1) // 16
    inputs, targets = (torch.cat(parts) for parts in zip(*val, strict=True))
    assert torch.equal(inputs.flatten(), rest[: 16 * windows])
    assert torch.equal(targets.flatten(), rest[1 : 16 * windows + 1])


def test_a_text_that_is_nowhere_is_fetched_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str] = []

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        asked.append(address)
        return io.BytesIO(TEXT.encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for _ in range(2):  # the second time it is there
        assert shakespeare.shakespeare(window=16).train is not None
    assert asked == [shakespeare.SOURCE]
    assert [file.name for file in (tmp_path / "cache/forge/tinyshakespeare").iterdir()] == ["input.txt"]


def test_without_a_network_the_error_says_where_to_put_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(address: str, timeout: float) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(forge.DataError, match=r"no network.*set FORGE_DATA \(or data\.root\)"):
        shakespeare.shakespeare(root=str(tmp_path / "elsewhere"))


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe_learns_keeps_the_best_and_ends_with_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["task.layers=1", "task.width=32", "task.heads=2", "task.context=16", "task.sample=40"]
    data = ["data.window=16", "data.batch_size=8", "data.samples=800"]
    length = ["trainer.max_updates=90", "trainer.validate_every=30 updates", "schedule.warmup=10", "task.lr=1e-2"]
    code = main(["fit", "shakespeare_char_cpu", *sizes, *data, *length, "--run-dir", "run"])
    printed, errors = capsys.readouterr()
    assert code == 0, errors

    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {row["update"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert list(losses) == [30, 60, 90]
    best = min(losses, key=lambda update: losses[update])
    assert losses[best] < 2.5 < math.log(65)  # it knows far more than nothing, which is log 65
    assert Path("run/checkpoints/best").resolve().name == f"update-{best:08}"

    task = CharGPT.from_checkpoint("run").eval()
    text = task.write(length=40)
    assert text.strip() in printed
    assert text.strip() in _texts(Path("run/tensorboard"))["sample"]


def test_writing_leaves_the_runs_random_numbers_alone() -> None:
    task = CharGPT(**SMALL).eval()
    before = torch.get_rng_state()
    first = task.write("First", length=30)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.startswith("First")
    assert len(first) == 35  # further than the context of 16
    assert task.write("First", length=30) == first
    assert task.write("First", length=30, seed=1) != first


def _texts(folder: Path) -> dict[str, str]:
    """What stands under TEXT in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}


def test_a_mixture_of_equal_experts_is_one_mlp() -> None:
    torch.manual_seed(0)
    sizes: Any = {"layers": 1, "width": 16, "heads": 2, "context": 8, "dropout": 0.0}
    mixed, plain = CharGPT(**sizes, experts=3), CharGPT(**sizes)
    experts: Any = mixed.get_submodule("blocks.0.mlp.experts")
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter[:] = torch.randn(parameter.shape[1:])
    shared = {name: value for name, value in mixed.state_dict().items() if ".mlp." not in name}
    own = {"blocks.0.mlp.0.weight": experts.up[0], "blocks.0.mlp.2.weight": experts.down[0]}
    plain.load_state_dict({**shared, **own})
    tokens = torch.randint(0, 65, (2, 8))
    assert torch.allclose(mixed(tokens), plain(tokens), atol=1e-5)
