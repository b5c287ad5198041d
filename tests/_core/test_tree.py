import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from apex._core.tree import cast_arguments, cast_tensors, map_tensors

Point = namedtuple("Point", "x y")
LOW = torch.bfloat16


class Words(list):
    pass


class Pair(tuple):
    pass


class Scaled(namedtuple("Scaled", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, 2)


@dataclass
class Batch:
    image: Any
    label: Any = None
    seen: list = field(default_factory=list, init=False)


@dataclass(frozen=True)
class FrozenBatch:
    image: Any

    def __post_init__(self):
        if not isinstance(self.image, torch.Tensor):
            raise TypeError("image")


@dataclass(slots=True)
class SlotBatch:
    image: Any


@dataclass
class Output(OrderedDict):
    """Keeps items and attributes in step, as model outputs of large libraries do."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                self[f.name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Attributes(dict):
    """Answers to every attribute name, ``to`` included."""

    def __getattr__(self, name):
        return self.get(name, "nothing")


class UserBatch:
    def __init__(self, x):
        self.x = x

    def to(self, target):
        return UserBatch(self.x.to(target))


class DictBatch(dict):
    def to(self, target):
        return "own conversion"


class InPlaceBatch:
    def __init__(self, x):
        self.x = x

    def to(self, target):
        self.x = self.x.to(target)


def tensor():
    return torch.ones(2)


def cast(obj):
    return cast_tensors(obj, LOW)


CONTAINERS = {
    "list": lambda t: [t, 1],
    "tuple": lambda t: (t, "a"),
    "dict": lambda t: {"x": t, 3: None},
    "namedtuple": lambda t: Point(t, 2),
    "namedtuple with its own constructor": Scaled,
    "list subclass": lambda t: Words([t, "w"]),
    "tuple subclass": lambda t: Pair((t, 1)),
    "OrderedDict": lambda t: OrderedDict(b=t, a=1),
    "defaultdict": lambda t: defaultdict(list, x=t),
    "UserDict": lambda t: UserDict(x=t),
    "deque": lambda t: deque([t, 1], maxlen=5),
    "dict of attributes": lambda t: Attributes(x=t),
    "dataclass": lambda t: Batch(t, label=3),
    "frozen dataclass": FrozenBatch,
    "dataclass with slots": SlotBatch,
    "dict and dataclass": lambda t: Output(logits=t),
    "return type of torch": lambda t: torch.return_types.max((t, torch.tensor([0]))),
    "nested": lambda t: [{"a": (Point(t, [t]),)}, Batch(image=[t])],
}


def tensors_in(obj):
    found = []
    map_tensors(lambda t: found.append(t) or t, obj)
    return found


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_floating_tensors_are_cast_and_containers_keep_their_types(make):
    obj = make(tensor())
    result = cast(obj)
    assert type(result) is type(obj)
    assert [t.dtype for t in tensors_in(result)] == [
        LOW if t.is_floating_point() else t.dtype for t in tensors_in(obj)
    ]
    assert len(tensors_in(result)) > 0


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_the_container_given_is_not_changed(make):
    obj = make(tensor())
    cast(obj)
    assert all(t.dtype is not LOW for t in tensors_in(obj))


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_the_same_object_comes_back_where_nothing_is_to_be_cast(make):
    obj = make(tensor().to(LOW))
    assert cast(obj) is obj


def test_a_read_only_mapping_becomes_a_dict():
    given = {"x": tensor()}
    result = cast([MappingProxyType(given)])
    assert type(result[0]) is dict
    assert result[0]["x"].dtype is LOW
    assert given["x"].dtype is torch.float32
    given["self"] = view = MappingProxyType(given)
    result = cast(view)
    assert type(result) is dict
    assert result["self"] is result


@dataclass(frozen=True, eq=False)
class ReadOnlyBatch(Mapping):
    x: Any

    def __getitem__(self, name):
        return getattr(self, name)

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_dataclass_that_is_a_read_only_mapping_keeps_its_type(cyclic):
    given = ReadOnlyBatch([tensor()])
    if cyclic:
        given.x.append(given)
    result = cast(given)
    assert type(result) is ReadOnlyBatch
    assert result["x"][0].dtype is LOW
    assert result["x"][1:] == [result] * cyclic


def test_unchanged_branches_keep_their_identity():
    kept = {"a": [torch.arange(3)], "b": "text"}
    result = cast([kept, tensor()])
    assert result[0] is kept


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(2),
        torch.ones(1, dtype=torch.complex64),
        torch.ones(1, dtype=torch.bool),
        torch.ones(1).to(torch.float8_e4m3fn),
        numpy.ones(2, dtype=numpy.float32),
        "text",
        b"bytes",
        None,
        3.5,
        nn.Linear(1, 1),
        torch.Tensor,
        {1.0, 2.0},
        range(3),
        torch.float32,
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_holds_no_floating_tensor_is_untouched(leaf):
    assert cast(leaf) is leaf
    assert cast([leaf])[0] is leaf


def test_doubles_are_cast():
    assert cast((torch.ones(1, dtype=torch.float64),))[0].dtype is LOW


def test_casts_are_differentiable():
    x = tensor().requires_grad_()
    cast({"x": x})["x"].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_tensor_subclasses_are_cast():
    assert cast([nn.Parameter(tensor())])[0].dtype is LOW


def test_an_object_with_to_converts_itself():
    assert cast([UserBatch(tensor())])[0].x.dtype is LOW


def test_the_own_to_of_a_container_goes_before_its_items():
    assert cast(DictBatch(x=tensor())) == "own conversion"


def test_an_object_whose_to_returns_nothing_is_kept():
    batch = InPlaceBatch(tensor())
    assert cast(batch) is batch
    assert batch.x.dtype is LOW


def test_packed_sequences_keep_their_structure():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = cast(packed)
    assert type(result) is type(packed)
    assert result.data.dtype is LOW
    assert result.batch_sizes.dtype is torch.int64


def test_without_a_conversion_objects_with_to_stay():
    batch = UserBatch(tensor())
    assert map_tensors(lambda t: t.to(LOW), batch) is batch


def test_one_tensor_stays_one_tensor():
    x = tensor()
    batch = Batch(x, label=[x, {"x": x}, (x,)])
    result = cast(batch)
    found = [result.image, result.label[0], result.label[1]["x"], result.label[2][0]]
    assert found[0].dtype is LOW
    assert all(each is found[0] for each in found)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_one_container_stays_one_container(make):
    shared = make(tensor())
    first, second = cast([shared, {"again": shared}])
    assert first is second["again"]
    assert first is not shared


def test_arguments_that_are_one_object_stay_one():
    x, nest = tensor(), [tensor()]
    args, kwargs = cast_arguments((x, nest, x), {"x": x, "nest": nest}, LOW)
    assert args[0].dtype is LOW
    assert args[0] is args[2] is kwargs["x"]
    assert args[1] is kwargs["nest"]
    assert args[1][0].dtype is LOW


def ring(kind):
    """A container that holds a tensor and itself, and how to reach both."""
    if kind == "list":
        obj = [tensor()]
        obj.append(obj)
        return obj, lambda o: o[0], lambda o: o[1]
    if kind == "dict":
        obj = {"x": tensor()}
        obj["self"] = obj
        return obj, lambda o: o["x"], lambda o: o["self"]
    if kind == "tuple":
        obj = (tensor(), [])
        obj[1].append(obj)
        return obj, lambda o: o[0], lambda o: o[1][0]
    if kind == "subclasses":
        obj = Words([tensor()])
        obj.append(Point(Attributes(back=obj), 1))
        return obj, lambda o: o[0], lambda o: o[1][0]["back"]
    obj = Batch(tensor())
    obj.label = Batch(tensor(), label=obj)
    return obj, lambda o: o.image, lambda o: o.label.label


RINGS = pytest.mark.parametrize("kind", ["list", "dict", "tuple", "subclasses", "dataclass"])


@RINGS
def test_a_container_in_itself_is_cast_and_keeps_its_form(kind):
    obj, value, inner = ring(kind)
    result = cast(obj)
    assert type(result) is type(obj)
    assert value(result).dtype is LOW
    assert inner(result) is result
    assert value(obj).dtype is torch.float32
    assert inner(obj) is obj


@RINGS
def test_a_container_in_itself_comes_back_where_nothing_is_to_be_cast(kind):
    obj, *_ = ring(kind)
    assert map_tensors(lambda t: t, obj) is obj


def test_tensors_of_a_ring_are_mapped_once():
    obj, *_ = ring("dataclass")
    seen = []
    map_tensors(lambda t: seen.append(t) or t.to(LOW), obj)
    assert len(seen) == 2


def test_dataclass_fields_out_of_init_are_cast_too():
    batch = Batch(1)
    batch.seen.append(tensor())
    assert cast(batch).seen[0].dtype is LOW


def test_attributes_of_a_tuple_subclass_are_kept():
    pair = Pair((tensor(),))
    pair.note = "kept"
    assert cast(pair).note == "kept"


def test_items_and_fields_of_a_model_output_stay_the_same_tensor():
    result = cast(Output(loss=tensor(), logits=tensor()))
    assert result.logits is result["logits"]


def test_arguments_are_cast_by_position_and_by_name():
    args, kwargs = cast_arguments((tensor(), "a"), {"x": [tensor()], "n": 1}, LOW)
    assert args[0].dtype is LOW
    assert args[1] == "a"
    assert kwargs["x"][0].dtype is LOW
    assert kwargs["n"] == 1
