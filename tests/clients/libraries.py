"""Imports of other libraries; a test module that needs one is skipped where it is missing."""

import importlib.util
import warnings

import pytest
import torch

_kept = []  # torch forgets an operator with the object that defined it


def need(name):
    """Returns the module ``name``, or skips the tests of the module that asks.

    Deprecations that the import itself meets are the library's own business.
    """
    _declare_torchvision_operators()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def _declare_torchvision_operators():
    # PyPI's torchvision is built for CUDA. On a CPU torch its kernels do not load, and its import
    # fails at the two operators that it describes without asking whether they are there.
    if _kept or torch.version.cuda or not importlib.util.find_spec("torchvision"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
