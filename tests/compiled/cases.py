"""What the tests of compiled code share: a model with every boundary in its output, and counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.support.features import TORCH_VERSION
from tests.support.loops import in_a_thread, loss_scale, masters
from tests.support.reference import plain_loops

UNTRACED = "this torch does not trace the context of a generator"
GENERATORS = pytest.mark.skipif(TORCH_VERSION < (2, 7), reason=UNTRACED)
CUT = "this torch cuts its graphs at calls that later ones leave whole"
SAME_GRAPHS = pytest.mark.skipif(TORCH_VERSION < (2, 8), reason=CUT)
SAME_BITS = TORCH_VERSION >= (2, 12)
"""Whether a compiled step of torch's own SGD is equal to the eager one to the last bit."""

MIXED = ("O1", "O4", "O5")

EPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}


class BoundaryNet(nn.Module):
    """A convolution, norms, and functions of every row; returns what each gave."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 1)
        self.batch_norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        conv = self.conv(x)
        batch_norm = self.batch_norm(conv).relu()
        layer_norm = self.layer_norm(batch_norm.mT)
        head = self.head(layer_norm)
        pooled = head.exp().sum(1)
        product = torch.einsum("bij,bkj->bik", head, head).softmax(-1)
        given = {"conv": conv, "batch_norm": batch_norm, "layer_norm": layer_norm, "head": head}
        return {**given, "pooled": pooled, "product": product, "logits": F.log_softmax(pooled, 1)}


def loss_fn(model, x, y):
    """The loss and everything that the model gave."""
    outputs = model(x)
    return F.nll_loss(outputs["logits"].float(), y) + outputs["product"].float().mean(), outputs


def compiled(fn, *, backend="aot_eager", fullgraph=True, **options):
    """``torch.compile(fn)``, and what counts its graphs (``frame_count``)."""
    graphs = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=graphs, fullgraph=fullgraph, **options), graphs


def while_compiling(call):
    """What ``call`` returns in a thread of its own, while this one compiles."""
    results = []

    def backend(graph, example_inputs):
        results.append(in_a_thread(call))
        return graph

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    return results[0]


def dtypes(outputs):
    return {name: output.dtype for name, output in outputs.items()}


def graph_breaks():
    return sum(counters["graph_break"].values())


def no_recompilation():
    return torch._dynamo.config.patch(error_on_recompile=True)


def assert_close(ours, theirs, level, multiple=8):
    """Within a multiple of the eps of the level's 16-bit type."""
    tolerance = multiple * EPS[plain_loops.LEVELS[level].compute]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def training_state(optimizer):
    """What a training has moved: the values that the optimizer steps, and the loss scale."""
    return masters(optimizer), loss_scale()
