"""Imports of other libraries; a test module that needs one is skipped where it is missing."""

import importlib.util
import socket
import warnings

import pytest
import torch

of_its_time = [
    pytest.mark.clients,
    # Deprecations that a library of 2020 meets are its own business; what apex says is not.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:::apex"),
]

_kept = []  # torch forgets an operator with the object that defined it


def need(name):
    """Returns the module ``name``, or skips the tests of the module that asks.

    Warnings that the import itself meets are the library's own business.
    """
    declare_torchvision_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def free_port():
    """Returns a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def declare_torchvision_operators():
    # PyPI's torchvision is built for CUDA. On a CPU torch its kernels do not load, and its import
    # fails at the two operators that it describes without asking whether they are there.
    if _kept or torch.version.cuda or not importlib.util.find_spec("torchvision"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
