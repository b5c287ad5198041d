"""transformers' Trainer: prepared models, and ``OverflowCallback`` with its own precisions."""

import functools
import gc
import json
import logging

import pytest
import torch
from torch import nn

from apex import amp
from tests.clients.libraries import need, of_its_time

transformers = need("transformers")
need("accelerate")
need("transformers.trainer")

from apex.integrations.transformers import OverflowCallback  # noqa: E402 - after the checks

pytestmark = of_its_time


class FaultyClassifier(nn.Module):
    """A classifier whose ``fault`` may fail in a step, forward or backward."""

    def __init__(self, fail_at=(), kind="forward"):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh())
        self.fault, self.head = Fault(kind), nn.Linear(8, 2)
        self.fail_at, self.factor, self.seen = fail_at, 1.0, []

    def forward(self, x, labels=None):
        # By the batch, so that the callback's run of it fails too.
        self.fault.on = x[0, 0].item() in self.fail_at
        logits = self.head(self.fault(self.body(x)))
        loss = nn.functional.cross_entropy(logits.float(), labels) * self.factor
        self.seen.append(loss.item())
        return {"loss": loss, "logits": logits}


class FaultyLogits(FaultyClassifier):
    """Leaves the loss to the Trainer."""

    def forward(self, x):
        self.fault.on = x[0, 0].item() in self.fail_at
        return {"logits": self.head(self.fault(self.body(x)))}


def loss_of_logits(output, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(output["logits"].float(), labels)


class Fault(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.on = kind, False

    def forward(self, x):
        if not self.on:
            return x
        if self.kind == "forward":
            return (x - x).log() * x
        return x + torch.sqrt((x - x).abs())  # finite forward; its derivative is not


class Rows(torch.utils.data.Dataset):
    """Row ``i`` begins with ``i``, which tells the net what batch it got."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        row[0] = index
        return {"x": row, "labels": index % 2}


class ScaledTrainer(transformers.Trainer):
    """Scales the loss as under ``fp16=True``, which accelerate refuses on a CPU."""

    init_scale = 2.0**10

    def training_step(self, *args, **kwargs):
        scaler = self.optimizer.scaler
        if scaler is None:
            optimizer = self.optimizer
            scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale)
            optimizer.__init__(optimizer.optimizer, scaler=scaler)
            self.accelerator.scaler = scaler
        return super().training_step(*args, **kwargs)


def run_trainer(folder, net, callbacks, kind=transformers.Trainer, **options):
    options = {"max_grad_norm": 1.0, "max_steps": 8, "gradient_accumulation_steps": 1, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=2, report_to=[],
        learning_rate=1e-2, save_strategy="no", disable_tqdm=True, logging_steps=100,
        dataloader_pin_memory=False, remove_unused_columns=False, seed=3, **options,
    )  # fmt: skip
    trainer = kind(net, arguments, train_dataset=Rows(), callbacks=callbacks)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(Rows())
    trainer.train()
    return trainer


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.WARNING, logger="apex")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "apex"]


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_a_healthy_run_is_not_changed(tmp_path, messages, options):
    plain, watched = FaultyClassifier(), FaultyClassifier()
    run_trainer(tmp_path, plain, [], **options)
    callback = OverflowCallback()
    run_trainer(tmp_path, watched, [callback], **options)
    assert watched.seen == plain.seen
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))
    assert callback.path is None
    assert not messages()
    assert not [*tmp_path.glob("overflow*")]
    assert not watched._forward_hooks


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"bf16": True, "max_grad_norm": 0.0}])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_fault_is_named_in_the_step_of_its_first_appearance(tmp_path, messages, options, kind):
    callback = OverflowCallback()
    run_trainer(tmp_path, FaultyClassifier(fail_at=[6], kind=kind), [callback], **options)
    assert callback.path == tmp_path / "overflow-step-4.txt"
    text = callback.path.read_text()
    assert text.startswith(f"Step 4: the {'loss is' if kind == 'forward' else 'gradients are'} not")
    assert "fault" in text
    first = callback.trace.first
    assert (first.module, first.direction) == ("fault", kind)
    found = json.loads(callback.path.with_suffix(".json").read_text())
    assert found["first"]["module"] == "fault"
    (message,) = messages()
    assert message.startswith(text.strip())


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_fault_is_named_where_the_trainer_computes_the_loss(tmp_path, kind):
    callback = OverflowCallback()
    trainer = functools.partial(transformers.Trainer, compute_loss_func=loss_of_logits)
    run_trainer(tmp_path, FaultyLogits(fail_at=[6], kind=kind), [callback], trainer)
    first = callback.trace.first
    assert (first.module, first.direction) == ("fault", kind)


def test_the_trace_leaves_gradients_and_random_numbers_as_they_were(tmp_path):
    class Compare(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            grads = [param.grad.clone() for param in model.parameters()]
            self.seen.append((torch.get_rng_state(), grads))

    before, after = Compare(), Compare()
    before.seen, after.seen = [], []
    callback = OverflowCallback()
    run_trainer(tmp_path, FaultyClassifier(fail_at=[6]), [before, callback, after])
    assert callback.path is not None
    for (state, grads), (later_state, later) in zip(before.seen, after.seen, strict=True):
        assert torch.equal(state, later_state)
        for grad, same in zip(grads, later, strict=True):
            assert torch.equal(grad.nan_to_num(7), same.nan_to_num(7))


def test_a_scale_that_is_finding_its_value_is_not_reported(tmp_path, messages):
    class Steep(ScaledTrainer):
        init_scale = 2.0**127

    callback = OverflowCallback(after_skips=2)
    net = FaultyClassifier()
    net.factor = 2.0
    trainer = run_trainer(tmp_path, net, [callback], kind=Steep)
    assert trainer.optimizer.scaler.get_scale() < 2.0**127
    assert callback.path is None
    assert not messages()


@pytest.mark.parametrize(
    ("kind", "fail_at", "step"), [("forward", [6], 4), ("backward", [2, 6, 8, 10], 5)]
)
def test_under_a_scaler_a_loss_is_reported_at_once_and_gradients_after_skips_in_a_row(
    tmp_path, kind, fail_at, step
):
    callback = OverflowCallback(after_skips=2)
    net = FaultyClassifier(fail_at=fail_at, kind=kind)
    run_trainer(tmp_path, net, [callback], kind=ScaledTrainer)
    assert callback.path == tmp_path / f"overflow-step-{step}.txt"
    assert callback.trace.first.module == "fault"
    assert all(param.isfinite().all() for param in net.parameters())  # such steps were skipped


def test_an_exception_leaves_no_hook_once_the_trainer_is_gone(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            raise KeyError("stop")

    net = FaultyClassifier()
    with pytest.raises(KeyError):
        run_trainer(tmp_path, net, [OverflowCallback(), Stop()])
    gc.collect()
    assert not net._forward_hooks


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_prepared_model_accumulates_clips_and_trains_as_in_fp32(tmp_path, level):
    def losses(level):
        net = FaultyClassifier()
        net.body[1].p = 0.0
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        kind = functools.partial(transformers.Trainer, optimizers=(optimizer, constant))
        options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}
        run_trainer(tmp_path, net, [], kind=kind, **options)
        amp.restore(net, optimizer)
        return net.seen

    assert losses(level) == pytest.approx(losses("O0"), abs=0.01)
