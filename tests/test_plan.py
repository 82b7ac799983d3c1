"""The planner: parameters and state against the real ones, the ledger against numbers worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from dsv41 import cli
from dsv41.checkpoint.placement import flatten_tree, parameter_place
from dsv41.config import ModelConfig, load_config
from dsv41.declared import abstract_variables, declared_variables
from dsv41.defaults import default_config
from dsv41.evaluation.floors import step_work
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.planning import memory
from dsv41.planning.ledger import Work
from dsv41.planning.parameters import held_parameters
from dsv41.planning.plan import Plan, PlanError, make_plan
from dsv41.planning.prefix import prompt_work
from dsv41.settings import Settings
from dsv41.shallow import one_of_each_group
from dsv41.sharding.chips import CHIPS, chip_of
from dsv41.sharding.mesh import PRESETS, MeshPreset, load_preset, parse_preset
from dsv41.sharding.parameters import device_bytes
from dsv41.sharding.rules import MeshError
from dsv41.state.memory import bytes_per_token
from dsv41.state.sizes import drafter_bytes, prefill_bytes, state_bytes
from tests.conftest import GOLDEN

ROOT = pathlib.Path(__file__).parents[1]
OFFICIAL = Settings.default(load_config(ROOT / "configs" / "deepseek-v4.1-flash"))
TEXT = OFFICIAL.text
NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))
ONE = parse_preset("one", {})


def small_configs() -> dict[str, ModelConfig]:
    names = ("mini8/fp8", "mini8/f32", "tiny40/fp8")
    return {"default": default_config()} | {name: load_config(GOLDEN / name) for name in names}


def planned(mesh: MeshPreset, kind: str = "decode", batch: int | None = None, context: int = 131072, **options) -> Plan:
    chosen = {"chunk": 1024, "drafts": 5} | options
    return make_plan(OFFICIAL, mesh, chip_of("v6e"), kind, batch, context, **chosen)


# ---------------------------------------------------------------- parameters and state


def assert_same_parameters(settings: Settings, preset: MeshPreset) -> None:
    """Shape, dtype and logical axes of every parameter are those that its module declares."""
    declared = flatten_tree(declared_variables(Model(settings)))
    seen = set()
    for held in held_parameters(settings, preset):
        parameter = held.parameter
        if parameter.drafter:
            continue
        place = parameter_place(settings.config, parameter.name)
        leaf = declared[place.path]
        lead = leaf.value.ndim - len(parameter.shape)
        assert leaf.value.shape[lead:] == parameter.shape, parameter.name
        assert leaf.value.dtype.itemsize == parameter.itemsize, parameter.name
        assert leaf.names[lead:] == parameter.axes, parameter.name
        seen.add(place.path)
    assert seen == set(declared)


def assert_same_bytes(settings: Settings, preset: MeshPreset) -> None:
    parts = memory.parameter_bytes(settings, held_parameters(settings, preset), drafter=False)
    real = device_bytes(Model(settings), preset.sizes)
    assert parts["routed experts"] == real["experts"]
    assert parts["embedding and head"] == real["embed"] + real["head"]
    assert parts["Engram tables"] == sum(count for name, count in real.items() if name.startswith("engram_table"))
    assert sum(parts.values()) - parts["token map"] == sum(real.values())


@pytest.mark.parametrize("config", small_configs().values(), ids=small_configs())
def test_parameters_are_the_declared_ones(config: ModelConfig):
    settings = Settings.default(config)
    assert_same_parameters(settings, ONE)
    assert_same_bytes(settings, ONE)
    drafter = flatten_tree(abstract_variables(Drafter(settings)))
    assert memory.parameter_bytes(settings, held_parameters(settings, ONE), drafter=True)["drafter"] == sum(
        leaf.size * leaf.dtype.itemsize for leaf in drafter.values()
    )


def test_the_official_parameters_are_the_declared_ones_on_every_preset():
    assert_same_parameters(OFFICIAL, ONE)
    for name in NAMES:
        assert_same_bytes(OFFICIAL, load_preset(name))


def test_without_the_tables_there_are_none():
    apart = Settings.default(OFFICIAL.config, engram_in_step=False)
    parts = memory.parameter_bytes(apart, held_parameters(apart, ONE), drafter=False)
    assert parts["Engram tables"] == 0
    tables = memory.parameter_bytes(OFFICIAL, held_parameters(OFFICIAL, ONE), drafter=False)["Engram tables"]
    assert tables == (384_006_168 + 384_016_682) * (256 + 8)


@pytest.mark.parametrize("config", [*small_configs().values(), OFFICIAL.config], ids=[*small_configs(), "official"])
@pytest.mark.parametrize("rounding", [True, False])
def test_state_bytes_are_those_of_the_state(config: ModelConfig, rounding: bool):
    settings = Settings.default(config, cache_rounding=rounding)
    for requests, tokens in ((1, 1), (3, 200), (2, settings.page_tokens)):
        pages = -(-tokens // settings.page_tokens)
        real = state_bytes(settings, requests, requests * pages, pages)
        assert memory.state_bytes(settings, requests, tokens) == real
    assert memory.token_bytes(settings) == bytes_per_token(settings)
    assert memory.drafter_ring_bytes(settings, 1) == drafter_bytes(settings)
    assert memory.encoder_tail_bytes(settings, 1) == prefill_bytes(settings)


def test_a_context_axis_spreads_the_pages_and_nothing_else():
    whole, parts = planned(ONE, batch=2), planned(parse_preset("four", {"axes": {"context": 4}}), batch=2)
    assert whole.memory["global memory"] == 2 * 131072 * 890 == 4 * parts.memory["global memory"]
    for part in ("encoder rings", "decoder rings", "page table", "routed experts", "other layers"):
        assert whole.memory[part] == parts.memory[part]
    assert parts.memory["Engram tables"] == sum(-(-rows // 4) * 264 for rows in TEXT.engram_num_embeddings)


# ---------------------------------------------------------------- the ledger


def test_a_decode_step_of_one_request_by_hand():
    items = planned(ONE).ledger.items
    keys = 3 * 65536 + 131072 + 4 * 2048 * 8  # layers 2, 8, 14; 20; and four inside the pool
    assert items["index keys"] == Work(keys * (64 + 4), 2 * 32 * 128 * keys, 0)
    assert items["selected entries"] == Work(38 * 512 * (256 + 32), 38 * 512 * 4 * 64 * 512, 0)
    assert items["rings"] == Work(40 * 128 * (512 + 16), 40 * 128 * 4 * 64 * 512, 0)
    assert items["streams"] == Work(2 * 40 * (2 * 4 + 2) * 5120 * 2, 0, 0)
    expert = 3 * 5120 * 2304
    assert items["experts"].moved == pytest.approx(40 * 6 * expert * (1 / 2 + 1 / 32))
    assert items["experts"].operations == pytest.approx(40 * 6 * expert * 2)
    rows, matrix = 2 * 24 * (256 + 8), 5 * 5120 * 24 * 256
    assert items["Engram"].moved == rows + 2 * (matrix * (1 + 1 / 1024) + 2 * 4 * 5120 * 2)
    assert items["embedding and head"] == Work((129280 + 1) * 5120 * 2, 2 * 129280 * 5120, 0)
    assert items["new entries"] == Work(40 * 528 + 890, 0, 0)
    assert sum(work.links for work in items.values()) == 0


def test_a_short_history_is_read_whole():
    """With 1024 tokens there are 512 entries of ratio 2, all of them chosen, and 1024 of ratio 1."""
    items = planned(ONE, context=1024).ledger.items
    assert items["index keys"].moved == (3 * 512 + 5 * 1024) * 68
    assert items["selected entries"].moved == 38 * 512 * 288
    assert planned(ONE, context=100).ledger.items["selected entries"].moved == (18 * 50 + 20 * 100) * 288
    assert planned(ONE, context=100).ledger.items["rings"].moved == 40 * 100 * 528


def test_queries_of_one_request_share_what_they_read():
    items = planned(ONE, "verify", drafts=5).ledger.items
    assert items["rings"].moved == 40 * (128 + 5) * 528
    assert items["new entries"].moved == 6 * (40 * 528 + 890)
    # Six queries choose 512 entries each and scan the same keys, but the pool's are each query's own.
    assert items["selected entries"].moved == 6 * 38 * 512 * 288
    assert items["index keys"].moved == (3 * 65536 + 131072 + 4 * 6 * 16384) * 68
    # The logits of all six are wanted, and a new block of drafts.
    assert items["embedding and head"].operations == 6 * 2 * 129280 * 5120
    markov = 129280 * 256
    assert items["drafter"].moved > 3 * 128 * 528 + 5 * markov * 2 + 129280 * 5120 * 2


def test_experts_are_read_as_often_as_tokens_choose_them():
    expert_bytes = planned(ONE).memory["routed experts"]
    for batch in (1, 64):
        share = 1 - (1 - 6 / 384) ** batch
        assert planned(ONE, batch=batch).ledger.items["experts"].moved == pytest.approx(share * expert_bytes)


def test_prefill_and_replay_are_halves_of_all_layers():
    chunk = planned(ONE, "prefill", context=1024).ledger.items
    assert chunk["streams"].moved == 2 * 20 * 1024 * (2 * 4 + 2) * 5120 * 2
    assert chunk["new entries"].moved == 1024 * (20 * 528 + 890)
    assert chunk["embedding and head"] == Work(1024 * 5120 * 2, 0, 0)
    # A query at position t sees (t + 1) // 2 entries of ratio 2.
    seen = sum((t + 1) // 2 for t in range(1024))
    assert chunk["index keys"].operations == pytest.approx(3 * seen * 2 * 32 * 128)
    assert chunk["index keys"].moved == 3 * 512 * 68
    replay = planned(ONE, "replay").ledger.items
    assert replay["new entries"].moved == 128 * 20 * 528
    assert replay["streams"].moved == 2 * 20 * 128 * (2 * 4 + 2) * 5120 * 2
    assert replay["Engram"].moved == 0
    # Together they read every dense weight; layer 20's norm in both.
    both = planned(ONE, "prefill").ledger.items["dense weights"].moved + replay["dense weights"].moved
    assert both == planned(ONE).ledger.items["dense weights"].moved + 5120 * 2


@pytest.mark.parametrize(("parts", "rows", "way"), [(8, 1, "gather"), (8, 400, "exchange"), (64, 24, "exchange")])
def test_tokens_travel_to_their_experts_as_steps_send_them(parts: int, rows: int, way: str):
    plan = planned(parse_preset("experts", {"axes": {"expert": parts}}), batch=parts * rows)
    # There as bfloat16 with six numbers and weights, back as float32; sent and received.
    gathered = 2 * 40 * rows * (parts - 1) * (5120 * (2 + 4) + 6 * 8)
    links = {"gather": gathered, "exchange": gathered * (1 - (1 - 1 / parts) ** 6)}
    assert plan.ledger.dispatch.way == way
    assert plan.ledger.dispatch.links == pytest.approx(links)
    assert plan.ledger.items["experts"].links == pytest.approx(links[way])
    # What each device found for all requests is added up where it belongs.
    assert plan.ledger.items["Engram"].links == pytest.approx(2 * 2 * 24 * 264 * rows * (parts - 1))


def test_a_mesh_may_say_how_tokens_travel():
    plan = planned(parse_preset("experts", {"axes": {"expert": 8}, "dispatch": "exchange"}))
    assert (plan.batch, plan.ledger.dispatch.way) == (8, "exchange")


def test_sums_over_tensor_and_merges_over_context():
    plan = planned(parse_preset("tensor", {"axes": {"tensor": 2}}))
    items = plan.ledger.items
    # Two devices: each sends half and gets half, twice; attention and feed-forward of each layer.
    assert items["dense weights"].links == 2 * 40 * 2 * 5120 * 2
    assert items["embedding and head"].links == 2 * 5120 * 2 + 2 * 129280 / 2 * 4
    assert items["Engram"].links == 2 * 2 * 24 * 264
    assert items["selected entries"].operations == planned(ONE).ledger.items["selected entries"].operations / 2
    items = planned(parse_preset("context", {"axes": {"context": 4}})).ledger.items
    assert items["index keys"].links == 2 * 3 * 8 * (8 * 512 + 2048)
    assert items["selected entries"].links == 38 * 4 * 3 / 4 * 64 * (512 + 2) * 4
    assert items["index keys"].moved == planned(ONE).ledger.items["index keys"].moved / 4
    assert items["rings"] == planned(ONE).ledger.items["rings"]


def test_a_long_chunk_is_split_over_the_context():
    """A quarter of its columns on each of four devices; what attention needs of them crosses."""
    mesh = parse_preset("context", {"axes": {"context": 4}})
    one, items = planned(ONE, "prefill").ledger.items, planned(mesh, "prefill").ledger.items
    for item in ("experts", "dense weights", "Engram"):
        assert items[item].operations == one[item].operations / 4
    assert items["streams"].moved == one["streams"].moved / 4
    assert items["new entries"].moved < one["new entries"].moved
    # Three of its layers select; to all go queries, and chosen entries' numbers; candidates go to the query's device.
    query, chosen = 32 * (128 * 2 + 4), 512
    gathered = 2 * 3 * 256
    assert items["index keys"].links == 3 * (gathered * (query + chosen * 4) + 2 * 3 / 4 * 1024 * chosen * 8)
    # Eighteen attend to pages: queries go to all, sums of values and denominators come back, maxima are everybody's.
    merged = 2 * 3 / 4 * 1024 * 64 * (512 + 1) * 4 + 4 * 3 / 4 * 1024 * 64 * 4
    assert items["selected entries"].links == 18 * (gathered * 64 * 512 * 2 + merged)
    assert items["rings"].links == 20 * gathered * 528
    assert items["rings"].operations == one["rings"].operations * (18 + 2 / 4) / 20
    assert items["streams"].links == gathered * 4 * (5120 * 2 + 4)
    assert items["new entries"].links == gathered * (3 * 512 * 2 * 4 + 512 * 2)
    assert items["Engram"].links == 2 * gathered * 24 * 264
    # Short chunks, and those that four do not divide, are computed whole.
    for chunk in (128, 1022):
        whole = planned(mesh, "prefill", chunk=chunk).ledger.items
        assert whole["experts"] == planned(ONE, "prefill", chunk=chunk).ledger.items["experts"]
        assert whole["streams"].links == 0


def test_devices_share_the_operations_of_the_experts():
    one = planned(ONE, batch=256).ledger.items
    for axes in ({"expert": 8}, {"expert": 64, "tensor": 2}, {"data": 2, "expert": 4}):
        mesh = parse_preset("m", {"axes": axes})
        items = planned(mesh, batch=256).ledger.items
        assert items["experts"].operations * mesh.devices == pytest.approx(one["experts"].operations)
        # Devices that share a request repeat what has no part of the heads or the columns.
        repeated = items["dense weights"].operations * mesh.devices / one["dense weights"].operations
        assert repeated == pytest.approx(1) if mesh.axes["tensor"] == 1 else 1 < repeated < 2


@pytest.mark.parametrize("kind", ["decode", "verify", "prefill", "replay"])
def test_nothing_shrinks_with_context(kind: str):
    plans = [planned(load_preset("v6e-16x16"), kind, context=2**i) for i in range(12, 21)]
    for before, after in itertools.pairwise(plans):
        assert before.memory_bytes < after.memory_bytes
        assert before.overlapped_s <= after.overlapped_s < after.serial_s
        for item, work in before.ledger.items.items():
            assert all(a <= b for a, b in zip(work, after.ledger.items[item], strict=True)), item
    assert plans[0].ledger.total.moved < plans[-1].ledger.total.moved


def test_times_are_totals_over_rates():
    plan, chip = planned(load_preset("tpu7x-4x4x4")), CHIPS["v6e"]
    total = plan.ledger.total
    assert plan.seconds["memory"] == pytest.approx(total.moved / chip.hbm_bytes_per_s)
    assert plan.seconds["operations"] == pytest.approx(total.operations / chip.operations_per_s)
    assert plan.seconds["links"] == pytest.approx(total.links / chip.link_bytes_per_s)
    assert plan.overlapped_s == max(plan.seconds.values())
    assert plan.serial_s == pytest.approx(sum(plan.seconds.values()))


def test_floors_of_measured_steps_read_all_weights():
    """With so many tokens that every expert is chosen: all of the parameters but the embedding's other rows."""
    settings = Settings.default(one_of_each_group(load_config(GOLDEN / "mini8" / "fp8")))
    leaves = flatten_tree(abstract_variables(Model(settings)))
    held = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items() if path[0] != "embed")
    work = step_work(settings, 1, 4096, 0)
    rows = 4096 * settings.text.hidden_size * settings.dtype.itemsize
    read = sum(work[part].moved for part in ("experts", "dense weights", "embedding and head"))
    assert read - rows == pytest.approx(held)
    assert work["attention"].moved > 0


