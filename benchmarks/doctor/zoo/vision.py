"""Models of torchvision on small images: classification, segmentation, detection, video and optical flow."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.ops.misc import FrozenBatchNorm2d

import forge
from benchmarks.doctor.zoo.common import (
    Classify,
    Entry,
    accuracy,
    adamw,
    generator,
    gratings,
    rectangles,
    sample_loaders,
    tensor_loaders,
)
from forge.data import Splits

MODELS: dict[str, Entry] = {}


def classifier(name: str, make: Callable[[], nn.Module], size: int = 32, lr: float = 1e-3, batch_size: int = 8) -> None:
    def entry():
        images, labels = gratings(200, size)
        return Classify(make(), lr), tensor_loaders(images, labels, batch_size=batch_size, val=40)

    MODELS[name] = entry


def plain(build: Callable[..., nn.Module], **options) -> Callable[[], nn.Module]:
    return functools.partial(build, weights=None, num_classes=4, **options)


classifier("tv_resnet18", plain(models.resnet18))
classifier("tv_resnet18_zero_init_residual", plain(models.resnet18, zero_init_residual=True))
classifier("tv_resnet50", plain(models.resnet50), size=32, lr=3e-4)
classifier("tv_resnext50", plain(models.resnext50_32x4d), size=32, lr=3e-4)
classifier("tv_mobilenet_v2", plain(models.mobilenet_v2), size=64, lr=5e-4, batch_size=16)
classifier("tv_mobilenet_v3_small", plain(models.mobilenet_v3_small), size=64)
classifier("tv_efficientnet_b0", plain(models.efficientnet_b0), size=48, lr=2e-4, batch_size=16)
classifier("tv_shufflenet", plain(models.shufflenet_v2_x0_5), size=64, batch_size=16)
classifier("tv_mnasnet", plain(models.mnasnet0_5), size=64, lr=3e-4, batch_size=16)
classifier("tv_regnet", plain(models.regnet_y_400mf), size=48)
classifier("tv_squeezenet", plain(models.squeezenet1_1), size=64, lr=3e-4, batch_size=16)
classifier("tv_densenet121", plain(models.densenet121), size=32)


def vgg() -> nn.Module:
    """VGG-11 with BatchNorm and the small head that is usual for small images."""
    net = models.VGG(models.vgg.make_layers(models.vgg.cfgs["A"], batch_norm=True), init_weights=False)
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(512, 4))
    return net


def vit() -> nn.Module:
    """ViT starts with a head of zeros."""
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=4
    )


def swin() -> nn.Module:
    sizes = {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return models.SwinTransformer(**sizes, stochastic_depth_prob=0.1, num_classes=4)


def convnext() -> nn.Module:
    """Layer scale begins at 1e-6, so the blocks hardly count at first."""
    blocks = [CNBlockConfig(24, 48, 2), CNBlockConfig(48, 96, 2), CNBlockConfig(96, None, 2)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=4)


def maxvit() -> nn.Module:
    sizes = {
        "stem_channels": 16,
        "partition_size": 2,
        "block_channels": [16, 32],
        "block_layers": [1, 1],
        "head_dim": 8,
    }
    return models.MaxVit(input_size=(32, 32), **sizes, stochastic_depth_prob=0.1, num_classes=4)


classifier("tv_vgg11_bn", vgg)
classifier("tv_vit_zero_head", vit, batch_size=16)
classifier("tv_swin", swin, batch_size=16)
classifier("tv_convnext_layer_scale", convnext, batch_size=16, lr=2e-3)
classifier("tv_maxvit", maxvit, batch_size=16)


class WithAuxiliary(forge.TaskModule):
    """GoogLeNet: in training two more heads have a loss, with the weight 0.3 of the paper."""

    def __init__(self, lr: float = 5e-4):
        super().__init__()
        self.lr = lr
        self.net = models.googlenet(weights=None, num_classes=4, aux_logits=True, init_weights=False)

    def forward(self, images: Tensor):
        return self.net(images)

    def training_step(self, batch):
        images, labels = batch
        out = self(images)
        side = F.cross_entropy(out.aux_logits1, labels) + F.cross_entropy(out.aux_logits2, labels)
        loss = F.cross_entropy(out.logits, labels)
        return {"loss": loss + 0.3 * side, "accuracy": accuracy(out.logits, labels)}

    def validation_step(self, batch):
        images, labels = batch
        logits = self(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def googlenet():
    images, labels = gratings(160, 48)
    return WithAuxiliary(), tensor_loaders(images, labels, batch_size=8, val=40)


MODELS["tv_googlenet_auxiliary_heads"] = googlenet


class FrozenNorm(Classify):
    """ResNet-18 with frozen BatchNorm (fixed statistics and scales), as detectors use it; the rest is trained."""

    def __init__(self):
        net = models.resnet18(weights=None, num_classes=4)
        with torch.no_grad():  # as of a pretrained network: statistics that fit the images
            net.train()
            for module in net.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = None
            images, _ = gratings(64, 32, seed=1)
            for part in images.split(16):
                net(part)
        super().__init__(swap_norms(net), lr=3e-4)


def swap_norms(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            fixed = FrozenBatchNorm2d(child.num_features)
            fixed.load_state_dict({k: v for k, v in child.state_dict().items() if k != "num_batches_tracked"})
            setattr(module, name, fixed)
        else:
            swap_norms(child)
    return module


def frozen_norm():
    images, labels = gratings(200, 32)
    return FrozenNorm(), tensor_loaders(images, labels, batch_size=8, val=40)


MODELS["tv_resnet18_frozen_batchnorm"] = frozen_norm


class Segment(forge.TaskModule):
    """A network of torchvision that returns {"out": logits per pixel}."""

    def __init__(self, net: nn.Module, lr: float = 1e-3):
        super().__init__()
        self.net = net
        self.lr = lr

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)["out"]

    def training_step(self, batch):
        images, masks = batch
        out = self.net(images)
        loss = F.cross_entropy(out["out"], masks)
        if "aux" in out:
            loss = loss + 0.5 * F.cross_entropy(out["aux"], masks)
        return {"loss": loss}

    def validation_step(self, batch):
        images, masks = batch
        logits = self(images)
        right = (logits.argmax(1) == masks).float().mean()
        return {"loss": F.cross_entropy(logits, masks), "pixel_accuracy": right}

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


def segmenter(name: str, make: Callable[[], nn.Module], size: int) -> None:
    def entry():
        images, masks, _, _ = rectangles(96, size)
        return Segment(make()), tensor_loaders(images, masks, batch_size=4, val=16)

    MODELS[name] = entry


def fcn() -> nn.Module:
    """The FCN of torchvision on a ResNet-18, with its second head."""
    body = IntermediateLayerGetter(models.resnet18(weights=None), {"layer4": "out", "layer3": "aux"})
    return models.segmentation.FCN(body, FCNHead(512, 3), FCNHead(256, 3))


segmentation = functools.partial(functools.partial, weights=None, weights_backbone=None, num_classes=3)
segmenter("tv_fcn_resnet18_aux", fcn, 48)
segmenter("tv_deeplab_mobilenet", segmentation(models.segmentation.deeplabv3_mobilenet_v3_large), 48)
segmenter("tv_lraspp_mobilenet", segmentation(models.segmentation.lraspp_mobilenet_v3_large), 64)


class Detect(forge.TaskModule):
    """A detector of torchvision: in training mode it returns its losses, in eval mode boxes."""

    def __init__(self, net: nn.Module, lr: float = 1e-3):
        super().__init__()
        self.net = net
        self.lr = lr

    def forward(self, images: list[Tensor]):
        return self.net(images)

    def training_step(self, batch):
        images, targets = batch
        losses = self.net(images, targets)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def validation_step(self, batch):
        images, targets = batch
        found = self.net(images)
        overlaps = []
        for prediction, target in zip(found, targets, strict=True):
            if len(prediction["boxes"]):
                overlaps.append(overlap(prediction["boxes"][0], target["boxes"][0]))
            else:
                overlaps.append(torch.zeros(()))
        return {"iou_of_best": torch.stack(overlaps).mean()}

    def num_items(self, batch):
        return len(batch[0])

    def configure_optimizers(self):
        return adamw([p for p in self.parameters() if p.requires_grad], self.lr)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    low, high = torch.maximum(one[:2], other[:2]), torch.minimum(one[2:], other[2:])
    shared = (high - low).clamp(min=0).prod()
    return shared / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - shared)


def lists(batch):
    images, targets = zip(*batch, strict=True)
    return list(images), list(targets)


def detection_data() -> Splits:
    images, _, boxes, kinds = rectangles(64, 64)
    samples = [
        (image, {"boxes": box[None], "labels": kind[None]})
        for image, box, kind in zip(images, boxes, kinds, strict=True)
    ]
    return sample_loaders(samples, val=16, batch_size=4, collate_fn=lists)


def small_pyramid() -> nn.Module:
    body = models.resnet18(weights=None, norm_layer=functools.partial(nn.GroupNorm, 8))
    return BackboneWithFPN(body, {"layer2": "0", "layer3": "1"}, [128, 256], 32)


FIXED = {"min_size": 64, "max_size": 64, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}


def faster_rcnn():
    anchors = AnchorGenerator(((16,), (32,), (48,)), ((0.5, 1.0, 2.0),) * 3)
    kept = {"pre_nms_top_n_train": 100, "post_nms_top_n_train": 50, "pre_nms_top_n_test": 50, "post_nms_top_n_test": 20}
    options = {f"rpn_{key}": value for key, value in kept.items()} | {"rpn_anchor_generator": anchors} | FIXED
    net = FasterRCNN(small_pyramid(), num_classes=3, box_batch_size_per_image=32, **options)
    return Detect(net), detection_data()


def retina():
    anchors = AnchorGenerator(((12, 18), (24, 32), (40, 56)), ((0.5, 1.0, 2.0),) * 3)
    return Detect(RetinaNet(small_pyramid(), num_classes=3, anchor_generator=anchors, **FIXED)), detection_data()


MODELS["tv_faster_rcnn"] = faster_rcnn
MODELS["tv_retinanet_prior_bias"] = retina


def video():
    """Moving stripes; the class is the direction of motion."""
    g = generator(3)
    labels = torch.randint(2, (80,), generator=g)
    phase = torch.rand(80, 1, 1, 1, generator=g) * 6.28
    time = torch.arange(4)[None, :, None, None] * (labels * 2 - 1)[:, None, None, None]
    waves = torch.sin(torch.arange(16)[None, None, None] * 0.8 + phase + 1.2 * time).expand(-1, -1, 16, -1)
    clips = waves[:, None].expand(-1, 3, -1, -1, -1) + 0.3 * torch.randn(80, 3, 4, 16, 16, generator=g)
    clips = (clips - clips.mean()) / clips.std()
    net = models.video.mc3_18(weights=None, num_classes=2)
    return Classify(net, 3e-4), tensor_loaders(clips, labels, batch_size=2, val=16)


MODELS["tv_video_mc3"] = video


class Flow(forge.TaskModule):
    """RAFT: the loss sums over all refinements, later ones weigh more; the estimate is detached between them."""

    def __init__(self, lr: float = 4e-4):
        super().__init__()
        self.lr = lr
        self.net = models.optical_flow.raft_small(weights=None)

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        return self.net(first, second, num_flow_updates=3)

    def training_step(self, batch):
        first, second, flow = batch
        guesses = self(first, second)
        loss = sum(0.8 ** (len(guesses) - 1 - i) * (guess - flow).abs().mean() for i, guess in enumerate(guesses))
        return {"loss": loss, "end_point_error": (guesses[-1] - flow).norm(dim=1).mean()}

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr, 1e-5)


def raft():
    g = generator(4)
    texture = F.interpolate(torch.randn(24, 3, 40, 40, generator=g), scale_factor=4, mode="bilinear")
    texture = (texture / texture.abs().amax((1, 2, 3), keepdim=True)).clamp(-1, 1)
    shift = torch.randint(-4, 5, (24, 2), generator=g)
    first = texture[:, :, 16:144, 16:144]
    second = torch.stack([t[:, 16 - y : 144 - y, 16 - x : 144 - x] for t, (x, y) in zip(texture, shift, strict=True)])
    flow = shift.float()[:, :, None, None].expand(-1, -1, 128, 128).contiguous()
    return Flow(), tensor_loaders(first, second, flow, batch_size=1, val=4)


MODELS["tv_raft_optical_flow"] = raft
