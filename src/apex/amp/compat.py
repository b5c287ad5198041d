"""apex's compatibility checks for early torch releases: each name's error says what to use."""

from __future__ import annotations

from apex import _unavailable

__getattr__ = _unavailable.names_instead(
    __name__,
    {
        "filter_attrs": "dir(module)",
        "is_floating_point": "x.is_floating_point()",
        "is_tensor_like": "isinstance(x, torch.Tensor)",
        "scalar_python_val": "x.item()",
        "tensor_is_float_tensor": "x.dtype is torch.float32",
        **dict.fromkeys(("tensor_is_variable", "variable_is_tensor"), "True: torch merged the two"),
    },
)
