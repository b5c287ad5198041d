"""DeepSpeed 0.16: the section ``amp`` of its configuration."""

import warnings
from contextlib import contextmanager

import pytest
import torch.distributed
from torch.nn import functional as F
from torch.testing import assert_close

from apex import amp
from tests.clients.classes import EXACT, LEVELS, adam, labelled_rows, layers
from tests.clients.libraries import free_port, need, of_its_time
from tests.support.loops import at_levels, masters, values

deepspeed = need("deepspeed")
if deepspeed.__version__.startswith("0.19"):
    pytest.skip("DeepSpeed has removed the section", allow_module_level=True)

pytestmark = of_its_time
level = at_levels(*LEVELS)


@contextmanager
def group(rank, size, port):
    """A process group, as DeepSpeed's launcher starts it, on the CPU."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        # Its own all-reduce for CPUs: minutes of compilation, not used here.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        # It refuses to reduce fp16 gradients on a CPU that has no instructions for them.
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        deepspeed.init_distributed("gloo")
        yield


@pytest.fixture(scope="module", autouse=True)
def alone():
    with group(0, 1, free_port()):
        yield
        torch.distributed.destroy_process_group()


def engine_of(level, accumulate):
    model = layers()
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0, "amp": {"enabled": level is not None, "opt_level": level},
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=adam(model), config=config)[0]


@pytest.fixture
def start():
    """Builds engines; ends their sessions, for DeepSpeed never lets an engine go."""
    engines = []

    def build(level, accumulate=1):
        engine = engine_of(level, accumulate)
        if level:
            engines.append(engine)
        return engine

    yield build
    for engine in engines:
        amp.restore(engine.module, engine.optimizer)


EPOCH = range(4)


def run_engine(engine, seeds):
    """Returns the loss of every step, on batches of these seeds."""
    losses = []
    for seed in seeds:
        x, y = labelled_rows(seed)
        loss = F.cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_engine_trains_as_fp32_does(start, level, accumulate):
    expected = run_engine(start(None, accumulate), [*EPOCH] * 6)
    losses = run_engine(start(level, accumulate), [*EPOCH] * 6)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert_close(losses, expected, **(EXACT if level == "O0" else {"rtol": 0.05, "atol": 0.01}))


def test_a_checkpoint_resumes(start, level, tmp_path):
    whole = start(level)
    run_engine(whole, [*EPOCH] * 2)
    first = start(level)
    run_engine(first, EPOCH)
    first.save_checkpoint(tmp_path)
    second = start(level)
    second.load_checkpoint(tmp_path)
    run_engine(second, EPOCH)
    assert_close(masters(second.optimizer), masters(whole.optimizer), **EXACT)


def train_by_turns(rank, levels):
    """Trains on batches of its own; returns losses and weights at each level."""
    warnings.simplefilter("ignore")
    found = []
    with group(rank, 2, 1):
        for level in levels:
            engine = engine_of(level, 2)
            losses = run_engine(engine, range(rank, 16, 2))
            weights = masters(engine.optimizer) if level else values(engine.module.parameters())
            found.append((losses, weights))
            if level:
                amp.restore(engine.module, engine.optimizer)
    return found


@pytest.mark.distributed
def test_two_ranks_train_alike_and_as_in_fp32(on_two_ranks):
    ranks = on_two_ranks(train_by_turns, (None, *LEVELS))
    for (_, weights), (_, other) in zip(*ranks, strict=True):
        assert_close(weights, other, **EXACT)
    for expected, *found in ranks:
        for level, (losses, _) in zip(LEVELS, found, strict=True):
            tolerance = EXACT if level == "O0" else {"rtol": 0.05, "atol": 0.01}
            assert_close(losses, expected[0], **tolerance)
