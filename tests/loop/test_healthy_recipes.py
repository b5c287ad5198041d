"""Recipes of today that are right as they stand: amp warns of nothing and logs nothing."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from apex import amp
from tests.model.nets import Tied
from tests.support import loops
from tests.support.loops import descend

STEPS = 5
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
Y = torch.tensor([0, 1, 2, 3])


def net(outputs=4):
    """As most models have them: biases of zero, and a norm."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, outputs))
    for layer in (model[0], model[3]):
        nn.init.zeros_(layer.bias)
    return model


def adamw(model, lr=1e-3):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def initialized(opt_level, models, optimizers, **options):
    options = {"loss_scale": 128.0, "verbosity": 0, **options}
    return amp.initialize(models, optimizers, opt_level=opt_level, **options)


def pair_at(opt_level, make_optimizer=adamw, model=None, **options):
    model = net() if model is None else model
    return initialized(opt_level, model, make_optimizer(model), **options)


def loss_of(model, x=X):
    return F.cross_entropy(model(x).float(), Y)


def fit(model, optimizer, after=lambda: None, steps=STEPS, loss=loss_of):
    for _ in range(steps):
        descend(loss(model), optimizer)
        after()


# -- schedules -----------------------------------------------------------------------------------


def schedules(level):
    for make_optimizer, make_scheduler in (
        (lambda m: adamw(m, 1e-8), lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 + step)),
        (lambda m: loops.sgd(m.parameters(), 1e-7), lambda o: lr_scheduler.LinearLR(o, 1e-3)),
        (adamw, lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=21)),
    ):
        model, optimizer = pair_at(level, make_optimizer)
        fit(model, optimizer, make_scheduler(optimizer).step, 20)


def a_step_that_silences_the_scheduler(level):
    model, optimizer = pair_at(level)
    optimizer.zero_grad()
    optimizer.step()
    fit(model, optimizer, lr_scheduler.StepLR(optimizer, 1).step)


# -- gradients -----------------------------------------------------------------------------------


def accumulated_and_clipped(level):
    model, optimizer = pair_at(level)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, x in enumerate(X.split(2)):
            loss = model(x).float().square().mean() / 2
            loops.scaled_backward(loss, optimizer, delay_unscale=part == 0 and step > 2)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()


