"""The pages hold in a clone and on a git host, where nothing is built."""

import re
from collections import Counter

import pytest

from apex.amp.properties import level_defaults, opt_levels, to_policy
from docs.measured import filled, made_by
from tests.package.docs.pages import ROOT, name
from tests.support.features import TORCH_VERSION

FOLDERS = ("docs", "tests", "examples", "benchmarks")
EVERY = [
    *ROOT.glob("*.md"),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("**/*.md"))),
]
EVERY = [page for page in EVERY if "_build" not in page.parts]
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(page):
    """Returns the anchors that a git host gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    counts = Counter()
    for heading in re.findall(r"^#+ +(.+?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        counts[anchor] += 1
        yield anchor if counts[anchor] == 1 else f"{anchor}-{counts[anchor] - 1}"


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_of_the_repository(page):
    for inline, listed in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        target = inline or listed
        if re.match(r"https?:|mailto:", target):
            assert "apex-amp/apex-amp" not in target, target  # a file of ours: relative
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_nothing_but_what_comes_from_the_code_needs_a_build():
    allowed = {"code-block": {"memory"}, "csv-table": {"op_policy"}}
    for page in (ROOT / "docs").glob("**/*.md"):
        text = page.read_text("utf-8")
        for directive in re.findall(r"^(?:```|:::)\{([\w-]+)\}", text, re.MULTILINE):
            reference = directive == "eval-rst" and page.parent.name == "reference"
            assert reference or page.stem in allowed.get(directive, ()), (name(page), directive)
        assert not re.search(r"\{(?:ref|download|doc)\}`", text), name(page)


STALE = {
    "--local-rank=0": "import argparse\nargparse.ArgumentParser().parse_args(['--local-rank=0'])",
    "Weights": "import argparse, io, torch\nfile = io.BytesIO()\n"
    "torch.save({'args': argparse.Namespace()}, file)\nfile.seek(0)\ntorch.load(file)",
    "_six": "from torch._six import inf",
    "numpy": "import numpy\nnumpy.float",
    "Iterable": "from collections import Iterable",
    "stride": "import torch\ntorch.ones(4, 5).t().eq(1)[:3].view(-1)",
    "betas": "import torch\ntorch.optim.Adam([torch.ones(1)], betas=(0, 0.9))",
    "verbose": "import torch\noptimizer = torch.optim.SGD([torch.ones(1)])\n"
    "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, verbose=True)",
    "syntax": "x.cuda(async=True)",
    "boolean": "import torch\ntorch.ones(2).masked_fill_(torch.ones(2).byte(), 0)",
    "next": "import torch\niter(torch.utils.data.DataLoader([1])).next()",
    "indices": "import torch\ntorch.arange(4)[torch.arange(4) / 2]",
    "object.__init__": "import torch\nclass Sampler(torch.utils.data.Sampler):\n"
    "    def __init__(self):\n        super().__init__([1])\nSampler()",
    "stft": "import torch\ntorch.stft(torch.ones(16), 4)",
    "Loader": "import io, yaml\nyaml.load(io.StringIO())",
    "rfft": "import torch\ntorch.rfft(torch.ones(2), 1)",
    "zero_": "import torch\nw = torch.ones(1, requires_grad=True)\nw.sum().backward()\n"
    "torch.optim.SGD([w]).zero_grad()\nw.grad.zero_()",
    "DistributedDataParallel": "import torch\nfrom apex import amp\n"
    "from tests.support.ranks import fake_group\nwith fake_group(0, 1):\n"
    "    amp.initialize(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)))",
}
"""Code that stops at each message of the page."""


@pytest.mark.skipif(TORCH_VERSION < (2, 10), reason="this torch stops at fewer of them")
@pytest.mark.parametrize("word", STALE)
def test_the_messages_of_old_scripts_are_those_that_they_stop_at(word, capsys):
    text = (ROOT / "docs/fix_script.md").read_text("utf-8").partition("changed since:")[2]
    messages = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    (message,) = [message for message in messages if word in message]
    assert len(messages) == len(STALE)
    with pytest.raises((Exception, SystemExit)) as raised:
        exec(STALE[word], {})
    assert message in f"{raised.value}{capsys.readouterr().err}"


@pytest.mark.parametrize("page", ["why", "howto/memory"])
def test_measured_tables_hold_the_values_of_the_results(page):
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    assert "<!-- measured" in text
    assert filled(text) == text, "run python -m docs.measured"
    assert text.count(f"*{made_by()}; by `python -m benchmarks`.*") == text.count("<!-- measured")


def test_the_levels_of_the_readme_and_of_their_page_are_those_of_the_code():
    pages = [(ROOT / path).read_text("utf-8") for path in ("README.md", "docs/concepts/levels.md")]
    tables = [re.search(r"<!-- levels -->\n(.*?)<!--", text, re.DOTALL)[1] for text in pages]
    assert tables[0] == tables[1]
    lines = tables[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0].strip("`") for row in rows] == sorted(opt_levels)
    names = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "None": "fp32"}
    for level, _, weights, operators, norm, masters, scale in rows:
        policy = to_policy(level_defaults(level.strip("`")))
        stored = names.get(str(policy.param_dtype), "fp32")
        computed = names[str(policy.compute_dtype)] if policy.compute_dtype else stored
        assert (weights, scale) == (stored, str(policy.loss_scale))
        assert operators.removesuffix(" where it is safe") == computed
        assert ("where it is safe" in operators) == (policy.compute_dtype is not None)
        assert (masters == "yes") == policy.master_weights
        follows = policy.compute_dtype is not None
        kept = "fp32" if policy.batchnorm_fp32 else stored
        assert norm == ("follows its input" if follows else kept)
