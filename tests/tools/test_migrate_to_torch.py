"""What a rewritten program looks like, and which programs stay as they are."""

import pytest

pytest.importorskip("libcst", reason="the migrate extra is not installed")

from tests.tools.migrate_cases import HEAD, PLAIN, changed_lines, losses_of, refusals, to_torch

O4 = PLAIN.replace("O1", "O4")


# -- what is written ---------------------------------------------------------------------------


def test_fp16_gets_autocast_and_a_scaler():
    after, _ = to_torch(PLAIN)
    device = "next(model.parameters()).device.type"
    assert changed_lines(PLAIN, after) == [
        f"scaler = torch.amp.GradScaler({device})",
        f"with torch.autocast({device}, torch.float16):",
        "scaler.scale(loss).backward()",
        "scaler.step(optimizer)",
        "scaler.update()",
    ]
    assert "apex" not in after


def test_bf16_gets_autocast_alone():
    after, _ = to_torch(O4)
    assert changed_lines(O4, after) == [
        "with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):",
        "loss.backward()",
    ]


def test_fp32_gets_nothing():
    program = PLAIN.replace("O1", "O0")
    assert changed_lines(program, to_torch(program)[0]) == ["loss.backward()"]


def test_bf16_with_a_dynamic_scale_gets_a_scaler_and_fp16_with_scale_1_none():
    dynamic = O4.replace("verbosity=0", 'loss_scale="dynamic"')
    unscaled = PLAIN.replace("verbosity=0", "loss_scale=1.0")
    assert "GradScaler" in to_torch(dynamic)[0]
    assert "GradScaler" not in to_torch(unscaled)[0]


def test_only_what_computes_goes_under_autocast():
    program = PLAIN.replace(
        "    optimizer.zero_grad()\n",
        "    x = x.to('cpu')\n    optimizer.zero_grad()\n    model.train()\n",
    ).replace("    with amp", "    losses.append(0.0)\n    with amp")
    after, _ = to_torch(program)
    assert after.split("torch.float16):\n")[1].startswith(
        "        loss = F.cross_entropy(model(x).float(), y)\n    losses.append(0.0)\n"
    )


def test_comments_and_blank_lines_stay():
    program = PLAIN.replace("    loss = F", "\n    # The loss.\n    loss = F")
    after, _ = to_torch(program)
    assert "\n\n    # The loss.\n    with torch.autocast(" in after


def test_a_script_for_cuda_alone_names_the_device():
    program = PLAIN.replace("nn.Linear(8, 3))", "nn.Linear(8, 3)).cuda()")
    after, notes = to_torch(program)
    assert 'torch.amp.GradScaler("cuda")' in after
    assert 'torch.autocast("cuda", torch.float16)' in after
    assert notes == []


def test_without_a_model_in_reach_the_optimizer_tells_the_device():
    program = HEAD + (
        """
def step(opt, loss_of, batch):
    loss = loss_of(batch)
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
    opt.step()

def main():
    net, opt = amp.initialize(model, optimizer, opt_level="O4")
    for batch in batches:
        step(opt, lambda batch: net(batch[0]).sum(), batch)
"""
    )
    device = 'opt.param_groups[0]["params"][0].device.type'
    assert f"with torch.autocast({device}, torch.bfloat16):" in to_torch(program)[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from apex import amp", None),
        ("import apex\nfrom apex import amp", None),
        ("from apex import amp, parallel", "from apex import parallel"),
        ("import apex.amp as amp", None),
        ("try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('!')", None),
    ],
)
def test_imports_of_amp_go_and_others_stay(before, after):
    program = PLAIN.replace("from apex import amp", before)
    lines = [line for line in to_torch(program)[0].splitlines() if "apex" in line]
    assert lines == ([after] if after else [])


def test_an_import_that_other_code_depends_on_stays_and_is_noted():
    guarded = "try:\n    from apex import amp\nexcept ImportError:\n    amp = None"
    after, notes = to_torch(PLAIN.replace("from apex import amp", guarded))
    assert guarded in after
    assert "this import is needed no more; what depends on it was left." in notes


def test_torch_is_imported_where_it_was_not():
    program = (
        '"""Trains."""\nfrom __future__ import annotations\nfrom apex import amp\nimport nets\n\n'
        'model, optimizer = amp.initialize(nets.model, nets.optimizer, opt_level="O4")\n'
        "loss = nets.loss(model)\nwith amp.scale_loss(loss, optimizer) as scaled:\n"
        "    scaled.backward()\n"
    )
    after, _ = to_torch(program)
    assert after.splitlines()[:4] == [
        '"""Trains."""',
        "from __future__ import annotations",
        "import torch",
        "import nets",
    ]
    assert "model, optimizer = nets.model, nets.optimizer" in after


