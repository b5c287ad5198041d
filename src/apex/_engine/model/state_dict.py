"""Fp32 state dicts of low-precision modules, and lossless loading.

Note [One hook object per module]: ``state_dict`` and ``load_state_dict`` work on any module, so
every module with a 16-bit tensor in its subtree carries hooks, as in apex. A hook handles only its
module's own tensors, so it does not matter whether the module, a parent or a wrapper is called.
Between calls it keeps weak references only, so that a failed call leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._engine.model.kept_buffers import KeptBuffer, plain
from apex._engine.model.plan import MasterSource
from apex._pickle import rebuild
from apex._torch.modules import child, children, own_tensors


class MasterLink:
    """Connects a converted model's modules to the masters of their parameters.

    A deep copy keeps a weak link to the original's source, which has the copy's masters if an
    optimizer was copied with it. A pickle keeps no link.
    """

    def __init__(self, masters: MasterSource | None = None) -> None:
        """Connects to ``masters``; ``None`` if there are none."""
        self._masters = masters
        self._origin: weakref.ref[MasterSource] | None = None
        self._saving: dict[str, weakref.ref[nn.Module]] = {}
        # By id of a tensor: its key and the id of its entry. References would cost a collection.
        self._entries: dict[int, tuple[str, int]] = {}

    @property
    def source(self) -> MasterSource | None:
        """The source of the modules' masters, or ``None``."""
        return self._masters if self._origin is None else self._origin()

    def write_back(self) -> None:
        """Rounds written masters into the model."""
        if (source := self.source) is not None:
            source.write_back()

    def begin_saving(self, module: nn.Module, prefix: str) -> None:
        """Writes masters back once per ``state_dict`` call, at the outermost hooked module."""
        if not self._is_inside(module, prefix):
            self._saving = {}
            self._entries = {}
            self.write_back()
        if not self._saving or any(children(module)):
            self._saving[prefix] = weakref.ref(module)

    def end_saving(self, module: nn.Module, prefix: str) -> None:
        """Ends the call if ``module`` is the one that began it."""
        for outer_prefix, outer in self._saving.items():  # the first one is the outermost
            if outer_prefix == prefix and outer() is module:
                self._saving = {}
                self._entries = {}
            return

    def _is_inside(self, module: nn.Module, prefix: str) -> bool:
        # A failed call never ended; only the path distinguishes it from an outer call.
        around, _, name = prefix[:-1].rpartition(".")
        reference = self._saving.get(f"{around}." if around else "")
        outer = None if reference is None else reference()
        return outer is not None and outer is not module and child(outer, name) is module

    def fp32_entry(
        self, destination: MutableMapping[str, Any], key: str, tensor: Tensor, entry: Tensor
    ) -> Tensor:
        """Returns ``entry`` in fp32 with the exact value of ``tensor``, as a new tensor.

        Entries of tied parameters share memory, as in torch.
        """
        tied = self._entries.get(id(tensor))
        if tied is not None and id(destination.get(tied[0])) == tied[1]:
            return cast(Tensor, destination[tied[0]])
        source = self.source
        master = None if source is None else source.master_of(tensor)
        result = exact_value(entry, [] if master is None else [master])
        self._entries[id(tensor)] = (key, id(result))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterLink:
        """Returns a link to the same source, which the copy does not keep alive."""
        new = memo[id(self)] = MasterLink()
        source = self.source
        new._origin = None if source is None else weakref.ref(source)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without any source."""
        return rebuild, ("master_link",)


class _Loading(NamedTuple):
    """One low-precision tensor of a module that is being loaded.

    Attributes:
        tensor: The parameter or buffer.
        version: Its autograd version before loading.
        entry: The state dict's tensor under its name, or ``None``.
    """

    tensor: weakref.ref[Tensor]
    version: int
    entry: weakref.ref[Tensor] | None


class Fp32Hooks:
    """The ``state_dict`` and ``load_state_dict`` hooks of one module.

    See Note [One hook object per module].
    """

    def __init__(self, link: MasterLink) -> None:
        """Makes hooks that find masters through ``link``."""
        self._link = link
        self._loading: list[_Loading] = []

    def attach(self, module: nn.Module, handles: list[RemovableHandle]) -> None:
        """Registers the hooks with ``module``; adds their handles to ``handles`` one by one."""
        hooks: Any = module  # torch does not annotate the methods that register them
        handles.append(hooks.register_state_dict_post_hook(self))
        # Run before the user's hooks, which may rename entries.
        order: Any = handles[-1].hooks_dict_ref()
        order.move_to_end(handles[-1].id, last=False)
        handles.append(hooks.register_state_dict_pre_hook(self.before_saving))
        handles.append(hooks.register_load_state_dict_pre_hook(self.before_loading))
        handles.append(hooks.register_load_state_dict_post_hook(self.after_loading))

    def __call__(
        self,
        module: nn.Module,
        destination: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Any,
    ) -> None:
        """Replaces the module's own 16-bit entries with the masters' exact fp32 values.

        Those of kept buffers become plain tensors. With ``keep_vars=True`` the entries are the
        parameters themselves and are not replaced.
        """
        for name, tensor in own_tensors(module):
            entry = destination.get(prefix + name)
            if entry is tensor or not isinstance(entry, Tensor):
                continue
            if dtypes.is_low_precision(entry):
                key = prefix + name
                destination[key] = self._link.fp32_entry(destination, key, tensor, entry)
            elif isinstance(entry, KeptBuffer):
                destination[prefix + name] = plain(entry)
        self._link.end_saving(module, prefix)

    def before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Rounds written masters into the model before entries are read."""
        self._link.begin_saving(module, prefix)

    def before_loading(
        self,
        module: nn.Module,
        loaded: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        *rest: Any,
    ) -> None:
        """Records the entries for the module's own low-precision tensors.

        Raises:
            RuntimeError: For ``load_state_dict(assign=True)``, before anything has changed.
        """
        _refuse_assign(module, local_metadata)
        self._loading = [
            _Loading(weakref.ref(tensor), tensor._version, _reference(loaded.get(prefix + name)))
            for name, tensor in own_tensors(module)
            if dtypes.is_low_precision(tensor)
        ]

    def after_loading(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Sets the masters to the loaded values before rounding.

        If an entry is unknown because a later hook renamed it, the parameter's rounded value is
        used, unless the master already rounds to it.
        """
        loading, self._loading = self._loading, []
        source = self._link.source
        if source is not None and loading:
            source.set_exact(_loaded_values(loading, source))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies with the link alone; see :mod:`apex._pickle`."""
        return rebuild, ("fp32_hooks", self._link)


def _loaded_values(
    loading: Iterable[_Loading], source: MasterSource
) -> Iterator[tuple[Tensor, Tensor]]:
    for noted in loading:
        tensor = noted.tensor()
        if tensor is None or tensor._version == noted.version:
            continue
        master = source.master_of(tensor)
        if master is not None:
            entry = None if noted.entry is None else noted.entry()
            loaded = [] if entry is None else [_shaped(entry, tensor)]
            yield tensor, exact_value(tensor, [master, *loaded])


def _reference(entry: object) -> weakref.ref[Tensor] | None:
    return weakref.ref(entry) if isinstance(entry, Tensor) else None


def _shaped(entry: Tensor, param: Tensor) -> Tensor:
    # torch loads an entry of shape [1] into a 0-d parameter.
    return entry.reshape(()) if param.dim() == 0 and entry.shape == (1,) else entry


def _refuse_assign(module: nn.Module, local_metadata: Any) -> None:
    if isinstance(local_metadata, Mapping) and local_metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            f"load_state_dict(assign=True) would replace parameters of {type(module).__name__} "
            "that amp and the optimizer hold. Drop assign=True, or call amp.restore before loading "
            "and amp.initialize after."
        )
