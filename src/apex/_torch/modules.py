"""What a module knows of its own tensors, where torch has no public way to ask."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

_STATE_DICT = nn.Module.state_dict
_LOAD = nn.Module.load_state_dict.__code__.co_filename, "load"
_SAVE_OWN = nn.Module._save_to_state_dict
_EXTRA_STATE = nn.Module.get_extra_state
_NAMED_MODULES = nn.Module.named_modules
_NAMING = "torch.distributed.checkpoint.state_dict", "_get_optim_state_dict"
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def non_persistent(module: nn.Module) -> Container[str]:
    """Returns the names of the module's own buffers that its ``state_dict`` leaves out.

    A torch that keeps them elsewhere has none here.
    """
    names: Container[str] = module.__dict__.get("_non_persistent_buffers_set", ())
    return names


def has_global_hooks() -> bool:
    """Returns whether hooks run at the calls of all modules; False where torch does not tell."""
    return any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)


def named_modules(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Returns what ``model.named_modules(prefix=name)`` yields, in a fifth of its time.

    Its generators are nested as deep as the modules. Not a list: thousands of tuples would make the
    garbage collector walk the whole heap once more.
    """
    found: dict[str, nn.Module] = {}
    _add_modules(model, name, set(), found)
    return found


def _add_modules(
    module: nn.Module, name: str, seen: set[nn.Module], found: dict[str, nn.Module]
) -> None:
    if getattr(type(module), "named_modules", None) is not _NAMED_MODULES:
        found.update(module.named_modules(seen, name))
        return
    seen.add(module)
    found[name] = module
    prefix = f"{name}." if name else ""
    for key, inner in module._modules.items():
        if inner is not None and inner not in seen:
            _add_modules(inner, prefix + key, seen, found)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of ``model``, then its buffers, each once, by qualified name."""
    modules = named_modules(model)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for kind in ("_parameters", "_buffers"):
        for name, module in modules.items():
            tensors: Mapping[str, Tensor | None] = getattr(module, kind)
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{name}.{key}" if name else key] = tensor
    return found


def own_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the module's own parameters and buffers, with ``prefix`` before their names.

    As ``named_parameters`` and ``named_buffers`` without recursion, in a sixth of their time.
    """
    return tensors_of([(f"{prefix}." if prefix else "", module)])


def tensors_of(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the own parameters and buffers of modules, with their prefixes before their names."""
    for prefix, module in parts:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield prefix + name, tensor


def has_buffers(module: nn.Module) -> bool:
    """Returns whether the module has buffers of its own."""
    return bool(module._buffers)


def child(module: nn.Module, name: str) -> nn.Module | None:
    """Returns the module's own submodule of that name; None if it has none."""
    return module._modules.get(name)


def children(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the module's own submodules with their names, which begin with its ``name``."""
    prefix = f"{name}." if name else ""
    for key, inner in module._modules.items():
        if inner is not None:
            yield prefix + key, inner


def state_dict_hooks(module: nn.Module) -> Mapping[int, object]:
    """Returns the ``state_dict`` post-hooks of a module."""
    hooks: Mapping[int, object] = module._state_dict_hooks
    return hooks


class Plain(NamedTuple):
    """A module and those inside, parents first; torch's own code saves them.

    Attributes:
        modules: The modules by the prefix of their entries.
        hooks: The post-hooks of those that have one, and one pre-hook; of the class asked for.
    """

    modules: dict[str, nn.Module]
    hooks: dict[str, Any]


def plain_modules(module: nn.Module, prefix: str, hook: type) -> Plain | None:
    """Returns a module and those inside, if only torch's code and certain hooks save those inside.

    Args:
        module: A module whose ``state_dict`` is called. It may have any hooks.
        prefix: The prefix of its entries.
        hook: The class of the post-hooks that modules inside may have, with one pre-hook each.

    Returns:
        ``None`` if other code runs between the first entry and the post-hooks of ``module``, and
        could see entries.
    """
    own = [*module._state_dict_hooks.values()]
    alone = len(own) == 1 == len(module._state_dict_pre_hooks) and type(own[0]) is hook
    found = Plain({prefix: module}, {prefix: own[0]} if alone else {})
    saves_own = _saves_own_plainly(type(module))
    return found if saves_own and _find(module, prefix, hook, found, set()) else None


def saves_plainly(kind: Any) -> bool:
    """Returns whether ``state_dict`` of a class is torch's own."""
    return getattr(kind, "state_dict", None) is _STATE_DICT


def new_state_dict() -> Any:
    """Returns what ``nn.Module.state_dict`` saves to unless given another ``destination``."""
    made: Any = OrderedDict()
    made._metadata = OrderedDict()
    return made


def save_plainly(plain: Plain, destination: Any) -> Iterator[tuple[str, nn.Module]]:
    """Saves modules as ``nn.Module.state_dict`` does, without their hooks.

    Yields those with a hook as soon as they are saved, while their entries are in the cache.
    """
    modules, hooks = plain
    metadata = getattr(destination, "_metadata", {})
    for prefix, module in modules.items():
        metadata[prefix[:-1]] = {"version": module._version}
        module._save_to_state_dict(destination, prefix, False)
        if prefix in hooks:
            yield prefix, module


def is_being_saved(prefix: str, destination: object) -> bool:
    """Returns whether a module with this prefix is, or was, saved to ``destination``.

    A dict that torch did not make itself tells nothing.
    """
    return prefix[:-1] in getattr(destination, "_metadata", ())


def is_loaded_by_torch(module: nn.Module) -> bool:
    """Returns whether the running ``load_state_dict`` of ``module`` will call its post-hooks.

    Loaders of other libraries (mmcv 1.x) call the modules' ``_load_from_state_dict`` themselves,
    which calls pre-hooks only.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_name) == _LOAD and frame.f_locals.get("module") is module:
            return True
        frame = frame.f_back
    return False


def that_names_parameters() -> nn.Module | None:
    """Returns the model in which ``torch.distributed.checkpoint`` will look up parameters.

    None if the caller of the calling function is not its ``get_state_dict`` for an optimizer.
    """
    frame = sys._getframe(2)
    if (frame.f_globals.get("__name__"), frame.f_code.co_name) != _NAMING:
        return None
    model = frame.f_locals.get("model")
    return model if isinstance(model, nn.Module) else None


def _find(module: nn.Module, prefix: str, kind: type, found: Plain, plain: set[type]) -> bool:
    modules, hooks = found
    for name, inner in module._modules.items():
        if inner is None:
            continue
        own, known = type(inner), inner._state_dict_hooks
        if own not in plain:
            if not (saves_plainly(own) and _saves_own_plainly(own)):
                return False
            plain.add(own)
        if len(known) != len(inner._state_dict_pre_hooks) or "state_dict" in inner.__dict__:
            return False
        path = f"{prefix}{name}."
        modules[path] = inner
        if known:
            hook, *others = known.values()
            if type(hook) is not kind or others:
                return False
            hooks[path] = hook
        if inner._modules and not _find(inner, path, kind, found, plain):
            return False
    return True


def _saves_own_plainly(kind: type) -> bool:
    own = getattr(kind, "_save_to_state_dict", None), getattr(kind, "get_extra_state", None)
    return own == (_SAVE_OWN, _EXTRA_STATE)
