"""Steps compiled for pods that are not there: what is sent, what does not fit, and that the plan says the same."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dsv41.cli import main
from dsv41.config import load_config
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.planning.collectives import Collective, collectives
from dsv41.planning.compiled import shortage, topology_devices
from dsv41.planning.partitioned import partitioned_collectives
from dsv41.planning.plan import make_plan
from dsv41.planning.training import TrainingShape, compile_training, training_work
from dsv41.settings import Settings
from dsv41.sharding.chips import chip_of
from dsv41.sharding.mesh import load_preset, parse_preset
from dsv41.sharding.rules import MeshError
from dsv41.training.optimizers import OptimizerConfig
from dsv41.training.placement import abstract_masters
from tests.helpers import mini8_config, with_text

OFFICIAL = pathlib.Path(__file__).parents[1] / "configs" / "deepseek-v4.1-flash"
_ALL = sorted((pathlib.Path(__file__).parent / "data" / "aot").glob("*.json"))
RECORDS = [path for path in _ALL if "train" not in path.stem]
TRAINING = [path for path in _ALL if "train" in path.stem]


def test_collectives_are_counted_with_their_loops():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), devices=jax.devices()[:8])

    def part(x: jax.Array) -> jax.Array:
        def turn(total: jax.Array, _) -> tuple[jax.Array, None]:
            return total + lax.psum(x, "tensor"), None

        total, _ = lax.scan(turn, jnp.zeros_like(x), length=3)
        gathered = lax.all_gather(total.astype(jnp.bfloat16), ("data", "tensor"), tiled=True)
        return lax.psum_scatter(gathered, "data", tiled=True)

    run = jax.shard_map(part, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    found = collectives(jax.jit(run).trace(jnp.zeros((8, 16))).jaxpr, {"data": 2, "tensor": 4})
    operand = 8 * 16 * 4
    assert found == [
        Collective("all-reduce", ("tensor",), 4, 3, 3 * 4 * 3 / 4 * operand),
        Collective("all-gather", ("data", "tensor"), 8, 1, 2 * 7 * operand / 2),
        Collective("reduce-scatter", ("data",), 2, 1, 2 * 1 / 2 * 8 * operand / 2),
    ]


def test_collectives_of_the_compiler_are_counted_with_their_loops():
    """A product over a divided axis in a loop is a sum over devices; joined parts are gathered once."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))
    where = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "tensor"))

    def run(x: jax.Array) -> jax.Array:
        x = lax.fori_loop(0, 3, lambda _, x: lax.with_sharding_constraint((x @ x.T) @ x, where), x)
        return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, PartitionSpec()))

    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=where)
    text = jax.jit(run).trace(x).lower().compile().as_text()
    assert partitioned_collectives(text, {"data": 2, "tensor": 4}) == [
        Collective("all-reduce", ("tensor",), 4, 3, 3 * 4 * 3 / 4 * 16 * 16 * 4),
        Collective("all-gather", ("tensor",), 4, 1, 2 * 3 * 16 * 16 * 4),
    ]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,4},{1,5}}", (0, 4)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", (0, 4)),
    ],
)
def test_groups_of_devices_are_read_in_every_form(groups: str, devices: tuple[int, ...]):
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  ROOT %a = f32[8]{{0}} all-reduce(%x), {groups}\n}}"
    (found,) = partitioned_collectives(text, {"data": 2, "tensor": 4})
    assert found.parts == len(devices)
    assert found.axes == (("tensor",) if len(devices) == 4 else ("data",))
    assert found.bytes == 4 * (found.parts - 1) / found.parts * 32


def test_least_work_of_a_training_step():
    """Passes grow with tokens, the update does not; without recomputation a pass is spared."""
    preset = load_preset("v5p-4x4x8")
    settings = Settings.for_training(load_config(OFFICIAL), RoundingPolicy.preset("full"))
    shape, config = TrainingShape(preset.sizes.parts("batch"), 1024), OptimizerConfig()
    one, two, three = (
        training_work(settings, preset, shape._replace(micro_batches=n), config).operations for n in (1, 2, 3)
    )
    assert three - two == pytest.approx(two - one)
    # 18 thousand million parameters multiply a token, six operations each and two more for recomputed layers.
    assert two - one == pytest.approx(8 * 18e9 * shape.rows * shape.length / preset.devices, rel=0.1)
    spared = training_work(dataclasses.replace(settings, remat="nothing"), preset, shape, config).operations
    assert one - spared == pytest.approx((two - one) / 4)


