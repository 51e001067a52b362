"""python -m perl audit: does a reward pay for what it should not?

rows               problems -> rows: each with its answer and wrong ones
probes             row -> texts that are right or wrong, whatever the reward does
payer              texts -> what the reward pays, called as a training calls it
verdict            what was paid -> Audit
before_training    a few of the texts, before a training starts: one line in its log
"""

from perl.tools.audit.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
