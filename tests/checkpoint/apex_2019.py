"""What apex's FP16_Optimizer of 2019 wrote: each group stepped as one flat tensor."""

import torch


def flattened(state):
    """Returns the state of ours, which steps parameter by parameter, as apex had it."""
    inner = state["optimizer_state_dict"]
    groups, flat = [], {}
    for index, group in enumerate(inner["param_groups"]):
        each = [inner["state"][key] for key in group["params"]]
        flat[index] = {
            name: value if value.dim() == 0 else torch.cat([one[name].flatten() for one in each])
            for name, value in each[0].items()
        }
        groups.append({**group, "params": [index]})
    return {**state, "optimizer_state_dict": {"state": flat, "param_groups": groups}}
