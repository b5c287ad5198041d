"""``apex trace``: scripts run as under python; what first made inf or NaN is named."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch

from apex import cli
from apex.cli import main
from tests.support import loops

HEAD = """\
import sys
import torch
from torch import nn
torch.manual_seed(0)

class Exp(nn.Module):
    def forward(self, x):
        return x.exp()

def Net():
    return nn.Sequential(nn.Linear(2, 2), Exp())

def train(net, xs):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for step, x in enumerate(xs):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x).float(), torch.ones(2, 2)).backward()
        optimizer.step()
        print("step", step)


"""
EXP = 8
"""Line of the operator that overflows."""

GOOD = "train(Net(), [torch.ones(2, 2)] * 3)\n"
GOOD_VERDICT = "apex trace: no inf or NaN in train.py reached a gradient, the loss or a weight."
BAD = "train(Net(), [torch.ones(2, 2), torch.full((2, 2), 1e6), torch.ones(2, 2)])\n"


@pytest.fixture
def trace(tmp_path, capsys, monkeypatch):
    """Traces a script in an empty folder; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(body, *arguments, options=(), head=HEAD):
        (tmp_path / "train.py").write_text(head + textwrap.dedent(body))
        code = main(["trace", *options, "train.py", *arguments])
        return code, *capsys.readouterr()

    return run


def check(traced, code, *words):
    ended, out, _ = traced
    assert ended == code, out
    assert [each for each in words if each not in out] == [], out


def report_of(output):
    return output[output.index("\napex trace: ") + 1 :].splitlines()


# -- what is found -------------------------------------------------------------------------------


def test_the_report_names_operator_module_line_values_cause_and_remedy(trace, tmp_path):
    code, out, _ = trace(BAD)
    assert code == cli.NOT_FINITE
    script = tmp_path / "train.py"
    lines = report_of(out)
    assert lines[0] == "apex trace: train.py made inf, after 1 optimizer step."
    said = "First overflow: aten.exp in 1, forward, returned inf in float32 (largest finite"
    assert lines[1].startswith(said)
    assert lines[2:4] == [f"  at     {script}:{EXP}", "         return x.exp()"]
    assert lines[4].startswith("  in     float32 [2, 2] ")
    assert lines[5].startswith("  cause  range: ")
    assert lines[6].startswith("  remedy 1. clamp the input")
    assert "logsumexp" in lines[7]
    assert lines[8] == "  hit    the gradients of 0.bias, 0.weight"
    assert lines[9].startswith("Then the script was stopped. With --keep-going")
    assert re.fullmatch(r"Traced \d+ operators and 1 optimizer step\.", lines[-1])
    assert out.startswith("step 0\n\napex trace")  # the second step did not end


def test_data_that_are_too_large_are_no_training_that_diverges(trace):
    traced = trace(BAD.replace("1e6", "1e10"))
    check(traced, cli.NOT_FINITE, "First overflow: aten.exp in 1", "remedy 1. clamp the input")
    assert "diverges" not in traced[1]


def test_with_keep_going_the_script_runs_to_its_end(trace):
    code, out, _ = trace(BAD, options=["--keep-going"])
    assert code == cli.NOT_FINITE
    told, ended = out.index("the report follows at the end."), out.index("step 2\n")
    assert told < ended < out.rindex("First overflow: aten.exp in 1")
    assert out.count("the report follows") == 1
    assert "stopped" not in out
    traced = re.findall(r"Traced \d+ operators", out + trace(BAD)[1])
    assert traced[0] == traced[1]  # the rest runs untraced


def test_a_clean_script_is_exit_code_0_and_runs_to_its_end(trace):
    code, out, _ = trace(GOOD)
    assert code == cli.OK
    assert out.startswith("step 0\nstep 1\nstep 2\n")
    assert report_of(out)[0] == GOOD_VERDICT
    assert "overflowed" not in out
    assert "No operator" not in out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when dynamo is imported
@pytest.mark.parametrize("how", ["net = torch.compile(net, backend='eager')", "net.compile()"])
def test_compiled_models_run_uncompiled_and_are_traced(trace, how):
    code, out, err = trace(f"net = Net()\n{how}\n" + BAD.replace("Net()", "net"))
    assert code == cli.NOT_FINITE
    assert "aten.exp in 1, forward" in out
    assert err == ""


