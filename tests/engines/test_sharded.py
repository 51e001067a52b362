"""Sharded models: ranks with unequal numbers of decode steps must neither hang nor differ from one rank alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perl.engines import stock
from perl.engines.scheduler import Sequence

SCRIPT = """
import datetime, json, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import MistralConfig, MistralForCausalLM
from perl.engines.decoder import Decoder
from perl.engines.stock import is_sharded
from perl.records import Sampling
from tests.engines.models import SHAPE, make_sequences, prompts, tiny

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
limit = datetime.timedelta(seconds=100)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
if kind == "fast":
    model = tiny()
else:  # sliding windows: stock generate
    model = tiny("mistral", spread=1.0, sliding_window=8)


def complete(prompt_ids):
    sequences = make_sequences(prompt_ids, group_size=2, max_new_tokens=4 + 20 * rank)
    decoder = Decoder(model, eos_token_ids=[2], pad_token_id=0, max_batch_tokens=150)
    assert len(list(decoder.run(sequences, Sampling()))) == len(sequences)
    return sequences


mine = prompts(3 + 4 * rank, seed=rank)
assert not is_sharded(model)
alone = complete(mine)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
assert is_sharded(model)
assert [row.token_ids for row in complete(mine)] == [row.token_ids for row in alone]
if kind == "fast":
    assert len(complete(mine if rank else [])) == (14 if rank else 0)
print(json.dumps(sum(len(row.token_ids) for row in alone)))
dist.barrier()  # a rank that leaves early can have gloo end the other one with "terminate called"
dist.destroy_process_group()
"""


@pytest.mark.parametrize("images", [None, object])
def test_a_process_that_is_through_goes_on_with_the_images_that_it_had(images, monkeypatch):
    """The others, whose prompts have images, meet it in the vision tower."""
    more = iter([True, True, False])
    monkeypatch.setattr(stock, "is_sharded", lambda model: True)
    monkeypatch.setattr(stock, "any_rank", lambda mine, where: next(more))
    own = Sequence((5, 6), 7, 20, images=images)
    model = type("Model", (), {"device": None})
    first, second = list(stock._batches(model, [own], 0, len))
    assert first == [own]
    (filler,) = second
    assert (filler.index, filler.max_new_tokens, filler.images) == (-1, 1, images)
    assert filler.prompt_ids == ((0,) if images is None else (5, 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fast", "stock"])
def test_fsdp2_ranks_with_unequal_work(kind, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    done = [rank.communicate(timeout=200) for rank in ranks]
    for rank, (_, errors) in zip(ranks, done, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    drawn = [json.loads(output.splitlines()[-1]) for output, _ in done]
    assert drawn[0] < drawn[1]
