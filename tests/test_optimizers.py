"""Groups of parameters, each group's rule against a plain computation, frozen parameters, the learning rate."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.checkpoint.placement import Path, flatten_tree, unflatten_tree
from dsv41.config import ConfigError
from dsv41.declared import declared_variables
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.planning.partitioned import partitioned_collectives
from dsv41.settings import Settings
from dsv41.sharding.mesh import parse_preset
from dsv41.training.optimizers import (
    Group,
    OptimizerConfig,
    gradient_norm,
    make_optimizer,
    normalise_table,
    orthogonalise,
    parameter_groups,
    update_ema,
)
from dsv41.training.placement import alike
from dsv41.training.schedules import ScheduleConfig, make_schedule
from tests.helpers import mini8_config, with_text

RATE = 0.01

LOOPS = {
    "num_hidden_layers": 8,
    "n_routed_experts": 4,
    "num_nextn_predict_layers": 0,
    "compress_ratios": (0, 2, 2, 2, 2, 2, 2, 1),
    "kv_source_layer_ids": (1, 4, 7),
    "index_source_layer_ids": (1, 4, 7),
    "candidate_source_layer_id": None,
    "engram_layer_ids": (0,),
    "dspark_target_layer_ids": (),
}
"""A layout whose encoder repeats a Full layer (a loop of two) and two Reuse layers (a loop in that loop)."""


@functools.cache
def declared(loops: bool = False) -> dict:
    """mini8's backbone and drafter, or the backbone in the layout with loops."""
    settings = Settings.default(with_text(mini8_config(), **LOOPS) if loops else mini8_config())
    tree = dict(declared_variables(Model(settings)))
    return tree if loops else {**tree, "dspark": declared_variables(Drafter(settings))}


@functools.cache
def part() -> dict:
    """A loop of two layers and one of two in it, an Engram, and what has a vocabulary."""
    tree = declared(loops=True)
    encoder = {"groups_1": tree["encoder"]["groups_1"]}
    return {name: tree[name] for name in ("embed", "head", "norm", "engram_0", "engram_table_0")} | {"encoder": encoder}