def test_threads_of_the_script_are_traced(trace):
    traced = trace("""
        import threading
        worker = threading.Thread(target=train, args=(Net(), [torch.full((2, 2), 1e6)] * 2))
        worker.start()
        worker.join()
    """)
    # An exception in a thread would end that thread only.
    check(traced, cli.NOT_FINITE, "aten.exp in 1, forward", "step 1")


def test_threads_of_the_script_are_measured_and_run_to_their_end(trace):
    body = """
        import threading
        net = nn.Linear(4, 4).bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), 1e-6)
        def work():
            for _ in range(12):
                optimizer.zero_grad()
                ((net(torch.ones(2, 4).bfloat16()) + 1000) - 1000).float().mean().backward()
                optimizer.step()
            print("done")
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    """
    for option, said in (("--digits", "aten.sub outside the model"), ("--updates", "12 steps")):
        traced = trace(body, options=[option])
        check(traced, cli.NOT_FINITE, "done", said)
        assert traced[2] == ""


def test_what_reaches_weights_in_a_step_has_hit_them(trace):
    traced = trace("""
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=float("inf"))
        net(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    """)
    check(traced, cli.NOT_FINITE, "cause  update: ")
    assert "hit    no gradient, loss or weight" not in traced[1]


def test_an_evaluation_after_a_step_is_no_update(trace):
    traced = trace(f"{GOOD}with torch.no_grad():\n    torch.zeros(1).log()\n")
    check(traced, cli.NOT_FINITE, "First inf: aten.log outside the model, forward, returned -inf")


# -- loss scales -----------------------------------------------------------------------------------

SCALED = """
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale={scale})
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.ones(1, 2)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer), scaler.update()
"""

APEX = """
    from apex import amp
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
    for _ in range(6):
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).float().sum() * 3
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
"""

OLD = """
    from apex.fp16_utils import FP16_Optimizer
    net = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
    for _ in range(6):
        optimizer.zero_grad()
        optimizer.backward(net(torch.ones(1, 2).half()).float().sum() * 3)
        optimizer.step()
"""

HIGH = SCALED.format(scale=2.0**18)
FAR = SCALED.format(scale=2.0**40)
SCALES = {
    "GradScaler": (HIGH, "Healthy: 3 of 6 backward passes"),
    "fused": (HIGH.replace("lr=1e-3", "lr=1e-3, fused=True"), "Healthy: 3 of 6 backward passes"),
    "a scale far too high": (FAR, "Not settled: 6 of 6 backward passes"),
    "far too high, fused": (FAR.replace("lr=1e-3", "lr=1e-3, fused=True"), "Not settled: 6 of 6"),
    "amp": (APEX, "Healthy: 2 of 6 backward passes"),
    "amp, fused": (APEX.replace("lr=1e-3", "lr=1e-3, fused=True"), "Healthy: 2 of 6"),
    "FP16_Optimizer": (OLD, "Healthy: 2 of 6 backward passes"),
}


@pytest.mark.parametrize(("body", "said"), SCALES.values(), ids=SCALES)
def test_overflows_by_which_a_scale_finds_its_value_are_no_fault(trace, body, said):
    check(trace(body), cli.OK, said, " overflowed.")


def test_a_scale_beside_a_fault_is_not_called_healthy(trace):
    traced = trace(f"{HIGH}    (net(torch.ones(1, 2)) * 0).log().sum().backward()\n")
    check(traced, cli.NOT_FINITE, "First inf: aten.log", "after 3 optimizer steps")
    assert "overflowed" not in traced[1]


def test_a_reading_of_scaled_gradients_hits_nothing(trace):
    reads = "scaler.scale(loss).backward()\n        print(float(net.weight.grad.norm()))"
    traced = trace(SCALED.format(scale=2.0**8).replace("scaler.scale(loss).backward()", reads))
    check(traced, cli.NOT_FINITE, "uses gradients before they are unscaled", "Scaled gradients: ")
    assert "\n  hit " not in traced[1]


