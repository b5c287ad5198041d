"""Optimizers around another one, as scripts write them."""

import torch


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: a base optimizer over the same groups."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Slow weights that pull the fast ones back every second step."""

    def __init__(self, base):
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults, self.steps = base.defaults, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)
