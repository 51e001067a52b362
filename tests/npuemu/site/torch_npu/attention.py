"""Reference versions of the fused attention operators, as operators of the namespace npu with the real signatures.

They compute in float32 with plain PyTorch, and refuse what the documentation of the real ones refuses: dtypes, shapes,
layouts, lengths, masks. What the real ones can do beyond what is modelled is a NotImplementedError.
"""

import torch

_LIBRARY = torch.library.Library("npu", "FRAGMENT")
_TRIANGLE = (2048, 2048)


def _define(name, arguments, returns, function, key):
    _LIBRARY.define(f"{name}({arguments}) -> {returns}")
    _LIBRARY.impl(name, function, key)


def attend(query, key, value, scale, masked, keep_prob=1.0):
    """[N, Sq, D] over [Nkv, Sk, D] -> [N, Sq, D] and the log of the softmax's sum [N, Sq, 1], both float32.

    Args:
        masked: bool, broadcast to [N, Sq, Sk]: True where a key is hidden; None: nothing is.
    """
    repeats = query.shape[0] // key.shape[0]
    key, value = (tensor.float().repeat_interleave(repeats, 0) for tensor in (key, value))
    scores = torch.matmul(query.float(), key.transpose(-1, -2)) * scale
    if masked is not None:
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    weights = torch.dropout(torch.softmax(scores, -1), 1.0 - keep_prob, keep_prob < 1.0)
    return torch.matmul(weights, value), torch.logsumexp(scores, -1, keepdim=True)


def causal(queries, keys, offset, device):
    """True where a query may not see a key: the first query sees 1 + offset keys, each further one one more."""
    rows = torch.arange(queries, device=device)[:, None]
    return torch.arange(keys, device=device)[None, :] > rows + offset


# ---------------------------------------------------------------------------------------------- training

_FUSION = "Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, \
Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647, \
int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, \
int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, \
str softmax_layout='', Tensor? sink=None"


def _fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
):
    """Attention of `query` [B, S, N, D] ("BSND") or [T, N, D] ("TND", with summed up lengths), differentiable.

    Returns what the real operator does, of which only the attention output is filled in.
    """
    layout = input_layout.upper()
    _check_fusion(query, key, value, head_num, layout, atten_mask, keep_prob, sparse_mode)
    if pse is not None or padding_mask is not None or prefix is not None or sink is not None:
        raise NotImplementedError("emulated npu_fusion_attention: pse, padding_mask, prefix and sink")
    settings = (atten_mask, scale, keep_prob, sparse_mode)
    if layout == "TND":
        output = _packed(query, key, value, actual_seq_qlen, actual_seq_kvlen, settings)
    else:
        masks = atten_mask if atten_mask is not None and atten_mask.dim() == 4 else [atten_mask]
        masks = [masks[row % len(masks)] for row in range(len(query))]
        rows = zip(query, key, value, masks, strict=True)
        output = torch.stack([_fusion_row(*row, *settings[1:]) for row in rows])
    nothing = query.new_empty(0, dtype=torch.float32)
    return output.to(query.dtype), nothing, nothing, nothing, 0, 0, 0


