"""LoRA by peft: an export writes the adapters alone, or merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forge

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


class Writer(forge.TaskModule):
    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.model = forge.adapter(
            peft.get_peft_model(
                base(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
            )
        )

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids).logits

    def training_step(self, batch: Any) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Any) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def base() -> Any:
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(16, (4, 8), generator=generator) for _ in range(6)]


def fitted() -> Writer:
    torch.manual_seed(2)
    task = Writer()
    trainer = forge.Trainer(plugins=[], max_updates=6, seed=0, device="cpu", run_dir=False)
    trainer.fit(task, batches(), batches()[:2])
    return task


def test_an_export_writes_the_adapters_for_peft(tmp_path: Path) -> None:
    task = fitted()
    made = forge.export(task, to="pretrained", out=tmp_path / "adapters", data=batches()[:2])
    assert sorted(p.suffix for p in Path(made.path).iterdir() if p.suffix == ".safetensors") == [".safetensors"]
    again = peft.PeftModel.from_pretrained(base(), made.path).eval()
    x = batches()[0]
    with torch.no_grad():
        assert torch.equal(again(input_ids=x).logits, task.eval().model(input_ids=x).logits)


def test_merged_it_is_a_model_of_transformers(tmp_path: Path) -> None:
    task = fitted()
    made = forge.export(task, to="pretrained", out=tmp_path / "merged", data=batches()[:2], merge=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(made.path).eval()
    x = batches()[0]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=x).logits, task.eval().model(input_ids=x).logits)
    assert any("lora_" in name for name in task.state_dict())


def test_a_task_without_adapters_has_nothing_to_merge(tmp_path: Path) -> None:
    from forge.testing import TinyTask, tiny_batches

    with pytest.raises(forge.ForgeError, match=r"--merge: TinyTask has no model with adapters to merge"):
        forge.export(TinyTask(), to="safetensors", out=tmp_path / "a", data=tiny_batches(), merge=True)
