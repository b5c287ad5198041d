"""What the tests of faults share."""

import pytest
import torch

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.region import CastRegion


@pytest.fixture(scope="module")
def kernels_stay():
    """Registering the kernels anew for each session would take most of the time."""
    keep = CastRegion(CastSpec(torch.bfloat16, ("cpu",), OpTable.default()))
    yield
    del keep