def random_tree(tree: dict, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {path: leaf.value.shape for path, leaf in flatten_tree(tree).items()}
    return unflatten_tree({path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items()})


def at(tree: dict, name: str):
    return flatten_tree(tree)[tuple(name.split("/"))]


# Groups

VECTORS = {"norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "k_norm", "main_norm", "q_weight", "k_weight"}
VECTORS |= {f"hc_{sublayer}_{leaf}" for sublayer in ("attn", "ffn") for leaf in ("base", "scale")}
VECTORS |= {"attn_sink", "confidence_head"}
MATRICES = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "wgate", "weights_proj", "wk", "w1", "w2", "w3", "gate", "main_proj"}
MATRICES |= {"hc_attn_fn", "hc_ffn_fn"}


def expected_group(path: Path) -> Group:
    words = [word for word in path if word not in ("weight", "proj")]
    if path[0].startswith("engram_table"):
        return Group.ENGRAM_TABLE
    if path[0] in ("embed", "head") or "markov_head" in path:
        return Group.TABLE
    if words[-1] in ("bias", "bias_vl"):
        return Group.ROUTER_BIAS
    assert (words[-1] in VECTORS) != (words[-1] in MATRICES), path
    return Group.ADAMW if words[-1] in VECTORS else Group.MUON


def expected_blocks(path: Path) -> int:
    text = mini8_config().text
    if path[-2] == "wq_b":
        return text.index_n_heads if "indexer" in path else text.num_attention_heads
    if path[0] in ("engram_0", "engram_1") and path[-2] == "wkv":
        return text.hc_mult + 1
    return text.o_groups if path[-2] == "wo_a" else 1


def expected_loops(path: Path) -> int:
    return {("encoder", "groups_1", "runs_0"): 1, ("encoder", "groups_1", "runs_1"): 2}.get(path[:3], 0)


@pytest.mark.parametrize("loops", [False, True])
def test_every_parameter_has_its_group(loops: bool):
    groups = parameter_groups(OptimizerConfig(), declared(loops))
    assert groups.keys() == flatten_tree(declared(loops)).keys()
    for path, treatment in groups.items():
        assert treatment.group is expected_group(path), path
        if treatment.group is Group.MUON:
            assert treatment.blocks == expected_blocks(path), path
            assert treatment.loops == expected_loops(path) * loops, path
    assert {treatment.group for treatment in groups.values()} == set(Group) - {Group.FROZEN}


# Rules


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five steps on one matrix, in float64."""
    x = np.asarray(x, np.float64)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def each_matrix(x: np.ndarray, blocks: int, function) -> np.ndarray:
    """Applies a function to each block of rows of each matrix on the leading axes."""
    columns = x.shape[-1]
    return np.stack([function(m) for m in x.reshape(-1, x.shape[-2] // blocks, columns)]).reshape(x.shape)


def normalised(g: np.ndarray) -> np.ndarray:
    """The rule of tables, row by row."""
    out, columns = np.zeros(g.shape), np.sqrt(np.sum(np.square(g, dtype=np.float64), axis=0))
    for i, row in enumerate(g):
        if np.any(row):
            out[i] = row / columns / np.sqrt(np.mean(np.square(row / columns)))
    return out


def plain_updates(path: Path, gradients: list[np.ndarray], params: np.ndarray, match_rms: bool = True) -> np.ndarray:
    """The parameter after an update for each gradient (already clipped), from the equations."""
    p, group = params.astype(np.float64), expected_group(path)
    first, second, decay = np.zeros(p.shape), np.zeros(p.shape), 0.1
    for step, g in enumerate(gradients, 1):
        g = g.astype(np.float64)
        if group is Group.MUON:
            first = 0.95 * first + g

            def scaled(m: np.ndarray) -> np.ndarray:
                rows, columns = m.shape
                scale = 0.2 * math.sqrt(max(rows, columns)) if match_rms else max(1, rows / columns) ** 0.5
                return scale * newton_schulz(m)

            p = p - RATE * (each_matrix(0.95 * first + g, expected_blocks(path), scaled) + decay * p)
        elif group is Group.ADAMW:
            first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
            p = p - RATE * (first / (1 - 0.9**step) / np.sqrt(second / (1 - 0.95**step)) + decay * p)
        elif group is not Group.ROUTER_BIAS:
            first = 0.95 * first + 0.05 * normalised(g)
            p = p - RATE * (5 if group is Group.ENGRAM_TABLE else 1) * first
    return p


def with_untouched_rows(gradients: dict, live: slice) -> dict:
    """Gradients of the tables in some rows only."""

    def rows(path: Path, g: np.ndarray) -> np.ndarray:
        if expected_group(path) not in (Group.TABLE, Group.ENGRAM_TABLE):
            return g
        return np.concatenate([g[: live.start] * 0, g[live], g[live.stop :] * 0])

    return unflatten_tree({path: rows(path, g) for path, g in flatten_tree(gradients).items()})


def norm(tree: dict, skipped=lambda path: path[-1] in ("bias", "bias_vl")) -> float:
    leaves = flatten_tree(tree).items()
    return math.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for path, g in leaves if not skipped(path)))


def test_each_group_follows_its_rule():
    tree, clip = part(), 30.0
    optimizer = make_optimizer(OptimizerConfig(clip_norm=clip), tree, RATE)
    params = random_tree(tree, 0)
    small = jax.tree.map(lambda g: np.float32(1e-3) * g, random_tree(tree, 2))
    gradients = [with_untouched_rows(random_tree(tree, 1), slice(3, 40)), with_untouched_rows(small, slice(30, 50))]
    assert norm(gradients[0]) > clip > norm(gradients[1])

    @jax.jit
    def step(params, state, g):
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state, got = optimizer.init(params), params
    for g in gradients:
        got, state = step(got, state, g)
    factors = [min(1.0, clip / norm(g)) for g in gradients]
    flat, leaves = [flatten_tree(g) for g in gradients], flatten_tree(got)
    for path, p in flatten_tree(params).items():
        want = plain_updates(path, [g[path] * factor for g, factor in zip(flat, factors, strict=True)], p)
        np.testing.assert_allclose(leaves[path], want, rtol=0, atol=3e-5, err_msg="/".join(path))
    for name in ("embed/weight", "head/weight", "engram_table_0/weight"):
        assert np.array_equal(at(got, name)[50:], at(params, name)[50:])
        assert not np.any(np.all(at(got, name)[3:50] == at(params, name)[3:50], axis=-1))
    router = "encoder/groups_1/runs_0/ffn/gate/bias"
    assert at(got, router).tobytes() == at(params, router).tobytes()


def test_matrices_may_be_scaled_by_their_shape():
    path = ("attn", "wo_b", "weight")  # more rows than columns
    tree = unflatten_tree({path: flatten_tree(part()["encoder"]["groups_1"]["runs_0"])[path]})
    optimizer = make_optimizer(OptimizerConfig(clip_norm=math.inf, muon_match_rms=False), tree, RATE)
    params, gradients = random_tree(tree, 0), random_tree(tree, 1)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    p, g = flatten_tree(params)[path], flatten_tree(gradients)[path]
    got = p + flatten_tree(updates)[path]
    np.testing.assert_allclose(got, plain_updates(path, [g], p, match_rms=False), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_orthogonalised_stacks_are_muon_of_each_matrix(shape: tuple[int, int]):
    stack = np.random.default_rng(0).standard_normal((2, 3, *shape)).astype(np.float32)
    numbers = optax.contrib.MuonDimensionNumbers(-1, -2)
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    want, _ = muon.update(jnp.asarray(stack), muon.init(jnp.asarray(stack)))
    np.testing.assert_allclose(orthogonalise(jnp.asarray(stack), 5), want, atol=1e-4)
    values = np.linalg.svd(np.asarray(orthogonalise(jnp.asarray(stack[..., :9, :]), 5)), compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.25))


def test_a_head_is_orthogonalised_alone():
    name = "encoder/groups_1/runs_0/attn/wq_b/weight"
    tree = {"encoder": {"groups_1": {"runs_0": {"attn": part()["encoder"]["groups_1"]["runs_0"]["attn"]}}}}
    text, params = mini8_config().text, random_tree(tree, 0)
    gradients = jax.tree.map(np.zeros_like, params)
    leaf = at(gradients, name)  # [layers, heads · head_dim, q_lora]
    heads = leaf.reshape(len(leaf), text.num_attention_heads, text.head_dim, -1)
    heads[:] = np.random.default_rng(1).standard_normal(heads.shape)
    heads[1, 2] *= 1e-3  # another scale beside it changes nothing
    optimizer = make_optimizer(OptimizerConfig(clip_norm=math.inf), tree, RATE)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    numbers = optax.contrib.MuonDimensionNumbers(-1, -2)
    muon = optax.contrib.muon(RATE, weight_decay=0.1, consistent_rms=0.2, muon_weight_dimension_numbers={"w": numbers})
    for layer, head in ((0, 0), (1, 2), (1, 3)):
        own = {"w": jnp.asarray(at(params, name).reshape(heads.shape)[layer, head])}
        want, _ = muon.update({"w": jnp.asarray(heads[layer, head])}, muon.init(own), own)
        got = at(updates, name).reshape(heads.shape)[layer, head]
        np.testing.assert_allclose(got, want["w"], rtol=0, atol=2e-6)


def test_normalised_tables_have_rows_of_rms_one_whatever_the_scale():
    rng = np.random.default_rng(0)
    g = rng.standard_normal((12, 8)).astype(np.float32) * np.float32(10.0) ** rng.integers(-6, 3, (12, 1))
    g[[2, 7]] = 0
    got = np.asarray(normalise_table(jnp.asarray(g.astype(np.float32))))
    np.testing.assert_allclose(got, normalised(g.astype(np.float32)), rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(np.mean(got**2, -1)), (np.arange(12) != 2) & (np.arange(12) != 7), rtol=1e-5)
    scaled = normalise_table(jnp.asarray(g * np.float32(2**-20)))
    np.testing.assert_allclose(scaled, got, rtol=1e-5)
    padded = normalise_table(jnp.pad(jnp.asarray(g), ((0, 5), (0, 0))))
    np.testing.assert_allclose(padded[:12], got, rtol=1e-5)
    assert not np.any(padded[12:])


def test_experts_stay_on_their_devices():
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])
    experts = NamedSharding(mesh, PartitionSpec(None, "expert"))
    leaf = part()["encoder"]["groups_1"]["runs_0"]["ffn"]["experts"]["w1"]
    tree = {"experts": {"w1": leaf}}
    optimizer = make_optimizer(OptimizerConfig(clip_norm=math.inf), tree, RATE)
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=experts), random_tree(tree, 0))
    momentum = jax.eval_shape(optimizer.init, abstract)
    momentum = jax.tree.map(lambda s: s.update(sharding=experts) if s.ndim else s, momentum)
    program = jax.jit(optimizer.update).lower(abstract, momentum, abstract).compile()
    assert "all-gather" not in program.as_text()
    assert program.output_shardings[0]["experts"]["w1"]["weight"].is_equivalent_to(experts, 4)


def test_matrices_are_moved_whole_and_their_products_send_nothing():
    """Two layers' matrices divided over four devices: each orthogonalises a whole one, two of them zeros."""
    parallel = parse_preset("small", {"axes": {"expert": 2, "tensor": 2}}).parallel(jax.devices()[:4])
    attention = part()["encoder"]["groups_1"]["runs_0"]["attn"]
    tree = {"attn": {name: attention[name] for name in ("wq_a", "wq_b", "attn_sink")}}
    gradients, params = random_tree(tree, 0), random_tree(tree, 1)
    alone = make_optimizer(OptimizerConfig(), tree, RATE)
    want, _ = jax.jit(alone.update)(gradients, alone.init(params), params)
    optimizer = make_optimizer(OptimizerConfig(), tree, RATE, parallel)
    specs = {"wq_a": PartitionSpec(None, "tensor", "expert"), "wq_b": PartitionSpec(None, ("tensor", "expert"))}
    where = {("attn", name, "weight"): NamedSharding(parallel.mesh, spec) for name, spec in specs.items()}
    arguments = gradients, optimizer.init(params), params
    arguments = jax.device_put(arguments, alike(arguments, where))
    program = jax.jit(optimizer.update).lower(*arguments).compile()
    got, _ = program(*arguments)
    for name in specs:
        np.testing.assert_allclose(at(got, f"attn/{name}/weight"), at(want, f"attn/{name}/weight"), rtol=0, atol=1e-6)
    sent = partitioned_collectives(program.as_text(), dict(parallel.axes))
    assert {c.kind for c in sent} <= {"all-reduce"}
    assert all(c.bytes < 100 for c in sent), sent


# Frozen parameters

FREEZE = {"freeze": ("*",), "train": ("head/*", "*/runs_0/attn/wq_a/*")}
TRAINED = {("head", "weight"), ("encoder", "groups_1", "runs_0", "attn", "wq_a", "weight")}


def test_frozen_parameters_keep_their_bits_and_have_no_state():
    tree = part()
    config = OptimizerConfig(**FREEZE)
    groups = parameter_groups(config, tree)
    assert {path for path, treatment in groups.items() if treatment.group.trained} == TRAINED
    optimizer = make_optimizer(config, tree, RATE)
    params, gradients = random_tree(tree, 0), random_tree(tree, 1)
    for path, p in flatten_tree(params).items():
        p.flat[:2] = -0.0, 0.0
        if path not in TRAINED:
            flatten_tree(gradients)[path][:] = np.nan
    length = jax.jit(lambda gradients: gradient_norm(gradients, groups))(gradients)
    np.testing.assert_allclose(length, norm(gradients, lambda path: path not in TRAINED))
    state = optimizer.init(params)
    floats = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32)
    assert floats == sum(flatten_tree(params)[path].size for path in TRAINED)
    updates, _ = jax.jit(optimizer.update)(gradients, state, params)
    got = jax.jit(optax.apply_updates)(params, updates)  # apart: compiled together, adding 0.0 may be left out
    for path, p in flatten_tree(got).items():
        assert (p.tobytes() == flatten_tree(params)[path].tobytes()) == (path not in TRAINED), path
        assert np.all(np.isfinite(p)), path


