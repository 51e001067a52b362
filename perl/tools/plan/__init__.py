"""How much memory will this run take? Answered before it starts, from its recipe and the model's config.json.

inputs    recipe, config.json -> Job, Shape
memory    Shape, Job, Device -> items: the arithmetic
page      the same batch, dealt out so that it fits; the answer as text and as JSON
"""

from perl.tools.plan.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
