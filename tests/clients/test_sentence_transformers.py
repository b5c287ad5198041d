"""sentence-transformers 0.3.2: ``SentenceTransformer.fit(fp16=True)`` on a tiny BERT."""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests.clients.libraries import need, of_its_time

need("sentence_transformers")
transformers = need("transformers")

from sentence_transformers import (  # noqa: E402 - after the check
    SentencesDataset,
    SentenceTransformer,
    evaluation,
    losses,
    models,
)
from sentence_transformers.readers import InputExample  # noqa: E402

pytestmark = of_its_time

LEVELS = ("O0", "O1", "O2")
WORDS = ("red", "green", "blue", "cat", "dog", "bird")
PAIRS = [
    (f"{colour} {animal}", f"{other} {animal}", colour == other)
    for colour in WORDS[:3]
    for other in WORDS[:3]
    for animal in WORDS[3:]
]


@pytest.fixture(autouse=True)
def batch_axis(monkeypatch):
    """Makes tokenizers add a batch axis, as those of transformers 3.0 did unasked."""
    of_today = transformers.PreTrainedTokenizerBase.prepare_for_model
    of_then = functools.partialmethod(of_today, prepend_batch_axis=True)
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "prepare_for_model", of_then)


@pytest.fixture
def build(tmp_path):
    """Builds the same sentence encoder each time, from a tiny BERT saved to disk."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(tmp_path / "bert")  # fmt: skip

    def encoder():
        words = models.Transformer(str(tmp_path / "bert"), max_seq_length=8)
        pooling = models.Pooling(words.get_word_embedding_dimension())
        return SentenceTransformer(modules=[words, pooling])

    return encoder


def examples():
    return [InputExample(guid="", texts=[a, b], label=float(same)) for a, b, same in PAIRS]


def objective(encoder, loss):
    return DataLoader(SentencesDataset(examples(), encoder), batch_size=9), loss


def embeddings(encoder, column):
    sentences = [pair[column] for pair in PAIRS]
    return encoder.encode(sentences, show_progress_bar=False, convert_to_tensor=True).float()


def mean_error(encoder):
    wanted = torch.tensor([float(pair[2]) for pair in PAIRS])
    return F.mse_loss(F.cosine_similarity(embeddings(encoder, 0), embeddings(encoder, 1)), wanted)


def fit(encoder, *kinds, evaluator=None, **options):
    encoder.fit(
        [objective(encoder, kind(encoder)) for kind in kinds], evaluator, epochs=10,
        warmup_steps=0, scheduler="constantlr",
        optimizer_params={"lr": 5e-3, "eps": 1e-6, "correct_bias": False}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_fit_trains_and_saves_a_plain_encoder(build, level, tmp_path):
    encoder = build()
    before = mean_error(encoder)
    evaluator = evaluation.EmbeddingSimilarityEvaluator(objective(encoder, None)[0])
    fit(
        encoder, losses.CosineSimilarityLoss, fp16=True, fp16_opt_level=level,
        evaluator=evaluator, output_path=str(tmp_path / "best"),
    )  # fmt: skip
    low = torch.float16 if level == "O2" else torch.float32
    assert encoder[0].auto_model.pooler.dense.weight.dtype == low
    after = mean_error(encoder)
    assert after < before / 5

    encoder.save(str(tmp_path / "last"))
    best, last = (SentenceTransformer(str(tmp_path / name)) for name in ("best", "last"))
    for loaded in (best, last):
        assert {param.dtype for param in loaded.parameters()} == {torch.float32}
    assert mean_error(best) < before
    tolerance = 2.0**-8 if level == "O2" else 1e-6
    assert_close(embeddings(last, 0), embeddings(encoder, 0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_fit_trains_one_encoder_with_two_objectives(build, level):
    """It calls ``initialize`` for each loss; both hold the encoder."""
    encoder = build()
    before = mean_error(encoder)
    fit(
        encoder, losses.CosineSimilarityLoss, losses.ContrastiveLoss,
        fp16=True, fp16_opt_level=level,
    )  # fmt: skip
    assert mean_error(encoder) < before / 5
