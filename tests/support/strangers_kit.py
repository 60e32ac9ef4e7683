"""Models of transformers, torchvision and torch under every strategy: tiny ones, without dropout."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge_plugins import DDP, FSDP, ContextParallel, Pipeline, Remat, TensorParallel, Zero

WORDS, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 32, 8, 16, 32, 4, 4
SIZES = (4, 4, 3)
IGNORED = -100


def drawn(seed: int, *shape: int, most: int = WORDS) -> Tensor:
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def real(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- batches ----------------------------------------------------------------------------------------------------------


def text(size: int, seed: int) -> dict[str, Tensor]:
    """Sequences with padding at the end, whose labels do not count."""
    ids = drawn(seed, size, LENGTH)
    mask = torch.ones_like(ids)
    for row in range(size):
        mask[row, LENGTH - (row + seed) % 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def masked(size: int, seed: int) -> dict[str, Tensor]:
    """Every third word is to be found."""
    batch = text(size, seed)
    kept = (torch.arange(size * LENGTH).view(size, LENGTH) + seed) % 3 != 0
    return {**batch, "labels": batch["labels"].masked_fill(kept, IGNORED)}


def rare(size: int, seed: int) -> dict[str, Tensor]:
    """One sample has all the labels."""
    batch = masked(size, seed)
    batch["labels"][1:] = IGNORED
    return batch


def shifted(size: int, seed: int) -> dict[str, Tensor]:
    """Next words, shifted in the data; nothing is padded."""
    ids = drawn(seed, size, LENGTH + 1)
    targets = ids[:, 1:].clone()
    targets[0, 1:4] = IGNORED
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets}


def pictures(size: int, seed: int) -> dict[str, Tensor]:
    return {"pixel_values": real(seed, size, 3, 8, 8), "labels": drawn(seed, size, most=6) - 3}


def large_pictures(size: int, seed: int) -> dict[str, Tensor]:
    return {**pictures(size, seed), "pixel_values": real(seed, size, 3, 64, 64)}


def sounds(size: int, seed: int) -> dict[str, Tensor]:
    return {"input_features": real(seed, size, 8, 16), "targets": drawn(seed, size, LENGTH)}


def vectors(size: int, seed: int) -> dict[str, Tensor]:
    return {"src": real(seed, size, LENGTH, WIDTH), "targets": drawn(seed, size, LENGTH)}


# -- tasks ------------------------------------------------------------------------------------------------------------


class Around(forge.TaskModule):
    """A model that computes its own loss, as those of transformers do; its output is returned as it is."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        torch.manual_seed(3)
        self.model = make().double()

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


class Causal(Around):
    """transformers shifts labels in the model: the first one of a sequence does not count."""

    def num_items(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())


class Marked(Around):
    def num_items(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())


