"""Lightning 2: ``ApexPrecision`` under a ``Trainer``, of both packages, and under ``Fabric``."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

from apex import amp
from tests.clients.classes import data, layers
from tests.clients.libraries import need, of_its_time
from tests.clients.lightning_modules import adversaries, classifier, trainer
from tests.support.loops import scaled_backward

lightning = need("lightning.pytorch")
pytorch_lightning = need("pytorch_lightning")
if pytorch_lightning.__version__.startswith("1."):
    pytest.skip("pytorch_lightning 1 has its own plugin", allow_module_level=True)

from apex.integrations.lightning import ApexPrecision  # noqa: E402 - after the checks

pytestmark = [*of_its_time, pytest.mark.filterwarnings("ignore:.* is emulated on this CPU")]

FITS = {  # whether the step calls a child of the module, and options of the trainer
    "forward": (False, {}),
    "child": (True, {}),
    "norm": (False, {"gradient_clip_val": 0.1}),
    "value": (False, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "accumulate": (False, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
}


@pytest.fixture(params=[lightning, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def pl(request):
    return request.param


def precision(level, **options):
    return ApexPrecision(level, verbosity=0, **options)


def fit(pl, level, module, loader=None, ckpt_path=None, amp_options=None, **options):
    plugin = None if level is None else precision(level, **(amp_options or {}))
    made = trainer(pl, plugin, **options)
    made.fit(module, data() if loader is None else loader, ckpt_path=ckpt_path)
    return made


def by_hand(level, epochs=2, gradient_clip_val=None, gradient_clip_algorithm="norm",
            accumulate_grad_batches=1, **options):  # fmt: skip
    """Returns the weights and losses of the same training in a plain loop with amp."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}
    losses = []
    for _ in range(epochs):
        for index, (x, y) in enumerate(data(), 1):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
            scaled_backward(loss / accumulate_grad_batches, optimizer)
            if index % accumulate_grad_batches == 0:
                if gradient_clip_val is not None:
                    clip[gradient_clip_algorithm](amp.master_params(optimizer), gradient_clip_val)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return amp.restore(model, optimizer)[0].state_dict(), losses


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


# -- fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_itself", "options"), FITS.values(), ids=FITS)
def test_a_module_trains_as_in_a_loop_with_amp(pl, level, by_itself, options):
    module = classifier(pl, by_itself=by_itself)
    fit(pl, level, module, **options)
    weights, losses = by_hand(level, **options)
    assert module.losses == losses
    same(module.layers.state_dict(), weights)


def test_a_module_is_plain_fp32_after_a_fit_and_trains_on(pl, level):
    module, before = classifier(pl), classifier(pl)
    made = fit(pl, level, module)
    assert type(module).__mro__[1] is pl.LightningModule
    assert vars(module).keys() - {"_hparams"} == vars(before).keys()
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert [*module.parameters()] == made.optimizers[0].param_groups[0]["params"]
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    made.fit_loop.max_epochs = 4
    made.fit(module, data())
    assert sum(module.losses[-4:]) < 0.9 * sum(module.losses[:4])


def test_a_step_that_overflows_is_skipped_and_halves_the_scale(pl):
    module = classifier(pl, poison=[0])
    made = trainer(pl, precision("O1", loss_scale="dynamic"), max_steps=2)
    before = copy.deepcopy(module.layers[0].weight)
    seen = []
    module.on_train_batch_end = lambda *_: seen.append(module.layers[0].weight.detach().clone())
    made.fit(module, data())
    assert torch.equal(seen[0], before)
    assert not torch.equal(seen[1], before)
    assert made.precision_plugin.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15


AVERAGES = [
    ("WeightAveraging", {}, "on_train_batch_end"),
    ("StochasticWeightAveraging", {"swa_lrs": 2e-2, "swa_epoch_start": 1}, "on_train_epoch_start"),
]


