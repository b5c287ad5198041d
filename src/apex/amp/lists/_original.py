"""The names in apex's original op lists."""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, tuple[str, ...]]

_SPACES: Mapping[str, Mapping[str, str]] = {
    "torch": {
        "FP16_FUNCS": (
            "conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
            "conv_transpose3d conv_tbc prelu addmm addmv addr matmul mm mv addbmm "
            "baddbmm bmm"
        ),
        "FP32_FUNCS": (
            "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh "
            "tan pow cumprod cumsum dist norm prod std sum var renorm"
        ),
        "CASTS": ("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne"),
        "SEQUENCE_CASTS": "cat stack",
        "BANNED_FUNCS": "",
    },
    "torch.nn.functional": {
        "FP16_FUNCS": (
            "conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
            "conv_transpose3d conv_tbc linear"
        ),
        "FP32_FUNCS": (
            "interpolate grid_sample softplus softmin log_softmax softmax gelu "
            "layer_norm group_norm local_response_norm normalize cosine_similarity "
            "poisson_nll_loss cosine_embedding_loss cross_entropy "
            "hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss "
            "multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
            "nll_loss binary_cross_entropy_with_logits smooth_l1_loss "
            "soft_margin_loss triplet_margin_loss ctc_loss"
        ),
        "CASTS": "",
        "SEQUENCE_CASTS": "",
        "BANNED_FUNCS": "binary_cross_entropy",
    },
    "torch.Tensor": {
        "FP16_FUNCS": "__matmul__ prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm",
        "FP32_FUNCS": (
            "__ipow__ __pow__ __rpow__ cpu acos asin cosh erfinv exp expm1 log "
            "log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod "
            "std sum var renorm"
        ),
        "CASTS": (
            "__add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ "
            "__isub__ __itruediv__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ "
            "__rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ addcdiv addcmul "
            "atan2 cross dot add div mul eq equal ge gt le lt ne"
        ),
        "SEQUENCE_CASTS": "",
        "BANNED_FUNCS": "",
    },
}

ORIGINAL: Mapping[str, Names] = {
    space: {name: tuple(text.split()) for name, text in lists.items()}
    for space, lists in _SPACES.items()
}
"""Names by namespace and list."""
