"""Models of other packages, as tasks: torchvision's, transformers', timm's and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from benchmarks.gpu import Case

Batch = tuple[Tensor, Tensor]
CLASSES, TOKENS, FEATURES = 1000, 32_000, 128


class Stranger(forge.TaskModule):
    """A model and its loss, with AdamW."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=next(self.parameters()).is_cuda)


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def segmented(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0])["out"], batch[1])


def language(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[1]).loss


def encoded(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).last_hidden_state.float().square().mean()


class Reader(nn.Module):
    """torch's LSTM over tokens, with a linear layer over the last state."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(TOKENS, width), nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


def images(batch: int, size: int = 224) -> Callable[[bool, torch.Generator], Batch]:
    def make(tiny: bool, generator: torch.Generator) -> Batch:
        count, side = (2, 64) if tiny else (batch, size)
        pictures = torch.randn(count, 3, side, side, generator=generator)
        return pictures, torch.randint(CLASSES, (count,), generator=generator)

    return make


def masks(tiny: bool, generator: torch.Generator) -> Batch:
    count, side = (2, 64) if tiny else (16, 224)
    pictures = torch.randn(count, 3, side, side, generator=generator)
    return pictures, torch.randint(21, (count, side, side), generator=generator)


def text(batch: int, length: int, known: int = TOKENS) -> Callable[[bool, torch.Generator], Batch]:
    def make(tiny: bool, generator: torch.Generator) -> Batch:
        shape, most = ((2, 16), 96) if tiny else ((batch, length), known)
        words = torch.randint(most, shape, generator=generator)
        return words, words

    return make


def sentences(tiny: bool, generator: torch.Generator) -> Batch:
    shape = (2, 16) if tiny else (64, 256)
    return torch.randint(TOKENS, shape, generator=generator), torch.randint(CLASSES, shape[:1], generator=generator)


def sounds(tiny: bool, generator: torch.Generator) -> Batch:
    count, length = (2, 64) if tiny else (16, 3000)
    return torch.randn(count, 80, length, generator=generator), torch.zeros(count)


def of_torchvision(name: str) -> Callable[..., Stranger]:
    def build(tiny: bool, **options: Any) -> Stranger:
        import torchvision

        more = {"image_size": 64} if tiny and name.startswith("vit") else {}
        return Stranger(torchvision.models.get_model(name, num_classes=CLASSES, **more), classified)

    return build


def unet_like(tiny: bool, **options: Any) -> Stranger:
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    return Stranger(model, segmented)


def of_transformers(kind: str) -> Callable[..., Stranger]:
    def build(tiny: bool, **options: Any) -> Stranger:
        import transformers

        hf: Any = transformers

        small: dict[str, Any] = {"vocab_size": 96} if tiny else {}
        if kind == "gpt2":
            still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, **small} if tiny else {}
            return Stranger(hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, **still, **sizes)), language)
        if kind == "llama":
            sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
            if tiny:
                sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            return Stranger(hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **sizes, **small)), language)
        if kind == "bert":
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = hf.BertConfig(
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **(sizes if tiny else {}), **small
            )
            return Stranger(hf.BertForMaskedLM(config), language)
        if kind == "t5":
            sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2} if tiny else {}
            config = hf.T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **sizes, **small)
            return Stranger(hf.T5ForConditionalGeneration(config), language)
        sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
        config = hf.WhisperConfig(dropout=0.0, max_source_positions=32 if tiny else 1500, **(sizes if tiny else {}))
        return Stranger(hf.WhisperModel(config).get_encoder(), encoded)

    return build


def convnext(tiny: bool, **options: Any) -> Stranger:
    import timm  # pyright: ignore[reportMissingImports]

    return Stranger(timm.create_model("convnext_tiny", num_classes=CLASSES), classified)


def lstm(tiny: bool, **options: Any) -> Stranger:
    return Stranger(Reader(16, 1) if tiny else Reader(512, 2), classified)


class DCGAN(forge.TaskModule):
    """The networks of Radford, Metz and Chintala (2016) for 64 × 64 pixels, with the losses and Adam of the paper."""

    def __init__(self, width: int):
        super().__init__()

        def up(before: int, after: int, stride: int = 2) -> list[nn.Module]:
            layer = nn.ConvTranspose2d(before, after, 4, stride, stride - 1, bias=False)
            return [layer, nn.BatchNorm2d(after), nn.ReLU()]

        def down(before: int, after: int) -> list[nn.Module]:
            return [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]

        first = [*up(100, 8 * width, 1), *up(8 * width, 4 * width), *up(4 * width, 2 * width), *up(2 * width, width)]
        self.generator = nn.Sequential(*first, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
        last = [*down(width, 2 * width), *down(2 * width, 4 * width), *down(4 * width, 8 * width)]
        entry = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*entry, *last, nn.Conv2d(8 * width, 1, 4, bias=False))

    def training_step(self, batch: Batch, name: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        real = batch[0]
        fake = self.generator(torch.randn(len(real), 100, 1, 1, device=real.device))
        if name == "generator":
            return self._told(fake, 1.0)
        return self._told(real, 1.0) + self._told(fake.detach(), 0.0)

    def _told(self, images: Tensor, real: float) -> Tensor:
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: self._adam(getattr(self, name)) for name in ("discriminator", "generator")}

    def _adam(self, network: nn.Module) -> torch.optim.Optimizer:
        fused = next(network.parameters()).is_cuda
        return torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=fused)


def dcgan(tiny: bool, **options: Any) -> DCGAN:
    return DCGAN(4 if tiny else 64)


class Graph(nn.Module):
    """torch_geometric's GraphSAGE over a graph, which comes as features and edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from torch_geometric.nn.models import GraphSAGE  # pyright: ignore[reportMissingImports]

        self.net = GraphSAGE(FEATURES, width, 3, CLASSES)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        return self.net(features, edges)


