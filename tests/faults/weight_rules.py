"""Rules that write weights from outside: into masters, into the model, by files."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from torch import nn

from tests.faults.machine import CASTING, INDEX, SEEDS, WHICH, Machine
from tests.support.reference.loops import LEVELS
from tests.training import cases

CALLS = st.sampled_from(["write_a_master", "write_a_weight", "write_a_weight"])
WRITES = st.lists(st.tuples(CALLS, WHICH, INDEX), max_size=2)


class WeightRules(Machine):
    """What a script does with weights, none of which is a step."""

    @precondition(lambda self: self.prepared)
    @rule(training=st.booleans())
    def forward(self, training):
        self.model.train(training)
        with torch.no_grad():
            out = self.model(cases.batch()[0])
        self.model.train()
        self.shows()
        assert out.dtype is (LEVELS[self.level].compute if self.level in CASTING else torch.float32)
        assert out.isfinite().all()

    @precondition(lambda self: self.prepared)
    @rule(which=WHICH, index=INDEX, how=st.sampled_from(["copy_", "data", "assign"]))
    def write_a_master(self, which, index, how):
        names = self.names[which]
        name = names[index % len(names)]
        param = self.stepped(which)[name]
        value = (param.detach() * 0.75 + 1 / 3).clamp(-1, 1)
        if how == "copy_":
            with torch.no_grad():
                param.copy_(value)
        elif how == "data":
            param.data.copy_(value)
        else:
            param.data = value
        self.shadow.write_master(name, value)

    @precondition(lambda self: self.prepared)
    @rule(which=WHICH, index=INDEX, how=st.sampled_from(["copy_", "init", "assign"]))
    def write_a_weight(self, which, index, how):
        names = self.names[which]
        name = names[index % len(names)]
        param = self.params()[name]
        value = param.detach().clone()
        value.view(-1)[1:] = 0.25
        if how == "copy_":
            with torch.no_grad():
                param.copy_(value)
        elif how == "init":
            with torch.no_grad():
                nn.init.constant_(param.view(-1)[1:], 0.25)
        else:
            param.data = value
        self.shadow.write_model(name, value)

    @precondition(lambda self: self.prepared and self.shadow.written)
    @rule(index=INDEX)
    def put_back_what_torch_does_not_count(self, index):
        names = sorted(self.shadow.written.keys() - self.shadow.unseen)
        if names:
            name = names[index % len(names)]
            before = self.shadow.shown_before(name)
            self.params()[name].data.copy_(before)
            self.shadow.written[name] = before

    @precondition(lambda self: self.prepared)
    @rule(part=st.sampled_from(["first", "norm", "second", "last"]), seed=SEEDS)
    def load_a_submodule(self, part, seed):
        torch.manual_seed(seed)
        module = self.model.get_submodule(part)
        loaded = {name: torch.rand_like(p.float()) for name, p in module.named_parameters()}
        module.load_state_dict(loaded, strict=False)
        if part == "second":
            loaded["first.weight"] = loaded.pop("weight")
        for name, value in loaded.items():
            self.shadow.write_both(name if "." in name else f"{part}.{name}", value)

    @precondition(lambda self: self.prepared)
    @rule(assign=st.booleans())
    def swap_for_an_evaluation(self, assign):
        self.forward(training=False)
        params = list(self.model.parameters())
        own = cases.values(params)
        for values in ([value * 0.5 for value in own], own):
            cases.change(params, values, "data" if assign else "copy_")
            with torch.no_grad():
                self.model(cases.batch()[0])
