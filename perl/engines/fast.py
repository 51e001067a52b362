"""A decode loop that does no work twice and none for rows that have ended, as the model's own `generate` runs it.

Handed to `generate` as `custom_generate`; the loop itself is perl.engines.loop. Against stock generate:
- a prompt is prefilled once, however many completions it gets; its keys and values are copied to each row's slot;
- a row that ends leaves the batch at once, and a waiting row takes its place, so the batch stays full;
- prompts are taken longest first, so that neighbours need little padding and the widest batch comes first;
- no key or value is copied for the attention of a new token (perl.engines.attention), and on a CPU weights are laid
  out once for the products with few rows (perl.engines.linear);
- each row draws from its own random stream (perl.engines.sampling), so none of this changes what a row gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache, DynamicLayer

from perl.engines.linear import prepacked
from perl.engines.loop import Decoder
from perl.engines.rows import Finished, Job, left_pad
from perl.engines.stock import generation_config, is_sharded

if TYPE_CHECKING:
    from transformers import LogitsProcessor


def unsupported_reason(model: Any) -> str | None:
    """Why `decode_fast` can't serve `model` (a transformers model or a PeftModel), or None where it can."""
    peft_config = getattr(model, "active_peft_config", None)
    if peft_config is not None and peft_config.is_prompt_learning:
        return f"{peft_config.peft_type.value} puts virtual tokens before the prompt"
    inner = model.get_base_model() if peft_config is not None else model
    config = inner.config
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if text_config is not config or inner.main_input_name != "input_ids":
        return "it takes more than text"
    if getattr(inner, "_is_stateful", False):
        return "its cache is recurrent"
    if inner._auto_class is not None:  # transformers 5 has is_remote_code() for this, 4.57 has not
        return "its code is not part of transformers"
    kinds = {type(layer) for layer in DynamicCache(config=text_config).layers} - {DynamicLayer}
    if kinds:
        return f"its cache has {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return "it takes no position_ids"
    if config._attn_implementation == "flex_attention":
        return "flex_attention compiles anew for each shape"
    return None


def decode_fast(
    model: Any, job: Job, processors: Sequence[LogitsProcessor] = (), *, stream: bool = True
) -> Iterator[Finished]:
    """Complete `job.rows` through `model.generate(custom_generate=...)`, yielding each row as it ends.

    Args:
        model: a transformers model, or a PeftModel around one, in evaluation mode, for which `unsupported_reason` is
            None.
        job: rows and sampling.
        processors: further logits processors, called with left-padded ids before sampling.
        stream: compute while the iterator is consumed, after `model.generate` has returned; False: all within it.
    """
    lockstep = is_sharded(model)

    def custom_generate(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        rows = Decoder(model, job, logits_processor, model_kwargs.get("logits_to_keep"), lockstep).run()
        if stream:
            return rows
        with prepacked(model):  # not while streaming: a caller may change the weights between two rows
            return iter(list(rows))

    prompt, mask = left_pad([(job.pad_token_id,)], job.pad_token_id, model.device)
    return model.generate(  # `prompt` is only there because generate wants one
        input_ids=prompt,
        attention_mask=mask,
        generation_config=generation_config(job, ()),
        logits_processor=LogitsProcessorList(processors),
        custom_generate=custom_generate,
    )
