"""Casts of the user's own functions, and ``disable_casts``, through the public API."""

import types

import pytest
import torch
from torch import nn

import apex.amp as amp
from tests.amp.cases import LEVELS, LOW, Net, loss_of, prepared

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KINDS = {
    "half": (amp.half_function, amp.register_half_function),
    "bfloat16": (amp.bfloat16_function, amp.register_bfloat16_function),
    "float": (amp.float_function, amp.register_float_function),
    "promote": (amp.promote_function, amp.register_promote_function),
}
CAST_LEVELS = ("O1", "O4")
every_kind = pytest.mark.parametrize("kind", KINDS)
cast_levels = pytest.mark.parametrize("level", CAST_LEVELS)


def wanted(kind, level, given):
    """Returns the dtypes that a function of ``kind`` sees for arguments of the dtypes ``given``."""
    if kind == "promote":
        wide = given[0]
        for dtype in given:
            wide = torch.promote_types(wide, dtype)
        return [wide] * len(given)
    if kind == "float":
        return [FP32 if dtype in (FP16, BF16) else dtype for dtype in given]
    return [BF16 if kind == "bfloat16" else LOW[level]] * len(given)


def dtypes(*tensors, **named):
    return [each.dtype for each in (*tensors, *named.values())]


# -- decorators and wrappers -----------------------------------------------------------------


@every_kind
@cast_levels
@pytest.mark.parametrize("given", [(FP32, FP32), (FP32, FP16), (BF16, FP32), (FP64, FP32), (BF16,)])
def test_a_function_sees_its_arguments_cast(kind, level, given):
    keep = prepared(level)
    tensors = [torch.ones(1, dtype=dtype) for dtype in given]
    assert KINDS[kind][0](dtypes)(*tensors) == wanted(kind, level, given)
    del keep


@every_kind
def test_keywords_and_nestings_are_cast_and_the_rest_is_left(kind):
    @KINDS[kind][0]
    def function(batch, *, mask, name):
        return batch["x"][0].dtype, mask.dtype, name

    keep = prepared("O4")
    found = function({"x": [torch.ones(1)]}, mask=torch.ones(1, dtype=torch.int64), name="n")
    assert found == (wanted(kind, "O4", [FP32])[0], torch.int64, "n")
    del keep


@every_kind
@pytest.mark.parametrize("level", [level for level in LEVELS if level not in CAST_LEVELS])
def test_without_function_casts_nothing_is_cast(kind, level):
    keep = prepared(level)
    given = torch.ones(1), torch.ones(1, dtype=FP16)
    assert KINDS[kind][0](dtypes)(*given) == [FP32, FP16]
    del keep


@every_kind
def test_before_initialize_nothing_is_cast(kind):
    assert KINDS[kind][0](dtypes)(torch.ones(1), torch.ones(1, dtype=FP16)) == [FP32, FP16]


@every_kind
def test_a_function_decorated_before_initialize_casts_from_then_on(kind):
    function = KINDS[kind][0](dtypes)
    keep = prepared("O4")
    assert function(torch.ones(1, dtype=FP16)) == wanted(kind, "O4", [FP16])
    del keep


@every_kind
def test_name_and_docstring_are_kept(kind):
    @KINDS[kind][0]
    def named(x):
        """Told."""
        return x

    assert (named.__name__, named.__doc__) == ("named", "Told.")


def test_casts_are_off_inside_a_float_function_and_on_behind_it():
    @amp.float_function
    def product(x):
        return x @ x

    keep = prepared("O4")
    x = torch.ones(2, 2)
    assert product(x).dtype is FP32
    assert (x @ x).dtype is BF16
    del keep


def test_a_method_is_cast():
    class Holder:
        @amp.half_function
        def seen(self, x):
            return x.dtype

    keep = prepared("O4")
    assert Holder().seen(torch.ones(1)) is BF16
    del keep


@cast_levels
def test_autograd_function_apply_is_cast_and_differentiable(level):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.seen = x.dtype
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.dtype is ctx.seen
            return grad * 2

    apply = amp.half_function(Double.apply)
    keep = prepared(level)
    x = torch.ones(2, requires_grad=True)
    out = apply(x)
    assert out.dtype is LOW[level]
    out.float().sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (FP32, [2.0, 2.0])
    del keep


@cast_levels
def test_a_custom_operator_is_cast(level):
    @torch.library.custom_op("apex_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    function = amp.half_function(twice)
    keep = prepared(level)
    assert function(torch.ones(2)).dtype is LOW[level]
    del keep


@pytest.mark.parametrize("given", [None, 3, "exp"])
def test_what_is_no_function_is_a_type_error(given):
    with pytest.raises(TypeError, match=f"cast callables only; got {type(given).__name__}"):
        amp.half_function(given)


# -- registered functions --------------------------------------------------------------------


@pytest.fixture
def module():
    made = types.ModuleType("made")
    made.seen = dtypes
    return made


@every_kind
@cast_levels
def test_a_registered_function_is_cast_while_a_session_lives(kind, level, module):
    KINDS[kind][1](module, "seen")
    own = module.seen
    keep = prepared(level)
    given = torch.ones(1, dtype=FP16)
    assert module.seen(given) == wanted(kind, level, [FP16])
    del keep
    amp.init(enabled=False)
    assert module.seen is own


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in CAST_LEVELS])
def test_a_registered_function_is_left_alone_without_function_casts(level, module):
    amp.register_half_function(module, "seen")
    own = module.seen
    keep = prepared(level)
    assert module.seen is own
    del keep


