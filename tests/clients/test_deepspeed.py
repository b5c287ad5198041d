"""DeepSpeed 0.16: the section ``amp`` of its configuration."""

import pytest
import torch.distributed
from torch.nn import functional as F
from torch.testing import assert_close

from apex import amp
from tests.clients.classes import EXACT, LEVELS, adam, labelled_rows, layers
from tests.clients.libraries import free_port, need, of_its_time
from tests.support.loops import masters

deepspeed = need("deepspeed")
if deepspeed.__version__.startswith("0.19"):
    pytest.skip("DeepSpeed has removed the section", allow_module_level=True)

pytestmark = of_its_time


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A process group of one, as DeepSpeed's launcher starts it, on the CPU."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(free_port()))
        # Its own all-reduce for CPUs: minutes of compilation, not used by a group of one.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        # It refuses to reduce fp16 gradients on a CPU that has no instructions for them.
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        deepspeed.init_distributed("gloo")
        yield
        torch.distributed.destroy_process_group()


@pytest.fixture
def start():
    """Builds engines; ends their sessions, for DeepSpeed never lets an engine go."""
    engines = []

    def build(level, accumulate=1):
        model = layers()
        config = {
            "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": accumulate,
            "gradient_clipping": 1.0, "amp": {"enabled": level is not None, "opt_level": level},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        if level:
            engines.append(engine)
        return engine

    yield build
    for engine in engines:
        amp.restore(engine.module, engine.optimizer)


def run_engine(engine, steps):
    """Returns the loss of every step, of which four are one epoch."""
    losses = []
    for index in steps:
        x, y = labelled_rows(index % 4)
        loss = F.cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_the_engine_trains_as_fp32_does(start, level, accumulate):
    expected = run_engine(start(None, accumulate), range(24))
    losses = run_engine(start(level, accumulate), range(24))
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert_close(losses, expected, **(EXACT if level == "O0" else {"rtol": 0.05, "atol": 0.01}))


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_resumes(start, level, tmp_path):
    whole = start(level)
    run_engine(whole, range(8))
    first = start(level)
    run_engine(first, range(4))
    first.save_checkpoint(tmp_path)
    second = start(level)
    second.load_checkpoint(tmp_path)
    run_engine(second, range(4, 8))
    assert_close(masters(second.optimizer), masters(whole.optimizer), **EXACT)
