"""Uses of apex in scripts are found, by whatever name, and each gets the right verdict."""

import importlib
import pkgutil
import textwrap
from pathlib import Path

import pytest

from apex._unavailable import INSTEAD
from apex.cli import BAD_INPUT, FAILED, NOT_WRITTEN, OK, main
from apex.tools.migrate import (
    ATTRIBUTES,
    NOTES,
    Name,
    migration_of,
    names,
    verdict_of,
    verdict_of_name,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


def found(program):
    return [(use.line, use.name) for use in names(textwrap.dedent(program))]


# -- finding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from apex import amp", "amp.initialize"),
        ("from apex import amp as a", "a.initialize"),
        ("import apex", "apex.amp.initialize"),
        ("import apex.amp", "apex.amp.initialize"),
        ("import apex.amp as mixed", "mixed.initialize"),
        ("from apex.amp import initialize", "initialize"),
        ("from apex.amp import initialize as prepare", "prepare"),
    ],
)
def test_a_use_is_found_by_every_name(imports, call):
    assert found(f"{imports}\nm = {call}(m)\n")[-1] == (2, "apex.amp.initialize")


def test_an_import_in_try_or_in_a_function_is_followed():
    program = """
    try:
        from apex.normalization import FusedLayerNorm as Norm
    except ImportError:
        from torch.nn import LayerNorm as Norm
    def build():
        from apex.optimizers import FusedAdam
        return Norm(4), FusedAdam
    """
    assert [name for _, name in found(program)] == [
        "apex.normalization.FusedLayerNorm",
        "apex.optimizers.FusedAdam",
        "apex.normalization.FusedLayerNorm",
        "apex.optimizers.FusedAdam",
    ]


def test_names_of_others_are_no_uses():
    program = """
    from torch.cuda import amp
    from .apex import amp as own
    from mypackage.apex import optimizers
    import apexlike
    amp.initialize(own, optimizers)
    """
    assert found(program) == []


@pytest.mark.parametrize(
    "program",
    [
        "def f(x, amp=amp.initialize):\n    return amp.state_dict\n",
        "def f():\n    for amp in amp_values:\n        amp.state_dict\namp.initialize\n",
        "def f():\n    try: pass\n    except E as amp: amp.state_dict\namp.initialize\n",
        "class A:\n    amp = 1\n    def f(self):\n        amp.initialize\n",
        "def f():\n    def amp(): amp.state_dict\namp.initialize\n",
        "def f():\n    import other as amp\n    amp.state_dict\namp.initialize\n",
        "async def f() -> amp.initialize:\n    amp: int = 1\n    amp.state_dict\n",
    ],
)
def test_a_name_bound_in_a_scope_hides_the_import_there_only(program):
    own = [name for _, name in found(f"from apex import amp\n{program}")]
    assert own == ["apex.amp", "apex.amp.initialize"]


def test_global_and_nonlocal_imports_are_followed():
    program = """
    def f():
        global amp
        from apex import amp
    def g():
        opt = None
        def h():
            nonlocal opt
            from apex import optimizers as opt
        return amp.initialize, opt.FusedAdam
    """
    assert [name for _, name in found(program)] == [
        *("apex.amp", "apex.optimizers"),
        *("apex.amp.initialize", "apex.optimizers.FusedAdam"),
    ]


def test_all_examples_work_with_this_package():
    migration = migration_of(EXAMPLES)
    assert len(migration.uses) > 30
    assert migration.counts["not supported"] == 0
    assert not migration.unread


def test_attributes_of_optimizers_are_found_without_an_import():
    program = "self.optimizer._amp_stash.lazy_init_called = True\nopt.clip_master_grads(1.0)\n"
    assert found(program) == [
        (1, "optimizer._amp_stash"),
        (2, "optimizer.clip_master_grads"),
    ]


# -- verdicts ----------------------------------------------------------------------------------


def public_names():
    """Every module of the package that scripts may import, and every public name in it."""
    roots = [importlib.import_module(root) for root in ("apex", "amp_C", "apex_C")]
    for root in roots:
        yield root.__name__
        for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            parts = info.name.split(".")[1:]
            inner = any(part.startswith("_") for part in parts)
            if inner or parts[0] in ("tools", "cli", "integrations"):
                continue
            module = importlib.import_module(info.name)
            yield info.name
            yield from (f"{info.name}.{name}" for name in getattr(module, "__all__", ()))


def test_every_public_name_of_the_package_works():
    own = list(public_names())
    assert len(own) > 200
    assert [name for name in own if verdict_of_name(name)[0] == "not supported"] == []


def test_the_notes_are_on_names_that_exist():
    for name in NOTES:
        assert verdict_of_name(name) == ("note", NOTES[name])


def test_what_is_not_here_is_not_supported_and_says_what_to_use():
    for name in INSTEAD:
        assert verdict_of_name(f"{name}.anything") == ("not supported", f"Use {INSTEAD[name]}.")


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attributes_of_optimizers_exist(attribute):
    from apex.amp.optimizers import AmpStashOptimizer
    from apex.fp16_utils import FP16_Optimizer

    wanted = {*dir(AmpStashOptimizer), *dir(FP16_Optimizer)}
    assert attribute in wanted or attribute == "_amp_stash"
    assert verdict_of_name(f"optimizer.{attribute}")[0] in ("works", "note")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("apex.optimizers.NpuFusedSGD", "apex.optimizers.NpuFusedSGD is not part of this apex."),
        ("apex.contrib.nothing.Thing", "apex.contrib.nothing is not part of this apex."),
        ("apex.amp.wrap.cached_cast", "apex.amp.wrap.cached_cast is not available: it replaced"),
    ],
)
def test_a_name_that_does_not_exist_is_not_supported_and_named(name, message):
    kind, text = verdict_of_name(name)
    assert kind == "not supported"
    assert text.startswith(message)


