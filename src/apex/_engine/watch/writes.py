"""What a 16-bit model loses: small changes of buffers, writes into cast arguments, whole numbers.

The first forward passes show what is lost, by the version counters of tensors and without a host
sync. torch does not count writes through ``tensor.data``. So samples of tensors are compared
between passes, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from apex._core import dtypes, tree
from apex._core.arguments import positional_names
from apex._core.samples import sample
from apex._engine import master_table
from apex._engine.conversion.state import ModelState
from apex._engine.optimizer.prepared import optimizers_of
from apex._engine.scaler import Readback
from apex._engine.session import live_optimizers
from apex._engine.watch.sums import Source, Sums
from apex._torch.copies import is_readable
from apex._torch.dispatch_modes import suspend_modes
from apex._torch.modules import named_parameters

_log = logging.getLogger("apex")

_AVERAGE = "Average plain = copy.copy(model), the fp32 model that shares the masters."
"""The fix for averages in 16 bits."""

_LERPS = frozenset({"lerp_", "_foreach_lerp_"})
"""Names by which code averages in place; latents of GANs are averaged out of place."""

_LEAVE_OUT = "A model that no optimizer trains stays in fp32 if amp.initialize does not get it."
"""The fix for weights of a model of its own: the options apply to all models of a call."""

_Arguments = dict[Any, Any]
"""A call's arguments by name; those in ``*args`` by position."""

_FORWARDS = 256
"""Budget of watched forward passes: one in evaluation costs 1, and one in training costs 16.

A model that writes to its buffers in training does so from the first passes.
"""

_COMPARISONS = 2**12
"""Budget of comparisons of samples, which take some 30 us each."""

_SEARCHES = 2**10
"""Budget of tensors in arguments that are searched for whole numbers, some 70 us each."""


