"""``dsv41 aot``: compiles a step for a TPU topology without a TPU, and reports what each device holds and sends."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from dsv41.commands.options import OptionError, positive, write_file

if TYPE_CHECKING:
    from dsv41.planning.compiled import Compiled
    from dsv41.planning.ledger import Work
    from dsv41.sharding.chips import Chip
    from dsv41.sharding.mesh import MeshPreset

_CONTEXT, _CHUNK, _ROW = 65536, 1024, 4096
_TRAIN_EFFORT = -1.0
_INFERENCE, _TRAIN = ("decode", "verify", "draft", "prefill", "replay"), "train"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "aot",
        help="compile a step for a TPU pod that is not there",
        description="Compiles a step of a model for a TPU topology, from shapes alone (needs the libtpu package), and "
        "reports memory, collectives and the least step time of each device. Exit code 1: it does not fit. The step "
        "train is forward and backward pass and update, with every rounding of the checkpoint.",
    )
    parser.add_argument(
        "config", type=pathlib.Path, metavar="CONFIG", help="config.json or the directory that holds it"
    )
    parser.add_argument("--topology", required=True, metavar="NAME", help="v6e:16x16, v5p:4x4x8, tpu7x:4x4x4, …")
    parser.add_argument(
        "--mesh", metavar="PRESET", help="preset or JSON file; default: the preset that is for this topology"
    )
    parser.add_argument("--step", choices=(*_INFERENCE, _TRAIN), default="decode", help="default: decode")
    parser.add_argument("--batch", type=positive, metavar="N", help="requests or rows on the mesh; default: the fewest")
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help=f"tokens of each request; default: {_CONTEXT}; of each row of train: {_ROW}",
    )
    parser.add_argument("--chunk", type=positive, metavar="N", help=f"tokens of a prefill chunk; default: {_CHUNK}")
    parser.add_argument("--drafts", type=positive, metavar="K", help="drafts to verify; default: the drafter's block")
    training = parser.add_argument_group("train")
    training.add_argument(
        "--remat", choices=("nothing", "choices", "products"), help="what a backward pass keeps; default: choices"
    )
    training.add_argument("--momentum-dtype", choices=("float32", "bfloat16"), help="default: float32")
    training.add_argument("--micro-batches", type=positive, metavar="N", help="batches of a step; default: 1")
    parser.add_argument(
        "--effort",
        type=float,
        metavar="E",
        help="what the compiler spends on the program's speed, -1 … 1; default: 0, of train -1",
    )
    parser.add_argument(
        "--compiler-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one more thing to tell the compiler, true, false or a number, by XLA's or libtpu's name; may be repeated",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write everything to this file")
    parser.add_argument("--save", type=pathlib.Path, metavar="FILE", help="also write the serialised executable")


def run(args: argparse.Namespace) -> int:
    # Nothing here runs on an accelerator, and a process that asks for one would wait for it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _refuse_others(args)
    if args.effort is not None and not -1 <= args.effort <= 1:
        raise OptionError(f"--effort {args.effort}: not between -1 and 1")
    _options(args)  # refuses what it cannot read, before any work
    compiled, record = _training(args) if args.step == _TRAIN else _inference(args)
    _print(record)
    if args.json is not None:
        write_file(args.json, (json.dumps(record, indent=1) + "\n").encode())
    if args.save is not None and compiled.executable is not None:
        import pickle

        from jax.experimental.serialize_executable import serialize

        write_file(args.save, pickle.dumps(serialize(compiled.executable)))
    return 0 if record["fits"] else 1


def _refuse_others(args: argparse.Namespace) -> None:
    others = ("chunk", "drafts") if args.step == _TRAIN else ("remat", "momentum_dtype", "micro_batches")
    for name in others:
        if getattr(args, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')}: has no meaning for --step {args.step}")


def _options(args: argparse.Namespace) -> dict[str, bool | float]:
    """What the compiler is told."""
    from dsv41.sharding.chips import chip_of

    options: dict[str, bool | float] = {}
    effort = args.effort if args.effort is not None else _TRAIN_EFFORT if args.step == _TRAIN else 0.0
    if effort:
        options["exec_time_optimization_effort"] = effort
    if args.step == _TRAIN:
        options |= chip_of(args.topology).training_options
    return options | dict(map(_compiler_option, args.compiler_option))


def _compiler_option(given: str) -> tuple[str, bool | float]:
    name, _, value = given.partition("=")
    try:
        return name, {"true": True, "false": False}[value] if value in ("true", "false") else float(value)
    except ValueError:
        raise OptionError(f"--compiler-option {given}: not NAME=true, NAME=false or NAME=NUMBER") from None


def _say(message: str) -> None:
    print(f"aot: {message} …", file=sys.stderr, flush=True)


def _preset(args: argparse.Namespace) -> MeshPreset:
    from dsv41.sharding.mesh import load_preset, preset_for

    return load_preset(args.mesh) if args.mesh else preset_for(args.topology)


def _inference(args: argparse.Namespace) -> tuple[Compiled, dict[str, Any]]:
    from dsv41.config import load_config
    from dsv41.planning.compiled import compile_step, topology_devices
    from dsv41.planning.plan import PlanError, make_plan
    from dsv41.settings import Settings
    from dsv41.sharding.chips import chip_of

    settings = Settings.default(load_config(args.config))
    text, chip = settings.text, chip_of(args.topology)
    preset = _preset(args)
    context = args.context or min(_CONTEXT, text.max_position_embeddings)
    chunk, drafts = args.chunk or min(_CHUNK, context), args.drafts or text.dspark_block_size
    batch = args.batch or preset.sizes.parts("batch")
    if args.step == "draft" and not text.num_nextn_predict_layers:
        raise OptionError("--step draft: the model has no drafter (num_nextn_predict_layers 0)")
    plan = None
    if args.step != "draft":
        try:
            plan = make_plan(settings, preset, chip, args.step, batch, context, chunk, drafts)
        except PlanError as error:
            raise OptionError(f"--{error}") from error
    devices = topology_devices(args.topology)
    compiled = compile_step(settings, preset, devices, args.step, batch, context, chunk, drafts, _say, _options(args))
    record = _record(args, preset, batch, context, compiled)
    if plan is not None:
        record["plan"] = {
            "memory": plan.memory,
            "memory_bytes": plan.memory_bytes,
            "link_bytes": plan.ledger.total.links,
        }
        record |= _floors(chip, plan.ledger.total)
    return compiled, record


def _training(args: argparse.Namespace) -> tuple[Compiled, dict[str, Any]]:
    from dsv41.config import load_config
    from dsv41.numerics.rounding import RoundingPolicy
    from dsv41.planning.compiled import topology_devices
    from dsv41.planning.training import TrainingShape, compile_training, training_work
    from dsv41.settings import Settings
    from dsv41.sharding.chips import chip_of
    from dsv41.training.optimizers import OptimizerConfig

    config, chip, preset = load_config(args.config), chip_of(args.topology), _preset(args)
    length = args.context or min(_ROW, config.text.max_position_embeddings)
    if length > config.text.max_position_embeddings:
        most = config.text.max_position_embeddings
        raise OptionError(f"--context {length}: exceeds max_position_embeddings {most}")
    settings = Settings.for_training(config, RoundingPolicy.preset("full"), args.remat or "choices")
    shape = TrainingShape(args.batch or preset.sizes.parts("batch"), length, args.micro_batches or 1)
    optimizer = OptimizerConfig(momentum_dtype=args.momentum_dtype or "float32")
    work = training_work(settings, preset, shape, optimizer)
    devices = topology_devices(args.topology)
    compiled, held = compile_training(
        settings, preset, devices, chip.device_bytes, shape, optimizer, _say, _options(args)
    )
    record = _record(args, preset, shape.rows, shape.length, compiled)
    record |= {
        "micro_batches": shape.micro_batches,
        "remat": settings.remat,
        "momentum_dtype": optimizer.momentum_dtype,
        "held": held._asdict(),
    }
    return compiled, record | _floors(chip, work)


def _floors(chip: Chip, work: Work) -> dict[str, Any]:
    times = chip.seconds(work.operations, work.moved, work.links)
    floors = dict(zip(("operations", "memory", "links"), times, strict=True))
    return {"floors_s": floors, "least_step_s": max(times)}


def _record(
    args: argparse.Namespace, preset: MeshPreset, batch: int, context: int, compiled: Compiled
) -> dict[str, Any]:
    from dsv41.sharding.chips import chip_of

    chip = chip_of(args.topology)
    misfit = compiled.misfit
    if misfit is None and compiled.total > chip.device_bytes:
        misfit = (
            f"does not fit: needs {compiled.total / 2**30:.2f} GiB of {chip.device_bytes / 2**30:.2f} a device, "
            f"{(compiled.total - chip.device_bytes) / 2**30:.2f} too many"
        )
    return {
        "topology": args.topology,
        "mesh": {"name": preset.name, "devices": preset.devices, "axes": dict(preset.axes)},
        "step": args.step,
        "batch": batch,
        "context": context,
        "memory": {name: getattr(compiled, name) for name in ("arguments", "temporaries", "results", "code")},
        "memory_bytes": compiled.total,
        "device_bytes": chip.device_bytes,
        "fits": misfit is None,
        "misfit": misfit,
        "compile_s": compiled.compile_s,
        "options": _options(args),
        "collectives": [dict(c._asdict()) for c in compiled.collectives],
        "link_bytes": sum(c.bytes for c in compiled.collectives),
        "schedule": [dict(s._asdict()) for s in compiled.schedule],
        "back_ends": compiled.back_ends,
    }


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120, no_color=True)
    mesh = record["mesh"]
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh["axes"].items() if size > 1) or "one device"
    rows = "rows" if record["step"] == _TRAIN else "requests"
    console.print(
        f"{record['topology']}, mesh {mesh['name']} ({axes}): {record['step']}, {record['batch']} {rows} of "
        f"{record['context']} tokens; compiled in {record['compile_s']:.0f} s"
    )
    if options := record["options"]:
        console.print("compiler options: " + ", ".join(f"{name} {value}" for name, value in options.items()))
    if record["memory_bytes"]:
        memory = Table("memory of a device", "GiB")
        for name, size in record["memory"].items():
            memory.add_row(name, f"{size / 2**30:.3f}")
        memory.add_row("total", f"{record['memory_bytes'] / 2**30:.3f}")
        memory.add_row("there is", f"{record['device_bytes'] / 2**30:.3f}")
        console.print(memory)
    if held := record.get("held"):
        console.print("at least: " + ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in held.items()))
    links = Table("collectives", "over", "devices", "a step", "MB sent and received, at most")
    for c in record["collectives"]:
        links.add_row(c["kind"], " × ".join(c["axes"]), str(c["parts"]), str(c["count"]), f"{c['bytes'] / 1e6:.2f}")
    console.print(links)
    schedule = Table("places in the program", "of", "as", "products and kernels that run meanwhile")
    for s in record["schedule"]:
        beside = "waits" if s["beside"] is None else ", ".join(s["beside"]) or "none"
        schedule.add_row(str(s["count"]), s["module"] or "–", s["kind"], beside)
    console.print(schedule)
    if "floors_s" in record:
        floors = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in record["floors_s"].items())
        console.print(
            f"least time at datasheet rates (dsv41 plan): {floors}; step {record['least_step_s'] * 1e3:.3f} ms"
        )
    for operation, names in sorted(record["back_ends"].items()):
        console.print(f"{operation}: {'; '.join(names)}")
    console.print(record["misfit"] or "fits")
