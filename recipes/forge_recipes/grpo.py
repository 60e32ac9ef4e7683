"""Group relative policy optimisation: a very small language model learns to add from a reward that is checked.

Nobody shows it an answer. For each sum it writes a group of answers; those that are right are rewarded, and each is
compared with the mean of its group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forge
from forge.data import Rollouts, Splits

LETTERS = "0123456789+=."
"""The alphabet; a full stop ends an answer."""
PROMPT = 4
"""Letters of `a+b=`."""
ANSWER = 3
"""Letters of an answer, at most: two digits and a full stop."""
END = LETTERS.index(".")

Batch = dict[str, Tensor]


class GRPO(forge.TaskModule):
    """A transformer over letters, and the clipped loss of a group's answers."""

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        clip: float = 0.2,
        entropy: float = 0.05,
        lr: float = 5e-4,
    ):
        super().__init__()
        self.clip, self.entropy, self.lr = clip, entropy, lr
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(PROMPT + ANSWER, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next letter."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.letters(text) + self.places.weight[:length]
        return self.head(self.body(x, mask=mask, is_causal=True))

    def answer(self, prompts: Tensor, greedily: bool = False) -> tuple[Tensor, Tensor]:
        """Write an answer to each prompt; return the texts and the log chances of their letters."""
        text, chances = prompts, []
        for _ in range(ANSWER):
            logp = F.log_softmax(self(text)[:, -1].float(), 1)
            letter = logp.argmax(1) if greedily else torch.multinomial(logp.exp(), 1).squeeze(1)
            chances.append(logp.gather(1, letter[:, None]))
            text = torch.cat([text, letter[:, None]], 1)
        return text, torch.cat(chances, 1)

    def collect(self, prompts: Tensor, sums: Tensor, group: int) -> Batch:
        """Write `group` answers to each prompt, and say how much better each is than its group."""
        device = self.head.weight.device
        text, logp = self.answer(prompts.to(device).repeat_interleave(group, 0))
        reward = is_right(text, sums.to(device).repeat_interleave(group)).float()
        groups = reward.view(-1, group)
        better = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return {"text": text, "logp": logp, "better": better.flatten(), "reward": reward}

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        text = batch["text"]
        answer = text[:, PROMPT:]
        every = F.log_softmax(self(text)[:, PROMPT - 1 : -1].float(), 2)
        logp = every.gather(2, answer[:, :, None]).squeeze(2)
        counts = until_end(answer).float()
        ratio, better = (logp - batch["logp"]).exp(), batch["better"][:, None]
        gain = torch.min(ratio * better, ratio.clamp(1 - self.clip, 1 + self.clip) * better)
        entropy = -(every.exp() * every).sum(2)  # a group of equal answers teaches nothing
        loss = -(((gain + self.entropy * entropy) * counts).sum(1) / counts.sum(1)).mean()
        return {"loss": loss, "reward": batch["reward"].mean(), "entropy": (entropy * counts).sum() / counts.sum()}

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        text, _ = self.answer(batch["prompt"], greedily=True)
        return {"right": is_right(text, batch["sum"]).float().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)


def until_end(answer: Tensor) -> Tensor:
    """Return which letters belong to an answer: those up to its first full stop."""
    return (answer == END).long().cumsum(1) - (answer == END).long() == 0


def is_right(text: Tensor, sums: Tensor) -> Tensor:
    """Return which answers are the sums, with a full stop behind them."""
    first, second, third = text[:, PROMPT:].unbind(1)
    short = (sums < 10) & (first == sums) & (second == END)
    long = (sums >= 10) & (first == sums // 10) & (second == sums % 10) & (third == END)
    return short | long


def sums(group: int = 16, batch_size: int = 400, epochs: int = 1) -> Splits:
    """All sums of two digits; each collection has a `group` of answers to every one of them."""
    a, b = torch.cartesian_prod(torch.arange(10), torch.arange(10)).unbind(1)
    plus, equals = (torch.full_like(a, LETTERS.index(sign)) for sign in "+=")
    prompts, right = torch.stack([a, plus, b, equals], 1), a + b
    return Splits(
        train=Rollouts(lambda task: task.collect(prompts, right, group), batch_size=batch_size, epochs=epochs),
        val=[{"prompt": prompts, "sum": right}],
    )