# ---------------------------------------------------------------- prefix hits


def test_a_prefix_hit_whose_rings_are_lost():
    work = prompt_work(OFFICIAL, 4100, 4096, rings=False)
    assert (work.encoder, work.decoder) == ((3968, 4100), (3972, 4100))
    assert work.token_layers == 132 * 20 + 128 * 20 == 5200
    assert work.new_bytes == 4 * 890 == 3560
    assert work.load == {"global memory": 4096 * 890}
    assert work.copied == 0


def test_a_prefix_hit_with_its_rings():
    work = prompt_work(OFFICIAL, 4100, 4096)
    assert (work.encoder, work.decoder, work.token_layers) == ((4096, 4100), (3972, 4100), 4 * 20 + 128 * 20)
    assert work.load["encoder rings"] == 20 * 128 * 528 + 4 * 128
    assert work.load["encoder tail"] == prefill_bytes(OFFICIAL)
    # Nothing of the encoder tail is wanted where the suffix is as long as the window.
    assert "encoder tail" not in prompt_work(OFFICIAL, 4096 + 128, 4096).load


def test_prompts_without_a_hit_and_with_a_whole_one():
    cold = prompt_work(OFFICIAL, 4100)
    assert cold.token_layers == 4100 * 20 + 128 * 20
    assert (cold.new_bytes, cold.load) == (4100 * 890, {})
    assert prompt_work(OFFICIAL, 100).token_layers == 100 * 40
    # 1025 tokens make 512 entries of ratio 2.
    assert prompt_work(OFFICIAL, 1025).new_bytes == (3 * 512 + 1025) * 356
    whole = prompt_work(OFFICIAL, 4096, 4096)
    assert (whole.encoder, whole.token_layers, whole.new_bytes) == ((4096, 4096), 128 * 20, 0)
    with pytest.raises(ValueError, match="5 tokens are more than the 4"):
        prompt_work(OFFICIAL, 4, 5)


