"""Functions that several tools share: checked arguments, preserved state, text and JSON."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import arguments, tree
from apex._core.dtypes import math_dtype
from apex._core.param_groups import params_of
from apex._engine.autocast.backward import BackwardAutocast
from apex._engine.autocast.region import casts_off as casts_off
from apex._engine.conversion.state import state_of
from apex._torch.devices import accelerator
from apex._torch.modules import modules_in, named_parameters, named_tensors
from apex.amp.optimizers import unwrap
from apex.debug.place import Finding, prefixed, unwrapped

# -- arguments -------------------------------------------------------------------------------------


def inner(optimizer: Any) -> Optimizer:
    """Returns the optimizer inside wrappers such as LARC, accelerate's and Lightning's.

    Raises:
        TypeError: If it is neither an optimizer nor a wrapper of one.
    """
    wrapped = getattr(optimizer, "optimizer", None)
    if isinstance(wrapped, Optimizer):
        return inner(wrapped)
    return unwrap(optimizer)


def checked_model(caller: str, model: Any, loss_fn: object) -> nn.Module:
    """Returns the model inside wrappers; raises an error if it or ``loss_fn`` cannot be run.

    ``loss_fn`` is None or a function. A class, such as ``nn.MSELoss``, is not accepted.
    """
    is_function = callable(loss_fn) and not isinstance(loss_fn, type)
    if loss_fn is not None and not is_function:
        raise TypeError(
            f"{caller} got {arguments.kind(loss_fn)} as loss_fn; it takes a function of the "
            "model's output that returns the loss."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller} got {type(model).__name__} as the model; it takes a torch.nn.Module, "
            f"followed by its inputs: {caller}(model, x, loss_fn=...)."
        )
    inner = unwrapped(model)
    for name, param in named_parameters(inner):
        if isinstance(param, nn.UninitializedParameter) or param.is_meta:
            raise ValueError(
                f"{caller} got a model whose parameter {name!r} has no values yet (lazy, or on the "
                "meta device). Run the model once or initialize it first."
            )
    return inner


def loss_of(
    caller: str, output: object, loss_fn: Callable[[Any], Any] | None, *, instead: str = ""
) -> Tensor:
    """Returns the loss of a model's output; by default the mean of its squares.

    Raises an error unless the loss is one number, with a gradient where gradients are enabled.
    ``instead`` is a sentence that two of the messages end with.
    """
    if loss_fn is not None:
        loss = loss_fn(output)
    else:
        floating = [tensor for tensor in tree.tensors(output) if tensor.is_floating_point()]
        if not floating:
            raise ValueError(
                f"{caller} got a model whose output ({type(output).__name__}) holds no "
                f"floating-point tensor, so it cannot derive a loss. Pass loss_fn=....{instead}"
            )
        means = [tensor.to(math_dtype(tensor)).square().mean() for tensor in floating]
        loss = torch.stack(means).sum()
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{caller}'s loss_fn returned {type(loss).__name__}; it must take the model's output "
            "and return the loss, a tensor with one element."
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"{caller} got a loss of shape {tuple(loss.shape)} and {loss.dtype}; it takes one "
            "floating-point number. Reduce it in loss_fn, for example with .mean()."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            f"{caller} got a loss that does not require gradients: either no parameter does, or "
            f"the loss was detached or computed under no_grad.{instead}"
        )
    return loss


def gradients(loss: Tensor, tensors: Sequence[Tensor], model: nn.Module) -> Sequence[Tensor | None]:
    """Returns the gradients of a model's loss and writes no ``.grad``. Hooks of the tensors run.

    Casts are those of a ``scale_loss`` block.
    """
    state = state_of(model)
    spec = None if state is None else state.session.spec
    with casts_off() if spec is None else BackwardAutocast(spec):
        return torch.autograd.grad(loss, tensors, allow_unused=True)


# -- the tensors of a training ---------------------------------------------------------------------


def copy_memo(model: nn.Module) -> dict[int, Any]:
    """Returns a memo for a deep copy of a model that keeps results of its last forward pass.

    They are without their graph in the copy; torch would raise an error. ``weight_norm`` keeps such
    a result.
    """
    memo: dict[int, Any] = {}
    for module in modules_in(model):
        for tensor in tree.tensors(vars(module)):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone()
    return memo


class Held(NamedTuple):
    """A tensor of a model or of its optimizer.

    Attributes:
        name: Qualified name of the parameter or buffer in the model.
        role: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"master"`` or ``"state NAME"``.
        value: A tensor; of a state, perhaps a list of tensors or a number.
    """

    name: str
    role: str
    value: Any


def held_by(models: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[Held]:
    """Yields the parameters, buffers, gradients, masters and state of models and optimizers."""
    names: dict[Tensor, str] = {}
    for prefix, model in prefixed(models):
        for name, param in named_parameters(model):
            names[param] = prefix + name
            yield from _with_gradient(prefix + name, param)
        for name, buffer in model.named_buffers():
            yield Held(prefix + name, "buffer", buffer)
    for optimizer in optimizers:
        for param in params_of(optimizer):
            weight = weight_of(param)
            name = names.get(weight, "(a parameter of another model)")
            if weight is not param:
                yield Held(name, "master", param)
            if weight not in names:
                yield from _with_gradient(name, weight)
            for key, value in optimizer.state.get(param, {}).items():
                yield Held(name, f"state {key}", value)


def weight_of(param: Tensor) -> Tensor:
    """Returns the model's parameter of a master; others unchanged."""
    weight: Tensor = getattr(param, "_apex_model", param)
    return weight