def _check_fusion(query, key, value, head_num, layout, atten_mask, keep_prob, sparse_mode):
    name = "npu_fusion_attention"
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        _require(
            tensor.device.type == "npu", f"{name}: only npu tensor is supported, but {label} is on {tensor.device}"
        )
        dimensions = tensor.dim()
        _require(
            dimensions in (3, 4),
            f"The shapes of the input {label} should be 3 or 4 dimensional, but got {dimensions}-dimensional",
        )
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    _require(
        len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16, torch.float32},
        f"{name}: query, key and value must share float16, bfloat16 or float32, but got {dtypes}",
    )
    _require(0 < keep_prob <= 1, f"The keep_prob value must be in range of (0, 1], but got {keep_prob}")
    layouts = ("BSH", "SBH", "BNSD", "BSND", "TND")
    _require(layout in layouts, f"The input_layout should be {'/'.join(layouts)}(case-insensitive), but got {layout}")
    if layout not in ("BSND", "TND"):
        raise NotImplementedError(f"emulated npu_fusion_attention: input_layout={layout}")
    _require(query.dim() == len(layout), f"{name}: {layout} wants {len(layout)} dimensions, but got {query.dim()}")
    _require(key.shape[:-1] == value.shape[:-1], f"{name}: key and value must have the same shape")
    _require(query.shape[-1] == key.shape[-1] >= value.shape[-1], f"{name}: head dims must be Dq = Dk >= Dv")
    heads, key_heads = query.shape[-2], key.shape[-2]
    _require(heads == head_num, f"{name}: head_num is {head_num}, but query has {heads} heads")
    _require(heads % key_heads == 0, f"{name}: {heads} heads of query are no multiple of {key_heads} of key")
    modes = {0, 1, 2, 3, 4, 6, 7, 8} if layout == "TND" else set(range(7))
    wanted = "[0,5) or (5,8]" if layout == "TND" else "[0,6]"
    _require(sparse_mode in modes, f"The sparse_mode value must be in range of {wanted}, but got {sparse_mode}")
    if sparse_mode not in (0, 2, 3):
        raise NotImplementedError(f"emulated npu_fusion_attention: sparse_mode={sparse_mode}")
    if atten_mask is not None:
        _require(atten_mask.dtype in (torch.bool, torch.uint8), f"{name}: atten_mask must be bool or uint8")
    if sparse_mode:
        _require_triangle(name, atten_mask)


def _packed(query, key, value, query_ends, key_ends, settings):
    name = "npu_fusion_attention"
    _require(query_ends and key_ends, f"{name}: TND needs actual_seq_qlen and actual_seq_kvlen")
    _require(len(query_ends) == len(key_ends), f"{name}: actual_seq_qlen and actual_seq_kvlen differ in length")
    _require(len(query_ends) <= 2048, f"{name}: TND takes up to 2048 sequences, but got {len(query_ends)}")
    for ends, tensor in ((query_ends, query), (key_ends, key)):
        _require(
            list(ends) == sorted(ends) and ends[0] >= 0 and ends[-1] == len(tensor),
            f"{name}: sequence lengths must be summed up and end with the number of tokens {len(tensor)}: {ends}",
        )
    outputs, query_start, key_start = [], 0, 0
    for query_end, key_end in zip(query_ends, key_ends, strict=True):
        row = query[query_start:query_end], key[key_start:key_end], value[key_start:key_end]
        outputs.append(_fusion_row(*row, *settings))
        query_start, key_start = query_end, key_end
    return torch.cat(outputs)


def _fusion_row(query, key, value, atten_mask, scale, keep_prob, sparse_mode):
    """One sequence: [Sq, N, D] over [Sk, Nkv, D] -> [Sq, N, D]."""
    if sparse_mode:
        offset = 0 if sparse_mode == 2 else len(key) - len(query)
        masked = causal(len(query), len(key), offset, query.device)
    else:
        masked = None if atten_mask is None else atten_mask.bool()
    heads_first = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return attend(*heads_first, scale, masked, keep_prob)[0].transpose(0, 1)


def _require(condition, text):
    if not condition:
        raise RuntimeError(text)


def _require_triangle(name, atten_mask):
    _require(
        atten_mask is not None and tuple(atten_mask.shape[-2:]) == _TRIANGLE,
        f"{name}: sparse_mode 2 and 3 need the compressed [2048, 2048] atten_mask",
    )


_define(
    "npu_fusion_attention",
    _FUSION,
    "(Tensor, Tensor, Tensor, Tensor, int, int, int)",
    _fusion_attention,
    "CompositeImplicitAutograd",
)
npu_fusion_attention = torch.ops.npu.npu_fusion_attention

# ---------------------------------------------------------------------------------------------- inference

_INFER = "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, \
SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, \
Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, \
Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, \
Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, \
Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, \
Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, \
Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, \
float scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', \
int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, \
int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False"

_NAME = "call aclnnFusedInferAttentionScoreV3 failed"
_DIMENSIONS = {"BSH": 3, "BSND": 4, "BNSD": 4, "BNSD_BSND": 4, "TND": 3}


