"""Models of images: timm, torchvision and diffusers."""

from typing import Any

import torch
from diffusers import UNet2DModel
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torchvision.models import detection, resnet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops import FrozenBatchNorm2d

from .base import Base


class Images(Base):
    """A classifier of images into four classes."""

    size = 16

    def sample(self, generator: torch.Generator) -> Any:
        image = torch.randn(3, self.size, self.size, generator=generator)
        return image, int(torch.randint(4, (), generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels)


def vit(**options: Any) -> VisionTransformer:
    sizes = {"img_size": Images.size, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    return VisionTransformer(num_classes=4, **sizes, **options)


class ViT(Images):
    """timm's vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vit()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class SequentialViT(Images):
    """timm's vision transformer as a sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        model = vit(class_token=False, global_pool="avg", pos_embed="none")
        layers = [model.patch_embed, *model.blocks, Mean(), model.fc_norm, model.head]
        self.sequential_module = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.sequential_module(images)


class ResNet(Images):
    """torchvision's ResNet, also as a sequence. Replicas normalize their parts of a batch.

    Smaller images would leave one value per sample in the last layers: their BatchNorm amplifies
    rounding a thousand times.
    """

    size = 64
    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        *layers, head = resnet.ResNet(resnet.BasicBlock, [1] * 4, num_classes=4).children()
        self.sequential_module = nn.Sequential(*layers, nn.Flatten(), head)

    def forward(self, images: Tensor) -> Tensor:
        return self.sequential_module(images)


class RetinaNet(Base):
    """torchvision's detector, on a list of images and a list of their boxes."""

    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        network = resnet.ResNet(resnet.BasicBlock, [1] * 4, norm_layer=FrozenBatchNorm2d)
        backbone = BackboneWithFPN(network, {"layer1": "0", "layer2": "1"}, [64, 128], 32)
        anchors = AnchorGenerator(((8,), (16,), (32,)), ((1.0,),) * 3)
        sizes = {"min_size": 32, "max_size": 32}
        self.model = detection.RetinaNet(backbone, 3, anchor_generator=anchors, **sizes)

    @staticmethod
    def collate(samples: Any) -> Any:
        images, boxes = zip(*samples, strict=True)
        return list(images), list(boxes)

    def sample(self, generator: torch.Generator) -> Any:
        corners = torch.randint(0, 16, (2, 2), generator=generator).float()
        boxes = torch.cat([corners, corners + 12], dim=1)
        labels = torch.randint(3, (2,), generator=generator)
        return torch.rand(3, 32, 32, generator=generator), {"boxes": boxes, "labels": labels}

    def loss(self, batch: Any) -> Tensor:
        return torch.stack([*self.model(*batch).values()]).sum()


class UNet(Base):
    """diffusers' denoiser."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
        self.model = UNet2DModel(sample_size=8, attention_head_dim=8, **blocks, **sizes)

    def sample(self, generator: torch.Generator) -> Any:
        noisy, noise = torch.randn(2, 3, 8, 8, generator=generator)
        return noisy, noise, int(torch.randint(1000, (), generator=generator))

    def loss(self, batch: Any) -> Tensor:
        noisy, noise, times = batch
        return mse_loss(self.model(noisy, times).sample, noise)
