import pytest
import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.parallel import DataParallel, DistributedDataParallel

from apex._engine.model import check
from tests._engine.conversion_cases import LOW, O0, O1, O5, Net, Tied, converted

every_plan = pytest.mark.parametrize("plan", [O0, O1, O5], ids=["O0", "O1", "O5"])


@every_plan
@pytest.mark.parametrize("make", [Net, Tied, nn.Identity, lambda: Net().double()])
def test_plain_models_pass_unchanged(plan, make):
    model = make()
    before = {name: (t, t.dtype) for name, t in model.state_dict(keep_vars=True).items()}
    check(model, plan)
    after = {name: (t, t.dtype) for name, t in model.state_dict(keep_vars=True).items()}
    assert all(after[k][0] is before[k][0] and after[k][1] is before[k][1] for k in before)
    assert type(model) is type(make())


@every_plan
@pytest.mark.parametrize("model", [None, "net", [nn.Linear(1, 1)], torch.ones(1), nn.Linear])
def test_what_is_no_module_is_refused(plan, model):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        check(model, plan)


@every_plan
def test_a_model_converted_to_16_bits_is_refused(plan):
    with pytest.raises(RuntimeError, match=r"already prepared\. Only.*amp\.restore"):
        check(converted(Net(), O5), plan)


@every_plan
def test_a_data_parallel_model_is_refused(plan):
    with pytest.raises(RuntimeError, match=r"wrapped in DataParallel.*then wrap"):
        check(DataParallel(Net()), plan)


@every_plan
def test_a_distributed_model_is_refused(plan):
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"wrapped in DistributedDataParallel.*then wrap"):
            check(DistributedDataParallel(Net()), plan)
    finally:
        destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_is_refused_where_its_weights_would_be_cast():
    model = Net()
    model.last = torch.jit.script(model.last)
    check(model, O1)
    with pytest.raises(RuntimeError, match=r"whose last is scripted.*plain module"):
        check(model, O5)


@every_plan
def test_a_model_on_meta_is_refused(plan):
    model = Net()
    model.last.to("meta")
    with pytest.raises(RuntimeError, match=r"parameter last\.weight is on the meta.*Materialize"):
        check(model, plan)


@every_plan
def test_a_lazy_model_is_refused(plan):
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight is not initialized yet"):
        check(nn.Sequential(nn.LazyLinear(2)), plan)


@every_plan
@pytest.mark.parametrize("dtype", [torch.float16, LOW])
def test_low_precision_models_pass_wholly_and_in_part(plan, dtype):
    check(Net().to(dtype), plan)
    model = Net()
    model.last.to(dtype)
    model.shift = model.shift.to(dtype)
    check(model, plan, op_casts=plan is O1)


def test_float64_weights_pass_where_scripts_allow_them():
    check(Net().double(), O1, op_casts=True, allow_float64=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused():
    with pytest.raises(RuntimeError, match=r"scripted model.*Pass the plain module"):
        check(torch.jit.script(nn.Linear(1, 1)), O5)
