"""Half-precision models and fp32 masters, for hand-written training loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex import _unavailable
from apex._core import arguments, dtypes, tree
from apex._core.flat import flatten, unflatten
from apex._engine.masters import add_grads, fp32_copies, make_master
from apex._torch import foreach
from apex._torch.dynamo import untraced
from apex._torch.modules import flatten_rnns, modules_in

__getattr__ = _unavailable.names_instead(
    __name__, dict.fromkeys(("TORCH_MAJOR", "TORCH_MINOR"), "torch.__version__")
)

clip_grad_norm = nn.utils.clip_grad_norm_

Module = TypeVar("Module", bound=nn.Module)


class tofp16(nn.Module):  # noqa: N801 - apex's name
    """Casts its input to fp16."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - apex's name
        """Returns ``input`` in fp16."""
        return input.half()


def BN_convert_float(module: Module) -> Module:  # noqa: N802 - apex's name
    """Casts every batch norm with a weight and a bias to fp32, in place; returns ``module``.

    Statistics and weights that are already rounded to fp16 keep their rounded values.
    """
    for part in modules_in(module):
        if _keeps_fp32(part):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Returns the network in fp16, with batch norm in fp32 and its input cast to fp16.

    Changes the network in place. :class:`FP16Model` keeps the names in its ``state_dict``.
    """
    half = convert_network(network, torch.float16)
    return nn.Sequential(tofp16(), BN_convert_float(half))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters, gradients and buffers of a module, not its children."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if dtypes.is_castable(tensor):
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(dtype)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Casts a network in place, except batch norm with a weight and a bias; returns it."""
    for module in modules_in(network):
        if not _keeps_fp32(module):
            convert_module(module, dtype)
    flatten_rnns(network)
    return network


class FP16Model(nn.Module):
    """A network in fp16, with batch norm in fp32, that casts its inputs.

    Attributes:
        network: The network, changed in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the network on the inputs with every floating tensor in fp16."""
        args, kwargs = tree.cast_arguments(inputs, kwargs, torch.float16)
        return self.network(*args, **kwargs)


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the model's trainable parameters, and fp32 masters for the optimizer.

    Args:
        model: Any model.
        flat_master: Whether to create one flat master of all parameters, with a gradient. The
            parameters may have several dtypes, but must be on one device.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    values = [param.detach() for param in params]
    if not arguments.flag("flat_master", flat_master):
        return params, [make_master(value.clone()) for value in values]
    master = nn.Parameter(flatten(values).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


def model_grads_to_master_grads(
    model_params: Iterable[nn.Parameter],
    master_params: Iterable[nn.Parameter],
    flat_master: bool = False,
) -> None:
    """Copies the model's gradients to the masters, in fp32.

    If a parameter has no gradient, its master gets none; a flat master gets zeros for it.

    Raises:
        ValueError: If the lists do not match, or are swapped.
    """
    model_params, master_params = _fitting(model_params, master_params, flat_master)
    if flat_master:
        zeros_or_grads = [
            torch.zeros_like(param) if param.grad is None else param.grad for param in model_params
        ]
        master_params[0].grad = flatten(zeros_or_grads).float()
        return
    grads = []
    receivers = []
    for param, master in zip(model_params, master_params, strict=True):
        master.grad = None
        if param.grad is not None:
            grads.append(param.grad)
            receivers.append(master)
    add_grads(receivers, fp32_copies(grads, receivers))


@untraced
@torch.no_grad()
def master_params_to_model_params(
    model_params: Iterable[nn.Parameter],
    master_params: Iterable[nn.Parameter],
    flat_master: bool = False,
) -> None:
    """Copies the masters to the model, rounded to its dtype.

    Raises:
        ValueError: If the lists do not match, or are swapped.
    """
    model_params, master_params = _fitting(model_params, master_params, flat_master)
    values: Sequence[Tensor] = master_params
    if flat_master:
        values = unflatten(master_params[0], model_params)
    foreach.copy_(model_params, values)


def to_python_float(t: Any) -> Any:
    """Returns the value of a tensor, or the first item of a sequence; synchronizes."""
    return t.item() if isinstance(t, Tensor) else t[0]  # sync: the caller asks for a host number


def _keeps_fp32(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def _fitting(
    model: Iterable[nn.Parameter], masters: Iterable[nn.Parameter], flat_master: bool
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns both arguments as lists; raises ValueError if they do not match or are swapped."""
    model = list(model)
    masters = list(masters)
    sizes = [param.numel() for param in model]
    master_sizes = [param.numel() for param in masters]
    expected_sizes = [sum(sizes)] if flat_master else sizes
    if master_sizes != expected_sizes:
        raise ValueError(
            f"The masters hold {master_sizes} elements, the model's parameters {sizes} "
            f"(flat_master={flat_master}). Pass the two lists that one prep_param_lists call "
            "returned, and the same flat_master."
        )
    has_low_masters = any(map(dtypes.is_low_precision, masters))
    if has_low_masters and not any(map(dtypes.is_low_precision, model)):
        raise ValueError(
            "The masters are in 16 bits and the model's parameters are not: the lists are "
            "swapped. Pass the model's parameters first, then the masters."
        )
    return model, masters


def backwards_debug_hook(grad: Tensor) -> None:
    """Raises RuntimeError; a hook for masters, which autograd must not reach."""
    raise RuntimeError(
        f"A master got a gradient of shape {tuple(grad.shape)} from a backward pass. Compute the "
        "loss from the model's parameters, not from the masters."
    )
