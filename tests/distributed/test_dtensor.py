"""Parts of DTensors, and the groups of ranks that hold others."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from apex._torch import dtensor
from tests.support.ranks import fake_group
from tests.support.sharding import mesh

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:DTensor random operators may not"),  # torch 2.6
]


def placed(over, *placements, rows=4):
    return nn.Parameter(distribute_tensor(torch.arange(2.0 * rows).view(rows, 2), over, placements))


def ranks_of(params):
    return [
        (kind, distributed.get_process_group_ranks(ranks))
        for ranks, kind in dtensor.groups(params).items()
    ]


def test_groups_are_the_sharded_dimensions_of_the_meshes_each_once():
    with fake_group(3, 4):
        plane = mesh(2, 2)
        in_row, in_column = ("cpu", [2, 3]), ("cpu", [1, 3])
        one = placed(plane, Replicate(), Shard(0))
        assert ranks_of([one, nn.Parameter(torch.ones(1))]) == [in_row]
        assert ranks_of([placed(plane, Replicate(), Replicate())]) == []
        assert ranks_of([placed(plane, Shard(0), Shard(1)), one]) == [in_column, in_row]


def parts(rank):
    tensor = placed(mesh(2), Shard(0), rows=3)
    part = dtensor.local(tensor)
    part.add_(1.0)
    summed = dtensor.laid_out_as(
        tensor, DTensor.from_local(torch.ones(3, 2), tensor.device_mesh, [Partial()])
    )
    return (
        tensor.full_tensor().tolist(),
        (summed.placements == tensor.placements, summed.full_tensor().tolist()),
    )


def test_a_part_shares_memory_and_partial_sums_are_reduced(on_two_ranks):
    for seen, summed in on_two_ranks(parts):
        assert seen == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        assert summed == (True, [[2.0, 2.0]] * 3)
