"""Two plain questions to a model: does it know its texts better than counting does, and does it write words?"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import jax
import numpy as np

from dsv41.evaluation.ngram import bits_per_byte
from dsv41.evaluation.quality import Row, Subject
from dsv41.inference.engine import Engine
from dsv41.inference.requests import Request
from dsv41.model import Model
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.data import DataConfig, held_out_batches, load_documents, load_texts
from dsv41.training.forward import TrainBatch, Variables, alignment, forward
from dsv41.training.losses import cross_entropy

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


@functools.partial(jax.jit, static_argnums=0)
def _nats(model: Model, variables: Variables, batch: TrainBatch) -> jax.Array:
    return cross_entropy(model, variables, forward(model, variables, batch).hidden, batch.targets).loss


def baselines(subject: Subject, data: DataConfig, tokenizer: Tokenizer, orders: Sequence[int]) -> list[Row]:
    """Bits per byte of all held-out documents: the model's, and interpolated byte n-grams' of the same training text.

    Both predict every token, or byte, of a document and its end; both are divided by the bytes of the texts.

    Args:
      subject: a model with the settings of training (:meth:`~dsv41.settings.Settings.for_training`).
      orders: of the n-grams.

    Returns:
      rows of ``model``, ``bits_per_byte`` and ``of_model``: this row's bits over the model's.
    """
    config = subject.model.settings.config
    _, documents = load_documents(data, tokenizer, config.bos_token_id, config.eos_token_id)
    batches = held_out_batches(data, documents, alignment(subject.model.settings))
    nats = sum(float(_nats(*subject, TrainBatch(**batch))) for batch in batches)
    bits = {"this": nats / math.log(2) / documents.text_bytes}
    train, held_out = load_texts(data)
    bits |= {f"byte {order}-gram": bits_per_byte(train, held_out, order) for order in orders}
    return [{"model": name, "bits_per_byte": value, "of_model": value / bits["this"]} for name, value in bits.items()]


def words(
    engine: Engine, known: Sequence[str], prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
) -> list[Row]:
    """How many of the words that a model writes are words of its training text.

    Args:
      known: the training texts.
      prompts: tokens to go on from; sample i takes seed i.
      new_tokens: of each sample. The last word of each may be cut off and does not count.

    Returns:
      one row: ``samples``, ``words``, ``known`` (share of them), ``distinct`` words.
    """
    vocabulary = {word.lower() for text in known for word in _WORD.findall(text)}
    requests = [
        Request(tokens=list(prompt), max_new_tokens=new_tokens, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    written: list[str] = []
    for completion in engine.generate(requests):
        found = [word.lower() for word in _WORD.findall(completion.text)]
        written += found if completion.finish_reason == "stop" else found[:-1]
    share = float(np.mean([word in vocabulary for word in written])) if written else 0.0
    return [{"samples": len(requests), "words": len(written), "known": share, "distinct": len(set(written))}]
