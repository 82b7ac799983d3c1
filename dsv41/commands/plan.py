"""``dsv41 plan``: memory, traffic and least step time of a configuration on a mesh, without compiling anything."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from dsv41.commands.options import OptionError, positive, write_file

if TYPE_CHECKING:
    from dsv41.planning.plan import Plan
    from dsv41.planning.prefix import PromptWork
    from dsv41.settings import Settings

_CONTEXT, _CHUNK = 65536, 1024
# Halvings of the longest context that a plot shows: 4K … 1M.
_HALVINGS = 8


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="compute memory, traffic and least step time on a mesh",
        description="Computes what a step costs each device of a mesh: memory, bytes moved, operations, bytes on "
        "links, and the least time that datasheet rates allow. Nothing is compiled. Exit code 1: it does not fit.",
    )
    parser.add_argument(
        "config",
        type=pathlib.Path,
        nargs="?",
        metavar="CONFIG",
        help="config.json or the directory that holds it; default: a small configuration",
    )
    parser.add_argument("--mesh", default="gpu-1", metavar="PRESET", help="preset or JSON file; default: gpu-1")
    parser.add_argument("--chip", metavar="NAME", help="v5p, v6e, tpu7x or h200; default: the mesh's own")
    parser.add_argument(
        "--step",
        choices=("decode", "verify", "prefill", "replay"),
        default="decode",
        help="decode: one token; verify: drafts and the next block of them; prefill: a chunk through the encoder; "
        "replay: the window's positions through the decoder, which ends a prefill",
    )
    parser.add_argument("--batch", type=positive, metavar="N", help="requests on the mesh; default: the fewest")
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help=f"tokens of each request when the step ends; default: {_CONTEXT}, or all positions of a smaller model",
    )
    parser.add_argument(
        "--chunk", type=positive, metavar="N", help=f"tokens of a prefill chunk; default: {_CHUNK} or the context"
    )
    parser.add_argument("--drafts", type=positive, metavar="K", help="drafts to verify; default: the drafter's block")
    parser.add_argument(
        "--engram",
        choices=("device", "pinned", "mapped"),
        default="device",
        help="where Engram's tables lie; device (default): sharded over all devices, else not on them",
    )
    parser.add_argument("--prompt", type=positive, metavar="N", help="also show the work of a prompt of N tokens")
    parser.add_argument("--cached", type=positive, metavar="C", help="--prompt: of which the first C are in the memory")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write everything to this file")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="also draw memory and time against context (.png or .svg)"
    )


def run(args: argparse.Namespace) -> int:
    from dsv41.config import load_config
    from dsv41.defaults import default_config
    from dsv41.planning.plan import PlanError, make_plan
    from dsv41.settings import Settings
    from dsv41.sharding.chips import CHIPS, chip_of
    from dsv41.sharding.mesh import load_preset
    from dsv41.sharding.rules import MeshError

    if args.cached is not None and args.prompt is None:
        raise OptionError("--cached: needs --prompt, the whole prompt's tokens")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        raise OptionError(f"--plot {args.plot}: neither .png nor .svg")
    config = default_config() if args.config is None else load_config(args.config)
    settings = Settings.default(config, engram_in_step=args.engram == "device")
    text, mesh = config.text, load_preset(args.mesh)
    if args.chip is None and mesh.topology is None:
        raise OptionError(f"--chip: is needed, as mesh {mesh.name} has no topology; there are {', '.join(CHIPS)}")
    chip = chip_of(args.chip or mesh.topology)
    context = args.context or min(_CONTEXT, text.max_position_embeddings)
    drafts = args.drafts or text.dspark_block_size

    def planned(context: int) -> Plan:
        chunk = args.chunk or min(_CHUNK, context)
        return make_plan(settings, mesh, chip, args.step, args.batch, context, chunk, drafts)

    prompts = _prompts(settings, args.prompt, args.cached)
    try:
        plan = planned(context)
    except MeshError as error:
        print(f"dsv41 plan: {error}", file=sys.stderr)
        return 1
    except PlanError as error:
        raise OptionError(f"--{error}") from error
    _print_plan(plan)
    if prompts:
        _print_prompts(settings, args.prompt, prompts)
    if args.json is not None:
        write_file(args.json, (json.dumps(_json(plan, prompts), indent=1) + "\n").encode())
    if args.plot is not None:
        contexts = (text.max_position_embeddings >> i for i in reversed(range(_HALVINGS + 1)))
        _plot([planned(context) for context in contexts if context >= plan.queries], args.plot)
    if plan.misfit is not None:
        print(f"dsv41 plan: {plan.misfit}", file=sys.stderr)
        return 1
    return 0


def _prompts(settings: Settings, prompt: int | None, cached: int | None) -> dict[str, PromptWork]:
    from dsv41.planning.prefix import prompt_work

    if prompt is None:
        return {}
    if prompt > settings.text.max_position_embeddings:
        raise OptionError(f"--prompt {prompt}: exceeds max_position_embeddings {settings.text.max_position_embeddings}")
    works = {"nothing cached": prompt_work(settings, prompt)}
    if cached is not None:
        if cached > prompt:
            raise OptionError(f"--cached {cached}: more tokens than --prompt {prompt}")
        works["cached, rings hit"] = prompt_work(settings, prompt, cached)
        works["cached, rings lost"] = prompt_work(settings, prompt, cached, rings=False)
    return works


def _json(plan: Plan, prompts: dict[str, PromptWork]) -> dict[str, Any]:
    import dataclasses

    return plan.json() | {"prompts": {name: dataclasses.asdict(work) for name, work in prompts.items()}}


def _plot(plans: list[Plan], path: pathlib.Path) -> None:
    from dsv41.planning.plot import plot_plans

    try:
        plot_plans(plans, path)
    except ModuleNotFoundError as error:
        raise OptionError("--plot: needs matplotlib, from the extra dsv41[plot]") from error


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=True)
    return made


def _print_plan(plan: Plan) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=120, no_color=True)
    gib = 2**30
    memory = _table(f"Memory of a device, mesh {plan.mesh.name} ({plan.chip.name})", "part", "bytes", "GiB")
    for part, count in plan.memory.items():
        memory.add_row(part, f"{count:,}", f"{count / gib:.3f}")
    memory.add_section()
    memory.add_row("total", f"{plan.memory_bytes:,}", f"{plan.memory_bytes / gib:.3f}")
    memory.add_row("there is", f"{plan.chip.device_bytes:,}", f"{plan.chip.device_bytes / gib:.3f}")
    console.print(memory)

    title = (
        f"A {plan.kind} step on a device: {plan.batch} requests in all, last {plan.queries} of {plan.context} tokens"
    )
    ledger = _table(title, "item", "MB moved", "GFLOP", "MB on links", "memory ms", "compute ms", "links ms")
    rows = {**plan.ledger.items, "total": plan.ledger.total}
    for item, work in rows.items():
        compute, moved, links = (1e3 * s for s in plan.chip.seconds(work.operations, work.moved, work.links))
        if item == "total":
            ledger.add_section()
        figures = (work.moved / 1e6, work.operations / 1e9, work.links / 1e6, moved, compute, links)
        ledger.add_row(item, *(f"{figure:,.3f}" for figure in figures))
    console.print(ledger)

    tokens = plan.batch * plan.queries
    print(
        f"step: at least {plan.overlapped_s * 1e3:.3f} ms if all overlaps (limit: "
        f"{max(plan.seconds, key=plan.seconds.get)}), {plan.serial_s * 1e3:.3f} ms one after the other; "
        f"{tokens / plan.overlapped_s:,.0f} and {tokens / plan.serial_s:,.0f} tokens a second on the mesh"
        + (", if every draft is accepted" if plan.kind == "verify" else "")
    )
    way, links = plan.ledger.dispatch
    if any(links.values()):
        shown = " and ".join(f"{links[name] / 1e6:,.1f} MB by {name}" for name in sorted(links, key=lambda n: n != way))
        print(f"tokens to their experts and back, on links: {shown}; the first is counted")
    print(f"rates: {plan.chip.source}")


def _print_prompts(settings: Settings, prompt: int, works: dict[str, PromptWork]) -> None:
    from rich.console import Console

    columns = ("work", "cached", "encoder", "decoder", "token-layers", "new bytes", "bytes to load", "copied")
    table = _table(f"A prompt of {prompt} tokens; all through all layers: {prompt * len(settings.table.layers):,} "
                   "token-layers", *columns)  # fmt: skip
    for name, work in works.items():
        spans = (f"[{first}, {end})" for first, end in (work.encoder, work.decoder))
        counts = (work.token_layers, work.new_bytes, sum(work.load.values()), work.copied)
        table.add_row(name, str(work.cached), *spans, *(f"{count:,}" for count in counts))
    (Console() if sys.stdout.isatty() else Console(width=140, no_color=True)).print(table)
    for name, work in works.items():
        if work.load:
            print(f"{name}: " + ", ".join(f"{part} {count:,}" for part, count in work.load.items()))
