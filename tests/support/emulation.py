"""Makes the CPU one that emulates some 16-bit dtypes, whichever it does emulate."""

import torch


def emulate(patch, *names):
    """Says that the CPU emulates the dtypes named ``fp16`` and ``bf16``, and no others."""
    patch.setattr("platform.machine", lambda: "x86_64")
    for name in ("bf16", "fp16"):
        check = f"_is_mkldnn_{name}_supported"
        patch.setattr(torch.ops.mkldnn, check, lambda name=name: name not in names)
