"""Models that need more packages: diffusers, peft and scipy."""

import diffusers
import peft
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import forge
from benchmarks.doctor.zoo.common import (
    OwnLoss,
    accuracy,
    adamw,
    dict_loaders,
    generator,
    gratings,
    rectangles,
    registry,
    sample_loaders,
    tensor_loaders,
    topics,
    walks,
)
from forge.data import Splits

MODELS, entry = registry()
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@entry
def yolos_matched_queries():
    """Queries are matched to objects, so most of them are given the class "no object"."""
    images, _, boxes, kinds = rectangles(64, 64)
    width = boxes[:, 2:] - boxes[:, :2]
    centred = torch.cat([boxes[:, :2] + width / 2, width], 1) / 64
    config = hf.YolosConfig(**SMALL, image_size=[64, 64], patch_size=8, num_detection_tokens=6, num_labels=2)

    def collate(samples):
        pixels, targets = zip(*samples, strict=True)
        return {"pixel_values": torch.stack(pixels), "labels": list(targets)}

    samples = [
        (image, {"class_labels": kind[None] - 1, "boxes": box[None]})
        for image, kind, box in zip(images, kinds, centred, strict=True)
    ]
    model = hf.YolosForObjectDetection(config)
    for name, parameter in model.named_parameters():  # transformers leaves these at zero; they are meant to be loaded
        if "token" in name or "position_embeddings" in name:
            torch.nn.init.trunc_normal_(parameter, std=0.02)
    return OwnLoss(model), sample_loaders(samples, val=16, batch_size=8, collate_fn=collate)


class Noised(forge.TaskModule):
    """A U-Net of diffusers that predicts noise; validation uses noise of a fixed generator."""

    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.unet = diffusers.UNet2DModel(
            sample_size=16,
            in_channels=1,
            out_channels=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=8,
        )
        self.schedule = diffusers.DDPMScheduler(num_train_timesteps=100)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        return self.unet(images, times).sample

    def loss(self, images: Tensor, g: torch.Generator | None) -> Tensor:
        noise = torch.randn(images.shape, generator=g)
        times = torch.randint(100, (len(images),), generator=g)
        return F.mse_loss(self(self.schedule.add_noise(images, noise, times), times), noise)

    def training_step(self, batch):
        return self.loss(batch[0], None)

    def validation_step(self, batch):
        return self.loss(batch[0], generator(1))

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def diffusers_unet():
    images, _ = gratings(160, 16, channels=1, noise=0.1)
    return Noised(), tensor_loaders(images / 2, val=32)


class Adapted(OwnLoss):
    """A model of peft: only the parameters it left trainable are given to the optimizer."""

    def training_step(self, batch):
        out = self(batch)
        metrics = {"accuracy": accuracy(out.logits, batch["labels"])} if batch["labels"].ndim == 1 else {}
        return {"loss": out.loss, **metrics}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw([p for p in self.parameters() if p.requires_grad], self.lr, 0.0)


def pretrained_bert() -> hf.BertForSequenceClassification:
    """Stands for a pretrained network: weights large enough that its features differ from text to text."""
    config = hf.BertConfig(**SMALL, vocab_size=32, max_position_embeddings=32, num_labels=3, initializer_range=0.2)
    return hf.BertForSequenceClassification(config)


def texts() -> Splits:
    tokens, mask, labels = topics(320)
    return dict_loaders({"input_ids": tokens, "attention_mask": mask, "labels": labels})


@entry
def peft_lora_bert():
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    return Adapted(peft.get_peft_model(pretrained_bert(), config), 5e-3), texts()


@entry
def peft_ia3_bert():
    config = peft.IA3Config(
        target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"], task_type="SEQ_CLS"
    )
    return Adapted(peft.get_peft_model(pretrained_bert(), config), 1e-2), texts()


@entry
def peft_lora_gpt2():
    sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.15)
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    tokens = walks(240, 16, 32)
    data = dict_loaders({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens})
    return Adapted(peft.get_peft_model(hf.GPT2LMHeadModel(config), lora), 5e-3), data
