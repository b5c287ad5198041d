"""Tiny models of many architectures are as near to fp32 as plain casts of the same kind are."""

import copy

import pytest
import torch

from apex import amp
from tests.clients.libraries import need, of_its_time

transformers = need("transformers")

pytestmark = of_its_time

# Each configuration takes the names that it knows, and keeps the others as attributes.
SIZES = {
    "vocab_size": 99, "max_position_embeddings": 64, "image_size": 32, "patch_size": 8,
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["intermediate_size", "d_ff", "n_inner", "decoder_ffn_dim"], 64),
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "encoder_layers": 2, "state_size": 4,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_local_experts": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
ARCHITECTURES = [
    "albert", "bart", "bert", "bloom", "deit", "distilbert", "electra", "gemma", "gpt2", "gpt_neox",
    "llama", "mamba", "mistral", "mixtral", "mpnet", "opt", "phi", "qwen2", "roberta",
    "stablelm", "t5", "vit", "xglm",
]  # fmt: skip


def results(model, inputs):
    """Returns the first output and all gradients, as one vector each."""
    output = model(**inputs)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output.float() * weights).mean().backward()
    grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    return output.detach().float().flatten(), torch.cat(grads).float()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_model_is_as_near_to_fp32_as_a_plain_cast(level, name):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**SIZES)
    model = transformers.AutoModel.from_config(config).eval()
    plain = copy.deepcopy(model)
    ours = copy.deepcopy(model)
    inputs = {"input_ids": torch.arange(2, 26).reshape(2, 12)}
    cast_inputs = inputs
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(2, 3, 32, 32).bfloat16()
        inputs = {"pixel_values": pixels.float()}
        cast_inputs = {"pixel_values": pixels}
    elif config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    exact = results(model, inputs)
    if level == "O5":
        plain.bfloat16()
        cast = results(plain, cast_inputs)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            cast = results(plain, inputs)
    ours = amp.initialize(ours, opt_level=level, verbosity=0)
    for value, mine, other in zip(exact, results(ours, inputs), cast, strict=True):
        assert 0 < (mine - value).norm() <= 1.2 * (other - value).norm()
