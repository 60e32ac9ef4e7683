"""litgpt."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.draw import classes, loader
from benchmarks.lightning_modules.places import Package

PACKAGE = Package("litgpt==0.5.13", needs=("jsonargparse[signatures]",), alone=True)


def litgpt_tutorial() -> Any:
    """LitLLM of its tutorial: the GPT, its loss, a schedule with warm-up."""
    import lightning as L
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    class LitLLM(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = Config(block_size=16, vocab_size=32, padded_vocab_size=32, n_layer=2, n_head=2, n_embd=16)
            self.model = GPT(config)

        def on_train_start(self) -> None:
            self.model.apply(self.model._init_weights)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (ids,) = batch
            logits = self.model(ids[:, :-1])
            loss = chunked_cross_entropy(logits, ids[:, 1:])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0, betas=(0.9, 0.95))
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return LitLLM(), loader(classes(32, 16, 12)), None
