"""What libraries do with a prepared model after training, against its plain model."""

import copy
import functools
import io
import multiprocessing
import pickle

import pytest
import torch
from torch import nn

from apex import amp
from tests.clients.libraries import need
from tests.support import loops

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
level = loops.at_levels(*loops.MIXED)


@pytest.fixture
def peft():
    return need("peft")  # a log of its import keeps the caller's frame alive


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed.weight[:3] + x)


def test_safetensors_saves_tied_weights_for_a_plain_model(level, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = loops.prepared(level, model=Tied())
    safetensors.save_model(model, tmp_path / "model.safetensors")
    plain = Tied()
    safetensors.load_model(plain, tmp_path / "model.safetensors")
    assert loops.same(dict(plain.state_dict()), dict(model.state_dict()))


def test_a_pretrained_model_loads_as_trained(level, tmp_path):
    transformers = need("transformers")
    torch.manual_seed(0)
    options = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    model, _optimizer = loops.prepared(level, model=model)
    model.save_pretrained(tmp_path)
    model.transformer.save_pretrained(tmp_path / "part")
    for saved, path in ((model, tmp_path), (model.transformer, tmp_path / "part")):
        loaded = saved.__class__.from_pretrained(path)
        assert loaded.dtype is torch.float32
        assert loops.same(dict(loaded.state_dict()), dict(saved.state_dict()))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("frozen", [False, True])
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


def test_an_adapter_is_merged_into_the_plain_copy(peft, level):
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    model, _optimizer = loops.prepared(level, model=peft.get_peft_model(base, config))
    x = loops.batch()[0]
    with amp.disable_casts():
        plain = copy.deepcopy(model)
        expected = plain(x)
        merged = plain.merge_and_unload()
        torch.testing.assert_close(merged(x), expected, rtol=0.0, atol=1e-6)


def test_adapters_in_fp32_load_to_the_last_bit_and_train_on(peft, level, tmp_path):
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]))
    options = {"fp32_modules": ["*.lora_*"]} if level in loops.WITH_MASTERS else {}
    model, optimizer = loops.trained(level, model=model, **options)
    model.save_pretrained(tmp_path)
    saved = dict(copy.deepcopy(model.state_dict()))
    for _ in range(2):
        loops.train(model, optimizer)
        assert not loops.same(dict(model.state_dict()), saved)
        model.load_adapter(tmp_path, "default", is_trainable=True)  # as the Trainer resumes
        assert loops.same(dict(model.state_dict()), saved)


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_onnx_export_runs_or_names_its_line(level, dynamo):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, _optimizer = loops.trained(level)
    x = loops.batch()[0]
    with pytest.raises(RuntimeError, match=r"amp\.disable_casts"):
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=dynamo, verbose=False)
    file = io.BytesIO()
    with amp.disable_casts():
        plain = copy.deepcopy(model).eval()
        expected = plain(x)
        torch.onnx.export(plain, (x,), file, dynamo=dynamo, verbose=False)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected.detach())


def test_torchao_quantizes_a_copy_to_4_bits_as_the_plain_model(level):
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.IntxWeightOnlyConfig(torch.int4)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    plain = copy.deepcopy(net)
    model, _optimizer = loops.prepared(level, model=net)
    copied = copy.deepcopy(model)
    with amp.disable_casts(), torch.no_grad():
        for each in (copied, plain):
            quantization.quantize_(each, config)
        assert torch.equal(copied(torch.ones(4, 32)), plain(torch.ones(4, 32)))


def compiled_ahead(program, path):
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(path / "model.pt2"))
    return torch._inductor.aoti_load_package(path)


def by_executorch(program, path):
    exir = pytest.importorskip("executorch.exir")
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    lowered = exir.to_edge(program).to_executorch()
    method = runtime.load_program(lowered.buffer).load_method("forward")
    return lambda x: method.execute([x])[0]


@pytest.mark.parametrize("run", [compiled_ahead, by_executorch])
@pytest.mark.parametrize("level", ["O1", "O5"])  # a compilation takes ten seconds
def test_an_exported_copy_runs_elsewhere(level, run, tmp_path):
    model, _optimizer = loops.prepared(level)
    x = loops.batch()[0]
    with amp.disable_casts(), torch.no_grad():
        plain = copy.deepcopy(model).eval()
        found = run(torch.export.export(plain, (x,)), tmp_path)(x)
        torch.testing.assert_close(found, plain(x), rtol=0.0, atol=1e-6)


