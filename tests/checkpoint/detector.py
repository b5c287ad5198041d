"""A detection model and its average, made, trained and saved as YOLOv5's scripts of 2020 do.

Knows nothing of apex, and is copied to where a fresh process finds it.
"""

import math
from copy import deepcopy

import torch
from torch import nn


class Conv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def fused_forward(self, x):
        return self.act(self.conv(x))


class Detect(nn.Module):
    """Decodes boxes while it evaluates; the grid it keeps is no buffer."""

    def __init__(self):
        super().__init__()
        self.grid, self.stride = torch.zeros(1), torch.tensor(8.0)
        self.register_buffer("anchors", torch.tensor([[10.0, 13], [16, 30]]).view(1, 2, 1, 1, 2))
        self.m = nn.Conv2d(4, 12, 1)

    def forward(self, x):
        x = self.m(x)
        batch, _, rows, columns = x.shape
        x = x.view(batch, 2, 6, rows, columns).permute(0, 1, 3, 4, 2).contiguous()
        if self.training:
            return x
        if self.grid.shape[2:4] != x.shape[2:4]:
            lines = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            self.grid = torch.stack(lines[::-1], 2).view(1, 1, rows, columns, 2).float()
        y = x.sigmoid()
        y[..., 0:2] = (y[..., 0:2] * 2.0 - 0.5 + self.grid.to(x.device)) * self.stride
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * self.anchors
        return y.view(batch, -1, 6), x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(Conv(3, 4), Conv(4, 4), Detect())
        self.stride = self.model[-1].stride

    def forward(self, x, augment=False):
        return self.model(x)

    def fuse(self):
        for part in self.model.modules():
            if type(part) is Conv:
                part.conv = nn.utils.fuse_conv_bn_eval(part.conv.eval(), part.bn.eval())
                part.bn = None
                part.forward = part.fused_forward
        return self


class ModelEMA:
    """The moving average of everything in the state dict."""

    def __init__(self, model, decay=0.9):
        self.ema = deepcopy(model).eval()
        self.updates = 0
        self.decay = lambda updates: decay * (1 - math.exp(-updates / 2))
        for param in self.ema.parameters():
            param.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            self.updates += 1
            decay = self.decay(self.updates)
            values = model.state_dict()
            for name, average in self.ema.state_dict().items():
                if average.dtype.is_floating_point:
                    average.mul_(decay).add_((1.0 - decay) * values[name].detach())

    def update_attr(self, model):
        """Of 2020-06, without a list of names: everything that does not begin with ``_``."""
        for name in self.ema.__dict__:
            if not name.startswith("_"):
                setattr(self.ema, name, getattr(model, name))


def attempt_load(path):
    """Loads as ``detect.py`` does."""
    return torch.load(path, map_location="cpu", weights_only=False)["model"].float().fuse().eval()


def strip_optimizer(path):
    saved = torch.load(path, map_location="cpu", weights_only=False)
    saved["optimizer"] = None
    saved["model"].half()
    for param in saved["model"].parameters():
        param.requires_grad = False
    torch.save(saved, path)
