"""The class of a prepared proxy: an object that stands for a module and is none.

Note [Proxies]: classy_vision's models are such objects. Their ``__class__`` is a property that
names the class of a module inside; ``modules()`` and whatever else they lack is that module's; a
``forward`` or a ``__call__`` is their own. The module inside is converted as any other, and carries
the state. What the proxy itself runs has to be cast too, so its ``forward`` casts as well, and the
module's then does not. The proxy's real class gives way to a subclass of the same layout, past the
property.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from apex._engine.model.module_class import (
    FORWARD,
    PROXY,
    cast_call,
    copied_by,
    is_generated,
    new_class,
    of_plain_class,
    plain_class,
    reduced_as_plain,
    swap_class,
)
from apex._engine.model.state import module_behind, state_of
from apex._pickle import rebuild


def check(proxy: nn.Module) -> None:
    """Raises TypeError where a proxy's own ``forward`` could not cast; changes nothing."""
    try:
        cover(proxy)
    finally:
        uncover(proxy)


def cover(proxy: nn.Module) -> None:
    """Gives a proxy, and those inside it, the class of prepared ones; none gets it twice.

    A type written in C may allow no other class. What it lacks is the module's in any case, so it
    can stay as it is unless it has a ``forward``.

    Raises:
        TypeError: If it has.
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
                    f"amp.initialize got a model of type {kind.__name__}, which stands for a "
                    "torch.nn.Module, has a forward of its own and allows no other class, so that "
                    "amp cannot cast what it runs. Pass the module inside it."
                ) from error
        else:
            _rename(own_dict(each), "forward", FORWARD)


def uncover(proxy: nn.Module) -> None:
    """Gives a proxy, and those inside it, their plain class back."""
    for each in _chain(proxy):
        if is_generated(type(each)):
            swap_class(each, plain_class(type(each)))
            _rename(own_dict(each), FORWARD, "forward")


def _chain(proxy: nn.Module) -> list[nn.Module]:
    """Returns a proxy and those inside it that stand for the same module."""
    module, found = module_behind(proxy), [proxy]
    for each in found:  # which grows
        found += [
            held
            for held in gc.get_referents(each, own_dict(each))
            if _is_proxy(held) and module_behind(held) is module and not _among(held, found)
        ]
    return found


def _is_proxy(value: Any) -> bool:
    return isinstance(value, nn.Module) and not issubclass(type(value), nn.Module)


def _among(value: object, several: list[nn.Module]) -> bool:
    return any(value is each for each in several)


def own_dict(proxy: nn.Module) -> dict[str, Any]:
    """Returns the attributes of the object itself; those of its module are not among them."""
    try:
        own: dict[str, Any] = object.__getattribute__(proxy, "__dict__")
    except AttributeError:  # all it has is in slots
        return {}
    return own


def proxy_class(base: type) -> type:
    """Returns the class of prepared proxies of class ``base``, always the same one."""
    subclasses: list[type] = type.__subclasses__(base)
    for known in subclasses:
        if PROXY in vars(known):
            return known
    names: dict[str, Any] = {
        "__slots__": (),  # with room for more, it could not take the place of ``base``
        "__reduce_ex__": _reduce_ex,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "forward": _casting_forward(_class_forward(base) or _forward_behind),
    }
    made: type = new_class(base, (base,), names)
    type.__setattr__(made, PROXY, base)  # last: a class that failed to be made stays in the list
    return made


def rebuild_proxy(func: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Rebuilds a pickled proxy of a converted model; its attributes are set afterwards."""
    proxy = func(*args)
    cover(proxy)
    return proxy


def _reduce_ex(proxy: Any, protocol: Any) -> Any:
    """Pickles a proxy of a model that casts no parameters as the plain proxy that it is."""
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
        # A file holds it as a name of the proxy, which would be our ``forward``.
        inner = {name: value for name, value in inner.items() if name != FORWARD}
    return rebuild, ("proxy", func, *args), inner, *reduced[3:]


def _casting_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)  # keeps the signature, which libraries read
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        set_on_it = own_dict(self).get(FORWARD)
        run, bound = (own, (self,)) if set_on_it is None else (set_on_it, ())
        state, thread = state_of(self), threading.get_ident()
        if state is None or thread in state.in_proxy:  # restored since, or called by another proxy
            return run(*bound, *args, **kwargs)
        state.in_proxy.add(thread)
        try:
            return cast_call(self, state, run, bound, args, kwargs)
        finally:
            state.in_proxy.discard(thread)

    return forward


def _forward_behind(proxy: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the ``forward`` that the proxy's plain class finds elsewhere."""
    find = getattr(_plain(proxy), "__getattr__", None)
    forward = module_behind(proxy).forward if find is None else find(proxy, "forward")
    return forward(*args, **kwargs)


def _class_forward(base: type) -> Callable[..., Any] | None:
    own = getattr(base, "forward", None)
    return own if callable(own) else None


def _rename(attributes: dict[str, Any], old: str, new: str) -> None:
    if old in attributes:
        attributes[new] = attributes.pop(old)


def _plain(proxy: Any) -> Any:
    return getattr(type(proxy), PROXY, type(proxy))
