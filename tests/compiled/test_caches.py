"""Compiled code on disk and in memory: nobody takes what was made by other rules."""

import gc

import pytest
import torch
from torch._dynamo.utils import counters
from torch.compiler import config

from apex import amp
from tests.support.features import TORCH_VERSION
from tests.support.loops import prepared

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def softmax(x):
    return torch.softmax(x, 0) * 2


def compiled_dtype():
    return torch.compile(softmax, fullgraph=True)(torch.ones(4, dtype=torch.bfloat16)).dtype


def with_session():
    session = prepared("O4")
    try:
        return compiled_dtype()
    finally:
        del session
        gc.collect()


def under_torchs_rules():
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return compiled_dtype()


def test_a_session_that_is_collected_while_torch_sets_its_configuration_sets_none():
    """In Python 3.11, that would crash the process."""
    gc.collect()
    before = config.cache_key_tag
    held = [prepared("O4")]
    tagged = config.cache_key_tag
    inside = {"held": held, "gc": gc, "__name__": "torch.utils._config_module"}
    exec("held.clear()\ngc.collect()", inside)
    assert config.cache_key_tag == tagged != before
    with amp.disable_casts():
        assert config.cache_key_tag == before


def hits():
    found = {**counters["inductor"], **counters["aot_autograd"]}
    return sum(found.get(name, 0) for name in ("fxgraph_cache_hit", "autograd_cache_hit"))


# No probes of the processor and no headers, which would be compiled into each new folder.
FAST = {"cpp.vec_isa_ok": True, "cpp.simdlen": 1}
if TORCH_VERSION >= (2, 8):
    FAST["cpp_cache_precompile_headers"] = False


def test_code_in_the_caches_follows_its_own_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    gc.collect()  # a session that another test has left would be part of the key
    with torch._inductor.config.patch(FAST):
        assert with_session() is torch.float32
        assert under_torchs_rules() is torch.bfloat16  # also what a process without apex takes
        for rules in (with_session, under_torchs_rules):
            torch._dynamo.reset()
            counters.clear()
            assert rules() is (torch.bfloat16 if rules is under_torchs_rules else torch.float32)
            assert hits()  # each takes its own code from the cache again
