"""The op table's outcomes are the frozen ones: dtypes, or errors, for every dtype and mix."""

import pytest

from tests.casts import freeze

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
        if was[group].get(name) != now[group].get(name)
    ]
    assert not changed, "\n".join(changed)
