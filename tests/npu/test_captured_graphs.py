"""Decode steps as captured graphs, on the emulated NPU: capturing computes nothing there, as on a device, and a replay
runs the recorded operators on the tensors that they were recorded with."""

import pytest
import torch

from perl import device
from perl.engines import graphs
from tests.tiny import save_tiny

pytestmark = pytest.mark.npu

DECODE = """
    import json, logging, sys
    sys.path.insert(0, ".")
    from perl import device
    from perl.engines import graphs
    from perl.engines.decoder import Decoder
    from perl.records import Sampling
    from tests.engines.models import EOS, complete, make_sequences, prompts, tiny

    replays, captures = [], []
    original = torch.npu.NPUGraph.replay
    torch.npu.NPUGraph.replay = lambda graph: (replays.append(1), original(graph))
    capture = device.capture
    device.capture = lambda *args, **kwargs: (captures.append(1), capture(*args, **kwargs))[1]
    lines = []
    graphs.say_once = lines.append

    def decoder(model, **options):
        return Decoder(model, **({"eos_token_ids": EOS, "pad_token_id": 0, "max_batch_tokens": 20_000} | options))

    def decode(machine, asked, sampling):
        rows = complete(machine, make_sequences(*asked[0], **asked[1]), sampling)
        return [(row.token_ids, row.stopped) for row in rows], [row.logprobs for row in rows]
"""


def test_sequences_are_those_of_steps_without_graphs(answer):
    found = answer(
        DECODE
        + """
    model = tiny().to("npu:0")
    given = ([prompts(12, longest=100)], {"group_size": 4, "max_new_tokens": 60})
    results = []
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2)):
        plain, logprobs = decode(decoder(model), given, sampling)
        machine = decoder(model, capture=True)
        for _ in range(2):
            replays.clear(), captures.clear()
            captured, captured_logprobs = decode(machine, given, sampling)
            apart = max(abs(a - b) for x, y in zip(logprobs, captured_logprobs) for a, b in zip(x, y))
            results.append([plain == captured, apart, len(replays), len(captures), len(machine.graphs.shapes)])
    answer = [results, lines]
    """
    )
    results, lines = found
    assert lines == []
    for first, second in (results[:2], results[2:]):
        for same, apart, replays, _, _ in (first, second):
            assert same
            assert apart < 1e-4
            assert replays > 40
        assert 1 < first[4] <= 12  # shapes: rows in multiples of 8 up to 48, places in 128, 192
        assert second[3] + first[3] <= second[4]  # captured once, whichever rollout


def test_graphs_read_the_adapter_that_is_trained_whatever_a_validation_computed_in(answer):
    """Rollouts compute an unmerged adapter in autocast's bfloat16, a validation in its own float32."""
    found = answer(
        DECODE
        + """
    from perl.records import Prompt
    from tests.engines.test_torch_policy import EOS, adapted, drawn, make_engine
    asked = [Prompt(token_ids=ids, seed=i) for i, ids in enumerate(prompts(6))]
    sampling = Sampling(temperature=0, max_new_tokens=40)

    def rollouts(capture):
        torch.manual_seed(0)
        model = adapted(dropout=0.0).to("npu:0")
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if "lora" in name else torch.bfloat16)
        settings = {"capture_graphs": capture, "merge_adapter": False}
        engine = make_engine(model, rollout=settings, dtype=torch.bfloat16)
        for step in range(3):
            made = torch.Generator().manual_seed(step)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=made))
            yield drawn(engine, asked, sampling)
            validation = engine.evaluating(EOS, None)
            drawn(validation, asked, sampling)
            validation.close()

    eager, captured = list(rollouts(False)), list(rollouts(True))
    answer = [[a == b for a, b in zip(eager, captured)], eager[0] == eager[1], len(replays) > 40]
    """
    )
    assert found == [[True, True, True], False, True]