def test_what_cannot_fit_is_not_compiled(tmp_path, capsys):
    """Masters and momenta in float32 with the parameters that layers read leave a v6e nothing."""
    pytest.importorskip("libtpu")
    options = ["--topology", "v6e:16x16", "--step", "train", "--json", str(tmp_path / "record.json")]
    assert main(["aot", str(OFFICIAL), *options]) == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert not record["fits"]
    assert sum(record["held"].values()) > record["device_bytes"]
    assert re.search(r"alone need 35\.7\d GiB of 32\.00 a device, 3\.7\d too many", record["misfit"])
    assert record["misfit"] in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert record["least_step_s"] == max(record["floors_s"].values())


@pytest.mark.tpu_aot
def test_a_training_step_is_compiled_with_its_memory():
    pytest.importorskip("libtpu")
    layout = {
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 0,
        "compress_ratios": (1,),
        "kv_source_layer_ids": (0,),
        "index_source_layer_ids": (0,),
        "candidate_source_layer_id": None,
        "engram_layer_ids": (),
        "engram_num_embeddings": (),
        "dspark_target_layer_ids": (),
        "num_attention_heads": 8,
        "o_groups": 8,
        "n_routed_experts": 16,
    }
    config = with_text(mini8_config(), **layout)
    settings = Settings.for_training(config, RoundingPolicy.preset("full"))
    preset = parse_preset("small", {"axes": {"expert": 2, "tensor": 2}})
    devices = topology_devices("v5p:2x2x1")
    shape, options = TrainingShape(2, 64), {"exec_time_optimization_effort": -1.0}
    compiled, held = compile_training(settings, preset, devices, 2**30, shape, OptimizerConfig(), options=options)
    assert compiled.misfit is None
    # Momenta of all that Muon and tables move, spread as the masters are; vectors have two.
    assert held.masters < held.optimizer < 1.02 * held.masters
    whole = sum(4 * x.size for x in jax.tree.leaves(abstract_masters(Model(settings))))
    assert whole / 4 <= held.masters < 1.01 * whole / 4
    # The device pads small arrays to whole tiles; the new state takes the old one's buffers.
    assert held.masters + held.optimizer < compiled.arguments < 4 * (held.masters + held.optimizer)
    assert compiled.results < held.masters / 10
    kinds = {(c.kind, c.axes) for c in compiled.collectives}
    assert ("all-gather", ("expert", "tensor")) in kinds
    assert ("reduce-scatter", ("expert", "tensor")) in kinds


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_plan_agrees_with_what_was_compiled(record: pathlib.Path):
    """With memory to a tenth, with the links of a decode step, whose collectives are all counted whole, to a hundredth.

    The records are what ``dsv41 aot`` wrote (PODS.md has the commands).
    """
    data = json.loads(record.read_text())
    mesh, settings = load_preset(data["mesh"]["name"]), Settings.default(load_config(OFFICIAL))
    sizes = (data["batch"], data["context"], 1024, settings.text.dspark_block_size)
    plan = make_plan(settings, mesh, chip_of(mesh.topology), data["step"], *sizes)
    assert data["fits"]
    assert plan.memory_bytes == pytest.approx(data["memory_bytes"], rel=0.1)
    if data["step"] == "decode":
        assert plan.ledger.total.links == pytest.approx(data["link_bytes"], rel=0.01)
    assert any("tpu" in names for names in data["back_ends"]["sparse_attention"])
    # Where rows are exchanged most travel beside other work, in a long step the shared expert's too.
    exchanges = [s for s in data["schedule"] if s["kind"] == "ragged-all-to-all"]
    assert bool(exchanges) == (data["step"] != "decode")
    if exchanges:
        assert {s["module"] for s in exchanges} == {"ffn/experts"}
        waiting = sum(s["count"] for s in exchanges if s["beside"] is None)
        assert waiting < 0.4 * sum(s["count"] for s in exchanges)
    if data["step"] == "prefill":
        hidden = sum(s["count"] for s in exchanges if "ffn/shared_experts" in (s["beside"] or ()))
        assert hidden > len({row.kind for row in settings.table.encoder}) / 2


