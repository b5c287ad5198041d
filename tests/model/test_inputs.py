"""Inputs and outputs of a model: containers, objects with a ``to``, arguments that are not cast."""

import collections.abc
import copy
import dataclasses
import pickle
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from apex import amp
from tests.model.nets import LOW, Echo, converted
from tests.support.features import TORCH_VERSION
from tests.support.loops import Body, descend, every, messages, net, prepared

Point = namedtuple("Point", "x y")


class Words(list):
    pass


class Scaled(namedtuple("Scaled", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, 2)


@dataclass
class Batch:
    image: Any
    label: Any = None


@dataclass(frozen=True)
class FrozenBatch:
    image: Any


@dataclass(slots=True)
class SlotBatch:
    image: Any


@dataclass
class Output(OrderedDict):
    """Keeps items and attributes in step, as model outputs of large libraries do."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Attributes(dict):
    """Answers to every attribute name, ``to`` included; raises KeyError for Python's."""

    def __getattr__(self, name):
        return self[name] if name.startswith("__") else "nothing"

    def __getstate__(self):  # as every object has from Python 3.11 on
        return vars(self) or None


CONTAINERS = [
    lambda t: [t, 1],
    lambda t: (t, "a"),
    lambda t: {"x": t, 3: None},
    lambda t: Point(t, 2),
    Scaled,
    lambda t: Words([t, "w"]),
    lambda t: deque([t, 1], maxlen=2),
    lambda t: UserList([t, 1]),
    lambda t: OrderedDict(b=t, a=1),
    lambda t: defaultdict(list, x=t),
    lambda t: UserDict(x=t),
    lambda t: Attributes(x=t),
    lambda t: Batch(t, label=3),
    FrozenBatch,
    SlotBatch,
    lambda t: Output(logits=t),
    lambda t: torch.return_types.max((t, torch.tensor([0]))),
    lambda t: [{"a": (Point(t, [t]),)}, Batch(image=[t])],
]


def floats(value):
    """The floating tensors in a container, in any of these forms."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict | UserDict):
        value = value.values()
    elif not isinstance(value, list | tuple | deque | UserList):
        return []
    return [tensor for item in value for tensor in floats(item)]


def test_tensors_in_containers_are_cast_in_a_container_of_the_same_type():
    model = converted(Echo())
    for make in CONTAINERS:
        given = make(torch.ones(2))
        output = model(given)
        (seen,), _ = model.seen
        assert type(seen) is type(output) is type(given)
        assert {tensor.dtype for tensor in floats(seen)} == {LOW}
        assert {tensor.dtype for tensor in floats(given)} == {torch.float32}
        assert {tensor.dtype for tensor in floats(output)} == {torch.float32}
        given = make(torch.arange(2))
        model(given)
        assert model.seen[0][0] is given


SCALE = torch.ones(1)


@dataclass
class Settings:
    """The class itself is an input: its default is no part of one."""

    scale: Any = SCALE


OTHERS = [None, 3, "a", torch.arange(2), torch.ones(1, dtype=torch.complex64), nn.ReLU(), Settings]


@pytest.mark.parametrize("value", OTHERS)
def test_what_holds_no_floating_tensor_stays(value):
    model = converted(Echo())
    model([value], name=value)
    assert model.seen[0][0][0] is model.seen[1]["name"] is value


@dataclass
class Node:
    x: Any
    parent: Any = None


def test_dataclasses_that_refer_to_each_other_are_cast_once():
    root = Node(torch.ones(2))
    root.parent = Node(torch.ones(2), parent=root)
    model = converted(Echo())
    model(root)
    (seen,) = model.seen[0]
    assert seen.x.dtype is seen.parent.x.dtype is LOW
    assert root.x.dtype is root.parent.x.dtype is torch.float32


def test_a_read_only_mapping_becomes_a_dict():
    model = converted(Echo())
    model(types.MappingProxyType({"x": torch.ones(2)}))
    assert type(model.seen[0][0]) is dict
    assert model.seen[0][0]["x"].dtype is LOW


# -- objects with a ``to`` ------------------------------------------------------------------------


class Tokens:
    """Ids and features; ``to`` passes on whatever it is given, as most do."""

    def __init__(self, ids, x):
        self.ids, self.x = ids, x

    def to(self, *args, **kwargs):
        return Tokens(self.ids.to(*args, **kwargs), self.x.to(*args, **kwargs))


class InPlace(Tokens):
    def to(self, target):
        self.ids, self.x = self.ids.to(target), self.x.to(target)


class Encoding(UserDict):
    """A tokenizer's batch, which changes itself."""

    @property
    def ids(self):
        return self["ids"]

    @property
    def x(self):
        return self["x"]

    def to(self, target):
        self.data = {key: value.to(target) for key, value in self.data.items()}
        return self


@dataclass
class Record:
    ids: torch.Tensor
    x: torch.Tensor

    def to(self, target):
        return dataclasses.replace(self, ids=self.ids.to(target), x=self.x.to(target))


class Graphs(Tokens):
    """Moves between devices alone, as batches of graphs do."""

    def to(self, device):
        return Graphs(self.ids.to(device=device), self.x.to(device=device))


class Named(Tokens):
    def to(self, device):
        if device not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {device}")
        return self


IDS = torch.tensor([257, 4097])
CASTABLE = [Tokens, InPlace, lambda ids, x: Encoding(ids=ids, x=x), Record]


class Table(nn.Embedding):
    """Looks rows up by the ids of an object."""

    def forward(self, batch):
        self.seen = batch
        return super().forward(batch.ids).sum()


@pytest.mark.parametrize("make", CASTABLE)
def test_integers_in_an_object_with_a_to_train_their_own_rows(make, level):
    batch = make(IDS, torch.ones(2))
    model = converted(Table(5000, 1), level)
    model(batch).backward()
    assert model.weight.grad.float().nonzero()[:, 0].tolist() == [257, 4097]
    assert batch.x.dtype is torch.float32
    assert batch.ids is IDS
    low = {"O1": torch.float32, "O2": torch.float16, "O5": torch.bfloat16}
    assert model.seen.x.dtype is low[level]


STAYING = [(make, "O4") for make in CASTABLE] + [(Graphs, "O1"), (Graphs, "O0")]


@pytest.mark.parametrize(("make", "level"), STAYING)
def test_at_levels_that_cast_no_weights_objects_stay(make, level):
    batch = make(IDS, torch.ones(2, dtype=torch.float64))
    model = converted(Echo(), level)
    model(batch)
    assert model.seen[0][0] is batch
    assert batch.x.dtype is torch.float64


def test_an_object_whose_to_takes_no_dtype_or_casts_nothing_stays():
    model = converted(Echo())
    low = torch.ones(2, dtype=LOW)
    for batch in (Graphs(IDS, low.float()), Named(IDS, low), InPlace(IDS, IDS), Tokens(IDS, low)):
        before = batch.x
        model([batch])
        assert model.seen[0][0][0] is batch
        assert batch.x is before


@pytest.mark.parametrize("base", [dict, UserDict])
def test_the_items_of_a_dict_are_cast_whatever_its_to_takes(base):
    class Moving(base):
        """Moves between devices alone, as a tokenizer's batch does."""

        def to(self, device):
            if isinstance(device, torch.dtype):
                raise TypeError
            return self

    batch = Moving(ids=IDS, x=torch.ones(2))
    model = converted(Echo())
    output = model(batch)
    seen = model.seen[0][0]
    assert [type(seen), seen["x"].dtype, seen["ids"] is IDS] == [Moving, LOW, True]
    assert [type(output), output["x"].dtype] == [Moving, torch.float32]


def test_packed_sequences_are_cast_or_stay_by_their_data():
    model = converted(Echo())
    floating = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    ids = pack_sequence([torch.tensor([257, 4097]), torch.tensor([1])])
    model(floating, ids)
    cast, same = model.seen[0]
    assert type(cast) is PackedSequence
    assert cast.data.dtype is LOW
    assert cast.batch_sizes.dtype is torch.int64
    assert same is ids


def test_out_of_memory_in_a_to_is_raised():
    class Large(Tokens):
        def to(self, target):
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        converted(Echo())(Large(IDS, torch.ones(2)))


# -- arguments that are not cast ------------------------------------------------------------------


class Timed(nn.Module):
    """Computes an embedding of its time in fp32, in a part of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 1)
        self.body = nn.Linear(2, 2)
        with torch.no_grad():
            self.embed.weight.fill_(1.0)
            self.embed.bias.zero_()
        self.seen = None

    def forward(self, x, timestep, *, scale=None):
        self.seen = x.dtype, timestep
        return self.body(x).sum() * 0 + self.embed(timestep[:, None])


@every(by_name=[False, True], level=["O2", "O3", "O5"])
def test_a_named_input_arrives_exactly(level, by_name):
    options = {"fp32_modules": ["embed"], "fp32_inputs": ("timestep",), "cast_model_outputs": None}
    model = converted(Timed(), level, **options)
    times = torch.tensor([998.39, 937.5, 750.3])
    embedded = []
    model.embed.register_forward_hook(lambda module, args, output: embedded.append(args[0]))
    if by_name:
        model(torch.ones(1, 2), timestep=times)
    else:
        model(torch.ones(1, 2), times)
    dtype, seen = model.seen
    assert dtype is {"O5": LOW}.get(level, torch.float16)
    assert seen is times
    assert torch.equal(embedded[0][:, 0], times)


def test_without_it_the_input_is_rounded_and_whole_containers_may_be_named():
    model = converted(Timed(), fp32_modules=["embed"])
    model(torch.ones(1, 2), torch.tensor([998.39]))
    assert model.seen[1].item() == 1000.0
    model = converted(Echo(), fp32_inputs=["codes"])
    codes = {"a": [torch.tensor([257.0])]}
    model(torch.ones(1), codes=codes)
    assert model.seen[1]["codes"] is codes
    assert model.seen[0][0].dtype is LOW


WRONG_NAMES = [
    (["time_step"], "O5", ValueError, r"'time_step'.*mean timestep"),
    ("timestep", "O5", TypeError, r"fp32_inputs=\['timestep'\]"),
    ([3], "O5", ValueError, "holds 3, which is no argument"),
    (["other"], "O5", ValueError, "Available: scale, timestep, x"),
    (["timestep"], "O1", ValueError, "O2, O3 or O5"),
    (["timestep"], "O0", ValueError, "O2, O3 or O5"),
]


@pytest.mark.parametrize(("names", "level", "error", "words"), WRONG_NAMES)
def test_wrong_names_are_refused_before_anything_changes(names, level, error, words):
    model = Timed()
    with pytest.raises(error, match=words):
        amp.initialize(model, opt_level=level, fp32_inputs=names, verbosity=0)
    assert type(model) is Timed
    assert model.body.weight.dtype is torch.float32


# -- what casts are given stays as it is ----------------------------------------------------------


class View(collections.abc.MutableMapping):
    """As the node data of a DGL graph."""

    def __init__(self, store):
        self.store = store

    def __getitem__(self, key):
        return self.store[key]

    def __setitem__(self, key, value):
        self.store[key] = value

    def __delitem__(self, key):
        del self.store[key]

    def __iter__(self):
        return iter(self.store)

    def __len__(self):
        return len(self.store)


class Store:
    """Moves and casts its items in place."""

    def __init__(self, **items):
        self.items = items

    def to(self, *args):
        for name, item in self.items.items():
            self.items[name] = item.to(*args)
        return self


class Items(tuple):
    pass


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_casts_never_write_into_what_they_were_given(level):
    x = torch.tensor([1 / 3])
    model = converted(Echo(), level)
    for given, items in ((View({"x": x}), dict), (Store(x=x), lambda store: store.items)):
        model(given)
        seen = items(model.seen[0][0])["x"]
        assert seen.dtype is (LOW if level == "O5" else torch.float16)
        assert items(given)["x"] is x


class Noise(torch.Tensor):
    """Has a ``to`` that needs an attribute, which slices and results lack, as BigGAN's."""

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.kind = self.kind
        return moved


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_tensors_of_a_subclass_keep_their_attributes_and_need_none(level):
    def forward(self, x, kinds):
        kinds.append(getattr(x, "kind", None))
        return self.net(x)

    model = amp.initialize(Body(forward, net=net()), opt_level=level, verbosity=0)
    noise = torch.ones(3, 4).as_subclass(Noise)
    noise.kind = "normal"
    kinds = []
    outputs = model(noise, kinds), model(noise[:2], kinds)
    assert kinds == ["normal", None]
    assert [type(output) for output in outputs] == [Noise, Noise]
    assert torch.equal(outputs[0][:2], outputs[1])


def test_tuples_keep_their_attributes():
    model = converted(Echo())
    for given in (Scaled(torch.ones(1)), Items([torch.ones(1)])):
        given.tag = "kept"
        model(given)
        seen = model.seen[0][0]
        assert (type(seen), seen.tag, seen[0].dtype) == (type(given), "kept", LOW)


# -- arguments that are written -------------------------------------------------------------------


class Caching(nn.Linear):
    def forward(self, x, cache=None):
        y = super().forward(x)
        if cache is not None:
            target = cache["keys"][0] if isinstance(cache, dict) else cache
            target.copy_(y.detach())
        return y


@pytest.mark.parametrize("make", [lambda t: t, lambda t: {"keys": [t]}], ids=["tensor", "nested"])
@every(level=["O2", "O5"], by_name=[False, True])
def test_an_argument_that_is_written_in_vain_is_named_once(caplog, level, make, by_name):
    model = converted(Caching(2, 2), level)
    cache = torch.zeros(1, 2)
    for _ in range(2):
        if by_name:
            model(torch.ones(1, 2), cache=make(cache))
        else:
            model(torch.ones(1, 2), make(cache))
    assert cache.count_nonzero() == 0
    (text,) = messages(caplog)
    assert "writes into its argument cache" in text
    assert "fp32_inputs=['cache']" in text


class Filling(nn.Linear):
    """Leaves its result in its argument, as LoFTR does."""

    def forward(self, batch):
        if isinstance(batch, list):
            batch.append(super().forward(batch[0]))
        else:
            batch["x"] = super().forward(batch["x"])


FILLED = [("O4", torch.float32, True), ("O5", LOW, True)]
FILLED += [(level, torch.float32, False) for level in ("O2", "O5")]


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: {"x": x}], ids=["list", "dict"])
@pytest.mark.parametrize(("level", "dtype", "arrives"), FILLED)
def test_a_result_that_is_left_in_an_argument_arrives_or_is_named_once(
    caplog, level, dtype, arrives, make
):
    model = converted(Filling(2, 2), level)
    for _ in range(2):
        batch = make(torch.ones(1, 2, dtype=dtype))
        model(batch)
        *_, last = batch.values() if isinstance(batch, dict) else batch
        assert last.requires_grad == arrives
    texts = messages(caplog)
    assert len(texts) == (not arrives)
    for text in texts:
        assert "writes into its argument batch" in text
        assert "fp32_inputs=['batch']" in text


