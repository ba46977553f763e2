"""Models of `jgc.training.models` in PyTorch, ResNets with group norm: the same layers, shapes, number of tensors."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from jgc.lab.bench.network.models import Task
from jgc.training.models import MODELS
from jgc.training.models.gpt import INIT

CHANNELS_PER_GROUP = 16
FAMILIES = {18: ((2, 2, 2, 2), 64, True), 20: ((3, 3, 3), 16, False)}  # blocks a stage, width, projection shortcuts


class ConvNorm(nn.Module):
    """A convolution without a bias and a group norm: [b, c, h, w] to [b, features, h', w']."""

    def __init__(self, channels: int, features: int, kernel: int = 3, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(channels, features, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.GroupNorm(features // min(CHANNELS_PER_GROUP, features), features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, projection: bool):
        super().__init__()
        self.layer1, self.layer2 = ConvNorm(channels, width, 3, stride), ConvNorm(width, width)
        changes = stride != 1 or channels != width
        self.shortcut = ConvNorm(channels, width, 1, stride) if changes and projection else None
        self.stride, self.padding = stride, width - channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer2(functional.relu(self.layer1(x)))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.padding or self.stride != 1:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return functional.relu(x + y)


class GPTBlock(nn.Module):
    """Attention and MLP, each behind a norm, with a shortcut: f32[b, T, units] to the same."""

    def __init__(self, units: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(units, eps=1e-6, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(units, 3 * units, bias=False), nn.Linear(units, units, bias=False)
        self.up, self.down = nn.Linear(units, 4 * units, bias=False), nn.Linear(4 * units, units, bias=False)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, units = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, units // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, heads, T, units / heads]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, units))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens i64[b, T] to logits f32[b, T, classes], with a tied head: `jgc.training.models.gpt` for windows of T."""

    def __init__(self, classes: int, window: int, units: int, layers: int, heads: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(classes, units), nn.Embedding(window, units)
        self.blocks = nn.Sequential(*(GPTBlock(units, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(units, eps=1e-6, bias=False)
        for weight in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weight, std=INIT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


def model_of_task(task: Task) -> nn.Module:
    """The model of a task, with random parameters."""
    if task.window:
        sizes = MODELS[task.model].keywords  # type: ignore[attr-defined]
        return GPT(task.classes, task.window, sizes["units"], sizes["layers"], sizes["heads"])
    return convnet5() if task.model == "convnet5" else resnet(int(task.model.removeprefix("resnet")))


def convnet5(classes: int = 10) -> nn.Module:
    """Five convolutions, pooling and a dense layer."""
    widths, strides = (3, 32, 64, 128, 128, 128), (1, 2, 1, 2, 1)
    layers = [nn.Sequential(ConvNorm(a, b, 3, stride), nn.ReLU())
              for a, b, stride in zip(widths, widths[1:], strides, strict=False)]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def resnet(depth: int, classes: int = 10) -> nn.Module:
    """A ResNet for CIFAR with group norm, depth 18 or 20."""
    stages, width, projection = FAMILIES[depth]

    def blocks() -> Iterator[nn.Module]:
        channels = width
        for stage, count in enumerate(stages):
            for block in range(count):
                yield Block(channels, width * 2**stage, 2 if stage and not block else 1, projection)
                channels = width * 2**stage

    last = width * 2 ** (len(stages) - 1)
    return nn.Sequential(
        ConvNorm(3, width), nn.ReLU(), *blocks(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)
    )
