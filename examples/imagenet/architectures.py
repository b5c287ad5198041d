"""The models that ``--arch`` names: torchvision's where it is installed and works, else ours."""

from __future__ import annotations

import importlib
from types import ModuleType

from resnet import STAGES, resnet
from torch import nn


def torchvision_models() -> ModuleType | None:
    """Returns ``torchvision.models``, or None where it is missing or made for another torch.

    PyPI's torchvision raises a RuntimeError on a CPU build of torch: its operators are absent.
    """
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, OSError):
        return None


def build_model(name: str, num_classes: int, *, pretrained: bool = False) -> nn.Module:
    """Returns the model ``name`` for ``num_classes`` classes.

    Raises:
        ValueError: For a name that neither torchvision nor this example has, and for pretrained
            weights without torchvision.
    """
    source = torchvision_models()
    if source is not None and name in source.list_models(module=source):
        if pretrained and num_classes != 1000:
            raise ValueError(
                f"--pretrained weights are for 1000 classes; this data has {num_classes}."
            )
        return source.get_model(
            name, weights="DEFAULT" if pretrained else None, num_classes=num_classes
        )
    if pretrained:
        raise ValueError("--pretrained takes torchvision, which cannot be imported here.")
    if name not in STAGES:
        where = "torchvision cannot be imported here" if source is None else "nor has torchvision"
        raise ValueError(f"--arch {name} is not one of {', '.join(STAGES)}; {where}.")
    return resnet(name, num_classes)
