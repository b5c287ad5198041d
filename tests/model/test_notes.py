"""What a prepared model says of itself: buffers and weights that 16 bits lose, and mixed dtypes."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from tests.model.nets import LOW, converted
from tests.support.loops import Body, at_levels, descend, every, messages, prepared

level = at_levels("O2", "O3", "O5")


def named_once(caplog, *words):
    (text,) = messages(caplog)
    assert [word for word in words if word not in text] == []


def train_prepared(model, steps=4, level="O5", after=lambda model: None, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for _ in range(steps):
        descend(model(torch.ones(2, 4)).float().mean(), optimizer)
        after(model)
    return model, optimizer


# -- buffers that are rounded ---------------------------------------------------------------------


def positions(table, persistent=True):
    parts = {"linear": nn.Linear(4, 4), "table": nn.Buffer(table, persistent=persistent)}
    return Body(lambda self, x: self.linear(x), **parts)


@pytest.mark.parametrize("persistent", [False, True])
def test_buffers_that_lose_distinct_values_are_named_with_the_line(caplog, level, persistent):
    for wrap, named, line in (
        (nn.Sequential, "0.table", {"fp32_modules": ["0"]}),
        (lambda model: model, "table", {"fp32_buffers": ["table"]}),
    ):
        caplog.clear()
        converted(wrap(positions(torch.arange(4096.0), persistent)), level)
        (text,) = messages(caplog)
        assert named in text
        assert "{}={}".format(*next(iter(line.items()))) in text
        caplog.clear()
        model = converted(wrap(positions(torch.arange(4096.0), persistent)), level, **line)
        assert model.get_buffer(named).dtype is torch.float32
        assert not messages(caplog)


@pytest.mark.parametrize("persistent", [False, True])
def test_frequencies_of_rotary_embeddings_stay_in_fp32(level, persistent):
    model = nn.Module()
    model.rotary = nn.Module()
    model.rotary.register_buffer("inv_freq", torch.full((4,), 1 / 3), persistent=persistent)
    converted(model, level)
    assert torch.equal(model.rotary.inv_freq, torch.full((4,), 1 / 3))
    assert copy.deepcopy(model).rotary.inv_freq.dtype is torch.float32
    amp.restore(model)
    assert torch.equal(model.rotary.inv_freq, torch.full((4,), 1 / 3))


def test_other_names_can_be_added_and_unknown_ones_are_refused():
    model = nn.Sequential(positions(torch.ones(2)), positions(torch.ones(2)))
    converted(model, fp32_buffers=["1.tab*"])
    assert (model[0].table.dtype, model[1].table.dtype) == (LOW, torch.float32)
    model = nn.ModuleList([positions(torch.ones(2)), positions(torch.ones(2, dtype=torch.int32))])
    converted(model, fp32_buffers=["*"])
    assert [buffer.dtype for buffer in model.buffers()] == [torch.float32, torch.int32]
    assert all(param.dtype is LOW for param in model.parameters())
    model = nn.Sequential(positions(torch.ones(2)))
    with pytest.raises(ValueError, match=r"'0.tabel', which matches no buffer. Did you mean 0.tab"):
        converted(model, fp32_buffers=["0.tabel"])
    with pytest.raises(ValueError, match=r"which matches no buffer. Available: none."):
        converted(nn.Linear(1, 1), fp32_buffers=["table"])
    with pytest.raises(ValueError, match="O2, O3 or O5"):
        converted(model, "O1", fp32_buffers=["0.table"])
    assert type(model) is nn.Sequential


NOT_NAMED = {
    "exact": torch.arange(256.0),
    "of one value": torch.ones(9000),
    "integers": torch.arange(4096),
    "sine": torch.arange(2048.0)[:, None].mul(torch.tensor([1.0, 0.1])).sin(),
    "window": torch.hann_window(4096),
    "noise": torch.linspace(0, 99, 4096).sin().mul(1e4).frac(),
}


@pytest.mark.parametrize("name", NOT_NAMED)
def test_tables_that_lose_nothing_or_have_no_order_are_not_named(caplog, name):
    for level in ("O2", "O3", "O5"):
        converted(nn.Sequential(positions(NOT_NAMED[name])), level)
        assert not messages(caplog), level


@every(shape=[(1, 4096), (4096, 1), (8, 512), (4096,)], sign=[1, -1])
def test_ordered_tables_of_any_shape_are_named(caplog, shape, sign):
    table = sign * torch.linspace(0, 1, 4096).view(shape)
    converted(nn.Sequential(positions(table)))
    assert "0.table" in messages(caplog)[0]


# -- what a model writes in 16 bits ---------------------------------------------------------------


def by_item(self, new):
    self.average[:] = self.average * 0.99 + new * 0.01


def by_one(self, new):
    self.average[0] += new[0] * 0.01


def by_data(self, new):
    self.average.data = self.average * 0.99 + new * 0.01


def by_assignment(self, new):
    self.average = self.average * 0.99 + new * 0.01


def by_data_in_place(self, new):
    self.average.data.mul_(0.9).add_(new, alpha=0.2)


def by_rows(self, new):
    rows = torch.tensor([2, 0])
    average = self.average.index_select(0, rows).mul_(0.99).add_(new[rows] * 0.01)
    self.average.index_copy_(0, rows, average)


def by_mask(self, new):
    mask = torch.tensor([True, False, True, False])
    self.average.copy_(torch.where(mask, 0.99 * self.average + 0.01 * new, self.average))


def by_alias(self, new):
    self.average.detach()[:2].mul_(0.9).add_(new[:2], alpha=0.2)


AVERAGES = {
    "alias": by_alias,
    "data in place": by_data_in_place,
    "mask": by_mask,
    "rows": by_rows,
    "rows added": lambda self, new: self.average.index_add_(0, torch.tensor([1]), new[:1]),
    "in place": lambda self, new: self.average.lerp_(new, 0.01),
    "assigned": by_assignment,
    "data": by_data,
    "item": by_item,
    "copy": lambda self, new: self.average.copy_(torch.lerp(self.average.float(), new, 0.01)),
    "out": lambda self, new: torch.lerp(self.average, new, 0.01, out=self.average),
    "one": by_one,
    "foreach": lambda self, new: torch._foreach_mul_([self.average], 0.9),
}


class Codebook(nn.Module):
    """Keeps moving averages and a count, as vector quantization does."""

    def __init__(self, how="in place"):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count += 1
            dtype = torch.float32 if self.how == "copy" else self.average.dtype
            AVERAGES[self.how](self, x.detach().mean(0).to(dtype))
        return self.linear(x)


@pytest.mark.parametrize("how", AVERAGES)
def test_buffers_that_the_forward_writes_are_named_once_with_the_line(caplog, level, how):
    train_prepared(nn.Sequential(Codebook(how)), level=level, loss_scale=1.0)
    named_once(caplog, "0.average, 0.count", "fp32_modules=['0']")


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_in_fp32_nothing_is_said(caplog, level):
    train_prepared(nn.Sequential(Codebook()), level=level, loss_scale=1.0)
    assert not messages(caplog)


def test_the_line_keeps_them_exact_and_single_writes_are_not_meant(caplog):
    model, _ = train_prepared(nn.Sequential(Codebook(), nn.BatchNorm1d(4)), 300, fp32_modules=["0"])
    assert model[0].count == 300
    filled = converted(positions(torch.ones(4)))
    filled.table.zero_()
    for each in (filled, converted(nn.Sequential(Codebook())).eval()):
        for _ in range(4):
            each(torch.ones(2, 4))
    assert not messages(caplog)


class Momentum(nn.Module):
    """A student, and a teacher that follows it by a moving average, behind a table that stays."""

    def __init__(self, how="in place", inside=True):
        super().__init__()
        self.how, self.inside = how, inside
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, *_):
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for old, new in pairs:
            if self.how == "in place":
                old.mul_(0.999).add_(new, alpha=0.001)
            elif self.how == "foreach":
                torch._foreach_lerp_([old], [new.detach()], 0.001)
            elif self.how == "data in place":
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            else:
                old.data = old.data * 0.999 + new.data * 0.001

    def forward(self, x):
        if self.inside:
            self.follow()
        return self.student(x) - self.teacher(x).detach()


@every(how=["in place", "foreach", "data", "data in place"], inside=[False, True])
def test_a_momentum_teacher_is_named_once_with_the_line(caplog, level, how, inside):
    after = (lambda model: None) if inside else Momentum.follow
    train_prepared(Momentum(how, inside), level=level, after=after, loss_scale=1.0, steps=6)
    named_once(caplog, "teacher.weight", "fp32_modules=['teacher']")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_frozen_teacher_that_the_optimizer_holds_is_named(caplog, level):
    model, optimizer = prepared(level, model=Momentum(), loss_scale=1.0)  # as MoCo's
    for _ in range(4):
        descend(model(torch.ones(2, 4)).mean(), optimizer)
    named_once(caplog, "teacher.weight", "fp32_modules=['teacher']")


@every(alone=[True, False], frozen=[True, False], level=["O2", "O5"])
def test_a_teacher_that_is_a_model_of_its_own_is_named(caplog, level, frozen, alone):
    student = nn.Sequential(nn.Linear(4, 4))
    teacher = copy.deepcopy(student).requires_grad_(not frozen).eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    together = [student] if alone else [student, teacher]
    amp.initialize(together, optimizer, opt_level=level, verbosity=0)
    if alone:
        amp.initialize(teacher, opt_level=level, verbosity=0)
    for _ in range(40):
        student.eval()(torch.ones(2, 4))
    for _ in range(4):
        student.train()(torch.ones(2, 4))
        teacher(torch.ones(2, 4))
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.mul_(0.999).add_(new, alpha=0.001)
    words = "0.weight, 0.bias", "fp32_modules=['0']", "if amp.initialize does not get it"
    named_once(caplog, *words)


def test_checkpoints_that_are_loaded_one_after_another_are_not_named(caplog):
    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    average = copy.deepcopy(converted(model))
    for _ in range(5):
        model.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())
        average.load_state_dict(model.state_dict())
        model(torch.ones(2, 4))
    assert not messages(caplog)


def test_a_discriminator_that_is_frozen_for_a_while_is_not_named(caplog, level):
    model, optimizer = prepared(level, model=nn.Sequential(nn.Linear(4, 4)), loss_scale=1.0)
    for _ in range(4):
        model.requires_grad_(True)
        descend(model(torch.ones(2, 4)).mean(), optimizer)
        model.requires_grad_(False)
        model(torch.ones(2, 4))
    assert not messages(caplog)


def test_weights_that_an_optimizer_of_another_call_trains_are_not_named(caplog, level):
    model = converted(nn.Sequential(nn.Linear(4, 4)), level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(nn.Identity(), optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    for _ in range(4):
        descend(model(torch.ones(2, 4)).mean(), optimizer)
    assert not messages(caplog)


def test_the_remedy_for_frozen_weights_of_the_model_itself_is_one(caplog):
    model = converted(nn.Linear(4, 4).requires_grad_(False))
    for _ in range(4):
        model(torch.ones(2, 4))
        with torch.no_grad():
            model.weight.lerp_(torch.ones_like(model.weight), 0.01)
    assert "copy.copy(model)" in messages(caplog)[0]


class Overwrites(nn.Module):
    """Keeps a cache, a queue, a state, a moving window: each forward replaces what it writes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        for name in ("cache", "queue", "state", "window", "assigned", "data", "last"):
            self.register_buffer(name, torch.ones(4, 4))
        self.old = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.at = 0

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.last = self.window.clone()
            self.cache.copy_(y.mean(0).expand(4, 4))
            self.queue[self.at] = y[0]
            self.at = (self.at + 1) % 4
            self.state.zero_().add_(y.mean())
            self.window[1:] = self.window[:-1].clone()
            self.window[0] = y[0]
            self.assigned = torch.cat((self.assigned[1:], y[:1]))
            self.data.data = y.new_ones(4, 4)
        return y


