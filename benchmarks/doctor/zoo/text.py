"""Text models of transformers in tiny configurations, with attention masks and ignored labels of -100."""

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import forge
from benchmarks.doctor.zoo.common import (
    Entry,
    Labelled,
    OwnLoss,
    accuracy,
    adamw,
    dict_loaders,
    generator,
    tensor_loaders,
    topics,
    walks,
)
from forge.data import Splits

MODELS: dict[str, Entry] = {}
WORDS = 32
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


class Tokens(Labelled):
    """A model with one prediction per token; a batch counts by its labelled tokens."""

    def num_items(self, batch):
        return (batch["labels"] != -100).sum()


class Causal(OwnLoss):
    """A language model: the model itself shifts the labels by one."""

    def num_items(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()


def topic_data() -> Splits:
    tokens, mask, labels = topics(vocabulary=WORDS)
    return dict_loaders({"input_ids": tokens, "attention_mask": mask, "labels": labels})


def lengths_of(count: int, length: int, seed: int) -> Tensor:
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator(seed))
    return (torch.arange(length) < lengths[:, None]).long()


def walk_data(padded: bool = True, length: int = 16) -> Splits:
    """For language models: the labels are the tokens, and -100 where there is padding."""
    tokens = walks(240, length, WORDS)
    mask = lengths_of(240, length, 1) if padded else torch.ones_like(tokens)
    labels = tokens.masked_fill(mask == 0, -100)
    return dict_loaders({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})


def masked_data() -> Splits:
    """BERT's recipe: of 15 % of the tokens 80 % are masked, 10 % random, 10 % kept; only they have labels."""
    g = generator(2)
    tokens, mask = walks(400, 16, WORDS), lengths_of(400, 16, 1)
    chosen = (torch.rand(tokens.shape, generator=g) < 0.15) & (mask == 1)
    chosen[:, 1] = True
    fate = torch.rand(tokens.shape, generator=g)
    shown = torch.where(chosen & (fate < 0.8), 3, tokens)
    shown = torch.where(chosen & (fate >= 0.9), torch.randint(4, WORDS, tokens.shape, generator=g), shown)
    labels = tokens.masked_fill(~chosen, -100)
    return dict_loaders({"input_ids": shown * mask, "attention_mask": mask, "labels": labels})


def translation_data() -> Splits:
    """Copy a sentence with every word replaced by its translation."""
    tokens, mask = walks(240, 10, WORDS), lengths_of(240, 10, 1)
    target = 4 + (tokens * 5 + 3) % (WORDS - 4)
    target = torch.where(mask.bool(), target, -100)
    return dict_loaders({"input_ids": tokens * mask, "attention_mask": mask, "labels": target})


def add(name: str, task: type[OwnLoss], model: str, data: Callable[[], Splits], lr: float = 2e-3, **options) -> None:
    config = re.sub(r"(For[A-Z]|LMHead).*", "Config", model)
    MODELS[name] = lambda: (task(getattr(hf, model)(getattr(hf, config)(**options)), lr), data())


three = SMALL | {"num_labels": 3, "initializer_range": 0.1}
special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
grouped = SMALL | {"num_key_value_heads": 2} | special
small_distil = {"vocab_size": WORDS, "initializer_range": 0.1, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
small_gpt = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
small_opt = {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"ffn_dim": 64, "word_embed_proj_dim": 32}
small_t5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
small_bart = {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 32, "decoder_start_token_id": 2} | {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}
sparse_t5 = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
marks = {"cls_token_id": 1, "sep_token_id": 2} | special
both = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

add("bert_classify", Labelled, "BertForSequenceClassification", topic_data, **three)
add("bert_masked_lm", Tokens, "BertForMaskedLM", masked_data, **SMALL)
add("roberta_classify", Labelled, "RobertaForSequenceClassification", topic_data, **three, pad_token_id=0)
add("electra_classify", Labelled, "ElectraForSequenceClassification", topic_data, embedding_size=16, **three)
add("albert_shared_layers", Labelled, "AlbertForSequenceClassification", topic_data, embedding_size=16, **three)
add("deberta_classify", Labelled, "DebertaV2ForSequenceClassification", topic_data, **both, **three)
add("fnet_fourier", Labelled, "FNetForSequenceClassification", lambda: without_mask(topic_data()), **three)
add("modernbert_classify", Labelled, "ModernBertForSequenceClassification", topic_data, **marks, **three)
add("distilbert_classify", Labelled, "DistilBertForSequenceClassification", topic_data, num_labels=3, **small_distil)
add("gpt2_tied", Causal, "GPT2LMHeadModel", walk_data, **small_gpt)
add(
    "gpt2_classify_last_token",
    Labelled,
    "GPT2ForSequenceClassification",
    topic_data,
    **small_gpt,
    num_labels=3,
    pad_token_id=0,
)
add("llama_grouped_queries", Causal, "LlamaForCausalLM", walk_data, **grouped)
add("mistral_window", Causal, "MistralForCausalLM", walk_data, sliding_window=8, **grouped)
add("qwen2_tied", Causal, "Qwen2ForCausalLM", walk_data, tie_word_embeddings=True, **grouped)
add("gemma2_softcap", Causal, "Gemma2ForCausalLM", walk_data, head_dim=8, sliding_window=8, **grouped)
add("mixtral_top2", Causal, "MixtralForCausalLM", walk_data, **experts, **grouped)
add("opt_relu", Causal, "OPTForCausalLM", walk_data, **small_opt, **special)
add("gpt_neox_parallel", Causal, "GPTNeoXForCausalLM", walk_data, **SMALL)
add(
    "bloom_alibi",
    Causal,
    "BloomForCausalLM",
    walk_data,
    vocab_size=WORDS,
    hidden_size=32,
    n_layer=2,
    n_head=4,
    **special,
)
small_mamba = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8} | special
add("mamba", Causal, "MambaForCausalLM", lambda: without_mask(walk_data(padded=False)), **small_mamba)
start = {"decoder_start_token_id": 0}
add("t5_translate", Tokens, "T5ForConditionalGeneration", translation_data, 5e-3, **small_t5, **start)
switch = small_t5 | sparse_t5 | start
add("switch_top1_experts", Tokens, "SwitchTransformersForConditionalGeneration", translation_data, 5e-3, **switch)
bart = small_bart | special | {"encoder_layerdrop": 0.1, "forced_eos_token_id": 2}
add("bart_translate", Tokens, "BartForConditionalGeneration", translation_data, **bart)


