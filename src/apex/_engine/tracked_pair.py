"""A low-precision parameter and its fp32 master, kept in sync.

Note [Which side is newer]
    A low-precision weight is its master, rounded. User code can write to either: SAM, Lookahead or
    a WGAN's clipping write to masters; ``load_state_dict`` or ``init`` write to the model.
    Comparing autograd's version counters with those recorded when the two were last in sync shows
    which was written. A written master is rounded into the model before the model is next used. A
    written weight is copied to its master when the next pass or step begins, or a script asks for
    the masters, and only in the elements that differ from the rounded master. So swapping averaged
    weights in for an evaluation and back out leaves the master bit-identical. If both were written,
    the master wins.

    Some scripts change weights for the passes alone: they binarize or perturb them, and put them
    back before the step, perhaps through ``data``, which torch does not count. So a master that
    follows a weight before the step keeps its earlier values, too. The step looks again: elements
    that were changed back get their earlier bits.

    Torch's fused kernels, and those of other libraries, do not increment the counters. So masters
    count as written from the start of their optimizer's step until they are rounded at its end, and
    an interrupted step leaves nothing to repair. A hook on all optimizers rounds the masters that
    those not prepared by amp have stepped.

    Compiled code does not run a model's forward in Python. A guard, which dynamo evaluates before
    it runs the code, rounds the masters instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from apex._core import master, rounding
from apex._pickle import rebuild
from apex._torch import dtensor, parameters, ranks
from apex._torch.dynamo import untraced
from apex._torch.overrides import without_overrides

_WRITTEN, _STEPPED = -1, -2
"""Versions that no tensor has, so the master or the model counts as written.