def test_data_of_another_process_is_data(trace):
    body = """
        xs = torch.ones(6, 2, 2)
        xs[4, 1, 1] = float(sys.argv[1])
        options = {"collate_fn": torch.tensor, "multiprocessing_context": "fork"}
        xs = torch.utils.data.DataLoader(xs.tolist(), None, num_workers=1, **options)
        train(nn.Linear(2, 2), xs)
    """
    found = "aten.addmm in the model, forward, returned nan in float32"
    check(trace(body, "nan"), cli.NOT_FINITE, found, "cause  data: ", "after 4 optimizer steps")


def test_a_file_that_holds_nan_weights_is_no_data(trace):
    traced = trace("""
        net, state = nn.Linear(2, 2), nn.Linear(2, 2).state_dict()
        state["weight"].numpy()[0, 0] = float("nan")  # unseen by torch, as in a file
        net.load_state_dict(state)
        train(net, [torch.ones(2, 2)] * 3)
    """)
    cause = "cause  weights: the model's weights or buffers"
    check(traced, cli.NOT_FINITE, cause, "remedy 1. check the file that they come from")


def test_nan_in_an_evaluation_is_named_below_the_all_clear(trace):
    traced = trace("""
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        ignored = torch.tensor([-100])
        for _ in range(2):
            nn.functional.cross_entropy(net(torch.ones(1, 2)), ignored + 100).backward()
            optimizer.step()
            with torch.no_grad():
                print(nn.functional.cross_entropy(net(torch.ones(1, 2)), ignored).item())
    """)
    check(traced, cli.OK, GOOD_VERDICT, "Unused NaN: aten.nll_loss_forward", "no elements")


def test_an_inf_that_an_operator_limits_in_fp32_is_not_named(trace):
    code, out, _ = trace("""
        x = torch.full((2, 2), 100.0)
        for _ in range(2):
            (nn.Linear(2, 2)(x / 100) + x.exp().clamp(max=9.0)).sum().backward()
    """)
    assert code == cli.OK
    assert "Unused" not in out


def test_a_parameter_that_nothing_initialized_is_named_even_if_its_values_are_finite(trace):
    traced = trace("""
        class Scaled(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)
                self.scale = nn.Parameter(torch.empty(2))

            def forward(self, x):
                return super().forward(x) * self.scale.nan_to_num(1.0, 1.0, 1.0).clamp(-1, 1)

        net = Scaled()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    """)
    assert traced[1].count("Nothing had written values to scale before the first step") == 1


STANDS_STILL = """
    net = nn.Linear(2, 2).bfloat16()
    average = torch.full((2,), 300.0, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for _ in range(99):
        optimizer.zero_grad()
        net(torch.ones(2, 2, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        average += 0.5
"""


def test_a_clean_trace_points_to_the_options_that_name_what_stands_still(trace):
    check(trace(STANDS_STILL), cli.OK, "`apex trace --digits train.py` finds operators")
    traced = trace(STANDS_STILL, options=["--digits", "--json", "digits.json"])
    lost = "Digits first lost: aten.add_ outside the model"
    check(traced, cli.NOT_FINITE, lost, "Then the script was stopped")
    with open("digits.json") as file:
        assert json.load(file)["worst"]["kind"] == "lost update"
    traced = trace(STANDS_STILL, options=["--updates"])
    lost = "Updates lost: 100 % of the weights that 10 steps should have moved stayed"
    check(traced, cli.NOT_FINITE, lost)
    traced = trace(GOOD, options=["--updates", "--keep-going"])
    check(traced, cli.OK, "Updates arrive: 0 % of the weights that 3 steps")
    assert "hold inf or NaN" not in traced[1]
    traced = trace(STANDS_STILL, options=["--updates", "--keep-going"])
    check(traced, cli.NOT_FINITE, "weights that 99 steps should have moved")


def test_an_optimizer_that_raises_on_wider_weights_has_no_verdict(trace):
    body = """
        class Narrow(torch.optim.SGD):
            def step(self):
                if self.param_groups[0]["params"][0].dtype is torch.float64:
                    raise ValueError("weights in fp32 only")
        net = nn.Linear(2, 2)
        optimizer = Narrow(net.parameters(), lr=0.1)
        net(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    """
    said = "Narrow has no verdict: weights in fp32 only"
    check(trace(body, options=["--updates"]), cli.OK, said)


