"""A causal language model of transformers over the speeches of tiny Shakespeare, byte by byte."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

import forge
from forge.data import Bucketed, Loader, Splits
from forge_recipes.shakespeare import find_text

Batch = dict[str, Tensor]

END, BYTES = 256, 257
"""The token after each speech, which also fills batches up, and how many tokens there are."""
IGNORED = -100
"""A label that transformers' losses leave out."""


class HFText(forge.TaskModule):
    """GPT-2 of transformers, made from sizes; or any causal model that was saved, from a name or folder.

    A step returns the model's own output: forge takes its loss.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 256,
        pretrained: str | None = None,
        lr: float = 1e-3,
        sample: int = 200,
    ):
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            raise forge.TaskError("hf_text needs transformers: pip install 'forge-trainer[hf]'") from error
        hf = cast(Any, transformers)
        if pretrained is None:
            ends = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
            sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": context}
            self.model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=BYTES, **sizes, **ends))
        else:
            self.model = hf.AutoModelForCausalLM.from_pretrained(pretrained)
        self.lr, self.sample = lr, sample

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    def training_step(self, batch: Batch) -> Any:
        return self.model(**batch)

    def validation_step(self, batch: Batch) -> Any:
        return self.model(**batch)

    def predict_step(self, batch: Batch) -> Tensor:
        return self(batch["input_ids"], batch["attention_mask"])

    def num_items(self, batch: Batch) -> int:
        """Return how many tokens are predicted: losses are means over these."""
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        return {"sample": forge.Text(f"```text\n{self.write(length=self.sample)}\n```")} if self.sample else {}

    def write(self, prompt: str = "ROMEO:\n", length: int = 200, seed: int = 0) -> str:
        """Return `prompt` continued by at most `length` bytes, with random numbers of its own."""
        device = next(self.parameters()).device
        tokens = torch.tensor([list(prompt.encode())], device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            whole = {"attention_mask": torch.ones_like(tokens), "pad_token_id": END}
            found = self.model.generate(tokens, do_sample=True, temperature=0.8, max_new_tokens=length, **whole)
        return decoded(found[0].tolist())


def decoded(tokens: list[int]) -> str:
    """Return the text of tokens."""
    return bytes(token for token in tokens if token < END).decode(errors="replace")


def speeches(root: str | None = None, batch_size: int = 32, longest: int = 256, count: int | None = None) -> Splits:
    """Load the speeches of tiny Shakespeare as bytes, each cut at `longest`, in batches of similar length.

    Of the first `count` speeches (default: all) the last tenth is for validation. The text is found as by the data set
    `shakespeare`.
    """
    text = find_text(root).read_text(encoding="utf-8")
    found = [[*speech.encode(), END][:longest] for speech in text.split("\n\n") if speech.strip()][:count]
    cut = len(found) - max(1, len(found) // 10)
    train, val = found[:cut], found[cut:]
    return Splits(
        train=Loader(train, batch_size, sampler=Bucketed([len(speech) for speech in train]), collate_fn=padded),
        val=Loader(val, batch_size, collate_fn=padded),
    )


def padded(speeches: list[list[int]]) -> Batch:
    """Fill speeches up to the longest, as a tokenizer's `pad` does; what is filled up is no target."""
    tokens = [torch.tensor(speech) for speech in speeches]
    mask = [torch.ones_like(speech) for speech in tokens]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(tokens, True, END),
        "attention_mask": pad(mask, True, 0),
        "labels": pad(tokens, True, IGNORED),
    }
