"""The optimizers' rules as plain loops over tensors, to compare with."""

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
            if g is not None:
                self.rule(p, g.to(p.dtype), state, **self.options)

    def before(self, grads):
        pass

    def average(self, state, name, decay, value, share):
        state[name] = decay * state.get(name, torch.zeros_like(value)) + share * value
        return state[name]


class Adam(Plain):
    def direction(self, p, g, state, betas, eps, weight_decay, w_mode, bias_correction, averaging):
        if not w_mode:
            g = g + weight_decay * p
        m = self.average(state, "m", betas[0], g, 1 - betas[0] if averaging else 1.0)
        v = self.average(state, "v", betas[1], g * g, 1 - betas[1])
        if bias_correction:
            m, v = m / (1 - betas[0] ** self.count), v / (1 - betas[1] ** self.count)
        update = m / (v.sqrt() + eps)
        return update + weight_decay * p if w_mode else update

    def rule(self, p, g, state, lr, **rest):
        p -= lr * self.direction(p, g, state, averaging=True, **rest)


class LAMB(Adam):
    def before(self, grads):
        norm = sum(float(g.double().square().sum()) for g in grads if g is not None) ** 0.5
        self.divisor = max(1.0, norm / self.options["max_grad_norm"])

    def rule(self, p, g, state, lr, max_grad_norm, use_nvlamb, **rest):
        update = self.direction(p, g / self.divisor, state, **rest)
        if use_nvlamb or rest["weight_decay"]:
            param_norm, update_norm = p.norm(), update.norm()
            if param_norm and update_norm:
                lr = lr * param_norm / update_norm
        p -= lr * update


class SGD(Plain):
    def stored(self, momentum):
        return momentum.clone()

    def rule(self, p, g, state, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum):
        if not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            first = "buffer" not in state
            old = state.get("buffer")
            new = g if first else momentum * old + (1 - dampening) * g
            state["buffer"] = self.stored(new)
            applied = new if first else state["buffer"]
            g = g + momentum * applied if nesterov else applied
        if wd_after_momentum:
            g = g + weight_decay * p
        p -= lr * g


class Adagrad(Plain):
    def rule(self, p, g, state, lr, eps, weight_decay, w_mode):
        if not w_mode:
            g = g + weight_decay * p
        h = self.average(state, "sum", 1.0, g * g, 1.0)
        update = g / (h.sqrt() + eps)
        p -= lr * (update + weight_decay * p if w_mode else update)


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
        self, p, g, state, lr, betas, eps, weight_decay, bias_correction, averaging, inside,
        norm_type, init_zero,
    ):  # fmt: skip
        norm = self.norm(g, state, betas[1], norm_type, init_zero)
        first = 1 - betas[0] ** self.count if bias_correction else 1.0
        second = (1 - betas[1] ** self.count) ** 0.5 if bias_correction else 1.0
        denominator = norm / second + eps
        share = 1 - betas[0] if averaging else 1.0
        if inside:
            g = g / denominator + weight_decay * p
            p -= lr * self.average(state, "m", betas[0], g, share) / first
        else:
            m = self.average(state, "m", betas[0], g, share) / first
            p -= lr * (m / denominator + weight_decay * p)