@pytest.mark.parametrize("option", ["--digits", "--updates"])
def test_weights_that_are_nan_are_no_all_clear(trace, option):
    body = """
        net = nn.Linear(2, 2).bfloat16()
        nn.init.constant_(net.weight, float("nan"))
        train(net, [torch.ones(2, 2, dtype=torch.bfloat16)] * 3)
    """
    said = "The weights hold inf or NaN after the last step, of which these figures say nothing: "
    check(trace(body, options=[option]), cli.NOT_FINITE, f"{said}`apex trace train.py` names")


def test_gradients_that_are_all_0_are_no_all_clear(trace):
    body = """
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).bfloat16()
        nn.init.constant_(net[0].bias, -100.0)
        train(net, [torch.ones(2, 2, dtype=torch.bfloat16)] * 3)
    """
    said = "No weight got a gradient: aten.threshold_backward in 1 returned zeros in bfloat16.\n"
    for option in ("--digits", "--updates"):
        check(trace(body, options=[option]), cli.NOT_FINITE, said)


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_weights_that_never_get_a_gradient_are_named(trace, level):
    body = f"""
        from apex import amp
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        net[0].bias.requires_grad_(False)
        nn.init.zeros_(net[2].weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        net, optimizer = amp.initialize(net, optimizer, opt_level="{level}", verbosity=0)
        for factor in (1.0, 1.0, 0.0):
            loss = net(torch.ones(2, 2)).mean() * factor
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    said = "No step found a gradient other than 0 for 0.weight, 0.bias."
    check(trace(body, options=["--updates"]), cli.OK, f"{said}\n")


UNDERFLOW = """
from apex import amp

def main():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"opt_level": "O2", "loss_scale": 1.0, "verbosity": 0}
    net, optimizer = amp.initialize(net, optimizer, **options)
    for _ in range(2):
        loss = net(torch.ones(1, 2)).sum() * 1e-9
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

main()
"""


def test_gradients_that_all_underflow_are_named_with_a_remedy(trace):
    words = (
        "No weight got a gradient: ",
        "returned zeros in float16.\n",
        "cause  underflow: gradients below 3e-8 have no place in fp16",
        "1. scale the loss, loss_scale='dynamic'",
        "2. use bf16, which has the range of fp32: opt_level='O5'",  # the model is gone
    )
    check(trace(UNDERFLOW, options=["--digits"]), cli.NOT_FINITE, *words)
    traced = trace(UNDERFLOW, options=["--updates"])
    check(traced, cli.NOT_FINITE, "`apex trace --digits` looks for the former")


CUTS = [
    (
        "net[1](net[0](x).detach()).sum()",
        "backward passes end in Linear[1].\n{line}\n{source}\nWhat comes before it is data, "
        "detached, frozen, or an integer.\nGradients reach Linear[1]:bias, Linear[1]:weight: ",
    ),
    ("(net(x).round().int() * scale).sum()", "backward passes end outside the model.\n{line}"),
    ("net(x).sum().detach().requires_grad_()", "no operator ran backward, as if the loss were"),
    ("net.requires_grad_(False)(x).sum() * scale", "backward passes end outside the model.\n"),
]


@pytest.mark.parametrize("option", ["--digits", "--updates"])
@pytest.mark.parametrize(("cut", "said"), CUTS)
def test_the_place_where_gradients_end_is_named(trace, option, cut, said):
    body = f"""
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        scale = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
        x = torch.ones(2, 2)
        for _ in range(2):
            loss = {cut}
            loss.backward()
            optimizer.step()
    """
    traced = trace(body, options=[option])
    with open("train.py") as file:
        lines = [line.strip() for line in file]
    source = f"loss = {cut}"
    line = f"{os.path.abspath('train.py')}:{lines.index(source) + 1}"
    who = "step found" if "Gradients reach" in said else "weight got"
    said = f"No {who} a gradient: {said.format(line=line, source=source)}"
    check(traced, cli.NOT_FINITE, said)


@pytest.mark.parametrize("option", ["--digits", "--updates"])
def test_gradients_of_a_closure_are_gradients(trace, option):
    body = """
        net = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(2, 2)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    """
    code, out, _ = trace(body, options=[option])
    assert code == cli.OK
    assert "No weight got a gradient" not in out


LIMITED = [
    ("1 / (1 + d**2)", cli.OK, "made inf, which reached no gradient, loss or weight."),
    ("(d * d).clamp(max=9.0)", cli.OK, "made inf, which reached no gradient, loss or weight."),
    ("((q := d * d).clamp(max=9.0) + 0 * q)", cli.NOT_FINITE, "made inf, after 0 optimizer steps."),
    ("d / d.pow(2).sum().sqrt()", cli.NOT_FINITE, "made inf, after 0 optimizer steps."),
]


@pytest.mark.parametrize(("line", "code", "said"), LIMITED)
def test_an_overflow_that_an_operator_limits_is_no_fault(trace, line, code, said):
    traced = trace(f"""
        net = nn.Linear(2, 2).half()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            d = torch.full((2, 2), 1000.0, dtype=torch.float16)
            (net(d / 1000) + {line}).float().mean().backward()
            optimizer.step()
    """)
    heading = "Harmless" if code == cli.OK else "First"
    check(traced, code, said, f"{heading} overflow: aten.")


# -- the script runs as under python -----------------------------------------------------------

SEES = """\
import json, os, pickle, sys


