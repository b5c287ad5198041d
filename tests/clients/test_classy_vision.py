"""classy_vision's ``ClassificationTask`` with ``set_amp_args``, whose models are proxies."""

import gc

import pytest
import torch
from torch import nn

from apex import amp
from apex.parallel import LARC, SyncBatchNorm
from tests.clients.libraries import need
from tests.support.loops import same

kinetics = need("torchvision.datasets.kinetics")
# classy_vision 0.6 imports a name that torchvision has dropped; nothing here uses it.
vars(kinetics).setdefault("Kinetics400", kinetics.Kinetics)
classy = need("classy_vision.tasks")

from classy_vision.dataset import ClassyDataset  # noqa: E402 - after the checks
from classy_vision.heads import FullyConnectedHead  # noqa: E402
from classy_vision.hooks import ClassyHook  # noqa: E402
from classy_vision.losses import build_loss  # noqa: E402
from classy_vision.meters import AccuracyMeter  # noqa: E402
from classy_vision.models import ResNeXt  # noqa: E402
from classy_vision.models.classy_model import ClassyModelHeadExecutorWrapper  # noqa: E402
from classy_vision.optim import build_optimizer, build_optimizer_schedulers  # noqa: E402
from classy_vision.tasks import ClassificationTask  # noqa: E402
from classy_vision.tasks.classification_task import BatchNormSyncMode  # noqa: E402
from classy_vision.trainer import LocalTrainer  # noqa: E402

pytestmark = pytest.mark.clients

every_level = pytest.mark.parametrize("level", ["O0", "O1", "O4"])

BATCH = 4


class Whole(ResNeXt):
    """The same network as a plain module: what the proxy computes, it computes itself."""

    wrapper_cls = None

    def forward(self, x):
        super().forward(x)
        return next(iter(self.execute_heads().values()))


def network(kind=ResNeXt):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind([1], init_planes=4, small_input=True, basic_layer=True)
        head = FullyConnectedHead("head", num_classes=3, in_plane=16)
    model.set_heads({"block0-0": [head]})
    return model


def images(count):
    generator = torch.Generator().manual_seed(1)
    return [
        {"input": torch.randn(3, 4, 4, generator=generator), "target": index % 3}
        for index in range(count)
    ]


def task(level, model, *, epochs=1, larc=False, **options):
    """A task as a script makes it, up to ``prepare``."""
    config = {"name": "sgd", "num_epochs": epochs, "lr": 0.1, "momentum": 0.9, "use_larc": larc}
    optimizer, schedulers = build_optimizer(config), build_optimizer_schedulers(config)
    data = ClassyDataset(images(3 * BATCH), BATCH, shuffle=False, transform=None, num_samples=None)
    data.set_num_workers(0)
    made = (
        ClassificationTask()
        .set_num_epochs(epochs)
        .set_loss(build_loss({"name": "CrossEntropyLoss"}))
        .set_model(model)
        .set_optimizer(optimizer)
        .set_optimizer_schedulers(schedulers)
        .set_meters([AccuracyMeter([1])])
        .set_dataset(data, "train")
    )
    made.set_use_gpu(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # it asks for one, and uses none
        made.set_amp_args({"opt_level": level, "verbosity": 0, "loss_scale": 128.0, **options})
    return made


def trained(made):
    LocalTrainer().train(made)
    return made


def results(made):
    return [
        made.losses,
        made.base_model.get_classy_state(),
        [master.detach() for master in amp.master_params(made.optimizer.optimizer)],
        [meter.value for meter in made.meters],
    ]


def both(level, adjust=lambda made: None, **options):
    """Trains classy_vision's own model, and the same without its proxy."""
    done = []
    for kind in (ResNeXt, Whole):
        made = task(level, network(kind), **options)
        adjust(made)
        done.append(trained(made))
    proxied, plain = done
    assert issubclass(type(proxied.base_model), ClassyModelHeadExecutorWrapper)
    assert issubclass(type(plain.base_model), Whole)
    return proxied, plain


@every_level
def test_a_task_trains_its_model_as_one_without_a_proxy(level):
    proxied, plain = both(level)
    assert same(results(proxied), results(plain))
    before = network().state_dict()
    assert not same(dict(before), dict(proxied.base_model.state_dict()))


@every_level
def test_a_task_accumulates_and_clips(level):
    def adjust(made):
        made.set_simulated_global_batchsize(3 * BATCH).set_clip_grad_norm(0.01)

    proxied, plain = both(level, adjust)
    assert proxied.optimizer_period == 3
    assert same(results(proxied), results(plain))


@every_level
def test_a_task_synchronizes_batch_norm_and_steps_larc(level):
    def adjust(made):
        made.set_distributed_options(batch_norm_sync_mode=BatchNormSyncMode.APEX)

    proxied, plain = both(level, adjust, larc=True)
    assert isinstance(proxied.optimizer.optimizer, LARC)
    assert any(isinstance(module, SyncBatchNorm) for module in proxied.base_model.modules())
    assert not any(type(module) is nn.BatchNorm2d for module in proxied.base_model.modules())
    assert same(results(proxied)[:2], results(plain)[:2])


class Saved(ClassyHook):
    """Keeps the state of the task at the end of its first phase, as ``CheckpointHook`` does."""

    on_start = on_phase_start = on_step = on_end = ClassyHook._noop

    def __init__(self):
        super().__init__()
        self.task = None

    def on_phase_end(self, task):
        self.task = self.task or task.get_classy_state(deep_copy=True)


@every_level
def test_a_task_resumes_where_it_was(level):
    saved = Saved()
    uninterrupted = results(trained(task(level, network(), epochs=2).set_hooks([saved])))
    gc.collect()
    assert list(saved.task["amp"]) == ["loss_scaler0"]

    resumed = task(level, network(), epochs=2)
    resumed._set_checkpoint_dict({"classy_state_dict": saved.task})
    assert same(results(trained(resumed)), uninterrupted)
    assert resumed.num_updates == 2 * 3 * BATCH