def two_losses(level):
    model, optimizer = pair_at(level, num_losses=2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(X).float()
        loops.scaled_backward(F.cross_entropy(out, Y), optimizer, loss_id=0, delay_unscale=False)
        loops.scaled_backward(model(X).float().square().mean(), optimizer, loss_id=1)
        optimizer.step()


def a_closure(level):
    model, optimizer = pair_at(level, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loops.scaled_backward(loss, optimizer)
        return loss.detach()

    for _ in range(2):
        optimizer.step(closure)


def first_overflow(level):
    model, optimizer = pair_at(level, loss_scale="dynamic" if level == "O2" else None)
    fit(model, optimizer)
    descend(loss_of(model) * 2.0**10, optimizer)


# -- averages and targets ------------------------------------------------------------------------


def average_by_shadows(level):
    """As in many scripts: with a swap by ``data`` for evaluation, and back."""
    model, optimizer = pair_at(level)
    shadow = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    for _ in range(STEPS):
        descend(loss_of(model), optimizer)
        kept = {}
        for name, param in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * param.detach().float()
            kept[name] = param.data.clone()
            param.data.copy_(shadow[name])
        with torch.no_grad():
            model(X)
        for name, param in model.named_parameters():
            param.data.copy_(kept[name])


def masters_written_by_hand(level):
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loops.scaled_backward(loss_of(model), optimizer)
        with torch.no_grad():
            for param in amp.master_params(optimizer):
                param.sub_(param.grad, alpha=1e-2)


def stochastic_weight_averaging(level):
    model, optimizer = pair_at(level)
    average = AveragedModel(amp.restore(copy.deepcopy(model)))
    fit(model, optimizer, lambda: average.update_parameters(amp.restore(copy.deepcopy(model))))


def deep_q_learning(level):
    model = net()
    target = copy.deepcopy(model)
    model, optimizer = pair_at(level, model=model)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = target(X).amax(1)
        chosen = model(X).float().gather(1, Y[:, None]).squeeze(1)
        descend(F.smooth_l1_loss(chosen, wanted), optimizer)
        if step % 2:
            target.load_state_dict(model.state_dict())


def teacher_and_student(level):
    """DINO, BYOL, MoCo: the teacher stays in fp32."""
    student = net()
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, optimizer = pair_at(level, model=student)
    queue = F.normalize(torch.ones(4, 8), dim=0)
    for _ in range(STEPS):
        keys = teacher(X).softmax(1)
        descend(-(keys * student(X).float().log_softmax(1)).sum(1).mean(), optimizer)
        queue = torch.cat([keys, queue[:, :4]])[:4]
        for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
            old.mul_(0.99).add_(new.detach(), alpha=0.01)


def distillation(level):
    teacher, student = net().requires_grad_(False), net()
    (teacher, student), optimizer = initialized(level, [teacher, student], adamw(student))
    for _ in range(STEPS):
        logits = teacher(X).float().log_softmax(1)
        own = student(X).float().log_softmax(1)
        loss = F.kl_div(own, logits, reduction="batchmean", log_target=True)
        descend(loss, optimizer)


# -- several optimizers --------------------------------------------------------------------------


def generative_adversary(level, clears=False, clips=None):
    nets = [net(8), net(1)]
    nets, optimizers = initialized(level, nets, [adamw(each, 1e-4) for each in nets], num_losses=2)
    (generator, critic), (first, second) = nets, optimizers
    for _ in range(STEPS):
        loss = critic(X).float().mean() - critic(generator(X).detach()).float().mean()
        descend(loss, second, loss_id=1)
        if clips is not None:
            for param in amp.master_params(second):
                param.data.clamp_(-clips, clips)
        descend(critic(generator(X)).float().mean(), first)
        if clears:
            second.zero_grad()


def wasserstein_adversary(level):
    generative_adversary(level, clears=True, clips=0.05)


def soft_actor_critic(level):
    actor, critic = net(8), net(1)
    temperature = torch.zeros(1, requires_grad=True)
    made = [adamw(actor), adamw(critic), torch.optim.Adam([temperature], lr=1e-3)]
    (actor, critic), made = initialized(level, [actor, critic], made)
    for _ in range(STEPS):
        descend((critic(X).float() - 1).square().mean(), made[1])
        action = actor(X)
        cost = temperature.exp().detach() * action.float().square().mean()
        descend(cost - critic(action).float().mean(), made[0])
        descend((temperature * action.detach().float().mean()).sum(), made[2])


def a_part_that_trains_later(level):
    """One block for two optimizers, one of which has no gradient yet."""
    model = net()
    optimizers = [adamw(model[:2]), adamw(model[2:])]
    model, optimizers = initialized(level, model, optimizers)
    for step in range(STEPS):
        out = model(X) if step > 2 else model[0](X.to(model[0].weight.dtype))
        descend(out.float().square().mean(), *optimizers)


# -- parts that are frozen -----------------------------------------------------------------------


def unfrozen_later(level):
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = pair_at(level, model=model)
    fit(model, optimizer)
    optimizer.add_param_group({"params": model[0].requires_grad_(True).parameters()})
    fit(model, optimizer)


def best_weights_are_kept(level):
    model, optimizer = pair_at(level)
    kept = copy.deepcopy(model.state_dict())
    for _ in range(2):
        fit(model, optimizer)
        model.load_state_dict(kept)
    optimizer.load_state_dict(optimizer.state_dict())
    fit(model, optimizer)


# -- weights that are moved ----------------------------------------------------------------------


def adversarial_weights(level):
    """FGM, AWP: weights of the model itself are moved, and put back before the step."""
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loops.scaled_backward(loss_of(model), optimizer)
        kept = [param.data.clone() for param in model.parameters()]
        for param in model.parameters():
            param.data.add_(param.grad.to(param.dtype), alpha=0.05)
        loops.scaled_backward(loss_of(model), optimizer)
        for param, value in zip(model.parameters(), kept, strict=True):
            param.data.copy_(value)
        optimizer.step()


def sharpness_aware_minimization(level):
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loops.scaled_backward(loss_of(model), optimizer)
        params = [*amp.master_params(optimizer)]
        with torch.no_grad():
            steps = [0.05 * param.grad for param in params]
            torch._foreach_add_(params, steps)
        optimizer.zero_grad()
        loops.scaled_backward(loss_of(model), optimizer)
        with torch.no_grad():
            torch._foreach_sub_(params, steps)
        optimizer.step()


def decay_by_hand(level):
    model, optimizer = pair_at(level)

    def update():
        for param in amp.master_params(optimizer):
            param.data.mul_(0.99)
            param.data.renorm_(2, 0, 1.0) if param.dim() > 1 else None

    fit(model, optimizer, update)


def meta_learning(level):
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, (X,)).float(), Y)
        slopes = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        adapted = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(model, adapted, (X,)).float(), Y)
        descend(outer, optimizer)


def evolution_strategies(level):
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        optimizer.zero_grad()
        noise = [torch.randn_like(param) for param in model.parameters()]
        losses = []
        for share in (0.01, -0.02):
            for param, direction in zip(model.parameters(), noise, strict=True):
                param.data.add_(direction, alpha=share)
            losses.append(loss_of(model).item())
        for param, direction in zip(model.parameters(), noise, strict=True):
            param.data.add_(direction, alpha=0.01)
            param.grad = (losses[0] - losses[1]) / 0.02 * direction
        optimizer.step()


