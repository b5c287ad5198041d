import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from apex._engine.model import ModelPlan, convert, is_converted, restore, state_of
from apex._torch import dispatcher
from tests._engine.conversion_cases import (
    LOW,
    O1,
    O5,
    Echo,
    Masters,
    Net,
    PlainRegion,
    Tied,
    converted,
    dtypes_of,
    x,
)
from tests.training.cases import saved_and_loaded

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle 0": lambda m: pickle.loads(pickle.dumps(m, 0)),
    "pickle 2": lambda m: pickle.loads(pickle.dumps(m, 2)),
    "pickle 5": lambda m: pickle.loads(pickle.dumps(m, 5)),
    "torch.save": saved_and_loaded,
}
every_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())


class CustomState(Net):
    """Saves only what it was made from, as user classes may."""

    def __getstate__(self):
        return {"weights": nn.Module.state_dict(self)}

    def __setstate__(self, state):
        Net.__init__(self)
        self.load_state_dict(state["weights"])


class CustomReduce(nn.Linear):
    def __reduce__(self):
        return type(self), (self.in_features, self.out_features)


class Options(dict):
    """What a model is made from; pickle calls it by its class."""


class ReduceByOptions(nn.Linear):
    def __init__(self, options):
        super().__init__(*options["features"])
        self.options = options

    def __reduce__(self):
        return type(self), (self.options,)


class OwnDeepCopy(nn.Linear):
    def __deepcopy__(self, memo):
        twin = type(self)(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


@every_copy
def test_a_copy_casts_like_the_original(duplicate):
    model = converted(Net()).eval()
    twin = duplicate(model)
    assert is_converted(twin)
    assert type(twin) is type(model)
    assert dtypes_of(twin) == dtypes_of(model)
    assert torch.equal(twin(x()), model(x()))


@every_copy
def test_a_copy_computes_with_its_own_weights(duplicate):
    model = converted(Net()).eval()
    before = model(x())
    twin = duplicate(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert torch.equal(model(x()), before)
    assert torch.equal(twin(x()), twin.shift.float().expand(4, 2))


@every_copy
def test_a_copy_leaves_owner_and_masters_behind(duplicate):
    model = Net()
    masters = Masters(Net().to(LOW))
    convert(model, O5, PlainRegion(), masters=masters, owner=threading.Lock())
    twin = duplicate(model)
    assert state_of(twin).owner is None
    assert twin._apex_state.link._masters is None
    assert model._apex_state.link.source is masters


@every_copy
def test_a_copy_is_restored_by_itself(duplicate):
    model = converted(Net(), ModelPlan(LOW, LOW, torch.float32, fp32_modules=("last",)))
    twin = duplicate(model)
    restore(twin)
    assert type(twin) is Net
    assert not twin.last._forward_hooks
    assert not twin.last._forward_pre_hooks
    assert is_converted(model)
    assert len(model.last._forward_hooks) == 1
    assert twin(x()).dtype is model(x()).dtype is torch.float32


@every_copy
def test_a_copy_has_fp32_state_dict(duplicate):
    assert duplicate(converted(Net())).state_dict()["last.weight"].dtype is torch.float32


@every_copy
def test_tied_weights_stay_tied_in_a_copy(duplicate):
    twin = duplicate(converted(Tied()))
    assert twin.head.weight is twin.embed.weight


def test_pickle_names_the_plain_class():
    assert b"ConvertedModule" not in pickle.dumps(converted(Net()))


@every_copy
def test_own_getstate_and_setstate_are_honoured(duplicate):
    model = converted(CustomState(), O1).eval()
    twin = duplicate(model).eval()
    assert is_converted(twin) is (duplicate is copy.deepcopy)
    assert torch.equal(twin(x()), model(x()))


@every_copy
def test_parameters_that_own_setstate_made_anew_are_cast_again(duplicate):
    twin = duplicate(converted(CustomState()))
    assert twin.first.weight.dtype is LOW
    assert twin(x()).dtype is torch.float32


@every_copy
def test_own_reduce_is_honoured(duplicate):
    twin = duplicate(converted(CustomReduce(3, 2)))
    assert isinstance(twin, CustomReduce)
    assert twin(x()).shape == (4, 2)
    assert is_converted(twin)
    assert twin.weight.dtype is LOW


@every_copy
def test_what_a_model_is_made_from_keeps_its_class(duplicate):
    model = ReduceByOptions(Options(features=(3, 2)))
    assert type(duplicate(converted(model)).options) is Options


def test_own_deepcopy_is_honoured():
    model = converted(OwnDeepCopy(3, 2))
    twin = copy.deepcopy(model)
    assert not is_converted(twin)
    assert torch.equal(twin.weight, model.weight.float())


def test_an_object_of_the_generated_class_that_is_not_converted_copies():
    model = type(converted(nn.Linear(3, 2)))(3, 2)
    for duplicate in (copy.copy, copy.deepcopy):
        twin = duplicate(model)
        assert not is_converted(twin)
        assert torch.equal(twin.weight, model.weight)


def test_a_model_that_refers_to_itself_copies_with_its_reference():
    model = nn.Linear(3, 2)
    model.__dict__["me"] = model
    for twin in (copy.deepcopy(converted(model)), pickle.loads(pickle.dumps(model))):
        assert twin.me is twin
    plain = nn.Linear(3, 2)
    plain.__dict__["me"] = plain
    twin = pickle.loads(pickle.dumps(converted(plain, O1)))
    assert twin.me is twin
    assert type(twin) is nn.Linear


def test_a_parametrized_model_that_is_converted_copies():
    before = converted(parametrizations.weight_norm(nn.Linear(3, 2)))
    after = parametrizations.weight_norm(converted(nn.Linear(3, 2)))
    for model in (before, after):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x()), model(x()))
        assert twin.parametrizations.weight.original0 is not model.parametrizations.weight.original0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_gone_with_its_last_reference(duplicate):
    model = converted(Net())
    gc.collect()
    gc.disable()
    try:
        twin = weakref.ref(duplicate(model))
        assert twin() is None
    finally:
        gc.enable()


