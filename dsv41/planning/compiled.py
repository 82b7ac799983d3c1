"""A step of a model compiled for a pod that is not there: what each device would hold, and what it would send.

libtpu compiles for a topology by its name; parameters and state are shapes only. The program is the one that runs,
Pallas kernels included.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.declared import abstract_variables
from dsv41.layers.dspark import Drafter
from dsv41.model import Model, TokenBatch
from dsv41.planning.collectives import Collective, collectives
from dsv41.planning.schedule import Scheduled, scheduled_collectives
from dsv41.settings import Settings
from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import MeshError
from dsv41.state.request import create_segment, create_state
from dsv41.state.ring import create_ring
from dsv41.steps.acceptance import Rule
from dsv41.steps.decode import generate_step
from dsv41.steps.draft import draft_step
from dsv41.steps.prefill import encode_chunk, replay_decoder
from dsv41.steps.sampling import create_sampler
from dsv41.steps.verify import verify_step
from pallas_kernels import backend

STEPS = ("decode", "verify", "draft", "prefill", "replay")

# What libtpu says when everything is laid out, and when a part is too large to try.
_PACKED = re.compile(r"Used ([\d.]+[KMG]) of ([\d.]+[KMG]) (\w+)\. Exceeded \w+ capacity by ([\d.]+[KMG])")
_TOO_LARGE = re.compile(r"required for (.+?) \(([\d.]+[KMGT])\) exceeds available (\w+) \(([\d.]+[KMG])\)")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled ahead of time; bytes are of one device.

    Attributes:
      arguments: parameters, state and inputs; results that take their buffers are not counted again.
      temporaries: at the step's peak.
      results: that take no argument's buffer.
      code: of the program.
      compile_s: seconds to trace, lower and compile.
      schedule: what runs beside the program's collectives.
      back_ends: what each operation runs on, with the reasons for fallbacks.
      executable: None if the memory does not suffice.
      misfit: what does not fit and by how much; None if all does.
    """

    arguments: int
    temporaries: int
    results: int
    code: int
    compile_s: float
    collectives: list[Collective]
    schedule: list[Scheduled]
    back_ends: dict[str, list[str]]
    executable: jax.stages.Compiled | None
    misfit: str | None

    @property
    def total(self) -> int:
        """Bytes that a device needs."""
        return self.arguments + self.temporaries + self.results + self.code


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a TPU topology, ``v6e:16x16``, without any of them.

    Raises:
      MeshError: libtpu is not installed, or knows no such topology; or it is none of TPUs.
    """
    from jax.experimental import topologies

    if name.startswith("gpu"):
        raise MeshError(f"topology {name!r}: programs are compiled ahead of time for TPUs only")
    # Without these, libtpu looks for a TPU of its own and lets no second process load it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MeshError(f"topology {name!r}: {reason} (is the libtpu package installed?)") from error


def compile_step(
    settings: Settings,
    preset: MeshPreset,
    devices: list[jax.Device],
    kind: str,
    batch: int,
    context: int,
    chunk: int,
    drafts: int,
    progress: Callable[[str], None] = lambda message: None,
    options: Mapping[str, bool | float] | None = None,
) -> Compiled:
    """Compiles one step of the whole batch.

    Args:
      kind: one of :data:`STEPS`. decode, verify, prefill (a chunk of every request through the encoder) and replay as
        :func:`~dsv41.planning.plan.planned_step` has them; draft: a block of drafts.
      batch: requests on the whole mesh.
      context: tokens that every request has pages for.
      progress: called with what is done next.
      options: of the compiler, by the names that XLA and libtpu give them; None: its defaults.

    Raises:
      MeshError: a size does not fit the mesh, or the mesh not the devices.
    """
    model = Model(dataclasses.replace(settings, parallel=preset.parallel(devices)))
    return compile_traced(lambda: _traced(model, kind, batch, context, chunk, drafts), preset.axes, progress, options)


def compile_traced(
    trace: Callable[[], jax.stages.Traced],
    axes: Mapping[str, int],
    progress: Callable[[str], None] = lambda message: None,
    options: Mapping[str, bool | float] | None = None,
) -> Compiled:
    """Compiles what ``trace`` traces for TPUs, on a mesh with these axes; see :func:`compile_step`."""
    begin = time.perf_counter()
    backend.forget()
    with backend.use("tpu"):
        progress("tracing")
        traced = trace()
        found = collectives(traced.jaxpr, axes)
        progress("lowering")
        lowered = traced.lower()
        back_ends = backend.report()
        progress("compiling")
        try:
            executable = lowered.compile(dict(options) if options else None)
        except jax.errors.JaxRuntimeError as error:
            misfit = shortage(str(error))
            if misfit is None:
                raise
            seconds = time.perf_counter() - begin
            return Compiled(0, 0, 0, 0, seconds, found, [], back_ends, None, misfit)
    memory = executable.memory_analysis()
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=_temporaries(memory),
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        compile_s=time.perf_counter() - begin,
        collectives=found,
        schedule=scheduled_collectives(executable.as_text()),
        back_ends=back_ends,
        executable=executable,
        misfit=None,
    )


def _temporaries(memory: Any) -> int:
    """Bytes of temporaries at the step's peak; libtpu's own size of them counts gaps of their layout, some twice."""
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results


def shortage(message: str) -> str | None:
    """What a compiler's error says of memory that does not suffice, in a line; None if it is about something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    if packed := _PACKED.search(message):
        used, there, memory, excess = packed.groups()
        return f"does not fit: needs {used} of {there} {memory} a device, {excess} too many"
    if one := _TOO_LARGE.search(message):
        what, used, memory, there = one.groups()
        return f"does not fit: {what} alone need {used} of {there} {memory} a device"
    return f"does not fit: {message.splitlines()[0]}"


