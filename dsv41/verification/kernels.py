"""The kernels of the present platform against XLA: the same steps from the same state, at a model's real widths.

Goldens are small; a kernel's tiles, its shared memory and its rounding only show at the sizes that it was made for.
Random weights do for that, and one layer of each kind.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig
from dsv41.evaluation.widths import filled_state
from dsv41.loading import device_random_variables
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.shallow import one_of_each_kind
from dsv41.state.request import ModelState
from dsv41.verification import capture
from dsv41.verification.table import Row, at_most, greedy_agreement, relative_rms, reported
from pallas_kernels import backend

RESPONSE = 2.0
"""How much further from XLA's results a kernel's may be than XLA's own are when the embeddings move by at most one
bfloat16 step. FP8 and FP4 rounding turn the smallest differences (another order of a sum) into flips of 6 % and more of
single values, and how many depends on the widths, the depth and the weights: so the yardstick is measured beside."""

_NOISE = 2.0**-8


@dataclasses.dataclass(frozen=True)
class Extent:
    """What is run.

    Attributes:
      rows: requests of the batch.
      context: tokens of each in memory before anything is compared.
      chunk: width of prefill chunks; the compared one has one token less, so that rows are padded.
      steps: decode steps that are compared.
    """

    rows: int = 2
    context: int = 18 * 1024
    chunk: int = 512
    steps: int = 2

    def within(self, positions: int) -> Extent:
        """As much of it as a model of so many positions can take."""
        chunk = min(self.chunk, positions // 4)
        return dataclasses.replace(self, chunk=chunk, context=min(self.context, positions - chunk - self.steps))


def compare_back_ends(
    model: Model,
    variables: Mapping,
    native: str,
    extent: Extent,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Rows for decode steps and for a padded prefill chunk, both after a long context of random entries.

    Each step or chunk runs four times from the same state: by XLA, by the back end ``native``, by that with XLA's
    selections forced, which leaves rounding as the only difference, and by XLA with those selections and embeddings
    moved in their last bit (:data:`RESPONSE`). XLA's state goes on to the next.
    """
    text = model.settings.text
    state = filled_state(model.settings, extent.rows, extent.context, max(extent.chunk, extent.steps))
    ids = np.random.default_rng(0).integers(3, text.vocab_size, (extent.rows, max(extent.chunk, extent.steps)))

    rows = []

    def compare(group: str, state: ModelState, tokens: np.ndarray, width: int) -> ModelState:
        progress(group)
        after, compared = _compare(model, variables, state, tokens, width, native, group)
        rows.extend(compared)
        return after

    # Decode first: its programs compile soonest.
    if extent.steps:
        progress("compiling decode")
        _compile(model, variables, native, state, ids[:, :1], 1)
    stepped = state
    for step in range(extent.steps):
        stepped = compare(f"decode step {step}", stepped, ids[:, step : step + 1], 1)
    progress("compiling prefill")
    _compile(model, variables, native, state, ids[:, : extent.chunk - 1], extent.chunk)
    compare("prefill chunk", state, ids[:, : extent.chunk - 1], extent.chunk)
    return rows


def _compile(model: Model, variables: Mapping, native: str, state: ModelState, tokens: np.ndarray, width: int) -> None:
    """Runs a chunk once by each back end, side by side: compiling is what takes long."""

    def run(name: str) -> None:
        with backend.use(name):
            capture.run_chunk(model, variables, state, tokens, width)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for done in [pool.submit(run, name) for name in dict.fromkeys((native, "xla"))]:
            done.result()