def test_shallow_copies_share_parameters_and_masters():
    model = converted(Net(), owner="session")
    twin = copy.copy(model)
    assert twin.first.weight is model.first.weight
    assert state_of(twin).owner == "session"


def test_a_copied_forward_of_the_object_is_bound_to_the_copy():
    model = Echo()
    model.weight = nn.Parameter(torch.ones(1))
    model.forward = model.forward  # a bound method on the object
    converted(model)
    twin = copy.deepcopy(model)
    twin(x())
    assert twin.seen is not None
    assert model.seen is None


def test_a_model_unpickled_in_a_fresh_process_casts(tmp_path):
    (tmp_path / "own_models.py").write_text(
        textwrap.dedent("""
        import torch
        class Net(torch.nn.Linear):
            pass
        class Region:
            def run(self, fn, /, *args, **kwargs):
                return fn(*args, **kwargs)
            run_eagerly = run
        """)
    )
    write = """
        import torch, own_models
        from apex._engine.model import ModelPlan, convert
        model = own_models.Net(2, 2)
        plan = ModelPlan(torch.bfloat16, torch.bfloat16, torch.float32)
        convert(model, plan, own_models.Region())
        torch.save(model, "model.pt")
        """
    read = """
        import torch
        from apex._engine.model import is_converted
        model = torch.load("model.pt", weights_only=False)
        assert is_converted(model)
        assert model.weight.dtype is torch.bfloat16
        assert model(torch.ones(1, 2)).dtype is torch.float32
        assert type(model).__module__ == "own_models"
        """
    for script in (write, read):
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, check=True)


def replicate(model):
    """Copies a model as torch.nn.parallel.replicate does, which itself needs GPUs."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, twin in copies.items():
        for key, child in module._modules.items():
            setattr(twin, key, copies[child])
        for key, param in module._parameters.items():
            setattr(twin, key, param * 1)
        for key, buffer in module._buffers.items():
            setattr(twin, key, buffer.clone())
    return copies[model]


@pytest.mark.parametrize("plan", [O1, O5])
def test_data_parallel_replicas_compute_with_their_own_weights_in_threads(plan):
    model = converted(Net(), plan).eval()
    expected = model(x())
    replicas = [replicate(model) for _ in range(2)]
    with torch.no_grad():
        replicas[1].last.weight.zero_()
        replicas[1].last.bias.zero_()
    results = {}

    def work(index):
        results[index] = replicas[index](x())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(results[0], expected)
    assert torch.equal(results[1], model.shift.float().expand(4, 2))
    results[0].sum().backward()
    assert model.first.weight.grad is not None


def test_replicas_with_fp32_modules_cast_there_too():
    plan = ModelPlan(LOW, LOW, torch.float32, fp32_modules=("first",))
    model = converted(Net(), plan)
    assert replicate(model)(x()).dtype is torch.float32


PLANS = {"O1": O1, "O5": O5, "fp32": ModelPlan(LOW, LOW, None, fp32_modules=(nn.Linear,))}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_converted_model_compiles_as_one_graph(plan):
    torch._dynamo.reset()
    model = converted(Net(), plan).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x()), model(x()))
    scale = {"scale": torch.ones(1, dtype=torch.float64)}
    assert torch.equal(compiled(x(), **scale), model(x(), **scale))


@pytest.mark.skipif(dispatcher.release < (2, 8), reason="this torch does not trace dataclasses")
def test_nested_inputs_compile_as_one_graph():
    from tests._core.test_tree import Batch, FrozenBatch, Point

    class Sum(nn.Module):
        def forward(self, point, batch, named):
            return {"sum": point.x + batch.image + named["a"][0]}

    torch._dynamo.reset()
    compiled = torch.compile(converted(Sum()), fullgraph=True, backend="aot_eager")
    for batch in (Batch(x()), FrozenBatch(x())):
        result = compiled(Point(x(), 1), batch, {"a": [x()]})
        assert result["sum"].dtype is torch.float32


def test_a_compiled_model_is_converted():
    torch._dynamo.reset()
    model = torch.compile(Net(), backend="eager")
    converted(model)
    assert model(x()).dtype is torch.float32
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert torch.equal(twin(x()), twin.shift.float().expand(4, 2))
    restore(model)
    assert model(x()).dtype is torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_converted_model_is_traced():
    model = converted(Net()).eval()
    traced = torch.jit.trace(model, x())
    assert torch.equal(traced(x()), model(x()))


def test_a_converted_model_is_exported():
    model = converted(Net()).eval()
    assert torch.equal(torch.export.export(model, (x(),)).module()(x()), model(x()))