def test_the_evaluator_captures_where_a_training_does(answer, tmp_path):
    """Graphs serve on after other weights have been copied into the model."""
    save_tiny(tmp_path / "a", scale=4.0)
    save_tiny(tmp_path / "b", scale=4.0, seed=1)
    found = answer(
        DECODE
        + f"""
    from perl.engines.hf import HFEngine
    from perl.records import Prompt
    from tests.engines.models import completions
    folders = [{str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}]
    asked = [Prompt(token_ids=tuple(5 + (7 * i + j) % 20 for j in range(4 + i)), seed=i) for i in range(6)]

    def drawn(engine):
        replays.clear()
        found = completions(engine, asked, Sampling(temperature=0, max_new_tokens=40))
        return [list(found[i].token_ids) for i in range(6)]

    plain = [drawn(HFEngine(folder)) for folder in folders]
    none = len(replays)
    device.captures_by_default = lambda: True
    engine = HFEngine(folders[0])
    results = [drawn(engine) == plain[0], len(replays)]
    assert engine.replace_weights(folders[1]) is None
    results += [drawn(engine) == plain[1], len(replays), plain[0] == plain[1]]
    answer = [none, results, lines]
    """
    )
    none, (first, some, second, more, alike), lines = found
    assert (none, first, second, alike, lines) == (0, True, True, False, [])
    assert some > 10
    assert more > 10


def test_a_step_reads_nothing_back(answer):
    """The host reads what an event says has come. In a first rollout graphs are captured and checked."""
    found = answer(
        DECODE
        + """
    import torch_npu
    model = tiny().to("npu:0")
    counts = []
    for capture_graphs in (False, True):
        machine = decoder(model, capture=capture_graphs, eos_token_ids=frozenset())
        for longest in (8, 8, 40):
            complete(machine, make_sequences(prompts(3), group_size=2, max_new_tokens=longest), Sampling(top_p=0.9))
            before = torch_npu._emulator_counters()["blocking"]
            complete(machine, make_sequences(prompts(3), group_size=2, max_new_tokens=longest), Sampling(top_p=0.9))
            counts.append(torch_npu._emulator_counters()["blocking"] - before)
    answer = counts
    """
    )
    assert len(set(found)) == 1  # 8 tokens or 40
    assert found[0] <= 2  # for the prompts


def test_no_cache_is_alive_outside_the_decoder(answer):
    """The review's: each rollout's captured graphs kept its cache until the oldest generation was collected."""
    found = answer(
        DECODE
        + """
    import gc, weakref
    from perl.engines import cache
    made = []
    init = cache.KVCache.__init__
    def noted(self, *args):
        init(self, *args)
        made.append(weakref.ref(self))
    cache.KVCache.__init__ = noted
    machine = decoder(tiny().to("npu:0"), capture=True)
    gc.collect(); gc.disable()
    alive = []
    for _ in range(3):
        complete(machine, make_sequences(prompts(4), group_size=2, max_new_tokens=20), Sampling())
        alive.append(sum(ref() is not None for ref in made))
    machine.release()
    answer = [len(made), alive, sum(ref() is not None for ref in made)]
    """
    )
    assert found == [1, [1, 1, 1], 0]


def test_weights_changed_in_place_are_seen_and_a_graph_reads_what_was_written(answer):
    found = answer(
        DECODE
        + """
    weight = torch.ones(3, device="npu:0")
    tokens = torch.zeros(20, dtype=torch.long, device="npu:0")
    def compute(rows, width):
        logits = (tokens[:rows].float() * weight[0] + width)[:, None]
        tokens[:rows].add_(1)
        return torch.stack([tokens[:rows].float(), logits[:, 0]]), logits
    graphs.CHECKED_REPLAYS = 0
    steps = graphs.StepGraphs("key", [tokens], 20, 300)
    step = steps.bind(compute, lambda rows: [])
    def call(rows, width):
        result, logits = step(rows, width)
        return result.tolist()
    with torch.no_grad():
        answer = [call(3, 5), call(3, 5)]  # as it is, captured
        weight.mul_(10)
        answer += [call(2, 128), tokens[:9].tolist()]
    answer += [steps.shape(3, 290), steps.shape(17, 129), steps.shape(1, 257), len(replays), lines]
    """
    )
    # Three rows are computed as eight, 5 places as 128, 17 rows as the twenty that there are.
    first, second, third, tokens = found[:4]
    assert first == [[1, 1, 1], [128, 128, 128]]
    assert second == [[2, 2, 2], [129, 129, 129]]
    assert third == [[3, 3], [148, 148]]
    assert tokens == [3] * 8 + [0]
    assert found[4:] == [[8, 300], [20, 192], [8, 300], 2, []]


