"""Decode steps as captured graphs, on the emulated NPU: capturing computes nothing there, as on a device, and a replay
runs the recorded operators on the tensors that they were recorded with."""

import pytest

from perl import device

pytestmark = pytest.mark.npu

DECODE = """
    import json, logging, sys
    sys.path.insert(0, ".")
    from perl import device
    from perl.engines import graphs
    from perl.engines.fast import decode_fast
    from perl.engines.rows import Job
    from perl.records import Sampling
    from tests.engines.models import make_job, prompts, tiny
    from dataclasses import replace

    replays, shapes = [], []
    original = torch.npu.NPUGraph.replay
    torch.npu.NPUGraph.replay = lambda graph: (replays.append(1), original(graph))
    once = graphs.StepGraphs._compute
    graphs.StepGraphs._compute = lambda steps, shape: (shapes.append(shape), once(steps, shape))[1]
    lines = []
    graphs.warn_once = lines.append

    def decode(model, job):
        rows = sorted(decode_fast(model, job), key=lambda row: row.index)
        return [(row.token_ids, row.stopped) for row in rows], [row.logprobs for row in rows]
"""


def test_rows_are_those_of_steps_without_graphs(answer):
    found = answer(
        DECODE
        + """
    model = tiny().to("npu:0")
    given = prompts(12, longest=200)
    results = []
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2)):
        job = make_job(given, sampling, group_size=4, max_new_tokens=60, max_batch_tokens=2600)
        plain, logprobs = decode(model, job)
        replays.clear(), shapes.clear()
        captured, captured_logprobs = decode(model, replace(job, capture=True))
        apart = max(abs(a - b) for x, y in zip(logprobs, captured_logprobs) for a, b in zip(x, y))
        results.append([plain == captured, apart, len(replays), len(shapes), sorted(set(shapes)), len(plain)])
    answer = [results, lines]
    """
    )
    results, lines = found
    assert lines == []
    for same, apart, replays, computed, shapes, rows in results:
        assert same
        assert apart < 1e-4
        assert rows == 48
        assert len(shapes) > 4  # rows 1, 2, 4, 8 and columns 128, 256
        # A shape is computed once as it is, once to be captured and twice to be held against the graph, for each cache
        # that it is met with.
        assert computed <= 4 * 2 * len(shapes)
        assert replays > 2 * computed


def test_weights_changed_in_place_are_seen_and_a_graph_reads_what_was_copied_in(answer):
    found = answer(
        DECODE
        + """
    weight = torch.ones(3, device="npu:0")
    def compute(tokens, lengths, width):
        return (tokens.float() * weight[0] + lengths * width)[:, None]
    graphs.CHECKED_REPLAYS = 0
    steps = graphs.StepGraphs(compute, 6, 300, 7, torch.device("npu:0"))
    def call(tokens, lengths, width):
        t = lambda values: torch.tensor(values, device="npu:0")
        return steps(t(tokens), t(lengths), width)[:, 0].tolist()
    with torch.no_grad():
        answer = [call([1, 2, 3], [1, 1, 1], 5), call([1, 2, 3], [2, 2, 2], 5)]  # as it is, captured
        weight.mul_(10)
        answer += [call([4, 5, 6], [1, 2, 3], 128), call([4, 5, 6, 7, 8], [1] * 5, 129), steps.shape(3, 290)]
    answer += [len(replays), lines]
    """
    )
    # Three rows are computed as four, 5 columns as 128; five as the six slots that there are; 290 columns as 300.
    assert found == [[129, 130, 131], [257, 258, 259], [168, 306, 444], [296, 306, 316, 326, 336], [4, 300], 2, []]


def test_a_graph_that_goes_on_with_old_numbers_is_not_used(answer):
    found = answer(
        DECODE
        + """
    torch.npu.NPUGraph.replay = lambda graph: (replays.append(1), original(graph) if len(replays) == 1 else None)
    model = tiny().to("npu:0")
    job = make_job(prompts(4), max_new_tokens=12)
    plain, _ = decode(model, job)
    captured, _ = decode(model, replace(job, capture=True))
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
    job = make_job(prompts(4), max_new_tokens=12)
    plain, _ = decode(model, job)
    inner = model.forward
    model.forward = Reads().forward
    import inspect
    model.forward.__func__.__signature__ = inspect.signature(inner)
    captured, _ = decode(model, replace(job, capture=True))
    answer = [plain == captured, len(replays), sorted(set(lines))]
    """
    )
    same, replays, lines = found
    assert same
    assert replays == 0
    assert len(lines) == 1
    assert lines[0].startswith("decoding without captured graphs: operation not permitted when stream is capturing")