def _compare(
    model: Model, variables: Mapping, state: ModelState, tokens: np.ndarray, width: int, native: str, group: str
) -> tuple[ModelState, list[Row]]:
    settings = model.settings

    def run(name: str, entries: Mapping[int, np.ndarray], pool: np.ndarray | None, variables: Mapping = variables):
        with backend.use(name):
            return capture.run_chunk(model, variables, state, tokens, width, entries, pool)

    after, wanted = run("xla", {}, None)
    chosen = {source: wanted.layers[source]["topk"] for source in settings.table.index_sources}
    source = settings.text.candidate_source_layer_id
    pool = None if source is None else _members(wanted.layers[source]["candidate_blocks"], settings)
    _, forced = run(native, chosen, pool)
    _, free = run(native, {}, None)
    _, moved = run("xla", chosen, pool, _moved(variables))

    logits = relative_rms(forced.logits, wanted.logits)
    response = relative_rms(moved.logits, wanted.logits)
    note = f"largest |logit| {np.abs(wanted.logits).max():.3g}, XLA moved by a step {response:.3g}"
    rows = [at_most(group, "logits, selection forced", "relative RMS", logits, RESPONSE * response, note)]
    agreement = greedy_agreement(forced.logits, wanted.logits)
    rows.append(reported(group, "logits, selection forced", "greedy tokens", agreement))
    for layer, kind in ((row.index, row.kind) for row in settings.table.layers):
        error = relative_rms(forced.layers[layer]["layer"], wanted.layers[layer]["layer"])
        name = f"{kind.mode.value}{f', ratio {kind.ratio}' if kind.ratio else ''}"
        moves = relative_rms(moved.layers[layer]["layer"], wanted.layers[layer]["layer"])
        note = f"{name}, XLA moved by a step {moves:.3g}"
        rows.append(at_most(group, f"streams after layer {layer}", "relative RMS", error, RESPONSE * moves, note))
        same = common_share(forced.layers[layer]["router_idx"], wanted.layers[layer]["router_idx"])
        rows.append(reported(group, f"experts of layer {layer}", "in common", same))
    for source, entries in chosen.items():
        # Forced: the layers below are as near as rounding allows, and the source still says what it would choose.
        others = 1 - common_share(forced.layers[source]["topk"], entries)
        moves = 1 - common_share(moved.layers[source]["topk"], entries)
        name, note = f"entries chosen by layer {source}", f"XLA moved by a step {moves:.3g}"
        rows.append(at_most(group, name, "share not XLA's", others, RESPONSE * max(moves, 1 / entries.size), note))
    error = relative_rms(free.logits, wanted.logits)
    rows.append(reported(group, "logits, selection free", "relative RMS", error))
    return after, rows


def _moved(variables: Mapping) -> Mapping:
    """The variables with every embedding value moved by at most one bfloat16 step."""
    embed = variables["params"]["embed"]
    factor = 1 + _NOISE * jax.random.uniform(jax.random.key(0), embed["weight"].shape, minval=-1.0)
    weight = (embed["weight"].astype(jnp.float32) * factor).astype(embed["weight"].dtype)
    return {**variables, "params": {**variables["params"], "embed": {**embed, "weight": weight}}}


def _members(blocks: np.ndarray, settings: Settings) -> np.ndarray:
    """Entries of candidate blocks ``[…, blocks]`` (−1 = none), as :func:`capture.forced_selection` takes them."""
    size = settings.text.candidate_block_size
    member = np.zeros((*blocks.shape[:-1], max(int(blocks.max()), 0) + 2), bool)
    np.put_along_axis(member, np.where(blocks < 0, member.shape[-1] - 1, blocks), True, axis=-1)
    return np.repeat(member[..., :-1], size, axis=-1)


def common_share(a: np.ndarray, b: np.ndarray) -> float:
    """Share of the indices ≥ 0 of ``b`` (last axis) that ``a`` has too, over all rows; 1 if there are none."""
    limit = int(max(a.max(initial=0), b.max(initial=0))) + 2
    # Row by row keys make one sorted list; −1 becomes a key that the other side lacks.
    row = np.arange(a[..., 0].size, dtype=np.int64)[:, None] * limit
    keys_a = (row + np.where(a < 0, limit - 1, a).reshape(len(row), -1)).ravel()
    live = b.reshape(len(row), -1) >= 0
    keys_b = (row + b.reshape(len(row), -1))[live]
    return float(np.isin(keys_b, keys_a).mean()) if keys_b.size else 1.0


def verify_kernels(
    config: ModelConfig, extent: Extent | None = None, progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Compares the present platform's kernels with XLA on one layer of each kind, with random weights."""
    model = Model(Settings.default(one_of_each_kind(config)))
    progress("random weights")
    variables = device_random_variables(model, 0)
    extent = (extent or Extent()).within(config.text.max_position_embeddings)
    return compare_back_ends(model, variables, backend.preferred(), extent, progress)
