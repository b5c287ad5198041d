"""A model, data and config files for MMEngine's Runner."""

import itertools

import torch

from tests.clients.libraries import need

need("mmengine.runner")

from mmengine.config import Config  # noqa: E402 - after the check
from mmengine.evaluator import BaseMetric  # noqa: E402
from mmengine.model import BaseModel  # noqa: E402
from mmengine.runner import Runner  # noqa: E402

from tests.support.loops import Net  # noqa: E402

BASE = """
model = dict(type="{here}.Regressor")
train_dataloader = dict(
    batch_size=4,
    dataset=dict(type="{here}.Points"),
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
)
val_dataloader = train_dataloader
val_evaluator = dict(type="{here}.Distance")
val_cfg = dict()
train_cfg = dict(by_epoch=True, max_epochs=3)
optim_wrapper = dict(type="OptimWrapper", accumulative_counts=7, optimizer=dict(type="Adam"))
param_scheduler = dict(type="StepLR", step_size=1, gamma=0.5)
default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1))
randomness = dict(seed=0)
log_level = "ERROR"
"""

DERIVED = """
_base_ = "./base.py"
custom_imports = dict(imports=["apex.integrations.mmengine"])
optim_wrapper = dict(
    _delete_=True,
    type="{kind}",
    opt_level="{level}",
    verbosity=0,
    accumulative_counts=2,
    clip_grad=dict(max_norm=1.0),
    optimizer=dict(type="SGD", lr=0.1, momentum=0.5),
)
"""

numbers = itertools.count()


class Points(torch.utils.data.Dataset):
    def __init__(self):
        self.metainfo = {}  # MMEngine warns of data without any

    def __len__(self):
        return 12

    def __getitem__(self, index):
        point = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": point, "y": point[:2]}


class Regressor(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y, mode):
        loss = (self.net(x).float() - y.float()).pow(2).mean()
        return {"loss": loss} if mode == "loss" else [loss]


class Distance(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {"distance": torch.stack(results).mean().item()}


def write_configs(folder, kind, level):
    """Writes a base config and one that replaces its wrapper; returns the path of the latter."""
    (folder / "base.py").write_text(BASE.format(here=__name__))
    derived = folder / "derived.py"
    derived.write_text(DERIVED.format(kind=kind, level=level))
    return derived


def runner(config_path, folder, **changes):
    """Returns the Runner of a config file that works in ``folder``."""
    config = Config.fromfile(config_path)
    config.merge_from_dict(changes)
    config.work_dir = str(folder)
    config.experiment_name = f"run{next(numbers)}"  # MMEngine keeps loggers by this name for good
    return Runner.from_cfg(config)
