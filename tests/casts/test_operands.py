"""Operators whose operands decide: writes, sparse products, fake quantization, listed names."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import lists
from tests.support.loops import Body, at_levels, prepared, scaled_backward

LOW = {"O1": torch.float16, "O4": torch.bfloat16}
level = at_levels(*LOW)
low = pytest.fixture(lambda level: LOW[level])
SPARSE_NEWS = "ignore:Sparse (CSR tensor|invariant checks):UserWarning"
pytestmark = pytest.mark.filterwarnings(SPARSE_NEWS)
ROWS, PLACES = torch.tensor([2, 0]), torch.tensor([[0, 1], [1, 0]])
MASK = torch.tensor([[True, False], [False, True], [True, True]])


def with_two_operands(rule):
    """Computes ``rule(fp32 tensor, result of a linear layer, 16 bits)``."""

    def forward(self, x):
        low = self.linear(x)
        self.low = low.dtype
        return rule(self.base * 2, low)

    return Body(forward, linear=nn.Linear(2, 2), base=nn.Parameter(torch.ones(3, 2)))


def check(rule, level, low, wanted=torch.float32, *, tolerance=2e-2):
    """Checks a rule's dtype, value and gradients against those of the same model in fp32."""
    torch.manual_seed(0)
    plain = with_two_operands(rule)
    model = copy.deepcopy(plain)
    x = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
    expected = plain(x)
    expected.pow(2).sum().backward()
    model, optimizer = prepared(level, model=model, loss_scale=1.0)
    got = model(x)
    assert (model.low, got.dtype) == (low, wanted)
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    scaled_backward(got.float().pow(2).sum(), optimizer)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=5e-2, atol=5e-2)


def assigned(base, low):
    base[MASK.any(1).nonzero()[:2, 0]] = low
    return base


def assigned_by_mask(base, low):
    base[MASK] = low.flatten()
    return base


WRITES = {
    "index_add": lambda base, low: base.index_add(0, ROWS, low, alpha=2),
    "index_put_accumulate": lambda base, low: base.index_put((ROWS,), low, accumulate=True),
    "masked_scatter": lambda base, low: torch.masked_scatter(base, MASK, low),
    "masked_fill": lambda base, low: base.masked_fill(MASK, low.sum()),
    "scatter_": lambda base, low: base.scatter_(0, PLACES, low),
    "slice_scatter": lambda base, low: base.slice_scatter(low, 0, 0, 2),
    "lerp_": lambda base, low: base[:2].lerp_(low, 0.25),
    "assignment": assigned,
    "assignment by mask": assigned_by_mask,
}


def test_what_is_written_takes_the_dtype_of_its_destination(level, low):
    for rule in WRITES.values():
        check(rule, level, low)


COO = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse()


def csr():
    return COO.to_sparse_csr()


SPARSE = {
    "sparse.mm": lambda base, low: torch.sparse.mm(COO.t(), low),
    "@": lambda base, low: COO.t() @ low,
    "mm": lambda base, low: torch.mm(COO.t(), low),
    "dense @ sparse": lambda base, low: low @ COO,
    "vector": lambda base, low: COO.t() @ low[:, 0],
    "mv": lambda base, low: torch.mv(COO.t(), low[:, 0]),
    "addmm": lambda base, low: torch.addmm(base, COO.t(), low),
    "sparse.addmm": lambda base, low: torch.sparse.addmm(base, COO.t(), low),
    "bmm": lambda base, low: torch.bmm(torch.stack([COO.t()] * 2), torch.stack([low] * 2)),
    "csr sparse.mm": lambda base, low: torch.sparse.mm(csr(), torch.cat([low, low[:1]])),
    "csr @": lambda base, low: csr() @ torch.cat([low, low[:1]]),
    "csr addmm": lambda base, low: torch.addmm(low, csr(), torch.cat([low, low[:1]])),
    "csr vector": lambda base, low: csr() @ torch.cat([low, low[:1]])[:, 0],
    "low values": lambda base, low: torch.sparse.mm(COO.t().to(low.dtype), low),
}


def test_a_product_with_a_sparse_operand_runs_in_fp32(level, low):
    for rule in SPARSE.values():
        check(rule, level, low)


def test_values_of_a_sparse_operand_get_gradients(level, low):
    def rule(base, out):
        values = base.flatten()[:2]
        matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2))
        return torch.sparse.mm(matrix, out)

    check(rule, level, low)


def test_training_with_fake_quantization_runs_in_fp32(level, low):
    fake = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
    check(lambda base, out: fake(out), level, low, tolerance=5e-2)


# -- names in apex's lists ------------------------------------------------------------------------


@pytest.fixture
def listed(monkeypatch):
    def put(module, name, kind="FP32_FUNCS"):
        monkeypatch.setattr(module, kind, [*getattr(module, kind), name])

    return put


OF_TORCH = {
    "sigmoid": torch.sigmoid,
    "mean": torch.mean,
    "add": lambda x: torch.add(x, x),
    "cat": lambda x: torch.cat([x, x]),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
}
OF_FUNCTIONAL = {
    "relu": F.relu,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softsign": F.softsign,
    "gumbel_softmax": F.gumbel_softmax,
    "unfold": lambda x: F.unfold(x[None, None], 1),
}
OF_TENSOR = {
    "tanh": lambda x: x.tanh(),
    "__add__": lambda x: x + x,
    "__truediv__": lambda x: x / x,
    "unfold": lambda x: x.unfold(0, 2, 1),
    "split": lambda x: x.split(1)[0],
}
MODULES = {
    "torch": (lists.torch_overrides, OF_TORCH),
    "functional": (lists.functional_overrides, OF_FUNCTIONAL),
    "Tensor": (lists.tensor_overrides, OF_TENSOR),
}


@pytest.mark.parametrize("kind", MODULES)
def test_names_of_torch_in_fp32_funcs_run_in_fp32(listed, level, low, kind):
    module, rules = MODULES[kind]
    before = {name: getattr(module.MODULE, name) for name in rules}
    for name in rules:
        listed(module, name)
    model = amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    for name, rule in rules.items():
        x = torch.ones(2, 2, dtype=low, requires_grad=True)
        of_torch = rule is before[name]  # which a script finds anew
        out = getattr(module.MODULE, name)(x) if of_torch else rule(x)
        assert out.dtype is torch.float32, name
        out.sum().backward()
        assert x.grad.dtype is low
    amp.restore(model)
    assert {name: getattr(module.MODULE, name) for name in rules} == before


def test_a_name_in_the_other_lists_is_taken_alike(listed):
    listed(lists.torch_overrides, "sigmoid", "FP16_FUNCS")
    listed(lists.functional_overrides, "pairwise_distance", "CASTS")
    _model = amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    x, low = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    assert torch.sigmoid(x).dtype is torch.bfloat16
    assert F.pairwise_distance(x, low).dtype is torch.float32


def test_every_function_of_torch_is_taken(monkeypatch):
    for module, holder in ((lists.functional_overrides, F), (lists.torch_overrides, torch)):
        names = [name for name in dir(holder) if not name.startswith("_")]
        known = [name for name in names if callable(getattr(holder, name))]
        monkeypatch.setattr(module, "FP32_FUNCS", known)
    table, functions = lists.casts(torch.bfloat16)
    assert table.rows["sigmoid"] == "fp32"
    assert (F, "gumbel_softmax", "float") in functions
