"""What is sent, as docs/distributed.md says it."""

import json
import re
from pathlib import Path

import pytest

from apex._torch.dispatcher import release
from benchmarks import traffic

pytestmark = pytest.mark.distributed
DOCS = Path(__file__).parents[2] / "docs/distributed.md"
ROW = re.compile(r"\| (\w+) \| (O\d) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|")


def measure(rank):
    return traffic.measure()


@pytest.mark.skipif(release < (2, 7), reason="FSDP2 of this torch does not run on CPUs")
def test_the_bytes_of_a_step_are_those_on_record(on_two_ranks):
    recorded = json.loads(traffic.RESULT.read_text("utf-8"))
    for measured in on_two_ranks(measure):
        assert measured == recorded


def test_the_table_of_the_docs_shows_the_record():
    params = sum(param.numel() for param in traffic.network().parameters())
    shown = {}
    for wrapper, level, *columns, per_param in ROW.findall(DOCS.read_text("utf-8")):
        sizes = [int(column.replace(",", "")) for column in columns]
        assert float(per_param) == round(sum(sizes) / params, 2)
        shown.setdefault(wrapper, {})[level] = sizes
    recorded = json.loads(traffic.RESULT.read_text("utf-8"))
    assert shown == {
        wrapper: {level: columns_of(wrapper, sent["later"]) for level, sent in levels.items()}
        for wrapper, levels in recorded.items()
    }


def columns_of(wrapper, sent):
    """Gradients, weights, buffers and flags."""
    if wrapper == "fully_shard":
        return [sent["reduce-scatter"], sent["all-gather"], sent.get("all-reduce", 0)]
    return [sent["all-reduce"], 0, sent["broadcast"]]
