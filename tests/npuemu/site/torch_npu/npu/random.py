"""Seeds and states of the devices' default generators, which draw the CPU's numbers."""

import os

import torch

from ._index import device_index

_ops = torch.ops.npuemu


def _generator(device):
    return _ops.default_generator(device_index(device))


def get_rng_state(device="npu"):
    return _generator(device).get_state()


def set_rng_state(new_state, device="npu"):
    _generator(device).set_state(new_state)


def get_rng_state_all():
    return [get_rng_state(index) for index in range(_ops.device_count())]


def set_rng_state_all(new_states):
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed):
    if _ops.device_count():
        _generator("npu").manual_seed(int(seed))


def manual_seed_all(seed):
    for index in range(_ops.device_count()):
        _ops.default_generator(index).manual_seed(int(seed))


def seed():
    drawn = int.from_bytes(os.urandom(7), "little")
    manual_seed(drawn)
    return drawn


def seed_all():
    drawn = int.from_bytes(os.urandom(7), "little")
    manual_seed_all(drawn)
    return drawn


def initial_seed():
    return _generator("npu").initial_seed()