@pytest.mark.parametrize(("name", "options", "hook"), AVERAGES)
def test_a_callback_s_average_is_in_fp32_and_ends_in_the_module(pl, level, name, options, hook):
    module, twin = classifier(pl), classifier(pl)
    expected = AveragedModel(twin)

    def update(*_):
        if module.current_epoch < 2:  # a third renews the batch norm of the average
            twin.load_state_dict(module.state_dict())
            expected.update_parameters(twin)

    setattr(module, hook, update)
    callback = getattr(pl.callbacks, name)(**options)
    trainer(pl, precision(level), callbacks=callback).fit(module, data(), data())
    for found, average in zip(module.parameters(), expected.parameters(), strict=True):
        assert_close(found, average, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_lbfgs_evaluates_its_closure_as_often_as_it_needs(pl, level):
    def module():
        return classifier(pl, optimizer=torch.optim.LBFGS, lr=0.1)

    plain, trained = module(), module()
    fit(pl, None, plain, loader=data(32), max_epochs=1)
    fit(pl, level, trained, loader=data(32), max_epochs=1)
    assert len(trained.losses) > 2
    rel = 0 if level == "O0" else 0.05
    assert trained.losses[:4] == pytest.approx(plain.losses[:4], rel=rel)


@pytest.mark.parametrize("two_scales", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_module_steps_two_optimizers_itself(pl, level, two_scales):
    plain, module = adversaries(pl), adversaries(pl)
    fit(pl, None, plain)
    module.two_scales = two_scales
    made = fit(pl, level, module, amp_options={"num_losses": 1 + two_scales})
    assert len(made.precision_plugin.state_dict()) == 1 + two_scales
    # Adam moves a parameter by 2e-2 a step at first, whatever the gradient's size.
    atol = 5e-3 if level != "O0" else 0
    assert_close(dict(module.state_dict()), dict(plain.state_dict()), rtol=0, atol=atol)


# -- other loops -----------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O5", torch.bfloat16)])
def test_evaluation_computes_in_16_bits_and_keeps_every_digit(pl, level, dtype):
    module = classifier(pl)
    before = copy.deepcopy(module.state_dict())
    made = trainer(pl, precision(level))
    plain = trainer(pl)
    for run in ("validate", "test"):
        (metrics,) = getattr(made, run)(module, data(), verbose=False)
        (expected,) = getattr(plain, run)(module, data(), verbose=False)
        assert 0 < abs(metrics["loss"] - expected["loss"]) < 0.02
    predicted, used = made.predict(module, data())[0]
    assert used is dtype
    assert_close(predicted.float(), plain.predict(module, data())[0][0], rtol=0, atol=0.05)
    same(module.state_dict(), before)


# -- checkpoints -----------------------------------------------------------------------------


def test_a_resumed_run_is_bit_identical(pl, level, tmp_path):
    dynamic = {"growth_interval": 3, "max_loss_scale": 2.0**17} if level in ("O1", "O2") else {}
    whole, half, rest = (classifier(pl) for _ in range(3))
    expected = fit(pl, level, whole, amp_options=dynamic)
    first = fit(pl, level, half, amp_options=dynamic, max_epochs=1)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    second = fit(pl, level, rest, amp_options=dynamic, ckpt_path=tmp_path / "saved.ckpt")
    assert rest.losses == whole.losses[4:]
    same(rest.state_dict(), whole.state_dict())
    assert second.precision_plugin.state_dict() == expected.precision_plugin.state_dict()
    if dynamic:
        assert second.precision_plugin.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**17


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_checkpoint_of_a_running_fit_loads_into_a_plain_module(pl, level, tmp_path):
    module = classifier(pl)
    masters = []

    def on_train_batch_end(*_):
        made.save_checkpoint(tmp_path / "saved.ckpt")
        masters[:] = [p.detach().clone() for p in amp.master_params(made.optimizers[0])]

    module.on_train_batch_end = on_train_batch_end
    made = trainer(pl, precision(level))
    made.fit(module, data())
    loaded = classifier(pl)
    state = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    loaded.load_state_dict(state["state_dict"])
    assert all(map(torch.equal, loaded.parameters(), masters))
    assert {value.dtype for value in state["state_dict"].values()} <= {torch.float32, torch.int64}


# -- mistakes --------------------------------------------------------------------------------


def test_a_failure_leaves_a_plain_module(pl):
    module = classifier(pl)

    def fail(*_):
        raise KeyError("stop")

    module.on_train_batch_end = fail
    with pytest.raises(KeyError, match="stop"):
        fit(pl, "O5", module)
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert type(module.layers(torch.zeros(2, 6))) is torch.Tensor


def test_a_part_further_down_that_gets_fp32_is_an_error_with_the_remedy(pl):
    module = classifier(pl)
    module.training_step = lambda batch, batch_idx: module.layers[0](batch[0]).sum()
    with pytest.raises(RuntimeError, match="ApexPrecision casts the inputs of the module's own"):
        fit(pl, "O5", module)


def test_wrong_options_are_refused_at_once():
    with pytest.raises(TypeError, match=r"unexpected keyword argument .loss_scal"):
        ApexPrecision("O5", loss_scal=1.0)
    with pytest.raises(RuntimeError, match="O7"):
        ApexPrecision("O7")


# -- two ranks -------------------------------------------------------------------------------


RANKS = [
    ("O0", "forward"),
    ("O1", "by itself"),
    ("O2", "forward"),
    ("O5", "by itself"),
    ("O1", "sharded"),
    ("O4", "sharded"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("level", "how"), RANKS)
def test_two_ranks_train_as_one_on_both_halves(level, how, tmp_path):
    script = Path(__file__).with_name("lightning_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(script.parents[2])
    done = subprocess.run(
        [*command, str(script), root, level, how, str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (first, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    same(first["weights"], second["weights"])
    assert first["scales"] == second["scales"]
    module = classifier(lightning)
    module.layers[1].eval()  # as on the ranks: statistics of half a batch differ
    fit(lightning, None, module, loader=data(16), accumulate_grad_batches=2)
    expected = module.layers.state_dict()
    for name in ("0.weight", "3.weight"):
        tolerance = 1e-6 if level == "O0" else 5e-3
        assert_close(first["weights"][name], expected[name], rtol=0, atol=tolerance)


# -- Fabric ----------------------------------------------------------------------------------


@pytest.fixture(params=["lightning.fabric", "lightning_fabric"])
def set_up(request):
    """``set_up(level)`` returns Fabric, its model and its optimizer, or what it is given."""
    made = need(request.param)

    def set_up(level, models=None, optimizers=None, **options):
        models = [layers()] if models is None else models
        if optimizers is None:
            optimizers = [torch.optim.Adam(models[0].parameters(), lr=2e-2)]
        plugin = precision(level, optimizers=optimizers, **options)
        fabric = made.Fabric(accelerator="cpu", plugins=plugin)
        if not optimizers:
            return fabric, fabric.setup(*models)
        pairs = zip(models, optimizers, strict=True)
        return fabric, *(each for pair in pairs for each in fabric.setup(*pair))

    return set_up


def train_in_fabric(fabric, model, optimizer, epochs=2):
    losses = []
    for _ in range(epochs):
        for x, y in fabric.setup_dataloaders(data()):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
    return losses


def test_fabric_trains_as_a_loop_with_amp(set_up, level):
    losses = train_in_fabric(*set_up(level), epochs=1)
    _, expected = by_hand(level, epochs=1, gradient_clip_val=0.1)
    assert losses == expected


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_fabric_resumes_bit_identically(set_up, level, tmp_path):
    path = tmp_path / "saved.ckpt"
    options = {"growth_interval": 3, "max_loss_scale": 2.0**17}
    first, model, optimizer = set_up(level, **options)
    train_in_fabric(first, model, optimizer, epochs=1)
    plugin = first.strategy.precision
    first.save(path, {"model": model, "optimizer": optimizer, "precision": plugin})
    expected = train_in_fabric(first, model, optimizer, epochs=1)
    second, model, optimizer = set_up(level, **options)
    plugin = second.strategy.precision
    second.load(path, {"model": model, "optimizer": optimizer, "precision": plugin})
    assert train_in_fabric(second, model, optimizer, epochs=1) == expected


def test_fabric_without_an_optimizer_is_an_error_with_the_remedy(set_up):
    fabric, model = set_up("O5", optimizers=[])
    loss = model(torch.ones(4, 6)).sum()
    with pytest.raises(RuntimeError, match=r"Pass them, ApexPrecision\(..., optimizers="):
        fabric.backward(loss)
