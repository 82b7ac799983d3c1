"""Steps compiled for pods that are not there: what is sent, what does not fit, and that the plan says the same."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dsv41.cli import main
from dsv41.config import load_config
from dsv41.planning.collectives import Collective, collectives
from dsv41.planning.compiled import shortage, topology_devices
from dsv41.planning.plan import make_plan
from dsv41.settings import Settings
from dsv41.sharding.chips import chip_of
from dsv41.sharding.mesh import load_preset
from dsv41.sharding.rules import MeshError

OFFICIAL = pathlib.Path(__file__).parents[1] / "configs" / "deepseek-v4.1-flash"
RECORDS = sorted((pathlib.Path(__file__).parent / "data" / "aot").glob("*.json"))


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


def test_there_are_records_for_every_pod():
    steps = {(json.loads(path.read_text())["topology"], json.loads(path.read_text())["step"]) for path in RECORDS}
    assert {("v6e:16x16", step) for step in ("decode", "prefill", "verify")} <= steps
    assert {("v5p:4x4x8", "decode"), ("tpu7x:4x4x4", "decode")} <= steps


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
