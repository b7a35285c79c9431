"""Plain modules among the cases of ``benchmarks.accuracy``: no config.json, no tokens, blocks of several kinds or none.

Each is profiled from example inputs alone (``profile_module``) and trained by the runtime with its own loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.models.anatomy import Loss
from optimizer.models.plain import Inputs, PlainAnatomy, plain_anatomy
from optimizer.profile.profile import Profile
from optimizer.profile.trace.module import profile_module
from optimizer.runtime.step.micro_batch import MicroBatch


class MixerBlock(nn.Module):
    """One block of an MLP-Mixer: over patches, then over channels (Tolstikhin et al. 2021, section 2)."""

    def __init__(self, *, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(3 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.over_patches(self.norm1(hidden).transpose(1, 2)).transpose(1, 2)
        mixed: torch.Tensor = hidden + self.over_channels(self.norm2(hidden))
        return mixed


class Mixer(nn.Module):
    """Images in, classes out."""

    def __init__(self, *, width: int = 96, num_blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.layers = nn.ModuleList(MixerBlock(patches=16, width=width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        classes: torch.Tensor = self.head(self.norm(hidden).mean(1))
        return classes


class Bottleneck(nn.Module):
    """One block of a residual network with activations before convolutions; the first of a stage halves the image."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride, inner = (1 if before == after else 2), after // 2
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for channels in (before, inner, inner))
        self.narrow = nn.Conv2d(before, inner, 1, bias=False)
        self.middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.widen = nn.Conv2d(inner, after, 1, bias=False)
        self.skip = nn.Conv2d(before, after, 1, stride=stride) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(F.silu(self.norms[0](x)))
        hidden = self.middle(F.silu(self.norms[1](hidden)))
        found: torch.Tensor = self.widen(F.silu(self.norms[2](hidden))) + self.skip(x)
        return found


class Residuals(nn.Module):
    """A convolutional network whose blocks are of four kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        widths = (32, 32, 64, 64, 128, 128)
        self.blocks = nn.ModuleList(Bottleneck(before, after) for before, after in zip((32, *widths), widths, strict=False))
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        classes: torch.Tensor = self.head(hidden.mean((2, 3)))
        return classes


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module with what else its profile and its training take."""

    make: Callable[[], nn.Module]
    inputs: Inputs
    """An example of two; so are labels."""
    labels: torch.Tensor
    loss: Loss
    num_blocks: int
    blocks: tuple[str, ...] | None = None

    def profile(self) -> Profile:
        return profile_module(self.make, inputs=self.inputs, labels=self.labels, loss=self.loss, blocks=self.blocks)

    def anatomy(self, module: nn.Module) -> PlainAnatomy:
        return plain_anatomy(module, loss=self.loss, blocks=self.blocks)

    def make_batch(self, size: int) -> MicroBatch:
        def like(example: torch.Tensor) -> torch.Tensor:
            return torch.zeros((size, *example.shape[1:]), dtype=example.dtype)

        inputs = tuple(like(each) for each in self.inputs) if isinstance(self.inputs, tuple) else like(self.inputs)
        return inputs, like(self.labels)


_IMAGES = torch.zeros(2, 3, 32, 32)
_CLASSES = torch.zeros(2, dtype=torch.long)
PLAIN_MODULES: dict[str, Module] = {
    "mixer": Module(make=Mixer, inputs=_IMAGES, labels=_CLASSES, loss=F.cross_entropy, num_blocks=4),
    "residuals": Module(
        make=Residuals, inputs=_IMAGES, labels=_CLASSES, loss=F.cross_entropy, num_blocks=6, blocks=("blocks",)
    ),
}