class Placed(Around):
    """Positions by forge, targets shifted in the data, as context_parallel needs them."""

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        ids = batch["input_ids"]
        logits = self.model(input_ids=ids, position_ids=forge.positions(ids)[None], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def num_items(self, batch: dict[str, Tensor]) -> int:
        return int((batch["targets"] != IGNORED).sum())


class Unmasked(Placed):
    """An encoder without a mask."""

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        ids = batch["input_ids"]
        logits = self.model(input_ids=ids, position_ids=forge.positions(ids)[None]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Read(Around):
    """A model without a loss, and a head that names the word of each position."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__(make)
        self.head = nn.Linear(WIDTH, WORDS, dtype=torch.float64)

    def hidden(self, batch: dict[str, Tensor]) -> Any:
        return self.model(batch["src"])

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return F.cross_entropy(self.head(self.hidden(batch)).flatten(0, 1), batch["targets"].flatten())


class Tagged(Around):
    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())

    def num_items(self, batch: dict[str, Tensor]) -> int:
        return int((batch["targets"] != IGNORED).sum())


class Pooled(Read):
    def hidden(self, batch: dict[str, Tensor]) -> Any:
        return self.model(input_ids=batch["input_ids"]).last_hidden_state

    def num_items(self, batch: dict[str, Tensor]) -> int:
        return int((batch["targets"] != IGNORED).sum())


class Heard(Read):
    def hidden(self, batch: dict[str, Tensor]) -> Any:
        return self.model(batch["input_features"]).last_hidden_state


class Translated(Read):
    """nn.Transformer: two lists of blocks, and masks by name."""

    def hidden(self, batch: dict[str, Tensor]) -> Any:
        x = batch["src"]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.model(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


class Recalled(Read):
    def hidden(self, batch: dict[str, Tensor]) -> Any:
        return self.model(batch["src"])[0]


class Seen(Around):
    """A classifier of torchvision."""

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return F.cross_entropy(self.model(batch["pixel_values"]), batch["labels"])


# -- models -----------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "initializer_range": 0.2,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
SPOKEN: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FEWER: dict[str, Any] = {**SHAPE, **SPOKEN, "num_key_value_heads": 2}
WITHOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_transformers(kind: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('LMHeadModel')}Config")
    model = getattr(transformers, kind)(config(**options))
    if "CausalLM" in kind or "LMHead" in kind:
        model.loss_function = shifting_loss
    return model


def shifting_loss(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
    """The loss of transformers' language models, which takes float32 whatever the model has."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt2() -> nn.Module:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "initializer_range": 0.2}
    return of_transformers("GPT2LMHeadModel", **SPOKEN, **sizes, **drops)


def frozen_bert() -> nn.Module:
    model: Any = bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    return model


def bert() -> nn.Module:
    return of_transformers("BertForMaskedLM", **SHAPE, **SPOKEN, **WITHOUT, max_position_embeddings=LENGTH)


def t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}
    start = {**SPOKEN, "decoder_start_token_id": 0}
    return of_transformers("T5ForConditionalGeneration", **start, **sizes, dropout_rate=0.0)


def whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN}
    sound = {"num_mel_bins": 8, "max_source_positions": LENGTH, "dropout": 0.0, "decoder_start_token_id": 1}
    return WhisperEncoder(WhisperConfig(**SPOKEN, **sizes, **sound))


def vit() -> nn.Module:
    return of_transformers("ViTForImageClassification", **SHAPE, **WITHOUT, image_size=8, patch_size=4, num_labels=3)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(8, 4, LAYERS, HEADS, WIDTH, HIDDEN, num_classes=3)
    nn.init.normal_(model.heads.head.weight)  # torchvision begins with zeros, which no gradient passes
    return model


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=3)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS)


def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, 0.0, batch_first=True)


def llama() -> nn.Module:
    return of_transformers("LlamaForCausalLM", **FEWER)


def qwen2() -> nn.Module:
    return of_transformers("Qwen2ForCausalLM", **FEWER, tie_word_embeddings=True)


def mistral() -> nn.Module:
    return of_transformers("MistralForCausalLM", **FEWER, sliding_window=4)


def mixtral() -> nn.Module:
    # the default implementation of experts takes no float64
    return of_transformers("MixtralForCausalLM", **FEWER, num_local_experts=4, experts_implementation="eager")


def opt() -> nn.Module:
    """Blocks that return tuples."""
    sizes = {"hidden_size": WIDTH, "ffn_dim": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return of_transformers(
        "OPTForCausalLM", **SPOKEN, **sizes, word_embed_proj_dim=WIDTH, dropout=0.0, max_position_embeddings=LENGTH
    )


def checkpointed_gpt2() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable()
    return model


def pooled_bert() -> nn.Module:
    """A pooler that the loss does not use."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SHAPE, **SPOKEN, **WITHOUT, max_position_embeddings=LENGTH))


def from_tokens() -> nn.Module:
    """torch's layers in one Sequential, the first of which gets tokens."""
    blocks = [nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def lstm() -> nn.Module:
    return nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)


ROTARY = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
}


BERT = {
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.layer.[0-9].output.dense": "row",
}


@dataclass(frozen=True)
class Case:
    task: type[Around]
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    plan: dict[str, Any] = field(default_factory=dict)
    "What tensor_parallel divides."
    tolerance: float = 1e-11
    sizes: tuple[int, ...] = SIZES


