"""Whether an overflow skips an optimizer's next step, and whether one skipped its last."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from apex._core import finite
from apex._torch import dtensor
from apex._torch.copies import HostCopy, capturing
from apex._torch.dynamo import untraced


class OverflowFlag:
    """The overflow of an optimizer's present gradients, kept on their device.

    Attributes:
        found_inf: Whether a present gradient held inf or NaN when it was unscaled, 0-d fp32;
            ``None`` before the first checked pass. Stays in place, for CUDA graphs.
        checked: Whether ``found_inf`` is valid for the present gradients.
        skipped: Whether the last step was skipped: known on the host, or a 0-d fp32 flag.
        steps: Steps so far, skipped ones included.
    """

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None
        self.checked = False
        self._cleared: Tensor | None = None  # an overflow since the last step, of cleared gradients
        self._waits = False  # for a step
        self.skipped: Tensor | bool = False
        self.steps = 0
        self._skip_copy: HostCopy | None = None
        self._spare: Tensor | None = None

    def raise_by(self, found_inf: Tensor) -> None:
        """Makes steps skip if ``found_inf`` (0-d) is set, until the gradients are cleared."""
        if self.found_inf is None or self.found_inf.device != found_inf.device:
            self.found_inf = torch.zeros_like(found_inf)
            self.checked = False
        flag = self._to_write(self.found_inf)
        if self.checked:
            finite.raise_flag_(flag, found_inf)
        else:
            flag.copy_(found_inf)
        self.checked = self._waits = True

    def clear(self) -> None:
        """Makes steps run again: there are no gradients."""
        if self.checked:
            self._note_cleared()
        self.checked = False

    @torch.no_grad()
    def recheck(self, params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        """Sets a valid flag from the present gradients, which a script has changed on all ranks.

        Args:
            params: The optimizer's parameters.
            others: Those of optimizers that share one: a set flag stays while they overflow.
        """
        if not self.checked or self.found_inf is None:
            return
        self._note_cleared()
        flag = self._to_write(self.found_inf)
        before = flag.clone()
        flag.zero_()
        _raise_by_grads(flag, others)
        flag.mul_(before)
        _raise_by_grads(flag, params)
        # A rank that alone sees what is left of an overflow would skip alone.
        dtensor.all_reduce_(flag, dtensor.groups(params + others), "MAX")

    def _note_cleared(self) -> None:
        if self._waits and self.found_inf is not None:
            earlier = self.found_inf if self._cleared is None else self._cleared
            self._cleared = torch.maximum(earlier, self.found_inf)

    def begin_step(self, params: Callable[[], list[nn.Parameter]]) -> bool:
        """Sets the flag again if gradients that were cleared since the last step are back.

        A script may have kept copies of what overflowed (PCGrad): then some are inf or NaN.

        Returns:
            Whether gradients were checked.
        """
        cleared, self._cleared = self._cleared, None
        if cleared is not None:
            with torch.no_grad():
                back = torch.zeros_like(cleared)
                stepped = params()
                _raise_by_grads(back, stepped)
                dtensor.all_reduce_(back, dtensor.groups(stepped), "MAX")
                self.raise_by(back.mul_(cleared))
        self._waits = False
        return cleared is not None

    def _to_write(self, flag: Tensor) -> Tensor:
        """Returns the flag; keeps its value elsewhere if it tells whether the last step skipped."""
        if flag is self.skipped:
            spare = self._spare
            if spare is None or spare.device != flag.device:
                spare = self._spare = torch.empty_like(flag)
            self.skipped = spare.copy_(flag)
        return flag

    @untraced
    def note_step(self, *, skipped: Tensor | bool) -> None:
        """Records whether a step that begins is skipped."""
        self.skipped, self._skip_copy = skipped, None
        self.steps += 1

    def skipped_on_host(self) -> bool | None:
        """Returns whether the last step was skipped, None until the answer has arrived."""
        skipped = self.skipped
        if isinstance(skipped, bool):
            return skipped
        if self._skip_copy is None:
            if capturing(skipped.device):
                return None
            self._skip_copy = HostCopy(skipped)
        copy = self._skip_copy
        return bool(copy.wait().tolist()) if copy.arrived else None  # sync: none, it has arrived


def _raise_by_grads(flag: Tensor, params: Iterable[nn.Parameter]) -> None:
    grads = _grads(params)
    if grads:
        finite.unscale_and_check_(grads, torch.ones_like(flag), flag)


def _grads(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return finite.dense_values([grad for p in params if (grad := p.grad) is not None])