@every_kind
@pytest.mark.parametrize("level", CAST_LEVELS)
def test_a_function_that_is_registered_late_is_cast_at_once(kind, level, module):
    own = module.seen
    keep = prepared(level)
    KINDS["half"][1](module, "seen")
    KINDS[kind][1](module, "seen")
    given = torch.ones(1, dtype=FP16)
    assert module.seen(given) == wanted(kind, level, [FP16])
    del keep
    assert module.seen is own


def test_a_late_registration_that_fails_is_none():
    keep = prepared("O4")
    with pytest.raises(TypeError, match="immutable type"):
        amp.register_half_function(str, "upper")
    del keep
    prepared("O4")


def test_a_registered_function_stays_cast_until_the_last_session_ends(module):
    amp.register_half_function(module, "seen")
    own = module.seen
    first, second = prepared("O4"), prepared("O4")
    del first
    assert module.seen(torch.ones(1)) == [BF16]
    del second
    assert module.seen is own


def test_a_registered_function_is_cast_under_init_too(module):
    amp.register_half_function(module, "seen")
    handle = amp.init()
    assert module.seen(torch.ones(1)) == [FP16]
    handle._deactivate()
    assert module.seen(torch.ones(1)) == [FP32]


def test_a_function_of_torch_s_own_namespace_may_be_registered():
    own = torch.lerp
    amp.register_half_function(torch, "lerp")
    keep = prepared("O4")
    x = torch.ones(2)
    assert torch.lerp(x, x, 0.5).dtype is BF16
    del keep
    assert torch.lerp is own


@every_kind
@pytest.mark.parametrize("name", ["missing", "__doc__"])
def test_a_name_that_is_no_function_of_the_module_is_refused(kind, name, module):
    with pytest.raises(ValueError, match=f"No function '{name}' in made"):
        KINDS[kind][1](module, name)


# -- disable_casts ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_casts_are_off_inside_disable_casts_at_any_level(level):
    keep = prepared(level)
    x = torch.ones(2, 2)
    before = (x @ x).dtype
    with amp.disable_casts():
        assert (x @ x).dtype is FP32
    assert (x @ x).dtype is before
    del keep


@cast_levels
def test_disable_casts_holds_inside_a_prepared_model(level):
    model, _ = prepared(level)
    with amp.disable_casts():
        assert model(torch.ones(2, 4)).dtype is FP32
    assert model(torch.ones(2, 4)).dtype is LOW[level]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_converted_model_stays_in_its_dtype_inside_disable_casts(level):
    model, _ = prepared(level)
    with amp.disable_casts():
        assert model.first(torch.ones(2, 4, dtype=LOW[level])).dtype is LOW[level]


def test_disable_casts_nests():
    keep = prepared("O4")
    x = torch.ones(2, 2)
    with amp.disable_casts():
        with amp.disable_casts():
            pass
        assert (x @ x).dtype is FP32
    assert (x @ x).dtype is BF16
    del keep


def test_disable_casts_decorates_functions_before_and_after_initialize():
    @amp.disable_casts()
    def early(x):
        return (x @ x).dtype

    keep = prepared("O4")
    late = amp.disable_casts()(lambda x: (x @ x).dtype)
    x = torch.ones(2, 2)
    assert [early(x), early(x), late(x), (x @ x).dtype] == [FP32, FP32, FP32, BF16]
    assert early.__name__ == "early"
    del keep


def test_casts_are_on_again_after_an_exception():
    keep = prepared("O4")
    x = torch.ones(2, 2)
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert (x @ x).dtype is BF16
    del keep


def test_disable_casts_before_initialize_does_nothing():
    x = torch.ones(2, 2)
    with amp.disable_casts():
        assert (x @ x).dtype is FP32
    assert (x @ x).dtype is FP32


def test_user_functions_are_plain_inside_disable_casts():
    keep = prepared("O4")
    with amp.disable_casts():
        assert amp.half_function(dtypes)(torch.ones(1)) == [FP32]
    del keep


def test_a_loss_outside_the_model_is_cast_in_the_thread_of_initialize():
    model, _ = prepared("O4")
    target = torch.zeros(8, 2)
    out = model(torch.ones(8, 4))
    assert (out.dtype, nn.functional.mse_loss(out, target).dtype) == (BF16, FP32)
    assert loss_of(Net()).dtype is FP32
