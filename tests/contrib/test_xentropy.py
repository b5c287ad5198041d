"""SoftmaxCrossEntropyLoss against the formula, as a class's apply and as a module."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.contrib import xentropy
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from tests.support import features
from tests.support.reference.norms import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, CLASSES = 6, 5
FULL, BF16, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float16, torch.float64


def batch(dtype=FULL, device="cpu"):
    logits = torch.randn(ROWS, CLASSES).to(device, dtype).requires_grad_()
    return logits, torch.tensor([0, 1, 2, 3, 4, 0], device=device)


def by_hand(logits, labels, smoothing, padding_idx):
    logits = logits.double()
    log_probs = logits - logits.exp().sum(1, keepdim=True).log()
    target = torch.full_like(log_probs, smoothing / CLASSES)
    rows = torch.arange(ROWS, device=labels.device)
    target[rows, labels.clamp(0, CLASSES - 1)] += 1 - smoothing
    return -(target * log_probs).sum(1) * (labels != padding_idx)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FULL, BF16, HALF, DOUBLE])
@pytest.mark.parametrize("padding_idx", [0, 3, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_losses_and_gradients_are_those_of_the_formula(smoothing, padding_idx, dtype, device):
    logits, labels = batch(dtype, device)
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx)
    expected = by_hand(logits, labels, smoothing, padding_idx)
    assert_close(losses, expected)
    scale = torch.linspace(0.5, 1.5, ROWS, device=device).to(dtype)
    (grad,) = torch.autograd.grad((losses * scale).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * scale).sum(), logits)
    assert_close(grad, wanted)


def test_without_smoothing_losses_are_torchs():
    logits, labels = batch()
    ours = SoftmaxCrossEntropyLoss.apply(logits, labels)
    assert torch.equal(ours, F.cross_entropy(logits, labels, ignore_index=0, reduction="none"))


def test_with_smoothing_losses_are_torchs():
    logits, labels = batch()
    torchs = F.cross_entropy(logits, labels, ignore_index=0, reduction="none", label_smoothing=0.1)
    assert_close(SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1), torchs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_of_the_padding_label_have_zero_loss_and_gradient(smoothing):
    logits, labels = batch()
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 0)
    losses.sum().backward()
    padding = labels == 0
    assert not losses[padding].any()
    assert not logits.grad[padding].any()
    assert losses[~padding].all()


def test_a_padding_label_out_of_range_is_allowed():
    logits, labels = batch()
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels.masked_fill(labels == 4, -100), 0.1, -100)
    assert losses[4] == 0
    assert losses[:4].all()


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("half_to_float", [False, True])
def test_losses_of_low_precision_logits_are_fp32_by_half_to_float_alone(dtype, half_to_float):
    logits, labels = batch(dtype)
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, half_to_float)
    losses.sum().backward()
    assert losses.dtype is (FULL if half_to_float else dtype)
    assert logits.grad.dtype is dtype


def test_half_to_float_losses_are_not_rounded_to_half():
    logits, labels = batch(HALF)
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, half_to_float=True)
    assert_close(losses, by_hand(logits, labels, 0.0, 0))


def test_half_to_float_changes_nothing_for_fp32_logits():
    logits, labels = batch()
    one, other = (SoftmaxCrossEntropyLoss.apply(logits, labels, 0, 0, on) for on in (False, True))
    assert torch.equal(one, other)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[6e4, -6e4]], dtype=HALF)
    losses = SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([1]), 0.0, -1, True)
    assert losses.item() == 12e4


def test_module_gives_the_losses_of_apply():
    logits, labels = batch()
    module = SoftmaxCrossEntropyLoss(0.1, 3, half_to_float=True)
    wanted = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 3, True)
    assert torch.equal(module(logits, labels), wanted)


def test_module_has_apexs_defaults():
    assert repr(SoftmaxCrossEntropyLoss()) == (
        "SoftmaxCrossEntropyLoss(smoothing=0.0, padding_idx=0, half_to_float=False)"
    )


def test_model_apply_still_visits_a_loss_inside_the_model():
    visited = []
    model = nn.Sequential(nn.Linear(1, 1), SoftmaxCrossEntropyLoss())
    model.apply(visited.append)
    assert visited == [model[0], model[1], model]


def test_module_can_be_pickled():
    logits, labels = batch()
    module = SoftmaxCrossEntropyLoss(0.1)
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(logits, labels), module(logits, labels))


@features.properties_of_metaclasses_compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_apply_compiles_whole():
    def loss(logits, labels):
        return SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, True).sum()

    graph = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(*batch_of_one_seed()), loss(*batch_of_one_seed()))
    torch.compiler.reset()


def batch_of_one_seed():
    torch.manual_seed(1)
    return batch()


@pytest.mark.parametrize("given", [FULL, BF16])
def test_dtypes_are_the_same_under_autocast(given):
    logits, labels = batch(given)
    with torch.autocast("cpu", BF16):
        assert SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1).dtype is given


def test_second_derivatives_are_right():
    logits, labels = batch(DOUBLE)
    loss = SoftmaxCrossEntropyLoss.apply
    assert torch.autograd.gradgradcheck(lambda given: loss(given, labels, 0.1, 0), [logits])


def test_an_empty_batch_gives_no_losses():
    logits = torch.ones(0, CLASSES, requires_grad=True)
    losses = SoftmaxCrossEntropyLoss.apply(logits, torch.ones(0, dtype=torch.int64), 0.1)
    losses.sum().backward()
    assert losses.shape == (0,)
    assert logits.grad.shape == logits.shape


def test_labels_of_int32_count_as_class_indices():
    logits, labels = batch()
    one, other = (SoftmaxCrossEntropyLoss.apply(logits, kind) for kind in (labels, labels.int()))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("logits", "labels"), [((2, 3, CLASSES), (2, 3)), ((ROWS, CLASSES), (4,)), ((CLASSES,), ())]
)
def test_other_shapes_are_refused_with_the_way_out(logits, labels):
    with pytest.raises(ValueError, match=r"takes \[N, classes\] and \[N\]. Flatten"):
        SoftmaxCrossEntropyLoss.apply(torch.ones(logits), torch.ones(labels, dtype=torch.int64))


def test_labels_of_floating_dtype_are_refused():
    logits, labels = batch()
    with pytest.raises(TypeError, match="labels class indices"):
        SoftmaxCrossEntropyLoss.apply(logits, labels.float())


def test_integer_logits_are_refused():
    logits, labels = batch()
    with pytest.raises(TypeError, match=r"logits of torch\.int64"):
        SoftmaxCrossEntropyLoss.apply(logits.long(), labels)


def test_tensors_on_two_devices_are_refused():
    logits, labels = batch()
    with pytest.raises(ValueError, match="move both to the same device"):
        SoftmaxCrossEntropyLoss.apply(logits.to("meta"), labels)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan")])
def test_smoothing_that_is_no_share_is_refused(smoothing):
    with pytest.raises(ValueError, match="it must be at least 0 and at most 1"):
        SoftmaxCrossEntropyLoss(smoothing)


@pytest.mark.parametrize("labels", [[0, 1], None, "labels"])
def test_labels_that_are_no_tensor_are_refused(labels):
    with pytest.raises(TypeError, match=r"Tensor as logits and .* as labels; it takes tensors"):
        SoftmaxCrossEntropyLoss.apply(torch.zeros(2, 3), labels)


def test_the_module_path_is_apexs():
    assert xentropy.softmax_xentropy.SoftmaxCrossEntropyLoss is SoftmaxCrossEntropyLoss
