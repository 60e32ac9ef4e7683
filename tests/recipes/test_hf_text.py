"""Models of transformers: their outputs as they are, the recipe hf_text, and folders for `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge
from forge_plugins import Accumulate
from forge_recipes.hf_text import END, IGNORED, HFText, decoded, padded, speeches
from forge_ship.engine import ExportError
from tests.support.profiles import some

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "context": 64, "sample": 0}
TEXT = "".join(f"ROMEO:\n{'O ' * (1 + at % 9)}night!\n\n" for at in range(40))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(TEXT)
    monkeypatch.setenv("FORGE_DATA", str(tmp_path))
    return tmp_path


def task(seed: int = 0, **options: Any) -> HFText:
    torch.manual_seed(seed)
    return HFText(**SIZES | options)


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    drawn = torch.randint(END, (count, 4, 12), generator=torch.Generator().manual_seed(1))
    lengths = [[12, 7, 9, 12], [5, 6, 12, 8], [3, 12, 12, 4], [12, 12, 12, 12]]
    return [
        padded([row[:length].tolist() for row, length in zip(batch, sizes, strict=True)])
        for batch, sizes in zip(drawn, lengths, strict=False)
    ]


def by_hand(model: nn.Module, data: list[dict[str, Tensor]], window: int = 1) -> None:
    """Train a plain model; a window of batches weighs each by its number of targets."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for start in range(0, len(data), window):
        part = data[start : start + window]
        counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in part]
        for batch, count in zip(part, counts, strict=True):
            (model(**batch).loss * (count / sum(counts))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("window", some([1, 2]))
def test_a_models_output_trains_as_by_hand(window: int) -> None:
    ours, theirs = task(), task().model
    for model in (ours.model, theirs):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    stack = [Accumulate(window)]
    fitted = forge.Trainer(max_epochs=1, plugins=stack, run_dir=False, device="cpu").fit(ours, batches(), batches())
    by_hand(theirs, batches(), window)
    for (name, found), expected in zip(ours.model.named_parameters(), theirs.parameters(), strict=True):
        if window == 1:
            assert torch.equal(found, expected), name
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert fitted.metrics.keys() >= {"train/loss", "val/loss"}
    assert not any("logits" in name for name in fitted.metrics)


@pytest.mark.slow
def test_batches_of_a_tokenizer_are_moved_and_counted() -> None:
    data = [transformers.BatchEncoding(batch) for batch in batches()]
    ends = [
        forge.Trainer(max_epochs=1, plugins=[], run_dir=False, device="cpu").fit(task(), d).metrics
        for d in (data, batches())
    ]
    assert ends[0] == ends[1]


def test_speeches_are_filled_up_to_the_longest(text: Path) -> None:
    splits = speeches(batch_size=4)
    for batch in [*splits.train, *splits.val]:
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        assert bool((mask.sum(1).max() == ids.shape[1]).item())
        assert torch.equal(labels == IGNORED, mask == 0)
        assert torch.equal(ids[mask == 1], labels[mask == 1])
    assert decoded([*b"ROMEO", END, END]) == "ROMEO"


@pytest.mark.slow
def test_the_recipe_trains_writes_a_text_and_ships_a_folder(text: Path, tmp_path: Path) -> None:
    options = {**SIZES, "sample": 8}
    recipe = forge.recipe("hf_text", [f"task.{name}={value}" for name, value in options.items()])
    assert recipe.task.name == "hf_text"
    splits = speeches(batch_size=8)
    made = task(sample=8)
    trainer = forge.Trainer(max_epochs=1, plugins=["jsonl"], run_dir=tmp_path / "run", device="cpu")
    trainer.fit(made, splits.train, splits.val)
    assert len(made.write(length=8)) > 0
    out = forge.export(made, to="pretrained", out=tmp_path / "shipped", data=splits.val)
    assert out.card["verification"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out.path)
    for (name, found), expected in zip(loaded.named_parameters(), made.model.parameters(), strict=True):
        assert torch.equal(found, expected), name
    assert json.loads((out.path / "forge.json").read_text()) == {"module": "model"}


def test_weights_beside_the_model_are_not_lost_in_silence(tmp_path: Path) -> None:
    class WithHead(HFText):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self.head = nn.Linear(2, 2)

    with pytest.raises(ExportError, match=r"has weights beside model, which would be lost: head.weight, head.bias"):
        forge.export(WithHead(**SIZES), to="pretrained", out=tmp_path / "shipped", data=batches())
    assert not [*(tmp_path / "shipped").rglob("*")]