def _infer_attention(
    query,
    key,
    value,
    *,
    atten_mask=None,
    actual_seq_lengths=None,
    actual_seq_lengths_kv=None,
    block_table=None,
    num_heads=1,
    scale=1.0,
    pre_tokens=2147483647,
    next_tokens=2147483647,
    input_layout="BSH",
    num_key_value_heads=0,
    sparse_mode=0,
    inner_precise=0,
    block_size=0,
    antiquant_mode=0,
    softmax_lse_flag=False,
    **beyond,
):
    if beyond:
        raise NotImplementedError(f"emulated npu_fused_infer_attention_score: {', '.join(beyond)}")
    key_heads = num_key_value_heads or num_heads
    _check_infer(query, key, value, num_heads, key_heads, input_layout)
    rows = _query_rows(query, num_heads, input_layout, actual_seq_lengths)
    longest = max((row.shape[1] for row in rows), default=0)
    if input_layout == "TND":
        _require(actual_seq_lengths_kv is not None, f"{_NAME}: TND needs actual_seq_lengths_kv")
        allowed = (sparse_mode, atten_mask is not None) in ((0, False), (3, True))
        _require(allowed, f"{_NAME}: TND takes sparse_mode 0 without or 3 with atten_mask")
    if block_table is None:
        keys, values = (_key_rows(t, key_heads, input_layout, actual_seq_lengths_kv, len(rows)) for t in (key, value))
    else:
        head_dim = query.shape[-1] // (num_heads if input_layout == "BSH" else 1)
        _check_cache(key, key_heads, head_dim, input_layout, block_size, longest)
        _check_table(block_table, block_size, actual_seq_lengths_kv, len(rows), query.device)
        lengths = _lengths(actual_seq_lengths_kv, len(rows))
        keys, values = (_pages(tensor, key_heads, block_table, block_size, lengths) for tensor in (key, value))
    # The longest that a mask has to cover: with pages all that the table can name.
    width = None if block_table is None else block_table.shape[1] * block_size
    outputs, sums = [], []
    for place, (one_query, one_key, one_value) in enumerate(zip(rows, keys, values, strict=True)):
        masked = _infer_mask(atten_mask, sparse_mode, place, one_query.shape[1], one_key.shape[1], longest, width)
        if one_key.shape[1] == 0:
            outputs.append(torch.zeros_like(one_query))
            sums.append(query.new_zeros(num_heads, one_query.shape[1], 1, dtype=torch.float32))
            continue
        output, total = attend(one_query, one_key, one_value, scale, masked)
        outputs.append(output.to(query.dtype))
        sums.append(total)
    lse = query.new_zeros(1, dtype=torch.float32)
    if input_layout == "TND":
        output = torch.cat([one.transpose(0, 1) for one in outputs])
        return output.contiguous(), torch.cat([one.transpose(0, 1) for one in sums]) if softmax_lse_flag else lse
    return _in_layout(outputs, query, input_layout), torch.stack(sums) if softmax_lse_flag else lse