A stepped master does until the step ends: code in the step (a hook that runs the model) may have it
rounded before the kernel writes it.
"""


class Master(nn.Parameter):
    """An fp32 parameter whose version counter also counts writes through ``data``.

    To kernels, deep copies and files it is a plain parameter.
    """

    @property
    def data(self) -> Tensor:
        """The values, sharing memory and version counter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype is not self.dtype:
            raise TypeError(
                f"An fp32 master got data of {value.dtype}, which would lose the low bits that it "
                "is for. Assign fp32, or write master.data.copy_(value), which converts."
            )
        increment_version(self)  # first: a Ctrl-C before this line loses nothing
        parameters.set_data(self, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter, so that it loads without apex."""
        plain: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


parameters.allow_foreach(Master)


class TrackedPair:
    """A low-precision model parameter and its master, with their versions when last in sync.

    Attributes:
        model: The model's parameter.
        master: The fp32 parameter that optimizers step in its place.
        model_address: The address of the model's parameter when the two were last in sync.
        low_bits: Whether the master keeps its low bits where a write to the model leaves the
            rounded value unchanged; False if those bits may differ between ranks.
        new: Whether no pass has used the pair yet.
        unshared: Whether the low bits are this rank's own, until a pass makes all ranks' equal. A
            step that comes first takes the rounded values, which ranks share.
        compares: Whether no step has. Writes that autograd does not count
            (``dist.broadcast(p.data)``) are found by comparing values, at the first pass and once
            more at the first step: they may have been for the passes alone.
        mirrors_grad: Whether the model's gradient mirrors the master's; see
            Note [Gradients of a pair].
        mirror_id: The ``id`` of the gradient that does.
        earlier: The master's values before it followed the model for a pass; ``None`` if it has
            not since the last step.
    """

    __slots__ = (
        *("__weakref__", "_master_version", "_model_alias", "_model_version", "model_address"),
        "_sent",  # a process that is spawned gets memory by a number, which must not be reused
        *("compares", "earlier", "low_bits", "master", "model", "new", "mirror_id"),
        *("mirrors_grad", "unshared"),
    )

    def __init__(self, model: nn.Parameter, exact: Tensor | None = None) -> None:
        """Makes the master of ``model``, from its value before rounding if known."""
        self.model = model
        self.master = master.make_master(model, exact, Master)
        if model.__dict__:
            _pass_on_attributes(model, self.master)
        self.low_bits = True
        self.unshared = False
        self.new = self.compares = True
        self.mirrors_grad = False
        self.mirror_id = 0
        self.earlier: Tensor | None = None
        self.mark_synced()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles both sides, without their gradients.

        Of a weight that was written, the copy has the master that follows it; this one waits.
        """
        parts = self.model, self.master, self.new, self.low_bits, None
        waits = self.model_written and not self.master_written
        self._sent = self._followed() if waits else None
        return rebuild, ("tracked_pair", *parts, *([] if self._sent is None else [self._sent]))

    def _followed(self) -> Tensor | None:
        """Returns the master's values after it has followed the model; ``None`` if it has them."""
        value = rounding.exact_value(self.model, self.candidates(low_bits=self.low_bits))
        own = dtensor.local(self.master.detach())
        return None if torch.equal(dtensor.local(value), own.to(value.device)) else value

    def mark_synced(self) -> None:
        """Records that the model holds the rounded master."""
        self._master_version = self.master._version
        self._model_version = self.model._version
        self.model_address = self.model.data_ptr()
        self._sent = None
        self.earlier = None
        # Held so that the address is not reused by another storage. A DTensor has no address.
        self._model_alias = None if dtensor.is_dtensor(self.model) else self.model.detach()

    def mark_followed(self, earlier: Tensor | None = None) -> None:
        """Records that the master holds what the model has for now; the step looks again."""
        self.mark_synced()
        self._model_version = _WRITTEN
        self.earlier = earlier

    def mark_master_written(self) -> None:
        """Marks the master as written, whether or not its version changes."""
        self._master_version = _WRITTEN

    def mark_stepped(self) -> None:
        """Marks the master as written until its optimizer's step ends; see :func:`write_back`."""
        self._master_version = _STEPPED

    def set_exact(self, value: Tensor) -> None:
        """Sets the master of a model's parameter that was set to ``value``, rounded."""
        self.master.copy_(value)
        self.mark_synced()

    @property
    def known(self) -> Tensor:
        """The master; of a weight that was changed for a pass, what it is changed back to."""
        if self.earlier is not None and not self.master_written:
            return rounding.exact_value(self.model, [self.master, self.earlier])
        return self.master

    def candidates(self, *, low_bits: bool) -> list[Tensor]:
        """Returns what the master may hold beyond 16 bits, the likelier last.

        Its present values count only with ``low_bits``.
        """
        earlier = [] if self.earlier is None else [self.earlier]
        return [self.known, *earlier] if low_bits else earlier

    @property
    def is_current(self) -> bool:
        """Whether the master's values are those that :attr:`known` gives."""
        return self.earlier is None

    @property
    def master_written(self) -> bool:
        """Whether the master was written since the two were in sync."""
        return self.master._version != self._master_version

    @property
    def model_written(self) -> bool:
        """Whether the model's parameter was written, or given other storage, since then."""
        model = self.model
        return model._version != self._model_version or model.data_ptr() != self.model_address


def _pass_on_attributes(model: nn.Parameter, made: nn.Parameter) -> None:
    """Gives a master what scripts have set on its parameter, which their optimizers may read."""
    own = vars(made)
    own.update({name: value for name, value in vars(model).items() if name not in own})


def rebuild_pair(
    model: nn.Parameter,
    made: nn.Parameter,
    new: bool,
    low_bits: bool,
    _: object = None,
    followed: Tensor | None = None,
) -> TrackedPair:
    """Rebuilds a pair from a copy or a file; ``followed`` are newer values of the master.

    Files of earlier releases say in the fifth place how they stored the master.
    """
    if model.is_inference() or made.is_inference():
        raise RuntimeError(
            "A model and its optimizer with fp32 masters were copied or loaded under "
            "torch.inference_mode, where torch counts no writes. Do so outside it, or under "
            "torch.no_grad."
        )
    _pass_on_attributes(model, made)
    pair = TrackedPair.__new__(TrackedPair)
    pair.model, pair.master = model, made
    pair.new = pair.compares = new
    pair.low_bits, pair.mirrors_grad, pair.mirror_id, pair.unshared = low_bits, False, 0, False
    pair.mark_synced()
    if followed is not None:
        with torch.no_grad():
            pair.set_exact(followed)
    return pair


def plain_masters(*_: object) -> None:
    """Stands for how a file of an earlier release stored masters, which load as plain fp32."""


@untraced
def write_back(pairs: Iterable[TrackedPair], *, ends_step: bool = False) -> None:
    """Rounds every written master into its model parameter.

    ``ends_step`` tells whether their optimizer's step has ended, or waits for a closure.
    """
    # Inlines ``master_written``: this runs in every forward pass.
    with without_overrides():
        written = [pair for pair in pairs if pair.master._version != pair._master_version]
        if written:
            round_into_model(written, ends_step=ends_step)


@untraced
def round_into_model(pairs: Sequence[TrackedPair], *, ends_step: bool = False) -> None:
    """Rounds masters into their model parameters, written or not; see :func:`write_back`."""
    master.copy_to_model([pair.master for pair in pairs], [pair.model for pair in pairs])
    stepped = [] if ends_step else [p for p in pairs if p._master_version == _STEPPED]
    mark_rounded(pairs)
    for pair in stepped:
        pair.mark_stepped()


def mark_rounded(pairs: Iterable[TrackedPair]) -> None:
    """Records that masters were rounded into their model parameters, where these were."""
    for pair in pairs:
        pair._master_version, pair._model_version = pair.master._version, pair.model._version
        pair.earlier = None


@untraced
def read_model(
    pairs: Iterable[TrackedPair], *, alike: bool = False, steps: bool = False, asked: bool = False
) -> None:
    """Copies written model parameters to their masters, except to masters written as well.

    Never writes to the model: autograd may have saved its weights for the backward pass.

    Args:
        pairs: Masters and parameters.
        alike: Whether the caller synchronizes the masters across ranks next.
        steps: Whether masters are stepped next. Until then, the model may have been changed for
            the passes alone.
        asked: Whether a script asks for the masters. Ranks may differ in that, so the first pass
            still comes.
    """
    for pair in pairs:
        model = pair.model  # inlines ``model_written``: this runs in every pass and step
        same = model._version == pair._model_version and model.data_ptr() == pair.model_address
        if same and not pair.compares:
            continue
        if (pair.new or steps or not same) and not pair.master_written:
            if steps and pair.unshared:
                pair.new, pair.earlier = True, None
            low_bits = pair.low_bits and (alike or asked or _alone(pair))
            waits = not (same or steps)
            keeps = waits and low_bits and not alike
            _follow_model(pair, low_bits=low_bits, waits=waits, keeps=keeps)
        pair.new = pair.new and asked
        if steps:
            pair.compares = pair.unshared = False


def _follow_model(pair: TrackedPair, *, low_bits: bool, waits: bool, keeps: bool) -> None:
    """Copies a model parameter to its master.

    Args:
        pair: Both.
        low_bits: Whether the master keeps its low bits where they agree.
        waits: Whether the step looks again.
        keeps: Whether it finds the master's earlier values then.
    """
    earlier = pair.earlier
    known = pair.candidates(low_bits=low_bits)
    if keeps and earlier is None:
        earlier = pair.master.detach().clone()
    rounding.update_master(pair.model, pair.master, known)
    if waits:
        pair.mark_followed(earlier)
    else:
        pair.mark_synced()


def _alone(pair: TrackedPair) -> bool:
    """Returns whether no other rank can hold different low bits at a parameter's first use."""
    return not pair.new or ranks.world_size() == 1 or dtensor.is_dtensor(pair.model)