def forward_gradients(level):
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        weights = dict(model.named_parameters())
        noise = {name: torch.randn_like(param) for name, param in weights.items()}
        with forward_ad.dual_level():
            dual = {n: forward_ad.make_dual(weights[n].detach(), noise[n]) for n in weights}
            out = torch.func.functional_call(model, dual, (X.to(model[0].weight.dtype),))
            slope = forward_ad.unpack_dual(out).tangent.float().mean()
        for name, param in model.named_parameters():
            param.grad = (slope * noise[name]).to(param.dtype)
        optimizer.step()


# -- models and losses ---------------------------------------------------------------------------


def adapted():
    """Low-rank adaptation."""
    down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
    nn.init.zeros_(up.weight)
    parts = {"base": nn.Linear(8, 4).requires_grad_(False), "down": down, "up": up}
    return loops.Body(lambda self, x: self.base(x) + self.up(self.down(x)), **parts)


def prompted():
    parts = {"prompt": nn.Parameter(torch.zeros(8)), "body": net().requires_grad_(False)}
    return loops.Body(lambda self, x: self.body(x + self.prompt), **parts)


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.codes = nn.Linear(8, 4), nn.Embedding(8, 4)

    def forward(self, x):
        hidden = self.encode(x)
        code = self.codes(torch.cdist(hidden.float(), self.codes.weight.float()).argmin(1))
        return hidden + (code - hidden).detach() + F.mse_loss(code, hidden.detach())


def convolve(self, x):
    return self.last(torch.sparse.mm(self.edges.float(), self.first(x).float()).to(x.dtype))


def graph():
    parts = {"first": nn.Linear(8, 8), "last": nn.Linear(8, 4)}
    return loops.Body(convolve, edges=nn.Buffer((torch.eye(4) / 3).to_sparse()), **parts)


def gradient_penalty(critic):
    x = X.clone().requires_grad_()
    out = critic(x).float()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (slope.norm(dim=1) - 1).square().mean()


MODELS = [
    (adapted, loss_of),
    (prompted, loss_of),
    (Quantizer, loss_of),
    (graph, loss_of),
    (Tied, lambda model: F.cross_entropy(model(Y).float(), Y.roll(1))),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), gradient_penalty),
    (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), loss_of),
    (lambda: nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 4)),
     lambda model: loss_of(model, X[:, None])),
]  # fmt: skip


def models_and_losses(level):
    for make, loss in MODELS:
        fit(*pair_at(level, model=make()), loss=loss)


def truncated_backpropagation(level):
    model, optimizer = pair_at(level, model=nn.RNN(8, 8, batch_first=True))
    state = torch.zeros(1, 4, 8)
    for _ in range(STEPS):
        out, state = model(X[:, None], state.detach().to(model.weight_hh_l0.dtype))
        descend(out.float().square().mean(), optimizer)


def backward_in_two_stages(level):
    """As GradCache and pipelines: the second pass goes on from the gradient of features."""
    encoder, head = nn.Linear(8, 8), net()
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    [encoder, head], optimizer = initialized(level, [encoder, head], optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        features = encoder(X)
        cut = features.detach().requires_grad_()
        with amp.scale_loss(loss_of(head, cut), optimizer) as scaled_loss:
            scaled_loss.backward()
            features.backward(cut.grad)
        optimizer.step()


def penalty_of_scaled_gradients(level):
    """As in torch's examples for ``GradScaler``: the second pass goes through the first block."""
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        loss = loss_of(model, x)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            (slope,) = torch.autograd.grad(scaled_loss, x, create_graph=True)
        scale = scaled_loss.item() / loss.item()
        penalty = (slope / scale).norm().square()
        loops.scaled_backward(loss + penalty, optimizer)
        optimizer.step()


def perturbed_before_the_first_step(level):
    """As projected gradient descent on weights, and evolution strategies."""
    model, optimizer = pair_at(level)
    for _ in range(STEPS):
        weight = model[0].weight
        kept = weight.detach().clone()
        loops.scaled_backward(loss_of(model), optimizer)
        for _ in range(3):
            with torch.no_grad():
                weight.add_(0.01 * weight.grad.sign())
            loops.scaled_backward(loss_of(model), optimizer)
        with torch.no_grad():
            weight.copy_(kept)
        optimizer.step()
        optimizer.zero_grad()


def is_recipe(value):
    return inspect.isfunction(value) and [*inspect.signature(value).parameters][:1] == ["level"]


RECIPES = [*filter(is_recipe, list(globals().values()))]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by forward_ad
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("level", loops.MIXED)
def test_nothing_is_said_of_a_healthy_recipe(caplog, level, recipe):
    """pytest makes warnings errors."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        recipe(level)
    assert loops.messages(caplog) == []
