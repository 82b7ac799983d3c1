"""``dsv41 eval``: what an approximation costs or gains.

``replay``: how far bounded replay's logits are from exact prefill's, over prompt lengths. ``drafts``: how many drafts
of the DSpark drafter are accepted, and how much faster that is. ``quality``: what each approximation costs a trained
model (:mod:`~dsv41.commands.eval_quality`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from dsv41.commands import eval_quality
from dsv41.commands.options import OptionError, positive, read_text

if TYPE_CHECKING:
    import numpy as np

    from dsv41.config import ModelConfig
    from dsv41.tokens.tokenizer import Tokenizer


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("eval", help="measure what an approximation costs")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="kind")
    replay = kinds.add_parser(
        "replay",
        help="bounded replay against exact prefill",
        description="Prefills prompts of each length both ways and compares the logits of their last position. Up to "
        "the replay length the two are the same computation.",
    )
    _add_shared(replay)
    replay.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="prompt lengths; default: half, one, two, four and eight windows",
    )
    replay.add_argument("--replay-length", type=positive, metavar="N", help="positions replayed; default: the window")
    replay.add_argument("--chunk", type=positive, default=256, metavar="N", help="prefill chunk")
    drafts = kinds.add_parser(
        "drafts",
        help="drafts that are accepted, and what they gain",
        description="Continues prompts with drafts and without, and counts by position how many drafts are accepted "
        "once all before them are. The texts should be none that the drafter was trained on.",
    )
    _add_shared(drafts)
    drafts.add_argument("--prompt-length", type=positive, default=64, metavar="N", help="tokens of each prompt")
    drafts.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="tokens that continue each")
    drafts.add_argument(
        "--speculative",
        type=lambda text: text if text == "auto" else positive(text),
        metavar="auto|K",
        help="drafts to verify a step, or as many as pay; default: whole blocks",
    )
    drafts.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="default: greedy, and 1"
    )
    drafts.add_argument("--deterministic", action="store_true", help="the same tokens with drafts and without")
    drafts.add_argument("--batch", type=positive, default=8, metavar="N", help="requests that decode together at most")
    eval_quality.add_parser(kinds)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        metavar="DIR",
        help="checkpoint in the public layout; default: a small configuration with random weights",
    )
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--text", type=pathlib.Path, metavar="FILE", help="prompts from this text; default: random ids")
    texts.add_argument(
        "--corpus", metavar="NAME", help="beginnings of a packaged corpus's held-out documents, as bibles"
    )
    parser.add_argument("--prompts", type=positive, default=4, metavar="N", help="how many, of each length")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random prompts and sampling")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.kind == "quality":
        return eval_quality.run(args)
    rows = {"replay": _replay, "drafts": _drafts}[args.kind](args)
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif args.kind == "replay":
        _print_table("replay against exact, logits of the last position", rows)
    else:
        shown = [_shown(row) for row in rows]
        _print_table("drafts accepted once all before them are, by position, and tokens a second", shown)
    return 0


def _prompts(args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None, length: int) -> np.ndarray:
    """Prompts int32 ``[prompts, length]``."""
    from dsv41.evaluation.replay import beginnings, random_prompts, text_prompts

    if args.text is None and args.corpus is None:
        return random_prompts(config, length, args.prompts, args.seed)
    if tokenizer is None:
        option = "--text" if args.corpus is None else "--corpus"
        raise OptionError(f"{option}: the model's vocabulary is not the packaged tokenizer's")
    if args.corpus is not None:
        from dsv41.training.data import DataConfig, load_texts

        held_out = load_texts(DataConfig(length, batch_rows=1, corpus=args.corpus))[1]
        return beginnings(held_out, tokenizer, config.bos_token_id, length, args.prompts)
    ids = tokenizer.encode(read_text(args.text))
    if len(ids) < args.prompts * length:
        raise OptionError(f"--text: {len(ids)} tokens are fewer than {args.prompts} prompts of {length}")
    return text_prompts(ids, length, args.prompts)


def _replay(args: argparse.Namespace) -> list[dict[str, Any]]:
    from dsv41.config import load_config
    from dsv41.defaults import default_config
    from dsv41.evaluation.replay import compare_replay
    from dsv41.loading import checkpoint_variables, model_tokenizer, random_variables
    from dsv41.model import Model
    from dsv41.settings import Settings

    config = default_config() if args.checkpoint is None else load_config(args.checkpoint)
    text, tokenizer = config.text, model_tokenizer(config, args.checkpoint)
    lengths = args.lengths or [max(1, text.sliding_window * factor // 2) for factor in (1, 2, 4, 8, 16)]
    if max(lengths) > text.max_position_embeddings:
        raise OptionError(f"--lengths: {max(lengths)} exceeds max_position_embeddings {text.max_position_embeddings}")
    prompts = _prompts(args, config, tokenizer, max(lengths))
    model = Model(Settings.default(config))
    if args.checkpoint is None:
        print("No --checkpoint: random weights, so the distances say nothing about a trained model.", file=sys.stderr)
        variables = random_variables(model, 0, tokenizer)
    else:
        variables = checkpoint_variables(model, args.checkpoint, tokenizer)
    return [compare_replay(model, variables, prompts, length, args.chunk, args.replay_length) for length in lengths]


def _drafts(args: argparse.Namespace) -> list[dict[str, Any]]:
    from dsv41.config import load_config
    from dsv41.defaults import default_config
    from dsv41.evaluation.acceptance import measure_acceptance, without_drafts
    from dsv41.inference.engine import Engine
    from dsv41.inference.options import EngineOptions
    from dsv41.loading import model_tokenizer

    config = default_config() if args.checkpoint is None else load_config(args.checkpoint)
    depth = config.text.dspark_block_size if args.speculative is None else args.speculative
    if not all(0 <= t < float("inf") for t in args.temperature):
        raise OptionError(f"--temperature: {args.temperature} are not all numbers from 0 on")
    longest = args.prompt_length + args.new_tokens
    options = EngineOptions(
        max_batch=args.batch, max_length=longest, deterministic=args.deterministic, speculative=depth
    )
    try:
        options.length_limit(config)
        options.check_speculation(config)
    except ValueError as error:
        raise OptionError(f"--{error}") from None
    prompts = _prompts(args, config, model_tokenizer(config, args.checkpoint), args.prompt_length)
    if args.checkpoint is None:
        print("No --checkpoint: random weights, so hardly a draft is accepted.", file=sys.stderr)
        drafting = Engine.random(config, options)
    else:
        drafting = Engine.from_checkpoint(args.checkpoint, options)
    plain = without_drafts(drafting)
    return [
        measure_acceptance(drafting, plain, prompts.tolist(), args.new_tokens, temperature, args.seed)
        for temperature in args.temperature
    ]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of the table of :func:`_drafts`."""
    by_position = {str(k): share for k, share in enumerate(row["acceptance"], start=1)}
    names = ("mean_accepted", "tokens_per_s", "plain_tokens_per_s", "speedup", "same_tokens")
    figures = {"temperature": row["temperature"], **by_position} | {name: row[name] for name in names}
    return {name: "–" if figure is None else figure for name, figure in figures.items()}


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    (Console() if sys.stdout.isatty() else Console(width=140, no_color=True)).print(table)