class Own:
    pass


if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Own()))) is Own
    assert sys.modules["__main__"].Own is Own
    with open(os.environ["SEEN"], "w") as file:
        file_of_script = os.path.abspath(sys.argv[0])
        json.dump([__file__, file_of_script, sys.argv[1:], os.path.abspath(sys.path[0])], file)
"""


@pytest.mark.parametrize(
    "how", [["project/sub/train.py"], ["link.py"], ["-m", "project.sub.train"]]
)
def test_a_script_sees_what_it_sees_under_python(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = tmp_path / "project" / "sub"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SEES)
    (tmp_path / "link.py").symlink_to(folder / "train.py")
    given = [*how, "--lr", "0.1", "--json", "x", "--", "-m"]
    monkeypatch.setenv("SEEN", str(tmp_path / "python"))
    subprocess.run([sys.executable, *given], check=True)
    monkeypatch.setenv("SEEN", str(tmp_path / "trace"))
    assert main(["trace", *given]) == cli.OK
    for name in [name for name in sys.modules if name.startswith("project")]:
        del sys.modules[name]
    assert (tmp_path / "python").read_text() == (tmp_path / "trace").read_text()


def test_everything_is_put_back(trace):
    def state():
        own = sys.argv, list(sys.path), sys.modules["__main__"], sys.stdout, sys.stderr
        return *own, threading.getprofile(), list(warnings.filters), len(hooks())

    hooks = lambda: torch.nn.modules.module._global_forward_hooks  # noqa: E731
    before = state()
    swaps = "sys.stdout, sys.stderr = sys.stderr, sys.stdout\n"
    trace(f"sys.argv.append('x')\nsys.path.append('y')\n{swaps}{GOOD}")
    assert state() == before


ENDS = [
    ("sys.exit(7)", 7),
    ("sys.exit()", 0),
    ("sys.exit(-1)", 255),
    ("sys.exit('no data')", 1),
    ("raise ValueError('no data')", 1),
    ("raise ValueError", 1),
    ("raise SystemExit(2)", 2),
    ("this is no Python", 1),
    ("exec('1 / 0')", 1),
]


@pytest.mark.parametrize(("body", "status"), ENDS)
def test_the_script_s_own_exit_code_passes_through(trace, body, status):
    code, out, err = trace(body)
    assert code == status
    assert report_of(out)[0] == "apex trace: train.py ran no operator in its own process."
    if "data" in body:
        assert err.endswith("no data\n")
    assert f"tools{os.sep}script.py" not in err  # the traceback is the script's own
    assert "does not fit" not in out
    is_exit = "exit" in body.lower()
    assert ("The script failed: " in out) == (not is_exit)
    assert ("Trace the program that its processes run" in out) == (status == 0)


MASKED = """
from apex import amp

