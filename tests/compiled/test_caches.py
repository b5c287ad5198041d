"""Compiled code on disk and in memory: nobody takes what was made by other rules."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from apex._torch.dispatcher import release
from tests.support.training import prepared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def softmax(x):
    return torch.softmax(x, 0) * 2


def compiled_dtype():
    return torch.compile(softmax, fullgraph=True)(torch.ones(4, dtype=torch.bfloat16)).dtype


def under_torchs_rules():
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return compiled_dtype()


def hits():
    found = {**counters["inductor"], **counters["aot_autograd"]}
    return sum(found.get(name, 0) for name in ("fxgraph_cache_hit", "autograd_cache_hit"))


# No probes of the processor and no headers, which would be compiled into each new folder.
FAST = {"cpp.vec_isa_ok": True, "cpp.simdlen": 1}
if release >= (2, 8):
    FAST["cpp_cache_precompile_headers"] = False

WITHOUT_APEX = """
import json, sys
import torch, torch._inductor.config
torch.set_num_threads(1)
from torch._dynamo.utils import counters
def softmax(x):
    return torch.softmax(x, 0) * 2
x = torch.ones(4, dtype=torch.bfloat16)
fast = torch._inductor.config.patch(json.loads(sys.argv[1]))
with fast, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
    result = torch.compile(softmax, fullgraph=True)(x)
found = {**counters["inductor"], **counters["aot_autograd"]}
hits = sum(found.get(name, 0) for name in ("fxgraph_cache_hit", "autograd_cache_hit"))
sys.stdout.write(f"{result.dtype} {'apex' in sys.modules} {hits > 0}")
"""


def test_code_in_the_caches_follows_its_own_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(FAST):
        session = prepared("O4")
        assert compiled_dtype() is torch.float32
        del session
        gc.collect()
        assert under_torchs_rules() is torch.bfloat16  # the same process, after the session
        torch._dynamo.reset()
        counters.clear()
        session = prepared("O4")
        assert compiled_dtype() is torch.float32
        assert hits()  # our own code is taken from the cache again
        del session
    plain = subprocess.run(
        [sys.executable, "-c", WITHOUT_APEX, json.dumps(FAST)],
        env=os.environ,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert plain == "torch.bfloat16 False True"  # torch's own rules, from the cache of the first
