import copy
import gc
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from apex._engine.model import restore
from tests._engine.conversion_cases import LOW, O0, O1, Net, Tied, converted, with_masters, x


def random_state(model):
    """An fp32 state dict whose values no low-precision type holds exactly."""
    torch.manual_seed(1)
    return {
        name: torch.rand_like(t) if t.is_floating_point() else t
        for name, t in Net().state_dict().items()
    }


def exact_of(model, masters, name):
    return masters.master_of(model.get_parameter(name))


def test_low_precision_entries_are_fp32_and_others_stay():
    model = converted(Net())
    state = model.state_dict()
    assert list(state) == list(Net().state_dict())
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    assert torch.equal(state["shift"], model.shift.float())
    assert state["norm.weight"].data_ptr() == model.norm.weight.data_ptr()
    assert state._metadata == Net().state_dict()._metadata


@pytest.mark.parametrize("plan", [O0, O1])
def test_plans_without_low_precision_leave_the_state_dict(plan):
    model = converted(Net(), plan)
    model.shift.data = model.shift.data.to(LOW)
    assert model.state_dict()["shift"].dtype is LOW


def test_entries_are_the_masters_exact_values():
    model, masters = with_masters(Net())
    entry = model.state_dict()["last.weight"]
    exact = exact_of(model, masters, "last.weight")
    assert torch.equal(entry, exact)
    assert not torch.equal(entry, model.last.weight.float())


def test_elements_that_the_user_changed_come_from_the_parameter():
    model, masters = with_masters(Net())
    with torch.no_grad():
        model.last.weight[0, 0] = 7.0
    entry = model.state_dict()["last.weight"]
    exact = exact_of(model, masters, "last.weight")
    assert entry[0, 0] == 7.0
    assert torch.equal(entry[1], exact[1])


def test_nan_parameters_are_told_as_nan():
    model, _ = with_masters(Net())
    with torch.no_grad():
        model.last.bias.fill_(float("nan"))
    assert model.state_dict()["last.bias"].isnan().all()


def test_entries_share_no_memory_with_masters():
    model, masters = with_masters(Net())
    model.state_dict()["last.weight"].zero_()
    assert exact_of(model, masters, "last.weight").count_nonzero() > 0


def test_keep_vars_leaves_entries():
    model = converted(Net())
    assert model.state_dict(keep_vars=True)["last.weight"] is model.last.weight


def test_destination_and_prefix_work_as_in_torch():
    model = converted(Net())
    other = torch.ones(1, dtype=LOW)
    destination = OrderedDict(other=other)
    destination["m.kept"] = other
    result = model.state_dict(destination=destination, prefix="m.")
    assert result is destination
    assert destination["other"] is destination["m.kept"] is other
    assert destination["m.last.weight"].dtype is torch.float32


@pytest.mark.filterwarnings("ignore:Positional args are being deprecated:FutureWarning")
def test_positional_arguments_work_as_in_torch():
    model = converted(Net())
    destination = OrderedDict()
    assert model.state_dict(destination, "m.", True) is destination
    assert destination["m.last.weight"] is model.last.weight
    assert model.state_dict(OrderedDict(), "m.")["m.last.weight"].dtype is torch.float32


def test_a_plain_parents_own_entries_stay():
    inner, masters = with_masters(Net())
    parent = nn.ModuleDict({"inner": inner, "other": nn.Linear(1, 1).to(LOW)})
    state = parent.state_dict()
    assert torch.equal(state["inner.last.weight"], exact_of(inner, masters, "last.weight"))
    assert state["other.weight"].dtype is LOW


def test_tied_entries_share_memory_as_in_torch():
    model, _ = with_masters(Tied())
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