def test_the_drafter_alone_can_be_trained():
    groups = parameter_groups(OptimizerConfig(freeze=("*",), train=("dspark/*",)), declared())
    for path, treatment in groups.items():
        assert treatment.group is (expected_group(path) if path[0] == "dspark" else Group.FROZEN), path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze": ("encoder/*", "stages/*")}, "optimizer.freeze: 'stages/*' matches no parameter"),
        ({"train": ("head/*",)}, "optimizer.train: 'head/*' matches no frozen parameter"),
        ({"freeze": ("embed/*",), "train": ("head/*",)}, "optimizer.train: 'head/*' matches no frozen parameter"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(fields: dict, message: str):
    with pytest.raises(ConfigError) as error:
        parameter_groups(OptimizerConfig(**fields), part())
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("momentum", 1.0),
        ("adam_b2", -0.1),
        ("weight_decay", -0.1),
        ("adam_eps", 0.0),
        ("muon_iterations", 0),
        ("engram_rate", math.nan),
        ("clip_norm", 0.0),
        ("clip_norm", math.nan),
    ],
)
def test_impossible_constants_are_named(field: str, value: float):
    with pytest.raises(ConfigError, match=rf"optimizer\.{field}: {value}"):
        OptimizerConfig(**{field: value})


def test_average_of_parameters():
    ema, params = {"a": jnp.array([0.3, -2.0, 7.1])}, {"a": jnp.array([0.3, 2.0, 7.1])}
    got = jax.jit(update_ema)(ema, params, 0.9)["a"]
    np.testing.assert_allclose(got[1], 0.9 * -2.0 + 0.1 * 2.0, rtol=1e-6)
    assert got[0] == ema["a"][0]
    assert got[2] == ema["a"][2]


# Learning rate


def test_learning_rate_of_each_update():
    rate = make_schedule(ScheduleConfig(peak=8.0, final=2.0, warmup=4, decay_from=10, steps=20))
    updates = [1, 2, 4, 5, 10, 15, 20, 21, 1000]
    np.testing.assert_allclose([rate(n - 1) for n in updates], [2, 4, 8, 8, 8, 5, 2, 2, 2], rtol=1e-6)
    third = 2 + 6 * (1 + math.cos(math.pi * 0.3)) / 2
    np.testing.assert_allclose(jax.jit(rate)(jnp.int32(12)), third, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_may_lack_parts(warmup: int):
    rate = make_schedule(ScheduleConfig(peak=3.0, final=1.0, warmup=warmup, decay_from=6, steps=6))
    want = [3.0 if n >= warmup else 3.0 * n / warmup for n in (1, 2, 3, 6, 7)]
    np.testing.assert_allclose([rate(n - 1) for n in (1, 2, 3, 6, 7)], want, rtol=1e-6)
    assert rate(0).dtype == jnp.float32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peak", 0.0),
        ("peak", math.inf),
        ("final", math.nan),
        ("final", 1.0),
        ("steps", 0),
        ("warmup", -1),
        ("decay_from", 1999),
        ("decay_from", 10001),
    ],
)
def test_impossible_schedules_are_named(field: str, value: float):
    with pytest.raises(ConfigError, match=rf"schedule\.{field}: {value}"):
        ScheduleConfig(**{"decay_from": 5000, "steps": 10000, field: value})
