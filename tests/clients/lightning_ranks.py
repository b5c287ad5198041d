"""One rank of ``test_lightning_2.py``: trains on its half of each batch and saves what it has."""

import sys
import warnings

root, level, how, folder = sys.argv[1:]
sys.path.insert(0, root)
warnings.simplefilter("ignore")

from tests.clients.libraries import declare_torchvision_operators  # noqa: E402 - after the path

declare_torchvision_operators()  # lightning's metrics import it

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from apex.integrations.lightning import ApexPrecision  # noqa: E402
from tests.clients.classes import data  # noqa: E402
from tests.clients.lightning_modules import classifier, trainer  # noqa: E402

module = classifier(pl, by_itself=how == "by itself")
strategy = "ddp"
if how == "sharded":
    module.sharded = True
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
module.layers[1].eval()
plugin = ApexPrecision(level, verbosity=0)
made = trainer(pl, plugin, strategy=strategy, devices=2, accumulate_grad_batches=2)
made.fit(module, data(8))
weights = module.layers.state_dict()
if how == "sharded":
    made.test(module, data(8), verbose=False)  # on the module as the fit left it
    weights = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in weights.items()}
state = {"weights": weights, "scales": plugin.state_dict()}
torch.save(state, f"{folder}/{made.global_rank}.pt")
