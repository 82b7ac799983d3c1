"""``dsv41 generate``: continues one prompt on the screen, or a file of prompts into a file of completions."""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv41.commands.options import OptionError, add_mesh_options, mesh_of, positive, read_text

if TYPE_CHECKING:
    from dsv41.commands.output import ChatOutput, TextOutput
    from dsv41.commands.prompt_file import ChatFormats
    from dsv41.config import ModelConfig
    from dsv41.engram.prefetch import Lookups
    from dsv41.inference.engine import Engine, EngineOptions
    from dsv41.inference.measurements import AcceptanceStatistics
    from dsv41.inference.requests import Completion, Request
    from dsv41.sharding.parallel import Parallel

_WEIGHTS_SEED = 0
_NOISE = "--random: random weights, so the text is noise."


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue prompts",
        description="Continues a prompt or a conversation (text to stdout, figures to stderr), or a JSONL file of "
        "prompts. Lines have 'prompt', 'tokens' or 'messages' (with tools, tool_choice, reasoning_effort, thinking), "
        "and optionally id, max_new_tokens, temperature, top_p, seed, stop, images (files, relative to the prompts' "
        "file); what a line does not give is taken from the options.",
    )
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        metavar="DIR",
        help="checkpoint in the public layout; default: the embedded model, trained on English Bibles",
    )
    parser.add_argument(
        "--random",
        action="store_true",
        help="in place of a checkpoint a small configuration with the real vocabulary and random weights",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", type=pathlib.Path, metavar="FILE", help="file whose whole text is the prompt")
    source.add_argument(
        "--chat",
        type=pathlib.Path,
        metavar="FILE.json",
        help="a list of messages, or an object in the chat-completions form; reasoning goes to stderr",
    )
    source.add_argument("--prompts", type=pathlib.Path, metavar="FILE.jsonl", help="many prompts; needs --out")
    parser.add_argument(
        "--image",
        type=pathlib.Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="pictures (PNG, JPEG, GIF, WebP), in the order in which <｜image｜> stands in the prompt",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE.jsonl",
        help="completions in the order in which they finish; ids that it holds already are skipped",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): most likely token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling, each request has its own")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument(
        "--prefill",
        choices=("replay", "exact"),
        default="replay",
        help="replay (default): the decoder sees the last positions of a prompt; exact: all",
    )
    parser.add_argument("--chunk", type=positive, metavar="N", help="longest prefill chunk")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="requests that decode together at most")
    parser.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="positions of a request (prompt and new tokens); default: the model's maximum",
    )
    parser.add_argument(
        "--weights",
        choices=("packed", "plain"),
        help="keep quantised weights packed, or multiply them out; default: as they are stored",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="one compiled shape for all: a request gives the same tokens alone and in any batch",
    )
    parser.add_argument(
        "--speculative",
        nargs="?",
        const="auto",
        type=_draft_depth,
        metavar="auto|K",
        help="verify drafts of the DSpark drafter: K a step, or (auto) as many as pay",
    )
    parser.add_argument(
        "--engram",
        choices=("device", "pinned", "mapped"),
        default="device",
        help="where the rows of the n-gram tables lie: with the other weights (default), in pinned host memory, or in "
        "the checkpoint's file; from the host they are read ahead",
    )
    add_mesh_options(parser)


def _leads(parallel: Parallel | None) -> bool:
    """Whether this process is the one that prints and writes files."""
    if parallel is None:
        return True
    from dsv41.sharding.distributed import is_leader

    return is_leader()


def _draft_depth(text: str) -> int | str:
    """The value of ``--speculative``."""
    return text if text == "auto" else positive(text)


