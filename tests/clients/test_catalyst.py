"""Catalyst 21.12: its apex engines under a ``SupervisedRunner`` and with two models."""

import csv
import gc

import pytest
from torch import nn
from torch.testing import assert_close

from tests.clients.classes import EXACT, LEVELS, adam, data, layers
from tests.clients.libraries import free_port, need, of_its_time
from tests.support.loops import at_levels

dl = need("catalyst.dl")
need("catalyst.engines.apex")

pytestmark = of_its_time
level = at_levels(*LEVELS)


def apex_engine(level):
    return dl.APEXEngine("cpu", apex_kwargs={"opt_level": level})


def run_engine(engine, epochs, folder=None, resume=None):
    """Trains as catalyst's README does; returns the runner and each epoch's training loss."""
    model = layers()
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


def test_the_engine_trains_as_fp32_does(level):
    _, expected = run_engine(dl.DeviceEngine("cpu"), 6)  # first: O1 casts whatever this thread runs
    _, losses = run_engine(apex_engine(level), 6)
    assert losses[-1] < losses[0] / 2
    assert_close(losses, expected, rtol=0 if level == "O0" else 0.05, atol=0)


def test_a_notebooks_second_run_resumes_from_the_first_ones_checkpoint(level, tmp_path):
    whole, _ = run_engine(apex_engine(level), 4)
    expected = whole.engine.pack_checkpoint(model=whole.model, optimizer=whole.optimizer)
    del whole
    gc.collect()

    first, _ = run_engine(apex_engine(level), 2, tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoints" / "last_full.pth"
    second, _ = run_engine(apex_engine(level), 2, tmp_path / "second", resume=str(checkpoint))
    second = second.engine.pack_checkpoint(model=second.model, optimizer=second.optimizer)
    assert_close(second, expected, **EXACT)
    del first


@pytest.mark.slow
@pytest.mark.distributed
def test_the_distributed_engine_trains(tmp_path):
    model = layers()
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
