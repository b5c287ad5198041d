"""``torch.export`` and ``torch.jit.trace`` of prepared and of restored models."""

import gc
import io

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.loops import descend, prepared, same

# torch.jit is deprecated, and torch.export uses what is.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The given buffer is not writable:UserWarning",  # torch 2.10 reads its own files so
)


class NormNet(nn.Module):
    """Rows of every kind, torch's and ours."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        norm = self.norm(self.first(x))
        return norm, torch.softmax(self.last(norm), 1), self.last(x).exp()


def of_one_level(level):
    model, optimizer = prepared(level, model=NormNet())
    return model.eval(), optimizer


def rows(size):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_computes_as_the_prepared_model(level, strict):
    model, _optimizer = of_one_level(level)
    shapes = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(model, (rows(3),), dynamic_shapes=shapes, strict=strict)
    exported = program.module()
    for size in (3, 5):
        assert same(exported(rows(size)), model(rows(size)))


FORMS = {
    "decomposed": (
        lambda model, x: torch.export.export(model, (x,)).run_decompositions({}),
        torch.export.save,
        lambda file: torch.export.load(file).module(),
    ),
    "traced": (lambda model, x: torch.jit.trace(model, (x,)), torch.jit.save, torch.jit.load),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_program_keeps_its_casts_without_the_session(level, form):
    model, optimizer = of_one_level(level)
    make, save, load = FORMS[form]
    wanted, file = model(rows(3)), io.BytesIO()
    save(make(model, rows(3)), file)
    del model, optimizer
    gc.collect()
    assert not torch.is_autocast_enabled("cpu")
    file.seek(0)
    assert same(load(file)(rows(3)), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_exported_between_steps_with_what_its_optimizer_holds(level, form):
    model, optimizer = of_one_level(level)
    for _ in range(2):
        descend(model(rows(3))[0].square().sum(), optimizer)
    with torch.no_grad():
        for param in amp.master_params(optimizer):
            param.mul_(0.5)
    if form == "decomposed":
        optimizer.zero_grad()
    program = FORMS[form][0](model, rows(3))
    if form == "decomposed":
        program = program.module()
    assert same(program(rows(3)), model(rows(3)))


class Reshaping(nn.Module):
    """Its trace has constants of sizes, which TorchScript compares."""

    def forward(self, x):
        return x.view(x.shape[0], 4, x.shape[1] // 4).view(x.shape[0], 4, x.shape[1] // 4) * 2


def test_traced_constants_are_compared(level):
    model, _ = prepared(level, model=nn.Sequential(nn.Linear(8, 8), Reshaping()))
    x = torch.ones(2, 8)
    traced = torch.jit.trace(model, x)
    assert all(same(traced(x), model(x)) for _ in range(2))


def test_restored_model_is_exported_traced_and_scripted_in_fp32(level):
    model, optimizer = of_one_level(level)
    model, optimizer = amp.restore(model, optimizer)
    x = rows(3)
    wanted = model(x)
    assert {y.dtype for y in wanted} == {torch.float32}
    assert same(torch.export.export(model, (x,)).module()(x), wanted)
    assert same(torch.jit.trace(model, (x,))(x), wanted)
    assert same(torch.jit.script(model)(x), wanted)