def test_buffers_that_are_overwritten_are_not_named(caplog, level):
    train_prepared(nn.Sequential(Overwrites()), level=level, loss_scale=1.0, steps=6)
    assert not messages(caplog)


def test_what_a_script_sets_is_not_named(caplog):
    """A number between all forwards, and weights and buffers once."""
    model = nn.Sequential(positions(torch.ones(())), nn.Linear(4, 4).requires_grad_(False))
    model = converted(model)
    teacher = copy.deepcopy(model)
    for step in range(6):
        model(torch.ones(2, 4))
        model[0].table.fill_(step / 8)
        if step == 1:
            with torch.no_grad():
                model[1].weight.copy_(teacher[1].weight)
        if step == 3:
            model[0].linear.weight.data.zero_()
    assert not messages(caplog)


def test_buffers_of_an_inference_are_left_alone(caplog):
    model = converted(nn.Sequential(Overwrites()))
    with torch.inference_mode():
        for _ in range(4):
            model(torch.ones(4, 4))
    assert not messages(caplog)


def test_buffers_that_are_averaged_between_forwards_are_named(caplog):
    def after(model):
        model[0].table.lerp_(torch.ones_like(model[0].table), 0.01)

    train_prepared(nn.Sequential(positions(torch.zeros(4))), 6, after=after)
    assert "0.table" in messages(caplog)[0]


