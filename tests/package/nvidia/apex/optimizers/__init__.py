"""The interfaces of NVIDIA's optimizers: undeclared fp32 state, lists of one dtype, step counts."""

import torch

import amp_C

from ..multi_tensor_apply import multi_tensor_applier

WHOSE = "theirs"


class Fused(torch.optim.Optimizer):
    def zero_grad(self):  # takes no `set_to_none`
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def lists(self, group, *names):
        """Yields gradients, parameters and fp32 states, by the parameters' dtype."""
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            params = [p for p in group["params"] if p.grad is not None and p.dtype == dtype]
            for p in params:
                for name in names:
                    self.state[p].setdefault(name, torch.zeros_like(p.data).float())
            if params:
                states = [[self.state[p][name] for p in params] for name in names]
                yield [[p.grad.data for p in params], [p.data for p in params], *states]


class FusedAdam(Fused):
    def __init__(self, params, lr=1e-3, capturable=False):
        lr = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.capturable = capturable
        if capturable:
            self._step_supports_amp_scaling = True
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)

    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            device = group["params"][0].device
            kernel, inverse, one = amp_C.multi_tensor_adam, [], 1
            if self.capturable:  # without a scaler, it checks nothing
                found, scale = torch.zeros(1, device=device), torch.ones(1, device=device)
                if grad_scaler is not None:
                    found = grad_scaler._check_inf_per_device(self)[device]
                    scale = grad_scaler._get_scale_async()
                self._dummy_overflow_buf.copy_(found)
                kernel = amp_C.multi_tensor_adam_capturable
                inverse = [scale.double().reciprocal().float()]
                one = (self._dummy_overflow_buf != 1).to(torch.int)
            group["step"] = group.get("step", 0) + one
            for lists in self.lists(group, "exp_avg", "exp_avg_sq"):
                multi_tensor_applier(
                    kernel, self._dummy_overflow_buf, lists,
                    group["lr"], *group["betas"], group["eps"], group["step"], 1, 1, 0.0, *inverse,
                )  # fmt: skip


class FusedSGD(Fused):
    def __init__(self, params, lr, momentum=0.0, materialize_master_grads=True):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)

    def step(self, closure=None):
        for group in self.param_groups:
            for lists in self.lists(group, "momentum_buffer"):
                multi_tensor_applier(
                    amp_C.multi_tensor_sgd, self._dummy_overflow_buf, lists,
                    0.0, group["momentum"], 0.0, group["lr"], False, False, False,
                    1.0 / self.most_recent_scale,
                )  # fmt: skip
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
