"""torch.npu.amp: the device-independent classes of torch.amp, for "npu"."""

import torch


class GradScaler(torch.amp.GradScaler):
    def __init__(self, *arguments, **options):
        super().__init__("npu", *arguments, **options)


class autocast(torch.amp.autocast):
    def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
