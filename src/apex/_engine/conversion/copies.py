"""Plain copies and pickles of converted models and of their parts.

Note [Plain copies]
    What is copied or pickled is plain: of the own class, in fp32 with exact values, without amp.
    Each module of a 16-bit model has its own ``__deepcopy__`` and ``__reduce_ex__``, which ``copy``
    and ``pickle`` find before those of its class. They hide amp's part of this one module and call
    the class's. So a part can be copied alone, before or after its model, and what several objects
    share stays shared. Two methods give ``torch.jit.script`` and Hugging Face's ``save_pretrained``
    a plain copy of the module.

    A deep copy finds fp32 copies of 16-bit tensors in its memo. A pickle holds a master in place of
    its parameter, as the groups of optimizers do; masters are pickled as plain parameters. So a
    model and an optimizer that are copied or pickled together share their parameters afterwards.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import tree
from apex._engine import master_table
from apex._engine.masters import update_masters_from_model
from apex._torch.modules import modules_in, named_tensors


class PlainCopies:
    """Makes copies and pickles of one module of a 16-bit model plain, until it is removed."""

    def __init__(
        self,
        module: nn.Module,
        hooks: Sequence[RemovableHandle],
        take_in: weakref.WeakMethod[Any],
    ) -> None:
        """Sets the module's methods.

        Args:
            module: Keeps this object alive.
            hooks: The hooks that copies do not have; removed with this object's methods.
            take_in: Gives these methods to parts that were put into a module since.
        """
        self._module = weakref.ref(module)
        self._hooks = hooks
        self._take_in = take_in
        methods: dict[str, Callable[..., Any]] = {
            "__deepcopy__": PlainCopies._deepcopy,
            "__reduce_ex__": PlainCopies._reduce_ex,
            "__prepare_scriptable__": PlainCopies._prepare_scriptable,
        }
        has_own = "save_pretrained" in vars(module)
        if not has_own and getattr(type(module), "save_pretrained", None) is not None:
            methods["save_pretrained"] = PlainCopies._save_pretrained
        self._names = (*methods,)
        for name, method in methods.items():
            # Not a bound method, which torch.jit would compile.
            vars(module)[name] = functools.partial(method, self)

    def remove(self) -> None:
        """Removes the hooks and the methods."""
        for hook in self._hooks:
            hook.remove()
        module = self._module()
        if module is None:  # replaced by another one
            return
        for name in self._names:
            vars(module).pop(name, None)

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        # Another module may have taken over the attributes of this one.
        module: Any = object_of(sys._getframe(1), self._module())
        if "__deepcopy__" not in vars(module):
            return deepcopy_by_class(module, memo)
        for tensor in named_tensors(module).values():
            master_table.copy_to(memo, tensor)
        for table, key in self._entries():
            memo[id(table[key])] = table[key]  # not copied, as the next loop drops it
        with replaced(vars(module), dict.fromkeys(self._names)):
            copied = deepcopy_by_class(module, memo)
        for table, key in self._entries():
            memo.get(id(table), {}).pop(key, None)
        return copied

    def _reduce_ex(self, protocol: Any) -> Any:
        module: Any = self._module()
        take_in = self._take_in()
        if take_in is not None:
            take_in(module)
        attributes = vars(module)
        stand_ins: dict[int, Tensor] = {}
        for tensor in named_tensors(module).values():
            stand_ins[id(tensor)] = master_table.stand_in(tensor)
        plain: dict[str, Any] = dict.fromkeys(self._names)
        for name in ("_parameters", "_buffers"):
            plain[name] = {
                key: stand_ins.get(id(tensor)) for key, tensor in attributes[name].items()
            }
        amps = {id(table): key for table, key in self._entries()}
        for name, table in attributes.items():
            if id(table) in amps:
                plain[name] = table.copy()
                del plain[name][amps[id(table)]]
        with replaced(attributes, plain):
            reduced = snapshot(module.__reduce_ex__(protocol), attributes)
        # Also in attributes that hold the module's tensors.
        return tree.map_tensors(lambda tensor: stand_ins.get(id(tensor), tensor), reduced)

    def _prepare_scriptable(self) -> Any:
        """Returns what ``torch.jit.script`` compiles in place of the module."""
        module: Any = self._module()
        return shallow_copy(module)

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the plain module: Hugging Face's method also saves the parameters' dtype."""
        return self._prepare_scriptable().save_pretrained(*args, **kwargs)

    def _entries(self) -> Iterator[tuple[dict[int, Any], int]]:
        """Yields the tables that hold amp's hooks, with the key of each."""
        for hook in self._hooks:
            for reference in (hook.hooks_dict_ref, *hook.extra_dict_ref):
                table = reference()
                if table is not None and hook.id in table:
                    yield table, hook.id


def shallow_copy(model: nn.Module) -> Any:
    """Returns the plain model whose parameters are the masters.

    Other attributes are shared, too, as far as they hold no modules.
    """
    memo: dict[int, Any] = {}
    for module in modules_in(model):
        for value in vars(module).values():
            if not isinstance(value, (nn.Module, list, tuple, dict, set)):
                memo[id(value)] = value
    for tensor in named_tensors(model).values():
        pair = master_table.pair_of(tensor)
        if pair is not None:
            update_masters_from_model([pair])
        memo[id(tensor)] = master_table.stand_in(tensor)
    return copy.deepcopy(model, memo)


@contextmanager
def replaced(attributes: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Replaces some of a module's attributes; hides those whose value is ``None``."""
    before = {name: attributes[name] for name in values}
    for name, value in values.items():
        if value is None:
            del attributes[name]
        else:
            attributes[name] = value
    try:
        yield
    finally:
        attributes.update(before)


def object_of(caller: FrameType, method_of: object) -> Any:
    """Returns the object that ``copy.deepcopy`` copies by a method of another one.

    It may be a wrapper, such as a compiled model or LARC, whose ``__getattr__`` found the method.
    """
    if caller.f_code is copy.deepcopy.__code__:
        return caller.f_locals["x"]
    return method_of


def deepcopy_by_class(module: Any, memo: dict[int, Any]) -> Any:
    """Deep-copies an object as its class does, past a ``__getattr__`` that finds a method."""
    if inspect.getattr_static(type(module), "__deepcopy__", None) is not None:
        return copy.deepcopy(module, memo)
    vars(module)["__deepcopy__"] = None
    try:
        copied = copy.deepcopy(module, memo)
    finally:
        del vars(module)["__deepcopy__"]
    if isinstance(copied, type(module)):
        vars(copied).pop("__deepcopy__", None)
    return copied


def snapshot(part: Any, attributes: dict[str, Any]) -> Any:
    """Returns a part of a reduction, in which a copy replaces the object's own ``__dict__``."""
    if part is attributes:
        return part.copy()
    if isinstance(part, tuple):
        return tuple(snapshot(item, attributes) for item in part)
    if isinstance(part, dict) and any(value is attributes for value in part.values()):
        return {key: snapshot(value, attributes) for key, value in part.items()}
    return part