# -- averages and casts of the model itself -------------------------------------------------------


CASTS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}


@every(name=CASTS, level=["O0", "O1", "O2", "O4", "O5"])
def test_a_cast_gives_the_plain_model_in_its_dtype_and_is_told_once(caplog, level, name):
    model, _optimizer = train_prepared(nn.Linear(4, 4), level=level, loss_scale=1.0)
    exact = model.state_dict()["weight"].clone()
    assert getattr(model, name)() is model
    assert vars(model).keys() == vars(nn.Linear(4, 4)).keys()
    assert not model._state_dict_hooks
    assert torch.equal(model.weight, exact.to(CASTS[name]))
    getattr(model, name)()
    named_once(caplog, f".{name}()", "with fp32 masters (O2 or O5)")


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_another_dtype_after_initialize_is_told_once(caplog, level):
    model, _optimizer = train_prepared(nn.Linear(4, 4), level=level, loss_scale=1.0)
    model.to("cpu", torch.float32)
    assert not messages(caplog)
    model.to("cpu", torch.bfloat16).to("cpu", torch.bfloat16)
    named_once(caplog, ".to(torch.bfloat16)")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_copy_may_be_cast_to_be_saved(caplog, level):
    model, _optimizer = train_prepared(nn.Linear(4, 4), level=level, loss_scale=1.0)
    for dtype in (torch.float16, torch.float32):
        assert copy.deepcopy(model).to(dtype).weight.dtype is dtype
    assert not messages(caplog)


