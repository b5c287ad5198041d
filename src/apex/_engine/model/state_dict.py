"""Fp32 state dicts of low-precision modules, and lossless loading.

Note [One hook object per module]: ``state_dict`` and ``load_state_dict`` work on any module, so
every module with a 16-bit tensor in its subtree carries hooks, as in apex. A hook handles only its
module's own tensors, so it does not matter whether the module, a parent or a wrapper is called.
It keeps weak references to what belongs to others, so that a failed call leaves nothing behind.

Note [Batches]: converting entries one by one takes six operators each, and models have thousands of
small ones. So the hook of the outermost module converts those of all modules inside, too, which are
a *batch*. Nobody can tell: a batch is only made where nothing but torch's own code and these hooks
runs before that hook, which comes before the user's. Otherwise each module inside begins a batch of
its own. A batch belongs to the dict that it is saved to, and a link knows the latest one. If a call
in another thread or a signal handler replaces it, modules convert their own entries, and the module
around what is left. After a call that failed, a batch fits no dict.

Note [Whole models]: torch's calls of the hooks, and what these need to know of each other, cost a
fifth of the time. So where nobody can tell, the class of a converted model saves all modules in one
loop and replaces their entries, and keeps nothing after the call. Elsewhere, the hooks do it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.rounding import exact_value, exact_values
from apex._engine.model.kept_buffers import KeptBuffer, plain
from apex._engine.model.plan import MasterSource
from apex._pickle import rebuild
from apex._torch import dtensor
from apex._torch.modules import (
    Plain,
    child,
    children,
    is_being_saved,
    is_loaded_by_torch,
    new_state_dict,
    own_tensors,
    plain_modules,
    save_plainly,
    tensors_of,
)


class MasterLink:
    """Connects a converted model's modules to the masters of their parameters.

    A deep copy keeps a weak link to the original's source, which has the copy's masters if an
    optimizer was copied with it. A pickle keeps no link.

    Attributes:
        batch: The latest batch.
    """

    def __init__(self, masters: MasterSource | None = None) -> None:
        """Connects to ``masters``; ``None`` if there are none."""
        self._masters = masters
        self._origin: weakref.ref[MasterSource] | None = None
        self._saving: dict[str, weakref.ref[nn.Module]] = {}
        # By id of a tensor: its key and the id of its entry. References would cost a collection.
        self._entries: dict[int, tuple[str, int]] = {}
        self.batch = Batch()

    @property
    def source(self) -> MasterSource | None:
        """The source of the modules' masters, or ``None``."""
        return self._masters if self._origin is None else self._origin()

    def write_back(self) -> None:
        """Rounds written masters into the model."""
        if (source := self.source) is not None:
            source.write_back()

    def begin_saving(self, module: nn.Module, prefix: str, *, keep_vars: bool) -> Batch:
        """Begins and returns the batch that ends with ``module``, which may be it alone.

        Writes masters back once per ``state_dict`` call, at the outermost hooked module.
        """
        if not self._is_inside(module, prefix):
            self._saving = {}
            self._entries = {}
            self.write_back()
        if not self._saving or any(children(module)):
            self._saving[prefix] = weakref.ref(module)
        found = None if keep_vars else plain_modules(module, prefix, Fp32Hooks)
        self.batch = Batch(prefix, found)
        return self.batch

    def state_dict(
        self,
        module: nn.Module,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> Any:
        """Returns what ``state_dict`` of a whole model does; ``None`` if torch must call the hooks.

        See Note [Whole models].
        """
        found = None if keep_vars else plain_modules(module, prefix, Fp32Hooks)
        if found is None or prefix not in found.hooks:
            return None
        if any(hook._link is not self for hook in found.hooks.values()):
            return None
        self.write_back()
        if destination is None:
            destination = new_state_dict()
        self._replace(destination, save_plainly(found, destination), {})
        return destination

    def save(
        self,
        module: nn.Module,
        destination: MutableMapping[str, Any],
        prefix: str,
        batch: Batch | None,
    ) -> None:
        """Replaces the 16-bit entries of ``module``, and those of its batch."""
        if batch is None or batch.prefix != prefix:  # that of a call of another thread, or handler
            batch = Batch(prefix, plain_modules(module, prefix, Fp32Hooks))
        self.batch = Batch()
        first, outer = next(iter(self._saving.items()), (None, None))
        ends = first == prefix and outer is not None and outer() is module
        known = self._entries
        inside = [
            (path, part) for path, held in batch.inside.items() if (part := held()) is not None
        ]
        saved = self._replace(destination, [(prefix, module), *inside], known)
        if ends:
            self._saving = {}
            self._entries = {}
        else:
            known.update((which, (key, id(destination[key]))) for which, key in saved.items())

    def _is_inside(self, module: nn.Module, prefix: str) -> bool:
        # A failed call never ended; only the path distinguishes it from an outer call.
        around, _, name = prefix[:-1].rpartition(".")
        reference = self._saving.get(f"{around}." if around else "")
        outer = None if reference is None else reference()
        return outer is not None and outer is not module and child(outer, name) is module

    def _replace(
        self,
        destination: MutableMapping[str, Any],
        parts: Iterable[tuple[str, nn.Module]],
        known: Mapping[int, tuple[str, int]],
    ) -> dict[int, str]:
        """Replaces the own 16-bit entries of modules by the masters' exact fp32 values.

        Those of kept buffers become plain tensors. With ``keep_vars=True`` the entries are the
        parameters themselves and are not replaced. Entries of tied parameters share memory, as in
        torch; all others get their own.

        Args:
            destination: The dict that they were saved to.
            parts: The modules with the prefix of their entries.
            known: Keys and ids of entries replaced before, by the id of their tensors.

        Returns:
            The keys of the entries replaced, by the id of their tensors.
        """
        low = dtypes.LOW_PRECISION
        key_of: dict[int, str] = {}
        tensors: list[Tensor] = []
        entries: list[Tensor] = []
        tied: list[tuple[str, int]] = []
        for key, tensor in tensors_of(parts):
            entry = destination.get(key)
            if entry is tensor or not isinstance(entry, Tensor):
                continue
            if entry.dtype in low:
                which = id(tensor)
                if which in key_of or (known and _is_saved(destination, known.get(which))):
                    tied.append((key, which))
                    continue
                key_of[which] = key
                tensors.append(tensor)
                entries.append(entry)
            elif isinstance(entry, KeptBuffer):
                destination[key] = plain(entry)
        keys = list(key_of.values())
        source = self.source
        masters = [None] * len(tensors) if source is None else source.masters_of(tensors)
        for index, value in exact_values(entries, masters):
            destination[keys[index]] = entries[index] = value  # the old entry goes before the next
        for key, which in tied:
            destination[key] = destination[key_of.get(which) or known[which][0]]
        return key_of

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterLink:
        """Returns a link to the same source, which the copy does not keep alive."""
        new = memo[id(self)] = MasterLink()
        source = self.source
        new._origin = None if source is None else weakref.ref(source)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without any source."""
        return rebuild, ("master_link",)


def _is_saved(destination: Mapping[str, Any], known: tuple[str, int] | None) -> bool:
    return known is not None and id(destination.get(known[0])) == known[1]


def _unknown() -> None:
    """Stands for the dict that a batch is saved to, until its first module is saved."""


class Batch:
    """Modules whose entries are converted together; see Note [Batches].

    Attributes:
        prefix: The prefix of the module around them, with which the batch ends.
        inside: The modules by their prefix.
        destination: Returns the dict that they are saved to.
    """

    def __init__(self, prefix: str = "", found: Plain | None = None) -> None:
        """Begins with the hooked modules that were found inside one with ``prefix``, if any."""
        self.prefix = prefix
        modules, hooks = found or ({}, {})
        self.inside = {path: weakref.ref(modules[path]) for path in hooks if path != prefix}
        self.destination: Callable[[], object] = _unknown

    def begins(self, module: nn.Module, prefix: str, destination: object) -> bool:
        """Returns whether ``module`` is the first of them to be saved, and notes where to."""
        is_first = self.destination is _unknown and self.inside[prefix]() is module
        if not is_first or type(destination) is not OrderedDict:
            return False
        if not is_being_saved(self.prefix, destination):  # left by a call that failed
            return False
        self.destination = weakref.ref(destination)
        return True


class _Loading(NamedTuple):
    """One low-precision tensor of a module that is being loaded.

    Attributes:
        tensor: The parameter or buffer. No weak reference, with which torch refuses to swap it for
            another (``torch.__future__.set_swap_module_params_on_conversion``).
        version: Its autograd version and address before loading.
        entry: The state dict's tensor under its name, or ``None``.
    """

    tensor: Tensor
    version: tuple[int, int]
    entry: weakref.ref[Tensor] | None


class Fp32Hooks:
    """The hooks of one module; see Note [One hook object per module]."""

    def __init__(self, link: MasterLink) -> None:
        """Makes hooks that find masters through ``link``."""
        self._link = link
        self._loading: list[_Loading] = []
        self._batch: Batch | None = None

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

        Those of a module in a batch stay until the batch ends.
        """
        batch = self._link.batch
        waits = prefix in batch.inside and (
            batch.destination() is destination or batch.begins(module, prefix, destination)
        )
        if not waits:
            own, self._batch = self._batch, None
            self._link.save(module, destination, prefix, own)

    def before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Rounds written masters into the model before entries are read."""
        known = self._link.batch.inside.get(prefix)
        if known is None or known() is not module:
            self._batch = self._link.begin_saving(module, prefix, keep_vars=keep_vars)

    def before_loading(
        self,
        module: nn.Module,
        loaded: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        *rest: Any,
    ) -> None:
        """Records the entries for the module's own low-precision tensors that may have a master.

        Raises:
            RuntimeError: For ``load_state_dict(assign=True)``, before anything has changed.
        """
        if isinstance(local_metadata, Mapping) and local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace parameters of {type(module).__name__} "
                "that amp and the optimizer hold. Drop assign=True, or call amp.restore before "
                "loading and amp.initialize after."
            )
        self._loading = [
            _Loading(tensor, _version(tensor), _reference(loaded.get(prefix + name)))
            for name, tensor in own_tensors(module)
            if dtypes.is_low_precision(tensor) and not tensor.is_inference()
        ]
        source = self._link.source
        if source is not None and not is_loaded_by_torch(module):
            loading, self._loading = self._loading, []
            source.expect(_expected_values(loading))

    def after_loading(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Sets the masters to the loaded values before rounding.

        If an entry has the parameter's own dtype, or is unknown because a later hook renamed it,
        the parameter's rounded value is used, unless the master already rounds to it.
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
        tensor = noted.tensor
        if _version(tensor) == noted.version:
            continue
        master = source.master_of(tensor)
        if master is not None:
            entry = None if noted.entry is None else noted.entry()
            # One in the weight's own dtype tells no more than the weight that was loaded from it.
            is_wider = entry is not None and entry.dtype is not tensor.dtype
            loaded = _shaped(entry, tensor) if entry is not None and is_wider else None
            yield tensor, exact_value(tensor, [master, loaded])


def _expected_values(loading: Iterable[_Loading]) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor, _, reference in loading:
        entry = None if reference is None else reference()
        if entry is None or dtensor.is_dtensor(tensor) or dtensor.is_dtensor(entry):
            continue
        value = _shaped(entry, tensor)
        if value.shape == tensor.shape and value.dtype in (torch.float32, torch.float64):
            yield tensor, value


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _reference(entry: object) -> weakref.ref[Tensor] | None:
    return weakref.ref(entry) if isinstance(entry, Tensor) else None


def _shaped(entry: Tensor, param: Tensor) -> Tensor:
    # torch loads an entry of shape [1] into a 0-d parameter.
    return entry.reshape(()) if param.dim() == 0 and entry.shape == (1,) else entry
