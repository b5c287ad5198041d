"""What amp says of a prepared model: remedies of dtype errors, and what 16 bits or a copy lose."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import dtypes, tree
from apex._core.rounding import makes_equal
from apex._engine.conversion.plan import WIDE, ModelPlan, planned_dtypes
from apex._engine.conversion.state_dict import AVERAGE
from apex._torch.copies import has_values
from apex._torch.modules import own_tensors

_log = logging.getLogger("apex")

_MIXED_INPUTS = re.compile(  # oneDNN says it of a state in another dtype
    "same dtype|scalar type|Half|BFloat16|primitive descriptor for (the|an) LSTM"
)
_NOT_FLOATING = re.compile(
    r"\b((unsigned |signed )?char|short|int|long|bool|byte)\b|Complex", re.IGNORECASE
)
_NO_ROOM = re.compile("value cannot be converted to type .*(Half|BFloat16) without overflow")
_NO_KERNEL = re.compile(
    "not implemented for '(Half|BFloat16)'|[Ll]ow precision dtypes not supported"
    "|Unsupported dtype (Half|BFloat16)|tensors(,? but got|( of type)?:) (Half|BFloat16)"
    "|[Ff]loat(,| or| and) [Dd]ouble"
)

_HOLDS = (
    "amp prepared the model {model} to compute in {dtype}, but it now holds {found}, cast, added "
    "or assigned after amp.initialize, or passed to functional_call. Call .to({dtype}) on it, or "
    "assign and pass value.to(param.dtype); pass the parameters of an added module to "
    "optimizer.add_param_group, which also makes their fp32 masters; make a copy of the model "
    "plain with amp.restore(copy)."
)
_COMPUTES = (
    "amp prepared the model {model} to compute in 16 bits. A tensor that the forward makes itself, "
    "or that another method gets, is not cast. Cast it, as in x.to(self.linear.weight.dtype). If "
    "an operator has no 16-bit kernel, keep its module in fp32: amp.initialize(..., "
    "fp32_modules=[...]) takes names and types, such as "
    "torch.nn.utils.parametrize.ParametrizationList. A mask takes a number that 16 bits hold: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min)."
)

_FORWARDS = 256
"""Forward passes that are watched, of which one in training counts as 16: what a model writes in
training, it writes from the start."""

_COPIED = " of a deep copy"

HasMaster = Callable[[Tensor], bool]


def mixes_dtypes(error: RuntimeError) -> bool:
    """Returns whether an operator failed because its inputs have different dtypes."""
    return _MIXED_INPUTS.search(str(error)) is not None


def explain(model: nn.Module, plan: ModelPlan, error: RuntimeError) -> None:
    """Raises ``error`` again with its remedy, of the same type and caused by it.

    Returns if the plan's dtypes are not its cause, or if it has a remedy already.
    """
    kind, text = type(error), str(error)
    # Scripts catch subclasses, such as out of memory, by name.
    if kind not in (RuntimeError, NotImplementedError) or isinstance(error.__cause__, kind):
        return
    no_room, mixed = _NO_ROOM.search(text), mixes_dtypes(error)
    if not (no_room or _NO_KERNEL.search(text) or (mixed and not _NOT_FLOATING.search(text))):
        return  # the same call fails in fp32
    found = _of_another_dtype(model, plan) if mixed and not no_room else []
    if found or no_room or plan.casts_down:
        listed = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        name, dtype = type(model).__name__, plan.param_dtype or torch.float32
        remedy = (_HOLDS if found else _COMPUTES).format(model=name, dtype=dtype, found=listed)
        raise kind(f"{error}\n{remedy}") from error


def _of_another_dtype(model: nn.Module, plan: ModelPlan) -> list[str]:
    """Returns the names and dtypes of parameters and buffers that differ from the plan's."""
    planned: Iterable[tuple[str, Tensor, torch.dtype]] = planned_dtypes(model, plan)
    if plan.param_dtype is None:
        planned = [(name, param, torch.float32) for name, param in model.named_parameters()]
    return [
        f"{name} ({dtypes.name(tensor.dtype)})"
        for name, tensor, dtype in planned
        if dtypes.is_castable(tensor) and tensor.dtype is not dtype
    ]


