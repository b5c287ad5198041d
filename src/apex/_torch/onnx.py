"""Whether ``torch.onnx`` exports a model."""

from __future__ import annotations

import sys

import torch

from apex._torch.dynamo import at_tracing


@at_tracing  # the new exporter traces by dynamo where its first way fails
def is_exporting() -> bool:
    """Returns whether ``torch.onnx`` exports a model; false where its own question fails."""
    if "torch.onnx" not in sys.modules:
        return False
    try:
        return bool(torch.onnx.is_in_onnx_export())
    except ImportError:  # torch 2.13 asks a package that only its new exporter needs
        return False