@pytest.mark.parametrize("spelling", ["apex.amp", "a", "mixed"])
def test_aliases_are_followed(spelling):
    imports = {
        "apex.amp": "import apex",
        "a": "from apex import amp as a",
        "mixed": "import apex.amp as mixed",
    }
    program = PLAIN.replace("amp.", f"{spelling}.").replace(
        "from apex import amp", imports[spelling]
    )
    assert to_torch(program)[0] == to_torch(PLAIN)[0]


def test_names_imported_from_amp_are_followed():
    program = PLAIN.replace("amp.", "").replace(
        "from apex import amp", "from apex.amp import initialize, scale_loss"
    )
    assert to_torch(program)[0] == to_torch(PLAIN)[0]


def test_what_looks_at_gradients_gets_them_unscaled_once():
    program = PLAIN.replace(
        "    optimizer.step()",
        "    if losses:\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    print(model[0].weight.grad.norm())\n    optimizer.step()",
    )
    after, _ = to_torch(program)
    assert after.count("unscale_") == 1
    assert "    scaler.unscale_(optimizer)\n    if losses:\n" in after


def test_a_scheduler_and_the_learning_rate_look_at_no_gradients():
    program = PLAIN.replace(
        "    optimizer.step()",
        "    for group in optimizer.param_groups:\n        group['lr'] = 0.1\n    optimizer.step()",
    )
    assert "unscale_" not in to_torch(program)[0]


def test_master_params_of_a_part_of_the_model_stay_that_part():
    program = PLAIN.replace("SGD(model.parameters()", "SGD(model[0].parameters()").replace(
        "    optimizer.step()",
        "    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n    optimizer.step()",
    )
    groups = '(param for group in optimizer.param_groups for param in group["params"])'
    assert f"clip_grad_norm_({groups}, 1.0)" in to_torch(program)[0]


def test_a_name_that_is_taken_is_not_used_for_the_scaler():
    for program in ("scaler = None\n" + PLAIN, PLAIN + "def scaled(scaler):\n    return scaler\n"):
        assert "grad_scaler.scale(loss).backward()" in to_torch(program)[0]


def test_a_forward_without_gradients_keeps_its_weights_out_of_the_others_cache():
    program = PLAIN.replace(
        "    loss = F",
        "    with torch.no_grad():\n        y = model(x).argmax(1)\n    loss = F",
    )
    after, _ = to_torch(program)
    assert "torch.float16, cache_enabled=False):" in after
    assert losses_of(program) == losses_of(after)


def test_arguments_of_backward_are_kept():
    program = PLAIN.replace("scaled_loss.backward()", "scaled_loss.backward(retain_graph=True)")
    assert "scaler.scale(loss).backward(retain_graph=True)" in to_torch(program)[0]


def test_growth_is_the_scalers():
    program = PLAIN.replace("verbosity=0", "growth_interval=100, backoff_factor=half")
    assert ".type, growth_interval=100, backoff_factor=half)" in to_torch(program)[0]


def test_the_level_may_be_given_where_the_script_computes_it():
    program = PLAIN.replace('"O1"', "args.level").replace("verbosity=0", "loss_scale=args.scale")
    after, notes = to_torch(program, level="O4")
    assert "torch.bfloat16" in after
    assert 'opt_level=args.level was taken to be "O4" and is read no more.' in notes
    assert "loss_scale=args.scale was taken to be the level's own and is read no more." in notes


def test_other_options_that_are_computed_are_not_taken_for_granted():
    program = PLAIN.replace("verbosity=0", "fp32_modules=layers")
    assert "in these modules" in reasons(program, level="O1")


def test_a_level_in_the_script_counts_more_than_the_one_given():
    assert to_torch(PLAIN, level="O4")[0] == to_torch(PLAIN)[0]


@pytest.mark.parametrize(
    "later",
    [
        "predict = lambda x: model(x)",
        "outputs = (model(x) for x, _ in batches)",
        "for row in model(x): losses.append(row)",
    ],
)
def test_a_call_of_the_model_that_cannot_be_put_under_autocast_is_noted(later):
    after, notes = to_torch(f"{PLAIN}{later}\n")
    assert after.endswith(f"\n{later}\n")
    assert "this call of the model ran under amp's casts, and runs in fp32 now." in notes


def test_operators_that_are_cast_count_as_computing():
    program = PLAIN.replace("    with amp", "    loss = loss**2\n    x @= x.t()\n    with amp")
    after, _ = to_torch(program)
    assert "        x @= x.t()\n    scaler.scale(loss)" in after


def test_a_model_given_to_other_files_is_noted():
    _, notes = to_torch(PLAIN + "report(model)\n")
    assert "the model goes to report, which ran under amp's casts, and does no more." in notes


# -- what stays --------------------------------------------------------------------------------