# -- mixed dtypes ---------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.features(x)

    def features(self, x):
        return self.linear(x)

    def encode(self, x, *, twice=False):
        return self.features(self.features(x) if twice else x)


def test_an_error_of_mixed_dtypes_gets_a_note_in_forward_alone(level):
    model = converted(Encoder(), level)
    with pytest.raises(RuntimeError, match="dtype") as raised:
        model.encode(torch.ones(2, 4))
    assert "prepared" not in str(raised.value)
    model.linear.float()
    with pytest.raises(RuntimeError, match="dtype") as raised:
        model(torch.ones(2, 4))
    assert str(raised.value).count("amp.initialize prepared") == 1
    amp.restore(model)
    assert model.encode(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_with_op_casts_other_methods_cast(level):
    model = converted(Encoder(), level)
    assert model.encode(torch.ones(2, 4), twice=True).shape == (2, 4)


class Opaque(torch.Tensor):
    """A weight that keeps its values in another form, as a quantized one: nothing reads it."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise AssertionError(func)


def test_frozen_weights_of_other_tensor_classes_are_left_alone(level):
    model = converted(nn.Sequential(nn.Linear(4, 4), nn.Identity()).requires_grad_(False), level)
    model[1].weight = nn.Parameter(Opaque(model[0].weight), requires_grad=False)
    for _ in range(3):
        model(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.12, though it is told
def test_sparse_buffers_are_cast_and_saved_exactly(level):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("edges", (torch.eye(4) / 3).to_sparse())
    converted(model, level)
    assert model[0].edges.dtype is not torch.float32
    assert torch.equal(model.state_dict()["0.edges"].to_dense(), torch.eye(4) / 3)
    amp.restore(model)
    assert torch.equal(model[0].edges.to_dense(), torch.eye(4) / 3)
