"""Marks of tests that need what some releases of torch lack."""

import inspect

import pytest
import torch

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

has_masters = TORCH_VERSION >= (2, 10)
"""Whether 16-bit parameters may hold fp32 gradients; else the tests of masters are skipped."""

NO_MASTERS = "fp32 masters need torch 2.10"
needs_masters = pytest.mark.skipif(not has_masters, reason=NO_MASTERS)
"""Marks tests of masters in which amp's error does not end the test."""

shards_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="fully_shard of this torch (2.6) calls for events, which its streams on CPUs lack",
)
"""Marks tests in which a model that ``fully_shard`` splits computes, on a CPU."""

replicas_on_cpu = pytest.mark.skipif(
    TORCH_VERSION < (2, 8),
    reason="fully_shard of this torch averages over replicas by an operation that gloo lacks",
)
"""Marks tests in which ``fully_shard`` replicates shards, on a CPU."""

averages_on_cpu = pytest.mark.skipif(
    TORCH_VERSION < (2, 9), reason="fully_shard of this torch adds gradients on gloo"
)
"""Marks tests of gradients that ranks average by ``fully_shard``, on a CPU."""

unbinds_dtensors = pytest.mark.skipif(
    TORCH_VERSION < (2, 10), reason="DTensors of this torch lack unbind, which LAMB needs"
)
"""Marks tests of LAMB with a model that ``fully_shard`` splits."""

copies_before_saving = pytest.mark.skipif(
    TORCH_VERSION < (2, 7),
    reason="async_save of this torch (2.6) saves what training writes on a CPU in the meantime",
)
"""Marks tests that train while a checkpoint is saved."""

lets_models_go = pytest.mark.skipif(
    TORCH_VERSION == (2, 7),
    reason="get_state_dict of this torch (2.7) keeps the last model alive, also without amp",
)
"""Marks tests that save a model's ``get_state_dict`` in their own process."""

pipelines_on_cpu = pytest.mark.skipif(
    TORCH_VERSION == (2, 9),
    reason="pipelines of this torch (2.9) abort the process on CPUs, also without amp",
)
"""Marks tests of ``torch.distributed.pipelining``."""

adagrad_takes_groups = "full_like" in inspect.getsource(torch.optim.Adagrad._init_group)
"""Whether torch's Adagrad makes state for a group that is added later; that of 2.10 raises."""
