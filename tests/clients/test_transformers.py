"""transformers: T5 on our norm, Llama's positions, and the Trainer's apex backend of 4.57."""

import importlib.metadata
import importlib.util
import sys

import pytest
import torch
from torch.testing import assert_close

from apex import amp, normalization
from tests.clients.classes import LEVELS
from tests.clients.libraries import need
from tests.support.loops import at_levels, descend, prepared

need("transformers")
need("transformers.models.t5.modeling_t5")

from transformers import LlamaConfig, LlamaForCausalLM, T5Config  # noqa: E402 - after the checks
from transformers.models.t5 import modeling_t5  # noqa: E402

pytestmark = pytest.mark.clients
level = at_levels(*LEVELS)

VERSION = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])

takes_our_norm = pytest.mark.skipif(VERSION > (5, 5), reason="T5 took apex's norm up to 5.5")


@pytest.fixture
def own_t5(monkeypatch):
    """transformers' T5 as it is where apex is not installed."""
    monkeypatch.setitem(sys.modules, "apex.normalization", None)
    spec = importlib.util.spec_from_file_location(
        "transformers.models.t5.own_modeling_t5", modeling_t5.__file__
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def tiny_t5(module=modeling_t5):
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return module.T5ForConditionalGeneration(config)


def tokens():
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(1, 32, (3, 7), generator=generator),
        "labels": torch.randint(1, 32, (3, 5), generator=generator),
    }


# -- T5 --------------------------------------------------------------------------------------


@takes_our_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_on_our_norm_computes_what_it_does_on_its_own(own_t5, dtype):
    assert modeling_t5.T5LayerNorm is normalization.FusedRMSNorm is not own_t5.T5LayerNorm
    ours, own = tiny_t5().to(dtype), tiny_t5(own_t5).to(dtype)
    own.load_state_dict(ours.state_dict())
    # Each rounds in its own places: 2 layers of 5 norms, a few eps each.
    tolerance = 32 * torch.finfo(dtype).eps
    results = [model(**tokens()) for model in (ours, own)]
    assert_close(results[0].logits, results[1].logits, rtol=tolerance, atol=tolerance)
    for result in results:
        result.loss.backward()
    for param, expected in zip(ours.parameters(), own.parameters(), strict=True):
        assert_close(param.grad, expected.grad, rtol=tolerance, atol=tolerance)


def test_t5_trains_at_every_level(level):
    losses = train_model(*prepare_model(level, tiny_t5()), tokens())
    assert losses[-1] < losses[0]


# -- Llama -----------------------------------------------------------------------------------


def tiny_llama():
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def angles(model, dtype):
    x = torch.zeros(1, 1, 32, dtype=dtype)
    return model.model.rotary_emb(x, torch.tensor([[4097]]))


def train_model(model, optimizer, batch, run=None):
    run = model if run is None else run
    losses = []
    for _ in range(3):
        loss = run(**batch).loss
        descend(loss, optimizer)
        losses.append(loss.item())
    return losses


def train_llama(model, optimizer, run=None):
    ids = tokens()["input_ids"]
    return train_model(model, optimizer, {"input_ids": ids, "labels": ids}, run)


def prepare_model(level, model):
    return prepared(level, lambda p: torch.optim.AdamW(p, lr=1e-2), model, loss_scale=2.0**7)


@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.float16), ("O5", torch.bfloat16)])
def test_llama_s_angles_are_those_of_fp32_within_a_rounding(level, dtype):
    expected = angles(tiny_llama(), torch.float32)
    model, _ = prepare_model(level, tiny_llama())
    for found, exact in zip(angles(model, dtype), expected, strict=True):
        assert torch.equal(found, exact.to(dtype))


def test_llama_as_it_is_loaded_in_bf16_trains_at_every_level(level, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    before = [param.detach().float() for param in model.parameters()]
    model, optimizer = prepare_model(level, model)
    assert all(map(torch.equal, amp.master_params(optimizer), before))
    expected = angles(tiny_llama(), torch.float32)
    for found, exact in zip(angles(model, torch.float32), expected, strict=True):
        assert torch.equal(found, exact)
    losses = train_llama(model, optimizer)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_llama_trains_as_in_eager():
    torch._dynamo.reset()
    expected = train_llama(*prepare_model("O5", tiny_llama()))
    model, optimizer = prepare_model("O5", tiny_llama())
    run = torch.compile(model, backend="aot_eager")
    assert train_llama(model, optimizer, run) == pytest.approx(expected, rel=2.0**-7)


# -- Trainer ---------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(1, 32, (6,), generator=generator)
        return {"input_ids": row, "labels": row}


@pytest.fixture
def run_trainer(tmp_path):
    """Trains a tiny T5 with the Trainer; returns it and the loss of every step."""
    if VERSION >= (5, 0):
        pytest.skip("transformers 5 has no apex backend")
    trainer_module = need("transformers.trainer")
    need("accelerate")

    def run(level, **options):
        arguments = trainer_module.TrainingArguments(
            output_dir=str(tmp_path), fp16=True, half_precision_backend="apex",
            fp16_opt_level=level, use_cpu=True, max_steps=4, per_device_train_batch_size=3,
            learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False, **options,
        )  # fmt: skip
        trainer = trainer_module.Trainer(tiny_t5(), arguments, train_dataset=Sentences())
        trainer.train()
        return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return run


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_trainer_trains_on_its_apex_backend(run_trainer, level):
    trainer, losses = run_trainer(level)
    assert trainer.use_apex
    assert amp._amp_state.opt_properties.options["opt_level"] == level
    assert losses[-1] < losses[0]


def test_the_trainer_clips_accumulates_and_takes_our_fused_adam(run_trainer):
    from apex.optimizers import FusedAdam

    trainer, losses = run_trainer(
        "O1", optim="adamw_apex_fused", max_grad_norm=0.1, gradient_accumulation_steps=2
    )
    assert isinstance(trainer.optimizer, FusedAdam)
    assert losses[-1] < losses[0]