def _check_infer(query, key, value, heads, key_heads, layout):
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    allowed = len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16}
    _require(allowed, f"{_NAME}: query, key and value must share float16 or bfloat16, but got {dtypes}")
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        _require(tensor.is_contiguous(), f"{_NAME}: {label} must be contiguous, but has strides {tensor.stride()}")
    if layout not in _DIMENSIONS:
        raise NotImplementedError(f"emulated npu_fused_infer_attention_score: input_layout={layout}")
    _require(
        query.dim() == _DIMENSIONS[layout], f"{_NAME}: {layout} does not fit a query of shape {tuple(query.shape)}"
    )
    _require(
        key.shape == value.shape, f"{_NAME}: key {tuple(key.shape)} and value {tuple(value.shape)} must be of a shape"
    )
    _require(heads > 0, f"num_heads should be greater than 0, but the actual value is {heads}")
    _require(heads % key_heads == 0 and heads // key_heads <= 64, f"{_NAME}: {heads} heads do not fit {key_heads}")
    found = {"BSH": heads, "BSND": query.shape[-2], "TND": query.shape[-2]}.get(layout, query.shape[1])
    _require(found == heads, f"{_NAME}: num_heads is {heads}, but query has {found}")
    size = query.shape[-1] // heads if layout == "BSH" else query.shape[-1]
    _require(size % 16 == 0 and size <= 512, f"{_NAME}: the head dim must be a multiple of 16 up to 512, but is {size}")


def _query_rows(query, heads, layout, ends):
    """[N, S, D] of each row, as far as it is long."""
    if layout == "TND":
        _require(ends is not None, f"{_NAME}: TND needs actual_seq_lengths")
        _require(
            list(ends) == sorted(ends) and ends[-1] == len(query),
            f"{_NAME}: actual_seq_lengths of TND must be summed up and end with the {len(query)} tokens: {ends}",
        )
        return [query[start:end].transpose(0, 1) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if layout == "BNSD_BSND":
        _require(query.shape[2] > 1, f"{_NAME}: BNSD_BSND is for more than one query token")
    whole = _heads_first(query, heads, layout)
    if whole.shape[2] > 1 and ends is not None and set(_lengths(ends, len(whole))) != {whole.shape[2]}:
        raise NotImplementedError("emulated npu_fused_infer_attention_score: padded queries")
    return list(whole)


def _key_rows(tensor, heads, layout, lengths, rows):
    if layout == "TND":
        spans = zip([0, *lengths[:-1]], lengths, strict=True)
        return [tensor[start:end].transpose(0, 1) for start, end in spans]
    whole = _heads_first(tensor, heads, layout)
    _require(len(whole) == rows, f"{_NAME}: {rows} rows of query, {len(whole)} of key")
    _require(whole.shape[1] == heads, f"{_NAME}: num_key_value_heads is {heads}, but key has {whole.shape[1]}")
    if lengths is None:
        return list(whole)
    lengths = _lengths(lengths, rows)
    _require(max(lengths) <= whole.shape[2], f"{_NAME}: actual_seq_lengths_kv {lengths} exceed {whole.shape[2]} keys")
    return [row[:, :length] for row, length in zip(whole, lengths, strict=True)]


def _heads_first(tensor, heads, layout):
    """[B, N, S, D]."""
    if layout == "BSH":
        tensor = tensor.unflatten(-1, (heads, -1))
    return tensor if layout.startswith("BNSD") else tensor.transpose(1, 2)


def _in_layout(outputs, query, layout):
    stacked = torch.stack(outputs)  # [B, N, S, D]
    if layout == "BNSD":
        return stacked
    stacked = stacked.transpose(1, 2).contiguous()
    return stacked.flatten(2) if layout == "BSH" else stacked


def _lengths(lengths, rows):
    """One a row: a single one is for all, further ones than rows are not read."""
    _require(len(lengths) == 1 or len(lengths) >= rows, f"{_NAME}: {len(lengths)} lengths for {rows} rows")
    lengths = list(lengths) * rows if len(lengths) == 1 else list(lengths[:rows])
    _require(min(lengths) >= 0, f"{_NAME}: lengths must not be negative: {lengths}")
    return lengths


def _check_cache(cache, heads, head_dim, layout, size, longest):
    if longest == 1:
        _require(size > 0 and size % 16 == 0, f"{_NAME}: block_size must be a multiple of 16, but is {size}")
    else:
        _require(
            size in (128, 256, 384, 512), f"{_NAME}: block_size must be a multiple of 128 up to 512, but is {size}"
        )
    shape = tuple(cache.shape)
    if cache.dim() == 3:
        wanted = ("blocks", size, heads * head_dim)
        _require(shape[2] <= 65535, f"{_NAME}: the last dimension of {shape} may be up to 65535")
    else:
        wanted = ("blocks", heads, size, head_dim)
        _require(layout in ("BNSD", "TND"), f"{_NAME}: a cache of {cache.dim()} dimensions wants BNSD or TND")
    _require(shape[1:] == wanted[1:], f"{_NAME}: a cache of shape {shape} should be {wanted}")


def _check_table(table, size, lengths, rows, device):
    _require(lengths is not None, f"{_NAME}: pages need actual_seq_lengths_kv")
    _require(table.dtype == torch.int32, f"{_NAME}: block_table must be int32, but is {table.dtype}")
    _require(table.device == device, f"{_NAME}: block_table is on {table.device}")
    _require(table.dim() == 2 and len(table) == rows, f"{_NAME}: block_table {tuple(table.shape)} for {rows} rows")
    longest = max(_lengths(lengths, rows))
    _require(longest <= table.shape[1] * size, f"{_NAME}: block_table is too narrow for {longest} keys")


def _pages(cache, heads, table, size, lengths):
    """[Nkv, length, D] of each row, from its blocks."""
    rows = []
    for row, length in zip(table, lengths, strict=True):
        blocks = cache.index_select(0, row[: -(-length // size)].long())
        if cache.dim() == 3:
            tokens = blocks.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(0, 1)
        else:
            tokens = blocks.transpose(0, 1).flatten(1, 2)
        rows.append(tokens[:, :length])
    return rows


def _infer_mask(atten_mask, sparse_mode, row, queries, keys, longest, width):
    if longest > 1 and sparse_mode not in (0, 2, 3):
        raise NotImplementedError(f"emulated npu_fused_infer_attention_score: sparse_mode={sparse_mode}")
    if atten_mask is None:
        _require(longest == 1 or sparse_mode == 0, f"{_NAME}: sparse_mode {sparse_mode} needs atten_mask")
        return None
    _require(
        atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), f"{_NAME}: atten_mask must be bool, int8 or uint8"
    )
    if sparse_mode and (longest > 1 or tuple(atten_mask.shape[-2:]) == _TRIANGLE):
        _require_triangle(_NAME, atten_mask)
        return causal(queries, keys, 0 if sparse_mode == 2 else keys - queries, atten_mask.device)
    _require(width is None or atten_mask.shape[-1] >= width, f"{_NAME}: with pages atten_mask must cover {width} keys")
    per_row = atten_mask.dim() > 2 or longest == 1
    mask = atten_mask[row if len(atten_mask) > 1 else 0] if per_row else atten_mask
    return mask.bool().reshape(-1, mask.shape[-1])[:queries, :keys]


def _infer_attention_out(*tensors, workspace=None, out, **settings):
    _require(workspace is None or workspace.dtype == torch.uint8, f"{_NAME}: workspace is not one of the operator's")
    _require(len(out) == 2, f"{_NAME}: out is [attention_out, softmax_lse]")
    for given, found in zip(out, _infer_attention(*tensors, **settings), strict=True):
        if given is out[0]:
            _require(given.shape == found.shape, f"{_NAME}: out is {tuple(given.shape)}, not {tuple(found.shape)}")
        if given.shape == found.shape:  # without softmax_lse_flag the second one is not written to
            given.copy_(found)


def _infer_output(query, value, *, input_layout="BSH", num_heads=1, softmax_lse_flag=False, **_):
    shape = list(query.shape)
    if input_layout == "BNSD_BSND":
        shape = [shape[0], shape[2], shape[1], shape[3]]
    if not softmax_lse_flag:
        sums = [1]
    elif input_layout == "TND":
        sums = [shape[0], shape[1], 1]
    else:
        sums = [query.shape[0], num_heads, query.shape[2 if input_layout.startswith("BNSD") else 1], 1]
    return query.new_empty(shape), query.new_empty(sums, dtype=torch.float32)


def _max_workspace(query, *_, **__):
    return query.new_empty(2**10, dtype=torch.uint8)


_INFER_OUTPUT = "Tensor query, Tensor value, *, str input_layout='BSH', Tensor? quant_scale2=None, \
Tensor? block_table=None, int num_heads=1, int num_key_value_heads=0, bool softmax_lse_flag=False, \
Tensor? query_rope=None"

for _name, _arguments, _returns, _function in (
    ("npu_fused_infer_attention_score", _INFER, "(Tensor, Tensor)", _infer_attention),
    (
        "npu_fused_infer_attention_score.out",
        f"{_INFER}, Tensor? workspace=None, Tensor(a!)[] out",
        "()",
        _infer_attention_out,
    ),
    ("_npu_fused_infer_attention_score_get_max_workspace", _INFER, "Tensor", _max_workspace),
    ("_npu_fused_infer_attention_score_infer_output", _INFER_OUTPUT, "(Tensor, Tensor)", _infer_output),
):
    _define(_name, _arguments, _returns, _function, "PrivateUse1")

npu_fused_infer_attention_score = torch.ops.npu.npu_fused_infer_attention_score
_npu_fused_infer_attention_score_get_max_workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace
_npu_fused_infer_attention_score_infer_output = torch.ops.npu._npu_fused_infer_attention_score_infer_output
