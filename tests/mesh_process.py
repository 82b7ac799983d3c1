"""One of the processes of ``test_distributed``: joins the others, loads its part of the model, and decodes.

Run as ``python -m tests.mesh_process HOST:PORT PROCESSES PROCESS DIRECTORY``; it leaves ``DIRECTORY/<process>.npz``.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np

from dsv41.checkpoint import LoadProgress, RandomSource
from dsv41.checkpoint.orbax import save_variables
from dsv41.loading import load_variables
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.sharding.distributed import initialize, is_leader
from dsv41.steps.decode import generate_step
from dsv41.steps.sampling import create_sampler
from tests.helpers import TWO_LAYERS, mini8_config, with_text
from tests.test_sharded_steps import SLOTS, WIDE, fresh, meshed

# Fewer layers than other tests on meshes have: three processes compile them.
FEW = WIDE | TWO_LAYERS
AXES = {"expert": 8}
STEPS = 6
SEED = 3


def single_model() -> Model:
    """The model on one device."""
    return Model(Settings.default(with_text(mini8_config(), **FEW), cache_rounding=False, page_tokens=8))


def loaded(model: Model) -> tuple[dict, int]:
    """Variables, and the bytes that this process read for them."""
    seen: list[LoadProgress] = []
    text = model.settings.text
    ids = np.arange(text.vocab_size, dtype=np.int32) % text.engram_compressed_vocab_size
    source = RandomSource(model.settings.config, SEED)
    return load_variables(model, source, ids, seen.append), seen[-1].bytes_read


def decoded(model: Model, variables: dict) -> np.ndarray:
    """Tokens ``[steps, slots]`` of decoding from a first token, every second request at temperature 1."""
    slots = np.arange(SLOTS)
    sampler = create_sampler(SLOTS).replace(
        pending=(slots + 3).astype(np.int32),
        seed=slots.astype(np.uint32),
        temperature=(slots % 2).astype(np.float32),
    )
    state, active, chosen = fresh(model), np.ones(SLOTS, bool), []
    for _ in range(STEPS):
        state, sampler, tokens = generate_step(model, variables, state, sampler, active)
        chosen.append(np.asarray(tokens))
    return np.stack(chosen)


def main(coordinator: str, processes: str, process: str, directory: str) -> None:
    initialize(coordinator, int(processes), int(process))
    out = pathlib.Path(directory)
    model = meshed(single_model(), AXES)
    variables, read = loaded(model)
    np.savez(out / f"{process}.npz", tokens=decoded(model, variables), read=read, leader=is_leader())
    save_variables(out / "orbax", model, variables)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
