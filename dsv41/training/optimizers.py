"""The optimiser: Muon for matrices, AdamW for vectors, normalised momentum for tables (training.md, 'Optimisers').

    gradients ──► zero where nothing is trained ──► clip by the global norm ──► each group's own rule

Groups follow from the parameters' paths and declared logical axes. Frozen parameters and the routers' biases have no
optimiser state; their updates are −0.0, so that ``optax.apply_updates`` keeps them to the bit.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import meta
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, unflatten_tree
from dsv41.config import ConfigError
from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.training.placement import spread_partition
from pallas_kernels.tiling import pad_axis

_ADAMW_RMS = 0.2  # What AdamW's updates are found to have at learning rate 1 (Liu et al., arXiv:2502.16982).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values end near 1, between 0.7 and 1.2.
_TOGETHER_BYTES = 2**28  # Matrices that are orthogonalised at once, before a mesh divides them.
_NO_MOMENTUM = 1e-12  # Added to a Frobenius norm; a momentum far below it counts as none.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Constants of the rules.

    Attributes:
      momentum: of Muon and of the tables.
      momentum_dtype: "float32" or "bfloat16": how they are kept between steps.
      weight_decay: of Muon and AdamW, times the learning rate; tables have none.
      muon_iterations: Newton-Schulz steps.
      muon_match_rms: True: an orthogonalised update is scaled by 0.2·√max(rows, columns), which gives it the RMS that
        AdamW's updates have, so that both share a learning rate; False: by √max(1, rows / columns).
      adam_b1, adam_b2, adam_eps: AdamW's.
      engram_rate: learning rate of Engram's tables over that of the rest.
      clip_norm: greatest global norm of the gradients; infinite: none.
      freeze: glob patterns of parameter paths (``encoder/groups_0/*``; a ``*`` crosses "/") that are not trained.
      train: patterns of those among the frozen that are trained after all.
    """

    momentum: float = 0.95
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: float = 0.1
    muon_iterations: int = 5
    muon_match_rms: bool = True
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-20
    engram_rate: float = 5.0
    clip_norm: float = 1.0
    freeze: tuple[str, ...] = ()
    train: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("momentum", "adam_b1", "adam_b2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"optimizer.{name}: {value} is not in [0, 1)")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optimizer.weight_decay: {self.weight_decay} is not a number from 0 on")
        for name in ("adam_eps", "engram_rate"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"optimizer.{name}: {value} is not a positive number")
        if self.momentum_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"optimizer.momentum_dtype: {self.momentum_dtype!r} is neither float32 nor bfloat16")
        if self.muon_iterations < 1:
            raise ConfigError(f"optimizer.muon_iterations: {self.muon_iterations} is not positive")
        if not self.clip_norm > 0:
            raise ConfigError(f"optimizer.clip_norm: {self.clip_norm} is not positive")


class Group(enum.Enum):
    """What updates a parameter."""

    MUON = "muon"
    ADAMW = "adamw"
    TABLE = "table"
    ENGRAM_TABLE = "engram_table"
    ROUTER_BIAS = "router_bias"  # the balance rule alone (dsv41.training.balance)
    FROZEN = "frozen"

    @property
    def trained(self) -> bool:
        """Whether its gradients count."""
        return self not in (Group.ROUTER_BIAS, Group.FROZEN)


class Treatment(NamedTuple):
    """How a parameter is updated.

    Attributes:
      loops: leading axes of loops over layers.
      blocks: equal blocks of rows ``[blocks · rows, columns]`` that Muon takes for matrices of their own.
      names: logical axes behind the loops'.
    """

    group: Group
    loops: int = 0
    blocks: int = 1
    names: tuple[str | None, ...] = ()


Groups = Mapping[Path, Treatment]


def parameter_groups(config: OptimizerConfig, declared: ParameterTree) -> Groups:
    """The treatment of every parameter, by its path.

    - Tables: matrices whose rows are a vocabulary's (embedding, head, the drafter's Markov head) or Engram's.
    - Muon: the other matrices, each expert's apart, and in blocks where a matrix holds several side by side: query
      projections by head, index queries by index head, W_oa by group, Engram's projection by key and value.
    - AdamW: norms (Engram's per copy too), sinks, mHC's scales and bases, and matrices of one row.

    Args:
      declared: boxed declarations (:func:`~dsv41.declared.declared_variables`); a drafter's under ``dspark``.

    Raises:
      ConfigError: a pattern of ``freeze`` matches no parameter, or one of ``train`` no frozen one; names it.
    """
    leaves = flatten_tree(declared)
    frozen = _matching("freeze", config.freeze, leaves, "parameter")
    frozen -= _matching("train", config.train, frozen, "frozen parameter")
    return {path: Treatment(Group.FROZEN) if path in frozen else _treatment(path, leaves) for path in leaves}


