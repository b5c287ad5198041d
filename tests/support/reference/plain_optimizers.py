"""The optimizers' rules as plain loops over tensors, with options named as in apex."""

import torch


class Plain:
    """Steps copies of parameters by a rule; `state` holds one dict for each."""

    def __init__(self, params, **options):
        self.params = [p.detach().clone() for p in params]
        self.state = [{} for _ in params]
        self.options = options
        self.count = 0

    def step(self, grads):
        self.count += 1
        self.before(grads)
        for p, g, state in zip(self.params, grads, self.state, strict=True):
            self.rule(p, g.to(p.dtype), state, **self.options)

    def before(self, grads):
        pass

    def average(self, state, name, decay, value, share):
        state[name] = decay * state.get(name, torch.zeros_like(value)) + share * value
        return state[name]


class Adam(Plain):
    def direction(
        self, p, g, state, betas, eps, weight_decay, adam_w_mode=True, bias_correction=True,
        grad_averaging=True,
    ):  # fmt: skip
        if not adam_w_mode:
            g = g + weight_decay * p
        m = self.average(state, "exp_avg", betas[0], g, 1 - betas[0] if grad_averaging else 1.0)
        v = self.average(state, "exp_avg_sq", betas[1], g * g, 1 - betas[1])
        if bias_correction:
            m, v = m / (1 - betas[0] ** self.count), v / (1 - betas[1] ** self.count)
        update = m / (v.sqrt() + eps)
        return update + weight_decay * p if adam_w_mode else update

    def rule(self, p, g, state, lr, **rest):
        p -= lr * self.direction(p, g, state, **rest)


class LAMB(Adam):
    def before(self, grads):
        norm = sum(float(g.double().square().sum()) for g in grads) ** 0.5
        self.divisor = max(1.0, norm / self.options["max_grad_norm"])

    def rule(self, p, g, state, lr, max_grad_norm, use_nvlamb=False, **rest):
        update = self.direction(p, g / self.divisor, state, **rest)
        if use_nvlamb or rest["weight_decay"]:
            param_norm, update_norm = p.norm(), update.norm()
            if param_norm and update_norm:
                lr = lr * param_norm / update_norm
        p -= lr * update


class SGD(Plain):
    """With `low`, momentum is kept in fp16, and applied as stored."""

    low = False

    def rule(
        self, p, g, state, lr, momentum, dampening=0.0, weight_decay=0.0, nesterov=False,
        wd_after_momentum=False,
    ):  # fmt: skip
        if not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            old = state.get("buffer")
            new = g if old is None else momentum * old + (1 - dampening) * g
            state["buffer"] = new.half().float() if self.low else new.clone()
            g = g + momentum * state["buffer"] if nesterov else state["buffer"]
        if wd_after_momentum:
            g = g + weight_decay * p
        p -= lr * g


class Adagrad(Plain):
    def rule(self, p, g, state, lr, eps, weight_decay, adagrad_w_mode=False):
        if not adagrad_w_mode:
            g = g + weight_decay * p
        h = self.average(state, "sum", 1.0, g * g, 1.0)
        update = g / (h.sqrt() + eps)
        p -= lr * (update + weight_decay * p if adagrad_w_mode else update)


class NovoGrad(Plain):
    def norm(self, g, state, beta2, norm_type, init_zero):
        fresh = g.abs().max() if norm_type == 0 else g.norm()
        old = state.get("norm", torch.zeros(()) if init_zero else fresh)
        if norm_type == 0:
            state["norm"] = beta2 * old + (1 - beta2) * fresh
        else:
            state["norm"] = (beta2 * old**2 + (1 - beta2) * fresh**2).sqrt()
        return state["norm"]

    def rule(
        self, p, g, state, lr, betas, eps, weight_decay, bias_correction=True, grad_averaging=True,
        reg_inside_moment=False, norm_type=2, init_zero=False,
    ):  # fmt: skip
        norm = self.norm(g, state, betas[1], norm_type, init_zero)
        first = 1 - betas[0] ** self.count if bias_correction else 1.0
        second = (1 - betas[1] ** self.count) ** 0.5 if bias_correction else 1.0
        denominator = norm / second + eps
        share = 1 - betas[0] if grad_averaging else 1.0
        if reg_inside_moment:
            g = g / denominator + weight_decay * p
            p -= lr * self.average(state, "m", betas[0], g, share) / first
        else:
            m = self.average(state, "m", betas[0], g, share) / first
            p -= lr * (m / denominator + weight_decay * p)


class LegacyAdam(Plain):
    """Adam with the bias corrected in the step size."""

    def rule(
        self, p, g, state, lr, betas, eps, weight_decay, eps_inside_sqrt=False, bias_correction=True
    ):
        m = self.average(state, "m", betas[0], g, 1 - betas[0])
        v = self.average(state, "v", betas[1], g * g, 1 - betas[1])
        if bias_correction:
            lr = lr * (1 - betas[1] ** self.count) ** 0.5 / (1 - betas[0] ** self.count)
        denominator = (v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps
        p -= lr * (m / denominator + weight_decay * p)
