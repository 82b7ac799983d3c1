"""``dsv41 eval replay``: how far bounded replay's logits are from exact prefill's, over prompt lengths."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from dsv41.commands.options import OptionError, positive, read_text


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("eval", help="measure what an approximation costs")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="kind")
    replay = kinds.add_parser(
        "replay",
        help="bounded replay against exact prefill",
        description="Prefills prompts of each length both ways and compares the logits of their last position. Up to "
        "the replay length the two are the same computation.",
    )
    replay.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        metavar="DIR",
        help="checkpoint in the public layout; default: the embedded small model with random weights",
    )
    replay.add_argument("--text", type=pathlib.Path, metavar="FILE", help="prompts from this text; default: random ids")
    replay.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="prompt lengths; default: half, one, two, four and eight windows",
    )
    replay.add_argument("--prompts", type=positive, default=4, metavar="N", help="prompts of each length")
    replay.add_argument("--replay-length", type=positive, metavar="N", help="positions replayed; default: the window")
    replay.add_argument("--chunk", type=positive, default=256, metavar="N", help="prefill chunk")
    replay.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts")
    replay.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    from dsv41.config import load_config
    from dsv41.defaults import default_config
    from dsv41.evaluation.replay import compare_replay, random_prompts, text_prompts
    from dsv41.loading import checkpoint_variables, model_tokenizer, random_variables
    from dsv41.model import Model
    from dsv41.settings import Settings

    config = default_config() if args.checkpoint is None else load_config(args.checkpoint)
    text, tokenizer = config.text, model_tokenizer(config)
    lengths = args.lengths or [max(1, text.sliding_window * factor // 2) for factor in (1, 2, 4, 8, 16)]
    if max(lengths) > text.max_position_embeddings:
        raise OptionError(f"--lengths: {max(lengths)} exceeds max_position_embeddings {text.max_position_embeddings}")
    if args.text is None:
        prompts = random_prompts(config, max(lengths), args.prompts, args.seed)
    elif tokenizer is None:
        raise OptionError("--text: the model's vocabulary is not the packaged tokenizer's")
    else:
        ids = tokenizer.encode(read_text(args.text))
        if len(ids) < args.prompts * max(lengths):
            raise OptionError(f"--text: {len(ids)} tokens are fewer than {args.prompts} prompts of {max(lengths)}")
        prompts = text_prompts(ids, max(lengths), args.prompts)
    model = Model(Settings.default(config))
    if args.checkpoint is None:
        print("No --checkpoint: random weights, so the distances say nothing about a trained model.", file=sys.stderr)
        variables = random_variables(model, 0, tokenizer)
    else:
        variables = checkpoint_variables(model, args.checkpoint, tokenizer)
    rows = [compare_replay(model, variables, prompts, length, args.chunk, args.replay_length) for length in lengths]
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        _print_table(rows)
    return 0


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="replay against exact, logits of the last position", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(v) if isinstance(v, bool | int) else f"{v:.3g}" for v in row.values()))
    (Console() if sys.stdout.isatty() else Console(width=140, no_color=True)).print(table)
