"""A stack of layers run as loops over its repeating groups, so that compiling does not grow with depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41.layer_table import Group, Layer, Mode, Run, stack_plan
from dsv41.layers.block import Block
from dsv41.layers.flow import Flow, LayerInputs, LayerOutputs, Step
from dsv41.layers.linear import declare_parts
from dsv41.layers.moe import ExpertMatrices
from dsv41.settings import Settings
from dsv41.state.tail import Tails
from pallas_kernels.choice import CHOICE
from pallas_kernels.formats import Packed


class StackOutputs(NamedTuple):
    """Window entries of all layers, leaves ``[layers, batch, query, width']``, and the sources' projections."""

    entries: Packed
    projections: Tails


def _kept(names: str) -> Callable:
    """What :data:`dsv41.settings.REMAT` calls the policy of this name."""
    choices = jax.checkpoint_policies.save_only_these_names(CHOICE)
    if names == "choices":
        return choices
    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint_policies.save_from_both_policies(choices, products)


def _block(settings: Settings, length: int) -> type[nn.Module]:
    """A loop of layers; each keeps for the backward pass what the settings say."""
    if settings.remat == "nothing":
        return _loop(Block, length)
    # Inside a loop nothing can be shared between a pass and its recomputation, so nothing need be kept apart.
    return _loop(nn.remat(Block, policy=_kept(settings.remat), prevent_cse=length == 1), length)


def _loop(module: type[nn.Module], length: int) -> type[nn.Module]:
    """The module, or a loop of ``length`` of it with parameters stacked on a leading axis."""
    if length == 1:
        return module
    return nn.scan(
        module,
        variable_axes={"params": 0, "intermediates": 0, "statistics": 0, "divergence": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, nn.broadcast),
        length=length,
        methods=("__call__", "declare_in_loop"),
        metadata_params={nn.PARTITION_NAME: "layers"},
        # The check traces every body a second time, at every level of nesting; our bodies broadcast nothing back.
        check_constancy_invariants=False,
    )


class GroupBlock(nn.Module):
    """One repetition of a group: its runs, one after the other.

    Attributes:
      flags: for each run, whether any of its layers has an Engram, and whether any is a tap.
    """

    settings: Settings
    runs_plan: tuple[Run, ...]
    flags: tuple[tuple[bool, bool], ...]
    appends: bool

    def setup(self):
        self.runs = [
            _block(self.settings, run.count)(self.settings, run.kind, has_engram, has_tap, self.appends)
            for run, (has_engram, has_tap) in zip(self.runs_plan, self.flags, strict=True)
        ]

    def declare_in_loop(self, flow: None, inputs: None, step: None, experts: None) -> tuple[None, None]:
        """See :func:`~dsv41.layers.linear.declare_parts`."""
        declare_parts(self)
        return None, None

    def __call__(
        self,
        flow: Flow,
        inputs: tuple[LayerInputs, ...],
        step: Step,
        experts: tuple[ExpertMatrices | None, ...],
    ) -> tuple[Flow, tuple[LayerOutputs, ...]]:
        outputs = []
        for run, run_inputs, run_experts in zip(self.runs, inputs, experts, strict=True):
            flow, out = run(flow, run_inputs, step, run_experts)
            outputs.append(out)
        return flow, tuple(outputs)


class Stack(nn.Module):
    """The encoder's or the decoder's layers.

    Attributes:
      layers: rows of the layer table, consecutive.
      appends: see :class:`~dsv41.layers.block.Block`.
    """

    settings: Settings
    layers: tuple[Layer, ...]
    appends: bool

    def setup(self):
        self.groups = [self._group(group) for group in self.plan]

    @property
    def plan(self) -> tuple[Group, ...]:
        return stack_plan(self.layers)

    @property
    def before_engram(self) -> int:
        """Groups before the first Engram; all of them without one."""
        return next((i for i, group in enumerate(self.plan) if group.first_engram), len(self.plan))

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """Layers of this stack with an Engram before them."""
        inside = {layer.index for layer in self.layers}
        return tuple(layer for layer in self.settings.text.engram_layer_ids if layer in inside)

    def _group(self, group: Group) -> nn.Module:
        engrams, taps = set(self.engram_layers), set(self.settings.text.dspark_target_layer_ids)
        flags, offset = [], 0
        for run in group.runs:
            layers = {
                group.start + repeat * group.depth + offset + i
                for repeat in range(group.repeats)
                for i in range(run.count)
            }
            flags.append((bool(layers & engrams), bool(layers & taps)))
            offset += run.count
        return _loop(GroupBlock, group.repeats)(self.settings, group.runs, tuple(flags), self.appends)

    @property
    def source(self) -> Block:
        """The first layer's module: in the decoder, the KV source whose entries the encoder's outputs make."""
        return self.groups[0].runs[0]

    def inputs(self, ring: Packed) -> LayerInputs:
        """Inputs of all layers, stacked; ring: leaves ``[layers, batch, W, width']`` in position order."""
        table, text = self.settings.table, self.settings.text
        targets, sources = text.dspark_target_layer_ids, table.index_sources
        rows = [layer.index for layer in self.layers]

        def column(values) -> jax.Array:
            return jnp.asarray(list(values), jnp.int32)

        return LayerInputs(
            ring=ring,
            source_slot=column(table.source_slot(i) for i in rows),
            index_slot=column(sources.index(i) if i in sources else 0 for i in rows),
            engram_slot=column(self.engram_layers.index(i) if i in self.engram_layers else -1 for i in rows),
            tap_slot=column(targets.index(i) if i in targets else len(targets) for i in rows),
            expert_slot=column(itertools.chain.from_iterable(_expert_slots(group) for group in self.plan)),
        )

    def _stacked_experts(self, index: int) -> tuple[ExpertMatrices | None, ...]:
        """Of each run of a group the packed experts of all its layers; None where they are the module's own.

        A loop hands its body a slice of the stacked parameters, and a kernel needs that slice as an array: a copy of
        all experts of a layer in every step. Kernels read the stack itself. Float experts stay the loop's: the
        gradient of a stack would be added up whole in every iteration.
        """
        group = self.plan[index]
        if not self.settings.packed_weights:
            return (None,) * len(group.runs)
        params = self.variables["params"][f"groups_{index}"]

        def of_run(i: int, run: Run) -> ExpertMatrices | None:
            loops = (group.repeats > 1) + (run.count > 1)
            return ExpertMatrices.stacked(params[f"runs_{i}"]["ffn"]["experts"], loops) if loops else None

        return tuple(of_run(i, run) for i, run in enumerate(group.runs))

    def __call__(
        self, flow: Flow, ring: Packed, step: Step, first: int = 0, last: int | None = None
    ) -> tuple[Flow, StackOutputs]:
        """Runs the layers of groups ``first`` … ``last − 1``; by default all.

        Args:
          ring: window entries before the step, of all layers, leaves ``[layers, batch, W, width']``.

        Returns:
          the flow, and the outputs of the layers that ran.
        """
        inputs = self.inputs(ring)
        entries: list[Packed] = []
        projections: Tails = {}
        for index in range(len(self.plan))[first:last]:
            group, module = self.plan[index], self.groups[index]
            begin = group.start - self.layers[0].index
            flow, outputs = module(flow, _split(inputs, group, begin), step, self._stacked_experts(index))
            entries.append(_join([out.entries for out in outputs], group))
            for run, out in zip(group.runs, outputs, strict=True):
                if run.kind.mode is Mode.FULL and out.projections is not None:
                    lead = () if group.repeats > 1 else (None,)
                    stacked = jax.tree.map(lambda t, lead=lead: t[lead] if lead else t, out.projections)
                    before = projections.get(run.kind.ratio)
                    projections[run.kind.ratio] = stacked if before is None else concatenate(before, stacked)
        if not entries:  # a model whose first layer is the last KV source has no encoder; without any, no decoder
            queries = step.positions.shape[1]
            entries.append(ring.map(lambda leaf: jnp.zeros((0, leaf.shape[1], queries, leaf.shape[3]), leaf.dtype)))
        return flow, StackOutputs(jax.tree.map(lambda *parts: jnp.concatenate(parts), *entries), projections)


def _expert_slots(group: Group) -> list[int]:
    """For each layer of a group its place among all layers of its run: those of the first repetition come first."""
    return [repeat * run.count + i for repeat in range(group.repeats) for run in group.runs for i in range(run.count)]


def join_outputs(before: StackOutputs, after: StackOutputs) -> StackOutputs:
    """The outputs of a stack that ran in two parts."""
    projections = dict(before.projections)
    for ratio, new in after.projections.items():
        projections[ratio] = concatenate(projections[ratio], new) if ratio in projections else new
    return StackOutputs(concatenate(before.entries, after.entries), projections)


def concatenate(*trees):
    """Joins equal trees of arrays along their first axis."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *trees)


def _split(inputs: LayerInputs, group: Group, begin: int) -> tuple[LayerInputs, ...]:
    """Slices stacked per-layer inputs into a group's runs: leading axes [repeats, count], those of 1 dropped."""
    pieces, offset = [], 0

    def piece(leaf: jax.Array, offset: int, count: int) -> jax.Array:
        part = leaf[begin : begin + group.repeats * group.depth]
        part = part.reshape(group.repeats, group.depth, *part.shape[1:])[:, offset : offset + count]
        part = part[:, 0] if count == 1 else part
        return part[0] if group.repeats == 1 else part

    for run in group.runs:
        pieces.append(jax.tree.map(lambda leaf, o=offset, n=run.count: piece(leaf, o, n), inputs))
        offset += run.count
    return tuple(pieces)


def _join(outputs: list[Packed], group: Group) -> Packed:
    """The inverse of :func:`_split` for the outputs of a group's runs: leaves ``[layers of the group, …]``."""

    def stacked(leaf: jax.Array, run: Run) -> jax.Array:
        leaf = leaf[None] if group.repeats == 1 else leaf
        return leaf[:, None] if run.count == 1 else leaf

    runs = [out.map(lambda leaf, run=run: stacked(leaf, run)) for out, run in zip(outputs, group.runs, strict=True)]
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *runs)
    return joined.map(lambda leaf: leaf.reshape(group.repeats * group.depth, *leaf.shape[2:]))