def test_a_hit_ends_at_whole_groups_and_copies_a_partly_used_page():
    work = prompt_work(OFFICIAL, 300, 201)
    assert (work.cached, work.encoder) == (200, (200, 300))
    assert work.copied == 64 * 890
    assert prompt_work(OFFICIAL, 300, 192).copied == 0
    assert prompt_work(OFFICIAL, 300, 100, rings=False).encoder == (0, 300)


# ---------------------------------------------------------------- chips and refusals


def test_every_preset_has_its_chips():
    for name in NAMES:
        preset = load_preset(name)
        chip = chip_of(preset.topology)
        chips = math.prod(int(size) for size in preset.topology.partition(":")[2].split("x"))
        assert chips * chip.devices == preset.devices
        assert chip.source.startswith("https://")
    assert chip_of("gpu:8").name == "h200"
    assert chip_of("tpu7x:4x4x4").device_bytes == 96 * 2**30
    assert CHIPS["tpu7x"].seconds(0, 7380e9, 0) == (0, 2, 0)  # a device has half of the chip's bandwidth
    with pytest.raises(MeshError, match="topology 'v9:2': no such chip; there are v5p"):
        chip_of("v9:2")


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(MeshError, match="batch of 6 is not divisible by mesh axes expert 4"):
        planned(load_preset("gpu-4"), batch=6)
    with pytest.raises(MeshError, match=r"o_groups of 8192 is not divisible by mesh axes tensor 3|.* tensor 3"):
        planned(parse_preset("three", {"axes": {"tensor": 3}}))
    with pytest.raises(PlanError, match="context 1048577: exceeds max_position_embeddings 1048576"):
        planned(ONE, context=1048577)
    with pytest.raises(PlanError, match="context 4: is shorter than the 6 tokens of the verify step"):
        planned(ONE, "verify", context=4)
    with pytest.raises(PlanError, match="drafts 6: exceeds the drafter's block of 5"):
        planned(ONE, "verify", drafts=6)
    shallow = Settings.default(one_of_each_group(OFFICIAL.config))
    with pytest.raises(PlanError, match="the model has no drafter"):
        make_plan(shallow, ONE, chip_of("v6e"), "verify", 1, 1024, 16, 5)


