"""Why will this machine not train or evaluate? Answered by looking, one line a check.

    probes.gather() -> Machine          facts, looked up once, concurrently, within a deadline
    CHECKS[name](machine) -> Finding    pure functions: what was found, why it matters, the command that fixes it

Only the standard library is imported, and nothing newer than Python 3.9: this runs where nothing else does. torch is
imported by a child process alone, because a broken torch_npu breaks `import torch` itself.
"""

from perl.tools.doctor.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