def test_own_state_dict_of_the_model_is_honoured():
    class Own(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {"w": super().state_dict(*args, **kwargs)["weight"], "n": 3}

    state = converted(Own(2, 2)).state_dict()
    assert state["w"].dtype is torch.float32
    assert state["n"] == 3


def test_distributed_wrapper_gives_and_takes_fp32():
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model, masters = with_masters(Net())
        wrapped = DistributedDataParallel(model)
        wrapped(x()).sum().backward()
        state = wrapped.state_dict()
        assert state["module.last.weight"].dtype is torch.float32
        new = {f"module.{k}": v for k, v in random_state(model).items()}
        wrapped.load_state_dict(new)
        assert torch.equal(exact_of(model, masters, "last.weight"), new["module.last.weight"])
    finally:
        destroy_process_group()


def test_loading_sets_parameters_rounded_and_masters_exactly():
    model, masters = with_masters(Net())
    state = random_state(model)
    model.load_state_dict(state)
    assert torch.equal(model.first.weight, state["first.weight"].to(LOW))
    assert torch.equal(exact_of(model, masters, "first.weight"), state["first.weight"])
    assert torch.equal(model.norm.weight, state["norm.weight"])


def test_saved_and_loaded_state_is_the_same_bit_for_bit():
    model, _ = with_masters(Net())
    twin, _ = with_masters(Net())
    twin.load_state_dict(model.state_dict())
    for name, entry in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], entry)


def test_loading_by_a_parent_reaches_the_masters():
    inner, masters = with_masters(Net())
    parent = nn.Sequential(nn.Linear(1, 1), inner)
    state = random_state(inner)
    own = {f"0.{k}": v for k, v in parent[0].state_dict().items()}
    parent.load_state_dict({**own, **{f"1.{k}": v for k, v in state.items()}})
    assert torch.equal(exact_of(inner, masters, "last.bias"), state["last.bias"])


def test_loading_tied_parameters_sets_the_one_master():
    model, masters = with_masters(Tied())
    value = torch.rand(5, 3)
    model.load_state_dict({"embed.weight": torch.zeros(5, 3), "head.weight": value})
    assert torch.equal(exact_of(model, masters, "embed.weight"), value)


def test_entries_that_a_child_renames_reach_the_masters_rounded():
    model, masters = with_masters(Net())
    state = random_state(model)
    state["last.old"] = state.pop("last.weight")

    def rename(module, entries, prefix, *rest):
        entries[prefix + "weight"] = entries.pop(prefix + "old")

    model.last.register_load_state_dict_pre_hook(rename)
    model.load_state_dict(state, strict=False)
    assert torch.equal(exact_of(model, masters, "last.weight"), model.last.weight.float())
    assert torch.equal(model.last.weight, state["last.old"].to(LOW))


def test_masters_of_parameters_that_were_not_loaded_stay():
    model, masters = with_masters(Net())
    before = exact_of(model, masters, "last.weight").clone()
    model.load_state_dict({"first.bias": torch.zeros(4)}, strict=False)
    assert torch.equal(exact_of(model, masters, "last.weight"), before)


def test_an_entry_of_shape_one_reaches_a_scalar_master():
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(0.5))
    model, masters = with_masters(model)
    model.load_state_dict({"w": torch.tensor([1 / 3])})
    assert torch.equal(exact_of(model, masters, "w"), torch.tensor(1 / 3))


def test_any_submodule_gives_and_takes_exact_values():
    model, masters = with_masters(nn.Sequential(nn.Sequential(Net()), nn.ReLU()))
    exact = exact_of(model, masters, "0.0.last.weight")
    assert torch.equal(model[0].state_dict()["0.last.weight"], exact)
    assert torch.equal(model[0][0].last.state_dict(prefix="p.")["p.weight"], exact)
    for part, name in ((model[0], "0.last.weight"), (model[0][0].last, "weight")):
        state = {k: torch.rand(v.shape) for k, v in part.state_dict().items() if k == name}
        part.load_state_dict(state, strict=False)
        assert torch.equal(exact, state[name])
        assert torch.equal(model[0][0].last.weight, state[name].to(LOW))