UNCAST = [
    *((level, torch.float32, {}) for level in ("O0", "O1", "O4")),
    ("O5", LOW, {}),
    ("O5", torch.float32, {"fp32_inputs": ["cache"]}),
]


@pytest.mark.parametrize(("level", "dtype", "options"), UNCAST)
def test_a_cache_that_is_not_cast_is_written_and_nothing_is_said(caplog, level, dtype, options):
    cache = torch.zeros(1, 2, dtype=dtype)
    converted(Caching(2, 2), level, **options)(torch.ones(1, 2), cache)
    assert cache.count_nonzero() > 0
    assert not caplog.records


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="this torch traces no copy.copy")
def test_such_inputs_compile_as_one_graph(level):
    class Sum(nn.Module):
        def forward(self, point, batch, tokens, named, exact):
            return point.x + batch.image + tokens.x + named["a"][0] + exact

    torch._dynamo.reset()
    options = {"fp32_inputs": ["exact"]} if level == "O5" else {}
    model = converted(Sum(), level, **options)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.full((2,), 1 / 3)
    for batch in (Batch(x), FrozenBatch(x)):
        inputs = Point(x, 1), batch, Tokens(torch.arange(2), x), {"a": [x]}, x
        assert torch.equal(compiled(*inputs), model(*inputs))