def _with_gradient(name: str, param: Tensor) -> Iterator[Held]:
    yield Held(name, "parameter", param)
    if param.grad is not None:
        yield Held(name, "gradient", param.grad)


# -- the state around a run ------------------------------------------------------------------------


@contextmanager
def preserve_state(model: nn.Module, arguments: object) -> Iterator[None]:
    """Restores, at the end of the block, the state that running a model changes.

    This covers the random number generators (torch's on the CPU and on the model's devices,
    Python's and numpy's), the modules' attributes, the model's gradients and buffers, and the
    tensors among the arguments. Autocast's weight cache is cleared, because a weight cast inside
    belongs to a graph that no longer exists.

    Costs a copy of the buffers and of the arguments' tensors.
    """
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        restore_random_numbers(stack, named_tensors(model).values())
        for _, param in named_parameters(model):
            if param.is_leaf:  # a deep copy of a traced module has others
                stack.callback(setattr, param, "grad", param.grad)
                param.grad = None
        for module in modules_in(model):
            buffers = dict(module._buffers)
            stack.callback(_restore_buffers, module, buffers)
            attributes = vars(module).copy()
            stack.callback(vars(module).update, attributes)
        for tensor in (*tree.tensors(arguments), *model.buffers()):
            if _is_expanded(tensor):
                continue
            values = tensor.detach().clone()
            stack.callback(_restore_values, tensor, values)
        stack.enter_context(eager)
        yield


def _is_expanded(tensor: Tensor) -> bool:
    """Returns whether elements share memory, so that torch writes to none."""
    return tensor.layout is torch.strided and 0 in tensor.stride()


def _restore_values(tensor: Tensor, before: Tensor) -> None:
    # Through .data: the user's graph may have saved the tensor, and would check its version.
    tensor.data.copy_(before)


def _restore_buffers(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    buffers = module._buffers
    # Buffers were added or removed. A scripted module allows neither, nor to clear them.
    if list(buffers.keys()) != list(before):
        buffers.clear()
    for name, buffer in before.items():
        buffers[name] = buffer


def restore_random_numbers(stack: ExitStack, tensors: Iterable[Tensor]) -> None:
    """Restores, at the end of the stack, all generators that code on these tensors may use."""
    stack.callback(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:  # otherwise nothing has drawn from it
        stack.callback(numpy.random.set_state, numpy.random.get_state())
    kind = "cuda"  # fork_rng's default, without an effect where no index is given
    device = accelerator()
    if device is not None:
        kind = device.type
    indices = set()
    if kind == "mps":  # has one generator and no device indices, so fork_rng cannot save it
        stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
    else:
        for tensor in tensors:
            if tensor.device.type == kind:
                indices.add(tensor.device.index or 0)
    stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))


class _Eager:
    """Runs compiled parts eagerly while one of its blocks is open; they may end in any order.

    Without dynamo, which is slow to import, there are no compiled parts.
    """

    _open = 0
    _stance: Any = nullcontext()

    def __enter__(self) -> None:
        if not self._open and "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        self._open += 1

    def __exit__(self, *error: object) -> None:
        self._open -= 1
        if not self._open:
            self._stance.__exit__(*error)


eager = _Eager()


# -- formats ---------------------------------------------------------------------------------------

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def short(dtype: str) -> str:
    """Returns a dtype's short name, such as ``"bf16"``; a dash for ``""``."""
    return _SHORT.get(dtype, dtype) or "—"


def percent(share: float) -> str:
    """Returns a share as a percentage."""
    if share < 10.0:
        return f"{100.0 * share:.3g} %"
    return f"{100.0 * share:,.0f} %"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Returns, for instance, ``"1 pass"`` or ``"2 passes"``; ``plural`` is the ending."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{plural}"


def listed(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of the others."""
    text = ", ".join(names[:3])
    more = len(names) - 3
    if more > 0:
        text += f" and {more} more"
    return text


def aligned(table: Sequence[Sequence[str]], left: Sequence[bool]) -> list[str]:
    """Returns the rows of a table as lines, with all cells of a column padded to one width.

    ``left`` tells which columns are aligned to the left; the others are aligned to the right.
    """
    formats = []
    for is_left, *column in zip(left, *table, strict=True):
        width = max(map(len, column))
        formats.append(f"{'<' if is_left else '>'}{width}")
    return ["  ".join(map(format, row, formats)).rstrip() for row in table]


def to_json(value: Any) -> str:
    """Returns nested data as JSON; see :func:`json_types`."""
    return json.dumps(json_types(value), indent=1)


def json_types(value: Any) -> Any:
    """Returns nested data in JSON types, with None for NaN and infinity."""
    if isinstance(value, Finding):
        value = {**vars(value), "source": value.source}
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_types(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
