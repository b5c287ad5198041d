"""Averages of a prepared model's weights, which copy it, are fp32 averages of its masters."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from tests.support import loops

EMA = swa_utils.get_ema_multi_avg_fn(0.75)
FORMS = {
    "default": {},
    "swa": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.75)},
    "multi ema": {"multi_avg_fn": EMA},
    "multi ema, buffers": {"multi_avg_fn": EMA, "use_buffers": True},
    "multi swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}

level = loops.at_levels("O1", "O2", "O3", "O5")


def pair_at(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[3].bias.requires_grad_(False)
    return loops.prepared(level, model=model)


def exact(model):
    """Returns a plain model that takes the values of ``state_dict``, and a function for that."""
    twin = copy.deepcopy(model)
    return twin, lambda: twin.load_state_dict(model.state_dict())


def differences(average, expected):
    pairs = zip(average.state_dict().values(), expected.state_dict().values(), strict=True)
    return max((a.float() - b.float()).abs().max() for a, b in pairs)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_averaged_model_of_the_prepared_model_is_exact(level, form, caplog):
    model, optimizer = pair_at(level)
    twin, update_twin = exact(model)
    average, expected = AveragedModel(model, **form), AveragedModel(twin, **form)
    for x, y in loops.batches(4):
        loops.train_step(model, optimizer, x, y)
        update_twin()
        average.update_parameters(model)
        expected.update_parameters(twin)
    assert differences(average, expected) == 0
    assert {param.dtype for param in average.parameters()} == {torch.float32}
    assert not caplog.records


def test_an_average_has_what_a_script_writes_to_the_weights_after_the_step(level):
    model, optimizer = pair_at(level)
    average = AveragedModel(model)
    loops.train_step(model, optimizer, *loops.batch())
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    average.update_parameters(model)  # the first one copies
    assert (average.module[0].weight == 0.5).all()


def lerp(average, model):
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 0.25)


def add(average, model):
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.mul_(0.75).add_(new, alpha=0.25)


def states(average, model):
    entries = model.state_dict()
    for name, old in average.state_dict().items():
        if old.is_floating_point():
            old.lerp_(entries[name], 0.25)


def averaged(level, update, *, of=lambda model: model):
    """Returns how far an average is from the one of a plain fp32 twin."""
    model, optimizer = pair_at(level)
    twin, update_twin = exact(model)
    average, expected = copy.deepcopy(model), copy.deepcopy(twin)
    source = of(model)
    for x, y in loops.batches(4):
        loops.train_step(model, optimizer, x, y)
        update_twin()
        with torch.no_grad():
            update(average, source)
            update(expected, twin)
    return differences(average, expected)


@pytest.mark.parametrize("update", [lerp, add, states])
def test_an_average_of_the_shallow_copy_is_exact(level, update):
    if level != "O3" or update is states:
        assert averaged(level, update, of=copy.copy if update is not states else nn.Identity()) == 0


def test_an_average_of_16_bit_parameters_is_rounded_or_named(level, caplog):
    eps = {"O1": 0.0, "O2": torch.finfo(torch.float16).eps}.get(level, 2**-7)
    if level == "O1":
        assert averaged(level, lerp) == 0
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            averaged(level, lerp)
        assert "Average plain = copy.copy(model)" in caplog.text
    caplog.clear()
    assert averaged(level, add) <= eps
    assert not caplog.records


def slerp(first, second, share):
    return torch.lerp(first, second, share)


def test_data_that_is_mixed_out_of_place_is_no_average(level, caplog):
    model, _ = pair_at(level)
    copy.deepcopy(model)
    mixed = slerp(*loops.batch()[0][:2], 0.5)
    assert mixed.isfinite().all()
    assert list(model.parameters())
    assert not caplog.records


def test_batch_norm_is_renewed_in_a_model_whose_class_has_its_own_train(level):
    class Network(nn.Sequential):
        def train(self, mode=True):
            return super().train(mode)

    model, _ = loops.prepared(level, model=Network(nn.BatchNorm1d(4)))
    swa_utils.update_bn([torch.full((2, 4), 3.0)], model)
    assert torch.equal(model[0].running_mean, torch.full((4,), 3.0))
