"""Uses of apex in scripts are found, by whatever name, and each gets the right verdict."""

import ast
import importlib
import inspect
import json
import operator
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

from apex._unavailable import INSTEAD
from apex.cli import BAD_INPUT, FAILED, NOT_WRITTEN, OK, main
from apex.tools.migrate.definitions import definition_of, parameters
from apex.tools.migrate.names import Name, names
from apex.tools.migrate.notes import GONE, NOTES
from apex.tools.migrate.report import migration_of
from apex.tools.migrate.verdicts import verdict_of, verdict_of_name

EXAMPLES = Path(__file__).parents[2] / "examples"


def found(program):
    return [(use.line, use.name) for use in names(ast.parse(textwrap.dedent(program)))]


# -- finding -----------------------------------------------------------------------------------


USES = [
    ("from apex import amp", "amp.initialize"),
    ("from apex import amp as a", "a.initialize"),
    ("import apex", "apex.amp.initialize"),
    ("import apex.amp", "apex.amp.initialize"),
    ("import apex.amp as mixed", "mixed.initialize"),
    ("from apex.amp import initialize", "initialize"),
    ("from apex.amp import initialize as prepare", "prepare"),
    ("import apex; amp = apex.amp", "amp.initialize"),
    ("from apex.amp import *", "initialize"),
]


@pytest.mark.parametrize(("imports", "call"), USES)
def test_a_use_is_found_by_every_name(imports, call):
    assert found(f"{imports}\nm = {call}(m)\n")[-1] == (2, "apex.amp.initialize")


def test_an_import_in_try_or_in_a_function_is_followed():
    program = """
    try: from torch.nn import LayerNorm as Norm
    except ImportError: from apex.normalization import FusedLayerNorm as Norm
    try: from apex.mlp import MLP
    except ImportError: MLP = None
    def build():
        from apex.optimizers import FusedAdam
        return Norm(4), MLP, FusedAdam
    """
    own = ["apex.normalization.FusedLayerNorm", "apex.mlp.MLP", "apex.optimizers.FusedAdam"]
    assert [name for _, name in found(program)] == own * 2


def test_uses_are_in_the_order_of_their_lines():
    program = """
    from apex import amp
    @amp.half_function
    def loss(x):
        return amp.float_function(x)
    """
    assert [line for line, _ in found(program)] == [2, 3, 5]


def test_names_of_others_are_no_uses():
    program = """
    from torch.cuda import amp
    from .apex import amp as own
    from . import apex
    from mypackage.apex import optimizers
    import apexlike
    amp.initialize(own, optimizers)
    apex.amp.initialize(own)
    optimizer.step(scale=2.0)
    """
    assert found(program) == []


