"""What libraries do with a prepared model after training, against its plain model."""

import copy
import io

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
levels = pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed.weight[:3] + x)


@levels
def test_safetensors_saves_tied_weights_for_a_plain_model(level, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = loops.prepared(level, model=Tied())
    safetensors.save_model(model, tmp_path / "model.safetensors")
    plain = Tied()
    safetensors.load_model(plain, tmp_path / "model.safetensors")
    assert loops.same(dict(plain.state_dict()), dict(model.state_dict()))


@levels
def test_a_pretrained_model_loads_as_trained(level, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    model, _optimizer = loops.prepared(level, model=model)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.dtype is torch.float32
    assert loops.same(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("frozen", [False, True])
@levels
def test_torchao_quantizes_the_model_and_its_copy(level, frozen, name):
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    model, _optimizer = loops.prepared(level, model=net)
    model.requires_grad_(not frozen).eval()
    plain = copy.deepcopy(model)
    x = torch.rand(4, 32)
    with amp.disable_casts(), torch.no_grad():
        expected = plain(x)
        for each in (model, plain):
            quantization.quantize_(each, getattr(quantization, name)())
            for _ in range(4):
                torch.testing.assert_close(each(x).float(), expected, rtol=0.05, atol=0.05)


@levels
def test_an_adapter_is_merged_into_the_plain_copy(level):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    model, _optimizer = loops.prepared(level, model=peft.get_peft_model(base, config))
    x = loops.batch()[0]
    with amp.disable_casts():
        plain = copy.deepcopy(model)
        expected = plain(x)
        merged = plain.merge_and_unload()
        torch.testing.assert_close(merged(x), expected, rtol=0.0, atol=1e-6)


@levels
def test_an_onnx_export_runs_or_names_its_line(level):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, _optimizer = loops.prepared(level)
    x = loops.batch()[0]
    with pytest.raises(RuntimeError, match=r"amp\.disable_casts"):
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)
    file = io.BytesIO()
    with amp.disable_casts():
        plain = copy.deepcopy(model).eval()
        expected = plain(x)
        torch.onnx.export(plain, (x,), file, dynamo=False)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected.detach())


@levels
def test_torch_exports_and_scripts_the_plain_model(level):
    model, _optimizer = loops.prepared(level)
    x = loops.batch()[0]
    with amp.disable_casts():
        plain = copy.deepcopy(model)
        program = torch.export.export(plain, (x,)).module()
        for each in (program, torch.jit.script(model)):
            assert torch.equal(each(x), plain(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_ema_pytorch_averages_the_plain_copy(level):
    ema_pytorch = pytest.importorskip("ema_pytorch")
    model, optimizer = loops.prepared(level)
    twin = copy.deepcopy(model)
    options = {"beta": 0.9, "update_every": 1, "update_after_step": 0}
    average = ema_pytorch.EMA(copy.copy(model), **options)
    expected = ema_pytorch.EMA(twin, **options)
    for x, y in loops.batches(4):
        loops.train_step(model, optimizer, x, y)
        twin.load_state_dict(model.state_dict())
        average.update()
        expected.update()
    found = dict(average.ema_model.state_dict())
    assert loops.same(found, dict(expected.ema_model.state_dict()))
