"""Parts of DTensors, and the groups of ranks that hold others."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from apex._torch import dtensor
from tests.support.sharding import mesh

pytestmark = pytest.mark.distributed


def placed(over, *placements, rows=4):
    return nn.Parameter(distribute_tensor(torch.arange(2.0 * rows).view(rows, 2), over, placements))


def ranks_of(params):
    return [
        (kind, distributed.get_process_group_ranks(ranks)) for kind, ranks in dtensor.groups(params)
    ]


def groups_of_a_plane(rank):
    plane = mesh(2, 2)
    line = plane  # the same object: a mesh makes its groups once
    return (
        ranks_of([placed(plane, Replicate(), Shard(0)), nn.Parameter(torch.ones(1))]),
        ranks_of([placed(plane, Replicate(), Replicate())]),
        ranks_of([placed(plane, Shard(0), Shard(1)), placed(line, Replicate(), Shard(1))]),
    )


def test_groups_are_the_sharded_dimensions_of_the_meshes_each_once(on_four_ranks):
    for rank, (one, none, both) in enumerate(on_four_ranks(groups_of_a_plane)):
        row, column = divmod(rank, 2)
        in_row, in_column = [2 * row, 2 * row + 1], [column, column + 2]
        assert one == [("cpu", in_row)]
        assert none == []
        assert both == [("cpu", in_column), ("cpu", in_row)]


def greatest(rank):
    flag = torch.tensor(float(rank == 2))
    over = dtensor.groups([placed(mesh(2, 2), Shard(0), Shard(0))])
    dtensor.all_reduce_(flag, over, "MAX")
    return flag.item()


def test_a_flag_reaches_every_rank_of_a_plane(on_four_ranks):
    assert on_four_ranks(greatest) == [1.0] * 4


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


def test_plain_tensors_are_their_own_part():
    tensor = torch.ones(2)
    assert dtensor.local(tensor) is tensor
    assert dtensor.laid_out_as(torch.zeros(2), tensor) is tensor
    assert dtensor.groups([tensor]) == []
