"""apex's small tensor functions: each name's error says what to use."""

from __future__ import annotations

from apex import _unavailable

_RNN = "torch's RNNs, whose weights amp casts directly"
_CASTS = "amp.half_function, amp.float_function or amp.promote_function, which cast arguments"
_REGISTER = "amp.register_half_function(module, name) or another register function"
_TENSOR = "isinstance(x, torch.Tensor) and x.dtype"

__getattr__ = _unavailable.names_instead(
    __name__,
    {
        **dict.fromkeys(("as_inplace", "has_func", "get_func"), "getattr and hasattr"),
        **dict.fromkeys(("cached_cast", "casted_args", "should_cache", "verbosify"), _CASTS),
        **dict.fromkeys(("collect_fp_tensor_types", "is_fp_tensor", "type_string"), _TENSOR),
        **dict.fromkeys(("get_cuda_version", "is_cuda_enabled"), "torch.version.cuda"),
        "is_nested": "isinstance(x, (list, tuple))",
        **dict.fromkeys(("maybe_float", "maybe_half"), "x.float() or x.half()"),
        "new_synthesize_flattened_rnn_weights": _RNN,
        **dict.fromkeys(("set_func", "set_func_save"), _REGISTER),
        "synthesize_flattened_rnn_weights": _RNN,
    },
)