def test_what_does_not_fit_says_by_how_much():
    plan = planned(ONE)
    needed = plan.memory_bytes / 2**30
    assert plan.misfit == (
        f"mesh one: does not fit: needs {needed:.1f} GiB of 32.0 a device (v6e), {needed - 32:.1f} too many"
    )
    assert planned(load_preset("v6e-16x16")).misfit is None


# ---------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture, *argv: object) -> tuple[int, str, str]:
    code = cli.main(["plan", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


CONFIG = ROOT / "configs" / "deepseek-v4.1-flash"


def test_json_is_what_is_planned(capsys, tmp_path):
    path = tmp_path / "plan.json"
    options = ("--mesh", "v6e-16x16", "--batch", 256, "--context", 4096, "--prompt", 4100, "--cached", 4096)
    code, out, err = run(capsys, CONFIG, *options, "--json", path)
    assert (code, err) == (0, "")
    written = json.loads(path.read_text())
    prompts = written.pop("prompts")
    expected = planned(load_preset("v6e-16x16"), batch=256, context=4096)
    assert written == json.loads(json.dumps(expected.json()))
    assert written["memory_bytes"] == sum(written["memory"].values())
    assert prompts["cached, rings lost"]["token_layers"] == 5200
    for shown in (
        f"{expected.memory_bytes:,}",
        "index keys",
        "5,200",
        f"at least {expected.overlapped_s * 1e3:.3f} ms",
    ):
        assert shown in out


def test_misfits_are_one_line_and_exit_code_1(capsys):
    code, out, err = run(capsys, CONFIG, "--mesh", "gpu-1")
    assert code == 1
    assert "routed experts" in out
    assert re.fullmatch(r"dsv41 plan: mesh gpu-1: does not fit: needs .* GiB of 131.3 a device .*\n", err)
    code, out, err = run(capsys, CONFIG, "--mesh", "gpu-8", "--batch", 4)
    assert (code, out) == (1, "")
    assert err == "dsv41 plan: requests: batch of 4 is not divisible by mesh axes expert 8\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "gpu-3"], "no such preset or file"),
        (["--chip", "h800"], "topology 'h800': no such chip"),
        (["--context", "8193"], "--context 8193: exceeds max_position_embeddings 8192"),
        (["--step", "prefill", "--context", "8", "--chunk", "9"], "--context 8: is shorter than the 9 tokens"),
        (["--cached", "4"], "--cached: needs --prompt"),
        (["--prompt", "4", "--cached", "5"], "--cached 5: more tokens than --prompt 4"),
        (["--prompt", "8193"], "--prompt 8193: exceeds max_position_embeddings 8192"),
        (["--plot", "plan.txt"], "neither .png nor .svg"),
    ],
)
def test_wrong_options_are_refused(capsys, argv: list[str], message: str):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"dsv41: error: .*{re.escape(message)}.*\n", err), err