def run(args: argparse.Namespace) -> int:
    from dsv41.commands.output import ChatOutput, TextOutput
    from dsv41.commands.prompt_file import ChatFormats
    from dsv41.config import load_config
    from dsv41.defaults import NANO_DIRECTORY, default_config
    from dsv41.inference.requests import Request, prompt_tokens
    from dsv41.loading import model_tokenizer

    if (args.prompts is None) != (args.out is None):
        raise OptionError("--prompts and --out belong together")
    if args.image and args.prompts is not None:
        raise OptionError("--image: a line of --prompts names its own pictures, in 'images'")
    if args.image and args.chat is not None:
        raise OptionError("--image: the messages of --chat name their own pictures")
    if args.random and args.checkpoint is not None:
        raise OptionError("--random: there is a --checkpoint")
    if args.checkpoint is None and not args.random:
        for option, given in (("--chat", args.chat), ("--image", args.image)):
            if given:
                raise OptionError(f"{option}: the embedded model knows text alone; give --checkpoint, or --random")
        args.checkpoint = NANO_DIRECTORY
    config = default_config() if args.checkpoint is None else load_config(args.checkpoint)
    if args.engram == "mapped" and args.checkpoint is None:
        raise OptionError("--engram mapped: only the table of a --checkpoint can be mapped")
    if args.weights == "packed" and config.quantization is None:
        raise OptionError("--weights packed: the model's weights are not quantised")
    parallel = mesh_of(args)
    if not _leads(parallel):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    options = _engine_options(args)
    try:
        limit = options.length_limit(config)
    except ValueError as error:
        raise OptionError(f"--max-length: {error}") from None
    try:
        options.check_speculation(config)
    except ValueError as error:
        raise OptionError(f"--{error}") from None
    tokenizer = model_tokenizer(config, args.checkpoint)
    defaults = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "seed", "stop")}
    if args.prompts is not None:
        chat = ChatFormats(config, tokenizer)
        check = functools.partial(prompt_tokens, config=config, tokenizer=tokenizer, max_length=limit)
        return _run_file(args, config, options, parallel, defaults, check, chat)
    if args.chat is not None:
        chat_prompt = ChatFormats(config, tokenizer).get().read(args.chat)
        fields = {**defaults, **chat_prompt.options, "tokens": chat_prompt.tokens, "images": chat_prompt.images}
        request = Request(**fields)
        prompt_tokens(request, config, tokenizer, limit)
        return _run_prompt(_engine(args, config, options, parallel), request, ChatOutput(chat_prompt.reader()))
    prompt = args.prompt if args.prompt is not None else read_text(args.prompt_file)
    request = Request(prompt=prompt, images=args.image, **defaults)
    prompt_tokens(request, config, tokenizer, limit)
    return _run_prompt(_engine(args, config, options, parallel), request, TextOutput())


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    from dsv41.inference.engine import EngineOptions
    from dsv41.inference.prefill import PrefillOptions

    sizes = PrefillOptions().chunk_sizes
    if args.chunk is not None:
        sizes = (*(size for size in sizes if size < args.chunk), args.chunk)
    return EngineOptions(
        max_batch=args.batch,
        max_length=args.max_length,
        prefill=PrefillOptions(args.prefill, sizes),
        deterministic=args.deterministic,
        speculative=args.speculative,
        engram=args.engram,
    )


def _engine(args: argparse.Namespace, config: ModelConfig, options: EngineOptions, parallel: Parallel | None) -> Engine:
    from dsv41.inference.engine import Engine
    from dsv41.sharding.parallel import SINGLE

    parallel = parallel or SINGLE

    if args.checkpoint is None:
        print(_NOISE, file=sys.stderr)
        return Engine.random(config, options, seed=_WEIGHTS_SEED, parallel=parallel)
    packed = None if args.weights is None else args.weights == "packed"
    with _bar("weights", "B") as bar:

        def show(progress: Any) -> None:
            bar.update(progress.bytes_read - bar.n)

        return Engine.from_checkpoint(args.checkpoint, options, packed_weights=packed, progress=show, parallel=parallel)


def _run_prompt(engine: Engine, request: Request, output: TextOutput | ChatOutput) -> int:
    completion = None
    bar = _bar("prompt", "tokens")

    def on_prefill(_: int, tokens: int) -> None:
        bar.update(tokens)

    for event in engine.stream([request], on_prefill):
        bar.close()  # before the first text, so that the two do not mix on a terminal
        output.push(event.text)
        completion = event.completion
    output.finish(completion.finish_reason)
    _print_figures([completion], engine)
    return 0


