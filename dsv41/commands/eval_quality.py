"""``dsv41 eval quality``: what each approximation costs a trained model, in bits of held-out text."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv41.commands.options import OptionError, positive, write_file

if TYPE_CHECKING:
    from dsv41.evaluation.quality import Row, Subject, Texts
    from dsv41.training.data import DataConfig

_BESIDE = {
    "bits_per_byte": "standard_error",
    "bits_per_token": "standard_error",
    "difference": "difference_error",
    "selected": "own_error",
    "best": "best_error",
}
"""Columns that are shown with their standard error."""


def add_parser(kinds: argparse._SubParsersAction) -> None:
    parser = kinds.add_parser(
        "quality",
        help="what rounding, replay, prefix hits, pool, top-k and reuse cost a trained model",
        description="Measures a trained model on held-out text: every approximation against the same weights without "
        "it, text by text.",
    )
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, required=True, metavar="DIR", help="trained checkpoint, as it is served"
    )
    parser.add_argument(
        "--plain",
        type=_named,
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="checkpoints with float weights, for the question of rounding; first the one that --checkpoint is of",
    )
    parser.add_argument(
        "--reindexed",
        type=pathlib.Path,
        metavar="DIR",
        help="checkpoint of a model trained alike in which every layer chooses, for the question of reindexing",
    )
    parser.add_argument(
        "--question", nargs="+", choices=QUESTIONS, metavar="Q", help=f"of {', '.join(QUESTIONS)}; default: all"
    )
    parser.add_argument("--texts", type=positive, default=24, metavar="N", help="how many, for each question")
    parser.add_argument("--corpus", default="bibles", metavar="NAME", help="packaged corpus, its held-out documents")
    parser.add_argument(
        "--text", type=pathlib.Path, nargs="+", metavar="FILE", help="held-out documents (.txt, .jsonl) in its place"
    )
    parser.add_argument(
        "--length", type=positive, metavar="N", help="tokens of a training row; default: the length before YaRN"
    )
    parser.add_argument("--continuation", type=positive, default=32, metavar="N", help="tokens that follow a prompt")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of names in phrases")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="all rows by question")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="the tables as a document")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="one figure, .png or .svg")


def _named(text: str) -> tuple[str, pathlib.Path]:
    name, equals, directory = text.partition("=")
    if not name or not equals or not directory:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, pathlib.Path(directory)


class _Study:
    """The models and texts of all questions; what several need is made once."""

    def __init__(self, args: argparse.Namespace) -> None:
        from dsv41.config import load_config
        from dsv41.loading import model_tokenizer

        self.args = args
        self.config = load_config(args.checkpoint)
        text = self.text = self.config.text
        self.tokenizer = model_tokenizer(self.config, args.checkpoint)
        if self.tokenizer is None:
            raise OptionError(f"--checkpoint: {args.checkpoint} has no tokenizer.json")
        self.window = text.sliding_window
        self.length = text.rope_scaling.original_max_position_embeddings if args.length is None else args.length
        if self.length < 2 * self.window + args.continuation:
            raise OptionError(f"--length: {self.length} is less than two windows and a continuation")
        # Room for prompts, and distances, of twice the training length.
        self.long = 2 * self.length + max(2 * self.window, args.continuation)
        if self.long > text.max_position_embeddings:
            raise OptionError(
                f"--length: {self.length}; {self.long} positions exceed max_position_embeddings "
                f"{text.max_position_embeddings}"
            )

    @functools.cached_property
    def packed(self) -> Subject:
        from dsv41.evaluation.quality import Subject
        from dsv41.loading import checkpoint_variables
        from dsv41.model import Model
        from dsv41.settings import Settings

        model = Model(Settings.default(self.config))
        return Subject(model, checkpoint_variables(model, self.args.checkpoint, self.tokenizer))

    def trained(self, directory: pathlib.Path, preset: str = "full") -> Subject:
        """A checkpoint in the pass of training, under a rounding policy."""
        from dsv41.config import load_config
        from dsv41.evaluation.quality import Subject
        from dsv41.loading import checkpoint_variables, model_tokenizer
        from dsv41.model import Model
        from dsv41.numerics.rounding import RoundingPolicy
        from dsv41.settings import Settings

        config = load_config(directory)
        model = Model(Settings.for_training(config, RoundingPolicy.preset(preset)))
        return Subject(model, checkpoint_variables(model, directory, model_tokenizer(config, directory)))

    def plain(self, directory: pathlib.Path) -> Subject:
        from dsv41.config import load_config

        if load_config(directory).quantization is not None:
            raise OptionError(f"--plain: {directory} has quantised weights")
        return self.trained(directory, "off")

    @functools.cached_property
    def documents(self) -> tuple[Sequence[str], Sequence[str]]:
        """Texts to draw names from, and held-out texts."""
        from dsv41.training.data import load_texts

        train, held_out = load_texts(self.data())
        return train, train if self.args.text is not None else held_out

    def data(self, rows: int = 1) -> DataConfig:
        from dsv41.training.data import DataConfig

        if self.args.text is None:
            return DataConfig(self.length, rows, corpus=self.args.corpus)
        return DataConfig(self.length, rows, files=tuple(self.args.text), holdout=0.0)

    @functools.cached_property
    def short_texts(self) -> Texts:
        return self._texts(self.length)

    @functools.cached_property
    def long_texts(self) -> Texts:
        return self._texts(self.long)

    def _texts(self, length: int) -> Texts:
        from dsv41.evaluation.quality import choose_texts

        return choose_texts(self.documents[1], self.tokenizer, self.config.bos_token_id, length, self.args.texts)

    def windows(self, *factors: float, below: int) -> list[int]:
        """Even multiples of the window below a bound."""
        return [n for factor in factors if (n := int(factor * self.window) // 2 * 2) < below]


def _rounding(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import rounding

    plain = {name: study.plain(directory) for name, directory in study.args.plain}
    return rounding(study.packed, plain, study.short_texts)


def _replay(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import replay

    last = study.length - study.args.continuation
    prompts = [*study.windows(1.5, 2, 3, 4, 6, below=last), last]
    cuts = [(prompt, study.window) for prompt in prompts]
    return replay(study.packed, study.short_texts, cuts, study.args.continuation)


def _replay_length(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import replay

    prompt = 2 * study.length
    # As many windows as the decoder has layers reach as far back as anything does: a longer replay is exact.
    depth = len(study.packed.model.settings.table.decoder)
    factors = [factor for factor in (1, 2, 3, 4, 6, 8) if factor <= depth]
    cuts = [(prompt, length) for length in study.windows(*factors, below=prompt)]
    return replay(study.packed, study.long_texts, cuts, study.args.continuation)


def _prefix(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import prefix
    from dsv41.inference.prefill import usable_hit

    prompt = study.length - study.args.continuation
    hits = [usable_hit(study.packed.model.settings, hit) for hit in range(study.window, prompt, study.window)]
    return prefix(study.packed, study.short_texts, prompt, hits, study.args.continuation)


def _pool(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import pool

    if study.text.candidate_source_layer_id is None:
        raise OptionError("--question pool: candidate_source_layer_id: the model has no candidate pool")
    own, length = study.text.candidate_topk_blocks, study.length
    return pool(
        study.packed, study.long_texts, (own // 4, own // 2, own), ((length // 2, length), (length, 2 * length))
    )


def _top_k(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import top_k

    own = study.text.index_topk
    sizes = (own // 4, own // 2, own, 2 * own, 4 * own)
    return top_k(study.packed, study.short_texts, sizes, ((study.length // 2, study.length),))


def _reuse(study: _Study) -> list[Row]:
    from dsv41.evaluation.retrieval import reuse

    return reuse(study.packed, study.short_texts)


def _needle(study: _Study) -> list[Row]:
    from dsv41.evaluation.retrieval import needle, proper_names, random_phrases

    names = proper_names(study.documents[0])
    phrases = random_phrases(study.tokenizer, names, study.args.texts, study.args.seed)
    longest, lead = max(len(p.beginning) + len(p.end) for p in phrases), study.window // 2
    distances = study.windows(1, 2, 4, 6, 8, 16, below=study.long - lead - longest)
    distances = [distance for distance in distances if distance >= longest]
    near = [d for d in distances if d <= study.length - lead - longest]
    far = distances[len(near) :]
    rows = needle(study.packed, study.short_texts, phrases, near, lead)
    return rows + (needle(study.packed, study.long_texts, phrases, far, lead) if far else [])


def _reindexing(study: _Study) -> list[Row]:
    from dsv41.evaluation.quality import reindexing

    return reindexing(study.trained(study.args.checkpoint), study.trained(study.args.reindexed), study.short_texts)


def _baseline(study: _Study) -> list[Row]:
    from dsv41.evaluation.samples import baselines

    return baselines(study.trained(study.args.checkpoint), study.data(rows=16), study.tokenizer, (5, 6, 7))


def _words(study: _Study) -> list[Row]:
    from dsv41.evaluation.samples import words
    from dsv41.inference.engine import Engine, EngineOptions

    prompt = 8
    engine = Engine.from_checkpoint(study.args.checkpoint, EngineOptions(max_batch=8, max_length=256))
    prompts = [tokens[:prompt].tolist() for tokens in study.short_texts.tokens]
    return words(engine, study.documents[0], prompts, 256 - prompt, temperature=0.7)


class Question(NamedTuple):
    """What is asked.

    Attributes:
      title: of its table.
      note: how to read it.
      ask: gives the rows.
    """

    title: str
    note: str
    ask: Callable[[_Study], list[Row]]


QUESTIONS: Mapping[str, Question] = {
    "baseline": Question(
        "Against counting",
        "All held-out documents with every rounding on, against interpolated byte n-grams (modified Kneser-Ney) of the "
        "same training text.",
        _baseline,
    ),
    "words": Question(
        "Words",
        "Of the words written at temperature 0.7, after eight tokens of each text, the share that stands in the "
        "training text.",
        _words,
    ),
    "rounding": Question(
        "Rounding",
        "Float checkpoints under each policy, against their own 'off'; the packed checkpoint by exact prefill in one "
        "chunk, against 'full' of the first float one: what is stored is what training rounded to.",
        _rounding,
    ),
    "replay": Question(
        "Bounded replay by prompt length",
        "The tokens after a prompt, after a replay of one window, against exact prefill (where all is replayed).",
        _replay,
    ),
    "replay-length": Question(
        "Bounded replay by its length",
        "The same after a prompt of twice the training length. As many windows as the decoder has layers are exact.",
        _replay_length,
    ),
    "prefix": Question(
        "Prefix hits whose rings are lost",
        "The encoder replays a window before the hit, the decoder the prompt's last window; against no hit.",
        _prefix,
    ),
    "pool": Question(
        "Candidate pool",
        "Against a pool of all blocks, for positions 'from' up to below 'to', inside of the training length and "
        "beyond.",
        _pool,
    ),
    "top-k": Question(
        "Entries that a query attends to",
        "The same weights with another top-k, against the configuration's, in the second half of a training row.",
        _top_k,
    ),
    "reuse": Question(
        "Reused selections",
        "Of a layer's attention the share on global entries, if it saw all of them; of that the share on the selection "
        "that it is shown, on the best of that size by its own logits, and on any of that size if all were looked at "
        "alike.",
        _reuse,
    ),
    "reindexing": Question(
        "Reusing against reindexing",
        "Of two models trained alike, so many layers choose their own entries and so many take another's choice; every "
        "rounding on, against the one that reuses none. Training twice differs too, which is in no standard error.",
        _reindexing,
    ),
    "needle": Question(
        "A phrase read once",
        "The end of a phrase of three random names, its beginning given, if it stood in the text before, so many "
        "tokens back, and if it did not.",
        _needle,
    ),
}


def run(args: argparse.Namespace) -> int:
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        raise OptionError(f"--plot: {args.plot} is neither .png nor .svg")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:  # known before minutes of work
        raise OptionError("--plot: needs matplotlib, from the extra dsv41[plot]")
    study = _Study(args)
    results: dict[str, list[Row]] = {}
    questions = args.question or _questions(args)
    if args.text is not None and "baseline" in questions:
        raise OptionError("--question baseline: --text has no training texts; it needs --corpus")
    if args.reindexed is None and "reindexing" in questions:
        raise OptionError("--question reindexing: needs --reindexed")
    for name in questions:
        results[name] = QUESTIONS[name].ask(study)
        _print(QUESTIONS[name], results[name])
    if args.json is not None:
        write_file(args.json, json.dumps(results, indent=1).encode() + b"\n")
    if args.markdown is not None:
        write_file(args.markdown, markdown(results, study.length).encode())
    if args.plot is not None:
        from dsv41.evaluation.quality_plot import plot_quality

        plot_quality(results, args.plot)
    return 0


def _questions(args: argparse.Namespace) -> list[str]:
    """All for which there is what they need."""
    without = {"baseline"} if args.text is not None else set()
    if args.reindexed is None:
        without.add("reindexing")
    return [name for name in QUESTIONS if name not in without]


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """A row's cells as text: values with their standard errors behind them."""

    def cell(name: str, value: Any) -> str:
        if value is None:
            return "–"
        if not isinstance(value, float):
            return str(value)
        error = row.get(_BESIDE.get(name, ""))
        sign = "+" if name == "difference" else ""
        return f"{value:{sign}.4f}" if error is None else f"{value:{sign}.4f} ± {error:.4f}"

    return {name: cell(name, value) for name, value in row.items() if name not in _BESIDE.values()}


def markdown(results: Mapping[str, Sequence[Row]], length: int) -> str:
    """A document of all tables.

    Args:
      length: tokens of a training row.
    """
    parts = [
        "# What each approximation costs\n",
        "Measured by `dsv41 eval quality` on held-out text; a value with its standard error over texts, and how far it "
        f"is above its baseline, text by text. Training rows have {length} tokens.\n",
    ]
    for name, rows in results.items():
        cells = [shown(row) for row in rows]
        parts.append(f"## {QUESTIONS[name].title}\n\n{QUESTIONS[name].note}\n")
        lines = [[header.replace("_", " ") for header in cells[0]], ["---:"] * len(cells[0])]
        lines += [list(row.values()) for row in cells]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
    return "\n".join(parts)


def _print(question: Question, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    cells = [shown(row) for row in rows]
    table = Table(title=question.title, title_justify="left", caption=question.note, caption_justify="left")
    for name in cells[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in cells:
        table.add_row(*row.values())
    (Console() if sys.stdout.isatty() else Console(width=140, no_color=True)).print(table)
