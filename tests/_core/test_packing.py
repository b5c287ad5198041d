"""An fp32 value in a bf16 half and 16 more bits, and stochastic rounding to the bf16 half alone."""

import math
import struct

import pytest
import torch

from apex._core.packing import Split, Stochastic
from apex._torch.packed import Packed


def fp32(*patterns):
    return torch.tensor(
        [struct.unpack("<f", struct.pack("<I", each))[0] for each in patterns], dtype=torch.float32
    )


def bits(value):
    return value.view(torch.int32)


def random_patterns(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)


def split(value):
    packing = Split().pack(torch.empty_like(value, dtype=torch.bfloat16))
    packing.load(value)
    return packing


def test_two_halves_give_back_every_value_bit_by_bit():
    value = random_patterns(2**17).view(torch.float32)
    halves = split(value)
    back = Packed(halves).clone()
    known = ~value.isnan()
    assert torch.equal(bits(back)[known], bits(value)[known])
    assert torch.equal(back.isnan(), value.isnan())
    assert torch.equal(halves.high.isnan(), value.isnan())


@pytest.mark.parametrize(
    ("pattern", "high"),
    [
        (0x3F808000, 0x3F81),  # a half rounds up, where half to even would go down
        (0x3F818000, 0x3F82),
        (0xBF808000, 0xBF81),  # away from zero
        (0x3F807FFF, 0x3F80),
        (0x80000000, 0x8000),  # -0.0
        (0x7F800000, 0x7F80),  # inf
        (0x7F7FFFFF, 0x7F80),  # the largest finite value, as torch rounds it
        (0x7F7F7FFF, 0x7F7F),
        (0x7FFFFFFF, 0x7FC0),  # CUDA's NaN, whose pattern rounds to -0.0
        (0xFFFFFFFF, 0x7FC0),
        (0x7F800001, 0x7FC0),  # a NaN whose pattern rounds to inf
        (0x00000001, 0x0000),
    ],
)
def test_upper_half_is_the_value_rounded_half_up(pattern, high):
    assert split(fp32(pattern)).high.view(torch.int16).tolist() == [
        struct.unpack("<h", struct.pack("<H", high))[0]
    ]


def test_upper_half_is_torchs_rounding_where_there_is_no_tie():
    value = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    tie = (bits(value) & 0xFFFF) == 0x8000
    assert torch.equal(split(value).high[~tie], value.to(torch.bfloat16)[~tie])


def rounded(value, seed=0):
    packing = Stochastic(seed).pack(torch.empty_like(value, dtype=torch.bfloat16))
    Packed(packing).copy_(value)
    return packing.high


def test_stochastic_rounding_has_the_value_as_its_mean():
    step, share, count = 2.0**-7, 0.3, 200_000
    value = torch.full((count,), 1.0 + share * step)
    for sign in (1, -1):
        high = rounded(sign * value)
        up = (high == sign * (1.0 + step)).double().mean().item()
        assert set(high.tolist()) == {sign * 1.0, sign * (1.0 + step)}
        assert abs(up - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_stochastic_rounding_leaves_bf16_values_and_what_is_not_finite():
    exact = random_patterns(2**16).view(torch.float32).to(torch.bfloat16)
    value = torch.cat([exact.float(), fp32(0x7FFFFFFF, 0x7F800000, 0xFF800000)])
    high = rounded(value)
    assert torch.equal(high.nan_to_num(0.5), value.to(torch.bfloat16).nan_to_num(0.5))


def test_random_bits_depend_on_the_seed_and_the_count_of_writes_alone():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    first = rounded(value)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    assert torch.equal(rounded(value), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(rounded(value, seed=1), first)
    rule = Stochastic(0)
    packing = rule.pack(torch.empty_like(value, dtype=torch.bfloat16))
    packed = Packed(packing)
    packed.copy_(value)
    packed.copy_(value)
    assert rule.writes == 2
    assert not torch.equal(packing.high, first)


def test_noise_is_uniform_in_16_bits_and_differs_between_writes_and_parts():
    rule = Stochastic(7)
    places = [(write, start) for write in range(4) for start in (0, 2**18)]
    noise = torch.stack([rule.noise(torch.empty(2**14 + 3), *place) for place in places]).double()
    uniform = 2**16 / math.sqrt(12)
    assert abs(noise.mean().item() + 0.5) < 5 * uniform / math.sqrt(noise.numel())
    assert abs(noise.std().item() / uniform - 1) < 0.02
    assert abs(torch.corrcoef(noise) - torch.eye(8)).max() < 0.05