class Masked(nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(x > 0, -1e9)

net = Masked(4, 4)
net, _ = amp.initialize(net, torch.optim.SGD(net.parameters(), 0.1), opt_level="O2", verbosity=0)
net(torch.ones(1, 4))
"""


def test_a_mask_that_does_not_fit_fp16_is_named_with_its_line_and_amp_s_remedy(trace, tmp_path):
    code, out, _ = trace(MASKED)
    (line,) = [n for n, text in enumerate((HEAD + MASKED).splitlines(), 1) if "-1e9" in text]
    report = report_of(out)
    assert code == cli.FAILED
    assert report[0] == GOOD_VERDICT
    assert report[1].endswith(f"without overflow ({tmp_path / 'train.py'}:{line})")
    assert report[2] == "  The number does not fit. Mask with torch.finfo(scores.dtype).min."
    assert report[3].startswith("  amp.initialize prepared the model Masked to compute in 16 bits")
    assert "torch.finfo" in report[4]  # amp's own remedy


EARLY_ENDS = [
    ("sys.exit('loss is not finite')", cli.NOT_FINITE, "hit    no gradient, loss or weight"),
    ("raise KeyboardInterrupt", cli.INTERRUPTED, "The script was interrupted. These are"),
]


@pytest.mark.parametrize(("end", "code", "said"), EARLY_ENDS)
def test_a_script_that_ends_before_its_backward_pass_is_reported(trace, end, code, said):
    traced = trace(f"""
        loss = (nn.Linear(2, 2)(torch.zeros(1, 2)) * 0).log().mean()
        {end}
    """)
    check(traced, code, "First inf: aten.log outside the model", said)


# -- arguments, JSON, errors -----------------------------------------------------------------------


def test_json_holds_the_fault_and_how_the_script_ended(trace, tmp_path):
    trace(f"import os; os.chdir(os.sep)\n{BAD}", options=["--json", "trace.json"])
    with open(tmp_path / "trace.json") as file:
        data = json.load(file, parse_constant=pytest.fail)
    assert data["first"]["op"] == "aten.exp"
    assert data["first"]["inputs"][0]["shape"] == [2, 2]
    assert data["ending"] == {"status": 0, "error": "", "interrupted": False, "stopped": True}
    assert (data["steps"], data["steps_before"], data["certain"]) == (1, 1, True)


# -- processes ---------------------------------------------------------------------------------


def test_a_forked_process_ends_with_its_own_exit_code_and_without_a_report(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    sys.exit(3)\n"
        "print('ended with', os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n"
    )
    command = [sys.executable, "-W", "ignore", "-m", "apex", "trace", script]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert out.startswith("ended with 3\n")
    assert out.count("apex trace:") == 1


def test_a_report_is_finished_when_another_rank_has_ended(tmp_path, monkeypatch):
    """torchrun sends SIGTERM to all ranks when the first has ended."""
    (tmp_path / "train.py").write_text("")
    written = cli.write_json

    def terminated(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        written(*args)

    monkeypatch.setattr(cli, "write_json", terminated)
    assert main(["trace", "--json", str(tmp_path / "out.json"), str(tmp_path / "train.py")]) == 0
    assert (tmp_path / "out.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reports_and_writes_for_itself(trace, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    traced = trace(BAD, options=["--json", "trace.json"])
    check(traced, cli.NOT_FINITE, f"[rank {rank}] First overflow: aten.exp in 1, forward")
    with open(f"trace.rank{rank}.json") as file:
        assert json.load(file)["rank"] == rank


def test_apex_may_be_in_a_zip_file(tmp_path):
    sources = Path(loops.SOURCES).parent
    archive = shutil.make_archive(tmp_path / "packages", "zip", sources, "apex")
    script = tmp_path / "train.py"
    script.write_text(HEAD + BAD)
    command = [sys.executable, "-m", "apex", "trace", script]
    environ = {**os.environ, "PYTHONPATH": archive}
    traced = subprocess.run(command, check=False, env=environ, capture_output=True, text=True)
    assert (traced.returncode, traced.stderr) == (cli.NOT_FINITE, "")
    assert "First overflow: aten.exp in 1, forward" in traced.stdout
