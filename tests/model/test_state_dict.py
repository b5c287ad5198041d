"""The fp32 ``state_dict`` of 16-bit modules, and lossless loading."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from apex import amp
from tests.model.nets import LOW, BufferNet, Tied, converted, exact_of
from tests.support import loops


def random_state(model):
    """An fp32 state dict whose values no low-precision type holds exactly."""
    torch.manual_seed(1)
    state = BufferNet().state_dict()
    return {name: torch.rand_like(t) if t.is_floating_point() else t for name, t in state.items()}


def test_low_precision_entries_are_fp32_and_others_stay():
    model = converted(BufferNet())
    state = model.state_dict()
    assert list(state) == list(BufferNet().state_dict())
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    assert torch.equal(state["shift"], torch.full((2,), 1 / 3))
    assert state["norm.weight"].data_ptr() == model.norm.weight.data_ptr()
    assert state._metadata == BufferNet().state_dict()._metadata


def test_entries_are_the_masters_exact_values():
    model, masters = loops.prepared("O5", model=BufferNet())
    entry = model.state_dict()["last.weight"]
    exact = exact_of(model, masters, "last.weight")
    assert torch.equal(entry, exact)
    assert not torch.equal(entry, model.last.weight.float())
    entry.zero_()  # no memory of the master
    assert exact.count_nonzero() > 0


def test_a_buffer_that_has_changed_its_shape_is_saved_as_it_is():
    model = converted(BufferNet())
    model.shift.data = torch.full((3,), 1 / 3, dtype=LOW)
    assert torch.equal(model.state_dict()["shift"], model.shift.float())


def test_keep_vars_leaves_entries():
    model = converted(BufferNet())
    assert model.state_dict(keep_vars=True)["last.weight"] is model.last.weight


def test_destination_and_prefix_work_as_in_torch():
    model = converted(BufferNet())
    other = torch.ones(1, dtype=LOW)
    destination = OrderedDict(other=other)
    destination["m.kept"] = other
    result = model.state_dict(destination=destination, prefix="m.")
    assert result is destination
    assert destination["other"] is destination["m.kept"] is other
    assert destination["m.last.weight"].dtype is torch.float32


def test_own_state_dict_of_the_model_is_honoured():
    class Own(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {"w": super().state_dict(*args, **kwargs)["weight"], "n": 3}

    state = converted(Own(2, 2)).state_dict()
    assert state["w"].dtype is torch.float32
    assert state["n"] == 3


def test_loading_tied_parameters_sets_the_one_master():
    model, masters = loops.prepared("O5", model=Tied())
    value = torch.rand(5, 3)
    model.load_state_dict({"embed.weight": torch.zeros(5, 3), "head.weight": value})
    assert torch.equal(exact_of(model, masters, "embed.weight"), value)


def test_entries_that_a_child_renames_reach_the_masters_rounded():
    model, masters = loops.prepared("O5", model=BufferNet())
    state = random_state(model)
    state["last.old"] = state.pop("last.weight")

    def rename(module, entries, prefix, *rest):
        entries[prefix + "weight"] = entries.pop(prefix + "old")

    model.last.register_load_state_dict_pre_hook(rename)
    model.load_state_dict(state, strict=False)
    assert torch.equal(exact_of(model, masters, "last.weight"), model.last.weight.float())
    assert torch.equal(model.last.weight, state["last.old"].to(LOW))


def test_a_module_s_own_hooks_that_rename_entries_rename_fp32_ones():
    def rename(module, entries, prefix, metadata):
        entries[prefix + "old"] = entries.pop(prefix + "weight")

    def rename_back(module, entries, prefix, *rest):
        entries[prefix + "weight"] = entries.pop(prefix + "old")

    model = BufferNet()
    model.last.register_state_dict_post_hook(rename)
    model.last.register_load_state_dict_pre_hook(rename_back)
    model, masters = loops.prepared("O5", model=model)
    state = model.state_dict()
    assert torch.equal(state["last.old"], exact_of(model, masters, "last.weight"))
    state["last.old"] = torch.rand(2, 4)
    model.load_state_dict(state)
    assert torch.equal(exact_of(model, masters, "last.weight"), state["last.old"])


@pytest.mark.parametrize("part", ["", "last"])
def test_assign_is_refused_by_every_module_with_16_bit_entries(part):
    model, _ = loops.prepared(
        "O5", model=nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(2), last=BufferNet()))
    )
    module = model.get_submodule(part)
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="assign=True"):
        module.load_state_dict(module.state_dict(), assign=True)
    assert all(before[name] is param for name, param in model.named_parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_tied_weight_is_saved_once(level):
    model, _ = loops.prepared(level, model=Tied())
    before = model.state_dict()
    assert before["embed.weight"] is before["head.weight"]
    with torch.no_grad():
        model.embed.weight.zero_()
    after = nn.Sequential(model).state_dict()
    assert after["0.embed.weight"] is after["0.head.weight"]
    assert not after["0.head.weight"].any()
    assert before["head.weight"].any()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parts_saved_again_into_the_same_dict_have_the_values_of_now(level):
    model, _ = loops.prepared(level, model=Tied())
    entries = OrderedDict()
    for value in (1.0, 2.0):
        nn.init.constant_(model.embed.weight, value)
        for name, part in model.named_children():
            part.state_dict(destination=entries, prefix=f"{name}.")
        assert [entry.unique().tolist() for entry in entries.values()] == [[value], [value]]


def test_a_buffer_made_in_inference_mode_is_saved_in_fp32():
    model = converted(nn.BatchNorm1d(2), "O5", keep_batchnorm_fp32=False)
    with torch.inference_mode():
        model.running_mean = torch.ones(2, dtype=torch.bfloat16)
    assert torch.equal(model.state_dict()["running_mean"], torch.ones(2))


class CountedEntries(OrderedDict):
    """Counts the walks through its values."""

    walks = 0

    def values(self):
        self.walks += 1
        return super().values()


def test_saving_walks_through_no_entries_for_each_weight():
    """Also while an earlier state is kept."""
    model, _ = loops.prepared("O5", model=BufferNet())
    saved = [CountedEntries(), CountedEntries()]
    for entries in saved:
        entries._metadata = OrderedDict()
        model.state_dict(destination=entries)
        assert entries.walks == 0 < len(entries)


@pytest.mark.parametrize("by", ["copy_", "data.copy_"])
def test_a_part_is_saved_as_it_is_now_and_without_its_model(by):
    model, _ = loops.prepared("O5", model=BufferNet())
    part = model.last
    kept = part.state_dict()
    loops.change([part.weight], [torch.full((2, 4), 0.5)], by)
    assert (part.state_dict()["weight"] == 0.5).all()
    assert not (kept["weight"] == 0.5).any()
    del model
    part.late = nn.Linear(2, 2)
    assert (part.state_dict()["weight"] == 0.5).all()


def test_16_bit_entries_leave_the_low_bits_of_what_they_restore():
    model, masters = loops.prepared("O5", model=BufferNet())
    exact = exact_of(model, masters, "last.weight").detach().clone()
    backup = {name: param.detach().clone() for name, param in model.named_parameters()}
    for entries in ({name: torch.ones_like(value) for name, value in backup.items()}, backup):
        model.load_state_dict(entries, strict=False)
    assert torch.equal(exact_of(model, masters, "last.weight"), exact)


def test_what_is_written_to_a_weight_after_its_entry_was_loaded_stays():
    """Such as a head that a script initializes anew."""
    model, optimizer = loops.prepared("O5")
    model.load_state_dict({name: value / 3.0 for name, value in model.state_dict().items()})
    with torch.no_grad():
        model[2].weight.fill_(0.5)
    model(loops.batch()[0])
    assert (model[2].weight == 0.5).all()
    assert (exact_of(model, optimizer, "2.weight") == 0.5).all()


def test_16_bit_entries_replace_what_was_written_to_the_masters():
    model, optimizer = loops.prepared("O5", model=BufferNet())
    backup = {name: param.detach().clone() for name, param in model.named_parameters()}
    for master in amp.master_params(optimizer):
        master.data.add_(1.0)
    model.load_state_dict(backup, strict=False)
    saved = model.state_dict()
    assert all(torch.equal(saved[name], value.float()) for name, value in backup.items())


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_assign_works_where_parameters_are_not_cast(level):
    model = converted(BufferNet(), level)
    loops.saved_and_loaded(model)  # which leaves it as it is
    state = random_state(model)
    model.load_state_dict(state, assign=True)
    assert model.first.weight.data_ptr() == state["first.weight"].data_ptr()
