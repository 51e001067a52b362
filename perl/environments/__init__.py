"""Conversations of several turns: tools and environments answer what the policy says.

reset(row) -> prompt, encoded once -> completion -> step(message) -> observation, its tokens appended -> completion …

base          what an environment is
tools         functions and TRL's environment classes as one
calls         how a family of models writes a call
template      the tokens that a chat template puts around a turn
conversation  the loop, which feeds an engine
python_tool   the tool python, in a sandbox
"""
