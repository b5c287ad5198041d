"""fp32 masters in fewer bytes: a bf16 weight with the other 16 bits beside it, or with none.

Note [Upper halves]
    The upper half of a master is its model's weight: a step writes the model. It is the master's
    bit pattern, rounded half up to 16 bits, so halves round away from zero. The lower half is the
    signed difference, which fits 16 bits and gives back every fp32 value. Rounding half to even,
    as torch does, needs one bit more: an even upper half would have 2**16 + 1 lower ones.

    Without a lower half, a write rounds up or down at random, with the probabilities that make the
    expected value the value written (stochastic rounding; Gupta et al., ICML 2015).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from apex._core.policy import MasterWeights
from apex._pickle import rebuild
from apex._torch.packed import Packing
from apex._torch.parameters import uncounted

_INF = float("inf")

_SIGNLESS, _VOID = 2**31 - 1, 2**31 - 2**15
"""All bits but the sign, and the least of these bits of a zero with a lower half below zero."""

_SEEN = 64
"""Elements by which a weight that someone else wrote is compared with the one that amp wrote."""


class Split:
    """The packing of ``master_weights="split"``: exact in 4 bytes, of which the model has 2."""

    def pack(self, weight: Tensor) -> Halves:
        """Returns the packing of ``weight``, bf16."""
        return Halves(weight, torch.zeros_like(weight, dtype=torch.int16))

    def __reduce__(self) -> tuple[Any, ...]:
        """See :mod:`apex._pickle`."""
        return rebuild, ("split",)


@dataclass
class Stochastic:
    """The packing of ``master_weights="stochastic"``: the model's weight, rounded at random.

    The random bits depend on these two numbers alone, and not on the device's generator.

    Attributes:
        seed: The seed.
        writes: Writes so far.
    """

    seed: int = 0
    writes: int = 0

    def pack(self, weight: Tensor) -> Rounded:
        """Returns the packing of ``weight``, bf16."""
        return Rounded(weight, self)

    def state(self) -> Tensor:
        """Returns both numbers as int64 ``[2]`` in host memory, for other ranks."""
        words = [self.seed % 2**64, self.writes]
        return torch.tensor([word - 2**64 * (word >> 63) for word in words])

    def set_state(self, state: Tensor) -> None:
        """Takes what :meth:`state` returned."""
        self.seed, self.writes = (word % 2**64 for word in state.tolist())

    def noise(self, like: Tensor, write: int, start: int = 0) -> Tensor:
        """Returns uniform random numbers from -2**15 to 2**15 - 1, int16.

        Args:
            like: Has their shape and device.
            write: The number of the write.
            start: The first element of ``like`` in the tensor that is written in parts. So the
                number of parts, which may differ between ranks, changes no other tensor's numbers.
        """
        generator = torch.Generator(device=like.device)
        generator.manual_seed(_mixed(_mixed(self.seed, write), start))
        words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        words.random_(-(2**63), None, generator=generator)  # each holds four numbers
        return words.view(torch.int16)[: like.numel()].view(like.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """See :mod:`apex._pickle`."""
        return rebuild, ("stochastic", self.seed, self.writes)


@dataclass(eq=False)
class Halves(Packing):
    """An upper half, bf16, and a lower one, int16; see Note [Upper halves].

    Attributes:
        high: The upper half.
        low: The lower half.
        whole: The packing that this one is a view of.
        seen: The upper halves of up to ``_SEEN`` elements at the last :meth:`note`.
        waits: Whether the lower halves of overwritten elements are kept, though not read.
    """

    high: Tensor
    low: Tensor
    whole: Halves | None = None
    seen: Tensor | None = None
    waits: bool = False

    def tensors(self) -> list[Tensor]:
        return [self.high, self.low, *([] if self.seen is None else [self.seen])]

    def note(self) -> None:
        """Remembers upper halves, by which :meth:`overwritten` finds what others write to them."""
        now = self._sample()
        self.seen = now.clone() if self.seen is None else self.seen.copy_(now)
        self.waits = False

    def wait(self) -> None:
        self.waits = True

    def settle(self) -> None:
        if self.waits:
            self.follow(keep_low=True)
            self.waits = False

    @property
    def _valid_low(self) -> Tensor:
        """The lower halves as they are read: 0 where one of another value waits."""
        return self.followed().low if self.waits else self.low

    def overwritten(self) -> Tensor:
        """Returns which elements got another upper half since :meth:`note`: their lower is void.

        A weight with more elements than were noted counts as overwritten if most of these have
        changed. Otherwise, only its zeros do: a mask leaves no low bits, and keeps those of others.
        """
        now = self._sample()
        changed = torch.zeros_like(now, dtype=torch.bool) if self.seen is None else now != self.seen
        if self._step == 1:
            return changed.view(self.high.shape)
        nonzero = now != 0
        most = (changed & nonzero).sum() * 8 >= nonzero.sum().clamp(min=1) * 7
        return most | (self.high == 0)

    @property
    def _step(self) -> int:
        return max(1, -(-self.high.numel() // _SEEN))

    def _sample(self) -> Tensor:
        return self.high.reshape(-1)[:: self._step]

    def complete(self, value: Tensor, spare: Tensor | None = None) -> None:
        # In the same dtype, addition needs no memory of its own.
        bits = value.view(torch.int32)
        bits.add_(self._valid_low if spare is None else spare.copy_(self._valid_low))
        # A zero that a script wrote past autograd's counter (``weight.data.mul_(mask)``) has the
        # lower half of another value. Below zero, the two are a NaN that no write stores: 0 again.
        # In place on integers: the same by a mask doubles the time of a step.
        spare = torch.bitwise_and(bits, _SIGNLESS, out=spare)
        bits.bitwise_and_(spare.sub_(_VOID).bitwise_right_shift_(31))

    def begin_write(self) -> None:
        (self.whole or self).settle()

    def write(self, value: Tensor, spare: Tensor | None = None) -> None:
        """Stores ``value`` exactly; a NaN loses its payload."""
        self._write(self.high, value)
        increment_version((self.whole or self).high)

    def load(self, value: Tensor) -> None:
        """Stores ``value`` exactly. Autograd does not count this: ``high`` rounds to it already."""
        self._write(uncounted(self.high), value.to(torch.float32, copy=True))

    def _write(self, high: Tensor, value: Tensor) -> None:
        bits = _bits(value)
        self.low.copy_(bits)  # the lower 16 bits, signed
        _write_upper(high, bits.add_(1 << 15))

    def follow(self, *, keep_low: bool) -> None:
        """Clears the lower halves of overwritten elements, or all of them."""
        self.low.masked_fill_(self.overwritten() | (not keep_low), 0)

    def followed(self) -> Halves:
        return Halves(self.high, self.low.masked_fill(self.overwritten(), 0))

    def stacked(self, others: Sequence[Halves]) -> Halves:
        return Halves(torch.stack([o.high for o in others]), torch.stack([o.low for o in others]))

    def view(self, of: Callable[[Tensor], Any]) -> list[Halves]:
        parts = zip(of(self.high), of(self.low), strict=True)
        return [Halves(high, low, self.whole or self) for high, low in parts]

    def copied(self, memo: dict[int, Any]) -> Halves:
        return Halves(self.high.clone(), self._valid_low.clone())


@dataclass(eq=False)
class Rounded(Packing):
    """A bf16 value that is rounded at random when it is written; see Note [Upper halves].

    Attributes:
        high: The value.
        rule: The random numbers.
        whole: The packing that this one is a view of.
        number: The number of its last write.
    """

    high: Tensor
    rule: Stochastic
    whole: Rounded | None = None
    number: int = 0

    def tensors(self) -> list[Tensor]:
        return [self.high]

    def write(self, value: Tensor, spare: Tensor | None = None) -> None:
        whole = self.whole or self
        start = int(self.high.storage_offset()) - int(whole.high.storage_offset())
        noise = self.rule.noise(value, whole.number, start)
        bits = _bits(value).add_(noise if spare is None else spare.copy_(noise))
        _write_upper(self.high, bits.add_(1 << 15))
        increment_version(whole.high)

    def load(self, value: Tensor) -> None:
        """Stores ``value``, rounded to nearest; as for halves, autograd does not count this."""
        uncounted(self.high).copy_(value)

    def begin_write(self) -> None:
        """Numbers the write that begins."""
        (self.whole or self).number = self.rule.writes
        self.rule.writes += 1

    def stacked(self, others: Sequence[Rounded]) -> Rounded:
        return Rounded(torch.stack([other.high for other in others]), self.rule)

    def view(self, of: Callable[[Tensor], Any]) -> list[Rounded]:
        return [Rounded(high, self.rule, self.whole or self) for high in of(self.high)]

    def copied(self, memo: dict[int, Any]) -> Rounded:
        """Returns a copy; those of one ``memo`` share random numbers."""
        return Rounded(self.high.clone(), copy.deepcopy(self.rule, memo))


Kind = Split | Stochastic
"""How a session's masters are packed."""


def kind_of(master_weights: MasterWeights, seed: int = 0) -> Kind | None:
    """Returns the packing that the option asks for; ``None`` for plain masters, or none."""
    if master_weights == "split":
        return Split()
    return Stochastic(seed) if master_weights == "stochastic" else None


def _bits(value: Tensor) -> Tensor:
    """Returns the bit patterns of fp32 ``value``, int32, sharing memory.

    Sets every NaN to the one that stays NaN when its pattern is rounded.
    """
    return value.nan_to_num_(nan=float("nan"), posinf=_INF, neginf=-_INF).view(torch.int32)


def _write_upper(high: Tensor, bits: Tensor) -> None:
    high.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def _mixed(seed: int, writes: int) -> int:
    """Returns a seed that differs in about half its bits from that of the next write.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (splitmix64).
    """
    word = (seed + (writes + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return (word ^ word >> 31) % 2**63
