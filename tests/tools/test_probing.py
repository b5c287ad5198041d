"""One pass beside fp32: planted losses of precision are found where they were planted."""

import pytest

from tests.tools.cases import TARGET, by_name, compared, written

LOSSY = TARGET.replace(
    "model =",
    """
class Lossy(nn.Module):
    def forward(self, x):
        return (x + 64) - 64


model =""",
).replace("nn.Tanh(),", "nn.Tanh(), Lossy(),")

FAINT = TARGET.replace(".float(), labels)", ".float(), labels) * 1e-8")


@pytest.fixture(scope="module")
def lossy(tmp_path_factory):
    target = written(tmp_path_factory.mktemp("lossy"), LOSSY)
    return by_name(compared(target, "O0,O2,O5", steps=2, rounds=1))


@pytest.fixture(scope="module")
def faint(tmp_path_factory):
    target = written(tmp_path_factory.mktemp("faint"), FAINT)
    return by_name(compared(target, "O0,O2,O3,O5", steps=2, rounds=1))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_first_module_beyond_eps_is_the_one_that_loses_digits(lossy, level):
    first = lossy[level].probe.first_divergence
    assert (first.name, first.kind) == ("2", "Lossy")
    assert first.error > lossy[level].probe.eps


def test_modules_come_in_the_order_of_the_forward_and_the_model_last(lossy):
    assert [m.name for m in lossy["O5"].probe.modules] == ["0", "1", "2", "3", ""]


def test_fp32_diverges_from_itself_nowhere(lossy):
    assert lossy["O0"].probe.first_divergence is None
    assert {module.error for module in lossy["O0"].probe.modules} == {0.0}


@pytest.mark.parametrize(
    ("level", "low", "high"), [("O3", 0.9, 1), ("O2", 0, 0.2), ("O5", 0, 0.01)]
)
def test_gradients_underflow_in_fp16_without_a_loss_scale_only(faint, level, low, high):
    # The loss is multiplied by 1e-8: below the least fp16 number, within the range of bf16.
    assert low <= faint[level].probe.underflow <= high


def test_a_bf16_model_keeps_half_the_activations(lossy):
    assert lossy["O5"].probe.activation_bytes < 0.7 * lossy["O0"].probe.activation_bytes


def test_dropout_is_off_so_that_masks_do_not_count_as_divergence(tmp_path):
    text = TARGET.replace("nn.Tanh(),", "nn.Tanh(), nn.Dropout(0.5),")
    found = by_name(compared(written(tmp_path, text), "O0,O5", steps=2, rounds=1))
    assert found["O5"].probe.first_divergence is None