def test_a_submodule_loads_a_file_of_another_size_as_far_as_it_fits():
    model, masters = with_masters(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    before = exact_of(model, masters, "0.weight").clone()
    bias = torch.rand(2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model[0].load_state_dict({"weight": torch.rand(5, 5), "bias": bias})
    assert torch.equal(exact_of(model, masters, "0.bias"), bias)
    assert torch.equal(exact_of(model, masters, "0.weight"), before)


def test_a_module_s_own_hooks_that_rename_entries_rename_fp32_ones():
    def rename(module, entries, prefix, metadata):
        entries[prefix + "old"] = entries.pop(prefix + "weight")

    def rename_back(module, entries, prefix, *rest):
        entries[prefix + "weight"] = entries.pop(prefix + "old")

    model = Net()
    model.last.register_state_dict_post_hook(rename)
    model.last.register_load_state_dict_pre_hook(rename_back)
    model, masters = with_masters(model)
    state = model.state_dict()
    assert torch.equal(state["last.old"], exact_of(model, masters, "last.weight"))
    state["last.old"] = torch.rand(2, 4)
    model.load_state_dict(state)
    assert torch.equal(exact_of(model, masters, "last.weight"), state["last.old"])


def test_masters_are_written_back_once_per_call_before_entries_are_taken():
    model, masters = with_masters(nn.Sequential(Net(), Tied()))
    target, asked = exact_of(model, masters, "0.first.weight"), []
    master_of = masters.master_of
    masters.master_of = lambda param: asked.append(id(param)) or master_of(param)

    def write_back():
        masters.written_back += 1
        model[0].first.weight.data.copy_(target)

    masters.write_back = write_back
    with torch.no_grad():
        target.fill_(1 / 3)
    state = model.state_dict()
    assert torch.equal(state["0.first.weight"], target)
    assert masters.written_back == 1
    assert len(asked) == len(set(asked)) < len(state)
    model[0].last.state_dict()
    assert masters.written_back == 2
    assert model.state_dict(keep_vars=True)["0.first.weight"] is model[0].first.weight
    assert masters.written_back == 3


def test_two_calls_into_one_dict_take_values_of_their_own_time():
    model, masters = with_masters(Tied())
    both = OrderedDict()
    model.state_dict(destination=both)
    with torch.no_grad():
        exact_of(model, masters, "embed.weight").zero_()
        model.embed.weight.zero_()
    model.state_dict(destination=both, prefix="later.")
    assert both["embed.weight"].count_nonzero() > 0
    assert both["later.embed.weight"].count_nonzero() == 0
    assert both["later.head.weight"] is both["later.embed.weight"]
    assert masters.written_back == 2


def test_a_call_that_fails_half_way_leaves_nothing_for_the_next():
    class Failing(nn.Module):
        fails = True

        def get_extra_state(self):
            if self.fails:
                raise KeyboardInterrupt
            return 3

        def set_extra_state(self, state):
            if self.fails:
                raise KeyboardInterrupt

    model, masters = with_masters(nn.Sequential(Tied(), Failing()))
    with pytest.raises(KeyboardInterrupt):
        model.state_dict()
    model[1].fails = False
    state = model.state_dict()
    assert masters.written_back == 2
    model[1].fails = True
    entry = weakref.ref(state["0.embed.weight"])
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(state)
    del state
    gc.collect()
    assert entry() is None


def test_the_forward_begins_with_what_was_written_to_masters():
    model, masters = with_masters(nn.Linear(3, 2, bias=False))
    masters.write_back = model.weight.data.zero_
    assert model(x()).count_nonzero() == 0


@pytest.mark.parametrize("part", ["", "last"])
def test_assign_is_refused_by_every_module_with_16_bit_entries(part):
    model, _ = with_masters(nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(2), last=Net())))
    module = model.get_submodule(part)
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="assign=True"):
        module.load_state_dict(module.state_dict(), assign=True)
    assert all(before[name] is param for name, param in model.named_parameters())


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
        for hook in hooks.values()
    ]


def test_restore_removes_every_hook():
    model = nn.Sequential(Net(), nn.ReLU())
    converted(model)
    assert hooks_of(model)
    restore(model)
    assert hooks_of(model) == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_submodule_has_an_fp32_state_dict(duplicate):
    model, _ = with_masters(nn.Sequential(Net()))
    state = duplicate(model[0]).state_dict()
    assert state["last.weight"].dtype is torch.float32
    assert torch.equal(state["last.weight"], model[0].last.weight.float())


def test_loading_without_masters_rounds():
    model = converted(Net())
    state = random_state(model)
    model.load_state_dict(state)
    assert torch.equal(model.first.weight, state["first.weight"].to(LOW))


def test_assign_is_refused_before_anything_changes():
    model, _ = with_masters(Net())
    before = model.first.weight
    with pytest.raises(RuntimeError, match="assign=True"):
        model.load_state_dict(random_state(model), assign=True)
    assert model.first.weight is before


def test_assign_works_where_parameters_are_not_cast():
    model = converted(Net(), O1)
    state = random_state(model)
    model.load_state_dict(state, assign=True)
    assert model.first.weight.data_ptr() == state["first.weight"].data_ptr()
