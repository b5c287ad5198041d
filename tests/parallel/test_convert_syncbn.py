"""convert_syncbn_model replaces batch norms and keeps everything else."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.parallel import SyncBatchNorm, convert_syncbn_model
from tests.training import cases


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(2, 4, 1)
        self.block = nn.Sequential(nn.BatchNorm2d(4, momentum=0.3, eps=1e-3), nn.ReLU())
        self.last = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        return self.norm(self.last(self.block(self.first(x)).mean((2, 3))))


def x():
    return torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(4))


def test_every_batch_norm_becomes_synchronized():
    model = convert_syncbn_model(Net())
    assert type(model.block[0]) is SyncBatchNorm
    assert type(model.norm) is SyncBatchNorm


def test_the_model_stays_the_same_object():
    model = Net()
    assert convert_syncbn_model(model) is model


def test_parameters_and_buffers_stay_the_same_objects():
    model = Net()
    before = [*model.parameters(), *model.buffers()]
    convert_syncbn_model(model)
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_outputs_and_state_dict_are_as_before():
    model, plain = convert_syncbn_model(Net()), Net()
    assert torch.equal(model(x()), plain(x()))
    assert cases.same(dict(model.state_dict()), dict(plain.state_dict()))


def test_options_and_mode_are_kept():
    model = Net().eval()
    layer = convert_syncbn_model(model).block[0]
    assert (layer.eps, layer.momentum, layer.num_features) == (1e-3, 0.3, 4)
    assert not layer.training


def test_hooks_move_along_and_their_handles_still_remove_them():
    model, calls = Net(), []
    handle = model.norm.register_forward_hook(lambda *args: calls.append(1))
    convert_syncbn_model(model)
    model(x())
    handle.remove()
    model(x())
    assert calls == [1]


def test_a_layer_used_twice_stays_one():
    layer = nn.BatchNorm1d(2)
    model = convert_syncbn_model(nn.Sequential(layer, nn.Sequential(layer)))
    assert model[0] is model[1][0]
    assert type(model[0]) is SyncBatchNorm


def test_a_batch_norm_by_itself_comes_back_new():
    layer = nn.BatchNorm1d(2)
    converted = convert_syncbn_model(layer)
    assert type(converted) is SyncBatchNorm
    assert type(layer) is nn.BatchNorm1d
    assert converted.weight is layer.weight


def test_group_and_layout_are_given_to_every_layer(one_of_four):
    group = torch.distributed.new_group([2, 3])
    model = convert_syncbn_model(Net(), group, True)
    for layer in (model.block[0], model.norm):
        assert layer.process_group is group
        assert layer.channel_last


@pytest.mark.parametrize("cls", [nn.SyncBatchNorm, SyncBatchNorm])
def test_synchronized_layers_take_the_new_group(one_of_four, cls):
    groups = [torch.distributed.new_group(ranks) for ranks in ([2, 3], [3])]
    model = nn.Sequential(cls(2, process_group=groups[0]))
    layer = convert_syncbn_model(model, groups[1])[0]
    assert type(layer) is SyncBatchNorm
    assert layer.process_group is groups[1]


def test_fuse_relu_is_kept_by_a_second_conversion():
    model = nn.Sequential(SyncBatchNorm(2, fuse_relu=True))
    assert convert_syncbn_model(model)[0].fuse_relu


def test_instance_norm_stays():
    assert type(convert_syncbn_model(nn.Sequential(nn.InstanceNorm1d(2)))[0]) is nn.InstanceNorm1d


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_at_every_level_training_is_as_with_plain_batch_norm(level, before):
    def trained(convert):
        model = Net()
        optimizer = cases.sgd(model.parameters())
        if convert and before:
            convert_syncbn_model(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if convert and not before:
            assert convert_syncbn_model(model) is model
        for _ in range(2):
            cases.train_step(model, optimizer, x(), torch.ones(5, 2))
        return dict(model.state_dict()), cases.masters(optimizer)

    assert cases.same(trained(convert=True), trained(convert=False))


def test_at_o2_converted_layers_stay_in_fp32():
    model = Net()
    amp.initialize(model, cases.sgd(model.parameters()), opt_level="O2", verbosity=0)
    assert convert_syncbn_model(model).block[0].weight.dtype is torch.float32


def test_a_model_prepared_after_conversion_can_be_restored():
    model = convert_syncbn_model(Net())
    optimizer = cases.sgd(model.parameters())  # holds the exact values
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.restore(model)
    assert torch.equal(model(x()), Net()(x()))


def test_anything_but_a_module_is_refused():
    with pytest.raises(TypeError, match="convert_syncbn_model got list"):
        convert_syncbn_model([Net()])


def test_a_wrong_group_is_refused_and_nothing_converted():
    model = Net()
    with pytest.raises(TypeError, match="process_group is"):
        convert_syncbn_model(model, [0, 1])
    assert type(model.norm) is nn.BatchNorm1d


def test_a_lazy_layer_is_refused_and_nothing_converted():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="not initialized yet"):
        convert_syncbn_model(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_a_parametrization_is_refused():
    layer = nn.BatchNorm1d(2)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(ValueError, match="with a parametrization"):
        convert_syncbn_model(nn.Sequential(layer))


def test_a_batch_norm_that_amp_prepared_on_its_own_is_refused():
    layer = nn.BatchNorm1d(2)
    amp.initialize(layer, cases.sgd(layer.parameters()), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="prepared on its own"):
        convert_syncbn_model(layer)