def classified_nodes(model: nn.Module, batch: Any) -> Tensor:
    features, edges, classes = batch
    return F.cross_entropy(model(features, edges), classes)


def graph(tiny: bool, **options: Any) -> Stranger:
    return Stranger(Graph(16 if tiny else 256), classified_nodes)


def edges(tiny: bool, make: torch.Generator) -> tuple[Tensor, ...]:
    nodes, count = (50, 200) if tiny else (20_000, 200_000)
    return (
        torch.randn(nodes, FEATURES, generator=make),
        torch.randint(nodes, (2, count), generator=make),
        torch.randint(CLASSES, (nodes,), generator=make),
    )


def _case(name: str, what: str, build: Any, batch: Any, updates: int = 60) -> Case:
    return Case(name, what, build, batch, True, None, updates, 15)


MODELS = {
    case.name: case
    for case in (
        _case("resnet50", "torchvision ResNet-50, batch 64", of_torchvision("resnet50"), images(64)),
        _case("vit_b_16", "torchvision ViT-B/16, batch 64", of_torchvision("vit_b_16"), images(64)),
        _case("mobilenet_v3", "torchvision MobileNetV3 large", of_torchvision("mobilenet_v3_large"), images(64)),
        _case("deeplab", "torchvision DeepLabV3, ResNet-50, batch 16", unet_like, masks),
        _case("hf_gpt2", "transformers GPT-2 124M, 32 × 1,024", of_transformers("gpt2"), text(32, 1024, 50257), 30),
        _case("llama", "transformers Llama 12 × 768, 32 × 1,024", of_transformers("llama"), text(32, 1024), 30),
        _case("bert", "transformers BERT base, 64 × 512", of_transformers("bert"), text(64, 512, 30522), 30),
        _case("t5", "transformers T5 small, 64 × 256", of_transformers("t5"), text(64, 256)),
        _case("whisper", "transformers Whisper encoder, 16 × 30 s", of_transformers("whisper"), sounds),
        _case("convnext", "timm ConvNeXt tiny, batch 64", convnext, images(64)),
        _case("gnn", "torch_geometric GraphSAGE, 20,000 nodes, 200,000 edges", graph, edges),
        _case("dcgan", "DCGAN, 64 × 64 pixels, batch 128, two optimizers", dcgan, images(128, 64)),
        _case("lstm", "torch's LSTM, 2 × 512, 64 × 256", lstm, sentences),
    )
}
