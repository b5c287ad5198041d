"""Names, module paths and signatures of apex.parallel."""

import importlib
import inspect

import pytest
import torch

import apex.parallel
from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm, convert_syncbn_model

PATHS = [
    ("apex.parallel", "LARC"),
    ("apex.parallel", "ReduceOp"),
    ("apex.parallel.LARC", "LARC"),
    ("apex.parallel", "DistributedDataParallel"),
    ("apex.parallel", "Reducer"),
    ("apex.parallel", "SyncBatchNorm"),
    ("apex.parallel", "convert_syncbn_model"),
    ("apex.parallel", "create_syncbn_process_group"),
    ("apex.parallel.distributed", "DistributedDataParallel"),
    ("apex.parallel.distributed", "Reducer"),
    ("apex.parallel.distributed", "apply_flat_dist_call"),
    ("apex.parallel.distributed", "extract_tensors"),
    ("apex.parallel.distributed", "flat_dist_call"),
    ("apex.parallel.distributed", "flatten"),
    ("apex.parallel.distributed", "split_by_type"),
    ("apex.parallel.distributed", "split_half_float_double"),
    ("apex.parallel.distributed", "unflatten"),
    ("apex.parallel.multiproc", "main"),
    ("apex.parallel.optimized_sync_batchnorm", "SyncBatchNorm"),
    ("apex.parallel.sync_batchnorm", "SyncBatchNorm"),
]


@pytest.mark.parametrize(("module", "name"), PATHS)
def test_names_are_where_apex_had_them(module, name):
    assert callable(getattr(importlib.import_module(module), name))


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_arguments_of_distributed_data_parallel_are_apexs():
    assert list(defaults(DistributedDataParallel).items()) == [
        ("message_size", 10000000),
        ("delay_allreduce", False),
        ("shared_param", None),
        ("allreduce_trigger_params", None),
        ("retain_allreduce_buffers", False),
        ("allreduce_always_fp32", False),
        ("num_allreduce_streams", 1),
        ("allreduce_communicators", None),
        ("gradient_average", True),
        ("gradient_predivide_factor", 1.0),
        ("gradient_average_split_factor", None),
        ("prof", False),
    ]


def test_arguments_of_sync_batch_norm_are_apexs():
    assert list(defaults(SyncBatchNorm).items()) == [
        ("eps", 1e-5),
        ("momentum", 0.1),
        ("affine", True),
        ("track_running_stats", True),
        ("process_group", None),
        ("channel_last", False),
        ("fuse_relu", False),
    ]


def test_arguments_of_the_functions_are_apexs():
    assert list(inspect.signature(convert_syncbn_model).parameters) == [
        "module",
        "process_group",
        "channel_last",
    ]
    assert list(inspect.signature(Reducer).parameters) == ["module_or_grads_list"]


def test_reduce_op_is_torchs():
    assert apex.parallel.ReduceOp is torch.distributed.ReduceOp
