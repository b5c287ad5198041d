"""Roundings of fp32 to bf16 that torch does not have, by bit patterns."""

import torch


def half_up(value):
    """Rounds with halves away from zero."""
    return _upper(_pattern(value) + 2**15)


def neighbours(value):
    """Returns the bf16 numbers between which each value lies; itself twice if it is one."""
    pattern = _pattern(value)
    return _upper(pattern), _upper(pattern + 2**16 - 1)


def _pattern(value):
    return value.detach().contiguous().view(torch.int32).long()


def _upper(pattern):
    return (pattern >> 16).to(torch.int16).view(torch.bfloat16)