def test_a_kernel_that_reads_the_blocks_needs_a_graph_for_each_number_of_rows_alone(answer):
    """In bfloat16, which is all that it takes; lengths are numbers that the host gives it before each replay."""
    found = answer(
        DECODE
        + """
    import torch_npu
    calls = []
    kernel = torch_npu.npu_fused_infer_attention_score
    torch_npu.npu_fused_infer_attention_score = lambda *args, **kw: (calls.append(1), kernel(*args, **kw))[1]
    torch_npu.npu_fused_infer_attention_score.out = getattr(kernel, "out", None)
    model = tiny().bfloat16().to("npu:0")
    given = ([prompts(6, longest=200)], {"group_size": 4, "max_new_tokens": 80})
    plain, logprobs = decode(decoder(model), given, Sampling(temperature=0))
    results = []
    for capture_graphs in (False, True):
        machine = decoder(model, kernel=device.paged_attention(True), capture=capture_graphs)
        tokens, found = decode(machine, given, Sampling(temperature=0))
        first = [abs(a[0] - b[0]) for a, b in zip(logprobs, found)]
        agree = sum(x == y for a, b in zip(plain, tokens) for x, y in zip(a[0], b[0]))
        results.append([len(calls) > 0, max(first), agree / sum(len(a[0]) for a in plain), machine.cache.block_size])
        calls.clear()
    answer = [results, sorted(machine.graphs.shapes), len(replays), lines]
    """
    )
    results, shapes, replays, lines = found
    assert lines == []
    for called, apart, agree, block_size in results[:1]:
        assert called
        assert apart < 0.2
        assert agree > 0.5  # a rounding that changes one greedy token changes all behind it
        assert block_size == 128
    assert results[1][1] < 0.2
    assert {width for _, width in shapes} == {256}  # of the cache, whatever the lengths
    assert len(shapes) <= 3  # 24, 16, 8 rows
    assert replays > 60


def test_a_kernel_that_does_not_take_the_models_numbers_is_not_used_and_said(answer):
    found = answer(
        DECODE
        + """
    from perl.engines import runner as module
    module.say_once = lines.append
    machine = decoder(tiny().to("npu:0"), kernel=device.paged_attention(True))
    complete(machine, make_sequences(prompts(2), max_new_tokens=3), Sampling())
    answer = lines
    """
    )
    assert found == ["decode steps are computed by sdpa: npu_fused_infer_attention_score does not compute in float32"]


def test_a_graph_that_goes_on_with_old_numbers_is_not_used(answer):
    found = answer(
        DECODE
        + """
    torch.npu.NPUGraph.replay = lambda graph: (replays.append(1), original(graph) if len(replays) == 1 else None)
    model = tiny().to("npu:0")
    given = ([prompts(4)], {"max_new_tokens": 12})
    plain, _ = decode(decoder(model), given, Sampling(temperature=0))
    captured, _ = decode(decoder(model, capture=True), given, Sampling(temperature=0))
    answer = [plain == captured, len(replays), lines]
    """
    )
    same, replays, lines = found
    assert same
    assert replays == 2
    (line,) = lines
    assert line.startswith("decoding without captured graphs: one's logits are ")


@pytest.mark.parametrize(("kind", "captures"), [("cuda", True), ("npu", False), ("cpu", False)])
def test_graphs_are_the_default_on_cuda_alone(monkeypatch, kind, captures):
    monkeypatch.setattr(device, "detect", lambda: device.Devices(kind, 1))
    assert device.captures_by_default() == captures


def test_the_emulation_refuses_what_a_device_refuses(answer):
    found = answer(
        """
    def capture(function):
        written, graph = torch.zeros(2, device="npu:0"), torch.npu.NPUGraph()
        try:
            with torch.npu.graph(graph):
                written.add_(x)
                function()
            return "captured", written.tolist()
        except RuntimeError as error:
            return str(error), written.tolist()

    x = torch.ones(2, device="npu:0")
    answer = [capture(function) for function in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x + torch.tensor([1.0], device="npu:0"),
        lambda: x.nonzero(),
        lambda: x * 2,
    )]
    """
    )
    reasons = ["_local_scalar_dense waits", "copy between host", "copy between host", "nonzero waits", "captured"]
    for (said, written), reason in zip(found, reasons, strict=True):
        assert reason in said
        assert written == [0, 0]  # capturing computes nothing


