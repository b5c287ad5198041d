"""Hooks of models, tensors and optimizers: once each, in order, in the level's dtypes."""

from contextlib import nullcontext

import pytest
import torch

from apex import amp
from tests.support import loops
from tests.support.reference.plain_loops import Loop


class Log(list):
    """What the hooks of a model and its optimizer saw, in order."""

    def note(self, name, *tensors):
        self.append((name, *(tensor.dtype for tensor in tensors)))

    def attach(self, model, optimizer):
        last, note = model[2], self.note
        for name, module in (("forward", model), ("layer", last)):
            module.register_forward_pre_hook(lambda m, args, name=name: note(f"{name} pre", *args))
            module.register_forward_hook(lambda m, args, out, name=name: note(name, *args, out))
        model.register_full_backward_pre_hook(lambda m, grads: note("backward pre", *grads))
        model.register_full_backward_hook(lambda m, inner, outer: note("backward", *inner, *outer))
        last.register_full_backward_hook(lambda m, inner, outer: note("layer back", *inner, *outer))
        last.weight.register_hook(lambda grad: note("gradient", grad))
        last.weight.register_post_accumulate_grad_hook(lambda p: note("accumulated", p, p.grad))
        named = {model: ("state_dict", "load_state_dict")}
        named[optimizer] = ("step", "state_dict", "load_state_dict")
        for owner, methods in named.items():
            for method in methods:
                for when in ("pre", "post"):
                    text = f"{type(owner).__name__} {method} {when}"
                    register = getattr(owner, f"register_{method}_{when}_hook")
                    register(lambda *args, text=text: note(text))

    def taken(self):
        """Returns the entries and forgets them."""
        entries = list(self)
        self.clear()
        return entries


def use(model, optimizer, backward):
    x, y = loops.batch()
    backward(model, optimizer, x.requires_grad_(), y)
    optimizer.step()
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def plain_backward(model, optimizer, x, y):
    loops.loss_of(model, x, y).backward()


def plain_log():
    log, model = Log(), loops.net()
    optimizer = loops.sgd(model.parameters())
    log.attach(model, optimizer)
    use(model, optimizer, plain_backward)
    return log.taken()


@pytest.mark.parametrize("when", ["before initialize", "after initialize"])
def test_every_hook_runs_once_in_order_and_in_the_level_s_dtypes_also_after_restore(level, when):
    rules, expected = loops.LEVELS[level], plain_log()
    log, model = Log(), loops.net()
    optimizer = loops.sgd(model.parameters())
    if when == "before initialize":
        log.attach(model, optimizer)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after initialize":
        log.attach(model, optimizer)
    said = pytest.warns(match="A hook on a 16-bit parameter") if level == "O2" else nullcontext()
    with said:
        use(model, optimizer, loops.backward)
    found = log.taken()
    assert [name for name, *_ in found] == [name for name, *_ in expected]
    seen = {name: set(dtypes) for name, *dtypes in found}
    for name in ("layer pre", "layer", "layer back"):
        assert seen[name] == {rules.compute}
    for name in ("gradient", "accumulated"):
        assert seen[name] == {rules.stored}
    # The model as a whole takes fp32; it gives it, too, where amp casts outputs.
    assert seen["forward pre"] == {torch.float32}
    assert seen["backward pre"] == {rules.compute if level == "O1" else torch.float32}
    amp.restore(model, optimizer)
    optimizer.zero_grad()
    use(model, optimizer, plain_backward)
    assert log.taken() == expected


@pytest.fixture
def stepping():
    """Makes optimizers that step each parameter as soon as its gradient is there."""
    handles = []  # a hook that holds its parameter is never collected

    def attach(model):
        optimizers = {param: loops.sgd([param]) for param in model.parameters()}

        def step(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        handles.extend(param.register_post_accumulate_grad_hook(step) for param in optimizers)
        return list(optimizers.values())

    yield attach
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("scaled", [False, True], ids=["plain backward", "scale_loss"])
@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_optimizers_may_step_in_the_backward_pass(level, scaled, stepping):
    model = loops.net()
    loop = Loop(level, model.parameters(), loops.sgd)
    optimizers = stepping(model)
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    for x, y in loops.batches(3):
        loops.backward(model, optimizers, x, y) if scaled else loops.loss_of(model, x, y).backward()
        loop.train_step(x, y)
    assert loops.same(loops.values(model.parameters()), loops.values(loop.model))


@pytest.mark.filterwarnings("ignore:A hook on a 16-bit parameter")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_in_the_backward_pass_of_a_scaled_loss_is_refused(level, stepping):
    model = loops.net()
    optimizers = stepping(model)
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    before = loops.values(model.parameters())
    with pytest.raises(RuntimeError, match="Step after the pass, or use a loss scale of 1"):
        loops.backward(model, optimizers, *loops.batch())
    assert loops.same(before, loops.values(model.parameters()))
