"""Images, sound, series and pairs of them: models of transformers in tiny configurations."""

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import forge
from benchmarks.doctor.zoo.common import (
    Labelled,
    OwnLoss,
    accuracy,
    adamw,
    dict_loaders,
    generator,
    gratings,
    rectangles,
    registry,
    walks,
)
from forge.data import Splits

MODELS, entry = registry()
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

SPECIAL = {"bos_token_id": 1, "pad_token_id": 0}
HEARS = SMALL | {"conv_dim": (32, 32, 32), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


def images_with_labels() -> Splits:
    images, labels = gratings(240, 32)
    return dict_loaders({"pixel_values": images, "labels": labels})


@entry
def hf_vit():
    config = hf.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=4)
    return Labelled(hf.ViTForImageClassification(config), 2e-3), images_with_labels()


@entry
def hf_dinov2():
    config = hf.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=4
    )
    return Labelled(hf.Dinov2ForImageClassification(config), 2e-3), images_with_labels()


@entry
def hf_segformer():
    """Pixels at the border of an object are not labelled: 255."""
    images, masks, _, _ = rectangles(96, 64)
    border = F.max_pool2d(masks[:, None].float(), 3, 1, 1) != -F.max_pool2d(-masks[:, None].float(), 3, 1, 1)
    masks = masks.masked_fill(border[:, 0], 255)
    sizes = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
    config = hf.SegformerConfig(**sizes, decoder_hidden_size=32, num_labels=3, semantic_loss_ignore_index=255)
    data = dict_loaders({"pixel_values": images, "labels": masks}, val=16, batch_size=8)
    return OwnLoss(hf.SegformerForSemanticSegmentation(config), 1e-3), data


