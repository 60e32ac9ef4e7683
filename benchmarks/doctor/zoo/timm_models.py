"""Models of timm, with small images."""

import functools
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from timm.layers import GatedMlp, GroupNormAct
from timm.models.convmixer import ConvMixer
from timm.models.convnext import ConvNeXt
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock
from timm.models.resnetv2 import ResNetV2
from torch import nn

import forge
from benchmarks.doctor.zoo.common import Classify, Entry, accuracy, gratings, tensor_loaders
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def make(model: str, size: int, lr: float, batch_size: int, options: dict) -> tuple[forge.TaskModule, Splits]:
    images, labels = gratings(200, size)
    net = timm.create_model(model, pretrained=False, num_classes=4, **options)
    return Classify(net, lr), tensor_loaders(images, labels, batch_size=batch_size, val=40)


def add(name: str, model: str, size: int = 32, lr: float = 1e-3, batch_size: int = 8, **options) -> None:
    MODELS[name] = functools.partial(make, model, size, lr, batch_size, options)


SMALL = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4}
add("timm_vit", "vit_tiny_patch16_224", batch_size=16, **SMALL)
add("timm_vit_zero_head", "vit_tiny_patch16_224", batch_size=16, weight_init="jax", drop_path_rate=0.2, **SMALL)
add("timm_beit", "beit_base_patch16_224", batch_size=16, init_values=0.1, **SMALL)
add("timm_eva02", "eva02_tiny_patch14_224", batch_size=16, **(SMALL | {"num_heads": 2}))
add("timm_cait_layer_scale", "cait_xxs24_224", batch_size=16, **SMALL)
add("timm_test_nfnet", "test_nfnet", lr=2e-3)
add("timm_nf_resnet26_skipinit", "nf_resnet26", size=32, lr=5e-4)
add("timm_test_resnet", "test_resnet", size=48)
add("timm_repvgg_a0", "repvgg_a0", size=32, lr=5e-4)
add("timm_ghostnet", "ghostnet_050", size=48)
add("timm_mobilevit", "mobilevit_xxs", size=64)
add("timm_poolformer", "poolformer_s12", size=64, lr=5e-4)
add("timm_levit", "levit_128s", size=64, img_size=64, lr=5e-4)
add("timm_swinv2", "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4))
add("timm_mambaout", "test_mambaout", size=48)
add("timm_lambda_resnet", "lambda_resnet26t", size=64, lr=5e-4)


def wrap(name: str, net: Callable[[], nn.Module], lr: float = 1e-3, batch_size: int = 16) -> None:
    def entry() -> tuple[forge.TaskModule, Splits]:
        images, labels = gratings(200, 32)
        return Classify(net(), lr), tensor_loaders(images, labels, batch_size=batch_size, val=40)

    MODELS[name] = entry


PATCHES = {"num_classes": 4, "img_size": 32, "patch_size": 4, "num_blocks": 3, "embed_dim": 64}
GATED = {"block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp, "mlp_ratio": 6}
AFFINE = {"block_layer": functools.partial(ResBlock, init_values=1e-4), "norm_layer": Affine, "mlp_ratio": 4}
wrap("timm_mixer", functools.partial(MlpMixer, **PATCHES))
wrap("timm_gmlp", functools.partial(MlpMixer, **PATCHES, **GATED))
wrap("timm_resmlp", functools.partial(MlpMixer, **PATCHES, **AFFINE))
wrap("timm_convmixer", functools.partial(ConvMixer, 48, 4, kernel_size=5, patch_size=4, num_classes=4), lr=3e-3)
wrap("timm_convnext", functools.partial(ConvNeXt, depths=(1, 1, 2, 1), dims=(24, 48, 64, 96), num_classes=4), lr=2e-3)
wrap(
    "timm_bit_groupnorm_std_conv",
    functools.partial(
        ResNetV2,
        layers=(1, 1, 1, 1),
        channels=(32, 64, 96, 128),
        stem_chs=16,
        num_classes=4,
        norm_layer=functools.partial(GroupNormAct, num_groups=4),
    ),
)


class Distilled(Classify):
    """DeiT with a distillation token: in training each head is given its own target."""

    def training_step(self, batch):
        images, labels = batch
        heads = self(images)
        loss = sum(F.cross_entropy(head, labels) for head in heads) / 2
        return {"loss": loss, "accuracy": accuracy(torch.stack(list(heads)).mean(0), labels)}


def deit() -> tuple[forge.TaskModule, Splits]:
    images, labels = gratings(200, 32)
    net = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=4, **SMALL)
    net.set_distilled_training(True)
    return Distilled(net), tensor_loaders(images, labels, val=40)


MODELS["timm_deit_distilled"] = deit