def _run_file(
    args: argparse.Namespace,
    config: ModelConfig,
    options: EngineOptions,
    parallel: Parallel | None,
    defaults: dict[str, Any],
    check: Any,
    chat: ChatFormats,
) -> int:
    from dsv41.commands.prompt_file import CompletionFile, read_requests

    requests, conversations = read_requests(args.prompts, defaults, check, chat)
    with CompletionFile(args.out, writes=_leads(parallel)) as out:
        if out.dropped_line:
            print(f"{args.out}: dropped an unfinished last line", file=sys.stderr)
        remaining = [request for request in requests if request.id not in out.done]
        skipped = len(requests) - len(remaining)
        if skipped:
            print(f"{args.out}: {skipped} of {len(requests)} requests are done already", file=sys.stderr)
        if not remaining:
            return 0
        engine = _engine(args, config, options, parallel)
        completions = []
        with _bar("requests", "", total=len(requests), initial=skipped) as bar:
            for event in engine.stream(remaining):
                if event.completion is not None:
                    out.write(event.completion, conversations.get(event.completion.id))
                    completions.append(event.completion)
                    bar.update()
    _print_figures(completions, engine)
    return 0


def _print_figures(completions: Sequence[Completion], engine: Engine) -> None:
    print(_figures_line(completions, engine), file=sys.stderr)
    if engine.statistics is not None:
        print(_acceptance_line(engine.statistics), file=sys.stderr)
    if engine.lookups is not None:
        print(_lookup_line(engine.lookups), file=sys.stderr)


def _lookup_line(lookups: Lookups) -> str:
    """What Engram's look-ups did: rows, bytes, and how much of the time stood in the way."""
    return (
        f"Engram: {lookups.rows_read:,} rows read of {lookups.rows_asked:,} asked for, {lookups.bytes_read:,} B in "
        f"{lookups.steps} look-ups · {lookups.lookup_s * 1e3:.1f} ms, of which {lookups.hidden_s * 1e3:.1f} ms behind "
        f"the layers before it and other work, {lookups.waited_s * 1e3:.1f} ms waited for"
    )


def _acceptance_line(statistics: AcceptanceStatistics) -> str:
    """What speculation did: how long a step was in the mean, and how often each position of a block was right."""
    shares = [
        f"{accepted}/{reached} ({accepted / reached:.0%})"
        for accepted, reached in zip(statistics.accepted, statistics.reached, strict=True)
        if reached
    ]
    return (
        f"speculation: {1 + statistics.mean_accepted:.2f} tokens a step in {statistics.steps} steps, mean accepted "
        f"length {statistics.mean_accepted:.2f} · accepted by position {', '.join(shares) or '–'}"
    )


def _bar(description: str, unit: str, **options: Any) -> Any:
    """A progress bar on stderr if that is a terminal; it vanishes when it is closed."""
    from tqdm import tqdm

    return tqdm(desc=description, unit=unit, unit_scale=True, disable=None, file=sys.stderr, leave=False, **options)


def _figures_line(completions: Sequence[Completion], engine: Engine) -> str:
    """One line of figures; of several completions the medians, and the throughput of the whole run."""
    figures = [completion.figures for completion in completions]
    new, prompt = sum(f.new_tokens for f in figures), sum(f.prompt_tokens for f in figures)
    wall = max(f.queue_s + f.total_s for f in figures)

    def median(name: str) -> str:
        values = [getattr(f, name) for f in figures if getattr(f, name) is not None]
        return f"{statistics.median(values) * 1e3:.1f} ms" if values else "–"

    subject = f"{len(figures)} requests: " if len(figures) > 1 else ""
    return (
        f"{subject}{prompt} prompt tokens, {new} new · TTFT {median('ttft_s')} · inter-token first "
        f"{median('first_inter_token_s')}, steady {median('steady_inter_token_s')} · {new / wall:.1f} tokens/s · "
        f"state {max(f.state_bytes for f in figures):,} B a request, {figures[0].batch_state_bytes:,} B in all · "
        f"compiled in {engine.compile_s:.1f} s"
    )
