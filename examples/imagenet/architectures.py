"""The models that ``--arch`` selects: torchvision's if it imports, otherwise this example's."""

from __future__ import annotations

import importlib
from types import ModuleType

from resnet import STAGES, resnet
from torch import nn


def torchvision_models() -> ModuleType | None:
    """Returns ``torchvision.models``, or None if it is missing or does not match torch.

    PyPI's torchvision raises a RuntimeError on a CPU build of torch, which lacks its operators.
    """
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, OSError):
        return None


def build_model(name: str, num_classes: int, *, pretrained: bool = False) -> nn.Module:
    """Returns the model ``name`` for ``num_classes`` classes.

    Raises:
        ValueError: If neither torchvision nor this example has the model, or if pretrained weights
            are requested without torchvision.
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
        raise ValueError("--pretrained needs torchvision, which cannot be imported.")
    if name not in STAGES:
        where = (
            "torchvision cannot be imported"
            if source is None
            else "torchvision does not have it either"
        )
        raise ValueError(f"--arch {name} is not one of {', '.join(STAGES)}; {where}.")
    return resnet(name, num_classes)
