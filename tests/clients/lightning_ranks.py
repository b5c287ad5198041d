"""One rank of ``test_lightning_2.py``: trains on its half of each batch and saves what it has."""

import sys
import warnings

root, level, by_itself, folder = sys.argv[1:]
sys.path.insert(0, root)
warnings.simplefilter("ignore")

import lightning.pytorch as pl  # noqa: E402 - after the path
import torch  # noqa: E402

from apex.integrations.lightning import ApexPrecision  # noqa: E402
from tests.clients.lightning_modules import classifier, data, trainer  # noqa: E402

module = classifier(pl, by_itself=bool(by_itself))
module.layers[1].eval()
plugin = ApexPrecision(level, verbosity=0)
made = trainer(
    pl, plugin, strategy="ddp", devices=2, accumulate_grad_batches=2, gradient_clip_val=None
)
made.fit(module, data(8))
state = {"weights": module.layers.state_dict(), "scales": plugin.state_dict()}
torch.save(state, f"{folder}/{made.global_rank}.pt")
