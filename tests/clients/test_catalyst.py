"""Catalyst 21.12: its apex engines under a ``SupervisedRunner`` and with two models."""

import csv
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from apex import amp
from tests.clients.libraries import free_port, need, of_its_time

dl = need("catalyst.dl")
need("catalyst.engines.apex")

pytestmark = of_its_time

LEVELS = ("O0", "O1", "O2", "O4", "O5")


def data(count=32):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=2e-2)


def apex_engine(level):
    return dl.APEXEngine("cpu", apex_kwargs={"opt_level": level})


def train(engine, epochs, folder=None, resume=None):
    """Trains as catalyst's README does; returns the runner and each epoch's training loss."""
    model = net()
    losses = []

    class Losses(dl.Callback):
        def on_epoch_end(self, runner):
            losses.append(float(runner.epoch_metrics["train"]["loss"]))

    runner = dl.SupervisedRunner()
    runner.train(
        model=model, optimizer=adam(model), criterion=nn.CrossEntropyLoss(), engine=engine,
        loaders={"train": data(), "valid": data()}, num_epochs=epochs, logdir=folder,
        callbacks={"losses": Losses(dl.CallbackOrder.external + 1)},
        valid_loader="valid", valid_metric="loss", minimize_valid_metric=True, resume=resume,
    )  # fmt: skip
    return runner, losses


@pytest.mark.parametrize("level", LEVELS)
def test_the_engine_trains_as_fp32_does(level):
    _, expected = train(dl.DeviceEngine("cpu"), 6)  # first: O1 casts whatever this thread runs
    _, losses = train(apex_engine(level), 6)
    assert losses[-1] < losses[0] / 2
    assert_close(losses, expected, rtol=0 if level == "O0" else 0.05, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_notebooks_second_run_resumes_from_the_first_ones_checkpoint(level, tmp_path):
    whole, _ = train(apex_engine(level), 4)
    expected = whole.engine.pack_checkpoint(model=whole.model, optimizer=whole.optimizer)
    del whole
    gc.collect()

    first, _ = train(apex_engine(level), 2, tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoints" / "last_full.pth"
    second, _ = train(apex_engine(level), 2, tmp_path / "second", resume=str(checkpoint))
    second = second.engine.pack_checkpoint(model=second.model, optimizer=second.optimizer)
    second["amp"] = {"loss_scaler0": second["amp"]["loss_scaler1"]}  # 0 is that of the first run
    assert_close(second, expected, rtol=0, atol=0)
    del first


def test_a_pair_of_models_trains():
    """catalyst hands dicts of models and optimizers to ``initialize`` as lists."""

    class Gan(dl.Runner):
        def handle_batch(self, batch):
            real, _ = batch
            for name, sign in (("critic", 1), ("generator", -1)):
                fake = self.model["generator"](torch.randn(len(real), 2))
                gap = (self.model["critic"](fake) - self.model["critic"](real)).float().mean()
                loss = F.softplus(sign * gap)
                if self.is_train_loader:
                    optimizer = self.optimizer[name]
                    optimizer.zero_grad()
                    self.engine.backward_loss(loss, self.model[name], optimizer)
                    self.engine.optimizer_step(loss, self.model[name], optimizer)
                self.batch_metrics[name] = loss

    torch.manual_seed(0)
    models = {"generator": nn.Linear(2, 6), "critic": nn.Linear(6, 1)}
    before = {name: model.weight.detach().clone() for name, model in models.items()}
    runner = Gan()
    runner.train(
        model=models, optimizer={name: adam(model) for name, model in models.items()},
        engine=apex_engine("O2"), loaders={"train": data()}, num_epochs=2,
    )  # fmt: skip
    assert set(amp.state_dict()) == {"loss_scaler0"}
    for name, model in runner.model.items():
        assert model.weight.dtype == torch.float16
        moved = next(amp.master_params(runner.optimizer[name])) - before[name]
        assert moved.abs().max() > 2e-2  # more than one step of Adam


@pytest.mark.slow
@pytest.mark.distributed
def test_the_distributed_engine_trains(tmp_path):
    model = net()
    dl.SupervisedRunner().train(
        model=model, optimizer=adam, criterion=nn.CrossEntropyLoss(),
        engine=dl.DistributedDataParallelAPEXEngine(
            port=free_port(), num_node_workers=2, sync_bn=True,
            process_group_kwargs={"backend": "gloo"}, apex_kwargs={"opt_level": "O5"},
        ),
        callbacks=[dl.OptimizerCallback(metric_key="loss")],
        loaders={"train": data(), "valid": data()}, num_epochs=3, logdir=str(tmp_path),
        valid_loader="valid", valid_metric="loss", minimize_valid_metric=True,
    )  # fmt: skip
    with open(tmp_path / "logs" / "train.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[2] < losses[1] < losses[0]
