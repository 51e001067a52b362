"""Run by the doctor in a process of its own: imports torch, counts devices, prints one JSON object.

torch_npu is loaded by `import torch` itself (torch's backend autoload), and its failure is then torch's, so autoload
is switched off first and torch_npu imported by name.
"""

import importlib.util
import json
import os

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def look() -> dict:
    import torch

    seen = {"version": torch.__version__, "threads": torch.get_num_threads(), "npu": 0, "cuda": 0}
    if importlib.util.find_spec("torch_npu"):
        import torch_npu

        seen["npu"] = torch_npu.npu.device_count()
    if torch.cuda.is_available():
        seen["cuda"] = torch.cuda.device_count()
    return seen


try:
    result = look()
except Exception as error:  # noqa: BLE001  # whatever an import raises is the answer
    result = {"error": f"{type(error).__name__}: {error}"}
print("\n" + json.dumps(result))
