"""Models of transformers, torchvision and torch under every strategy: tiny ones in float64, without dropout."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge_cluster.context_parallel import ContextParallel
from forge_cluster.expert_parallel import ExpertParallel
from forge_cluster.pipeline import Pipeline
from forge_cluster.zero import Zero
from forge_plugins import DDP, FSDP, Remat, TensorParallel
from tests.support.ranks import heard

WORDS, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 32, 8, 16, 32, 4, 4
SIZES = (4, 4, 3)
IGNORED = -100
EXACT, IN_FLOAT32 = 1e-11, 1e-6
"""What weights may differ by, relative to the largest one; for models that compute some layers in float32."""

Batch = dict[str, Tensor]


def drawn(seed: int, *shape: int, most: int = WORDS) -> Tensor:
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def real(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- batches ----------------------------------------------------------------------------------------------------------


def text(size: int, seed: int) -> Batch:
    """Sequences with padding at the end, whose labels do not count."""
    ids = drawn(seed, size, LENGTH)
    mask = torch.ones_like(ids)
    for row in range(size):
        mask[row, LENGTH - (row + seed) % 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def masked(size: int, seed: int) -> Batch:
    """Every third word is to be found."""
    batch = text(size, seed)
    kept = (torch.arange(size * LENGTH).view(size, LENGTH) + seed) % 3 != 0
    return {**batch, "labels": batch["labels"].masked_fill(kept, IGNORED)}


def rare(size: int, seed: int) -> Batch:
    """The first sample has all the labels."""
    batch = masked(size, seed)
    batch["labels"][1:] = IGNORED
    return batch


def shifted(size: int, seed: int) -> Batch:
    """Next words, shifted in the data; nothing is padded."""
    ids = drawn(seed, size, LENGTH + 1)
    labels = ids[:, 1:].clone()
    labels[0, 1:4] = IGNORED
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def pictures(size: int, seed: int, pixels: int = 8) -> Batch:
    return {"pixel_values": real(seed, size, 3, pixels, pixels), "labels": drawn(seed, size, most=6) - 3}


def large_pictures(size: int, seed: int) -> Batch:
    return pictures(size, seed, 48)


def sounds(size: int, seed: int) -> Batch:
    return {"input": real(seed, size, 8, 2 * LENGTH), "labels": drawn(seed, size, LENGTH)}


def described(size: int, seed: int) -> Batch:
    """Pictures with texts, and how well each pair fits."""
    tokens = drawn(seed, size, LENGTH)
    return {"input_ids": tokens, "pixel_values": real(seed, size, 3, 8, 8), "labels": real(seed + 9, size)}


def vectors(size: int, seed: int) -> Batch:
    return {"input": real(seed, size, LENGTH, WIDTH), "labels": drawn(seed, size, LENGTH)}


# -- tasks ------------------------------------------------------------------------------------------------------------


class Around(forge.TaskModule):
    """A model that computes its own loss, as those of transformers do; its output is returned as it is."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        torch.manual_seed(3)
        self.model = make().double()

    def training_step(self, batch: Batch) -> Any:
        return self.model(**batch)

    def validation_step(self, batch: Batch) -> Any:
        return self.training_step(batch)

    def num_items(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.05, momentum=0.9)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


class Causal(Around):
    """transformers shifts labels in the model: the first one of a sequence does not count."""

    def num_items(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())


class InTwoTypes(Causal):
    """Norms in float32, as models of bf16 have them."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__(make)
        for name, module in self.named_modules():
            if name.endswith("norm"):
                module.float()


class Placed(Around):
    """Positions by forge, and no mask, as context_parallel needs them."""

    def training_step(self, batch: Batch) -> Any:
        ids = batch["input_ids"]
        return self.loss(self.model(input_ids=ids, position_ids=forge.positions(ids)[None]).logits, batch)


class Paired(Around):
    """How well pictures fit their texts, a mean over samples: CLIP's own loss depends on the whole batch."""

    def training_step(self, batch: Batch) -> Any:
        found = self.model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
        return F.mse_loss(found.logits_per_text.diagonal(), batch["labels"])


class Tagged(Around):
    """A model that is called with tokens, or pictures, alone."""

    def training_step(self, batch: Batch) -> Any:
        return self.loss(self.model(next(iter(batch.values()))), batch)