@suspend_modes()  # a trace would list these operators as the model's
def log_lost(model: nn.Module, before: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Logs the buffers whose order rounding loses, such as positions above 256.

    ``before`` holds tensors of the converted model with their values before conversion.
    """
    values = {id(tensor): exact for tensor, exact in before}
    listed: list[str] = []
    for name, buffer in model.named_buffers():
        exact = values.get(id(buffer), buffer)
        is_rounded = dtypes.is_low_precision(buffer) and is_readable(exact)
        if is_rounded and _loses_order(exact, buffer.dtype):
            listed.append(name)
    if listed:
        _log.warning(
            "amp: in %s, rounding to 16 bits makes ordered values equal in %s. %s",
            type(model).__name__,
            ", ".join(listed),
            _fp32_options(model, listed),
        )


@torch.no_grad()
def _loses_order(exact: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether rounding makes neighbours of an ordered table equal.

    Ordered are values that strictly rise, or fall, along the last dimension, as positions do.
    """
    values = exact.squeeze()
    if values.numel() < 3:
        return False
    steps = values.diff()
    if not (steps > 0).all() and not (steps < 0).all():  # sync: before training begins
        return False
    return bool((values.to(dtype).diff() == 0).any())  # sync: before training begins


def _fp32_options(model: nn.Module, names: Sequence[str]) -> str:
    """Returns a sentence with the arguments of ``initialize`` that keep tensors in fp32."""
    modules: dict[str, None] = {}
    for name in names:
        module_name, dot, _ = name.rpartition(".")
        if dot:
            modules[module_name] = None
    buffers = [name for name in names if name in model._buffers]
    lines: list[str] = []
    if modules:
        lines.append(f"fp32_modules={[*modules]!r}")
    if buffers:
        lines.append(f"fp32_buffers={buffers!r} (cast what is computed from them)")
    return f"To keep them in fp32: amp.initialize(..., {', '.join(lines)})." if lines else _AVERAGE


# -- what forward passes lose ----------------------------------------------------------------------


class Writes:
    """Finds the small changes that a model loses because its tensors have 16 bits.

    A write that replaces a tensor as a whole (a cache, a checkpoint) loses nothing, but averages
    and counters do. So buffers that were written in two passes in a row are watched in the next
    pass, by :class:`Sums`. Weights that no optimizer trains are written between the passes, by
    loads or averages.
    """

    def __init__(self) -> None:
        # What is left of the budget of watched forward passes.
        self.left = _FORWARDS
        # By name: writes and address at the last pass, and whether the pass before saw others.
        self._versions: dict[str, tuple[tuple[int, int], bool]] = {}
        # What is left of the budget of comparisons.
        self._comparisons_left = _COMPARISONS
        # By name: a sample at the last pass, and the tensor's versions then.
        self._samples: dict[str, tuple[object, Tensor]] = {}
        # By name: whether the sample has changed since the pass before.
        self._changes = Readback[str]()
        # By name: whether the last reading said so.
        self._was_changed: dict[str, bool] = {}
        # The topics of the warnings so far.
        self._told = set[str]()
        # By the argument's name: a whole number that 16 bits do not hold.
        self._whole_numbers = Readback[str | int]()
        # What is left of the budget of tensors that are searched for whole numbers.
        self._searches_left = _SEARCHES
        # Arguments on a device are searched in one pass only: a search takes some 20 launches.
        self._searched = set[str | int]()

    def note_load(self) -> None:
        """Starts anew: tensors that a load writes are neither averages nor counters."""
        self._versions.clear()

    @contextlib.contextmanager
    def watch(
        self,
        model: nn.Module,
        state: ModelState,
        forward: Callable[..., Any],
        given: tree.Call,
        cast: tree.Call,
    ) -> Iterator[None]:
        """Watches a forward pass, and logs what it loses.

        Args:
            model: The model.
            state: The state of its conversion.
            forward: Its own forward.
            given: The caller's arguments.
            cast: The arguments that ``forward`` gets.
        """
        self.left -= 16 if model.training else 1
        names = positional_names(forward)
        arguments = _by_name(names, cast)
        passed = {name: tree.tensors(argument) for name, argument in arguments.items()}
        lost: list[str] = []
        buffers: dict[str, Tensor] = {}
        versions: dict[str, int] = {}
        for name, tensor, is_counted in self._written_again(model, state):
            if isinstance(tensor, nn.Parameter):
                lost.append(name)
                continue
            buffers[name] = tensor
            if is_counted:
                versions[name] = tensor._version
        if buffers:
            with Sums(buffers.values()) as sums:
                yield
            for name, tensor in model.named_buffers():
                source = sums.source_of(tensor)
                if source is Source.OLD and tensor is buffers.get(name) and tensor.numel() > 1:
                    # The script writes it between the passes: an average, as caches are the pass's.
                    is_lost = tensor._version == versions.get(name)
                else:
                    is_lost = source is Source.SUM and name in buffers
                if is_lost:
                    lost.append(name)
        else:
            yield
        if lost:
            options = _fp32_options(model, lost)
            if not buffers:
                options = f"{options} {_LEAVE_OUT}"
            self.tell(
                "tensors",
                "amp: %s updates 16-bit tensors during training, so small changes are lost (a "
                "running average stops moving, a bf16 counter sticks at 256): %s. %s",
                type(model).__name__,
                ", ".join(lost[:4]),
                options,
            )
        self._check_arguments(model, _by_name(names, given), arguments, passed)

    def _written_again(
        self, model: nn.Module, state: ModelState
    ) -> Iterator[tuple[str, Tensor, bool]]:
        """Yields the tensors that were written both before this pass and before the last one.

        These are weights that no optimizer trains, such as a target network's, and, in training,
        buffers. Each comes with its name, and whether torch has counted the writes.
        """
        watched = _watched(model, state)
        for name, tensor in watched.items():
            pair = master_table.pair_of(tensor)
            writes = tensor._version if pair is None else pair.model_writes
            version = writes, tensor.data_ptr()
            last, was_changed = self._versions.get(name, (version, False))
            is_changed = last != version
            self._versions[name] = version, is_changed
            if is_changed and was_changed:
                yield name, tensor, True
            if self._comparisons_left > 0 and tensor.layout is torch.strided:
                self._comparisons_left -= 1
                self._send_comparison(name, (tensor._version, version), tensor)
        for name in self._names_of_changed_samples():
            if name in watched:
                yield name, watched[name], False

    @suspend_modes()  # a trace would list these operators as the model's
    def _send_comparison(self, name: str, versions: object, tensor: Tensor) -> None:
        """Starts to compare a sample of a tensor with the last pass's."""
        now = sample(tensor.detach()).clone()
        is_changed = torch.zeros(1, dtype=torch.float32, device=now.device)
        if name in self._samples:
            last_versions, before = self._samples[name]
            if versions == last_versions:
                is_changed = ((now != before) & (before == before)).any().float().reshape(1)
        self._samples[name] = versions, now
        self._changes.send(name, is_changed)

    def _names_of_changed_samples(self) -> Iterator[str]:
        """Yields what changed twice in a row, without a counted write."""
        for name, (is_changed,) in self._changes.poll():
            if is_changed and self._was_changed.get(name):
                yield name
            self._was_changed[name] = bool(is_changed)

    @suspend_modes()
    def _check_arguments(
        self,
        model: nn.Module,
        given: _Arguments,
        cast: _Arguments,
        passed: dict[Any, list[Tensor]],
    ) -> None:
        """Names the arguments that the forward wrote into, and those that lose whole numbers.

        ``passed`` are the tensors in the cast arguments from before the forward.
        """
        for name, argument in cast.items():
            if argument is not given[name]:
                known = {*map(id, passed[name])}
                new = [tensor for tensor in tree.tensors(argument) if id(tensor) not in known]
                pairs = zip(tree.tensors(given[name]), passed[name], strict=False)
                is_written = self._inspect(name, pairs)
                if is_written or new:
                    self.tell(
                        f"writes to {name}",
                        "amp: the forward of %s writes into its argument %s, which was cast: the "
                        "caller's own object does not change. Return the result, pass the argument "
                        "in the dtype that the model computes in, or name it in "
                        "amp.initialize(..., fp32_inputs=%r).",
                        type(model).__name__,
                        name,
                        [name],
                    )
        for name, (number,) in self._whole_numbers.poll():
            if number != 0.0:
                self.tell(
                    f"whole numbers of {name}",
                    "amp: the argument %s of %s holds whole numbers that 16 bits do not, such as "
                    "%g. If they are codes, positions or time steps, keep them in fp32: "
                    "amp.initialize(..., fp32_inputs=%r).",
                    name,
                    type(model).__name__,
                    number,
                    [name],
                )

    def _inspect(self, name: str | int, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Searches an argument for whole numbers; returns whether a cast tensor was written."""
        is_written = False
        for exact, copy in pairs:
            if copy is exact:
                continue
            # The cast of a tensor of inference mode counts as written from the start.
            is_counted = not (exact.is_inference() or copy.is_inference())
            if is_counted and copy._version > 0:
                is_written = True
            if name in self._searched and not exact.is_cpu:
                continue
            if self._searches_left > 0 and is_readable(exact):
                self._searches_left -= 1
                # Empty ones have no values to search.
                with contextlib.suppress(RuntimeError, IndexError):
                    self._whole_numbers.send(name, _lost(exact, copy.dtype))
        self._searched.add(name)
        return is_written

    def check_average(self, reader: FrameType) -> None:
        """Logs how to average in fp32: torch's ``lerp_`` takes no fp32 and 16 bits together.

        ``reader`` is the frame that reads the model's parameters.
        """
        if "lerp" in self._told:
            return
        names = reader.f_code.co_names
        if reader.f_back is not None:
            names += reader.f_back.f_code.co_names
        if not _LERPS.isdisjoint(names):
            self.tell(
                "lerp",
                "amp: an average by lerp_ of the 16-bit weights of a prepared model raises an "
                "error, or loses small updates. %s",
                _AVERAGE,
            )

    def tell(self, what: str, text: str, *args: object) -> None:
        """Logs a warning, once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *args)


def _by_name(names: Sequence[str], call: tree.Call) -> _Arguments:
    """Returns a call's arguments, with their names from ``names``, as far as they go."""
    args, kwargs = call
    named: _Arguments = {**kwargs}
    for position, argument in enumerate(args):
        name = names[position] if position < len(names) else position
        named[name] = argument
    return named


def _watched(model: nn.Module, state: ModelState) -> dict[str, Tensor]:
    """Returns the 16-bit weights that no optimizer trains and, in training, buffers, by name."""
    stepped = _stepped()
    has_optimizers = bool(optimizers_of(state.session))
    tensors: list[tuple[str, Tensor]] = []
    for name, param in named_parameters(model):
        is_trained = id(param) in stepped
        if master_table.pair_of(param) is None and param.requires_grad and has_optimizers:
            is_trained = True
        if not is_trained:
            tensors.append((name, param))
    if model.training:
        tensors += model.named_buffers()
    watched: dict[str, Tensor] = {}
    for name, tensor in tensors:
        has_version = not tensor.is_inference()
        if dtypes.is_low_precision(tensor) and has_version and is_readable(tensor):
            watched[name] = tensor
    return watched


def _stepped() -> set[int]:
    """Returns the ids of the parameters that prepared optimizers step, of whatever session.

    An optimizer with masters steps no others: it may hold a momentum encoder, which is frozen.
    """
    stepped: set[int] = set()
    for prepared in live_optimizers:
        with_master = [pair.model for pair in prepared.pairs]
        stepped.update(map(id, with_master or prepared.trained_params()))
    return stepped


@torch.no_grad()
def _lost(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the largest positive whole number that ``dtype`` rounds, or 0.0, as [1].

    Searches a sample of the rows. The last dimension indexes columns; a single row counts as one
    column. Measured values are also rounded, and seldom whole. So at least half of the rounded
    values of a column must be whole numbers. Negative values do not count, because masks contain
    them, such as -10000.
    """
    exact = exact.as_subclass(Tensor)  # its own class may override what follows
    columns = exact.reshape(-1, exact.shape[-1] if exact.dim() else 1)
    if columns.shape[0] == 1:
        columns = columns.T
    columns = sample(columns.T).T
    is_rounded = columns.to(dtype) != columns
    largest = 1.0 / torch.finfo(columns.dtype).eps  # from here on, every value is whole
    in_range = (columns > 0.0) & (columns < largest)
    is_code = is_rounded & in_range & (columns == columns.round())
    holds_codes = 2 * is_code.sum(0) >= is_rounded.sum(0)
    codes = torch.where(is_code & holds_codes, columns, 0.0)
    return codes.amax().reshape(1)
