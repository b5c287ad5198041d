"""The running module, direction and line, as every operator sees them."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from apex.debug.place import Tracker


class Log(TorchDispatchMode):
    """Records where each operator ran."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker = tracker
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tracker = self.tracker
        tracker.record_site()
        line = tracker.location().rpartition(":")
        name = str(func).split(".")[1]
        self.seen.append((name, tracker.module[0], tracker.direction, line[0], int(line[2] or 0)))
        return func(*args, **(kwargs or {}))

    def of(self, op):
        return [entry[1:3] for entry in self.seen if entry[0] == op]

    def lines_of(self, op):
        return [entry[3:] for entry in self.seen if entry[0] == op]


def logged(run, *models):
    with Tracker(*models) as tracker, Log(tracker) as log:
        run()
    return log


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


LINE_OF_EXP = Exp.forward.__code__.co_firstlineno + 1


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.body(x).sum()


def x():
    return torch.ones(2, 3, requires_grad=True)


def test_forward_and_backward_of_an_op_belong_to_the_module_that_called_it():
    net = Net(nn.Linear(3, 3), Exp())
    log = logged(lambda: net(x()).backward(), net)
    assert log.of("addmm") == [("body.0", "forward")]
    assert log.of("exp") == [("body.1", "forward")]
    assert log.of("mul") == [("body.1", "backward")]  # exp's derivative
    assert set(log.of("mm")) == {("body.0", "backward")}


def test_the_model_itself_has_the_empty_name_and_is_inside():
    net = Net(nn.Identity())
    with Tracker(net) as tracker:
        insides = [tracker.module[1]]
        net.register_forward_pre_hook(lambda *_: insides.append(tracker.module))
        net(x())
        insides.append(tracker.module[1])
    assert insides == [False, ("", True), False]


def test_both_directions_report_the_line_of_user_code():
    net = Net(Exp())
    log = logged(lambda: net(x()).backward(), net)
    assert log.lines_of("exp") == [(__file__, LINE_OF_EXP)]
    assert log.lines_of("mul") == [(__file__, LINE_OF_EXP)]


def test_a_custom_backward_has_its_own_line():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.tan()

    class Module(nn.Module):
        def forward(self, x):
            return Own.apply(x)

    net = Net(Module())
    log = logged(lambda: net(x()).backward(), net)
    assert log.of("tan") == [("body.0", "backward")]
    assert log.lines_of("tan") == [(__file__, Own.backward.__code__.co_firstlineno + 2)]


def test_an_accumulating_gradient_belongs_to_its_parameter_s_module():
    net = Net(nn.Linear(3, 3))
    net(x()).backward()
    log = logged(lambda: net(x()).backward(), net)
    assert ("body.0", "backward") in log.of("add_")


def test_models_are_distinguished_by_class_and_number():
    first, second, other = Net(Exp()), Net(Exp()), Exp()
    log = logged(lambda: other(second(first(x()))), first, second, other)
    assert [name for name, _ in log.of("exp")] == ["Net:body.0", "Net[1]:body.0", "Exp:"]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("through_module", [True, False])
def test_a_checkpoint_recomputes_forward_in_its_module(reentrant, through_module):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Exp()

        def forward(self, x):
            fn = self.inner if through_module else self.inner.forward
            return checkpoint(fn, x, use_reentrant=reentrant)

    net = Net(Checkpointed())
    log = logged(lambda: net(x()).backward(), net)
    name = "body.0.inner" if through_module else "body.0"
    assert log.of("exp") == [(name, "forward")] * 2
    assert log.of("mul")[-1] == (name, "backward")
    assert set(log.lines_of("exp") + log.lines_of("mul")) == {(__file__, LINE_OF_EXP)}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_module_has_its_name_and_keeps_no_hook():
    scripted = torch.jit.script(nn.Linear(3, 3))
    net = Net(nn.ReLU(), scripted)
    assert logged(lambda: net(x()), net).of("addmm") == [("body.1", "forward")]
    assert not scripted._forward_pre_hooks
    assert not scripted._forward_hooks


def test_other_threads_have_modules_of_their_own():
    net, other = Net(Exp()), Exp()
    names = []
    with Tracker(net) as tracker:

        def ask():
            other(x())
            names.append(tracker.module[0])

        def ask_in_a_thread(*_):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            names.append(tracker.module[0])

        net.body[0].register_forward_pre_hook(ask_in_a_thread)
        net(x())
    assert names == ["", "body.0"]


def test_nothing_is_left_after_an_exception_in_the_middle_of_a_module():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    net = Net(Fails())
    before = dict(modules._global_forward_hooks), dict(modules._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), Tracker(net) as tracker:
        net(x())
    assert (modules._global_forward_hooks, modules._global_forward_pre_hooks) == before
    assert _get_current_dispatch_mode() is None
    assert (tracker.module, tracker.direction) == (("", False), "forward")


def test_a_caught_exception_leaves_the_module_that_raised():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = Fails()

        def forward(self, x):
            try:
                return self.fails(x)
            except ZeroDivisionError:
                return x.exp()

    net = Net(Catches())
    log = logged(lambda: net(x()), net)
    assert log.of("exp") == [("body.0", "forward")]


def test_a_replica_of_data_parallel_runs_untracked():
    exp = Exp()
    with Tracker(exp) as tracker, Log(tracker) as log:
        exp._replicate_for_data_parallel()(x())
    assert log.of("exp") == [("", "forward")]


def test_what_a_script_does_to_warnings_meanwhile_stays():
    with warnings.catch_warnings():
        before = list(warnings.filters)
        with Tracker(Net(Exp())):
            warnings.simplefilter("ignore", FutureWarning)
        assert list(warnings.filters) == [("ignore", None, FutureWarning, None, 0), *before]