class Read(Around):
    """A model without a head."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__(make)
        self.head = nn.Linear(WIDTH, WORDS, dtype=torch.float64)

    def hidden(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Batch) -> Any:
        return self.loss(self.head(self.hidden(next(iter(batch.values())))), batch)


class Encoded(Read):
    def hidden(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state


class Translated(Read):
    """nn.Transformer: two lists of blocks, and masks by name."""

    def hidden(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.model(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


class Recalled(Read):
    def hidden(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


# -- models -----------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "initializer_range": 0.2,
}
SPOKEN: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FEWER: dict[str, Any] = {**SHAPE, **SPOKEN, "num_key_value_heads": 2}
WITHOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
START: dict[str, Any] = {"decoder_start_token_id": 1}


def of_transformers(model: str, config: str, **options: Any) -> Any:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**options))
    if model.endswith(("ForCausalLM", "LMHeadModel")):
        made.loss_function = shifting_loss
    return made


def shifting_loss(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
    """The loss of transformers' language models, which rounds to float32 whatever the model has."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def causal(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: of_transformers(f"{kind}ForCausalLM", kind, **{**FEWER, **options})


def gpt2(checkpointed: bool = False) -> nn.Module:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    model = of_transformers("GPT2LMHeadModel", "GPT2", **SPOKEN, **sizes, **drops)
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def bert(kind: str = "BertForMaskedLM", frozen: bool = False) -> nn.Module:
    """BertModel has a pooler, which a loss of hidden states does not use."""
    model = of_transformers(kind, "Bert", **SHAPE, **SPOKEN, **WITHOUT, max_position_embeddings=LENGTH)
    if frozen:
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
    return model


def t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}
    return of_transformers("T5ForConditionalGeneration", "T5", **SPOKEN, **START, **sizes, dropout_rate=0.0)


def whisper() -> nn.Module:
    sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN}
    sound = {"num_mel_bins": 8, "max_source_positions": LENGTH, "dropout": 0.0, "decoder_attention_heads": HEADS}
    return of_transformers("WhisperModel", "Whisper", **SPOKEN, **START, **sizes, **sound).encoder


def vit() -> nn.Module:
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return of_transformers("ViTForImageClassification", "ViT", **SHAPE, **WITHOUT, **sizes)


def clip() -> nn.Module:
    """A parameter without a dimension, and two lists of blocks."""
    text = {**SHAPE, **SPOKEN, "max_position_embeddings": LENGTH}
    vision = {**SHAPE, "image_size": 8, "patch_size": 4}
    more = {"projection_dim": 8, "logit_scale_init_value": 0.0}
    return of_transformers("CLIPModel", "CLIP", text_config=text, vision_config=vision, **more)


def resnet(**options: Any) -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=3, **options)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True)


def from_tokens() -> nn.Module:
    """One Sequential, whose first layer gets tokens."""
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(layer() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS))