class MaskedImages(OwnLoss):
    """Validation masks the same patches every time."""

    def __init__(self, model: hf.ViTMAEForPreTraining, lr: float):
        super().__init__(model, lr)
        patches = (model.config.image_size // model.config.patch_size) ** 2
        self.register_buffer("fixed_noise", torch.rand(1, patches, generator=generator(1)))

    def validation_step(self, batch):
        noise = self.fixed_noise.expand(len(batch["pixel_values"]), -1)
        return {"loss": self.model(**batch, noise=noise).loss}


@entry
def hf_vit_mae():
    decoder = {f"decoder_{key}": value for key, value in (SMALL | {"num_hidden_layers": 1}).items()}
    config = hf.ViTMAEConfig(**SMALL, **decoder, image_size=32, patch_size=8, norm_pix_loss=True)
    images, _ = gratings(240, 32, noise=0.2)
    model = hf.ViTMAEForPreTraining(config)
    with torch.no_grad():  # transformers 5.22 leaves the positions of a new model at zero
        model.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False
        model.vit.embeddings.initialize_weights()
        model.decoder.initialize_weights(16)
        model.decoder.mask_token.normal_(std=0.02)
    return MaskedImages(model, 2e-3), dict_loaders({"pixel_values": images})


class Paired(OwnLoss):
    """Pictures and texts: each must find its partner in the batch."""

    def training_step(self, batch):
        out = self.model(**batch, return_loss=True)
        partners = torch.arange(len(out.logits_per_image))
        return {"loss": out.loss, "found": accuracy(out.logits_per_image, partners)}

    validation_step = training_step


def captions(labels: Tensor) -> Tensor:
    g = generator(4)
    text = torch.randint(20, 28, (len(labels), 8), generator=g)
    text[:, 0], text[:, 3], text[:, -1] = 1, 4 + labels, 31
    return text


@entry
def hf_clip():
    images, labels = gratings(320, 32, classes=12)
    config = hf.CLIPConfig(
        text_config={**SMALL, "vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 31, **SPECIAL},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    data = dict_loaders({"input_ids": captions(labels), "pixel_values": images})
    return Paired(hf.CLIPModel(config), 2e-3), data


@entry
def hf_siglip():
    images, labels = gratings(320, 32, classes=12)
    config = hf.SiglipConfig(
        text_config={**SMALL, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 31, **SPECIAL},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
    )
    data = dict_loaders({"input_ids": captions(labels), "pixel_values": images})
    return Paired(hf.SiglipModel(config), 2e-3), data


def tones(count: int, letters: int, seconds: int, seed: int) -> tuple[Tensor, Tensor]:
    """A tone per letter, one after another."""
    g = generator(seed)
    words = torch.randint(letters, (count, seconds), generator=g)
    time = torch.arange(320) / 320
    pitch = 8.0 * 1.5**words
    waves = torch.sin(2 * torch.pi * pitch[:, :, None] * time).flatten(1)
    waves = waves + 0.1 * torch.randn(waves.shape, generator=g)
    return (waves - waves.mean(1, keepdim=True)) / waves.std(1, keepdim=True), words


@entry
def wav2vec2_ctc():
    waves, words = tones(120, 5, 5, 2)
    ears = HEARS | {"conv_stride": (5, 4, 2), "conv_kernel": (10, 8, 4), "pad_token_id": 0, "layerdrop": 0.05}
    config = hf.Wav2Vec2Config(**ears, vocab_size=6, ctc_loss_reduction="mean", mask_time_prob=0.05, mask_time_length=2)
    labels = words + 1
    labels[torch.rand(120, generator=generator(3)) < 0.3, -1] = -100
    data = dict_loaders({"input_values": waves, "labels": labels}, val=24, batch_size=8)
    return OwnLoss(hf.Wav2Vec2ForCTC(config), 1e-3), data


@entry
def hubert_classify():
    waves, words = tones(160, 4, 1, 2)
    ears = HEARS | {"conv_stride": (5, 2, 2), "conv_kernel": (10, 4, 2)}
    config = hf.HubertConfig(**ears, num_labels=4, classifier_proj_size=16, mask_time_prob=0.0)
    data = dict_loaders({"input_values": waves, "labels": words[:, 0]}, val=32)
    return Labelled(hf.HubertForSequenceClassification(config), 2e-3), data


@entry
def whisper_tiny():
    """Mel frames to words. The positions of the encoder are fixed sinusoids."""
    words = walks(200, 6, 16)
    codes = torch.randn(16, 8, generator=generator(6))
    frames = codes[words].repeat_interleave(4, 1).transpose(1, 2)
    frames = frames + 0.2 * torch.randn(frames.shape, generator=generator(7))
    layers = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in layers.items()}
    sizes = {"vocab_size": 16, "num_mel_bins": 8, "d_model": 32, "max_source_positions": 12, "max_target_positions": 16}
    config = hf.WhisperConfig(**sizes, **sides, decoder_start_token_id=1, eos_token_id=2, **SPECIAL)
    data = dict_loaders({"input_features": frames, "labels": words})
    return Labelled(hf.WhisperForConditionalGeneration(config), 3e-3), data


@entry
def patchtst_forecast():
    g = generator(9)
    time = torch.arange(40)[None, :, None] + 60 * torch.rand(240, 1, 1, generator=g)
    series = torch.sin(time * torch.tensor([0.3, 0.5])) + 0.1 * torch.randn(240, 40, 2, generator=g)
    sizes = {"d_model": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 64, "num_input_channels": 2}
    lengths = {"context_length": 32, "prediction_length": 8, "patch_length": 4, "patch_stride": 4}
    config = hf.PatchTSTConfig(**sizes, **lengths, loss="mse")
    data = dict_loaders({"past_values": series[:, :32], "future_values": series[:, 32:]})
    return OwnLoss(hf.PatchTSTForPrediction(config), 2e-3), data


class Decisions(forge.TaskModule):
    """A decision transformer: from wanted returns and states to actions; only real steps count."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        sizes = {"state_dim": 3, "act_dim": 2, "hidden_size": 32, "n_layer": 2, "n_head": 2, "max_ep_len": 16}
        self.model = hf.DecisionTransformerModel(hf.DecisionTransformerConfig(**sizes, action_tanh=True))

    def forward(self, batch):
        given = {name: batch[name] for name in ("states", "actions", "timesteps")}
        wanted = {"rewards": batch["returns"], "returns_to_go": batch["returns"]}
        return self.model(**given, **wanted, attention_mask=batch["mask"]).action_preds

    def training_step(self, batch):
        errors = (self(batch) - batch["actions"]).square().mean(-1)
        return (errors * batch["mask"]).sum() / batch["mask"].sum()

    validation_step = training_step

    def num_items(self, batch):
        return batch["mask"].sum()

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def decision_transformer():
    g = generator(11)
    states = torch.randn(240, 8, 3, generator=g)
    skill = torch.rand(240, 1, 1, generator=g)
    best = torch.tanh(states @ torch.randn(3, 2, generator=g))
    actions = skill * best + (1 - skill) * (2 * torch.rand(240, 8, 2, generator=g) - 1)
    rewards = 1 - (actions - best).square().mean(-1, keepdim=True)
    returns = rewards.flip(1).cumsum(1).flip(1) / 8
    mask = (torch.arange(8) < torch.randint(4, 9, (240, 1), generator=g)).long()
    steps = torch.arange(8).expand(240, -1)
    columns = {"states": states, "actions": actions, "returns": returns, "timesteps": steps, "mask": mask}
    return Decisions(), dict_loaders(columns)
