"""Recognizes torch's errors about 16-bit dtypes, by their texts."""

from __future__ import annotations

import dis
import re
from typing import Any, Literal

_MIXED_INPUTS = re.compile(  # oneDNN says it of a state in another dtype
    "(same |self.)dtype|scalar type|Half|BFloat16|primitive descriptor for (the|an) LSTM"
)
_NOT_FLOATING = re.compile(r"\b(char|short|int|long|bool|byte)\b|Complex", re.IGNORECASE)
_NO_ROOM = re.compile("value cannot be converted to type .*(Half|BFloat16) without overflow")
_HOOK = re.compile(r"changed the type of value \(was [\w.]*(Half|BFloat16)")
_NO_KERNEL = re.compile(
    "not implemented for '(Half|BFloat16)'|[Ll]ow precision dtypes not supported"
    "|Unsupported dtype (Half|BFloat16)|tensors?(,? but got|( of type)?:) (Half|BFloat16)"
    "|[Ff]loat(,| or| and) [Dd]ouble"
)


def mixes_dtypes(error: RuntimeError) -> bool:
    """Returns whether an operator failed because its inputs have different dtypes."""
    return _MIXED_INPUTS.search(str(error)) is not None


def is_of_16_bit_hook(error: RuntimeError) -> bool:
    """Returns whether a hook on a 16-bit tensor returned a gradient of another dtype."""
    return _HOOK.search(str(error)) is not None


def fault_of_16_bits(error: RuntimeError) -> Literal["mixed", "no room", "no kernel"] | None:
    """Returns why an operator of torch failed that works in fp32; ``None`` for other errors.

    Its inputs have mixed dtypes, a number is too large for 16 bits, or it has no 16-bit kernel.
    """
    # Scripts catch subclasses, such as out of memory, by name.
    if type(error) not in (RuntimeError, NotImplementedError) or not _is_of_torch(error):
        return None
    text = str(error)
    if _NO_ROOM.search(text):
        return "no room"
    if mixes_dtypes(error) and not _NOT_FLOATING.search(text):
        return "mixed"
    return "no kernel" if _NO_KERNEL.search(text) else None


def _is_of_torch(error: BaseException) -> bool:
    """Returns whether torch raised an error that was caught, and no ``raise`` in other Python."""
    trace: Any = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    module: str = trace.tb_frame.f_globals.get("__name__", "")
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return module.startswith("torch.") or dis.opname[instruction] != "RAISE_VARARGS"