def test_torch_exports_and_scripts_the_plain_model(level):
    model, _optimizer = loops.prepared(level)
    x = loops.batch()[0]
    with amp.disable_casts():
        plain = copy.deepcopy(model)
        program = torch.export.export(plain, (x,)).module()
        part = nn.Sequential(*model.children())
        for each in (program, torch.jit.script(model), torch.jit.script(part)):
            assert torch.equal(each(x), plain(x))


def by_ema_pytorch(model):
    """Yields how to update an average of a model, and the average."""
    library = pytest.importorskip("ema_pytorch")
    options = {"beta": 0.9, "update_every": 1, "update_after_step": 0}
    average = library.EMA(copy.copy(model), **options)
    yield average.update, average.ema_model


def by_timm(model):
    utils = need("timm.utils")
    options = {}, {"foreach": False}, {"use_warmup": True, "update_after_step": 1}
    averages = [utils.ModelEmaV3(model, decay=0.9, **each) for each in options]
    for average in [utils.ModelEmaV2(model, decay=0.9), *averages]:
        yield functools.partial(average.update, model), average.module


@pytest.mark.parametrize("averages_of", [by_ema_pytorch, by_timm])
def test_libraries_average_the_plain_model(level, averages_of):
    model, optimizer = loops.prepared(level)
    twin = copy.deepcopy(model)
    averages, expected = [*averages_of(model)], [*averages_of(twin)]
    for x, y in loops.batches(4):
        loops.train_step(model, optimizer, x, y)
        twin.load_state_dict(model.state_dict())
        for update, _ in [*averages, *expected]:
            update()
    for (_, average), (_, other) in zip(averages, expected, strict=True):
        assert loops.same(dict(average.state_dict()), dict(other.state_dict()))


def step_in_child(queue, model, optimizer):
    loops.train_step(model, optimizer, *loops.batch())
    queue.put([value.tolist() for value in loops.masters(optimizer)])


def test_a_forked_process_trains_on(level):
    pair = loops.trained(level)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=step_in_child, args=(queue, *pair))
    process.start()
    found = queue.get()
    process.join()
    loops.train_step(*pair, *loops.batch())
    assert found == [value.tolist() for value in loops.masters(pair[1])]


def test_cloudpickle_and_skorch_pickle_the_plain_model(level):
    cloudpickle = pytest.importorskip("cloudpickle")
    skorch = pytest.importorskip("skorch")
    model, optimizer = loops.trained(level)
    expected = copy.deepcopy(model)
    loaded, its_optimizer = pickle.loads(cloudpickle.dumps((model, optimizer)))
    assert [*loaded.parameters()] == its_optimizer.param_groups[0]["params"]
    net = skorch.NeuralNet(model, nn.MSELoss).initialize()
    net.module_ = model
    for copied in (loaded, pickle.loads(pickle.dumps(net)).module_, copy.deepcopy(net).module_):
        assert loops.same(dict(copied.state_dict()), dict(expected.state_dict()))


def test_higher_differentiates_through_the_plain_copy(level):
    higher = pytest.importorskip("higher")
    pair, x, y = loops.trained(level), *loops.batch()
    grads = []
    with amp.disable_casts():
        for model, optimizer in (copy.deepcopy(pair), amp.restore(*pair)):
            with higher.innerloop_ctx(model, optimizer) as (inner, steps):
                steps.step(loops.loss_of(inner, x, y))
                loss = loops.loss_of(inner, x, y)
                grads.append(torch.autograd.grad(loss, [*inner.parameters(time=0)]))
    assert loops.same(*grads)


def test_layers_of_fp8_train_and_are_copied(level):
    float8 = pytest.importorskip("torchao.float8")
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    net = float8.convert_to_float8_training(net, config=float8.Float8LinearConfig(emulate=True))
    model, optimizer = loops.prepared(level, model=net)
    x, y = torch.randn(2, 32, 32)
    first, *_, last = loops.train(model, optimizer, data=[(x, y)] * 6)
    assert last < first
    assert type(copy.deepcopy(model)[0]) is float8.float8_linear.Float8Linear


@pytest.mark.parametrize("level", loops.WITH_MASTERS)
def test_trained_weights_in_8_bits_are_refused_with_the_level_that_takes_them(level):
    quantization = pytest.importorskip("torchao.quantization")
    training = pytest.importorskip("torchao.prototype.quantized_training")
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    quantization.quantize_(net, training.int8_weight_only_quantized_training())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"an fp32 master\. Use opt_level='O4'"):
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    amp.initialize(net, optimizer, opt_level="O4", verbosity=0)
    net(torch.randn(4, 32)).float().sum().backward()
    optimizer.step()
