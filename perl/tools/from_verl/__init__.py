"""A command of verl, as a recipe of perl: nothing is dropped silently, nothing of the user's is executed.

shell.py      script -> the words of its training command          (nothing is run)
state.py      what is known while a script is followed
grammar.py    script -> tree                                       (tree-sitter)
expressions.py what ((…)), [ … ] and [[ … ]] come to
overrides.py  words, YAML -> keys with values over verl's defaults (Hydra's parser, OmegaConf)
keys.yaml     each key -> translated | without effect | refused   (keys.py reads it)
handlers.py   what decides about a key that others decide about too
batch.py      verl's batch arithmetic
translate.py  all of a command, into the three lists
cli.py        recipe, printed lists, launch
"""

from perl.tools.from_verl.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
