"""The modules of apex.amp that scripts import, often by an editor's own doing."""

import importlib

import pytest
import torch

from apex import amp
from apex.amp import compat, rnn_compat, utils, wrap

MODULES = [
    *("_amp_state", "_initialize", "amp", "compat", "frontend", "handle", "lists", "opt"),
    *("rnn_compat", "scaler", "utils", "wrap", "__version__"),
]
HALF, FULL = torch.ones(2, dtype=torch.float16), torch.ones(2)


@pytest.mark.parametrize("name", MODULES)
def test_the_module_imports(name):
    assert importlib.import_module(f"apex.amp.{name}").__name__ == f"apex.amp.{name}"


@pytest.mark.parametrize("name", ["compat", "opt", "rnn_compat", "scaler", "utils", "wrap"])
def test_the_module_is_an_attribute(name):
    assert vars(amp)[name].__name__ == f"apex.amp.{name}"


def test_the_version_is_a_string_of_the_tuple():
    from apex.amp.__version__ import VERSION, __version__

    assert __version__ == ".".join(map(str, VERSION))


def test_filter_attrs_keeps_the_names_that_are_there():
    assert compat.filter_attrs(torch, ["mm", "no_such_function", "exp"]) == ["mm", "exp"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (compat.variable_is_tensor, True),
        (compat.tensor_is_variable, True),
        (compat.tensor_is_float_tensor, False),
        (rnn_compat.has_old_rnns, False),
        (utils.is_cuda_enabled, torch.version.cuda is not None),
    ],
)
def test_what_torch_is_like_is_told_for_today(answer, expected):
    assert answer() is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(HALF, True), (torch.ones(2, dtype=torch.int64), False), (1.0, False), (None, False)],
)
def test_is_floating_point_is_for_tensors(value, expected):
    assert compat.is_floating_point(value) is expected
    assert utils.is_fp_tensor(value) is expected


def test_a_list_is_an_fp_tensor_when_all_its_items_are():
    assert utils.is_fp_tensor([HALF, (FULL,)])
    assert not utils.is_fp_tensor([HALF, torch.ones(1, dtype=torch.bool)])
    assert utils.is_nested([])
    assert not utils.is_nested(HALF)


def test_is_tensor_like_is_true_of_tensors_alone():
    assert compat.is_tensor_like(HALF)
    assert not compat.is_tensor_like([1.0])


def test_scalar_python_val_reads_0d_tensors():
    assert compat.scalar_python_val(torch.tensor(2.5)) == 2.5
    assert compat.scalar_python_val(3) == 3


def test_type_string_is_the_last_word_of_the_type():
    assert utils.type_string(HALF) == "HalfTensor"


@pytest.mark.parametrize(
    ("cast", "dtype"), [(utils.maybe_half, torch.float16), (utils.maybe_float, torch.float32)]
)
def test_maybe_casts_reach_floating_tensors_in_lists(cast, dtype):
    count = torch.ones(1, dtype=torch.int64)
    first, (second, third), text = cast([HALF, (FULL, count), "text"])
    assert (first.dtype, second.dtype, third, text) == (dtype, dtype, count, "text")


def test_a_cast_wrapper_casts_while_casts_are_on():
    dtype_of = wrap.make_cast_wrapper(lambda x, name=None: x.dtype, utils.maybe_half)
    assert dtype_of(FULL) is torch.float32
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert dtype_of(FULL, name="kept") is torch.float16
    amp.restore(model)


def test_a_promote_wrapper_widens_while_casts_are_on():
    dtypes_of = wrap.make_promote_wrapper(lambda *xs: [x.dtype for x in xs], utils.maybe_float)
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert dtypes_of(HALF, FULL) == [torch.float32] * 2
    amp.restore(model)


def test_a_wrapper_that_replaced_torch_functions_says_what_to_use():
    with pytest.raises(AttributeError, match=r"amp\.register_half_function"):
        _ = wrap.cached_cast