def reasons(program, level=None):
    return " | ".join(text for _, text in refusals(program, level))


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ("O2", "fp32 masters of an fp16 model and fp32 batch norm have no equal in torch.amp"),
        ("O3", "an fp16 model without masters has no equal"),
        ("O5", "fp32 masters of a bf16 model"),
        ("O9", "there is no such level"),
    ],
)
def test_levels_that_change_the_model_stay(level, reason):
    assert reason in reasons(PLAIN.replace("O1", level))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("loss_scale=128.0", "GradScaler has no static scale"),
        ("min_loss_scale=1.0", "GradScaler has no least scale"),
        ("max_loss_scale=2.0", "GradScaler has no greatest scale"),
        ("keep_batchnorm_fp32=True", "no fp32 batch norm in a 16-bit model"),
        ("master_weights=True", "torch.amp has no masters"),
        ("num_losses=2", "one scale, not one for each loss"),
        ("fp32_modules=[nn.Tanh]", "autocast(enabled=False) in these modules"),
        ("keep_batchnorm_fp32=args.bn", "known only when the script runs"),
        ("fp32_modules=['0']", "autocast(enabled=False) in these modules"),
        ("cast_model_outputs='x'", "does not cast outputs"),
        ("enabled=False", "only a plain name can be taken over"),
        ("enabled=a or b", "only a plain name can be taken over"),
        ("**options", "by * or **"),
    ],
)
def test_options_without_an_equal_stay(option, reason):
    assert reason in reasons(PLAIN.replace("verbosity=0", option))


def test_a_level_that_is_computed_stays_and_names_the_flag():
    text = reasons(PLAIN.replace('"O1"', "args.level"))
    assert "opt_level=args.level is known only when the script runs" in text
    assert "--level" in text


BACKWARD = (
    "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
)
STEP = "    optimizer.step()\n"


def replaced(old, new):
    assert old in PLAIN
    return PLAIN.replace(old, new)