def test_a_model_that_cannot_be_captured_decodes_without_and_says_so(answer):
    found = answer(
        DECODE
        + """
    class Reads(torch.nn.Module):
        def forward(self, *args, **kwargs):
            kwargs["position_ids"].max().item()  # as some rotary embeddings do
            return inner(*args, **kwargs)

    model = tiny().to("npu:0")
    given = ([prompts(4)], {"max_new_tokens": 12})
    plain, _ = decode(decoder(model), given, Sampling(temperature=0))
    inner = model.forward
    model.forward = Reads().forward
    import inspect
    model.forward.__func__.__signature__ = inspect.signature(inner)
    captured, _ = decode(decoder(model, capture=True), given, Sampling(temperature=0))
    answer = [plain == captured, len(replays), sorted(set(lines))]
    """
    )
    same, replays, lines = found
    assert same
    assert replays == 0
    assert len(lines) == 1
    assert lines[0].startswith("decoding without captured graphs: operation not permitted when stream is capturing")


def test_graphs_do_not_outlive_the_adapter_that_they_were_captured_with(answer):
    """An adapter that stays unmerged is copied for the shared updates (perl.adapters.batched); once it is merged they
    must be gone."""
    found = answer(
        DECODE
        + """
    from peft import LoraConfig, get_peft_model
    from perl.adapters.rollout_merge import RolloutMerge

    torch.manual_seed(0)
    model = get_peft_model(tiny(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).to("npu:0").eval()
    given = ([prompts(3)], {"group_size": 2, "max_new_tokens": 30})
    captured, merges = decoder(model, capture=True), {merge: RolloutMerge(model, merge) for merge in (False, True)}

    def optimizer_step():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)

    answer = []
    for merge in (False, False, True, False):
        optimizer_step()
        with merges[merge].applied():
            plain, _ = decode(decoder(model), given, Sampling(temperature=0))
            replayed = len(replays)
            by_graph, _ = decode(captured, given, Sampling(temperature=0))
        answer.append([plain == by_graph, len(replays) > replayed])
    answer.append(lines)
    """
    )
    *rollouts, lines = found
    assert rollouts == [[True, True]] * 4
    assert lines == []


def test_a_run_that_was_broken_off_leaves_no_row_behind(answer):
    found = answer(
        DECODE
        + """
    model = tiny().to("npu:0")
    given = ([prompts(6)], {"group_size": 2, "max_new_tokens": 30})
    plain, _ = decode(decoder(model), given, Sampling(temperature=0))
    machine = decoder(model, capture=True)
    broken = machine.run(make_sequences(prompts(6), group_size=2, max_new_tokens=30), Sampling(temperature=0))
    next(broken)
    broken.close()
    left = machine.rows.active.sum().item()
    again, _ = decode(machine, given, Sampling(temperature=0))
    answer = [left > 0, plain == again, machine.rows.active.sum().item()]
    """
    )
    assert found == [True, True, 0]


def test_zero3_moves_the_weights_from_rollout_to_rollout(monkeypatch):
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cuda", 1))
    layer = torch.nn.Linear(2, 2)
    assert graphs.unsupported_reason(layer, None) is None
    layer.weight.ds_id = 0  # as DeepSpeed marks it
    assert "ZeRO-3 gathers" in graphs.unsupported_reason(layer, None)


@pytest.mark.slow
def test_a_run_captures_each_shape_once(answer, tmp_path):
    """The quickstart's: 64 rows in steps of 8, and all of its sequences within 128 places."""
    found = answer(
        DECODE
        + f"""
    from perl.training.grpo import train
    flags = ["--config.rollout.capture_graphs", "true", "--config.training.max_steps", "8"]
    train(["--recipe", "recipes/quickstart.yaml", "--config.training.output_dir", {str(tmp_path / "run")!r}, *flags])
    answer = [len(captures), len(replays), lines]
    """,
        ASCEND_RT_VISIBLE_DEVICES="0",
    )
    captured, replayed, lines = found
    assert captured <= 12
    assert replayed > 8 * captured
    assert lines == []
