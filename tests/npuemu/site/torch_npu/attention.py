"""Reference version of the one fused operator that transformers calls for attn_implementation="flash_attention_2"."""

import torch


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    *,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
):
    """Attention of `query` [B, S, N, D] ("BSND") or [T, N, D] ("TND", with cumulative sequence lengths).

    Returns a tuple like the real operator's, of which only the attention output is filled in.
    """
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"npu_fusion_attention: unsupported dtype {query.dtype}")
    settings = (atten_mask, scale, keep_prob, sparse_mode)
    if input_layout == "BSND":
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output = _attention(*heads_first, *settings).transpose(1, 2).contiguous()
    elif input_layout == "TND":
        output = _packed_attention(query, key, value, actual_seq_qlen, actual_seq_kvlen, settings)
    else:
        raise NotImplementedError(f"emulated npu_fusion_attention: input_layout={input_layout}")
    return (output, None, None, None, 0, 0, 0)


def _packed_attention(query, key, value, query_ends, key_ends, settings):
    outputs, query_start, key_start = [], 0, 0
    for query_end, key_end in zip(query_ends, key_ends, strict=True):
        one_query = query[query_start:query_end].transpose(0, 1)[None]
        one_key, one_value = (t[key_start:key_end].transpose(0, 1)[None] for t in (key, value))
        outputs.append(_attention(one_query, one_key, one_value, *settings)[0].transpose(0, 1))
        query_start, key_start = query_end, key_end
    return torch.cat(outputs)


def _attention(query, key, value, atten_mask, scale, keep_prob, sparse_mode):
    """Attention over [B, N, S, D]; key and value may have fewer heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    masked = _masked_positions(atten_mask, sparse_mode, query.shape[-2], key.shape[-2], query.device)
    if masked is not None:
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    weights = torch.dropout(torch.softmax(scores, -1), 1.0 - keep_prob, keep_prob < 1.0)
    return torch.matmul(weights.to(value.dtype), value)


def _masked_positions(atten_mask, sparse_mode, queries, keys, device):
    """True where a key is hidden: by the mask (mode 0), causal from the top left (2) or to the bottom right (3)."""
    if sparse_mode == 0:
        return None if atten_mask is None else atten_mask.bool()
    if sparse_mode not in (2, 3):
        raise NotImplementedError(f"emulated npu_fusion_attention: sparse_mode={sparse_mode}")
    if atten_mask is None or tuple(atten_mask.shape[-2:]) != (2048, 2048):
        raise RuntimeError("npu_fusion_attention: sparse_mode 2 and 3 need the compressed [2048, 2048] atten_mask")
    offset = 0 if sparse_mode == 2 else keys - queries
    rows = torch.arange(queries, device=device)[:, None]
    return torch.arange(keys, device=device)[None, :] > rows + offset
