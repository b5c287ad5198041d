"""The class of a prepared proxy: an object that stands for a module without being one.

Note [Proxies]: classy_vision's models are such objects. Their ``__class__`` is a property that
returns the class of a module inside, and every attribute that they lack is looked up there; they
define ``forward`` or ``__call__`` themselves. The module inside is converted like any other and
holds the state. The proxy may compute too, so its ``forward`` casts, and while that runs, the
module's does not. For this the proxy's real class is replaced by a subclass with the same layout,
bypassing the property.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from apex._core.mixins import new_class
from apex._core.reduced import copied_by
from apex._engine.model.module_class import (
    FORWARD,
    PROXY,
    cast_call,
    is_generated,
    of_plain_class,
    plain_class,
    reduced_as_plain,
    swap_class,
)
from apex._engine.model.state import module_behind, state_of
from apex._pickle import rebuild


def check(proxy: nn.Module) -> None:
    """Raises TypeError if a proxy's own ``forward`` could not cast; changes nothing."""
    try:
        cover(proxy)
    finally:
        uncover(proxy)


def cover(proxy: nn.Module) -> None:
    """Replaces the class of a proxy, and of proxies inside it, by that of prepared ones.

    Leaves proxies that have it already, and those whose type (one written in C) allows no other
    class: without a ``forward`` of their own, they call the module's.

    Raises:
        TypeError: If a proxy of such a type has a ``forward``.
    """
    for each in _chain(proxy):
        kind = type(each)
        if is_generated(kind):
            continue
        try:
            swap_class(each, proxy_class(kind))
        except TypeError as error:
            if _class_forward(kind) is not None or "forward" in own_dict(each):
                raise TypeError(
                    f"amp.initialize got a model of type {kind.__name__}, a proxy of a "
                    "torch.nn.Module with a forward of its own, which amp cannot replace because "
                    "the type allows no subclass in its place. Pass the module inside it."
                ) from error
        else:
            _rename(own_dict(each), "forward", FORWARD)


def uncover(proxy: nn.Module) -> None:
    """Restores the plain class of a proxy and of proxies inside it."""
    for each in _chain(proxy):
        if is_generated(type(each)):
            swap_class(each, plain_class(type(each)))
            _rename(own_dict(each), FORWARD, "forward")


def _chain(proxy: nn.Module) -> list[nn.Module]:
    """Returns a proxy and the proxies of the same module inside it."""
    module, found = module_behind(proxy), [proxy]
    for each in found:  # which grows
        for held in gc.get_referents(each, own_dict(each)):
            is_proxy = isinstance(held, nn.Module) and not issubclass(type(held), nn.Module)
            is_known = any(held is known for known in found)
            if is_proxy and not is_known and module_behind(held) is module:
                found.append(held)
    return found


def own_dict(proxy: nn.Module) -> dict[str, Any]:
    """Returns the attributes of the proxy itself, without those of its module."""
    try:
        own: dict[str, Any] = object.__getattribute__(proxy, "__dict__")
    except AttributeError:  # it has slots only
        return {}
    return own


def proxy_class(base: type) -> type:
    """Returns the class of prepared proxies of class ``base``, always the same one."""
    subclasses: list[type] = type.__subclasses__(base)
    for known in subclasses:
        if PROXY in vars(known):
            return known
    names: dict[str, Any] = {
        "__slots__": (),  # keeps the layout of ``base``
        "__reduce_ex__": _reduce_ex,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "forward": _casting_forward(_class_forward(base) or _forward_behind),
    }
    made: type = new_class(base, (base,), names)
    type.__setattr__(made, PROXY, base)  # last: a failed class may still be listed
    return made


def rebuild_proxy(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Rebuilds a pickled proxy of a converted model; its attributes are set afterwards."""
    proxy = func(*args)
    cover(proxy)
    return proxy


def _reduce_ex(proxy: Any, protocol: Any) -> Any:
    """Pickles a proxy of a model that casts no parameters as a plain proxy."""
    state = state_of(proxy)
    if state is not None and state.plan.casts_down:
        return _reduced(proxy, max(protocol, 2))
    reduced = _plain(proxy).__reduce_ex__(proxy, 2)
    return reduced_as_plain(type(proxy), reduced, own_dict(proxy).get(FORWARD))


def _copy(proxy: Any) -> Any:
    own = getattr(_plain(proxy), "__copy__", None)
    return copied_by(copy.copy, proxy, _reduced(proxy, 4), {}) if own is None else own(proxy)


def _deepcopy(proxy: Any, memo: dict[int, Any]) -> Any:
    own = getattr(_plain(proxy), "__deepcopy__", None)
    if own is not None:
        return own(proxy, memo)
    copied = functools.partial(copy.deepcopy, memo=memo)
    return copied_by(copied, proxy, _reduced(proxy, 4), memo)


def _reduced(proxy: Any, protocol: int) -> Any:
    base = _plain(proxy)
    reduced = base.__reduce_ex__(proxy, protocol)
    if isinstance(reduced, str):
        return reduced
    func, args, inner = of_plain_class(type(proxy), reduced)
    forward = own_dict(proxy).get(FORWARD)
    if forward is not None and getattr(forward, "__func__", forward) is _class_forward(base):
        # pickle would look it up by name, and find the ``forward`` of the generated class.
        inner = {name: value for name, value in inner.items() if name != FORWARD}
    return rebuild, ("proxy", func, *args), inner, *reduced[3:]


def _casting_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)  # keeps the signature, which libraries read
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        replaced = own_dict(self).get(FORWARD)
        run, bound = (own, (self,)) if replaced is None else (replaced, ())
        state, thread = state_of(self), threading.get_ident()
        if state is None or thread in state.in_proxy:  # restored, or called by another proxy
            return run(*bound, *args, **kwargs)
        try:
            try:
                state.in_proxy.add(thread)
                return cast_call(self, state, run, bound, args, kwargs)
            finally:
                state.in_proxy.discard(thread)
        finally:  # see Note [Interrupted blocks]
            state.in_proxy.discard(thread)

    return forward


def _forward_behind(proxy: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the ``forward`` that the proxy's ``__getattr__`` finds."""
    find = getattr(_plain(proxy), "__getattr__", None)
    forward = module_behind(proxy).forward if find is None else find(proxy, "forward")
    return forward(*args, **kwargs)


def _class_forward(base: type) -> Callable[..., Any] | None:
    own = getattr(base, "forward", None)
    return own if callable(own) else None


def _rename(attributes: dict[str, Any], old: str, new: str) -> None:
    if old in attributes:
        attributes.setdefault(new, attributes.pop(old))


def _plain(proxy: Any) -> Any:
    return getattr(type(proxy), PROXY, type(proxy))