def log_lost(model: nn.Module, before: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Logs the buffers whose distinct values rounding made equal, such as positions above 256.

    ``before`` holds tensors of the converted model with their values before conversion.
    """
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    rounded = [
        (names[id(tensor)], makes_equal(exact, tensor.dtype))
        for tensor, exact in before
        if id(tensor) in names and exact.dtype in WIDE and dtypes.is_low_precision(tensor)
        if exact.numel() > 1 and exact.layout is torch.strided and has_values(exact)
    ]
    found = [name for name, lost in rounded if lost.item()]  # sync: before training begins
    if found:
        _log.warning(
            "amp: in %s, rounding to 16 bits makes distinct values equal in %s. %s",
            *(type(model).__name__, ", ".join(found), keeping(found)),
        )


def keeping(names: Sequence[str]) -> str:
    """Returns a sentence with the arguments of ``initialize`` that keep tensors in fp32."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    inside = [name for name in modules if name]
    own = [name for name in names if "." not in name]
    lines = [f"fp32_modules={inside!r}"] if inside else []
    lines += [f"fp32_buffers={own!r} (cast what is computed from them)"] if own else []
    return f"To keep them in fp32: amp.initialize(..., {', '.join(lines)})."


# -- what a model writes ---------------------------------------------------------------------------


class Writes:
    """Watches the first forward passes of a 16-bit model by the version counters of its tensors.

    Reads no values, so it does not wait for the device. Writes through ``tensor.data`` in place are
    not counted by torch, and not found.
    """

    def __init__(self) -> None:
        self._left = _FORWARDS
        self._before: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told: set[str] = set()

    def note_copy(self, copied: nn.Module) -> None:
        """Watches a deep copy of the model, too: it may become an average."""
        self._copies.add(copied)
        self._left = _FORWARDS

    @property
    def watches(self) -> bool:
        """Whether the next forward pass is watched."""
        return self._left > 0

    def note_forward(self, model: nn.Module, has_master: HasMaster) -> None:
        """Names 16-bit tensors that are written between forward passes, twice in a row."""
        self._left -= 16 if model.training else 1
        now = _versions([*_watched(model, has_master), *_copied(self._copies, has_master)])
        changed = {name for name, each in now.items() if self._before.get(name, each) != each}
        found = [name for name in now if name in changed & self._changed]
        self._before, self._changed = now, changed
        if found:
            own = [name for name in found if not name.endswith(_COPIED)]
            self.tell(
                "tensors",
                "amp: 16-bit tensors of %s are written in training, where small changes are lost "
                "(an average stops, a counter stays at 256 in bf16): %s. %s",
                *(type(model).__name__, ", ".join(found[:4]), keeping(own) if own else AVERAGE),
            )

    def note_arguments(
        self, model: nn.Module, names: Sequence[str], given: tree.Call, cast: tree.Call
    ) -> None:
        """Names the arguments of a forward pass that it wrote into, if they were cast copies.

        Args:
            model: The model whose forward has run.
            names: Names of its positional arguments.
            given: The caller's arguments.
            cast: The arguments that the model got.
        """
        known = set(map(id, tree.tensors(given)))
        args, kwargs = cast
        labels = [*names, *map(str, range(len(names), len(args)))]
        found = [
            name
            for name, arg in (dict(zip(labels, args, strict=False)) | kwargs).items()
            for tensor in tree.tensors(arg)
            if id(tensor) not in known and not tensor.is_inference() and tensor._version > 0
        ]
        if found:
            found = list(dict.fromkeys(found))
            self.tell(
                "arguments",
                "amp: the forward of %s writes into its argument %s, which was cast: the caller's "
                "own tensor does not change. Pass it in the dtype that the model computes in, or "
                "name it in amp.initialize(..., fp32_inputs=%r).",
                *(type(model).__name__, ", ".join(found), found),
            )

    def tell(self, what: str, text: str, *args: object) -> None:
        """Logs a warning, once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(text, *args)


def _watched(model: nn.Module, has_master: HasMaster) -> Iterator[tuple[str, Tensor]]:
    """Yields the frozen weights, and in training the buffers but for batch norm's own."""
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module, prefix):
            if isinstance(tensor, nn.Parameter):
                watched = not tensor.requires_grad and not has_master(tensor)
            else:
                watched = model.training and not isinstance(module, _BatchNorm)
            if watched:
                yield name, tensor


def _copied(copies: Iterable[nn.Module], has_master: HasMaster) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of deep copies, unless an optimizer was copied with them."""
    for copied in [*copies]:
        for name, param in copied.named_parameters():
            if not has_master(param):
                yield name + _COPIED, param


def _versions(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    found = {}
    for name, tensor in tensors:
        if dtypes.is_low_precision(tensor) and not tensor.is_inference():
            with contextlib.suppress(RuntimeError):  # torch.func's tensors have no address
                found[name] = tensor._version, tensor.data_ptr()
    return found