def test_an_argument_that_is_not_taken_is_not_supported():
    assert verdict_of(Name("apex.amp.initialize", 1, ("combine_grad",))) == (
        "not supported",
        "apex.amp.initialize takes no argument combine_grad: remove it.",
    )


def test_an_argument_without_effect_is_a_note():
    assert verdict_of(Name("apex.optimizers.FusedSGD", 1, ("materialize_master_grads",))) == (
        "note",
        "materialize_master_grads has no effect: remove it.",
    )


# -- the report --------------------------------------------------------------------------------

TRAIN = """
from apex import amp
from apex.optimizers import FusedNovoGrad
from apex.transformer import parallel_state

model, optimizer = amp.initialize(model, FusedNovoGrad(model.parameters()))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("import apex\nprint 'apex'\n")
    (tmp_path / "other.py").write_text("print 'not a word of it'\n")
    (tmp_path / "latin.py").write_bytes(b"# apex \xe9\n")
    for left_out in (".git", "build", "site-packages", "env"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "module.py").write_text("import apex.pyprof\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "net.py").write_text("import apex.mlp\n")
    return tmp_path


def test_a_folder_is_read_but_for_what_is_not_its_own(folder):
    migration = migration_of(folder)
    own = dict.fromkeys(Path(use.file).name for use in migration.uses)
    assert [*own] == ["train.py", "net.py"]
    assert migration.files == 5


def test_files_that_cannot_be_read_are_named_and_the_rest_goes_on(folder):
    migration = migration_of(folder)
    assert {Path(file).name: reason for file, reason in migration.unread} == {
        "broken.py": "line 2: not valid Python 3 syntax.",
        "latin.py": "cannot be decoded: invalid or missing encoding declaration.",
    }
    assert migration.failed


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
        "1 file: 2 uses work unchanged, 2 with a note, 1 unsupported.",
    ]


def test_the_json_has_every_use(folder):
    data = migration_of(folder).to_dict()
    assert data["counts"] == {"works": 3, "note": 2, "not supported": 1}
    assert data["uses"][2] == {
        "file": str(folder / "train.py"),
        "line": 4,
        "name": "apex.transformer.parallel_state",
        "verdict": "not supported",
        "remedy": "Use Megatron-LM's megatron.core, to which these modules have moved.",
    }
    assert [each["file"] for each in data["not_read"]] == [
        str(folder / "broken.py"),
        str(folder / "latin.py"),
    ]


# -- hostile files -----------------------------------------------------------------------------

USE = "from apex import amp\n"

# What Python says of some of them depends on its release, so that only the beginning is compared.
HOSTILE = {
    "utf16.py": (
        USE.encode("utf-16"),
        "cannot be decoded: invalid or missing encoding declaration.",
    ),
    "rot13.py": (
        b"# coding: rot13\n" + USE.encode(),
        "cannot be decoded: 'rot13' is not a text encoding",
    ),
    "unknown.py": (b"# coding: klingon\n", "cannot be decoded: unknown encoding: klingon."),
    "undefined.py": (b"# coding: undefined\n", "cannot be decoded: "),
    "brackets.py": (
        USE.encode() + b"x = " + b"[" * 300 + b"]" * 300,
        "line 2: not valid Python 3 syntax.",
    ),
    "sum.py": (
        USE.encode() + b"x = " + b"+".join([b"1"] * 20_000),
        "nested too deeply to be read.",
    ),
    "elif.py": (
        USE.encode() + b"if x: pass\n" + b"elif y: pass\n" * 3000,
        "nested too deeply to be read.",
    ),
    "null.py": (USE.encode() + b"x = '\0'\n", "line 1: not valid Python 3 syntax."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_no_parser_takes_is_one_line_and_the_rest_goes_on(tmp_path, name):
    data, reason = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "train.py").write_text(USE)
    migration = migration_of(tmp_path)
    ((file, why),) = migration.unread
    assert Path(file).name == name
    assert why.startswith(reason)
    assert "\n" not in why
    assert {Path(use.file).name for use in migration.uses} == {"train.py"}
    assert migration.failed


# -- remarks -----------------------------------------------------------------------------------


# -- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "code"), [(USE, OK), ("import apex.pyprof\n", FAILED)])
def test_the_exit_code_says_whether_every_use_works(tmp_path, capsys, text, code):
    path = tmp_path / "script.py"
    path.write_text(text)
    assert main(["migrate", str(path), "--json", str(tmp_path / "uses.json")]) == code
    assert capsys.readouterr().out.startswith(f"{path}\n")
    assert main(["migrate", str(path), "--json", "-"]) == code
    assert capsys.readouterr().out == (tmp_path / "uses.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no_such.py"], BAD_INPUT, "There is no file or folder no_such.py."),
        (["latin.py"], BAD_INPUT, "latin.py cannot be decoded"),
        (["lab.ipynb"], BAD_INPUT, "lab.ipynb is a notebook. Convert it to a script first: jup"),
        (["latin.py", "--json", "no/uses.json"], NOT_WRITTEN, "no/uses.json cannot be written"),
    ],
)
def test_what_cannot_be_read_or_written_is_said(
    tmp_path, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "lab.ipynb").write_text('{"cells": [{"source": ["from apex import amp"]}]}')
    assert main(["migrate", *arguments]) == code
    assert message in capsys.readouterr().err