CASES: dict[str, Case] = {
    "gpt2": Case(Causal, gpt2, text),
    "llama": Case(Causal, llama, text, ROTARY),
    "qwen2": Case(Causal, qwen2, text, ROTARY),
    "mistral": Case(Causal, mistral, text, ROTARY),
    "mixtral": Case(Causal, mixtral, text, {"*.[qkv]_proj": "column", "*.o_proj": "row"}),
    "bert": Case(Marked, bert, masked, BERT),
    "frozen bert": Case(Marked, frozen_bert, masked, BERT),
    "t5": Case(Marked, t5, text, {"*.wi": "column", "*.wo": "row"}),
    "whisper": Case(Heard, whisper, sounds, {"*.fc1": "column", "*.fc2": "row"}),
    "vit": Case(
        Around, vit, pictures, {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"}
    ),
    "torchvision vit": Case(Seen, torchvision_vit, pictures, {"*.mlp.0": "column", "*.mlp.3": "row"}),
    "resnet": Case(Seen, resnet, large_pictures, sizes=(8, 8, 8)),
    "encoder": Case(Read, encoder, vectors, {"*.linear1": "column", "*.linear2": "row"}),
    "transformer": Case(Translated, transformer, vectors, {"*.linear1": "column", "*.linear2": "row"}),
    "lstm": Case(Recalled, lstm, vectors, {"head": "gather"}),
    "opt": Case(Causal, opt, text, {"*.fc1": "column", "*.fc2": "row"}),
    "checkpointed gpt2": Case(Causal, checkpointed_gpt2, text),
    "pooled bert": Case(Pooled, pooled_bert, shifted),
    "from tokens": Case(Tagged, from_tokens, shifted),
    "rare labels": Case(Marked, bert, rare),
    "gpt2 placed": Case(Placed, gpt2, shifted),
    "llama placed": Case(Placed, llama, shifted),
    "qwen2 placed": Case(Placed, qwen2, shifted),
    "mixtral placed": Case(Placed, mixtral, shifted),
    "mistral placed": Case(Placed, mistral, shifted),
    "bert placed": Case(Unmasked, bert, shifted),
}

STRATEGIES: dict[str, tuple[int, Callable[[Case], list[Any]]]] = {
    "ddp": (2, lambda case: [DDP()]),
    "zero": (2, lambda case: [Zero()]),
    "zero 2": (2, lambda case: [Zero(stage=2)]),
    "fsdp": (2, lambda case: [FSDP()]),
    "hybrid": (4, lambda case: [FSDP(replicate=2)]),
    "tensor": (2, lambda case: [FSDP(), TensorParallel(2, plan=case.plan)]),
    "pipeline": (2, lambda case: [Pipeline(2)]),
    "sharded pipeline": (4, lambda case: [Pipeline(2, stages=2, shard=True)]),
    "zbv": (2, lambda case: [Pipeline(4, schedule="zbv")]),
    "interleaved": (2, lambda case: [Pipeline(4, schedule="interleaved_1f1b")]),
    "remat": (2, lambda case: [Pipeline(2), Remat()]),
    "context": (2, lambda case: [ContextParallel(balance=False)]),
}


def start(name: str) -> dict[str, Tensor]:
    case = CASES[name]
    return {key: value.detach().clone() for key, value in case.task(case.make).state_dict().items()}


def fit(name: str, strategy: str | None, **options: Any) -> dict[str, Tensor]:
    """Train three updates, and a validation; return all weights and buffers."""
    case = CASES[name]
    task = case.task(case.make)
    task.validation_step = task.training_step  # pyright: ignore[reportAttributeAccessIssue]
    plugins = STRATEGIES[strategy][1](case) if strategy is not None and "RANK" in os.environ else []
    data = [case.batch(size, seed) for seed, size in enumerate(case.sizes)]
    trainer = forge.Trainer(max_epochs=1, seed=0, device="cpu", run_dir=False, plugins=plugins, **options)
    trainer.fit(task, data)
    return {key: value.detach().clone() for key, value in task.state_dict().items()}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, value in theirs.items():
        off = float((ours[name].double() - value.double()).abs().max())
        worst = max(worst, off / max(float(value.double().abs().max()), 1e-3), math.inf if off != off else 0.0)
    return worst
