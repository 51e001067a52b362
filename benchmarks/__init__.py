"""Side by side with the peers; each benchmark ends in a line of JSON."""

import importlib

# TRL imports vLLM wherever it is installed, which takes ten seconds in every process; no side needs it through TRL.
setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda min_version=None: False)  # noqa: B010
