"""Trains on handwritten digits with MMEngine's Runner, with a config file of this folder."""

import argparse
import os
from pathlib import Path

from mmengine.config import Config, DictAction
from mmengine.runner import Runner

HERE = Path(__file__).parent


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default=HERE / "apex_o4.py")
    parser.add_argument("--work-dir", default="work_dirs/mmengine", help="logs and checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in --work-dir"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, default={}, metavar="KEY=VALUE",
        help="changes to the config, such as optim_wrapper.opt_level=O5",
    )  # fmt: skip
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.resume:
        # MMEngine's checkpoints contain its log history, which torch.load accepts only from trusted
        # files; this run wrote its checkpoint itself.
        os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    config = Config.fromfile(arguments.config)
    config.merge_from_dict(arguments.cfg_options)
    config.work_dir = arguments.work_dir
    config.resume = arguments.resume
    Runner.from_cfg(config).train()


if __name__ == "__main__":
    main()
