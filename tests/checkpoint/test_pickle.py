"""What saved files name, what loading them does, and where they load."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from apex import RNN, amp, normalization
from apex.amp import _amp_state
from tests.support import loops

PLAIN = ("O0", "O1", "O4")
"""Levels that cast no parameters."""


class Names(pickle.Unpickler):
    """Collects the modules and names that a file looks up while it is loaded."""

    def __init__(self, file):
        super().__init__(io.BytesIO(file))
        self.found = set()

    def find_class(self, module, name):
        self.found.add((module, name))
        return super().find_class(module, name)


def private(file):
    """Returns the modules of apex that a pickle names by a private part."""
    names = Names(file)
    names.load()
    ours = {module for module, _ in names.found if module.split(".")[0] == "apex"}
    return {module for module in ours if any(part[0] == "_" for part in module.split("."))}


class Custom(nn.Module):
    """A model of a script: modules of apex, batch norm, a buffer, a forward on the object."""

    def __init__(self):
        super().__init__()
        self.norm = normalization.FusedLayerNorm(4)
        self.mixed = normalization.MixedFusedRMSNorm(4)
        self.rnn = RNN.LSTM(4, 4, 1)
        self.batch_norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))
        self.forward = self.computed

    def computed(self, x):
        return self.batch_norm(self.mixed(self.norm(x))) + self.shift

    def forward(self, x):
        raise NotImplementedError


def trained_custom(level):
    model = Custom()
    options = {"fp32_modules": ["norm", nn.BatchNorm1d]} if level not in PLAIN else {}
    model, optimizer = loops.prepared(level, loops.OPTIMIZERS["Adam"], model, **options)
    loops.descend(model(torch.ones(2, 4)).float().sum(), optimizer)
    return model, optimizer


def saved_things(model, optimizer):
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    return {
        "model": model,
        "every module": list(model.modules()),
        "optimizer": optimizer,
        "pair": (model, optimizer),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": _amp_state.loss_scalers[0],
        "checkpoint": {name: part.state_dict() for name, part in parts.items()},
    }


@pytest.mark.parametrize("protocol", [2, 5])
def test_files_name_one_private_module_only(level, protocol):
    for name, thing in saved_things(*trained_custom(level)).items():
        file = pickle.dumps(thing, protocol)
        assert not private(file), name


class Nested(nn.Linear):
    """Keeps its ``__dict__`` inside another value, as scripts may."""

    def __getstate__(self):
        return {"all": self.__dict__}

    def __setstate__(self, state):
        super().__setstate__(state["all"])


class Reducing(nn.Linear):
    def __reduce__(self):
        return type(self), (self.in_features, self.out_features), {"note": 3}


@loops.every(protocol=[0, 5], make=[Nested, Reducing])
def test_a_plain_file_honours_the_class_s_own_way(make, protocol):
    model = amp.initialize(make(3, 2), opt_level="O4", verbosity=0)
    file = pickle.dumps(model, protocol)
    assert not private(file)
    loaded = pickle.loads(file)
    assert type(loaded) is make
    assert loaded.weight.shape == (2, 3)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_forward_set_on_the_object_is_bound_to_its_copies(level):
    model = amp.initialize(Custom(), opt_level=level, verbosity=0)
    for loaded in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert loaded.forward.__self__ is loaded
        assert loaded(torch.ones(2, 4)).shape == (2, 4)


def test_a_pickled_scaler_goes_on_by_itself():
    _, _optimizer = loops.prepared("O2")
    scaler = _amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._unskipped, scaler._scale_seq_len = 64.0, 7, 100
    for loaded in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert (loaded.dynamic, loaded._scale_seq_len) == (True, 100)
        assert (loaded.loss_scale(), loaded._unskipped) == (64.0, 7)
        loaded._loss_scale = 1.0
        assert scaler.loss_scale() == 64.0