STAY = {
    "two losses": (replaced(BACKWARD, BACKWARD * 2), "a second amp.scale_loss"),
    "two sessions": (
        PLAIN + "model, optimizer = amp.initialize(model, optimizer)\n",
        "a second amp.initialize",
    ),
    "several models": (
        replaced("amp.initialize(model,", "amp.initialize([model, model],"),
        "Several models or optimizers",
    ),
    "several optimizers in a list": (
        replaced("losses = []", "losses = []\noptimizer = [optimizer]"),
        "Several models or optimizers",
    ),
    "no optimizer": (
        "from apex import amp\nmodel = amp.initialize(model)\n",
        "not given one model and one optimizer",
    ),
    "another optimizer": (
        replaced("(loss, optimizer)", "(loss, other)"),
        "not seen to come from amp.initialize",
    ),
    "a delayed unscale": (
        replaced("(loss, optimizer)", "(loss, optimizer, delay_unscale=more)"),
        "delay_unscale=more has no equal",
    ),
    "another loss id": (replaced("(loss, optimizer)", "(loss, optimizer, 1)"), "loss_id=1"),
    "more than backward": (
        replaced("scaled_loss.backward()\n    opt", "scaled_loss.backward()\n        opt"),
        "does more than call backward()",
    ),
    "a scaled loss read later": (
        PLAIN + "    print(scaled_loss)\n",
        "scaled_loss is used outside the block",
    ),
    "a loss without a name": (
        replaced("(loss, optimizer)", "(model(x).sum(), optimizer)"),
        "give it a name first",
    ),
    "a loss from elsewhere": (
        replaced("    with amp", "    if y.sum() > 0:\n     with amp")
        .replace("        scaled_loss", "         scaled_loss"),
        "not computed in the same block",
    ),
    "a session that may not be": (
        replaced(
            "model, optimizer = amp.initialize",
            "for _ in range(2): pass\nwhile True:\n    break\n"
            "if torch.rand(1) > 0.5:\n    model, optimizer = amp.initialize",
        ),
        "stands in a block that may not run",
    ),
    "an optional session with one that is not": (
        replaced("model, optimizer = amp", "if losses:\n    model, optimizer = amp"),
        "amp.initialize depends on losses, amp.scale_loss does not",
    ),
    "an elif": (
        replaced(
            BACKWARD,
            "    if len(losses) > 9:\n        pass\n    elif losses:\n"
            "        with amp.scale_loss(loss, optimizer) as s:\n            s.backward()\n"
            "    else:\n        loss.backward()\n",
        ),
        "stands in an elif",
    ),
    "no step": (replaced(STEP, ""), "0 steps of the optimizer"),
    "two steps": (replaced(STEP, STEP * 2), "2 steps of the optimizer"),
    "a closure": (replaced(".step()", ".step(closure)"), "takes no closure"),
    "a step before": (
        replaced("    optimizer.zero_grad()\n", STEP).replace(BACKWARD + STEP, BACKWARD),
        "another backward pass or step before",
    ),
    "an unscaled backward pass": (
        replaced(STEP, "    model(x).sum().backward()\n" + STEP),
        "would be unscaled",
    ),
    "gradients seen between steps": (
        replaced(
            STEP,
            "    nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
            "    if len(losses) % 2:\n        optimizer.step()\n",
        ),
        "unscales once for each step",
    ),
    "gradients seen after the step": (
        PLAIN + "    print(model[0].weight.grad)\n",
        "gradients are read where they may be scaled",
    ),
    "a generator": (
        HEAD
        + (
            "model, optimizer = amp.initialize(model, optimizer)\n"
            "def train():\n    for x, y in batches:\n"
            "        loss = F.cross_entropy(model(x).float(), y)\n"
            "        yield loss\n        loss = loss + model(x).sum()\n"
            "        with amp.scale_loss(loss, optimizer) as s:\n            s.backward()\n"
            "        optimizer.step()\n"
        ),
        "a yield between forward and backward",
    ),
    "forward and backward apart": (
        replaced(
            "    loss = F.cross_entropy(model(x).float(), y)\n" + BACKWARD,
            "    out = model(x)\n    if out is not None:\n        loss = F.cross_entropy(out, y)\n"
            "        with amp.scale_loss(loss, optimizer) as s:\n            s.backward()\n",
        ),
        "forward and backward pass are in different blocks",
    ),
    "a scale loaded before there is one": (
        replaced("model, optimizer = amp", "amp.load_state_dict(saved)\nmodel, optimizer = amp"),
        "the scaler is needed before amp.initialize makes it",
    ),
    "a backward pass that may be left out": (
        replaced(
            "    loss = F.cross_entropy(model(x).float(), y)\n" + BACKWARD,
            "    if len(y) > 1:\n        loss = F.cross_entropy(model(x).float(), y)\n"
            "        with amp.scale_loss(loss, optimizer) as s:\n            s.backward()\n",
        ),
        "the backward pass may be left out, and the step taken",
    ),
    "amp as a value": (PLAIN + "parts = {'amp': amp}\n", "apex.amp is used as a value"),
    "other functions of amp": (
        PLAIN + "amp.register_float_function(torch, 'exp')\n",
        "apex.amp.register_float_function is used, which torch.amp has no equal for",
    ),
    "private names": (
        PLAIN + "print(amp._amp_state.loss_scalers[0])\n",
        "apex.amp._amp_state.loss_scalers is used",
    ),
    "apex's older optimizer": (
        replaced("losses = []", "losses = []\nfrom apex.fp16_utils import LossScaler as L\nL(1)"),
        "apex.fp16_utils.LossScaler is used",
    ),
    "no session": ("from apex import amp\namp.state_dict()\n", "not called in this file"),
    "no backward": (
        "from apex import amp\nm, o = amp.initialize(m, o)\n",
        "no amp.scale_loss in this file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAY)
def test_what_is_not_surely_the_same_stays(case):
    program, reason = STAY[case]
    assert reason in reasons(program)


def test_a_scaler_that_would_have_to_be_passed_on_stays_in_fp16_only():
    program = HEAD + (
        """
def train(model, optimizer):
    for x, y in batches:
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

def main():
    net, sgd = amp.initialize(model, optimizer, opt_level="O1")
    train(net, sgd)
"""
    )
    expected = "the scaler would be made in main() and used in train()"
    assert expected in reasons(program)
    assert "loss.backward()" in to_torch(program.replace("O1", "O4"))[0]


def test_bf16_in_data_parallel_stays():
    program = PLAIN.replace("for x, y", "model = nn.DataParallel(model)\nfor x, y")
    assert "DataParallel's threads" in reasons(program.replace("O1", "O4"))
    assert "with torch.autocast(" in to_torch(program)[0]


def test_a_function_that_runs_before_and_after_stays():
    program = PLAIN.replace(
        "losses = []\n",
        "losses = []\ndef check(net):\n    return net(batches[0][0])\ncheck(model)\n",
    )
    assert "called before amp.initialize, too" in reasons(program + "check(model)\n")
    assert "with torch.autocast(" in to_torch(program)[0]


def test_a_condition_must_be_known_where_it_is_needed():
    program = HEAD + (
        """
def evaluate(net):
    return net(batches[0][0])

def main(args):
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for x, y in batches:
        loss = F.cross_entropy(model(x).float(), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
    evaluate(model)
"""
    )
    assert reasons(program) == "args.fp16 is not known in evaluate(): pass it on."


def test_reasons_carry_their_lines():
    line = next(i for i, text in enumerate(PLAIN.splitlines(), 1) if "amp.initialize" in text)
    assert [at for at, _ in refusals(PLAIN.replace("O1", "O2"))] == [line]