def test_a_mesh_of_no_chip_needs_one(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"axes": {"expert": 2}}))
    code, _, err = run(capsys, "--mesh", path)
    assert (code, err) == (
        2,
        "dsv41: error: --chip: is needed, as mesh mine has no topology; there are v5p, v6e, tpu7x, h200\n",
    )
    code, out, _ = run(capsys, "--mesh", path, "--chip", "v5p")
    assert code == 0
    assert "mesh mine (v5p)" in out


def test_a_plot_is_drawn(capsys, tmp_path, monkeypatch):
    for suffix, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"plan{suffix}"
        assert run(capsys, CONFIG, "--mesh", "v5p-4x4x8", "--plot", path)[0] == 0
        assert path.read_bytes().startswith(head)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, "--plot", tmp_path / "plan.png")
    assert (code, err) == (2, "dsv41: error: --plot: needs matplotlib, from the extra dsv41[plot]\n")


def test_nothing_is_traced_or_compiled():
    code = (
        "import sys; from dsv41 import cli\n"
        f"assert cli.main(['plan', {str(CONFIG)!r}, '--mesh', 'v6e-16x16']) == 0\n"
        "assert 'flax' not in sys.modules\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


README_LINES = re.findall(r"^dsv41 (plan .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_the_readme_shows_plans():
    assert len(README_LINES) == 3


@pytest.mark.parametrize("line", README_LINES)
def test_the_readme_lines_run(capsys, monkeypatch, line: str):
    monkeypatch.chdir(ROOT)
    code, out, err = run(capsys, *shlex.split(line)[1:])
    assert (code, err) == (0, "")
    assert "tokens a second on the mesh" in out