QKV = {"*.[qkv]_proj": "column", "*.o_proj": "row"}
ROTARY = {**QKV, "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
FC = {"*.fc1": "column", "*.fc2": "row"}
LINEAR = {"*.linear1": "column", "*.linear2": "row"}
BERT = {
    **dict.fromkeys(("*.query", "*.key", "*.value", "*.intermediate.dense"), "column"),
    **dict.fromkeys(("*.attention.output.dense", "*.layer.[0-9].output.dense"), "row"),
}
EAGER = {"num_local_experts": 4, "experts_implementation": "eager"}
"""The other implementation of experts takes no float64."""


@dataclass(frozen=True)
class Case:
    task: type[Around]
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    plan: dict[str, Any] = field(default_factory=dict)
    "What tensor_parallel divides."
    tolerance: float = EXACT


CASES: dict[str, Case] = {
    "gpt2": Case(Causal, gpt2, text),
    "checkpointed gpt2": Case(Causal, lambda: gpt2(checkpointed=True), text),
    "llama": Case(Causal, causal("Llama"), text, ROTARY),
    "llama in two types": Case(InTwoTypes, causal("Llama"), text, tolerance=IN_FLOAT32),
    "qwen2": Case(Causal, causal("Qwen2", tie_word_embeddings=True), text, ROTARY),
    "mistral": Case(Causal, causal("Mistral", sliding_window=4), text, ROTARY),
    "mixtral": Case(Causal, causal("Mixtral", **EAGER), text, QKV),
    "gemma2": Case(Causal, causal("Gemma2", head_dim=4, sliding_window=4), text, ROTARY, IN_FLOAT32),
    "mamba": Case(Causal, causal("Mamba", state_size=4), text, tolerance=IN_FLOAT32),
    "bert": Case(Around, bert, masked, BERT),
    "frozen bert": Case(Around, lambda: bert(frozen=True), masked, BERT),
    "pooled bert": Case(Encoded, lambda: bert("BertModel"), shifted),
    "rare labels": Case(Around, bert, rare),
    "t5": Case(Around, t5, text, {"*.wi": "column", "*.wo": "row"}),
    "whisper": Case(Encoded, whisper, sounds, FC),
    "vit": Case(Around, vit, pictures, {**QKV, **FC}),
    "clip": Case(Paired, clip, described, {"*.[qkv]_proj": "column", "*.out_proj": "row", **FC}),
    "resnet": Case(Tagged, resnet, large_pictures),
    "grouped resnet": Case(Tagged, lambda: resnet(norm_layer=lambda width: nn.GroupNorm(4, width)), large_pictures),
    "encoder": Case(Read, lambda: nn.TransformerEncoder(layer(), LAYERS), vectors, LINEAR),
    "transformer": Case(
        Translated,
        lambda: nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, 0.0, batch_first=True),
        vectors,
        LINEAR,
    ),
    "from tokens": Case(Tagged, from_tokens, shifted, LINEAR),
    "lstm": Case(Recalled, lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), vectors, {"head": "gather"}),
    "gpt2 without padding": Case(Placed, gpt2, shifted),
    "llama without padding": Case(Placed, causal("Llama"), shifted),
    "qwen2 without padding": Case(Placed, causal("Qwen2", tie_word_embeddings=True), shifted),
    "mixtral without padding": Case(Placed, causal("Mixtral", **EAGER), shifted),
    "bert without padding": Case(Placed, bert, shifted),
}

STRATEGIES: dict[str, tuple[int, Callable[[Case], list[Any]]]] = {
    "ddp": (2, lambda case: [DDP()]),
    "find_unused": (2, lambda case: [DDP(find_unused=True)]),
    "zero": (2, lambda case: [Zero()]),
    "zero 2": (2, lambda case: [Zero(stage=2)]),
    "fsdp": (2, lambda case: [FSDP()]),
    "fsdp, remat": (2, lambda case: [FSDP(), Remat()]),
    "hybrid": (4, lambda case: [FSDP(replicate=2)]),
    "tensor": (2, lambda case: [FSDP(), TensorParallel(2, plan=case.plan)]),
    "pipeline": (2, lambda case: [Pipeline(2)]),
    "interleaved, remat": (2, lambda case: [Pipeline(4, schedule="interleaved_1f1b"), Remat()]),
    "sharded pipeline": (4, lambda case: [Pipeline(2, stages=2, shard=True)]),
    "context": (2, lambda case: [DDP(), ContextParallel(balance=False)]),
    "experts": (2, lambda case: [DDP(), ExpertParallel()]),
    "sharded experts": (4, lambda case: [FSDP(), ExpertParallel(size=2)]),
}


# -- running ----------------------------------------------------------------------------------------------------------


def fit(name: str, strategy: str | None, plugins: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Train three updates and validate: all weights and buffers, metrics, and warnings."""
    case = CASES[name]
    task = case.task(case.make)
    several = STRATEGIES[strategy][1](case) if strategy is not None and "RANK" in os.environ else []
    data = [case.batch(size, seed) for seed, size in enumerate(SIZES)]
    with heard(logging.WARNING) as said:
        stack = [*several, *plugins]
        trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, plugins=stack)
        result = trainer.fit(task, data, data[-1:])
    weights = {key: value.detach().clone() for key, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "said": said}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, value in theirs.items():
        off = float((ours[name].double() - value.double()).abs().max())
        worst = max(worst, math.inf if math.isnan(off) else off / max(float(value.double().abs().max()), 1e-3))
    return worst