PROGRAMS = [
    "def f(x, amp):\n    return amp.state_dict\namp.initialize\n",
    "def f():\n    try: pass\n    except E as amp: amp.state_dict\namp.initialize\n",
    "def f():\n    def g(amp): amp.state_dict\n    amp.initialize\n",
    "class A:\n    amp = 1\n    def f(self):\n        amp.initialize\n",
    "def f():\n    import other as amp\n    amp.state_dict\namp.initialize\n",
    "def f():\n    global amp\n    from apex import amp\ndef g(): amp.initialize\n",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_name_bound_in_a_scope_hides_the_import_there_only(program):
    own = {name for _, name in found(f"from apex import amp\n{program}")}
    assert own == {"apex.amp", "apex.amp.initialize"}


def test_all_examples_work_with_this_package():
    migration = migration_of(EXAMPLES)
    assert len(migration.uses) > 30
    assert migration.counts["not supported"] == 0
    assert not migration.not_read


def test_attributes_of_optimizers_are_found_without_an_import():
    program = "self.optimizer._amp_stash.lazy_init_called = True\nopt.clip_master_grads(1.0)\n"
    assert found(program) == [(1, "optimizer._amp_stash"), (2, "optimizer.clip_master_grads")]


# -- verdicts ----------------------------------------------------------------------------------


def modules():
    """Every module of the package that scripts may import."""
    for root in ("apex", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"):
        module = importlib.import_module(root)
        yield module
        for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{root}."):
            part = info.name.split(".")[1]
            if not part.startswith("_") and part not in ("tools", "cli", "integrations"):
                yield importlib.import_module(info.name)


def test_every_name_of_the_package_works():
    names = [f"{module.__name__}.{name}" for module in modules() for name in vars(module)]
    names = [name for name in names if not name.rpartition(".")[2].startswith("__")]
    assert len(names) > 1000
    assert [name for name in names if verdict_of_name(name)[0] == "not supported"] == []


def test_arguments_read_from_the_source_are_those_that_functions_take():
    for module in modules():
        for name in getattr(module, "__all__", ()):
            read = parameters(definition_of(f"{module.__name__}.{name}"))
            if read is None or isinstance(getattr(module, name), ModuleType):
                continue
            taken = inspect.signature(getattr(module, name)).parameters.values()
            positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
            assert read == [p.name for p in taken if p.kind not in positional], name


def test_a_script_whose_names_all_exist_is_judged_without_torch(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    code = (
        "import sys; from apex.cli import main; main(sys.argv[1:]); "
        "sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    )
    for arguments in (["migrate", tmp_path / "train.py"], ["doctor", "--help"], ["--help"]):
        done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=False)
        assert done.returncode == 0


def test_the_notes_are_on_names_that_exist():
    for name in NOTES:
        assert verdict_of_name(name) == ("note", NOTES[name])
    of_contents = verdict_of_name("apex.amp.lists.torch_overrides")
    assert of_contents == ("note", NOTES["apex.amp.lists"])


def test_what_is_not_here_is_not_supported_and_says_what_to_use():
    for name in INSTEAD:
        assert verdict_of_name(f"{name}.anything") == ("not supported", f"Use {INSTEAD[name]}.")


NO_NAMES = [
    ("apex.optimizers.NpuFusedSGD", "apex.optimizers.NpuFusedSGD is not part of this apex."),
    ("apex.amp.frontend.plan", "apex.amp.frontend.plan is not part of this apex. If it comes"),
    ("apex.reparameterization.New", "apex.reparameterization.New is not part of this apex: use ap"),
    ("apex.contrib.nothing.Thing", "apex.contrib.nothing is not part of this apex. If it comes "),
    ("apex.amp.initialise", "apex.amp.initialise is not part of this apex. Did you mean init"),
    ("apex.optimizers.FusedAdm", "apex.optimizers.FusedAdm is not part of this apex. Did you"),
]


@pytest.mark.parametrize(("name", "message"), NO_NAMES)
def test_a_name_that_does_not_exist_is_not_supported_and_named(name, message):
    kind, text = verdict_of_name(name)
    assert kind == "not supported"
    assert text.startswith(message)


ARGUMENTS = [
    ("apex.amp.initialize", "combine_grad", "takes no argument combine_grad. Remove it."),
    ("apex.amp.initialize", "optlevel", "no argument optlevel. Did you mean opt_level?"),
    ("apex.optimizers.FusedAdam", "amsgard", "no argument amsgard. Did you mean amsgrad?"),
    ("apex.fp16_utils.FP16_Optimizer", "verbos", "no argument verbos. Did you mean verbose?"),
    ("apex.optimizers.FusedSGD", "materialize_master_grads", "has no effect: remove it."),
    ("apex.parallel.DistributedDataParallel", "num_allreduce_streams", "has no effect: remove it."),
]


@pytest.mark.parametrize(("name", "argument", "verdict"), ARGUMENTS)
def test_an_argument_that_is_not_taken_or_has_no_effect_is_told(name, argument, verdict):
    kind, text = verdict_of(Name(name, 1, (argument,), {argument: True}))
    assert kind == ("note" if "effect" in verdict else "not supported")
    assert text.endswith(verdict)


CALLS = [
    ("FusedAdam(params, amsgrad=True)", "FusedAdam does not support the AMSGrad variant."),
    ("FusedSGD(params, lr=-1.0)", "lr is -1.0; it must be "),
    ("import apex\napex.optimizers.FP16_Optimizer(optimizer, verbose=False)", ""),
    ("FusedAdam(params, master_weights=True)", "master_weights=True only with capturable"),
    ("FusedAdam(params, master_weights=True, capturable=args.capturable)", ""),
    ("amp.initialize(m, o, opt_level='O6')", "Unexpected optimization level 'O6'."),
    ("amp.initialize(m, o, opt_level='O1', master_weights=True)", "has no meaning at O1"),
    ("amp.initialize(m, verbosity=0, keep_batchnorm_fp32=True)", "32=True has no meaning at O1"),
    ("amp.initialize(m, o, opt_level=args.level, master_weights=True)", ""),
    ("amp.initialize(m, o, master_weights=True, **options)", ""),
    ("amp.initialize(m, o, opt_level='O6', enabled=False)", ""),
    ("FusedAdam(params).step(grads=[])", "call step() without arguments"),
    ("FusedAdam(params).step()", ""),
    ("from apex.contrib.optimizers import FusedAdam as Old\nOld(params).step(grads=[])", ""),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_a_call_that_always_raises_is_not_supported_and_no_other(call, message):
    imports = """
from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from torch.nn.parallel import DistributedDataParallel as DDP
"""
    verdicts = map(verdict_of, names(ast.parse(imports + call)))
    raising = [text for kind, text in verdicts if kind == "not supported"]
    assert len(raising) == bool(message)
    assert all(text.startswith("Raises an error: ") and message in text for text in raising)


WRAPPED = [
    ("amp.initialize(DDP(m), o)", "pass the model itself, and wrap it after amp.initialize"),
    ("m = DDP(m)\namp.initialize(m, o)", "pass the model itself"),
    ("amp.initialize(DDP(m).cuda(), o)", "pass the model itself"),
    ("m = DDP(m)\nm = m.to(device)\namp.initialize(m, o)", "pass the model itself"),
    ("amp.initialize(DDP(m).module, o)", ""),
    ("m = amp.initialize(m)\nm = DDP(m)\ntrain(m)", ""),
    ("m = DDP(m)\nm = net\namp.initialize(m, o)", ""),
    ("amp.initialize(self.DataParallel(m), o)", ""),
    ("def f():\n    m = DDP(m)\ndef g():\n    amp.initialize(m, o)", ""),
]


@pytest.mark.parametrize(("call", "message"), WRAPPED)
def test_a_model_that_is_wrapped_too_early_is_told(call, message):
    test_a_call_that_always_raises_is_not_supported_and_no_other(call, message)


POSITIONAL = [
    ("amp.initialize(m, o, True, 'O2', keep_batchnorm_fp32=True)", ""),
    ("amp.initialize(m, o, False, 'O6')", ""),
    ("import apex\napex.RNN.LSTM(4, 4, 1)", ""),  # it takes any argument
    ("amp.initialize(m, o, *options, keep_batchnorm_fp32=True)", ""),
    ("amp.initialize(m, o, True, 'O6')", "Unexpected optimization level 'O6'."),
    ("FusedSGD(params, -0.1)", "lr is -0.1; it must be "),
    ("FusedSGD(params, 0.1, 0.9, nesterov=True)", ""),
    ("FusedSGD(params, 0.1, momentum, nesterov=True)", ""),
    ("FusedAdam(params, 1e-3, True, (0.9, 0.999), 1e-8, True, 0.0, True)", "the AMSGrad variant"),
]


@pytest.mark.parametrize(("call", "message"), POSITIONAL)
def test_arguments_by_position_count_as_those_by_name(call, message):
    test_a_call_that_always_raises_is_not_supported_and_no_other(call, message)


PLUGIN = "pytorch_lightning.plugins.ApexMixedPrecisionPlugin"
OLD = [
    ("from torch._six import inf", "torch._six.inf", "not supported"),
    ("from collections import Iterable", "collections.Iterable", "not supported"),
    (f"import pytorch_lightning\n{PLUGIN}()", PLUGIN, "not supported"),
    ("import collections\ncollections.Mapping", "collections.Mapping", "not supported"),
    ("import numpy as np\nnp.float(1)", "numpy.float", "not supported"),
    ("import torch\ntorch.load(path)", "torch.load()", "note"),
    ("parser.add_argument('--local_rank', type=int)", "--local_rank", "note"),
    ("correct[:k].view(-1).float()", "x[:k].view(-1)", "note"),
    ("import torch\ntorch.load(path, weights_only=True)", "", ""),
    ("parser.add_argument('--local_rank', '--local-rank')", "", ""),
    ("import numpy as np\nnp.float32(1)", "", ""),
    ("from collections.abc import Iterable\nfrom collections import OrderedDict", "", ""),
]


OLD_CALLS = [
    ("import torch\ntorch.stft(signal, 512)", "torch.stft()"),
    ("import torch\ntorch.stft(signal, 512, return_complex=True)", ""),
    ("import torch\ntorch.stft(signal, 512, **options)", ""),
    ("import yaml\nyaml.load(file)", "yaml.load()"),
    ("import yaml\nyaml.load(file, yaml.Loader)\nyaml.load(file, Loader=yaml.Loader)", ""),
    ("from librosa.filters import mel as mel_fn\nmel_fn(rate, 512)", "librosa.filters.mel()"),
    ("import librosa\nlibrosa.filters.mel(sr=rate, n_fft=512)", ""),
]


@pytest.mark.parametrize(("line", "name"), OLD_CALLS)
def test_a_call_without_an_argument_that_libraries_require_today_is_named(line, name):
    uses = names(ast.parse(line))
    assert [use.name for use in uses] == [name] * bool(name)
    assert all(verdict_of(use)[0] == "not supported" for use in uses)


@pytest.mark.parametrize(("line", "name", "kind"), OLD)
def test_what_old_scripts_use_beside_apex_is_named(line, name, kind):
    uses = names(ast.parse(line))
    assert [use.name for use in uses] == [name] * bool(name)
    for use in uses:
        found, text = verdict_of(use)
        assert found == kind
        assert text


def test_what_is_said_to_be_gone_from_torch_and_numpy_is_gone():
    matrix = torch.eye(2)
    for name in GONE:
        library, _, rest = name.partition(".")
        if library in ("torch", "numpy") and "(" not in rest:
            # NumPy warns of some names first, and torch keeps functions that only raise.
            with pytest.raises((AttributeError, DeprecationWarning, FutureWarning, RuntimeError)):
                operator.attrgetter(rest)(importlib.import_module(library))(matrix, matrix)


@pytest.mark.parametrize(("name", "raises"), [("Adam", True), ("AdamW", True), ("NAdam", False)])
def test_a_beta_that_is_an_integer_is_named_where_torch_rejects_it(name, raises):
    line = "from torch import optim\noptim.{}(params, betas=({}, {}))"
    for betas in ((0, 0.9), (0.9, 0)):
        verdicts = [verdict_of(use)[0] for use in names(ast.parse(line.format(name, *betas)))]
        assert verdicts == ["not supported"] * raises
    assert not names(ast.parse(line.format(name, 0.0, 0.9)))


@pytest.mark.parametrize("name", ["StepLR", "ReduceLROnPlateau"])
def test_a_scheduler_s_verbose_is_named_as_torch_rejects_it(name):
    line = "from torch.optim import lr_scheduler\nlr_scheduler.{}(optimizer, {}verbose={})"
    for value in (True, False, "args.verbose"):
        (use,) = names(ast.parse(line.format(name, "patience=2, ", value)))
        assert verdict_of(use)[0] == "not supported"
    assert not names(ast.parse(line.format(name, "not_", True)))


# -- the report --------------------------------------------------------------------------------

TRAIN = """
from apex import amp
from apex.optimizers import FusedNovoGrad
from apex.transformer import parallel_state

model, optimizer = amp.initialize(model, FusedNovoGrad(model.parameters()))
"""
USE = b"from apex import amp\n"
UNREADABLE = {
    "broken.py": (
        b"import apex\nx = = 1\n",
        "is not valid Python 3: invalid syntax (broken.py, line 2).",
    ),
    "old.py": (b"import apex\nprint 1\n", "is not valid Python 3: "),
    "latin.py": (b"# apex \xe9\n", "cannot be decoded: invalid or missing encoding declaration."),
    "late.py": (USE + b"\n# \xe9\n", "cannot be decoded: 'utf-8' codec can't decode byte"),
    "rot13.py": (b"# coding: rot13\n" + USE, "cannot be decoded: 'rot13' is not a text encoding"),
    "sum.py": (USE + b"x = " + b"+".join([b"1"] * 20_000), "nested too deeply to be read."),
    "null.py": (
        USE + b"x = '\0'\n",
        "is not valid Python 3: source code string cannot contain null bytes.",
    ),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "other.py").write_text("print 'not a word of it'\n")
    for name, (data, _) in UNREADABLE.items():
        (tmp_path / name).write_bytes(data)
    for left_out in (".git", "build", "site-packages", "env"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "module.py").write_text("import apex.pyprof\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "net.py").write_text("import apex.mlp\nx = '\\d'\n")
    return tmp_path


def test_a_folder_is_read_but_for_what_is_not_its_own_and_what_no_parser_takes(folder):
    migration = migration_of(folder)
    own = dict.fromkeys(Path(use.file).name for use in migration.uses)
    assert [*own] == ["train.py", "net.py"]
    assert migration.files == 3 + len(UNREADABLE)
    assert migration.failed
    whys = {Path(each["file"]).name: each["reason"] for each in migration.not_read}
    assert whys.keys() == UNREADABLE.keys()
    for name, (_, reason) in UNREADABLE.items():
        assert whys[name].startswith(reason)
        assert "\n" not in whys[name]
        assert f"{name} {reason}" in str(migration)
        assert ("This is Python 2." in whys[name]) == (name == "old.py")


def test_the_report_has_a_row_for_each_name_with_its_lines_and_remedy(folder):
    assert str(migration_of(folder / "train.py")).splitlines() == [
        str(folder / "train.py"),
        "  works          apex.amp  (line 2)",
        "  note           apex.optimizers.FusedNovoGrad  (line 3, 6)",
        f"{'':17}" + NOTES["apex.optimizers.FusedNovoGrad"],
        "  not supported  apex.transformer.parallel_state  (line 4)",
        "                 Use Megatron-LM's megatron.core, to which these modules have moved.",
        "  works          apex.amp.initialize  (line 6)",
        "",
        "Files: 1. Uses that work unchanged: 2, with a note: 2, unsupported: 1.",
    ]


def test_a_remedy_is_told_once_in_a_report(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("import distutils\n")
    report = str(migration_of(tmp_path))
    assert report.count("  not supported  distutils  (line 1)") == 2
    assert report.count("Removed in Python 3.12") == 1


EXIT_CODES = [
    (["train.py"], FAILED, "unsupported: 1."),
    (["deep"], OK, "Files: 1. Uses that work unchanged: 1"),
    (["unread"], FAILED, "latin.py cannot be decoded"),
    (["no_such.py"], BAD_INPUT, "no_such.py cannot be read: No such file or directory."),
    (["latin.py"], BAD_INPUT, "latin.py cannot be decoded"),
    (["lab.ipynb"], BAD_INPUT, "lab.ipynb is a notebook. Convert it to a script first: jup"),
    (["empty"], BAD_INPUT, "empty has no *.py files"),
    (["latin.py", "--json", "no/uses.json"], NOT_WRITTEN, "no/uses.json cannot be written"),
    (["a" * 300], BAD_INPUT, "a cannot be read: File name too long."),
]


@pytest.mark.parametrize(("arguments", "code", "message"), EXIT_CODES)
def test_the_exit_code_says_if_all_works(folder, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    (folder / "unread").mkdir()
    (folder / "unread" / "latin.py").write_bytes(UNREADABLE["latin.py"][0])
    (folder / "lab.ipynb").write_text('{"cells": [{"source": ["from apex import amp"]}]}')
    assert main(["migrate", *arguments]) == code
    assert message in "".join(capsys.readouterr())


def test_the_json_has_every_use(folder, capsys):
    main(["migrate", str(folder), "--json", "-"])
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"works": 3, "note": 2, "not supported": 1}
    assert data["uses"][2]["name"] == "apex.transformer.parallel_state"
    assert len(data["not_read"]) == len(UNREADABLE)
