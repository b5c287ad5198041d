"""Lazy modules: refused until one batch has told their shapes."""

import pytest
from torch import nn

from tests.model.cases import prepare_unskipped
from tests.support import loops

every_level = pytest.mark.parametrize("level", loops.LEVELS_SHORT)


@every_level
def test_a_materialized_model_trains_as_one_that_never_was_lazy(level):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(2))
    model(loops.batch()[0])
    eager = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2))
    eager.load_state_dict(model.state_dict())
    pairs = [prepare_unskipped(level, each) for each in (model, eager)]
    for pair in pairs:
        loops.train(*pair)
    assert loops.same(*(loops.masters(optimizer) for _, optimizer in pairs))


@every_level
def test_a_group_of_lazy_parameters_is_refused_until_they_are_materialized(level):
    model, optimizer = prepare_unskipped(level)
    model.append(nn.LazyLinear(2, dtype=next(model.parameters()).dtype))
    group = {"params": list(model[3].parameters())}
    with pytest.raises(ValueError, match="uninitialized parameter"):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1
    model(loops.batch()[0])
    optimizer.add_param_group(group)
    before = loops.masters(optimizer)[-2:]
    loops.train(model, optimizer)
    assert not loops.same(before, loops.masters(optimizer)[-2:])