def _matching(field: str, patterns: Iterable[str], paths: Iterable[Path], kind: str) -> set[Path]:
    names = {"/".join(path): path for path in paths}
    matched: set[Path] = set()
    for pattern in patterns:
        found = {path for name, path in names.items() if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(f"optimizer.{field}: {pattern!r} matches no {kind}")
        matched |= found
    return matched


def _treatment(path: Path, leaves: Mapping[Path, meta.AxisMetadata]) -> Treatment:
    names, shape = leaves[path].names, leaves[path].value.shape
    loops = sum(name == "layers" for name in names)
    names, shape = names[loops:], shape[loops:]
    if path[-1] in ("bias", "bias_vl") and (*path[:-1], "bias_vl") in leaves:
        return Treatment(Group.ROUTER_BIAS)
    if names[0] in ("vocab", "engram_rows"):
        return Treatment(Group.TABLE if names[0] == "vocab" else Group.ENGRAM_TABLE)
    # Engram's q_weight and k_weight are [copies, d], but gains, one norm's a row.
    if len(shape) < 2 or shape[-2] == 1 or path[-1] in ("q_weight", "k_weight"):
        return Treatment(Group.ADAMW)
    return Treatment(Group.MUON, loops, _blocks(path, leaves), tuple(names))


def _blocks(path: Path, leaves: Mapping[Path, meta.AxisMetadata]) -> int:
    """How many matrices lie below one another in a leaf, from the sizes of parameters beside it."""
    parent, module = path[:-2], path[-2]

    def size(axis: int, *names: str) -> int:
        return leaves[(*parent, *names)].value.shape[axis]

    rows, columns = leaves[path].value.shape[-2:]
    if module == "wq_b":
        is_index = parent[-1] == "indexer"
        return size(-2, "weights_proj", "weight") if is_index else size(-1, "attn_sink")
    if module == "wo_a":
        return size(-2, "wq_b", "weight") // columns
    if (*parent, "k_weight") in leaves:
        return rows // size(-1, "k_weight")
    return 1


def make_optimizer(
    config: OptimizerConfig,
    declared: ParameterTree,
    learning_rate: optax.ScalarOrSchedule,
    parallel: Parallel = SINGLE,
) -> optax.GradientTransformation:
    """The optimiser of float32 parameters in a tree of the same structure as ``declared``.

    Its ``update`` needs the parameters, and takes whole arrays (under ``jit``, wherever their parts lie; not inside
    ``shard_map``): norms and products go over all of a matrix. Non-finite gradients of trained parameters make all
    updates NaN: look at :func:`gradient_norm` first.

    Args:
      declared: see :func:`parameter_groups`.
      learning_rate: float, or a schedule (:func:`~dsv41.training.schedules.make_schedule`) of the updates made.
      parallel: the mesh that they are divided over.

    Raises:
      ConfigError: see :func:`parameter_groups`.
    """
    groups, kept = parameter_groups(config, declared), jnp.dtype(config.momentum_dtype)
    descend = optax.scale_by_learning_rate(learning_rate)
    table = optax.chain(
        optax.stateless(lambda gradients, _: jax.tree.map(normalise_table, gradients)),
        # Without correction of the first steps' bias: then a gradient moves a row by the learning rate in all.
        optax.ema(config.momentum, debias=False, accumulator_dtype=kept),
    )
    rules = {
        Group.MUON: optax.chain(
            optax.trace(config.momentum, nesterov=True, accumulator_dtype=kept),
            optax.stateless(lambda momenta, _: _muon(config, groups, parallel, momenta)),
            optax.add_decayed_weights(config.weight_decay),
            descend,
        ),
        Group.ADAMW: optax.adamw(
            learning_rate, config.adam_b1, config.adam_b2, config.adam_eps, weight_decay=config.weight_decay
        ),
        Group.TABLE: optax.chain(table, descend),
        Group.ENGRAM_TABLE: optax.chain(table, optax.scale(config.engram_rate), descend),
        Group.ROUTER_BIAS: _KEEP,
        Group.FROZEN: _KEEP,
    }
    labels = unflatten_tree({path: treatment.group.value for path, treatment in groups.items()})
    return optax.chain(
        optax.stateless(lambda gradients, _: trained_gradients(gradients, groups)),
        optax.clip_by_global_norm(config.clip_norm),
        optax.partition({group.value: rule for group, rule in rules.items()}, labels),
    )


# x + (−0.0) is x for every x, while −0.0 + 0.0 is 0.0.
_KEEP = optax.stateless(lambda gradients, _: jax.tree.map(lambda g: jnp.full_like(g, -0.0), gradients))


def _by_path(function: Callable[[Path, jax.Array], jax.Array], tree: Any) -> Any:
    """Maps a nested dict's leaves with their paths; what another group's rule sees of it is no leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(tuple(k.key for k in path), leaf), tree)


def trained_gradients(gradients: ParameterTree, groups: Groups) -> ParameterTree:
    """The gradients with zeros (whatever was there) for frozen parameters and routers' biases."""
    return _by_path(lambda path, g: g if groups[path].group.trained else jnp.zeros_like(g), gradients)


def gradient_norm(gradients: ParameterTree, groups: Groups) -> jax.Array:
    """The global norm that clipping looks at, before it: float32 ``[]``, over trained parameters alone."""
    return optax.tree.norm(trained_gradients(gradients, groups))


def _muon(config: OptimizerConfig, groups: Groups, parallel: Parallel, momenta: Any) -> Any:
    """The updates, before decay and learning rate, from momenta ``[layers…, (experts,) rows, columns]``.

    Equal small matrices of all layers go together: a model has hundreds of them, of few shapes, and each on its own
    would be products of its own to compile and to launch. Only leaves of the same logical axes join, which lie alike on
    a mesh. Large ones stay apart, as joining them would copy them.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(momenta)
    alike: dict[tuple, list[int]] = {}
    for i, (path, leaf) in enumerate(leaves):
        treatment = groups[tuple(key.key for key in path)]
        shape = leaf.shape[treatment.loops :]
        own = None if 4 * math.prod(shape) <= _TOGETHER_BYTES else i
        alike.setdefault((treatment.blocks, treatment.names, shape, own), []).append(i)
    updates: list[Any] = [None] * len(leaves)
    for (blocks, names, shape, _), members in alike.items():
        stacks = [leaves[i][1].reshape(-1, *shape) for i in members]
        rule = functools.partial(_muon_layers, config, blocks, parallel)
        if parallel.mesh is not None and len(shape) == 2:
            rule = functools.partial(_whole_matrices, parallel, parallel.partition("momentum", names, shape), rule)
        out = rule(jnp.concatenate(stacks))
        ends = np.cumsum([len(stack) for stack in stacks])
        for i, part in zip(members, jnp.split(out, ends[:-1]), strict=True):
            updates[i] = part.reshape(leaves[i][1].shape)
    return jax.tree_util.tree_unflatten(tree, updates)


def _muon_layers(config: OptimizerConfig, blocks: int, parallel: Parallel, momenta: jax.Array) -> jax.Array:
    """The same of a stack ``[layers, (experts,) blocks · rows, columns]``."""
    rows, columns = momenta.shape[-2] // blocks, momenta.shape[-1]
    scale = _ADAMW_RMS * math.sqrt(max(rows, columns)) if config.muon_match_rms else math.sqrt(max(1, rows / columns))

    def some(momenta: jax.Array) -> jax.Array:
        matrices = momenta.reshape(*momenta.shape[:-2], blocks, rows, columns)
        matrices = scale * orthogonalise(_whole(parallel, matrices), config.muon_iterations)
        return matrices.reshape(momenta.shape)

    # A few layers at a time where they are large, so that the products' temporaries are theirs.
    together = max(1, _TOGETHER_BYTES // (4 * math.prod(momenta.shape[1:])))
    if together >= len(momenta):
        return some(momenta)
    return lax.map(lambda one: some(one[None])[0], momenta, batch_size=together)


def _whole_matrices(
    parallel: Parallel, spec: PartitionSpec, function: Callable[[jax.Array], jax.Array], stack: jax.Array
) -> jax.Array:
    """``function`` of a stack of matrices ``[layers, rows, columns]``, each whole on one device.

    They are moved once, instead of being joined or summed in every product of an iteration. Zeros stand behind the
    last one where the devices do not divide the stack.

    Args:
      spec: of a matrix, as layers want it.
    """
    places = spread_partition(spec, stack.shape[1:], parallel)
    places = [(names,) if isinstance(names, str) else tuple(names or ()) for names in places]
    moves = [(axis, 1 + dim) for dim, names in enumerate(places) for axis in reversed(names)]
    parts = parallel.divided([axis for axis, _ in moves])

    def part(x: jax.Array) -> jax.Array:
        x = pad_axis(x, 0, -len(x) % parts)
        for axis, dim in moves:
            x = lax.all_to_all(x, axis, split_axis=0, concat_axis=dim, tiled=True)
        x = function(x)
        for axis, dim in reversed(moves):
            x = lax.all_to_all(x, axis, split_axis=dim, concat_axis=0, tiled=True)
        return x[: len(stack)]

    lies = PartitionSpec(None, *(names or None for names in places))
    # Along axes that divide nothing, devices compute the same, which cannot be inferred.
    return jax.shard_map(part, mesh=parallel.mesh, in_specs=lies, out_specs=lies, check_vma=False)(stack)


def _whole(parallel: Parallel, matrices: jax.Array) -> jax.Array:
    """Experts' matrices ``[layers, experts, blocks, rows, columns]`` on as few devices as there are enough experts for.

    They too are moved once; a layer's are too large to lie on one device.
    """
    if parallel.mesh is None or matrices.ndim < 5:
        return matrices
    lead = matrices.shape[:-2]
    free = [PartitionSpec.UNCONSTRAINED] * 2
    spec = PartitionSpec(*spread_partition(PartitionSpec(), lead, parallel), *free)
    return lax.with_sharding_constraint(matrices, NamedSharding(parallel.mesh, spec))


def orthogonalise(matrices: jax.Array, iterations: int) -> jax.Array:
    """U·Vᵀ, nearly, of each matrix U·S·Vᵀ in float32 ``[..., rows, columns]``, by Newton-Schulz iteration.

    Computes what ``optax.contrib.scale_by_muon`` does, but keeps the leading axes as they are: folded into one, they
    could not stay divided over a mesh's devices (experts, heads).
    """
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = jnp.swapaxes(matrices, -1, -2) if is_tall else matrices
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + _NO_MOMENTUM)

    def iterate(_, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * gram + c * gram @ gram) @ x

    x = lax.fori_loop(0, iterations, iterate, x)
    return jnp.swapaxes(x, -1, -2) if is_tall else x


def normalise_table(gradient: jax.Array) -> jax.Array:
    """A table's gradient, float32 ``[rows, columns]``, with columns, then rows normalised: to RMS 1, or all zeros.

    The report only names "row/column normalisation"; this is our rule. Divide each column by its norm, then each row
    by its RMS::

        g'_ij = g_ij / √Σ_i g_ij²        update_ij = g'_ij / √mean over j of g'_ij²

    Rows, because a token's or an n-gram's row gets a gradient in proportion to how often it occurs: normalised, a rare
    row learns as fast each time as a common one, without AdamW's second moment, which would double the memory of the
    largest tables. Columns, so that a feature of large gradients does not drown the others in every row.

    The gradient is normalised *before* the momentum. After it, a row that is no longer touched would have its fading
    momentum blown up to full size in every later step; so it adds up to one learning rate at most, and a row that was
    never touched stays. Nothing depends on the gradient's scale or on the number of untouched rows.
    """
    columns = _divided(gradient, jnp.linalg.norm(gradient, axis=-2, keepdims=True))
    return _divided(columns, jnp.sqrt(jnp.mean(jnp.square(columns), axis=-1, keepdims=True)))


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by; 0 where by is 0 (and x with it)."""
    return jnp.where(by == 0, 0.0, x / jnp.where(by == 0, 1.0, by))


def update_ema(ema: ParameterTree, params: ParameterTree, decay: float | jax.Array) -> ParameterTree:
    """Exponential moving average of parameters: ema + (1 − decay)·(params − ema), each leaf in the average's dtype.

    A parameter that equals its average leaves it unchanged to the bit, as frozen ones do. Routers' biases are
    averaged like the rest.
    """
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, params)