class Flexible(Timed):
    def forward(self, x, **kwargs):
        return super().forward(x, **kwargs)


class FlexibleArgs(Timed):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_an_input_among_kwargs_has_a_name_and_among_args_a_position():
    times = torch.tensor([998.39])
    for kind, given, args, kwargs in (
        (Flexible, "timestep", (), {"timestep": times}),
        (FlexibleArgs, "timestep", (), {"timestep": times}),
        (FlexibleArgs, 1, (times,), {}),
    ):
        model = converted(kind(), fp32_modules=["embed"], fp32_inputs=[given])
        model(torch.ones(1, 2), *args, **kwargs)
        assert model.seen[1] is times
    with pytest.raises(ValueError, match="1, which is no argument of the model's forward"):
        converted(Flexible(), fp32_inputs=[1])


class Tree(nn.Linear):
    """Takes and returns nodes that know their parents."""

    def forward(self, root):
        child = {"h": super().forward(root["h"]), "parent": root}
        root["children"].append(child)
        return child


def test_a_container_may_hold_itself(level):
    model, optimizer = prepared(level, model=Tree(4, 4))
    root = {"h": torch.ones(2, 4), "children": []}
    root["root"] = root
    child = model(root)
    descend(child["h"].float().square().mean() / 64, optimizer)
    assert {*child} == {"h", "parent"}
    model.config = {"scale": 2}
    model.config["root"] = model.config
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.config["root"] is copied.config
