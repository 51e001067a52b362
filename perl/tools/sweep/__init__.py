"""python -m perl sweep: trainings that differ in some settings, with several seeds each, scored and compared.

    RECIPE, --vary, --seeds  ->  grid.py: every run with its flags, all of them checked
                             ->  work.py: the base's score; each run trained and scored, or gone on with
                             ->  perl.reports.methods: the comparison, as a table, a page and JSON

perl/eval.py has a sweep of its own, which scores the checkpoints of one training.
"""

from perl.tools.sweep.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
