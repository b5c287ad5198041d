"""create_syncbn_process_group puts neighbours together."""

import pytest
import torch

from apex.parallel import SyncBatchNorm, create_syncbn_process_group


@pytest.mark.parametrize(("size", "ranks"), [(1, [3]), (2, [2, 3]), (4, [0, 1, 2, 3])])
def test_a_group_holds_neighbouring_ranks_with_this_one(one_of_four, size, ranks):
    group = create_syncbn_process_group(size)
    assert torch.distributed.get_process_group_ranks(group) == ranks


def test_size_0_means_all_processes():
    assert create_syncbn_process_group(0) is None


@pytest.mark.parametrize("size", [-1, "2", None, 2.0])
def test_a_size_that_is_no_integer_is_refused(one_of_four, size):
    with pytest.raises(ValueError, match=f"group_size is {size!r}; it must be an integer of at l"):
        create_syncbn_process_group(size)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_size_that_does_not_divide_is_refused(one_of_four, size):
    with pytest.raises(ValueError, match=f"group_size is {size}; it must divide .* 4"):
        create_syncbn_process_group(size)


def test_without_a_process_group_it_is_refused():
    with pytest.raises(RuntimeError, match="create_syncbn_process_group needs a process group"):
        create_syncbn_process_group(2)


@pytest.mark.parametrize("group", [[0, 1], 2, "nccl"])
def test_a_layer_takes_process_groups_only(group):
    with pytest.raises(TypeError, match="process_group is"):
        SyncBatchNorm(3, process_group=group)


def test_a_layer_refuses_a_group_of_other_processes(one_of_four):
    other = torch.distributed.new_group([0, 1])
    with pytest.raises(ValueError, match="does not contain this process"):
        SyncBatchNorm(3, process_group=other)
