"""The op table's outcomes are the frozen ones: dtypes, or errors, for every dtype and mix."""

import pytest

from apex._torch.dispatcher import has_operator
from tests.casts import freeze

VARYING = {"_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa.vec"}
VARYING |= {"cholesky", "linalg_matrix_sqrth", "qr"}
"""Operators that torch 2.13 has and another release lacks, or the other way round."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*it is just left for JIT compatibility:UserWarning",
    "ignore:torch.triangular_solve is deprecated:UserWarning",
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_outcomes_are_the_frozen_ones(device):
    was, now = freeze.frozen()[device], freeze.outcomes(device)
    changed = [
        f"{name}: was {was[group].get(name)}, is {now[group].get(name)}"
        for group in was
        for name in sorted(was[group].keys() | now[group].keys())
        if name not in VARYING or (name in was[group] and has_operator(f"aten::{name}"))
        if was[group].get(name) != now[group].get(name)
    ]
    assert not changed, "\n".join(changed)
