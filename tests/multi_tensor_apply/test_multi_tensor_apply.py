"""The applier."""

import torch

from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier, multi_tensor_apply


def test_it_is_available():
    assert multi_tensor_applier.available
    assert MultiTensorApply.available
    multi_tensor_applier.check_avail()


def test_chunk_size_is_apexs():
    assert multi_tensor_applier.chunk_size == 65536


def test_it_calls_the_function_with_its_chunk_size():
    buffer, lists = torch.zeros(1), [[torch.ones(1)]]
    called = MultiTensorApply(7)(lambda *args: args, buffer, lists, 1.0, True)
    assert called == (7, buffer, lists, 1.0, True)


def test_class_is_at_apexs_path():
    assert multi_tensor_apply.MultiTensorApply is MultiTensorApply