@pytest.mark.parametrize("record", TRAINING, ids=lambda path: path.stem)
def test_training_records_are_of_this_step(record: pathlib.Path):
    data = json.loads(record.read_text())
    mesh, chip = load_preset(data["mesh"]["name"]), chip_of(data["topology"])
    settings = Settings.for_training(load_config(OFFICIAL), RoundingPolicy.preset("full"), data["remat"])
    shape = TrainingShape(data["batch"], data["context"], data["micro_batches"])
    work = training_work(settings, mesh, shape, OptimizerConfig(momentum_dtype=data["momentum_dtype"]))
    times = chip.seconds(work.operations, work.moved, work.links)
    assert list(data["floors_s"].values()) == pytest.approx(times, rel=0.02)
    # Whole parameters, float32, divided by all devices: what none divides is small.
    declared = jax.tree.leaves(abstract_masters(Model(settings)))
    assert data["held"]["masters"] == pytest.approx(sum(4 * x.size for x in declared) / mesh.devices, rel=0.01)
    assert data["fits"] == (data["misfit"] is None)
    if data["fits"]:
        held, memory = data["held"], data["memory"]
        assert memory["arguments"] == pytest.approx(held["masters"] + held["optimizer"], rel=0.01)
        assert memory["temporaries"] > held["rounded"]
        assert data["memory_bytes"] < data["device_bytes"]
        assert all(any("tpu" in name for name in data["back_ends"][op]) for op in ("sparse_attention", "expert_matmul"))


def test_there_are_records_for_every_pod():
    steps = {(json.loads(path.read_text())["topology"], json.loads(path.read_text())["step"]) for path in RECORDS}
    assert {("v6e:16x16", step) for step in ("decode", "prefill", "verify")} <= steps
    assert {(pod, step) for pod in ("v5p:4x4x8", "tpu7x:4x4x4") for step in ("decode", "prefill")} <= steps
    trained = {(data["topology"], data["fits"]) for data in (json.loads(path.read_text()) for path in TRAINING)}
    assert {("v5p:4x4x8", True), ("tpu7x:4x4x4", True), ("v6e:16x16", False)} <= trained


@pytest.mark.tpu_aot
def test_too_little_memory_is_an_answer():
    pytest.importorskip("libtpu")
    mesh = Mesh(topology_devices("v6e:2x2x1")[:1], ("chip",))
    x = jax.ShapeDtypeStruct((2**16, 2**17), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda x: jnp.sort(x + 1, axis=0)).trace(x).lower(lowering_platforms=("tpu",)).compile()
    # Releases of libtpu keep a little more or less for themselves.
    said = r"does not fit: HLO temporaries alone need 128\.00G of 31\.2\dG HBM a device"
    assert re.fullmatch(said, shortage(str(error.value)))
    assert shortage("anything else") is None
    packed = "RESOURCE_EXHAUSTED: Ran out of memory. Used 40.10G of 31.25G hbm. Exceeded hbm capacity by 8.85G."
    assert shortage(packed) == "does not fit: needs 40.10G of 31.25G hbm a device, 8.85G too many"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "gpu:2"], "programs are compiled ahead of time for TPUs only"),
        (["--topology", "v9:2x2"], "topology 'v9:2x2': no such chip; there are v5p, v6e, tpu7x, h200"),
        (["--topology", "v6e:4x4"], "topology 'v6e:4x4': no preset is for it"),
        (["--topology", "v6e:16x16", "--batch", "100"], "100 is not divisible by mesh axes expert 128"),
        (["--topology", "v6e:16x16", "--context", "9999999"], "exceeds max_position_embeddings"),
        (["--topology", "v6e:16x16", "--effort", "2"], "--effort 2.0: not between -1 and 1"),
        (["--topology", "v6e:16x16", "--compiler-option", "xla_x"], "xla_x: not NAME=true, NAME=false or NAME=NUMBER"),
        (["--topology", "v6e:16x16", "--remat", "nothing"], "--remat: has no meaning for --step decode"),
        (["--topology", "v6e:16x16", "--step", "train", "--chunk", "8"], "--chunk: has no meaning for --step train"),
        (["--topology", "v6e:16x16", "--step", "train", "--batch", "100"], "100 is not divisible by mesh axes expert"),
        (["--topology", "v6e:16x16", "--step", "train", "--context", "9999999"], "exceeds max_position_embeddings"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options: list[str], message: str, capsys):
    assert main(["aot", str(OFFICIAL), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_topology_has_its_devices():
    pytest.importorskip("libtpu")
    assert len(topology_devices("v6e:16x16")) == load_preset("v6e-16x16").devices
    with pytest.raises(MeshError, match="topology 'v6e:1x7777'"):
        topology_devices("v6e:1x7777")
