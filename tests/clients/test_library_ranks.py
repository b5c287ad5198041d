"""Libraries of today that wrap a prepared model for two ranks, against plain DDP."""

import importlib.util
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from tests.clients.classes import labelled_rows
from tests.clients.libraries import declare_torchvision_operators
from tests.support.loops import MIXED, prepared, same, sgd, values

pytestmark = [pytest.mark.clients, pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


class Classifier(nn.Sequential):
    def forward(self, x, labels=None):
        logits = super().forward(x).float()
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels)}


def initialized(level):
    torch.manual_seed(0)
    model = Classifier(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return prepared(level, lambda p: sgd(p, momentum=0.9), model)


def by_accelerate(model, optimizer):
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(model, optimizer)
    return net, optimizer, accelerator.backward, accelerator.clip_grad_norm_


def by_fabric(model, optimizer):
    lightning = importlib.import_module("lightning")
    strategy = lightning.fabric.strategies.DDPStrategy(process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net, optimizer = fabric.setup(model, optimizer)
    return net, optimizer, fabric.backward, torch.nn.utils.clip_grad_norm_


def by_hand(model, optimizer):
    """As torchtitan's loop."""
    net = DistributedDataParallel(model)
    return net, optimizer, torch.Tensor.backward, torch.nn.utils.clip_grad_norm_


def train_rank(rank, level, wrap):
    declare_torchvision_operators()  # lightning's metrics import it
    names = ("LOCAL_RANK", "RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for at, value in enumerate((rank, 2)):
        os.environ.update(dict.fromkeys(names[at], str(value)))
    os.environ.update(TORCHELASTIC_RUN_ID="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    model, optimizer = initialized(level)
    net, stepper, backward, clip = wrap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for index in range(4):
        x, y = labelled_rows(2 * index + rank)
        if index == 2 and rank == 1 and level in ("O1", "O2"):
            x[0] = torch.inf  # all ranks skip
        stepper.zero_grad()
        loss = F.cross_entropy(net(x).float(), y)
        with amp.scale_loss(loss, stepper) as scaled_loss:
            backward(scaled_loss)
        clip(amp.master_params(stepper), 0.1)
        stepper.step()
        scheduler.step()
    found = values(amp.master_params(optimizer)), values(model.state_dict().values())
    scale = amp.state_dict()
    amp.restore(model, optimizer)
    return found, scale


@pytest.mark.parametrize("wrap", [by_accelerate, by_fabric], ids=["accelerate", "lightning"])
@pytest.mark.parametrize("level", MIXED)
def test_it_trains_bit_by_bit_as_plain_ddp(request, on_two_ranks, level, wrap):
    if not importlib.util.find_spec(request.node.callspec.id.split("-")[-1]):
        pytest.skip("not installed")
    found = on_two_ranks(train_rank, level, wrap)
    expected = on_two_ranks(train_rank, level, by_hand)
    assert same(found, expected)
    assert same(*(result for result, _ in found))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x, y = labelled_rows(index)
        return {"x": x[0], "labels": y[0]}


def train_by_trainer(rank, level, folder):
    declare_torchvision_operators()
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    transformers = importlib.import_module("transformers")
    model, optimizer = initialized(level)
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, ddp_backend="gloo", max_steps=4, per_device_train_batch_size=2,
        max_grad_norm=0.1, save_strategy="no", report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant", seed=0,
    )  # fmt: skip
    options = {"optimizers": (optimizer, None), "train_dataset": Rows()}
    transformers.Trainer(model, arguments, **options).train()
    found = values(amp.master_params(optimizer))
    agree = all(map(torch.equal, found, model.state_dict().values()))
    amp.restore(model, optimizer)
    return found, agree


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_trainer_trains_a_prepared_model(on_two_ranks, level, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (first, agree), (second, _) = on_two_ranks(train_by_trainer, level, str(tmp_path))
    in_fp32 = on_two_ranks(train_by_trainer, "O0", str(tmp_path))[0][0]
    assert agree
    assert same(first, second)
    torch.testing.assert_close(first, in_fp32, rtol=0, atol=2**-8)