def without_mask(splits: Splits) -> Splits:
    """For models that take no attention mask."""
    for loader in (splits.train, splits.val):
        for sample in loader.dataset.samples:
            del sample["attention_mask"]
    return splits


def tags():
    """A tag per word; padding and the first token of a sentence have the label -100."""
    tokens, mask, _ = topics(vocabulary=WORDS)
    previous = torch.roll(tokens, 1, 1)
    labels = (tokens // 7 + (previous > tokens)) % 4
    labels = labels.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    data = dict_loaders({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return Tokens(hf.BertForTokenClassification(hf.BertConfig(**SMALL, num_labels=4)), 2e-3), data


class Spans(OwnLoss):
    """Extractive question answering: where does the marked span begin and end?"""

    def training_step(self, batch):
        out = self(batch)
        right = out.start_logits.argmax(-1) == batch["start_positions"]
        return {"loss": out.loss, "start_accuracy": right.float().mean()}

    validation_step = training_step


def spans():
    g = generator(5)
    tokens = torch.randint(8, WORDS, (320, 16), generator=g)
    start = torch.randint(1, 8, (320,), generator=g)
    end = start + torch.randint(1, 7, (320,), generator=g)
    rows = torch.arange(320)
    tokens[:, 0], tokens[rows, start], tokens[rows, end] = 1, 4, 5
    columns = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "start_positions": start}
    model = hf.BertForQuestionAnswering(hf.BertConfig(**SMALL))
    return Spans(model, 2e-3), dict_loaders(columns | {"end_positions": end})


def labels_of_several():
    """Multi-label: which of four words are in the text?"""
    tokens, mask, _ = topics(400, vocabulary=WORDS)
    labels = torch.stack([(tokens == word).any(1) for word in (5, 8, 20, 27)], 1).float()
    model = hf.BertForSequenceClassification(
        hf.BertConfig(**SMALL, num_labels=4, problem_type="multi_label_classification")
    )
    return OwnLoss(model, 2e-3), dict_loaders({"input_ids": tokens, "attention_mask": mask, "labels": labels})


class Instructed(forge.TaskModule):
    """Fine-tuning on answers alone: the prompt has the label -100; the loss is a sum divided by the answer's tokens."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.model = hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=tokens, attention_mask=mask).logits

    def training_step(self, batch):
        logits = self(batch["input_ids"], batch["attention_mask"])[:, :-1]
        labels = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return {"loss": total / self.num_items(batch), "accuracy": accuracy(logits, labels)}

    validation_step = training_step

    def num_items(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        free = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": free, "weight_decay": 0.0}], lr=self.lr)


def instructed():
    """Left-padded prompts; the answer repeats the prompt's second half."""
    tokens = walks(240, 12, WORDS)
    answer = tokens[:, 6:]
    whole = torch.cat([tokens, torch.full((240, 1), 2), answer], 1)
    labels = whole.clone()
    labels[:, :13] = -100
    missing = torch.randint(0, 5, (240,), generator=generator(3))
    mask = (torch.arange(whole.size(1)) >= missing[:, None]).long()
    return Instructed(), dict_loaders({"input_ids": whole * mask, "attention_mask": mask, "labels": labels})


class Preferred(forge.TaskModule):
    """DPO: a policy learns from pairs of answers against a frozen copy of its start; the first loss is log 2."""

    def __init__(self, beta: float = 0.5, lr: float = 5e-4):
        super().__init__()
        self.beta, self.lr = beta, lr
        config = hf.GPT2Config(**(small_gpt | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}))
        self.policy = hf.GPT2LMHeadModel(config)
        self.reference = hf.GPT2LMHeadModel(config)
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(False)

    @staticmethod
    def score(model: nn.Module, tokens: Tensor) -> Tensor:
        scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, 5:].sum(1)

    def forward(self, better: Tensor, worse: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.score(self.reference, better) - self.score(self.reference, worse)
        return self.beta * (self.score(self.policy, better) - self.score(self.policy, worse) - before)

    def training_step(self, batch):
        margin = self(*batch)
        return {"loss": -F.logsigmoid(margin).mean(), "preferred": (margin > 0).float().mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.policy.parameters(), self.lr, 0.0)


def preferred():
    better = walks(240, 12, WORDS)
    worse = better.clone()
    worse[:, 6:] = torch.randint(4, WORDS, (240, 6), generator=generator(8))
    return Preferred(), tensor_loaders(better, worse)


MODELS["bert_tags_ignored_labels"] = tags
MODELS["bert_spans"] = spans
MODELS["bert_multi_label"] = labels_of_several
MODELS["llama_answers_only"] = instructed
MODELS["gpt2_dpo_frozen_reference"] = preferred