def _traced(model: Model, kind: str, batch: int, context: int, chunk: int, drafts: int) -> jax.stages.Traced:
    settings, text = model.settings, model.settings.text
    parts = settings.parallel.parts("batch")
    if batch % parts:
        raise MeshError(
            f"batch of {batch} is not divisible by mesh axes {' × '.join(settings.parallel.places('batch'))}"
        )
    table_pages = -(-context // settings.page_tokens)
    whole = settings.whole
    state = jax.eval_shape(lambda: create_state(whole, batch, batch * table_pages, table_pages))
    sampler = jax.eval_shape(lambda: create_sampler(batch))
    variables = {
        "params": abstract_variables(model),
        "constants": {"token_map": _array((text.vocab_size,), jnp.int32)},
    }
    requests, active = _array((batch,), jnp.int32), _array((batch,), jnp.bool_)
    if kind == "decode":
        return generate_step.trace(model, variables, state, sampler, active)
    if kind == "verify":
        tokens = _array((batch, drafts), jnp.int32)
        p = _array((batch, drafts, text.vocab_size), jnp.float32)
        return verify_step.trace(model, Rule.REJECTION, variables, state, sampler, tokens, p, requests, active)
    if kind == "draft":
        drafter = Drafter(settings)
        ring = jax.eval_shape(lambda: create_ring(whole, text.num_nextn_predict_layers, batch))
        taps = _array((len(text.dspark_target_layer_ids), batch, drafts + 1, text.hidden_size), settings.dtype)
        own = {"params": abstract_variables(drafter)}
        return draft_step.trace(model, drafter, True, variables, own, ring, taps, requests, requests, sampler, active)
    tail = jax.eval_shape(lambda: create_segment(whole, batch, text.sliding_window))
    if kind == "replay":
        return replay_decoder.trace(model, variables, state, requests, tail)
    tokens = TokenBatch(_array((batch, chunk), jnp.int32), requests)
    return encode_chunk.trace(model, variables, state, requests, tail, tokens, requests)


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
