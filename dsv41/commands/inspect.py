"""``dsv41 inspect``: a configuration's layer table, parameters, and what a token and a request cost in memory."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv41.checkpoint import TensorSpec
    from dsv41.config import ModelConfig

# Parts of the text model; the first key that occurs in a tensor's name decides.
_TEXT_PARTS = (
    (".engram.", "Engram"),
    (".ffn.experts.", "routed experts"),
    (".ffn.shared_experts.", "shared experts"),
    (".ffn.gate.", "router"),
    (".attn.compressor.", "compressor and indexer"),
    (".attn.indexer.", "compressor and indexer"),
    (".attn.", "attention"),
    (".hc_", "hyper-connections"),
    ("norm.", "norms"),
    ("embed.weight", "embedding"),
    ("head.weight", "head"),
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what a configuration describes",
        description="Shows the layer table, the parameters, and the memory of a token and a request.",
    )
    parser.add_argument(
        "config",
        type=pathlib.Path,
        nargs="?",
        metavar="CONFIG",
        help="config.json or the directory that holds it; default: a small configuration",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from dsv41.config import load_config
    from dsv41.defaults import default_config

    description = describe(default_config() if args.config is None else load_config(args.config))
    if args.json:
        json.dump(description, sys.stdout, indent=1)
        print()
    else:
        _print_tables(description)
    return 0


def describe(config: ModelConfig) -> dict[str, Any]:
    """Everything that the command shows.

    Returns:
      ``layers``: a row for each layer, sources as layer numbers or None; ``decoder_start``; ``parameters``: counts
      and checkpoint bytes by part; ``bytes_per_token``: global memory by KV source and part; ``request_bytes``: what
      a request takes whatever its length; ``prefill_bytes``: the encoder tail, held only while a prompt enters;
      ``drafter_bytes``: the drafter's rings, of a request with speculation.
    """
    from dsv41.checkpoint import checkpoint_layout
    from dsv41.settings import Settings
    from dsv41.state.memory import bytes_per_token, entry_bytes
    from dsv41.state.sizes import drafter_bytes, prefill_bytes, request_bytes

    settings, text = Settings.default(config), config.text
    table = settings.table
    layers = [
        {
            "layer": row.index,
            "stack": "encoder" if row.index < table.decoder_start else "decoder",
            "mode": row.kind.mode.value,
            "ratio": row.kind.ratio,
            "kv_source": row.kv_source,
            "index_source": row.index_source,
            "candidate_source": row.candidate_source,
            "engram": row.index in text.engram_layer_ids,
            "dspark_tap": row.index in text.dspark_target_layer_ids,
        }
        for row in table.layers
    ]
    parameters: dict[str, dict[str, int]] = {}
    for spec in checkpoint_layout(config).values():
        part = parameters.setdefault(_part(spec), {"parameters": 0, "checkpoint_bytes": 0})
        # Scales are storage, not parameters.
        part["parameters"] += 0 if spec.dtype == "F8_E8M0" else math.prod(spec.value_shape)
        part["checkpoint_bytes"] += spec.nbytes
    sources = {
        str(source): {part: count / table.layers[source].kind.ratio for part, count in entry_bytes(settings).items()}
        for source in table.kv_sources
    }
    return {
        "layers": layers,
        "decoder_start": table.decoder_start,
        "parameters": parameters,
        "bytes_per_token": {"sources": sources, "total": bytes_per_token(settings)},
        "request_bytes": request_bytes(settings),
        "prefill_bytes": prefill_bytes(settings),
        "drafter_bytes": drafter_bytes(settings),
    }


def _part(spec: TensorSpec) -> str:
    if spec.part != "text":
        return {"dspark": "DSpark", "vision": "vision"}[spec.part]
    return next(part for key, part in _TEXT_PARTS if key in spec.name)


def _print_tables(description: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Without a terminal there is no width to wrap to: tables keep theirs.
    console = Console() if sys.stdout.isatty() else Console(width=120, no_color=True)

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            made.add_column(column, justify="right" if i else "left", no_wrap=True)
        return made

    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else ""
        return "–" if value is None else str(value)

    layers = table(
        "Layers", "layer", "stack", "mode", "ratio", "KV of", "top-k of", "candidates of", "Engram", "DSpark tap"
    )
    for row in description["layers"]:
        layers.add_row(*map(cell, row.values()), end_section=row["layer"] + 1 == description["decoder_start"])
    console.print(layers)

    parameters = table("Parameters", "part", "parameters", "bytes in the public checkpoint")
    rows = description["parameters"]
    for part, counts in rows.items():
        parameters.add_row(part, *(f"{n:,}" for n in counts.values()))
    parameters.add_section()
    totals = (sum(column) for column in zip(*(counts.values() for counts in rows.values()), strict=True))
    parameters.add_row("total", *(f"{n:,}" for n in totals))
    console.print(parameters)

    per_token = description["bytes_per_token"]
    token = table("Bytes of global memory a token", "KV source", "main KV", "index key", "both")
    for source, parts in per_token["sources"].items():
        token.add_row(f"layer {source}", *(f"{n:g}" for n in (*parts.values(), sum(parts.values()))))
    token.add_section()
    token.add_row("total", "", "", f"{per_token['total']:g}")
    console.print(token)

    request = table("Bytes a request, whatever its length", "part", "bytes")
    for part, count in description["request_bytes"].items():
        request.add_row(part, f"{count:,}")
    request.add_section()
    request.add_row("total", f"{sum(description['request_bytes'].values()):,}")
    request.add_row("encoder tail, during prefill", f"{description['prefill_bytes']:,}")
    request.add_row("drafter rings, with speculation", f"{description['drafter_bytes']:,}")
    console.print(request)
